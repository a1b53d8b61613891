"""The cache tiers below the device: host memory, and stores behind it (disk, Redis).

Pages are addressed by content (`page_keys`), so the tiers need no tree: a prefix that the device
lacks is found key by key. This is the state machine alone; it gives `copy_orders` and takes
in `Copied` facts, in any order.

Saves and loads are queued on the device in the order in which they are given, before the step that
is planned in the same turn. So a page may be evicted, and be somebody else's, as soon as its save
was ordered, and a loaded page may be read as soon as its load was. Host slots are different: the
processor reads and writes them too, so a slot is not touched before all orders on it have ended.

Every host slot is free, or in one `HostPage`. A page that is wanted and not there, damaged, late
or refused is computed again; nothing here can make a request fail.

Runs on: any (pure).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Literal

import numpy as np

from ..api.messages import TierStats
from .copy_orders import DAMAGED, Copied, Fetch, Find, Load, Order, Put, Save
from .page_keys import root_key

WritePolicy = Literal["write-through", "write-through-selective", "write-back"]

FETCH_PAGES = 16  # a Fetch holds no more, so that several run at once and a part may be in time
PUT_PAGES = 8
MAX_PUTTING = 64  # pages; the rest waits in the host tier
PREFETCH_S_PER_TOKEN = 1e-4  # what the prefetch deadline grows by


class HostPage:
    """A page in host memory.

    Attributes:
        state: "saving" while the device writes it: loads, which come later on the device, may
            read it, the processor may not. "filling" while a store's thread writes it: nobody may
            read it. "ready" otherwise.
        num_readers: loads and puts that have not ended.
        origin: the tier it counts for at its next load: 0 is the host, 1 + i the i-th store.
        is_dropped: flushed; its slot is free once its orders have ended.
        waiters: prefetches that wait for it.
    """

    __slots__ = ("is_dropped", "key", "num_readers", "origin", "slot", "state", "waiters")

    def __init__(self, key: bytes, slot: int, state: str):
        self.key = key
        self.slot = slot
        self.state = state
        self.num_readers = 0
        self.origin = 0
        self.is_dropped = False
        self.waiters: list[Prefetch] = []


class Prefetch:
    """What a waiting request waits for: an answer (`pending` is None), then pages of these keys.

    Attributes:
        is_late: whether its time was over before the stores had answered.
    """

    __slots__ = ("deadline_s", "is_late", "keys", "pending")

    def __init__(self, keys: tuple[bytes, ...], deadline_s: float):
        self.keys = keys
        self.deadline_s = deadline_s
        self.pending: set[bytes] | None = None
        self.is_late = False


class Tiers:
    """Which page is where below the device, and what is to be copied.

    Args:
        num_pages: device pages. page_size: tokens a page.
        num_slots: pages that the host memory holds.
        fingerprint: of model, dtype, layout and page size; part of every key.
        policy: when device pages are saved: "write-through" when they are cached,
            "write-through-selective" at their write_hits-th hit, "write-back" when they are
            evicted. Whatever the policy wants saved and is not on the host goes there when it is
            evicted. From the host all pages go on to the stores.
        stores: their names, nearest first.
        prefetch_s: a request waits no longer than this, and a little more for each token, for
            pages from the stores.
        min_prefetch_tokens: less is not worth a look into the stores.
        max_load_pages: that a step may load while streams run.
        max_saving: pages whose saves have not ended, under the write-through policies.

    Attributes:
        loads_ordered: whether a load was ordered since it was last set to False.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        fingerprint: bytes,
        policy: WritePolicy = "write-through",
        write_hits: int = 2,
        stores: tuple[str, ...] = (),
        prefetch_s: float = 2.0,
        min_prefetch_tokens: int = 64,
        max_load_pages: int = 64,
        max_saving: int = 64,
    ):
        self.page_size = page_size
        self.num_slots = num_slots
        self.policy = policy
        self.max_load_pages = max_load_pages
        self.loads_ordered = False
        self._fingerprint = fingerprint
        self._write_hits = write_hits
        self._stores = stores
        self._prefetch_s = prefetch_s
        self._min_prefetch_pages = -(-min_prefetch_tokens // page_size)
        self._max_saving = max_saving

        # The device's cached pages, in both directions.
        self._key_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._num_hits = np.zeros(num_pages, np.int32)

        self._host: dict[bytes, HostPage] = {}
        self._lru: OrderedDict[bytes, HostPage] = OrderedDict()  # what can be evicted
        self._dropped: set[HostPage] = set()  # by a flush, with orders that have not ended
        # Slots in rising order where they were never used: neighbours are copied at once.
        self._free = list(range(num_slots - 1, -1, -1))

        self._orders: list[Order] = []
        self._in_flight: dict[int, tuple[Order, tuple[HostPage, ...]]] = {}
        self._finding: dict[int, Prefetch] = {}
        self._prefetches: set[Prefetch] = set()
        self._next_deadline_s = float("inf")
        self._num_late = 0  # prefetches whose answer is overdue
        self._to_save: dict[int, None] = {}  # device pages, the oldest first
        self._to_put: OrderedDict[bytes, HostPage] = OrderedDict()
        self._num_saving = 0
        self._num_putting = 0
        self._num_filling = 0
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._cached_tokens = [0] * (1 + len(stores))

    # ---- the device's cache ------------------------------------------------------------------

    def root(self, namespace: tuple[str, ...]) -> bytes:
        """Where the keys of a namespace begin."""
        return root_key(namespace, self._fingerprint)

    def insert(self, keys: list[bytes], pages: np.ndarray) -> None:
        """The tree has taken over these pages."""
        for key, page in zip(keys, pages.tolist(), strict=True):
            self._key_of[page] = key
            self._page_of[key] = page
            if self.policy == "write-through" and key not in self._host:
                self._to_save[page] = None
        self._num_hits[pages] = 0

    def hit(self, pages: np.ndarray) -> None:
        """A request begins with these cached pages."""
        self._num_hits[pages] += 1
        if self.policy == "write-through-selective":
            for page in pages[self._num_hits[pages] == self._write_hits].tolist():
                if self._key_of[page] not in self._host:
                    self._to_save[page] = None

    def evict(self, pages: np.ndarray) -> None:
        """The tree gives these pages up. What is worth it is saved before they are used again."""
        to_save: list[tuple[bytes, int]] = []
        is_selective = self.policy == "write-through-selective"
        for page in pages.tolist():
            key = self._forget(page)
            is_wanted = not is_selective or self._num_hits[page] >= self._write_hits
            if is_wanted and key not in self._host:
                to_save.append((key, page))
        self._save(to_save)

    def flush(self, pages: np.ndarray) -> None:
        """The tree gives these pages up, and the host is to forget all. Stores keep theirs."""
        for page in pages.tolist():
            self._forget(page)
        self._to_save.clear()
        self._to_put.clear()
        for entry in list(self._host.values()):
            entry.is_dropped = True
            for prefetch in entry.waiters:
                self._prefetches.discard(prefetch)
            entry.waiters.clear()
            del self._host[entry.key]
            self._dropped.add(entry)
            self._settle(entry)
        self._lru.clear()

    def _forget(self, page: int) -> bytes:
        key = self._key_of[page]
        assert key is not None, f"page {page} was never inserted"
        self._key_of[page] = None
        del self._page_of[key]
        self._to_save.pop(page, None)
        return key

    # ---- host to device ----------------------------------------------------------------------

    def num_loadable(self, keys: list[bytes]) -> int:
        """How many of the first keys are in host memory."""
        for n, key in enumerate(keys):
            entry = self._host.get(key)
            if entry is None or entry.state == "filling":
                return n
        return len(keys)

    def load(self, keys: list[bytes], pages: np.ndarray, *, is_counted: bool = True) -> None:
        """Copy pages that `num_loadable` counted to device pages, before the next step.

        Args:
            is_counted: whether it serves a request that was never admitted before.
        """
        entries = tuple(self._host[key] for key in keys)
        for entry in entries:
            entry.num_readers += 1
            self._lru.pop(entry.key, None)
            if is_counted:
                self._cached_tokens[entry.origin] += self.page_size
            entry.origin = 0
        slots = np.array([entry.slot for entry in entries], np.int32)
        self._order(Load(self._new_id(), slots, pages.copy()), entries)
        self._counts["loaded"] += len(entries)
        self.loads_ordered = True

    # ---- stores to host ----------------------------------------------------------------------

    def prefetch(self, keys: list[bytes], arrival_s: float) -> Prefetch | None:
        """Look in the stores for what neither device nor host has; None: nothing to wait for.

        While an answer is overdue nobody else waits for the stores.
        """
        if not self._stores or self._num_late:
            return None
        first = 0
        while first < len(keys) and self._is_near(keys[first]):
            first += 1
        wanted = tuple(keys[first : first + self.num_slots // 2])
        if len(wanted) < self._min_prefetch_pages:
            return None
        timeout_s = self._prefetch_s + PREFETCH_S_PER_TOKEN * len(wanted) * self.page_size
        prefetch = Prefetch(wanted, arrival_s + timeout_s)
        order = Find(self._new_id(), wanted)
        self._finding[order.order_id] = prefetch
        self._order(order, ())
        self._prefetches.add(prefetch)
        self._next_deadline_s = min(self._next_deadline_s, prefetch.deadline_s)
        return prefetch

    def is_pending(self, prefetch: Prefetch | None) -> bool:
        """Whether a request should still wait."""
        return prefetch in self._prefetches

    def cancel(self, prefetch: Prefetch | None) -> None:
        """The request waits no longer. Pages that are on their way still arrive."""
        if prefetch is not None:
            self._prefetches.discard(prefetch)

    def expire(self, now: float) -> None:
        """End the prefetches whose time is over: their requests go on with what is there."""
        if now < self._next_deadline_s:
            return
        late = [prefetch for prefetch in self._prefetches if prefetch.deadline_s <= now]
        self._prefetches.difference_update(late)
        for prefetch in late:
            prefetch.is_late = prefetch.pending is None
            self._num_late += prefetch.is_late
        self._counts["prefetch timeouts"] += len(late)
        deadlines = (prefetch.deadline_s for prefetch in self._prefetches)
        self._next_deadline_s = min(deadlines, default=float("inf"))

    @property
    def num_pending(self) -> int:
        """Requests that wait for pages from the stores."""
        return len(self._prefetches)

    def _is_near(self, key: bytes) -> bool:
        entry = self._host.get(key)
        return key in self._page_of or (entry is not None and entry.state != "filling")

    def _fetch(self, prefetch: Prefetch, num_found: int) -> None:
        """The stores have the first num_found pages of a prefetch."""
        if num_found < self._min_prefetch_pages or prefetch not in self._prefetches:
            self._prefetches.discard(prefetch)
            return
        prefetch.pending = set()
        missing = []
        for key in prefetch.keys[:num_found]:
            entry = self._host.get(key)
            if entry is not None and entry.state == "filling":  # for another request
                entry.waiters.append(prefetch)
                prefetch.pending.add(key)
            elif not self._is_near(key):
                missing.append(key)
        # Half of the host stays with what is known to be useful.
        missing = missing[: max(self.num_slots // 2 - self._num_filling, 0)]
        entries = self._take(missing, "filling")
        for entry in entries:
            entry.waiters.append(prefetch)
            prefetch.pending.add(entry.key)
        self._num_filling += len(entries)
        for at in range(0, len(entries), FETCH_PAGES):
            piece = tuple(entries[at : at + FETCH_PAGES])
            keys = tuple(entry.key for entry in piece)
            slots = tuple(entry.slot for entry in piece)
            self._order(Fetch(self._new_id(), keys, slots), piece)
        if not prefetch.pending:
            self._prefetches.discard(prefetch)

    # ---- orders ------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether `take_orders` would give any."""
        return bool(
            self._orders
            or (self._to_save and self._num_saving < self._max_saving)
            or (self._to_put and self._num_putting < MAX_PUTTING)
        )

    @property
    def is_busy(self) -> bool:
        """Whether pages are still on their way to the host or to a store."""
        return bool(self._to_save or self._to_put or self._num_saving or self._num_putting)

    def take_orders(self) -> list[Order]:
        """What is to be copied now, in order: saves first, for they must not wait for loads.

        They may come first, since no page is loaded and saved in one turn.
        """
        room = self._max_saving - self._num_saving
        if self._to_save and room > 0:
            pages = list(self._to_save)[:room]
            for page in pages:
                del self._to_save[page]
            pairs = ((self._key_of[page], page) for page in pages)
            self._save([(key, page) for key, page in pairs if key and key not in self._host])
        while self._to_put and self._num_putting < MAX_PUTTING:
            entries: list[HostPage] = []
            while self._to_put and len(entries) < PUT_PAGES:
                entries.append(self._to_put.popitem(last=False)[1])
            for entry in entries:
                entry.num_readers += 1
                self._lru.pop(entry.key, None)
            keys = tuple(entry.key for entry in entries)
            slots = tuple(entry.slot for entry in entries)
            self._num_putting += len(entries)
            self._order(Put(self._new_id(), keys, slots), tuple(entries))
        orders, self._orders = self._orders, []
        orders.sort(key=lambda order: not isinstance(order, Save))
        return orders

    def handle(self, fact: Copied) -> None:
        """An order has ended, well or not."""
        order, entries = self._in_flight.pop(fact.order_id)
        match order:
            case Save():
                self._num_saving -= len(entries)
                for entry in entries:
                    entry.state = "ready"
                    if self._stores and not entry.is_dropped:
                        self._to_put[entry.key] = entry
            case Load():
                for entry in entries:
                    entry.num_readers -= 1
            case Put():
                self._num_putting -= len(entries)
                for entry in entries:
                    entry.num_readers -= 1
                self._counts["put"] += sum(result > 0 for result in fact.results)
                self._counts["not put"] += sum(result <= 0 for result in fact.results)
            case Find():
                prefetch = self._finding.pop(fact.order_id)
                self._num_late -= prefetch.is_late
                self._fetch(prefetch, fact.results[0])
            case Fetch():
                self._num_filling -= len(entries)
                for entry, result in zip(entries, fact.results, strict=True):
                    self._arrive(entry, result)
        for entry in reversed(entries):  # a prefix is used before its continuation: it stays longer
            self._settle(entry)

    def _arrive(self, entry: HostPage, result: int) -> None:
        for prefetch in entry.waiters:
            assert prefetch.pending is not None
            prefetch.pending.discard(entry.key)
            if not prefetch.pending:
                self._prefetches.discard(prefetch)
        entry.waiters.clear()
        entry.state = "ready"
        if result >= 0:
            entry.origin = 1 + result
            self._counts["fetched"] += 1
            return
        self._counts["damaged" if result == DAMAGED else "missing"] += 1
        if not entry.is_dropped:
            entry.is_dropped = True
            del self._host[entry.key]
            self._dropped.add(entry)

    def _save(self, pairs: list[tuple[bytes, int]]) -> None:
        """Order copies of (key, device page) to the host, as far as there is room."""
        entries = self._take([key for key, _ in pairs], "saving")
        self._counts["not saved"] += len(pairs) - len(entries)
        if not entries:
            return
        pages = np.array([page for _, page in pairs[: len(entries)]], np.int32)
        slots = np.array([entry.slot for entry in entries], np.int32)
        self._num_saving += len(entries)
        self._counts["saved"] += len(entries)
        self._order(Save(self._new_id(), pages, slots), tuple(entries))

    def _order(self, order: Order, entries: tuple[HostPage, ...]) -> None:
        self._in_flight[order.order_id] = order, entries
        self._orders.append(order)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _take(self, keys: list[bytes], state: str) -> list[HostPage]:
        """Host pages for the first of some keys; the least recently used ones make way."""
        entries = []
        for key in keys:
            if self._free:
                slot = self._free.pop()
            elif self._lru:
                _, oldest = self._lru.popitem(last=False)
                del self._host[oldest.key]
                if self._to_put.pop(oldest.key, None):
                    self._counts["not put"] += 1
                self._counts["host evictions"] += 1
                slot = oldest.slot
            else:
                break
            entry = self._host[key] = HostPage(key, slot, state)
            entries.append(entry)
        return entries

    def _settle(self, entry: HostPage) -> None:
        """Put a page in its place once no order is on it."""
        if entry.state != "ready" or entry.num_readers:
            return
        if entry.is_dropped:
            self._dropped.remove(entry)
            self._free.append(entry.slot)
        else:
            self._lru[entry.key] = entry
            self._lru.move_to_end(entry.key)

    # ---- figures and checks ------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Figures of now, and counters since the start."""
        counts = self._counts
        return TierStats(
            num_host_pages=self.num_slots,
            num_host_used=self.num_slots - len(self._free),
            cached_tokens=tuple(zip(("host", *self._stores), self._cached_tokens, strict=True)),
            saved_pages=counts["saved"],
            unsaved_pages=counts["not saved"],
            loaded_pages=counts["loaded"],
            fetched_pages=counts["fetched"],
            damaged_pages=counts["damaged"],
            put_pages=counts["put"],
            unput_pages=counts["not put"],
            evicted_pages=counts["host evictions"],
            prefetch_timeouts=counts["prefetch timeouts"],
        )

    def check(self, tree_pages: np.ndarray) -> None:
        """Raise AssertionError when places or counts do not agree.

        Args:
            tree_pages: all device pages that the tree owns.
        """
        known = {page: key for page, key in enumerate(self._key_of) if key is not None}
        assert known == {page: key for key, page in self._page_of.items()}, "device keys disagree"
        assert sorted(known) == sorted(tree_pages.tolist()), "tiers and tree know other pages"
        assert self._to_save.keys() <= known.keys(), "a page that is not cached is to be saved"

        entries = [*self._host.values(), *self._dropped]
        num_places = Counter(self._free)
        num_places.update(entry.slot for entry in entries)
        wrong = {slot: num_places[slot] for slot in range(self.num_slots) if num_places[slot] != 1}
        assert not wrong and len(num_places) == self.num_slots, f"slots in so many places: {wrong}"
        assert all(entry.key == key for key, entry in self._host.items()), "a key is misplaced"

        readers: Counter[HostPage] = Counter()
        writers: dict[HostPage, str] = {}
        for order, pages in self._in_flight.values():
            if isinstance(order, Load | Put):
                readers.update(pages)
            elif isinstance(order, Save | Fetch):
                state = "saving" if isinstance(order, Save) else "filling"
                writers |= dict.fromkeys(pages, state)
        for entry in entries:
            assert entry.num_readers == readers[entry], "readers are miscounted"
            assert entry.state == writers.get(entry, "ready"), f"no order ends {entry.state!r}"
            assert entry.state != "filling" or not entry.num_readers, "an unfilled page is read"
            is_idle = entry.state == "ready" and not entry.num_readers
            assert not (is_idle and entry.is_dropped), "a dropped page keeps its slot"
            assert (self._lru.get(entry.key) is entry) == (is_idle and not entry.is_dropped), (
                "the queue of eviction is wrong"
            )
        assert len(self._lru) <= len(self._host)
        assert all(self._host.get(key) is entry for key, entry in self._to_put.items()), (
            "a page that is gone is to be put"
        )
        num_on = Counter[type]()
        for order, pages in self._in_flight.values():
            num_on[type(order)] += len(pages)
        counted = {Save: self._num_saving, Put: self._num_putting, Fetch: self._num_filling}
        for kind, count in counted.items():
            assert num_on[kind] == count, f"{num_on[kind]} pages in a {kind}, counted {count}"
        assert self._num_late == sum(prefetch.is_late for prefetch in self._finding.values())
        for prefetch in self._prefetches:
            if prefetch.pending is None:
                assert prefetch in self._finding.values(), "a prefetch waits for nothing"
                continue
            filling = {key for key in prefetch.pending if self._host[key].state == "filling"}
            assert prefetch.pending and filling == prefetch.pending, "a prefetch waits for nothing"
