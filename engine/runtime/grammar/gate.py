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

    Where the prompt has not opened the reasoning, the structure binds from the first token on. The
    only other way is to spell out the reasoning's begin, whose tokens the structure may share.

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
        self._begins = () if reasoning.is_open else reasoning.begins
        self._ends = [end.encode() for end in reasoning.ends]
        self._keep = max(map(len, self._ends)) - 1
        self._stop_ids = np.array(stop_ids)
        self._token_bytes = token_bytes
        self._begun: tuple[int, ...] = ()  # first tokens, as long as a begin goes on with them
        self._num_shared = 0  # of these that `inner` has accepted, too
        self._passed: list[bytes] = []  # the end of the text before each token of the reasoning
        self._tail = b""
        self._num_inner = 0  # tokens that went to `inner` alone
        self._is_open = reasoning.is_open

    @property
    def is_open(self) -> bool:
        """Whether the reasoning goes on."""
        return self._is_open

    @property
    def is_outside(self) -> bool:
        """Whether the structure has no say in the next token."""
        return self._is_open or (not self._passed and self._num_shared < len(self._begun))

    @property
    def is_terminated(self) -> bool:
        """See api.Matcher."""
        return self.inner.is_terminated

    def _next_begins(self) -> list[int]:
        """The tokens that go on with a begin."""
        if self._is_open or self._passed or self._num_inner:
            return []
        num = len(self._begun)
        return [begin[num] for begin in self._begins if begin[:num] == self._begun]

    def accept(self, token: int) -> bool:
        """See api.Matcher. False too where the structure begins inside of a token."""
        if self._is_open:
            return self._pass(token)
        is_outside = self.is_outside
        if token in self._next_begins():
            self._begun += (token,)
            if self._begun in self._begins:
                self.inner.rollback(self._num_shared)
                self._num_shared = 0
                self._is_open = True
            elif not is_outside and self.inner.accept(token):
                self._num_shared += 1
            return True
        if is_outside or not self.inner.accept(token):
            return False
        self._num_inner += 1
        return True

    def _pass(self, token: int) -> bool:
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
        is_filled = True
        if self.is_outside:
            row[:] = 0
        else:
            is_filled = self.inner.fill_mask(row)
        self.widen(row)
        return is_filled

    def widen(self, row: np.ndarray) -> None:
        """Add what may come instead of the structure's next token."""
        for token in self._next_begins():
            row[token >> 5] |= np.uint32(1 << (token & 31)).astype(np.int32)

    def rollback(self, num_tokens: int) -> None:
        """See api.Matcher."""
        inner = min(num_tokens, self._num_inner)
        self.inner.rollback(inner)
        self._num_inner -= inner
        passed = min(num_tokens - inner, len(self._passed))
        if passed:
            self._tail = self._passed[-passed]
            del self._passed[-passed:]
            self._is_open = True
        begun = num_tokens - inner - passed
        if begun:  # few tokens: accept again those that stay
            self.inner.rollback(self._num_shared)
            self._num_shared, self._is_open = 0, False
            stay, self._begun = self._begun[:-begun], ()
            for token in stay:
                self.accept(token)
