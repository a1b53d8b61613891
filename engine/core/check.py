"""Proves that pages, locks, slots and counts of a scheduler agree.

Runs on: any (pure).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .radix import Node
from .slots import Slots

if TYPE_CHECKING:
    from .scheduler import Scheduler


def check_ledger(scheduler: Scheduler) -> None:
    """Raise AssertionError for the first thing that does not agree."""
    scheduler.tree.check()
    slots = scheduler.slots
    placed = [("free", scheduler.pool.free_pages())]
    placed += [("tree", node.pages) for node in scheduler.tree.nodes()]
    num_locks: dict[int, int] = {}
    for slot in slots.order.tolist():
        placed.append(_check_slot(slots, slot, num_locks))
    for node in scheduler.tree.nodes():
        held = num_locks.get(id(node), 0)
        assert node.lock_count == held, f"{node}: {node.lock_count} locks, requests hold {held}"
    num_owners = np.bincount(
        np.concatenate([pages for _, pages in placed]), minlength=scheduler.pool.num_pages
    )
    num_owners[0] += 1  # reserved
    wrong = {
        page: [owner for owner, pages in placed if page in pages]
        for page in np.flatnonzero(num_owners != 1)[:10].tolist()
    }
    assert not wrong, f"pages that are not in exactly one place: {wrong}"
    numbers = sorted(slots.free + slots.order.tolist())
    assert numbers == list(range(1, scheduler.max_running + 1)), f"slots are {numbers}"
    if scheduler.snapshots is not None:
        saves = [save for step in scheduler._in_flight for save in step.saves]
        scheduler.snapshots.check(scheduler.tree.nodes(), slots.owners(), saves)
    if scheduler.windows is not None:
        scheduler.windows.check(scheduler.tree.nodes(), slots.owners())
    scheduler.check_queue()
    if scheduler.tiers is not None:
        pages = [node.pages for node in scheduler.tree.nodes()]
        scheduler.tiers.check(np.concatenate([np.empty(0, np.int32), *pages]))
        pending = sum(scheduler.tiers.is_pending(r.prefetch) for r in scheduler.waiting)
        assert pending == scheduler.tiers.num_pending, "a prefetch is nobody's"


def _check_slot(slots: Slots, slot: int, num_locks: dict[int, int]) -> tuple[str, np.ndarray]:
    """Check one running request; count its locks by node; its name and own pages."""
    request = slots.owner(slot)
    name = f"request {request.request_id}.{request.choice}"
    assert request.slot == slot, f"{name}: in slot {slot}, thinks {request.slot}"
    shared = request.num_shared // slots.page_size
    pages = slots.pages(slot)
    path: list[np.ndarray] = []
    walk: Node | None = request.node
    while walk is not None:
        path.append(walk.pages)
        num_locks[id(walk)] = num_locks.get(id(walk), 0) + 1
        walk = walk.parent
    assert np.array_equal(pages[:shared], np.concatenate(path[::-1])), (
        f"{name}: its first {shared} pages are not the tree's"
    )
    counts = [int(a[slot]) for a in (slots.committed, slots.computed, slots.length)]
    assert counts == sorted(counts), f"{name}: committed, computed, length are {counts}"
    assert slots.computed[slot] <= slots.capacity[slot], f"{name}: no pages for its tokens"
    assert slots.length[slot] - slots.pending[slot] == len(request.tokens), (
        f"{name}: {len(request.tokens)} tokens, counted {slots.length[slot]} with "
        f"{slots.pending[slot]} pending"
    )
    return name, pages[shared:]
