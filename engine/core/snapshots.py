"""Copies of recurrent states, so that a cached prefix can be continued.

A layer with a recurrent state keeps one per request slot, which each step overwrites. What a prefix
left there cannot be had from its KV pages: it is copied into a row of its own, a snapshot, after a
step that ends at a page boundary. A snapshot belongs to the tree's node that ends there, and a
request goes on from the deepest of them on its path.

Chunks end where a snapshot is worth most (`stops`): at the last page boundary of a prompt, and
where it leaves what others have computed, since what two prompts share a third one will, too
(as in Marconi, arXiv 2411.19379). Besides, each request keeps the newest of those taken on its way.

The copies are work on the device's one stream, restores before a step and saves after it. So a row
may be given away while a copy from it is still to come; only its new content must not be trusted
before the step that saves it is committed.

Runs on: any (pure).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .plan import StepPlan
from .radix import Node, unpinned_first
from .request import Request
from .slots import NEVER, Slots

if TYPE_CHECKING:
    from .launch import LaunchedStep

SAVE_EVERY = 128  # tokens; fewer are computed again sooner than a snapshot is worth its memory


class Save(NamedTuple):
    """A snapshot that a launched step takes of a request, `end` tokens long, into a row."""

    request: Request
    serial: int
    end: int
    row: int


class Snapshots:
    """The rows. Each is free, a node's, a request's, or one that a launched step writes.

    Args:
        first_row: of the snapshots among the rows of a LayerState; request slots come before.
        num_rows: how many snapshots there are; without any, no prefix is found.
        interval: tokens that lie between snapshots at least.
    """

    def __init__(
        self,
        first_row: int,
        num_rows: int,
        page_size: int,
        slots: Slots,
        interval: int = SAVE_EVERY,
    ):
        self.first_row = first_row
        self.num_rows = num_rows
        self._page_size = page_size
        self._interval = interval
        self._slots = slots
        self._free = list(range(first_row + num_rows - 1, first_row - 1, -1))
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by row, the least recently used first
        self._restores: dict[int, int] = {}  # slot to row, for the next plan

    # ---- of the tree (radix.Resume) ----------------------------------------------------------

    def point(self, node: Node, end: int) -> int:
        """How many of a path's first `end` tokens, which end in `node`, a request may build on."""
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            if walk.resume is not None and walk.end <= end:
                return walk.end
            walk = walk.parent
        return 0

    def split(self, upper: Node, lower: Node) -> None:
        """The state is that of the lower one's end, as before."""

    def cut(self, node: Node, num_pages: int) -> None:
        """A node is about to lose pages at its end."""
        if node.resume is not None:
            del self._nodes[node.resume]
            self._free.append(node.resume)
            node.resume = None

    # ---- running requests --------------------------------------------------------------------

    def open(self, request: Request, node: Node, num_matched: int) -> None:
        """A request begins with what a node holds, or with nothing."""
        slot = request.slot
        if num_matched:
            assert node.resume is not None
            self._nodes.move_to_end(node.resume)
            self._restores[slot] = node.resume
        request.stops.clear()
        if not self.num_rows:
            self._slots.save_at[slot] = NEVER
            return
        last = (len(request.tokens) - 1) // self._page_size * self._page_size
        before = num_matched
        for stop in (min(request.num_known, last), last):
            if stop - before >= self._interval:
                request.stops.append(stop)
                before = stop
        self._slots.save_at[slot] = self._next(request, num_matched)

    def stop_at(self, request: Request, stop: int) -> bool:
        """Have a running request leave a snapshot at a page boundary; False: it is too late."""
        slots = self._slots
        if stop not in request.stops:
            if slots.computed[request.slot] >= stop or not self.num_rows:
                return False
            insort(request.stops, stop)
            slots.save_at[request.slot] = min(slots.save_at[request.slot], stop)
        return True

    def chunk(self, request: Request, context: int, q_len: int, num_missing: int) -> int:
        """Shorten a chunk to where a snapshot can be taken: a stop, or any page's end.

        Args:
            num_missing: tokens that the request has to compute; at their end it goes on decoding.
        """
        at = bisect_right(request.stops, context)
        end = min([context + q_len, *request.stops[at : at + 1]])
        aligned = end - end % self._page_size
        return (aligned if context < aligned and end < context + num_missing else end) - context

    def write(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Complete a plan by the copies before and after it."""
        slots = self._slots
        if self._restores:
            targets, sources = zip(*self._restores.items(), strict=True)
            plan.state_restores = np.array([sources, targets], np.int32)
            self._restores.clear()
        is_due = plan.kv_lens >= slots.save_at[plan.slots]
        is_due &= plan.kv_lens % self._page_size == 0
        for row in np.flatnonzero(is_due).tolist():
            request, end = step.requests[row], int(plan.kv_lens[row])
            slots.save_at[request.slot] = self._next(request, end)
            if (target := self._take(request, is_passing=end not in request.stops)) is not None:
                step.saves.append(Save(request, int(slots.serial[request.slot]), end, target))
        if step.saves:
            pairs = [(save.request.slot, save.row) for save in step.saves]
            plan.state_saves = np.array(pairs, np.int32).T.copy()

    def commit(self, saves: Iterable[Save]) -> None:
        """A step has ended: what it saved are its requests' snapshots now, where they still run."""
        for request, serial, end, row in saves:
            if not request.slot or self._slots.serial[request.slot] != serial:
                self._free.append(row)
                continue
            self._drop_passing(request)
            request.snapshots.append((end, row))

    def undo(self, saves: Iterable[Save]) -> None:
        """A step was not launched, or in part."""
        self._free.extend(save.row for save in saves)

    def attach(self, node: Node, row: int) -> None:
        """A snapshot of a request goes over to the node that ends there."""
        if node.resume is None:
            node.resume = row
            self._nodes[row] = node
        else:
            self._nodes.move_to_end(node.resume)
            self._free.append(row)

    def close(self, request: Request) -> None:
        """A request leaves its slot, and what was not attached."""
        self._restores.pop(request.slot, None)
        self._free.extend(row for _, row in request.snapshots)
        request.snapshots.clear()

    def check(self, nodes: Iterable[Node], running: list[Request], saves: Iterable[Save]) -> None:
        """Raise AssertionError unless each row is in exactly one place."""
        of_nodes = {node.resume: node for node in nodes if node.resume is not None}
        assert of_nodes == self._nodes, f"snapshots of {of_nodes}, thought to be {self._nodes}"
        held = [row for request in running for _, row in request.snapshots]
        rows = [*self._free, *self._nodes, *held, *(save.row for save in saves)]
        expected = list(range(self.first_row, self.first_row + self.num_rows))
        assert sorted(rows) == expected, f"snapshot rows in no or two places: {sorted(rows)}"
        for request in running:
            ends = [end for end, _ in request.snapshots]
            assert ends == sorted(ends) and all(end % self._page_size == 0 for end in ends)

    def _next(self, request: Request, end: int) -> int:
        """Where a request of `end` tokens is to be saved next, at the earliest."""
        at = bisect_right(request.stops, end)
        for stop in request.stops[at : at + 1]:
            if stop < end + 2 * self._interval:
                return stop
        return end + self._interval

    def _take(self, request: Request, *, is_passing: bool) -> int | None:
        """A row to write to: a free one, the request's own, or the tree's least recently used.

        Of those that are taken in passing all requests together hold no more than half.
        """
        num_held = self.num_rows - len(self._free) - len(self._nodes)
        may_take = not is_passing or 2 * num_held < self.num_rows
        if (may_take and self._free) or self._drop_passing(request):
            return self._free.pop()
        if not (may_take and self._nodes):
            return None
        node = next(unpinned_first(self._nodes.values()))
        row, node.resume = node.resume, None
        del self._nodes[row]
        return row

    def _drop_passing(self, request: Request) -> bool:
        """Forget a request's newest snapshot if it was taken in passing."""
        if not request.snapshots or request.snapshots[-1][0] in request.stops:
            return False
        self._free.append(request.snapshots.pop()[1])
        return True
