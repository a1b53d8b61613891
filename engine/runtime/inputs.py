"""A plan becomes device tensors, through one staged copy a step.

The arrays of a step are laid out one after the other in a byte buffer: written on the host through
numpy views, copied to the device at once, read there through torch views at the same offsets. The
layout depends on the step's counts alone, so a captured step, whose counts are fixed, finds its
inputs at the same addresses each time. Two host buffers take turns: a step is staged while the one
before it may not have been copied yet, but after the one before that was waited for. What a buffer
holds of the last step but one of the same requests, as long as these only decode, stays there.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.api import (
    SHARED_TILE_ROWS,
    BatchMeta,
    DeviceRuntime,
    SamplingRows,
    SharedPrefixes,
)
from ..core.plan import FROM_DEVICE, StepPlan
from .sampler import SlotTable

ALIGN = 64  # bytes; every array starts on its own cache line

# name, dtype, which count gives its length. The arrays whose length a graph does not fix come last.
FIELDS = (
    ("tokens", np.int64, "tokens"),
    ("positions", np.int64, "tokens"),
    ("out_slots", np.int64, "tokens"),
    ("window_out_slots", np.int64, "tokens if windowed"),
    ("logit_tokens", np.int64, "logits"),
    ("sample_slots", np.int64, "samples"),
    ("seeds", np.int64, "samples"),
    ("qo_indptr", np.int32, "rows+1"),
    ("kv_lens", np.int32, "rows"),
    ("slots", np.int32, "rows"),
    ("sample_positions", np.int32, "samples"),
    ("top_k", np.int32, "samples"),
    ("temperature", np.float32, "samples"),
    ("top_p", np.float32, "samples"),
    ("min_p", np.float32, "samples"),
    ("shared_tile_rows", np.int32, "shared tiles x rows"),
    ("shared_tile_lens", np.int32, "shared tiles"),
    ("shared_row_lens", np.int32, "rows if shared"),
    ("page_entries", np.int64, "pages"),
    ("page_ids", np.int32, "pages"),
    ("window_page_ids", np.int32, "pages if windowed"),
)

# Tokens that a step need not read again, at which a pass over shared prefixes is worth its launch:
# on an H200, 1300 of them take a microsecond of a layer (from the L2 cache), the pass about ten.
MIN_SAVED_TOKENS = 16_384
SPARE_TILES = 4  # more groups than these leave tiles that are not full
# Block-table entries that a captured step takes in; more are written before it.
ENTRIES_OF_DECODE, ENTRIES_OF_CHUNKS = 64, 2048


class GraphShape(NamedTuple):
    """What a captured step is padded to.

    Attributes:
        decode_rows: rows of one token, that come first.
        chunk_rows, chunk_tokens: the rows after them, and their tokens together.
        is_shared: whether it reads shared prefixes apart.
    """

    decode_rows: int
    chunk_rows: int = 0
    chunk_tokens: int = 0
    is_shared: bool = False

    @property
    def rows(self) -> int:
        """All rows, padding included."""
        return self.decode_rows + self.chunk_rows

    @property
    def tokens(self) -> int:
        """All tokens, padding included."""
        return self.decode_rows + self.chunk_tokens

    @property
    def entries(self) -> int:
        """New block-table entries, padding included."""
        return self.rows + (ENTRIES_OF_CHUNKS if self.chunk_rows else ENTRIES_OF_DECODE)


@dataclass(slots=True)
class StepInputs:
    """One step's inputs on the device.

    Attributes:
        tokens: int64 [num_tokens] input ids; minus a slot stands for that slot's last token.
        sample_rows: host int array [num_samples], the plan's rows that sample.
        sample_slots: int64 [samples, padding included] their request slots.
        sampling: their sampling parameters, of all of these.
        page_entries: new block-table entries, int64; page_ids, window_page_ids: what they are in
            either table, int32.
    """

    tokens: Tensor
    meta: BatchMeta
    sample_rows: np.ndarray
    sample_slots: Tensor
    sampling: SamplingRows
    page_entries: Tensor
    page_ids: Tensor
    window_page_ids: Tensor


class _Layout(NamedTuple):
    """Where the arrays of a step lie: name, type, byte offset, bytes; and where they end."""

    arrays: tuple[tuple[str, Any, int, int], ...]
    num_bytes: int

    @classmethod
    def of(cls, counts: dict[str, int]) -> _Layout:
        arrays, offset = [], 0
        for name, dtype, count in FIELDS:
            size = counts[count] * np.dtype(dtype).itemsize
            arrays.append((name, dtype, offset, size))
            offset += -(-size // ALIGN) * ALIGN
        return cls(tuple(arrays), offset)

    def on_host(self, buffer: Tensor) -> dict[str, np.ndarray]:
        raw = buffer.numpy()
        return {name: raw[o : o + size].view(dtype) for name, dtype, o, size in self.arrays}

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[o : o + size].view(TORCH_DTYPE[dtype])
            for name, dtype, o, size in self.arrays
        }


class _Captured(NamedTuple):
    """Where a captured step is staged: for either host buffer its arrays, and whence and whither
    its bytes are copied."""

    arrays: list[dict[str, np.ndarray]]
    copies: list[tuple[Tensor, Tensor]]


class Inputs:
    """Stages plans. Owns the block tables and the buffer of last sampled tokens, all by slot.

    Args:
        num_window_pages: of the page pool of layers with a window, if they have one of their own.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        max_step_tokens: int,
        num_window_pages: int = 0,
    ):
        self.num_window_pages = num_window_pages
        self.max_context = max_pages * page_size  # tokens
        self.page_size = page_size
        self._max_pages = max_pages
        self._device = runtime.device
        self._is_host = runtime.device.type == "cpu"
        # The host's copies: of the block table, and of the one for layers with a window.
        self._tables = [np.zeros((num_slots, max_pages), np.int32)]
        on_device: Any = {"dtype": torch.int32, "device": self._device}
        if num_window_pages:
            self._tables.append(np.zeros((num_slots, max_pages), np.int32))
        self.block_tables = [
            torch.from_numpy(t) if self._is_host else torch.zeros(t.shape, **on_device)
            for t in self._tables
        ]
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        self._capacity = 0
        self._host: list[Tensor] = []
        self._turn = 0
        self._is_fixed = False
        self._captured: dict[GraphShape, _Captured] = {}
        # Of which shape and slots (by identity) each host buffer holds what `_write_rows` writes.
        self._held: list[tuple[GraphShape, np.ndarray] | None] = [None, None]
        # Enough for any step: the buffers must not move once captured steps know their addresses.
        fixed = ALIGN * len(FIELDS) + 64 * (max_step_tokens + num_slots)
        fixed += 4 * (SHARED_TILE_ROWS + 1) * num_shared_tiles(num_slots)
        entry_bytes = 16 if num_window_pages else 12  # where it goes, and the page in each table
        self._reserve(fixed + entry_bytes * num_slots * max_pages)

    def reserve(self, shapes: Iterable[GraphShape], plan: StepPlan) -> None:
        """Have room for captured steps of these shapes; afterwards the buffers stay in place."""
        self._reserve(max(_Layout.of(self._counts(plan, shape)).num_bytes for shape in shapes))
        self._is_fixed = True

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._capacity:
            return
        if self._is_fixed:
            raise RuntimeError(f"a step of {num_bytes} bytes is larger than any that was foreseen")
        pin = self._device.type not in ("cpu", "meta")
        self._capacity = num_bytes
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.staged = (
            self._host[0]
            if self._is_host
            else torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        )

    def stage(
        self, plan: StepPlan, table: SlotTable, shape: GraphShape | None = None
    ) -> StepInputs:
        """Copy a plan to the device.

        Args:
            table: the sampling parameters by slot.
            shape: for a step that is to be captured: pad to this shape. Padding rows are of
                slot 0, have no context, and write nowhere. `apply` is then left to the capture.
        """
        layout = _Layout.of(self._counts(plan, shape))
        self._reserve(layout.num_bytes)
        host = layout.on_host(self._host[self._turn])
        device = layout.on_device(self.staged)
        sample_rows = self._write(plan, table, shape, host)
        self._copy(self.staged[: layout.num_bytes], self._host[self._turn][: layout.num_bytes])
        rows = plan.num_rows if shape is None else shape.rows
        decodes = plan.num_decode_rows if shape is None else shape.decode_rows
        shared = None
        if num_tiles := len(host["shared_tile_lens"]):
            shared = SharedPrefixes(
                device["shared_tile_rows"].view(num_tiles, SHARED_TILE_ROWS),
                device["shared_tile_lens"],
                device["shared_row_lens"],
            )
        meta = BatchMeta(
            num_rows=rows,
            num_tokens=len(host["tokens"]),
            num_decode_rows=decodes,
            page_size=self.page_size,
            qo_indptr=device["qo_indptr"],
            kv_lens=device["kv_lens"],
            slots=device["slots"],
            block_table=self.block_tables[0],
            positions=device["positions"],
            out_slots=device["out_slots"],
            logit_tokens=device["logit_tokens"],
            qo_indptr_cpu=host["qo_indptr"],
            kv_lens_cpu=host["kv_lens"],
            max_kv_len=int(plan.kv_lens.max()),
            shared=shared,
        )
        if self.num_window_pages:
            own, out_slots = self.block_tables[1], device["window_out_slots"]
            meta.windowed = replace(meta, block_table=own, out_slots=out_slots, plans={})
        slots = plan.slots[sample_rows]
        is_any = shape is not None  # a captured step must serve all
        sampling = SamplingRows(
            temperature=device["temperature"],
            top_k=device["top_k"],
            top_p=device["top_p"],
            min_p=device["min_p"],
            seeds=device["seeds"],
            positions=device["sample_positions"],
            all_greedy=not is_any and bool((table.temperature[slots] == 0).all()),
            has_top_k=is_any or bool((table.top_k[slots] < table.vocab_size).any()),
            has_top_p=is_any or bool((table.top_p[slots] < 1).any()),
            has_min_p=is_any or bool((table.min_p[slots] > 0).any()),
        )
        step = StepInputs(
            device["tokens"],
            meta,
            sample_rows,
            device["sample_slots"],
            sampling,
            device["page_entries"],
            device["page_ids"],
            device["window_page_ids"],
        )
        # On the host the table is the host's own, and mostly all tokens are known.
        if shape is None and (not self._is_host or (plan.tokens == FROM_DEVICE).any()):
            self.apply(step)
        return step

    def restage(self, plan: StepPlan, table: SlotTable, shape: GraphShape) -> np.ndarray:
        """Copy a plan to where a captured step of this shape reads it; the rows that sample."""
        if shape not in self._captured:
            layout = _Layout.of(self._counts(plan, shape))
            self._captured[shape] = _Captured(
                [layout.on_host(buffer) for buffer in self._host],
                [(self.staged[: layout.num_bytes], b[: layout.num_bytes]) for b in self._host],
            )
        arrays, copies = self._captured[shape]
        sample_rows = self._write(plan, table, shape, arrays[self._turn])
        self._copy(*copies[self._turn])
        if len(plan.page_ids) > shape.entries:  # rare: many long cached prompts begin at once
            entries, *ids = (
                torch.from_numpy(values[shape.entries :].copy()).to(self._device)
                for values in (self._entries(plan), plan.page_ids, plan.window_page_ids)
            )
            self._update_tables(entries, ids)
        return sample_rows

    def apply(self, step: StepInputs) -> None:
        """Bring block table and input ids up to date; the first work of a step."""
        if not self._is_host:
            self._update_tables(step.page_entries, (step.page_ids, step.window_page_ids))
        last = self.last_tokens.take(step.tokens.neg().clamp_(min=0))
        torch.where(step.tokens < 0, last, step.tokens, out=step.tokens)

    def _update_tables(self, entries: Tensor, ids: Iterable[Tensor]) -> None:
        for table, values in zip(self.block_tables, ids, strict=False):
            table.view(-1)[entries] = values

    def _counts(self, plan: StepPlan, shape: GraphShape | None) -> dict[str, int]:
        if shape is None:
            rows, tokens, samples = plan.num_rows, plan.num_tokens, int(plan.samples.sum())
            is_shared, pages = saves_by_sharing(plan), len(plan.page_ids)
        else:
            rows, tokens, samples = shape.rows, shape.tokens, shape.rows
            is_shared, pages = shape.is_shared, shape.entries
        num_tiles = num_shared_tiles(rows) if is_shared else 0
        return {
            "tokens": tokens,
            "rows": rows,
            "rows+1": rows + 1,
            "samples": samples,
            "logits": samples + sum(map(len, plan.score_tokens.values())),
            "shared tiles": num_tiles,
            "shared tiles x rows": num_tiles * SHARED_TILE_ROWS,
            "rows if shared": rows if is_shared else 0,
            "pages": pages,
            "tokens if windowed": tokens if self.num_window_pages else 0,
            "pages if windowed": pages if self.num_window_pages else 0,
        }

    def _entries(self, plan: StepPlan) -> np.ndarray:
        return plan.page_slots.astype(np.int64) * self._max_pages + plan.page_indices

    def _write(
        self,
        plan: StepPlan,
        table: SlotTable,
        shape: GraphShape | None,
        host: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Fill a step's arrays; returns the rows that sample."""
        rows, tokens, decodes = plan.num_rows, plan.num_tokens, plan.num_decode_rows
        gap = 0  # padding between decode rows and chunks
        if shape is not None:
            if not shape.decode_rows:
                decodes = 0  # the few there are go through the chunks' kernel
            gap = shape.decode_rows - decodes
        num_entries = len(host["page_ids"])
        _fill(host["page_entries"], self._entries(plan)[:num_entries], 0)
        names = ("page_ids", "out_slots"), ("window_page_ids", "window_out_slots")
        for page_of, (name, _) in zip(self._tables, names, strict=False):
            ids = getattr(plan, name)
            page_of[plan.page_slots, plan.page_indices] = ids
            _fill(host[name], ids[:num_entries], 0)

        if tokens == rows:
            row_slots, positions = plan.slots, plan.kv_lens - 1
            begins = np.arange(rows)
        else:
            row_of_token = np.repeat(np.arange(rows), plan.q_lens)
            row_slots = plan.slots[row_of_token]
            begins = np.cumsum(plan.q_lens) - plan.q_lens  # of each row among the plan's tokens
            starts = plan.kv_lens - plan.q_lens - begins
            positions = np.arange(tokens) + starts[row_of_token]
        indices, offsets = np.divmod(positions, self.page_size)
        for page_of, (_, name) in zip(self._tables, names, strict=False):
            out_slots = page_of[row_slots, indices] * np.int64(self.page_size) + offsets
            _spread(host[name], out_slots, decodes, gap, -1)
        # A token that only the device knows is staged as minus its slot, which is at least 1.
        ids = np.where(plan.tokens == FROM_DEVICE, -row_slots, plan.tokens)
        for name, values, padding in (
            ("tokens", ids, 0),
            ("positions", positions, 0),
            ("kv_lens", plan.kv_lens, 0),
        ):
            _spread(host[name], values, decodes, gap, padding)
        if len(host["shared_tile_lens"]):
            tile_shared_groups(
                plan.shared_groups,
                host["shared_tile_rows"].reshape(-1, SHARED_TILE_ROWS),
                host["shared_tile_lens"],
                host["shared_row_lens"],
            )
        if shape is None or shape.chunk_rows:
            self._held[self._turn] = None
            sample_rows = self._write_rows(plan, table, host, begins, decodes, gap)
            _fill(host["sample_positions"], plan.kv_lens[sample_rows], 0)
            return sample_rows
        held = self._held[self._turn]
        if held is None or held[0] != shape or held[1] is not plan.slots:
            self._write_rows(plan, table, host, begins, decodes, gap)
            self._held[self._turn] = shape, plan.slots
        _fill(host["sample_positions"], plan.kv_lens, 0)
        return begins  # in a captured decode step all rows sample

    def _write_rows(
        self,
        plan: StepPlan,
        table: SlotTable,
        host: dict[str, np.ndarray],
        begins: np.ndarray,
        decodes: int,
        gap: int,
    ) -> np.ndarray:
        """Fill the arrays that stay the same while the same requests decode, as `_write`."""
        rows, tokens = plan.num_rows, plan.num_tokens
        _spread(host["slots"], plan.slots, decodes, gap, 0)
        ends = begins + plan.q_lens
        ends[decodes:] += gap
        indptr = host["qo_indptr"]
        indptr[: decodes + gap + 1] = np.arange(decodes + gap + 1)
        indptr[decodes + gap + 1 : rows + gap + 1] = ends[decodes:]
        indptr[rows + gap + 1 :] = tokens + gap

        sample_rows = np.flatnonzero(plan.samples)
        num_samples = len(host["sample_slots"])
        _fill(host["logit_tokens"][:num_samples], ends[sample_rows] - 1, 0)
        if plan.score_tokens:
            host["logit_tokens"][num_samples:] = np.concatenate(
                [
                    np.arange(begins[row], begins[row] + plan.q_lens[row])
                    for row in plan.score_tokens
                ]
            )
        slots = plan.slots[sample_rows]
        _fill(host["sample_slots"], slots, 0)
        for name in ("seeds", "top_k", "temperature", "top_p", "min_p"):
            _fill(host[name], getattr(table, name)[slots], 0)
        return sample_rows

    def _copy(self, staged: Tensor, host: Tensor) -> None:
        if not self._is_host:
            staged.copy_(host, non_blocking=True)
            self._turn = 1 - self._turn


def saves_by_sharing(plan: StepPlan) -> bool:
    """Whether reading the plan's shared prefixes once each saves enough."""
    groups = plan.shared_groups
    return sum((len(rows) - 1) * length for rows, length in groups) >= MIN_SAVED_TOKENS


def num_shared_tiles(num_rows: int) -> int:
    """Tiles of shared prefixes in a step of this many rows."""
    return -(-num_rows // SHARED_TILE_ROWS) + SPARE_TILES


def tile_shared_groups(
    groups: list[tuple[np.ndarray, int]],
    tile_rows: np.ndarray,
    tile_lens: np.ndarray,
    row_lens: np.ndarray,
) -> None:
    """Fill the arrays of SharedPrefixes with groups of rows, the most worthwhile first.

    A group whose tiles do not fit any more is left out, which is slower and still right.
    """
    tile_rows[:], tile_lens[:], row_lens[:] = -1, 0, 0
    used = 0
    for rows, length in sorted(groups, key=lambda g: -(len(g[0]) - 1) * g[1]):
        end = used - (-len(rows) // tile_rows.shape[1])
        if end > len(tile_lens):
            continue
        tile_rows[used:end].reshape(-1)[: len(rows)] = rows
        tile_lens[used:end] = length
        row_lens[rows] = length
        used = end


TORCH_DTYPE = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def _fill(target: np.ndarray, values: np.ndarray, padding: int) -> None:
    count = len(values)
    target[:count] = values
    if count < len(target):
        target[count:] = padding


def _spread(target: np.ndarray, values: np.ndarray, split: int, gap: int, padding: int) -> None:
    """Put values into a padded array, with a gap after the first `split` of them."""
    if split == len(values):
        _fill(target, values, padding)
        return
    target[:split] = values[:split]
    target[split : split + gap] = padding
    _fill(target[split + gap :], values[split:], padding)
