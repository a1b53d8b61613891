"""Each rule of eviction on sequences worked out by hand, then all of them on random loads."""

import random

import numpy as np
import pytest

from stoker.engine.core.eviction import POLICIES, EvictionPolicy, tlru
from stoker.engine.core.radix import RadixTree

NS = ("base",)
RULES = {**POLICIES, "tlru": tlru(24, 8, 1)}


def sequence(first, n=1):
    """Tokens that share nothing with other `first`."""
    return np.array([first, *range(1000, 1000 + n - 1)], np.int32)


class Cache:
    """A tree of sequences of one page each, whose page ids are their first tokens."""

    def __init__(self, policy: EvictionPolicy):
        self.tree = RadixTree(1, policy)

    def insert(self, first, now, n=1, **kw):
        pages = np.arange(first, first + n, dtype=np.int32)
        return self.tree.insert(sequence(first, n), pages, NS, float(now), **kw)[0]

    def use(self, first, now, n=1):
        node, _, num_matched = self.tree.match(sequence(first, n), NS, float(now))
        assert num_matched == n
        self.tree.count_hit(node)

    def evicted(self, n=1):
        pages = self.tree.evict(n).tolist()
        self.tree.check()
        return pages


def test_lru():
    cache = Cache(POLICIES["lru"])
    for now, first in enumerate([10, 20, 30]):
        cache.insert(first, now)
    cache.use(10, 5)
    assert [cache.evicted() for _ in range(3)] == [[20], [30], [10]]


def test_lfu():
    cache = Cache(POLICIES["lfu"])
    for now, first in enumerate([10, 20, 30]):
        cache.insert(first, now)
    for now, first in enumerate([10, 10, 10, 20, 30, 30], 5):
        cache.use(first, now)
    cache.insert(40, 20)  # the newest, never used
    assert [cache.evicted() for _ in range(4)] == [[40], [20], [30], [10]]


def test_lfu_takes_the_older_of_equals():
    cache = Cache(POLICIES["lfu"])
    cache.insert(10, 0)
    cache.insert(20, 1)
    cache.use(20, 2)
    cache.use(10, 3)
    assert [cache.evicted() for _ in range(2)] == [[20], [10]]


def test_slru():
    cache = Cache(POLICIES["slru"])
    for now, first in enumerate([10, 20, 30, 40]):
        cache.insert(first, now)
    cache.use(10, 5)
    cache.use(10, 6)  # protected
    cache.use(20, 7)  # once is not enough, but it is more recent than 30 and 40
    cache.use(40, 8)
    cache.use(40, 9)  # protected
    assert [cache.evicted() for _ in range(4)] == [[30], [20], [10], [40]]


def test_fifo():
    cache = Cache(POLICIES["fifo"])
    for now, first in enumerate([10, 20, 30]):
        cache.insert(first, now)
    for now in range(5, 9):
        cache.use(10, now)
    assert [cache.evicted() for _ in range(3)] == [[10], [20], [30]]


def test_fifo_splits_keep_their_age():
    cache = Cache(POLICIES["fifo"])
    cache.insert(10, 0, n=4)
    cache.insert(50, 1)
    cache.tree.match(sequence(10, 2), NS, 9.0)  # splits the first edge
    assert [cache.evicted(2) for _ in range(3)] == [[12, 13], [10, 11], [50]]


def test_priority():
    cache = Cache(POLICIES["priority"])
    cache.insert(10, 0, priority=1)
    cache.insert(20, 1, priority=-5)
    cache.insert(30, 2)
    cache.insert(40, 3, priority=1)
    cache.insert(50, 4)
    cache.insert(30, 5, priority=7)  # the highest of those that left it counts
    cache.insert(30, 6, priority=-9)
    assert [cache.evicted() for _ in range(5)] == [[20], [50], [10], [40], [30]]


def test_tlru_takes_the_tails_that_nobody_would_miss():
    # A next turn of 2 tokens may compute 6: so of L tokens the last 4 are safe to forget.
    cache = Cache(tlru(6, 2, 1))
    cache.insert(10, 0, n=10)  # positions 6 to 9 are safe
    cache.insert(50, 1, n=3)  # all is
    cache.insert(80, 2, n=8)  # positions 4 to 7
    cache.use(10, 3, n=10)
    assert cache.evicted(2) == [51, 52]
    assert cache.evicted(3) == [50, 86, 87]  # then the older of the other tails
    assert cache.evicted(6) == [84, 85, 16, 17, 18, 19]
    assert cache.evicted(5) == [80, 81, 82, 83, 15]  # nothing is safe any more: plain LRU
    assert cache.evicted(9) == [10, 11, 12, 13, 14]


def test_tlru_knows_how_long_a_conversation_was_though_its_end_is_gone():
    cache = Cache(tlru(6, 2, 1))
    cache.insert(10, 0, n=10)
    cache.insert(50, 1, n=10)
    assert cache.evicted(4) == [16, 17, 18, 19]
    assert cache.evicted(4) == [56, 57, 58, 59]  # the first has nothing left that is safe
    assert cache.evicted(2) == [14, 15]


def test_tlru_with_pages():
    cache = RadixTree(4, tlru(10, 4, 4))  # of 20 tokens the last 6 are safe: one whole page
    cache.insert(np.arange(20, dtype=np.int32), np.arange(5, dtype=np.int32), NS, 0.0)
    cache.insert(np.arange(50, 66, dtype=np.int32), np.arange(10, 14, dtype=np.int32), NS, 1.0)
    assert cache.evict(2).tolist() == [4, 13]
    assert cache.evict(1).tolist() == [3]


@pytest.mark.parametrize("name", RULES)
def test_pinned_prefixes_go_last(name):
    cache = Cache(RULES[name])
    cache.insert(10, 0, pin=1)
    cache.insert(20, 1, pin=2)
    for now, first in enumerate([30, 40], 2):
        cache.insert(first, now, priority=9)
        for _ in range(3):
            cache.use(first, now)
    assert cache.evicted(2) in ([30, 40], [40, 30])
    assert cache.evicted(2) == [10, 20]


@pytest.mark.parametrize("name", RULES)
def test_a_pin_covers_the_prefix_and_not_what_follows(name):
    cache = Cache(RULES[name])
    cache.insert(10, 0, n=6)
    cache.tree.insert(sequence(10, 3), np.arange(70, 73, dtype=np.int32), NS, 1.0, pin=1)
    cache.insert(50, 2, n=2)
    assert sorted(cache.evicted(5)) == [13, 14, 15, 50, 51]
    assert cache.evicted(3) == [10, 11, 12]


def expected_victims(tree, rule):
    """The leaves that may go next: those of the smallest key, looked up one by one."""
    leaves = [n for n in tree.nodes() if n.parent and not n.children and not n.lock_count]
    best = min((node.pin, rule.key(node)) for node in leaves)
    return [set(n.pages.tolist()) for n in leaves if (n.pin, rule.key(n)) == best]


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("name", RULES)
def test_the_heap_agrees_with_a_search_of_all_leaves(name, page_size):
    rule = tlru(24 * page_size, 8 * page_size, page_size) if name == "tlru" else RULES[name]
    tree = RadixTree(page_size, rule)
    rng = random.Random(page_size)
    free, locked = list(range(1, 4000)), []
    num_evicted = 0
    for now in range(400):
        depth = rng.randrange(1, 10)
        branch = [rng.randrange(3) for _ in range(depth)]
        tokens = np.repeat(np.array(branch, np.int32), page_size)
        namespace = (rng.choice("ab"),)
        action = rng.random()
        if action < 0.4:
            pages = np.array(free[:depth], np.int32)
            _, held, num_present = tree.insert(
                tokens,
                pages,
                namespace,
                float(now),
                priority=rng.choice([0, 0, 3]),
                pin=rng.choice([0, 0, 0, 1]),
            )
            assert (
                held.tolist()[num_present // page_size :] == free[num_present // page_size : depth]
            )
            del free[num_present // page_size : depth]
        elif action < 0.7:
            node, _, _ = tree.match(tokens, namespace, float(now))
            tree.count_hit(node)
            if rng.random() < 0.3:
                tree.lock(node)
                locked.append(node)
        elif locked and action < 0.8:
            tree.unlock(locked.pop(rng.randrange(len(locked))))
        elif tree.num_evictable:
            candidates = expected_victims(tree, rule)
            (page,) = tree.evict(1).tolist()
            assert any(page in pages for pages in candidates), f"{page} was not the one to go"
            free.append(page)
            num_evicted += 1
        tree.check()
    for node in locked:
        tree.unlock(node)
    free += tree.flush().tolist()
    assert sorted(free) == list(range(1, 4000)) and list(tree.nodes()) == [] and num_evicted > 30


def test_find_changes_nothing():
    tree = RadixTree(4)
    tree.insert(np.arange(16, dtype=np.int32), np.arange(1, 5, dtype=np.int32), NS, 1.0)
    other = np.array([*range(10), 77, 78], np.int32)
    node, num_cached = tree.find(other, NS)
    assert num_cached == 8 and node.pages.tolist() == [1, 2, 3, 4]
    assert tree.num_nodes == 1 and node.last_access_s == 1.0 and node.hit_count == 0
    assert tree.find(other, ("unknown",)) == (None, 0)
    assert tree.find(np.arange(50, 60, dtype=np.int32), NS)[1] == 0
