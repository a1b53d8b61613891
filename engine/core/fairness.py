"""Weighted fairness between clients: who has received least goes first.

Each client has a counter of the work done for it, over its weight: computed prompt tokens and, at
twice the price, output tokens. Of those that wait, the client with the smallest counter is next.
One that was away comes back with no less than the smallest counter of those that are here, so that
nobody saves up for a burst. (Virtual token counter of Sheng et al., arXiv 2401.00588.)

Runs on: any (pure).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

OUTPUT_PRICE = 2.0  # of an output token, in prompt tokens
MAX_REMEMBERED = 4096  # clients that are away


class FairShares:
    """The counters.

    Args:
        weights: by client; 1 for the others.
    """

    def __init__(self, weights: Mapping[str, float]):
        self._weights = dict(weights)
        self._used: dict[str, float] = {}
        self._num_active: Counter[str] = Counter()  # unfinished requests

    def used(self, client: str) -> float:
        """The work done for a client, over its weight."""
        return self._used.get(client, 0.0)

    def price(self, client: str, num_tokens: float) -> float:
        """What so many prompt tokens add to a client's counter."""
        return num_tokens / self._weights.get(client, 1.0)

    def charge(self, client: str, num_prompt: int, num_output: int) -> None:
        """So many tokens were computed for a client."""
        price = self.price(client, num_prompt + OUTPUT_PRICE * num_output)
        self._used[client] = self.used(client) + price

    def arrive(self, client: str) -> None:
        """A request of this client begins to wait."""
        if not self._num_active[client]:
            others = (self.used(c) for c in self._num_active if self._num_active[c])
            self._used[client] = max(self.used(client), min(others, default=0.0))
        self._num_active[client] += 1

    def leave(self, client: str) -> None:
        """A request of this client has ended."""
        self._num_active[client] -= 1
        if not self._num_active[client]:
            del self._num_active[client]
            if len(self._used) > len(self._num_active) + MAX_REMEMBERED:
                self._forget(self._used.keys() - self._num_active.keys())

    def _forget(self, clients: Iterable[str]) -> None:
        for client in clients:
            del self._used[client]
