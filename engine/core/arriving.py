"""Prompts on their way into the prefix cache.

Requests that come together and begin alike would each compute what they share, for it reaches the
cache only when the first of them has computed it. Here the others wait for that one.

Runs on: any (pure).
"""

import numpy as np

from .radix import Namespace
from .request import Request

MIN_AWAITED = 256  # tokens that a request must be spared, about a step's worth

Key = tuple[Namespace, int, bytes]  # cached tokens and the page that comes next


class Arriving:
    """Requests that compute their prompts, by what follows the part that is cached."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._by_key: dict[Key, Request] = {}
        self._keys: dict[Request, Key] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def note(self, request: Request, num_cached: int) -> None:
        """A request begins to compute its prompt, of which so many tokens are cached."""
        if request.prompt_len - num_cached >= MIN_AWAITED:
            key = self._key(request, num_cached)
            if self._by_key.setdefault(key, request) is request:
                self._keys[request] = key

    def forget(self, request: Request) -> None:
        """It has computed it, or has stopped."""
        if (key := self._keys.pop(request, None)) is not None:
            del self._by_key[key]

    def awaited(self, request: Request, num_cached: int) -> tuple[Request, int] | None:
        """Who computes what this request, of which so many are cached, needs next.

        Also how much both share, in tokens of whole pages.
        """
        other = self._by_key.get(self._key(request, num_cached))
        if other is None:
            return None
        n = min(other.prompt_len, request.prompt_len - 1)
        differs = other.prompt[:n] != request.prompt[:n]
        common = int(differs.argmax()) if differs.any() else n
        common -= common % self._page_size
        return (other, common) if common - num_cached >= MIN_AWAITED else None

    def _key(self, request: Request, num_cached: int) -> Key:
        page: np.ndarray = request.prompt[num_cached : num_cached + self._page_size]
        return request.add.namespace, num_cached, page.tobytes()
