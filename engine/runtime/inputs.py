"""A plan becomes device tensors, through one staged copy a step.

The arrays of a step are laid out one after the other in a byte buffer: written on the host through
numpy views, copied to the device at once, read there through torch views at the same offsets. The
layout depends on the step's counts alone, so a graph captured for a batch size finds its inputs at
the same addresses each time. Two host buffers take turns, because the copy of one step may still
run while the next is staged.

Runs on: gpu.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
)

# Tokens that a step need not read again, at which a pass over shared prefixes is worth its launch:
# on an H200, 1300 of them take a microsecond of a layer (from the L2 cache), the pass about ten.
MIN_SAVED_TOKENS = 16_384
SPARE_TILES = 4  # more groups than these leave tiles that are not full


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


@dataclass(slots=True)
class StepInputs:
    """One step's inputs on the device.

    Attributes:
        tokens: int64 [num_tokens] input ids, with those of the step before filled in.
        sample_rows: host int array [num_samples], the plan's rows that sample.
        sample_slots: int64 [num_samples] their request slots.
        sampling: their sampling parameters.
    """

    tokens: Tensor
    meta: BatchMeta
    sample_rows: np.ndarray
    sample_slots: Tensor
    sampling: SamplingRows


class Inputs:
    """Stages plans. Owns the block table and the buffer of last sampled tokens, both by slot."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        max_step_tokens: int,
    ):
        self.max_context = max_pages * page_size  # tokens
        self.page_size = page_size
        self._max_pages = max_pages
        self._device = runtime.device
        self._is_host = runtime.device.type == "cpu"
        self._tables = np.zeros((num_slots, max_pages), np.int32)  # the host's copy
        self.block_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=self._device)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        if self._is_host:
            self.block_table = torch.from_numpy(self._tables)
        self._capacity = 0
        self._host: list[Tensor] = []
        self._copied: list[torch.Event | None] = [None, None]
        self._turn = 0
        # Enough for any step, for the buffers must not move once graphs know their addresses.
        fixed = ALIGN * len(FIELDS) + 64 * (max_step_tokens + num_slots)
        fixed += 4 * (SHARED_TILE_ROWS + 1) * num_shared_tiles(num_slots)
        self._reserve(fixed + 12 * num_slots * max_pages)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._capacity:
            return
        pin = not self._is_host
        self._capacity = num_bytes
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._copied = [None, None]
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
            shape: for a graph: pad to this shape, and leave tokens that only the device knows to
                the graph. Padding rows are of slot 0, have no context, and write nowhere.
        """
        rows, tokens, decodes = plan.num_rows, plan.num_tokens, plan.num_decode_rows
        if shape is None:
            shape_rows, shape_tokens, gap = rows, tokens, 0
        else:
            if not shape.decode_rows:
                decodes = 0  # the few there are go through the chunks' kernel
            shape_rows, shape_tokens = shape.rows, shape.tokens
            gap = shape.decode_rows - decodes  # padding between decode rows and chunks
        row_of_token = np.repeat(np.arange(rows), plan.q_lens)
        begins = np.cumsum(plan.q_lens) - plan.q_lens  # of each row among the plan's tokens
        ends = begins + plan.q_lens + np.where(np.arange(rows) < decodes, 0, gap)  # when padded
        indptr = np.empty(shape_rows + 1, np.int32)
        indptr[: decodes + gap + 1] = np.arange(decodes + gap + 1)
        indptr[decodes + gap + 1 :] = tokens + gap
        indptr[decodes + gap + 1 : rows + gap + 1] = ends[decodes:]
        sample_rows = np.flatnonzero(plan.samples)
        samples = len(sample_rows)
        all_samples = shape_rows if shape is not None else samples
        scored = [
            np.arange(begins[row], begins[row] + plan.q_lens[row]) for row in plan.score_tokens
        ]
        is_shared = shape.is_shared if shape is not None else saves_by_sharing(plan)
        num_tiles = num_shared_tiles(shape_rows) if is_shared else 0
        counts = {
            "tokens": shape_tokens,
            "rows": shape_rows,
            "rows+1": shape_rows + 1,
            "samples": all_samples,
            "logits": all_samples + sum(map(len, scored)),
            "shared tiles": num_tiles,
            "shared tiles x rows": num_tiles * SHARED_TILE_ROWS,
            "rows if shared": shape_rows if is_shared else 0,
            "pages": len(plan.page_ids),
        }
        host, device = self._views(counts)

        self._tables[plan.page_slots, plan.page_indices] = plan.page_ids
        host["page_entries"][:] = plan.page_slots.astype(np.int64) * self._max_pages
        host["page_entries"] += plan.page_indices
        host["page_ids"][:] = plan.page_ids

        row_slots = plan.slots[row_of_token]
        starts = plan.kv_lens - plan.q_lens
        positions = np.arange(tokens) - begins[row_of_token] + starts[row_of_token]
        pages = self._tables[row_slots, positions // self.page_size]
        out_slots = pages * np.int64(self.page_size) + positions % self.page_size
        # A token that only the device knows is staged as minus its slot, which is at least 1.
        ids = np.where(plan.tokens == FROM_DEVICE, -row_slots, plan.tokens)
        for name, values, padding in (
            ("tokens", ids, 0),
            ("positions", positions, 0),
            ("out_slots", out_slots, -1),
            ("kv_lens", plan.kv_lens, 0),
            ("slots", plan.slots, 0),
        ):
            _spread(host[name], values, decodes, gap, padding)
        host["qo_indptr"][:] = indptr
        _fill(host["logit_tokens"][:all_samples], ends[sample_rows] - 1, 0)
        if scored:
            host["logit_tokens"][all_samples:] = np.concatenate(scored)
        shared = None
        if is_shared:
            shape_2d = (num_tiles, SHARED_TILE_ROWS)
            tile_shared_groups(
                plan.shared_groups,
                host["shared_tile_rows"].reshape(shape_2d),
                host["shared_tile_lens"],
                host["shared_row_lens"],
            )
            shared = SharedPrefixes(
                device["shared_tile_rows"].view(shape_2d),
                device["shared_tile_lens"],
                device["shared_row_lens"],
            )
        slots = plan.slots[sample_rows]
        _fill(host["sample_slots"], slots, 0)
        _fill(host["sample_positions"], plan.kv_lens[sample_rows], 0)
        for name in ("seeds", "top_k", "temperature", "top_p", "min_p"):
            _fill(host[name], getattr(table, name)[slots], 0)

        if not self._is_host:
            turn = self._turn
            used = self._used
            self.staged[:used].copy_(self._host[turn][:used], non_blocking=True)
            copied = torch.Event(self._device)
            copied.record()
            self._copied[turn] = copied
            self._turn = 1 - turn
            if len(plan.page_ids):
                self.block_table.view(-1)[device["page_entries"]] = device["page_ids"]
        kv_lens_cpu = plan.kv_lens
        if shape is not None:
            kv_lens_cpu = np.empty(shape_rows, np.int32)
            _spread(kv_lens_cpu, plan.kv_lens, decodes, gap, 0)
        meta = BatchMeta(
            num_rows=shape_rows,
            num_tokens=shape_tokens,
            num_decode_rows=decodes + gap,
            page_size=self.page_size,
            qo_indptr=device["qo_indptr"],
            kv_lens=device["kv_lens"],
            slots=device["slots"],
            block_table=self.block_table,
            positions=device["positions"],
            out_slots=device["out_slots"],
            logit_tokens=device["logit_tokens"],
            qo_indptr_cpu=indptr,
            kv_lens_cpu=kv_lens_cpu,
            max_q_len=int(plan.q_lens.max()),
            max_kv_len=int(plan.kv_lens.max()),
            shared=shared,
        )
        if shape is None and (plan.tokens == FROM_DEVICE).any():
            self.fill_last_tokens(device["tokens"])
        sampling = SamplingRows(
            temperature=device["temperature"][:samples],
            top_k=device["top_k"][:samples],
            top_p=device["top_p"][:samples],
            min_p=device["min_p"][:samples],
            seeds=device["seeds"][:samples],
            positions=device["sample_positions"][:samples],
            all_greedy=bool((table.temperature[slots] == 0).all()),
            has_top_k=bool((table.top_k[slots] < table.vocab_size).any()),
            has_top_p=bool((table.top_p[slots] < 1).any()),
            has_min_p=bool((table.min_p[slots] > 0).any()),
        )
        return StepInputs(
            device["tokens"], meta, sample_rows, device["sample_slots"][:samples], sampling
        )

    def _views(self, counts: dict[str, int]) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
        """The step's arrays on the host and on the device, by name."""
        layout, offset = [], 0
        for name, dtype, count in FIELDS:
            size = counts[count] * np.dtype(dtype).itemsize
            layout.append((name, dtype, offset, size))
            offset += -(-size // ALIGN) * ALIGN
        self._reserve(offset)
        self._used = offset
        turn = self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()  # of two steps ago: it has long been done
        buffer = self._host[turn].numpy()
        source = self._host[turn] if self._is_host else self.staged
        host = {n: buffer[o : o + size].view(dtype) for n, dtype, o, size in layout}
        device = {n: source[o : o + size].view(TORCH_DTYPE[dtype]) for n, dtype, o, size in layout}
        return host, device

    def fill_last_tokens(self, tokens: Tensor) -> None:
        """Put the tokens that only the device knows in their places."""
        last = self.last_tokens.take(tokens.neg().clamp_(min=0))
        torch.where(tokens < 0, last, tokens, out=tokens)


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
    target[: len(values)] = values
    target[len(values) :] = padding


def _spread(target: np.ndarray, values: np.ndarray, split: int, gap: int, padding: int) -> None:
    """Put values into a padded array, with a gap after the first `split` of them."""
    target[:split] = values[:split]
    target[split : split + gap] = padding
    _fill(target[split + gap :], values[split:], padding)
