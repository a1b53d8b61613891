"""The queue: who waits for a slot, and who has waited too long.

Runs on: any (pure).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from .request import Request

EXPIRY_INTERVAL_S = 0.1  # how often the queue is searched for requests that waited too long


class WaitingQueue:
    """Requests in order of arrival, those that were retracted at the front.

    Args:
        timeout_s: how long a request may wait for its first turn.

    Attributes:
        num_tokens: tokens of all that wait.
    """

    def __init__(self, timeout_s: float | None = None):
        self.timeout_s = timeout_s
        self.num_tokens = 0
        self._requests: deque[Request] = deque()
        self._next_expiry_s = math.inf  # before it nobody has waited too long

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, requests: Sequence[Request], *, front: bool = False) -> None:
        """Queue requests in their order, behind all others or before them."""
        if front:
            self._requests.extendleft(reversed(requests))
        else:
            self._requests.extend(requests)
        self.num_tokens += sum(len(request.tokens) for request in requests)
        if self.timeout_s is not None:
            for request in requests:
                due = request.add.arrival_s + self.timeout_s
                self._next_expiry_s = min(self._next_expiry_s, due)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        self._requests.remove(request)
        self.num_tokens -= len(request.tokens)

    def expired(self, now: float) -> list[int]:
        """Ids of the requests that have waited too long and were never admitted."""
        if self.timeout_s is None or now < self._next_expiry_s:
            return []
        oldest = math.inf
        late: list[int] = []
        for request in self._requests:
            if request.num_cached < 0:
                if now - request.add.arrival_s >= self.timeout_s:
                    late.append(request.request_id)
                else:
                    oldest = min(oldest, request.add.arrival_s)
        self._next_expiry_s = max(oldest + self.timeout_s, now + EXPIRY_INTERVAL_S)
        return late
