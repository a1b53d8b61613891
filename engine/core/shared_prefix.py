"""Which decode rows begin with the same cached pages.

Runs on: any (pure).
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from .slots import Slots

MIN_SHARED = 256  # tokens that rows must share to be told to the runner

Groups = list[tuple[np.ndarray, int]]


class SharedPrefixes:
    """Keeps the groups of the last step: they change only when somebody's pages do."""

    def __init__(self) -> None:
        self._groups: Groups = []
        self._made_of: tuple[int, np.ndarray] | None = None

    def groups(self, slots: Slots, decode: np.ndarray, num_moves: int) -> Groups:
        """(rows, shared length in tokens) of the decode rows that share MIN_SHARED or more.

        Args:
            decode: the slot of each row.
            num_moves: changes whenever a request shares other pages of the tree than before.
        """
        if self._made_of is not None:
            moves_before, decode_before = self._made_of
            is_same = decode is decode_before or np.array_equal(decode_before, decode)
            if moves_before == num_moves and is_same:
                return self._groups
        # A page in two tables means that all before it is shared too, so one column groups the
        # rows, and a bisection over columns finds how far a group goes.
        size = slots.page_size
        column = -(-MIN_SHARED // size) - 1
        rows = np.flatnonzero(slots.capacity[decode] > column * size)
        pages = slots.table[decode[rows], column] if len(rows) else rows
        _, group_of, sizes = np.unique(pages, return_inverse=True, return_counts=True)
        self._groups = []
        for group in np.flatnonzero(sizes > 1).tolist():
            members = rows[group_of == group]
            num_pages = _num_common_pages(slots, decode[members], column + 1)
            self._groups.append((members.astype(np.int32), num_pages * size))
        self._made_of = num_moves, decode
        return self._groups


def _num_common_pages(slots: Slots, members: np.ndarray, known: int) -> int:
    """With how many equal pages the tables of some slots begin; `known` of them are."""

    def differs(index: int) -> bool:
        pages = slots.table[members, index]
        return bool((pages != pages[0]).any())

    end = int(slots.capacity[members].min()) // slots.page_size
    return bisect_left(range(end), True, lo=known, key=differs)
