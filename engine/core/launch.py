"""Writes a step down: the plan for the runner, and what its commit will need.

Runs on: any (pure).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .plan import FROM_DEVICE, Admission, StepPlan, StepResult
from .request import Request
from .shared_prefix import Groups
from .slots import Slots
from .snapshots import Save

NewPages = tuple[np.ndarray, ...]  # slots, table indices, page ids, window page ids if any


@dataclass(slots=True)
class LaunchedStep:
    """A step between its plan and its commit; arrays are [rows].

    Attributes:
        serials: of each slot's owner at launch.
        score_starts: row to the position of its first new token, where prompt tokens are scored.
        told: slots of which the runner learns something, beside the rows'.
        saves: of recurrent states.
        has_loads: whether it waits for copies from the host, so that its time says little.
    """

    step: int
    slots: np.ndarray
    serials: np.ndarray
    requests: list[Request]
    q_lens: np.ndarray
    kv_lens: np.ndarray
    samples: np.ndarray
    num_tokens: int
    num_pairs: float
    score_starts: dict[int, int]
    told: set[int]
    saves: list[Save] = field(default_factory=list)
    has_loads: bool = False

    def commit(self, slots: Slots, result: StepResult) -> np.ndarray:
        """The slots' counters after the step: its tokens are known now.

        Returns:
            bool [num_rows], which rows' slots still belong to whom they belonged at launch.
        """
        # The others' requests have ended, or were retracted and wait.
        is_live = slots.serial[self.slots] == self.serials
        slots.committed[self.slots[is_live]] = self.kv_lens[is_live]
        is_new = is_live & self.samples
        new = self.slots[is_new]
        slots.pending[new] -= 1
        slots.last_token[new] = result.tokens[is_new]
        return is_live

    def undo(self, slots: Slots) -> None:
        """The slots' counters as if the step had not been planned."""
        slots.computed[self.slots] -= self.q_lens
        slots.length[self.slots] -= self.samples
        slots.pending[self.slots] -= self.samples
        slots.untold |= self.told | set(self.slots.tolist())


def launch(
    step: int,
    slots: Slots,
    decode: np.ndarray,
    chunks: list[tuple[int, int]],
    admitted: list[Request],
    new_pages: NewPages,
    shared_groups: Groups,
) -> tuple[StepPlan, LaunchedStep]:
    """Write a step down and count it as computed.

    Args:
        decode: slots with one token to compute. chunks: (slot, q_len) of the others.
        admitted: requests that have a slot since this step.
        new_pages: table entries that decode rows got for this step.
    """
    order = decode
    if chunks:
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # stable: those of one token join the decodes
        order = np.concatenate([decode, np.array([slot for slot, _ in chunks], np.intp)])
    rows = slots.rows(order)
    q_lens, prompt_logprobs = rows.ones, rows.no_logprobs
    decode_tokens = slots.last_token[decode]
    decode_tokens[slots.pending[decode] > 0] = FROM_DEVICE
    tokens = [decode_tokens]
    score_tokens: dict[int, np.ndarray] = {}
    score_starts: dict[int, int] = {}
    for row, (slot, q_len) in enumerate(chunks, len(decode)):
        request = slots.owner(slot)
        start = int(slots.computed[slot])
        q_lens[row] = q_len
        tokens.append(request.known_tokens(start, start + q_len))
        k = request.add.params.prompt_logprobs
        if k is not None and request.prompt_logprobs and start < request.prompt_len - 1:
            following = request.known_tokens(start + 1, min(start + 1 + q_len, request.prompt_len))
            score_tokens[row] = np.full(q_len, -1, np.int32)
            score_tokens[row][: len(following)] = following
            score_starts[row] = start
            prompt_logprobs[row] = k

    length = slots.length[order]
    kv_lens = slots.computed[order] + q_lens
    samples = (kv_lens == length) & slots.generates[order]
    slots.computed[order] = kv_lens
    slots.length[order] = length + samples
    slots.pending[order] += samples
    told, admissions = _admissions(slots, order, admitted)
    page_slots, page_indices, page_ids, *window_page_ids = _table_entries(slots, new_pages)
    plan = StepPlan(
        step=step,
        slots=rows.slots,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decode_rows=len(decode) + sum(q_len == 1 for _, q_len in chunks),
        tokens=np.concatenate(tokens) if chunks else decode_tokens,
        samples=samples,
        prompt_logprobs=prompt_logprobs,
        page_slots=page_slots,
        page_indices=page_indices,
        page_ids=page_ids,
        score_tokens=score_tokens,
        admitted=admissions,
        shared_groups=shared_groups,
    )
    if window_page_ids:
        (plan.window_page_ids,) = window_page_ids
    if slots.num_constrained:
        plan.masked = np.flatnonzero(samples & slots.is_constrained[order]).astype(np.int32)
    num_pairs = float((q_lens * (kv_lens - (q_lens - 1) / 2)).sum() if chunks else kv_lens.sum())
    launched = LaunchedStep(
        step,
        order,
        rows.serials,
        rows.requests,
        q_lens,
        kv_lens,
        samples,
        plan.num_tokens,
        num_pairs,
        score_starts,
        told,
    )
    return plan, launched


def _admissions(
    slots: Slots, rows: np.ndarray, admitted: list[Request]
) -> tuple[set[int], list[Admission]]:
    """What the runner must know of requests, and the slots of which it learns something."""
    told = {request.slot for request in admitted}
    if slots.untold:
        again = slots.untold.intersection(rows.tolist()) - told
        admitted = admitted + [slots.owner(slot) for slot in sorted(again)]
        slots.dirty |= dict.fromkeys(again, 0)
        slots.untold -= again | told
    admissions = [
        Admission(
            slot=request.slot,
            params=request.add.params,
            tokens=request.known_tokens(0, len(request.tokens)),
            prompt_len=request.prompt_len,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
            seed=request.seed,
            grammar=request.add.grammar,
        )
        for request in admitted
    ]
    told |= slots.dirty.keys()
    told.update(*(which.tolist() for which, _ in slots.gone))
    return told, admissions


def _table_entries(slots: Slots, new_pages: NewPages) -> NewPages:
    """The block-table entries that the device must learn before this step."""
    if not slots.dirty and not slots.gone:
        return new_pages
    entries: list[NewPages] = [new_pages]
    for slot, first in slots.dirty.items():
        indices = np.arange(first, slots.num_pages(slot), dtype=np.int32)
        entries.append(_entries(slots, np.full_like(indices, slot), indices, len(new_pages)))
    slots.dirty.clear()
    entries += [_entries(slots, *gone, len(new_pages)) for gone in slots.gone]
    slots.gone.clear()
    return tuple(np.concatenate(part, dtype=np.int32) for part in zip(*entries, strict=True))


def _entries(slots: Slots, which: np.ndarray, indices: np.ndarray, num_parts: int) -> NewPages:
    """What some places of the block tables hold now."""
    tables = (slots.table, slots.window_table)[: num_parts - 2]
    return which, indices, *(table[which, indices] for table in tables)
