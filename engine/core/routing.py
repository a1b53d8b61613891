"""Which engine of a fleet a request goes to.

Runs on: any (pure).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from .radix import Namespace, RadixTree

MIN_MATCH = 0.3  # of a prompt, for the cache to decide
IMBALANCE, IMBALANCE_RATIO = 32, 1.5  # requests apart, and times: then the load decides


class Router(Protocol):
    """Chooses engines. `loads` are the unfinished requests of each."""

    def pick(self, prompt: np.ndarray, namespace: Namespace, loads: list[int], now: float) -> int:
        """The index of the engine that gets a prompt, int32 [n]."""


class RoundRobin:
    """Each in turn."""

    def __init__(self, num_engines: int):
        self._next = 0
        self._num_engines = num_engines

    def pick(self, prompt: np.ndarray, namespace: Namespace, loads: list[int], now: float) -> int:
        """The engine after the last one."""
        picked = self._next
        self._next = (picked + 1) % self._num_engines
        return picked


class LeastLoaded:
    """The one with the fewest unfinished requests, the first of equals."""

    def __init__(self, num_engines: int):
        del num_engines

    def pick(self, prompt: np.ndarray, namespace: Namespace, loads: list[int], now: float) -> int:
        """The least loaded engine."""
        return loads.index(min(loads))


class CacheAware:
    """The one that most likely has the longest prefix cached, unless loads are too uneven.

    The router remembers the prompts it sent to each engine in a radix tree; it does not ask them.

    Args:
        max_tokens: that are remembered of each engine, the least recently used are forgotten.
    """

    def __init__(self, num_engines: int, *, page_size: int = 64, max_tokens: int = 1 << 20):
        self._trees = [RadixTree(page_size) for _ in range(num_engines)]
        self._max_pages = max_tokens // page_size

    def pick(self, prompt: np.ndarray, namespace: Namespace, loads: list[int], now: float) -> int:
        """The engine with the longest match, or the least loaded one."""
        least = loads.index(min(loads))
        picked = least
        uneven = max(loads) - loads[least] > IMBALANCE
        if not (uneven and max(loads) > IMBALANCE_RATIO * loads[least]):
            matched = [tree.match(prompt, namespace, now)[2] for tree in self._trees]
            longest = max(matched)
            if longest >= MIN_MATCH * len(prompt):
                picked = min(
                    (i for i, n in enumerate(matched) if n == longest), key=loads.__getitem__
                )
        tree = self._trees[picked]
        pages = np.zeros(len(prompt) // tree.page_size, np.int32)  # it only remembers tokens
        tree.insert(prompt, pages, namespace, now)
        tree.evict(max(tree.num_evictable - self._max_pages, 0))
        return picked


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "cache-aware": CacheAware,
}
