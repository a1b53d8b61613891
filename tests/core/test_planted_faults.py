"""Faults planted into the ledger: `check` or the device's tokens must catch each."""

from functools import partial

import pytest

from stoker.engine.core.ledger import PageLedger
from stoker.engine.core.pages import PagePool
from stoker.engine.core.radix import RadixTree
from stoker.engine.core.scheduler import Scheduler


def evict_without_detaching(monkeypatch):
    """Evicted pages go back to the pool, and the node stays in the tree."""
    monkeypatch.setattr(RadixTree, "_detach", lambda self, node: None)


def publish_and_keep(monkeypatch):
    """The tree gets the prompt's pages, and the request still believes that they are its own."""
    original = PageLedger._settle

    def settle(self, request, node, num_shared):
        is_publish = request.node is not None and node is not None
        original(self, request, node, request.num_shared if is_publish else num_shared)

    monkeypatch.setattr(PageLedger, "_settle", settle)


def leak_the_lock_of_a_failed_admission(monkeypatch):
    original = Scheduler._try_admit

    def try_admit(self, request):
        is_admitted = original(self, request)
        if not is_admitted:
            self.ledger.match(request)
        return is_admitted

    monkeypatch.setattr(Scheduler, "_try_admit", try_admit)


def unlock_only_the_last_node(monkeypatch):
    def unlock(self, node):
        node.lock_count -= 1
        if node.lock_count == 0:
            self.num_evictable += len(node.pages)
            self.num_protected -= len(node.pages)
            self._offer(node)

    monkeypatch.setattr(RadixTree, "unlock", unlock)


def free_duplicates_twice(monkeypatch):
    original = PageLedger.publish

    def publish(self, request):
        slot, first = request.slot, request.num_shared // self._page_size
        before = self._slots.table[slot].copy()
        original(self, request)
        last = request.num_shared // self._page_size
        adopted = before[first:last] != self._slots.table[slot, first:last]
        self.pool.release(before[first:last][adopted])

    monkeypatch.setattr(PageLedger, "publish", publish)


def keep_the_old_table_after_adoption(monkeypatch):
    """The host's table is right; the device goes on with pages that were freed."""
    original = PageLedger.publish

    def publish(self, request):
        original(self, request)
        self._slots.dirty.pop(request.slot, None)

    monkeypatch.setattr(PageLedger, "publish", publish)


def forget_the_tail_of_a_finished_request(monkeypatch):
    original = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: original(self, pages[1:]))


def cache_what_is_not_committed(monkeypatch):
    """Puts pages into the tree that a launched step has still to write, or that failed."""
    original = PageLedger.close

    def close(self, request, *, keep_prefix):
        # As if the next position were computed: its token is known, its KV may never be.
        slot = request.slot
        known = min(len(request.tokens), int(self._slots.capacity[slot]))
        self._slots.committed[slot] = max(int(self._slots.committed[slot]), known)
        original(self, request, keep_prefix=keep_prefix)

    monkeypatch.setattr(PageLedger, "close", close)


@pytest.mark.parametrize(
    "fault",
    [
        evict_without_detaching,
        publish_and_keep,
        leak_the_lock_of_a_failed_admission,
        unlock_only_the_last_node,
        free_duplicates_twice,
        keep_the_old_table_after_adoption,
        forget_the_tail_of_a_finished_request,
        cache_what_is_not_committed,
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, core, fault):
    fault(monkeypatch)
    core.assert_caught(fault, partial(core.run_random, use_radix=True), 40)


def test_the_same_loads_pass_without_a_fault(core):
    for seed in range(10):
        core.run_random(seed, use_radix=True)
