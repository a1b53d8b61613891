"""The tiers' rules, on sequences that are worked out by hand."""

import numpy as np
import pytest

from stoker.engine.core.copy_orders import MISSING, Copied, Fetch, Find, Load, Put, Save
from stoker.engine.core.tiers import Tiers

KEYS = [bytes([i]) * 32 for i in range(20)]


class Hand:
    """Tiers whose orders end when the test says so. Page i has key i."""

    def __init__(self, **kw):
        kw = {"num_pages": 21, "page_size": 4, "num_slots": 4, "fingerprint": b""} | kw
        self.tiers = Tiers(min_prefetch_tokens=1, **kw)
        self.tree = set()

    def insert(self, *pages):
        self.tree |= set(pages)
        self.tiers.insert([KEYS[p - 1] for p in pages], np.array(pages, np.int32))

    def evict(self, *pages):
        self.tree -= set(pages)
        self.tiers.evict(np.array(pages, np.int32))

    def hit(self, *pages):
        self.tiers.hit(np.array(pages, np.int32))

    def orders(self, end=True, results=None):
        """What is to be done; saves, loads and puts end well."""
        orders = self.tiers.take_orders()
        for order in orders:
            if end and isinstance(order, Save | Load | Put):
                self.end(order, (1,) * len(order.slots) if isinstance(order, Put) else ())
        self.check()
        return orders

    def end(self, order, results=()):
        self.tiers.handle(Copied(order.order_id, results))
        self.check()

    def check(self):
        self.tiers.check(np.array(sorted(self.tree), np.int32))

    def on_host(self):
        return {KEYS.index(key) + 1 for key in self.tiers._host}


def saved(orders):
    return [order.pages.tolist() for order in orders if isinstance(order, Save)]


def test_write_through_saves_what_is_cached():
    hand = Hand()
    hand.insert(1, 2)
    assert saved(hand.orders()) == [[1, 2]]
    hand.insert(3)
    assert saved(hand.orders()) == [[3]]
    hand.evict(2, 3)
    assert saved(hand.orders()) == [] and hand.on_host() == {1, 2, 3}


def test_write_through_selective_saves_at_the_nth_hit():
    hand = Hand(policy="write-through-selective", write_hits=2)
    hand.insert(1, 2, 3)
    hand.hit(1, 2)
    assert saved(hand.orders()) == []
    hand.hit(1)
    assert saved(hand.orders()) == [[1]]
    hand.hit(1, 2)
    assert saved(hand.orders()) == [[2]]
    hand.evict(1, 2, 3)
    assert saved(hand.orders()) == [] and hand.on_host() == {1, 2}


def test_write_back_saves_what_is_evicted():
    hand = Hand(policy="write-back")
    hand.insert(1, 2, 3)
    hand.hit(1, 2, 3)
    assert saved(hand.orders()) == []
    hand.evict(3, 2)
    assert saved(hand.orders()) == [[3, 2]] and hand.on_host() == {2, 3}


def test_a_page_that_is_evicted_before_its_save_is_saved_first():
    hand = Hand()
    hand.insert(1, 2)
    hand.evict(2)  # in the same turn
    assert saved(hand.orders()) == [[2], [1]]


def test_no_more_pages_than_max_saving_are_saved_at_once():
    hand = Hand(max_saving=2)
    hand.insert(1, 2, 3)
    (first,) = hand.orders(end=False)
    assert first.pages.tolist() == [1, 2] and not hand.tiers.has_orders
    hand.end(first)
    assert hand.tiers.has_orders and saved(hand.orders()) == [[3]]


def test_the_least_recently_used_page_leaves_the_host():
    hand = Hand(num_slots=3)
    hand.insert(1, 2, 3)
    hand.orders()
    hand.evict(1, 2, 3)
    assert hand.tiers.num_loadable(KEYS[:4]) == 3
    hand.tiers.load(KEYS[:1], np.array([9], np.int32))
    hand.orders()
    hand.insert(5)  # 3 was settled before 2, a continuation before its beginning
    hand.orders()
    assert hand.on_host() == {1, 2, 5}
    hand.insert(6)
    hand.orders()
    assert hand.on_host() == {1, 5, 6}


def test_slots_with_orders_on_them_stay():
    hand = Hand(num_slots=2)
    hand.insert(1, 2)
    hand.orders()
    hand.evict(1, 2)
    hand.tiers.load(KEYS[:2], np.array([9, 10], np.int32))
    (load,) = hand.orders(end=False)
    hand.insert(3)
    assert saved(hand.orders()) == [] and hand.tiers.stats().unsaved_pages == 1
    hand.end(load)
    hand.insert(4)
    assert saved(hand.orders()) == [[4]]


def test_a_save_is_loadable_at_once_and_put_when_it_has_ended():
    hand = Hand(stores=("disk",))
    hand.insert(1)
    (save,) = hand.orders(end=False)
    hand.evict(1)
    assert hand.tiers.num_loadable(KEYS[:1]) == 1
    assert hand.orders() == []
    hand.end(save)
    (put,) = hand.orders()
    assert isinstance(put, Put) and put.keys == (KEYS[0],) and put.slots == tuple(save.slots)


def test_saves_come_before_the_loads_of_their_turn():
    hand = Hand(num_slots=8)
    hand.insert(1, 2)
    hand.orders()
    hand.evict(1, 2)
    hand.tiers.load(KEYS[:2], np.array([9, 10], np.int32))
    hand.insert(3)
    assert [type(order) for order in hand.orders()] == [Save, Load]


def test_a_prefetch_looks_behind_device_and_host():
    hand = Hand(stores=("disk",), num_slots=8)
    hand.insert(1)
    hand.orders()
    hand.orders()
    prefetch = hand.tiers.prefetch(KEYS[:6], arrival_s=0.0)
    (find,) = hand.orders()
    assert isinstance(find, Find) and find.keys == tuple(KEYS[1:5]), "half of the host at most"
    hand.end(find, (3,))
    (fetch,) = hand.orders()
    assert isinstance(fetch, Fetch) and fetch.keys == tuple(KEYS[1:4])
    assert hand.tiers.is_pending(prefetch) and hand.tiers.num_loadable(KEYS[1:4]) == 0
    other = hand.tiers.prefetch(KEYS[:4], arrival_s=0.0)
    (find,) = hand.orders()
    hand.end(find, (3,))
    assert hand.orders() == [] and hand.tiers.is_pending(other), "one fetch serves both"
    hand.end(fetch, (0, MISSING, 0))
    assert not hand.tiers.is_pending(prefetch) and not hand.tiers.is_pending(other)
    assert hand.tiers.num_loadable(KEYS[1:4]) == 1 and hand.on_host() == {1, 2, 4}
    hand.tiers.load(KEYS[1:2], np.array([9], np.int32))
    hand.tiers.load(KEYS[1:2], np.array([10], np.int32))
    assert dict(hand.tiers.stats().cached_tokens) == {"host": 4, "disk": 4}


def test_a_prefetch_that_is_late_is_not_waited_for():
    hand = Hand(stores=("disk",), prefetch_s=2.0)
    prefetch = hand.tiers.prefetch(KEYS[:2], arrival_s=10.0)
    (find,) = hand.orders()
    hand.tiers.expire(12.0)
    assert hand.tiers.is_pending(prefetch)
    hand.tiers.expire(12.01)
    assert not hand.tiers.is_pending(prefetch) and hand.tiers.num_pending == 0
    hand.check()
    assert hand.tiers.prefetch(KEYS[4:6], arrival_s=12.0) is None, "the store is stuck, it seems"
    hand.end(find, (2,))
    assert hand.orders() == [] and hand.tiers.stats().prefetch_timeouts == 1
    assert hand.tiers.prefetch(KEYS[4:6], arrival_s=13.0) is not None


def test_a_flush_forgets_host_pages_once_their_orders_have_ended():
    hand = Hand(stores=("disk",), num_slots=8)
    hand.insert(1, 2)
    (save,) = hand.orders(end=False)
    hand.tiers.prefetch(KEYS[4:6], arrival_s=0.0)
    (find,) = hand.orders()
    hand.end(find, (2,))
    (fetch,) = hand.orders()
    hand.tree.clear()
    hand.tiers.flush(np.array([1, 2], np.int32))
    hand.check()
    assert hand.tiers.num_pending == 0 and hand.tiers.num_loadable(KEYS[:1]) == 0
    hand.insert(1)  # the same content again, into a slot of its own
    (again,) = hand.orders(end=False)
    assert not set(again.slots) & set(save.slots)
    for order, results in ((save, ()), (fetch, (0, 0)), (again, ())):
        hand.end(order, results)
    assert hand.on_host() == {1} and hand.tiers.stats().num_host_used == 1


@pytest.mark.parametrize("fault", ["slot", "reader", "lru", "device"])
def test_check_finds_a_planted_fault(fault):
    hand = Hand()
    hand.insert(1, 2)
    hand.orders()
    entry = hand.tiers._host[KEYS[0]]
    match fault:
        case "slot":
            hand.tiers._free.append(entry.slot)
        case "reader":
            entry.num_readers += 1
        case "lru":
            del hand.tiers._lru[entry.key]
        case "device":
            hand.tree.add(7)
    with pytest.raises(AssertionError):
        hand.check()
