"""The queue: who waits for a slot, in which order, and who has waited too long.

Runs on: any (pure).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from .fairness import FairShares
from .policy import MAX_SORTED, POLICIES, Policy, QueueView
from .request import Request

EXPIRY_INTERVAL_S = 0.1  # how often the queue is searched for requests that waited too long

_place = attrgetter("place")


def _level(request: Request) -> tuple[int, bool]:
    """Priority, then whether it has never run: what goes before every policy."""
    return request.place[:2]


class WaitingQueue:
    """Sorted at all times by (priority, never run, the policy's rank, arrival).

    With fair shares each client has a line of its own, and the client that has received least
    gives the next request.

    Args:
        timeout_s: how long a request may wait for its first turn.

    Attributes:
        num_tokens: tokens of all that wait.
    """

    def __init__(
        self,
        policy: Policy = POLICIES["fcfs"],
        timeout_s: float | None = None,
        shares: FairShares | None = None,
    ):
        self.policy = policy
        self.timeout_s = timeout_s
        self.shares = shares
        self.num_tokens = 0
        self._lines: dict[str, list[Request]] = {}  # by client; none is empty
        self._len = 0
        self._last = 0  # arrivals get rising numbers, those that go to the front falling ones
        self._first = 0
        self._next_expiry_s = math.inf  # before it nobody has waited too long

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """All that wait, by client, then in the order of the queue."""
        for line in self._lines.values():
            yield from line

    def add(self, requests: Sequence[Request], *, front: bool = False) -> None:
        """Queue requests in their order, behind their equals or before them."""
        rank = self.policy.rank
        for request in reversed(requests) if front else requests:
            if front:
                self._first -= 1
            else:
                self._last += 1
            request.place = (
                -request.add.priority,
                not request.is_resumed,
                0 if rank is None else rank(request),
                self._first if front else self._last,
            )
            insort(self._lines.setdefault(self._client(request), []), request, key=_place)
            self.num_tokens += len(request.tokens)
            if self.timeout_s is not None:
                due = request.add.arrival_s + self.timeout_s
                self._next_expiry_s = min(self._next_expiry_s, due)
        self._len += len(requests)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        client = self._client(request)
        line = self._lines[client]
        del line[bisect_left(line, request.place, key=_place)]
        if not line:
            del self._lines[client]
        self._len -= 1
        self.num_tokens -= len(request.tokens)

    def in_order(self, view: QueueView) -> Iterator[Request]:
        """All that wait, the next to be admitted first. The queue must not change meanwhile."""
        if self.shares is None:
            for line in self._lines.values():  # there is one at most
                yield from self._by_policy(line, view)
            return
        heap: list[tuple[Any, ...]] = []
        for client, line in self._lines.items():
            requests = self._by_policy(line, view)
            head = next(requests)
            key = _level(head), self.shares.used(client), head.place[-1]
            heap.append((*key, client, head, requests))
        heapq.heapify(heap)
        while heap:
            _, used, _, client, head, requests = heap[0]
            yield head
            used += self.shares.price(client, len(head.tokens))
            following = next(requests, None)
            if following is None:
                heapq.heappop(heap)
            else:
                key = _level(following), used, following.place[-1]
                heapq.heapreplace(heap, (*key, client, following, requests))

    def expired(self, now: float) -> list[int]:
        """Ids of the requests that have waited too long and were never admitted."""
        if self.timeout_s is None or now < self._next_expiry_s:
            return []
        oldest = math.inf
        late: list[int] = []
        for request in self:
            if request.num_cached < 0:
                if now - request.add.arrival_s >= self.timeout_s:
                    late.append(request.request_id)
                else:
                    oldest = min(oldest, request.add.arrival_s)
        self._next_expiry_s = max(oldest + self.timeout_s, now + EXPIRY_INTERVAL_S)
        return late

    def _client(self, request: Request) -> str:
        return "" if self.shares is None else request.add.client

    def _by_policy(self, line: list[Request], view: QueueView) -> Iterator[Request]:
        """One line, each run of equal priority as the policy orders it."""
        order = self.policy.order
        if order is None or (self.policy.is_bounded and self._len > MAX_SORTED):
            yield from line
            return
        start = 0
        while start < len(line):
            level = _level(line[start])
            end = bisect_right(line, level, lo=start, key=_level)
            run = line[start:end]
            is_fresh = level[1]
            yield from order(run, view) if is_fresh else run
            start = end
