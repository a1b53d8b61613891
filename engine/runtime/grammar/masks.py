"""Token masks of the constrained rows of a step, filled while the device computes.

    admit(a)        a slot has a new request: its matcher, advanced over the output so far
    begin(plan)     fill the masks of the step's masked rows, on a thread that frees the GIL
    take()          wait for them: int32 [num_masked, mask_words]
    accept(...)     the sampled tokens are known: advance

A row whose grammar fails (a limit of the library, a token that does not fit) gets an empty mask.
Its logits then hold nothing finite, and that request fails, alone.

Runs on: gpu.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...core.plan import Admission
from .api import Matcher
from .compiler import Grammar
from .gate import Gate


class Constraint:
    """A running request under a grammar."""

    __slots__ = ("grammar", "has_failed", "matcher", "min_output", "num_output", "stop_ids")

    def __init__(self, a: Admission):
        self.grammar: Grammar = a.grammar
        self.matcher = self.grammar.matcher()
        self.stop_ids = np.array(a.stop_token_ids, np.int64)
        self.min_output = self.grammar.min_tokens
        self.num_output = 0
        self.has_failed = False
        self.accept(a.tokens[a.prompt_len :].tolist())

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance; a token that does not fit fails the request."""
        for token in tokens:
            self.num_output += 1
            if not self.has_failed and not self.matcher.is_terminated:
                self.has_failed = not self.matcher.accept(token)

    def finish(self, row: np.ndarray, is_filled: bool) -> None:
        """What the library does not know: min_tokens, and that it failed."""
        if self.has_failed or not is_filled:
            self.has_failed = True
            row[:] = 0
            return
        if isinstance(self.matcher, Gate) and not self.matcher.is_open:
            self.matcher.widen(row)
        if self.num_output < self.min_output and len(self.stop_ids):
            words, bits = self.stop_ids >> 5, np.uint32(1) << (self.stop_ids & 31).astype(np.uint32)
            late = row.view(np.uint32).copy()
            np.bitwise_and.at(late, words, ~bits)
            if late.any():  # else the grammar is at its end, which comes before min_tokens
                row.view(np.uint32)[:] = late


class Masks:
    """The constraints of all running requests, by slot.

    Attributes:
        fill_s: seconds spent on filling masks. num_masks: how many were filled.
    """

    def __init__(self, num_slots: int, vocab_size: int):
        self.fill_s = 0.0
        self.num_masks = 0
        self._words = -(-vocab_size // 32)
        self._by_slot: dict[int, Constraint] = {}
        self._num_slots = num_slots
        self._table = np.zeros((0, self._words), np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._num_rows = 0

    def admit(self, a: Admission) -> None:
        """A slot has a new request."""
        if a.grammar is None:
            self._by_slot.pop(a.slot, None)
        else:
            self._by_slot[a.slot] = Constraint(a)

    def begin(self, slots: Sequence[int]) -> list[Constraint]:
        """Start to fill the masks of some slots; their constraints, for `accept`."""
        if not slots:
            return []
        if self._filling is not None:  # of a step that the device had no memory for
            self._filling.result()
        constraints = [self._by_slot[slot] for slot in slots]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stoker-masks")
        if len(self._table) < len(slots):
            num_rows = min(self._num_slots, max(8, 2 * len(slots)))
            self._table = np.zeros((num_rows, self._words), np.int32)
        self._num_rows = len(slots)
        self._filling = self._thread.submit(self._fill, constraints)
        return constraints

    def take(self) -> np.ndarray:
        """The masks that were begun last, int32 [num_rows, mask_words]; until the next `begin`."""
        assert self._filling is not None
        self._filling.result()
        self._filling = None
        return self._table[: self._num_rows]

    def _fill(self, constraints: list[Constraint]) -> None:
        began = time.perf_counter()
        groups: dict[type, list[int]] = {}
        matchers: list[Matcher] = []
        filled = [True] * len(constraints)
        for i, c in enumerate(constraints):
            matcher = c.matcher
            if isinstance(matcher, Gate):
                if matcher.is_outside:
                    matcher.fill_mask(self._table[i])
                    matchers.append(matcher)
                    continue
                matcher = matcher.inner
            matchers.append(matcher)
            if c.has_failed:
                continue
            if matcher.is_terminated:  # a row of a step that was launched before its end was known
                self._table[i] = -1
                continue
            groups.setdefault(type(matcher), []).append(i)
        for rows in groups.values():
            compiled = constraints[rows[0]].grammar.compiled
            done = compiled.fill_masks([matchers[i] for i in rows], self._table, rows)
            for i, is_filled in zip(rows, done, strict=True):
                filled[i] = is_filled
        for i, c in enumerate(constraints):
            c.finish(self._table[i], filled[i])
        self.num_masks += len(constraints)
        self.fill_s += time.perf_counter() - began

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
