"""Who has which page: the free pool, the prefix tree, or one running request.

Runs on: any (pure).
"""

from __future__ import annotations

import numpy as np

from ..api.messages import CacheEvent
from .cache_events import CacheEvents
from .eviction import EvictionPolicy
from .page_keys import extend, root_key
from .pages import PagePool
from .radix import Node, RadixTree
from .request import Request
from .slots import Slots
from .snapshots import Snapshots
from .tiers import Tiers
from .windows import Windows


class PageLedger:
    """Moves pages between these three, and tells the tiers below and those who follow the cache.

    A running request's first `num_shared` tokens are in the tree's pages, whose path it locks; the
    other pages of its slot are its own.

    Args:
        num_pages: of the pool, the reserved page 0 included.
        use_radix: whether prefixes are cached.
        tells_cache: whether `events` are kept.

    Attributes:
        now: the time of the plan or commit that goes on.
        load_room: pages that may still be loaded in this step.
        num_moves: how many times a request's shared prefix has changed.
        events: what entered and left the tree, to be taken by the owner.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        slots: Slots,
        *,
        use_radix: bool,
        eviction: EvictionPolicy,
        tells_cache: bool,
        tiers: Tiers | None,
        snapshots: Snapshots | None,
        windows: Windows | None,
    ):
        self.pool = PagePool(num_pages)
        self.snapshots = snapshots
        self.windows = windows
        self._resume = snapshots or windows
        self.tree = RadixTree(page_size, eviction, self._resume)
        self.tiers = tiers
        self.now = 0.0
        self.load_room = 0
        self.num_moves = 0
        self.events: list[CacheEvent] = []
        self._page_size = page_size
        self._slots = slots
        self._use_radix = use_radix
        self._keys = CacheEvents() if tells_cache else None

    @property
    def num_available(self) -> int:
        """Pages that can be had now."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_growable(self) -> int:
        """Pages by which running requests can grow."""
        if self.windows is None:
            return self.num_available
        return min(self.num_available, self.windows.num_available)

    def take(self, n: int) -> np.ndarray:
        """n pages, int32 [n]; cached ones make way. Raises RuntimeError when there are fewer."""
        if n > self.pool.num_free:
            pages = self.tree.evict(n - self.pool.num_free)
            if self.tiers is not None:
                self.tiers.evict(pages)
            self._forget(pages)
        return self.pool.take(n)

    def flush(self) -> int:
        """Empty the tree, and the host tier; returns how many tokens stay since they are in use."""
        pages = self.tree.flush()
        if self.tiers is not None:
            self.tiers.flush(pages)
        self._forget(pages)
        return self.tree.num_protected * self._page_size

    def _forget(self, pages: np.ndarray) -> None:
        if self._keys is not None and len(pages):
            self.events.append(self._keys.removed(pages))
        self.pool.release(pages)

    # ---- running requests --------------------------------------------------------------------

    def is_matchable(self, request: Request) -> bool:
        """Whether a part of a request may come out of the cache."""
        return self._use_radix and request.prompt_logprobs is None  # which need all positions

    def num_cached(self, request: Request) -> int:
        """How many tokens of a request's prompt would be found; changes nothing."""
        if not self.is_matchable(request):
            return 0
        return self.tree.find(request.prompt[:-1], request.add.namespace)[1]

    def match(self, request: Request) -> tuple[Node, np.ndarray, int]:
        """RadixTree.match of what a request need not compute; locks the node.

        The lock comes first, for the match itself shrinks what can be evicted.
        """
        # One token must be left to compute, for its logits.
        end = len(request.tokens) - 1 if self.is_matchable(request) else 0
        tokens = request.known_tokens(0, end)
        node, pages, num_matched = self.tree.match(tokens, request.add.namespace, self.now)
        request.num_known = self.tree.num_walked
        self.tree.lock(node)
        return node, pages, num_matched

    def open(self, request: Request, node: Node, pages: np.ndarray, num_matched: int) -> None:
        """Give a request a slot that begins with what `match` gave."""
        self._slots.open(request, pages, num_matched)
        self._settle(request, node, num_matched)
        request.is_published = False
        if self._resume is not None:
            self._resume.open(request, node, num_matched)
        if not request.is_resumed:
            self.tree.count_hit(node)
        if self.tiers is not None:
            self.tiers.hit(pages)
            request.is_loading = self.is_matchable(request)

    def stop_at(self, request: Request, stop: int) -> bool:
        """Whether others can go on where a running request will have computed so many tokens."""
        return self._resume is None or self._resume.stop_at(request, stop)

    def load(self, request: Request) -> int:
        """Copy what the host holds of a request that has computed nothing yet; in tokens.

        The pages are the tree's at once, for the copies come before every kernel that reads them.
        While streams run a long prefix comes in pieces, a step each: `is_loading` tells.
        """
        assert self.tiers is not None
        slots, size = self._slots, self._page_size
        slot, start = request.slot, request.num_shared
        keys = self.page_keys(request)[start // size : (len(request.tokens) - 1) // size]
        num_wanted = self.tiers.num_loadable(keys)
        n = min(num_wanted, self.load_room, self.num_available)
        request.is_loading = n == self.load_room < num_wanted
        pages = self.take(n)
        n = self.tiers.num_loadable(keys[:n])  # evicted pages may have pushed some out of the host
        self.pool.release(pages[n:])
        if n == 0:
            return 0
        self.load_room -= n
        slots.extend(slot, pages[:n])
        self.tiers.load(keys[:n], pages[:n], is_counted=not request.is_resumed)
        self._share(request, start + n * size)
        slots.computed[slot] = slots.committed[slot] = start + n * size
        return n * size

    def grow(self, slot: int, q_len: int) -> int:
        """Find pages for the next q_len tokens; returns how many of them have room."""
        slots = self._slots
        computed = int(slots.computed[slot])
        wanted = -(-(computed + q_len) // self._page_size) - slots.num_pages(slot)
        if (n := min(wanted, self.num_growable)) > 0:
            pages = self.take(n)
            slots.extend(slot, pages, None if self.windows is None else self.windows.take(n))
        return min(q_len, int(slots.capacity[slot]) - computed)

    def publish(self, request: Request) -> None:
        """Put a computed prompt into the tree."""
        request.is_published = True
        if self.snapshots is not None:
            self._attach(request)
            return
        end = request.prompt_len // self._page_size * self._page_size
        if self._use_radix and end > request.num_shared:
            self._share(request, end)
        if self.windows is not None:
            self.windows.published(request)

    def close(self, request: Request, *, keep_prefix: bool) -> None:
        """Take slot and pages from a running request; its committed prefix stays cached."""
        if self.snapshots is not None:
            if keep_prefix:
                self._attach(request)
            keep_prefix = False  # what lies behind the last snapshot is of no use
        size, shared = self._page_size, request.num_shared
        pages = self._slots.pages(request.slot)
        end = int(self._slots.committed[request.slot]) // size * size
        if keep_prefix and self._use_radix and end > shared:
            _, _, num_present = self._insert(request, end, pages)
            self.pool.release(pages[shared // size : num_present // size])
            self.pool.release(pages[end // size :])
        else:
            self.pool.release(pages[shared // size :])
        if self._resume is not None:
            self._resume.close(request)
        self._unlock(request)
        self._settle(request, None, 0)
        request.is_published = request.is_loading = False
        self._slots.close(request)

    def num_freed(self, request: Request) -> int:
        """Tokens for which there would be room without a running request, at least."""
        slots, slot = self._slots, request.slot
        assert request.node is not None
        own = max(int(slots.length[slot]), int(slots.capacity[slot])) - request.num_shared
        return own + self.tree.num_held_alone(request.node) * self._page_size

    def page_keys(self, request: Request) -> list[bytes]:
        """The content keys of all whole pages of a request's tokens."""
        root = b"" if request.page_keys else self._root_key(request)
        extend(request.page_keys, root, request.tokens, self._page_size)
        return request.page_keys

    def _root_key(self, request: Request) -> bytes:
        namespace = request.add.namespace
        return root_key(namespace) if self.tiers is None else self.tiers.root(namespace)

    def _attach(self, request: Request) -> None:
        """Put a running request's tokens into the tree as far as there are snapshots of it."""
        assert self.snapshots is not None
        for end, row in request.snapshots:
            self._share(request, end)
            assert request.node is not None
            self.snapshots.attach(request.node, row)
        request.snapshots.clear()

    def _share(self, request: Request, end: int) -> None:
        """Put a running request's first `end` tokens into the tree, go over to the tree's pages."""
        pages = self._slots.pages(request.slot)
        node, canonical, num_present = self._insert(request, end, pages)
        first, last = request.num_shared // self._page_size, num_present // self._page_size
        if last > first:
            self.pool.release(pages[first:last])
            pages[first:last] = canonical[first:last]
            self._slots.touch(request.slot, first)
        self.tree.lock(node)
        self._unlock(request)
        self._settle(request, node, end)

    def _insert(
        self, request: Request, end: int, pages: np.ndarray
    ) -> tuple[Node, np.ndarray, int]:
        """RadixTree.insert of a request's first `end` tokens."""
        add = request.add
        node, canonical, num_present = self.tree.insert(
            request.known_tokens(0, end),
            pages,
            add.namespace,
            self.now,
            priority=add.priority,
            pin=add.pin,
        )
        if self.windows is not None:
            self.windows.attach(request, node)
        first = num_present // self._page_size
        if first < len(canonical) and (self.tiers is not None or self._keys is not None):
            all_keys = self.page_keys(request)
            keys, new_pages = all_keys[first : len(canonical)], canonical[first:]
            if self.tiers is not None:
                self.tiers.insert(keys, new_pages)
            if self._keys is not None:
                parent = all_keys[first - 1] if first else self._root_key(request)
                tokens = request.tokens[num_present : len(canonical) * self._page_size]
                event = self._keys.stored(keys, new_pages, parent, tokens, add.namespace)
                self.events.append(event)
        return node, canonical, num_present

    def _settle(self, request: Request, node: Node | None, num_shared: int) -> None:
        request.node = node
        request.num_shared = num_shared
        self.num_moves += 1

    def _unlock(self, request: Request) -> None:
        assert request.node is not None
        self.tree.unlock(request.node)
