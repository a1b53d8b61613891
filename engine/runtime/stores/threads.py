"""The threads that talk to the stores, so that nobody else waits for them.

Readers serve `Find` and `Fetch`, writers serve `Put`. Each order is answered by one `Copied`,
whatever the stores do. A store that raises is left alone for a while, longer each time.

Runs on: pool.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from ...core.copy_orders import DAMAGED, MISSING, Copied, Fetch, Find, Put
from . import PageStore, is_intact, seal

log = logging.getLogger("stoker")

NUM_READERS = 4
NUM_WRITERS = 2
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # how long a store is left alone after it failed

StoreOrder = Find | Fetch | Put


class GuardedStore:
    """A store, and when to use it again after a failure.

    Attributes:
        num_errors: calls that raised.
    """

    def __init__(self, store: PageStore, clock: Callable[[], float] = time.monotonic):
        self.store = store
        self.num_errors = 0
        self._clock = clock
        self._retry_at_s = 0.0
        self._wait_s = RETRY_S

    @property
    def is_open(self) -> bool:
        """Whether it may be called."""
        return self._clock() >= self._retry_at_s

    def call(self, method: Callable[..., list[bool] | None], keys: Sequence[bytes], *rest) -> list:
        """What the method answers; False for every key where it may not be called, or fails."""
        if not self.is_open:
            return [False] * len(keys)
        try:
            answer = method(keys, *rest)
        except Exception as error:  # a store is somebody else's code, and a server's mood
            self.num_errors += 1
            self._retry_at_s = self._clock() + self._wait_s
            log.warning(
                "the %s store failed (%s: %s); not used for %.0f s",
                self.store.name,
                type(error).__name__,
                error,
                self._wait_s,
            )
            self._wait_s = min(2 * self._wait_s, MAX_RETRY_S)
            return [False] * len(keys)
        self._wait_s = RETRY_S
        if answer is None or len(answer) != len(keys):
            return [False] * len(keys)
        return answer


class StoreThreads:
    """Serves orders with some stores, the nearest first.

    Args:
        record_of: the memory of a host slot.
        fingerprint: is written into each record.
        post: takes the answers; called on these threads.
    """

    def __init__(
        self,
        stores: Sequence[PageStore],
        record_of: Callable[[int], memoryview],
        fingerprint: bytes,
        post: Callable[[Copied], object],
    ):
        self.stores = [GuardedStore(store) for store in stores]
        self._record_of = record_of
        self._fingerprint = fingerprint
        self._post = post
        self._reads: queue.SimpleQueue[StoreOrder | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[StoreOrder | None] = queue.SimpleQueue()
        # Daemons: a store that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._serve, args=(orders,), name=name, daemon=True)
            for orders, name, count in (
                (self._reads, "stoker-store-read", NUM_READERS),
                (self._writes, "stoker-store-write", NUM_WRITERS),
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: StoreOrder) -> None:
        """Serve an order; returns at once."""
        (self._writes if isinstance(order, Put) else self._reads).put(order)

    def close(self, timeout_s: float) -> None:
        """End the threads after what they do now; wait no longer than this for it."""
        for orders, count in ((self._reads, NUM_READERS), (self._writes, NUM_WRITERS)):
            for _ in range(count):
                orders.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        for guarded in self.stores:
            guarded.store.close()

    def _serve(self, orders: queue.SimpleQueue[StoreOrder | None]) -> None:
        while (order := orders.get()) is not None:
            results: tuple[int, ...]
            match order:
                case Find(keys=keys):
                    results = (self._find(keys),)
                case Fetch(keys=keys, slots=slots):
                    results = self._fetch(keys, slots)
                case Put(keys=keys, slots=slots):
                    results = self._put(keys, slots)
            self._post(Copied(order.order_id, results))

    def _find(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are in any store."""
        num_found = 0
        for guarded in self.stores:
            # Where the nearer store's run ends, a farther one may go on.
            there = guarded.call(guarded.store.exists, keys[num_found:])
            num_found += next((i for i, is_there in enumerate(there) if not is_there), len(there))
        return num_found

    def _fetch(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[int, ...]:
        results = [MISSING] * len(keys)
        for number, guarded in enumerate(self.stores):
            wanted = [i for i, result in enumerate(results) if result < 0]
            if not wanted:
                break
            records = [self._record_of(slots[i]) for i in wanted]
            found = guarded.call(guarded.store.get, [keys[i] for i in wanted], records)
            damaged = []
            for i, record, is_there in zip(wanted, records, found, strict=True):
                if is_there and is_intact(record, keys[i]):
                    results[i] = number
                elif is_there:
                    results[i] = DAMAGED
                    damaged.append(keys[i])
            if damaged:
                log.warning("%d damaged pages in the %s store", len(damaged), guarded.store.name)
                guarded.call(guarded.store.drop, damaged)
        return tuple(results)

    def _put(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[int, ...]:
        if not any(guarded.is_open for guarded in self.stores):
            return (0,) * len(keys)
        records = [self._record_of(slot) for slot in slots]
        for key, record in zip(keys, records, strict=True):
            seal(record, key, self._fingerprint)
        kept = [0] * len(keys)
        for guarded in self.stores:
            taken = guarded.call(guarded.store.put, keys, records)
            kept = [k or int(bool(t)) for k, t in zip(kept, taken, strict=True)]
        return tuple(kept)
