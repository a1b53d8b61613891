"""What enters and leaves the prefix cache, told for routers that send requests where they hit.

A page is named by its content key (page_keys.py), so whoever knows the keys of a prompt knows how
much of it is here.

Runs on: any (pure).
"""

from __future__ import annotations

from array import array

import numpy as np

from ..api.messages import CacheEvent


class CacheEvents:
    """Remembers which key each page of the tree has, for the day it is evicted."""

    def __init__(self) -> None:
        self._key_of: dict[int, bytes] = {}

    def stored(
        self,
        keys: list[bytes],
        pages: np.ndarray,
        parent: bytes,
        tokens: array,
        namespace: tuple[str, ...],
    ) -> CacheEvent:
        """The tree has taken over pages of these keys, which follow `parent`."""
        self._key_of.update(zip(pages.tolist(), keys, strict=True))
        return CacheEvent("stored", tuple(keys), parent, tokens, namespace)

    def removed(self, pages: np.ndarray) -> CacheEvent:
        """The tree has given up these pages."""
        return CacheEvent("removed", tuple(self._key_of.pop(page) for page in pages.tolist()))
