"""The prefix cache: a radix tree from token prefixes to the pages that hold their KV.

Edges are cut at page boundaries, so every node holds whole pages. A namespace (adapter, salt, ...)
has a root of its own: prefixes never cross namespaces. A running request locks the path of its
prefix; unlocked leaves are evicted, the least valuable first (eviction.py), pinned ones last.

Runs on: any (pure).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .eviction import POLICIES, EvictionPolicy

if TYPE_CHECKING:
    from .request import Request

Namespace = tuple[str, ...]


class Node:
    """An edge of the tree and the point it leads to.

    Attributes:
        tokens: int32 [n * page_size] along the edge. pages: int32 [n], where their KV is.
        key: what the parent's `children` knows it by; the namespace, for a root.
        start: tokens before it on the path.
        lock_count: requests that use this node or one below it.
        last_access_s: time of the last match or insert. created_s: time of the insert.
        hit_count: requests that began with it.
        priority: the highest of the requests that left it.
        pin: what is pinned higher is evicted later, whatever the policy says.
        reach: the length of the longest sequence through it that was ever cached, in tokens.
        in_heap: whether the eviction heap has an entry of it.
        resume: of a model that keeps more than pages of all tokens, what it takes to go on at its
            end (see Resume).
    """

    __slots__ = (
        "children",
        "created_s",
        "hit_count",
        "in_heap",
        "key",
        "last_access_s",
        "lock_count",
        "pages",
        "parent",
        "pin",
        "priority",
        "reach",
        "resume",
        "start",
        "tokens",
    )

    def __init__(self, tokens: np.ndarray, pages: np.ndarray, key: Any, parent: Node | None):
        self.tokens = tokens
        self.pages = pages
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.start: int = 0 if parent is None else parent.start + len(parent.tokens)
        self.lock_count = 0
        self.last_access_s = self.created_s = 0.0
        self.hit_count = 0
        self.priority = self.pin = self.reach = 0
        self.in_heap = False
        self.resume: Any = None

    @property
    def end(self) -> int:
        """Tokens of the path that ends with it."""
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        return f"node {self.tokens[:8].tolist()} of {len(self.tokens)} tokens"


def unpinned_first(nodes: Collection[Node]) -> Iterator[Node]:
    """Nodes in their order, but the pinned ones last."""
    yield from (node for node in nodes if not node.pin)
    yield from (node for node in nodes if node.pin)


class Resume(Protocol):
    """What a prefix needs besides its pages, so that a request can go on behind it."""

    def point(self, node: Node, end: int) -> int:
        """How many of a path's first `end` tokens, which end in `node`, a request may build on."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has become the beginning of `lower`."""

    def cut(self, node: Node, num_pages: int) -> None:
        """A node is about to lose pages at its end, perhaps all."""

    def open(self, request: Request, node: Node, num_matched: int) -> None:
        """A request begins, in its slot, with what `node` holds, or with nothing."""

    def stop_at(self, request: Request, stop: int) -> bool:
        """Have a running request leave what it takes to go on there; False: it is too late."""

    def close(self, request: Request) -> None:
        """A request is about to leave its slot."""


class RadixTree:
    """Owns the pages of cached prefixes.

    Args:
        page_size: tokens a page.
        eviction: which leaf goes first.
        resume: where prefixes can be continued; everywhere, if None.

    Attributes:
        num_evictable, num_protected: pages in unlocked and in locked nodes.
        num_evicted: pages evicted since the start.
        num_nodes: nodes without the roots.
        num_walked: tokens that the last `match` or `insert` found there.
    """

    def __init__(
        self,
        page_size: int,
        eviction: EvictionPolicy = POLICIES["lru"],
        resume: Resume | None = None,
    ):
        self.page_size = page_size
        self.num_walked = 0
        self.num_evictable = 0
        self.num_protected = 0
        self.num_evicted = 0
        self.num_nodes = 0
        self._eviction = eviction
        self._resume = resume
        self._roots: dict[Namespace, Node] = {}
        # One entry (key, tie breaker, node) a node at most. An entry may be out of date: it is
        # looked at only when it comes to the top, and then dropped or pushed again.
        self._heap: list[tuple[Any, int, Node]] = []
        self._num_pushes = 0

    def match(
        self, tokens: np.ndarray, namespace: Namespace, now: float
    ) -> tuple[Node, np.ndarray, int]:
        """The longest cached prefix that can be continued, in whole pages.

        Args:
            tokens: int32 [n].

        Returns:
            The node where it ends (to lock), its page ids int32 [num_matched / page_size], and
            num_matched in tokens.
        """
        node, parts, num_matched = self._walk(tokens, namespace, now)
        if self._resume is not None:
            num_matched = self._resume.point(node, num_matched)
            while node.parent is not None and node.start >= num_matched:
                node = node.parent
                parts.pop()
            if node.end > num_matched:
                node = self._split(node, num_matched - node.start)
                parts[-1] = node.pages
        return node, _concatenate(parts), num_matched

    def find(self, tokens: np.ndarray, namespace: Namespace) -> tuple[Node | None, int]:
        """How much of a prefix `match` would give, in tokens; changes nothing.

        Also the last node on its path, which may go on differently; None where there is nothing.
        """
        node = self._roots.get(namespace)
        size = self.page_size
        start, end = 0, len(tokens) // size * size
        while node is not None and start < end:
            child = node.children.get(tokens[start : start + size].tobytes())
            if child is None:
                break
            node = child
            n = _common_length(child.tokens, tokens[start:end]) // size * size
            start += n
            if n < len(child.tokens):
                break
        if self._resume is not None and node is not None:
            start = self._resume.point(node, start)
        return node, start

    def count_hit(self, node: Node) -> None:
        """A request begins with the prefix that ends here."""
        walk: Node | None = node
        while walk is not None:
            walk.hit_count += 1
            walk = walk.parent

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        namespace: Namespace,
        now: float,
        *,
        priority: int = 0,
        pin: int = 0,
    ) -> tuple[Node, np.ndarray, int]:
        """Cache the whole pages of a prefix; a page-unaligned tail is ignored.

        The first `num_present` tokens were there already. The tree takes over the pages behind
        them; the caller keeps, and should release, its duplicates of those before.

        Args:
            tokens: int32 [n]. pages: int32 [at least n / page_size].
            priority, pin: the whole path gets at least these.

        Returns:
            The node where the prefix ends, the tree's own page ids for it, and num_present.
        """
        node, parts, num_present = self._walk(tokens, namespace, now)
        size = self.page_size
        end = len(tokens) // size * size
        if num_present < end:
            key = tokens[num_present : num_present + size].tobytes()
            rest = pages[num_present // size : end // size].copy()
            leaf = Node(tokens[num_present:end].copy(), rest, key, node)
            leaf.last_access_s = leaf.created_s = now
            leaf.priority = priority
            node.children[key] = leaf
            if node.parent is None:
                self._roots[namespace] = node
            self.num_nodes += 1
            self.num_evictable += len(rest)
            parts.append(rest)
            node = leaf
        walk: Node | None = node
        while walk is not None:
            walk.reach = max(walk.reach, end)
            walk.priority = max(walk.priority, priority)
            walk.pin = max(walk.pin, pin)
            walk = walk.parent
        self._offer(node)
        return node, _concatenate(parts), num_present

    def lock(self, node: Node) -> None:
        """Protect a node and all above it from eviction."""
        walk: Node | None = node
        while walk is not None:
            if walk.lock_count == 0:
                self.num_evictable -= len(walk.pages)
                self.num_protected += len(walk.pages)
            walk.lock_count += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        walk: Node | None = node
        while walk is not None:
            walk.lock_count -= 1
            if walk.lock_count == 0:
                self.num_evictable += len(walk.pages)
                self.num_protected -= len(walk.pages)
                self._offer(walk)
            walk = walk.parent

    def num_held_alone(self, node: Node) -> int:
        """How many pages could be evicted after one `unlock`."""
        num_pages = 0
        walk: Node | None = node
        while walk is not None and walk.lock_count == 1:
            num_pages += len(walk.pages)
            walk = walk.parent
        return num_pages

    def evict(self, num_pages: int) -> np.ndarray:
        """Forget up to num_pages pages; returns their ids, int32, fewer where locks forbid more.

        Of the last leaf only the tail goes, so that no more is lost than is needed.
        """
        parts: list[np.ndarray] = []
        missing = num_pages
        while missing > 0 and self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.children or node.lock_count:
                continue  # offered again when that ends
            if key != self._key(node):
                self._offer(node)
                continue
            count = self._eviction.num_pages
            n = min(missing, len(node.pages) if count is None else count(node))
            missing -= n
            parts.append(node.pages[len(node.pages) - n :])
            if self._resume is not None:
                self._resume.cut(node, n)
            self.num_evictable -= n
            self.num_evicted += n
            if n < len(node.pages):
                node.tokens = node.tokens[: -n * self.page_size]
                node.pages = node.pages[:-n]
                self._offer(node)
            else:
                self._detach(node)
        return _concatenate(parts)

    def flush(self) -> np.ndarray:
        """Forget all that is not locked; returns the page ids, int32."""
        return self.evict(self.num_evictable)

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError for the first thing in the tree that does not agree."""
        sums = {True: 0, False: 0}
        num_nodes = 0
        for node in self.nodes():
            is_root = node.parent is None
            num_nodes += not is_root
            sums[node.lock_count > 0] += len(node.pages)
            assert len(node.tokens) == len(node.pages) * self.page_size, f"{node}: sizes disagree"
            assert is_root or len(node.pages), f"{node}: an empty edge"
            below = sum(child.lock_count for child in node.children.values())
            assert node.lock_count >= below, (
                f"{node}: {node.lock_count} locks, {below} on its children"
            )
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, f"{node}: a child is misplaced"
                assert key == child.tokens[: self.page_size].tobytes(), f"{node}: a key is stale"
                assert child.start == node.start + len(node.tokens), f"{child}: a wrong start"
            is_candidate = not is_root and not node.children and not node.lock_count
            assert node.in_heap or not is_candidate, f"{node}: an evictable leaf is not in the heap"
            assert not is_root or node.children or node.lock_count, f"empty root {node.key}"
        assert num_nodes == self.num_nodes, f"{num_nodes} nodes, counted {self.num_nodes}"
        assert sums[True] == self.num_protected, (
            f"{sums[True]} protected pages, counted {self.num_protected}"
        )
        assert sums[False] == self.num_evictable, (
            f"{sums[False]} evictable pages, counted {self.num_evictable}"
        )

    def _walk(
        self, tokens: np.ndarray, namespace: Namespace, now: float
    ) -> tuple[Node, list[np.ndarray], int]:
        # A namespace without a root gets a loose one, which `insert` plants.
        node = self._roots.get(namespace) or Node(_EMPTY, _EMPTY, namespace, None)
        parts: list[np.ndarray] = []
        size = self.page_size
        start, end = 0, len(tokens) // size * size
        while start < end:
            child = node.children.get(tokens[start : start + size].tobytes())
            if child is None:
                break
            n = _common_length(child.tokens, tokens[start:end]) // size * size
            if n < len(child.tokens):
                child = self._split(child, n)
            child.last_access_s = now
            parts.append(child.pages)
            start += n
            node = child
        self.num_walked = start
        return node, parts, start

    def _split(self, node: Node, n: int) -> Node:
        """Cut an edge after n tokens. `node` stays the lower part: whoever locked it keeps it."""
        assert node.parent is not None
        num_pages = n // self.page_size
        upper = Node(node.tokens[:n], node.pages[:num_pages], node.key, node.parent)
        upper.start = node.start
        upper.lock_count = node.lock_count
        upper.last_access_s = node.last_access_s
        upper.created_s = node.created_s
        upper.hit_count = node.hit_count
        upper.priority = node.priority
        upper.pin = node.pin
        upper.reach = node.reach
        node.start += n
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[n:]
        node.pages = node.pages[num_pages:]
        node.key = node.tokens[: self.page_size].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        self.num_nodes += 1
        if self._resume is not None:
            self._resume.split(upper, node)
        return upper

    def _offer(self, node: Node) -> None:
        """Put a node into the heap if it can be evicted; forget a root that holds nothing."""
        if node.children or node.lock_count:
            return
        if node.parent is None:
            if self._roots.get(node.key) is node:  # else it was never planted
                del self._roots[node.key]
        elif not node.in_heap:
            node.in_heap = True
            self._num_pushes += 1
            heapq.heappush(self._heap, (self._key(node), self._num_pushes, node))

    def _key(self, node: Node) -> Any:
        return node.pin, self._eviction.key(node)

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self.num_nodes -= 1
        self._offer(node.parent)


SHORT_EDGE = 1024  # tokens: so many are copied and compared faster than numpy calls are made
_EMPTY = np.empty(0, np.int32)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else _EMPTY


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    if n <= SHORT_EDGE and a[:n].tobytes() == b[:n].tobytes():
        return n
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
