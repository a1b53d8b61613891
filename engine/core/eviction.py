"""Which cached prefix is forgotten first when the pool needs pages.

Each rule is a function of a leaf of the tree: the leaf with the smallest key goes first. A key may
only grow while its leaf stays one (more hits, a later access), so that the tree's heap can look at
an entry when it comes to the top and not before.

Runs on: any (pure).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .radix import Node


def lru(node: Node) -> Any:
    """The least recently used first."""
    return node.last_access_s


def lfu(node: Node) -> Any:
    """The least often used first, of those the least recently used."""
    return node.hit_count, node.last_access_s


def slru(node: Node) -> Any:
    """Segmented LRU: what was used less than twice goes before what was used twice or more."""
    return node.hit_count >= 2, node.last_access_s


def fifo(node: Node) -> Any:
    """The oldest first, however often it is used."""
    return node.created_s


def priority(node: Node) -> Any:
    """What only requests of low priority have left first, of equals the least recently used."""
    return node.priority, node.last_access_s


class EvictionPolicy(NamedTuple):
    """A rule.

    Attributes:
        key: the leaf with the smallest goes first.
        num_pages: how many pages at a leaf's end may go at this key; None for all.
    """

    key: Callable[[Node], Any]
    num_pages: Callable[[Node], int] | None = None


def tlru(threshold: int, next_prompt: int, page_size: int) -> EvictionPolicy:
    """Tail-optimised LRU (arXiv 2510.15152): spares those whose next turn would be slow.

    A conversation of L tokens comes back with about `next_prompt` more. If no more than
    `threshold` tokens must be computed then, nobody notices; so what lies at or behind
    L + next_prompt - threshold is safe to forget and goes first. All the rest is LRU.

    Args:
        threshold, next_prompt: in tokens.
    """

    def num_safe(node: Node) -> int:
        needed = max(node.reach + next_prompt - threshold, node.start, 0)
        return max(0, node.start + len(node.tokens) - needed) // page_size

    def key(node: Node) -> Any:
        return num_safe(node) == 0, node.last_access_s

    return EvictionPolicy(key, lambda node: num_safe(node) or len(node.pages))


POLICIES = {
    "lru": EvictionPolicy(lru),
    "lfu": EvictionPolicy(lfu),
    "slru": EvictionPolicy(slru),
    "fifo": EvictionPolicy(fifo),
    "priority": EvictionPolicy(priority),
}
