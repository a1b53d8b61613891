"""The free pages of the KV pool.

Runs on: any (pure).
"""

import numpy as np


class PagePool:
    """A stack of free page ids. Page 0 is never handed out: padding rows of graphs write there."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)

    @property
    def capacity(self) -> int:
        """How many pages can be handed out at all."""
        return self.num_pages - 1

    def take(self, n: int) -> np.ndarray:
        """n page ids, int32 [n]. Raises RuntimeError when fewer are free."""
        if n > self.num_free:
            raise RuntimeError(f"asked for {n} pages, {self.num_free} are free")
        self.num_free -= n
        return self._stack[self.num_free : self.num_free + n].copy()

    def release(self, pages: np.ndarray) -> None:
        """Give pages back. Raises RuntimeError when the pool would hold more than it has."""
        end = self.num_free + len(pages)
        if end > self.capacity:
            raise RuntimeError(f"{end} free pages in a pool of {self.capacity}")
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> np.ndarray:
        """The free page ids, int32 [num_free]."""
        return self._stack[: self.num_free].copy()
