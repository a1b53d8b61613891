"""Pages of layers with a sliding window: a pool of their own, which holds windows, not contexts.

A request keeps window pages only for what its next token sees, and for what steps write that are
not committed yet; those before go as its tokens are committed. Its table of them is indexed as the
block table is, by position. A page may have several owners: the tree, and requests that go on from
one prefix. It is free when the last of them lets it go.

The tree's nodes hold window pages beside the others, 0 where there is none (any more). So a prefix
can be continued only where all the pages are there that the next token sees: at the end of what a
request has left, or where two prompts part, once a second one has come by (`stops`). The least
recently used nodes lose their window pages first, and keep the others.

Runs on: any (pure).
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from .pages import PagePool
from .radix import Node, unpinned_first
from .request import Request
from .slots import Slots


def pages_of_window(window: int, page_size: int) -> int:
    """The most pages that a decoding request holds, with a step in flight."""
    return -(-(window - 1) // page_size) + 2 + -(-2 // page_size)


class Windows:
    """Who has which window page.

    Args:
        num_pages: of the pool, the reserved page 0 included.
        page_size: tokens a page.
        window: a token sees itself and the window - 1 before it.

    Attributes:
        num_available: pages that can be had now.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, slots: Slots):
        self.pool = PagePool(num_pages)
        self.window = window
        self._page_size = page_size
        self._slots = slots
        self._pages_of_window = pages_of_window(window, page_size)
        if self.pool.capacity < self._pages_of_window:
            raise ValueError(f"{num_pages} pages of {page_size} cannot hold a window of {window}")
        self._num_owners = np.zeros(num_pages, np.int32)
        self._is_cached = np.zeros(num_pages, np.bool_)  # the tree is one of them
        self._num_idle = 0  # pages that only the tree owns
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # the least recently used first
        self._num_stopping = 0  # running requests with stops

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self._num_idle

    def take(self, n: int) -> np.ndarray:
        """n pages, int32 [n]; cached ones make way. Raises RuntimeError when there are fewer."""
        if n > self.pool.num_free:
            self._evict(n - self.pool.num_free)
        pages = self.pool.take(n)
        self._num_owners[pages] = 1
        return pages

    def shortage(self, request: Request) -> int:
        """Tokens for which there is no room if a request runs beside the running ones."""
        slots, size = self._slots, self._page_size
        order = slots.order
        held = slots.capacity[order] // size - slots.first_window_page[order]
        most = np.minimum(-(-slots.limit[order] // size), self._pages_of_window)
        owed = int(np.maximum(most - held, 0).sum())
        own = min(-(-request.limit // size), self._pages_of_window)
        return (owed + own - self.num_available) * size

    # ---- of the tree (radix.Resume) ----------------------------------------------------------

    def point(self, node: Node, end: int) -> int:
        """How many of a path's first `end` tokens, which end in `node`, a request may build on."""
        size = self._page_size
        for part in self._up(node):
            first = part.start // size
            gone = np.flatnonzero(part.resume[: end // size - first] == 0)[::-1] + first
            for page in gone.tolist():
                if page < self._first(end):
                    return end
                end = page * size  # what comes behind it needs it
            if first <= self._first(end):
                break
        return end

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has become the beginning of `lower`."""
        n = len(upper.pages)
        upper.resume, lower.resume = lower.resume[:n].copy(), lower.resume[n:].copy()
        self._nodes[upper] = None

    def cut(self, node: Node, num_pages: int) -> None:
        """A node is about to lose pages at its end, perhaps all."""
        left = len(node.pages) - num_pages
        self._drop(node.resume[left:])
        node.resume = node.resume[:left].copy()
        if not left:
            self._nodes.pop(node, None)

    # ---- running requests --------------------------------------------------------------------

    def open(self, request: Request, node: Node, num_matched: int) -> None:
        """A request goes on behind what was matched."""
        slots, size, slot = self._slots, self._page_size, request.slot
        first, end = self._first(num_matched), num_matched // size
        table = slots.window_table[slot]
        for part in self._up(node):
            if part.end // size <= first:
                break
            self._nodes.move_to_end(part)
            start = max(part.start // size, first)
            table[start : part.end // size] = part.resume[start - part.start // size :]
        slots.first_window_page[slot] = first
        pages = table[first:end]
        self._num_idle -= int((self._num_owners[pages] == 1).sum())
        self._num_owners[pages] += 1
        if request.num_known > num_matched:
            request.stops.append(request.num_known)
            self._num_stopping += 1

    def stop_at(self, request: Request, stop: int) -> bool:
        """Have a running request leave what it takes to go on there; False: it is too late."""
        if stop not in request.stops:
            if self._first(stop) < self._slots.first_window_page[request.slot]:
                return False
            self._num_stopping += not request.stops
            insort(request.stops, stop)
        return True

    def commit(self, rows: np.ndarray) -> None:
        """Tokens of some slots are committed: what no further one sees goes.

        What it takes to go on behind their last whole page, or the one before, stays: it goes to
        the tree in the end, and the same prompt once more must compute a token.
        """
        slots, size = self._slots, self._page_size
        aligned = (slots.committed[rows] // size - 1) * size
        firsts = np.maximum(aligned - self.window + 1, 0) // size
        counts = firsts - slots.first_window_page[rows]
        due = np.flatnonzero(counts > 0)
        if not len(due):
            return
        rows, counts = rows[due], counts[due]
        which = np.repeat(rows, counts)  # a slot and an index for each page that goes
        ends = np.cumsum(counts)
        indices = np.arange(ends[-1]) + np.repeat(firsts[due] - ends, counts)
        pages = slots.window_table[which, indices]
        slots.window_table[which, indices] = 0
        slots.gone.append((which, indices))
        slots.first_window_page[rows] = firsts[due]
        if self._num_stopping:
            pages = self._keep(which, indices, pages)
        self._release(pages)

    def attach(self, request: Request, node: Node) -> None:
        """Give the path that ends in `node` the pages that a request has of it."""
        size, slot = self._page_size, request.slot
        table = self._slots.window_table[slot].copy()
        for index, page in request.kept:
            table[index] = page
        first = min([int(self._slots.first_window_page[slot]), *(i for i, _ in request.kept)])
        if node.resume is None:  # it is new
            node.resume = np.zeros(len(node.pages), np.int32)
        for part in self._up(node):
            if part.end // size <= first:
                break
            own = table[part.start // size : part.end // size]
            is_new = (part.resume == 0) & (own != 0)
            pages = own[is_new]
            part.resume[is_new] = pages
            self._num_owners[pages] += 1
            self._is_cached[pages] = True
            self._nodes[part] = None
            self._nodes.move_to_end(part)

    def published(self, request: Request) -> None:
        """What was kept for the tree is there now, or will not come there."""
        self._release(np.array([page for _, page in request.kept], np.intp))
        request.kept.clear()
        self._num_stopping -= bool(request.stops)
        request.stops.clear()

    def give_up(self, running: Iterable[Request]) -> bool:
        """Let go what requests keep for others alone; whether there was any."""
        keeping = [request for request in running if request.kept]
        for request in keeping:
            self.published(request)
        return bool(keeping)

    def close(self, request: Request) -> None:
        """A request leaves its slot."""
        slots, slot = self._slots, request.slot
        self.published(request)
        end = slots.num_pages(slot)
        self._release(slots.window_table[slot, slots.first_window_page[slot] : end])
        slots.window_table[slot, :end] = 0
        slots.first_window_page[slot] = 0

    def check(self, nodes: Iterable[Node], running: list[Request]) -> None:
        """Raise AssertionError unless each page has the owners that it is thought to have."""
        slots, size = self._slots, self._page_size
        num_owners = np.zeros_like(self._num_owners)
        is_cached = np.zeros_like(self._is_cached)
        for node in nodes:
            if node.parent is None:
                continue
            assert len(node.resume) == len(node.pages), f"{node}: window pages and pages differ"
            pages = node.resume[node.resume > 0]
            assert not is_cached[pages].any(), f"{node}: a window page is in the tree twice"
            assert not len(pages) or node in self._nodes, f"{node}: cannot lose its window pages"
            num_owners[pages] += 1
            is_cached[pages] = True
        for request in running:
            slot = request.slot
            first, end = int(slots.first_window_page[slot]), slots.num_pages(slot)
            table = slots.window_table[slot]
            assert not table[:first].any() and table[first:end].all(), f"{request}: a wrong table"
            aligned = int(slots.committed[slot]) // size * size
            assert first <= self._first(aligned), f"{request}: a short window"
            pages = np.concatenate([table[first:end], [page for _, page in request.kept]])
            np.add.at(num_owners, pages.astype(np.intp), 1)
        assert np.array_equal(num_owners, self._num_owners), "owners of window pages"
        num_stopping = sum(bool(request.stops) for request in running)
        assert num_stopping == self._num_stopping, f"{num_stopping} stop, {self._num_stopping}?"
        assert np.array_equal(is_cached, self._is_cached), "window pages of the tree"
        free = self.pool.free_pages()
        assert not num_owners[free].any() and len(np.unique(free)) == len(free)
        assert len(free) + np.count_nonzero(num_owners) == self.pool.capacity, "window pages lost"
        idle = np.count_nonzero(is_cached & (num_owners == 1))
        assert idle == self._num_idle, f"{idle} idle window pages, counted {self._num_idle}"

    def _first(self, length: int) -> int:
        """The first page that the token after `length` others sees."""
        return max(length - self.window + 1, 0) // self._page_size

    def _up(self, node: Node) -> Iterator[Node]:
        """A node and all above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _keep(self, rows: np.ndarray, indices: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Keep those pages that their requests' stops need; the others."""
        is_kept = np.zeros(len(pages), np.bool_)
        for slot in np.unique(rows).tolist():
            request = self._slots.owner(slot)
            for stop in request.stops:
                is_kept |= (
                    (rows == slot)
                    & (indices >= self._first(stop))
                    & (indices < stop // self._page_size)
                )
            own = np.flatnonzero(is_kept & (rows == slot))
            request.kept += zip(indices[own].tolist(), pages[own].tolist(), strict=True)
        return pages[~is_kept]

    def _release(self, pages: np.ndarray) -> None:
        """Requests let pages go, one as often as it has owners among them."""
        pages, times = np.unique(pages, return_counts=True)
        self._num_owners[pages] -= times.astype(np.int32)
        is_last = self._num_owners[pages] == 0
        self.pool.release(pages[is_last])
        is_idle = self._is_cached[pages] & (self._num_owners[pages] == 1)
        self._num_idle += int(is_idle.sum())

    def _drop(self, pages: np.ndarray) -> None:
        """The tree lets pages go; 0 for none."""
        pages = pages[pages > 0]
        self._is_cached[pages] = False
        self._num_owners[pages] -= 1
        free = pages[self._num_owners[pages] == 0]
        self._num_idle -= len(free)
        self.pool.release(free)

    def _evict(self, num_pages: int) -> None:
        """Have the tree let idle pages go, the least recently used nodes' first."""
        wanted = self.pool.num_free + num_pages
        seen: list[Node] = []
        for node in unpinned_first(self._nodes):
            if self.pool.num_free >= wanted:
                break
            is_idle = (node.resume > 0) & (self._num_owners[node.resume] == 1)
            self._drop(node.resume[is_idle])
            node.resume[is_idle] = 0
            seen.append(node)
        for node in seen:
            if node.resume.any():  # running requests use the rest
                self._nodes.move_to_end(node)
            else:
                del self._nodes[node]
