"""In which order waiting requests are tried. Admission stops at the first that does not fit.

The queue (waiting.py) puts higher priorities first, and of each priority those that were retracted:
their clients have seen a part of the answer. Within that a policy orders the others. It may give
each request a rank of its own, which keeps the queue sorted at no cost; or look at all that wait
and at the prefix cache, which is bounded: above MAX_SORTED waiting requests it is the rank alone.

Constants and rules as in SGLang, where not said otherwise.

Runs on: any (pure).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .radix import Node, RadixTree
from .request import Request

MAX_SORTED = 128
IN_BATCH_PREFIX = 32  # tokens


@dataclass(frozen=True, slots=True)
class QueueView:
    """What a policy may look at beside the requests.

    Attributes:
        tree: the prefix cache.
        num_prefilled: prompt tokens computed since the start.
        seed: another one in each step.
        computing: requests that run and whose prompts are not in the cache yet.
    """

    tree: RadixTree
    num_prefilled: int = 0
    seed: int = 0
    computing: Iterable[Request] = ()


class Policy(NamedTuple):
    """A queue policy.

    Attributes:
        rank: the smaller goes first, of equals who came first; must not change while it waits.
        order: reorders requests of equal priority; None to leave them as they are ranked.
        is_bounded: whether `order` is only for queues up to MAX_SORTED.
        yields: whether a prompt that is being computed leaves room in a step for those that
            wait with less.
    """

    rank: Callable[[Request], int] | None = None
    order: Callable[[Sequence[Request], QueueView], Iterable[Request]] | None = None
    is_bounded: bool = True
    yields: bool = False


def longest_output(request: Request) -> int:
    """lof: the longest possible output first, so that a batch ends together."""
    return -request.max_tokens


def longest_prefix(waiting: Sequence[Request], view: QueueView) -> list[Request]:
    """lpm: the longest cached prefix first."""
    cached = [_num_cached(request, view) for request in waiting]
    late = _better_later(waiting, cached, view)
    order = sorted(range(len(waiting)), key=lambda i: (late[i], -cached[i]))
    return [waiting[i] for i in order]


def shortest_prefill(waiting: Sequence[Request], view: QueueView) -> list[Request]:
    """shortest-prefill-first: the fewest tokens to compute first."""
    cached = [_num_cached(request, view) for request in waiting]
    late = _better_later(waiting, cached, view)
    order = sorted(
        range(len(waiting)), key=lambda i: (late[i], max(1, waiting[i].prompt_len - cached[i]))
    )
    return [waiting[i] for i in order]


def response_ratio(waiting: Sequence[Request], view: QueueView) -> list[Request]:
    """hrrn: the highest ratio of waiting to own work first, so that nobody starves.

    Both are counted in prompt tokens: those computed for others since it came, and its own
    uncached ones. So the order does not depend on the speed of the device.
    """
    cached = [_num_cached(request, view) for request in waiting]
    late = _better_later(waiting, cached, view)

    def ratio(i: int) -> float:
        waited = view.num_prefilled - waiting[i].num_prefilled_before
        num_left = waiting[i].prompt_len - cached[i]
        return waited / num_left if num_left else float("inf")

    order = sorted(range(len(waiting)), key=lambda i: (late[i], -ratio(i)))
    return [waiting[i] for i in order]


def heaviest_subtree(waiting: Sequence[Request], view: QueueView) -> list[Request]:
    """dfs-weight: walk the cache depth first, the child under which most requests wait first.

    Requests that share a prefix follow each other; those of a node come after its children's.
    """
    found = [view.tree.find(request.prompt, request.add.namespace) for request in waiting]
    late = _better_later(waiting, [num_cached for _, num_cached in found], view)
    own: dict[Node | None, list[Request]] = {}
    weights: Counter[Node] = Counter()
    children: dict[Node | None, dict[Node, None]] = {}
    for request, (node, _), is_late in zip(waiting, found, late, strict=True):
        if is_late:
            continue
        own.setdefault(node, []).append(request)
        while node is not None:
            weights[node] += 1
            children.setdefault(node.parent, {})[node] = None
            node = node.parent
    ordered: list[Request] = []
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            ordered += own.get(node, ())
            continue
        stack.append((node, True))
        heaviest_last = sorted(children.get(node, ()), key=lambda child: -weights[child])[::-1]
        stack += [(child, False) for child in heaviest_last]
    return ordered + [r for r, is_late in zip(waiting, late, strict=True) if is_late]


def shuffled(waiting: Sequence[Request], view: QueueView) -> Iterator[Request]:
    """random: a new order in each step, drawn as far as it is looked at."""
    draw = random.Random(view.seed)
    moved: dict[int, int] = {}  # of a Fisher-Yates shuffle, what is not in its own place
    for n in range(len(waiting), 0, -1):
        i = draw.randrange(n)
        yield waiting[moved.get(i, i)]
        moved[i] = moved.pop(n - 1, n - 1)


POLICIES = {
    "fcfs": Policy(),
    "lpm": Policy(order=longest_prefix),
    "dfs-weight": Policy(order=heaviest_subtree),
    "lof": Policy(rank=longest_output),
    "hrrn": Policy(order=response_ratio),
    "shortest-prefill-first": Policy(order=shortest_prefill, yields=True),
    "random": Policy(order=shuffled, is_bounded=False),
}


def _num_cached(request: Request, view: QueueView) -> int:
    return view.tree.find(request.prompt, request.add.namespace)[1]


def _better_later(waiting: Sequence[Request], cached: Sequence[int], view: QueueView) -> list[bool]:
    """Which requests should wait until another one has computed their common prefix.

    Of those that share IN_BATCH_PREFIX tokens, and find no more than that in the cache, all but
    the first; unlike SGLang's, this first may be running already.
    """
    size = max(IN_BATCH_PREFIX, view.tree.page_size)
    seen = {_beginning(request, size) for request in view.computing}
    late = []
    for request, num_cached in zip(waiting, cached, strict=True):
        is_late = False
        if num_cached <= IN_BATCH_PREFIX and request.prompt_len >= size:
            beginning = _beginning(request, size)
            is_late = beginning in seen
            seen.add(beginning)
        late.append(is_late)
    return late


def _beginning(request: Request, size: int) -> tuple[tuple[str, ...], bytes]:
    return request.add.namespace, request.prompt[:size].tobytes()
