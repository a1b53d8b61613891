"""A grammar that begins where reasoning ends.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...api.grammar import Reasoning
from .api import Matcher


class Gate:
    """A matcher that lets everything but the end pass until the reasoning is over.

    Args:
        inner: the structure's matcher, at its beginning.
        stop_ids: forbidden inside of the reasoning: an answer without its structure is none.
        token_bytes: of any id, special ones included.
    """

    def __init__(
        self,
        inner: Matcher,
        reasoning: Reasoning,
        stop_ids: tuple[int, ...],
        token_bytes: Callable[[int], bytes],
    ):
        self.inner = inner
        self._begin_ids = () if reasoning.is_open else reasoning.begin_ids
        self._ends = [end.encode() for end in reasoning.ends]
        self._keep = max(map(len, self._ends)) - 1
        self._stop_ids = np.array(stop_ids)
        self._token_bytes = token_bytes
        self._passed: list[bytes] = []  # the end of the text before each token of the reasoning
        self._tail = b""
        self._num_inner = 0  # tokens that went to `inner`
        self._is_open = reasoning.is_open

    @property
    def is_open(self) -> bool:
        """Whether the reasoning goes on."""
        return self._is_open

    @property
    def is_terminated(self) -> bool:
        """See api.Matcher."""
        return self.inner.is_terminated

    def accept(self, token: int) -> bool:
        """See api.Matcher. False too where the structure begins inside of a token."""
        if not self._is_open and not self._num_inner and not self._passed:
            self._is_open = token in self._begin_ids
            if self._is_open:
                self._passed.append(b"")
                return True
        if not self._is_open:
            self._num_inner += 1
            return self.inner.accept(token)
        self._passed.append(self._tail)
        text = self._tail + self._token_bytes(token)
        for end in self._ends:
            at = text.find(end)
            if at >= 0:
                self._is_open = False
                return not text[at + len(end) :].strip()
        self._tail = text[-self._keep :] if self._keep else b""
        return True

    def fill_mask(self, row: np.ndarray) -> bool:
        """See api.Matcher."""
        if self._is_open:
            row[:] = -1
            row[self._stop_ids >> 5] &= ~(np.int32(1) << (self._stop_ids & 31).astype(np.int32))
            return True
        is_filled = self.inner.fill_mask(row)
        self.widen(row)
        return is_filled

    def widen(self, row: np.ndarray) -> None:
        """Add what may come instead of the structure's first token."""
        if not self._num_inner and not self._passed:
            for token in self._begin_ids:
                row[token >> 5] |= np.uint32(1 << (token & 31)).astype(np.int32)

    def rollback(self, num_tokens: int) -> None:
        """See api.Matcher."""
        inner = min(num_tokens, self._num_inner)
        if inner:
            self.inner.rollback(inner)
            self._num_inner -= inner
        for _ in range(num_tokens - inner):
            self._tail = self._passed.pop()
            self._is_open = bool(self._passed) or not self._begin_ids
