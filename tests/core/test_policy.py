"""Each queue policy on a queue and a cache worked out by hand."""

import random
from array import array

import numpy as np
import pytest

from stoker.engine.api.messages import Add
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.fairness import FairShares
from stoker.engine.core.policy import (
    MAX_SORTED,
    POLICIES,
    QueueView,
    heaviest_subtree,
    longest_prefix,
    response_ratio,
    shortest_prefill,
    shuffled,
)
from stoker.engine.core.radix import RadixTree
from stoker.engine.core.request import Request
from stoker.engine.core.waiting import WaitingQueue

NS = ("base",)


def span(first, n):
    return list(range(first, first + n))


class Names(dict):
    """Requests by name; `of` gives the names of some, joined."""

    def add(self, name, prompt, *, max_tokens=4, namespace=NS, **kw) -> Request:
        add = Add(
            request_id=len(self),
            prompt=array("i", prompt),
            params=SamplingParams(),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            seed=0,
            arrival_s=float(len(self)),
            namespace=namespace,
            **kw,
        )
        self[name] = Request(add, 0, max_tokens)
        return self[name]

    def of(self, requests) -> str:
        by_id = {id(request): name for name, request in self.items()}
        return " ".join(by_id[id(request)] for request in requests)


@pytest.fixture
def names():
    return Names()


def cache(*prefixes, page_size=1, namespace=NS):
    tree = RadixTree(page_size)
    for i, prefix in enumerate(prefixes):
        pages = np.arange(1000 * i, 1000 * i + len(prefix) // page_size, dtype=np.int32)
        tree.insert(np.array(prefix, np.int32), pages, namespace, float(i))
    return tree


def queue_of(names, policy="fcfs", **kw):
    queue = WaitingQueue(POLICIES[policy], **kw)
    for request in names.values():
        queue.add([request])
    return queue


def test_fcfs(names):
    for name in "abc":
        names.add(name, [1])
    assert names.of(queue_of(names).in_order(QueueView(cache()))) == "a b c"


def test_lof(names):
    for name, max_tokens in {"a": 5, "b": 9, "c": 1, "d": 9}.items():
        names.add(name, [1], max_tokens=max_tokens)
    assert names.of(queue_of(names, "lof").in_order(QueueView(cache()))) == "b d a c"


def test_lpm(names):
    tree = cache(span(0, 100), [*span(0, 50), *span(500, 100)])
    names.add("a", span(900, 40))  # nothing
    names.add("b", [*span(0, 60), 7])  # 60
    names.add("c", [*span(0, 50), *span(500, 100), 7])  # 150
    names.add("d", [*span(0, 100), 7])  # 100
    names.add("e", [*span(0, 60), 8])  # 60, after b
    assert names.of(longest_prefix([*names.values()], QueueView(tree))) == "c d b e a"


def test_lpm_puts_off_what_shares_a_cold_prefix(names):
    names.add("a", [*span(0, 40), 1])
    names.add("b", [*span(0, 40), 2])  # better after a
    names.add("c", [*span(0, 31), *span(70, 9)])  # 31 tokens in common are too few
    names.add("d", [*span(0, 40), 3], namespace=("other",))  # shares nothing with a
    names.add("e", span(0, 31))  # shorter than what is looked at
    names.add("f", [*span(200, 40), 4])
    tree = cache(span(200, 20))  # 20 cached tokens are as good as none
    view = QueueView(tree)
    waiting = [*names.values()]
    assert names.of(longest_prefix(waiting, view)) == "f a c d e b"
    tree = cache(span(200, 20), span(0, 33))  # now a and b find 33 tokens: no reason to wait
    assert names.of(longest_prefix(waiting, QueueView(tree))) == "a b c e f d"
    view = QueueView(cache(), computing=[names["a"]])  # it runs already
    assert names.of(longest_prefix(waiting[1:], view)) == "c d e f b"


def test_lpm_with_large_pages_looks_at_a_whole_page(names):
    names.add("a", span(0, 80))
    names.add("b", [*span(0, 50), *span(300, 30)])  # no page in common with a
    names.add("c", [*span(0, 64), *span(400, 16)])
    view = QueueView(cache(page_size=64))
    assert names.of(longest_prefix([*names.values()], view)) == "a b c"
    names["d"] = names.pop("b")  # the order of arrival is now a c d
    assert names.of(longest_prefix([*names.values()], view)) == "a d c"


def test_shortest_prefill_first(names):
    tree = cache(span(0, 100))
    names.add("a", span(500, 30))  # 30 to compute
    names.add("b", [*span(0, 100), *span(700, 10)])  # 10
    names.add("c", span(600, 5))  # 5
    names.add("d", span(0, 100))  # none, which counts as 1
    names.add("e", [*span(500, 30), 1])  # 31, but the first 30 with a: under 32, so no matter
    assert names.of(shortest_prefill([*names.values()], QueueView(tree))) == "d c b a e"


def test_hrrn(names):
    tree = cache(span(0, 100))
    for name, prompt, before in (
        ("a", span(500, 100), 0),  # 1000 tokens waited / 100 = 10
        ("b", span(600, 20), 900),  # 100 / 20 = 5
        ("c", span(700, 10), 880),  # 120 / 10 = 12
        ("d", span(0, 100), 1000),  # nothing to compute
        ("e", [*span(0, 100), *span(800, 10)], 890),  # 110 / 10 = 11
    ):
        names.add(name, prompt).num_prefilled_before = before
    view = QueueView(tree, num_prefilled=1000)
    assert names.of(response_ratio([*names.values()], view)) == "d c e a b"


def test_dfs_weight(names):
    trunk = span(0, 40)
    left, right = [*trunk, *span(100, 40)], [*trunk, *span(200, 40)]
    deep = [*right, *span(300, 40)]
    other = span(900, 40)
    tree = cache(left, right, deep, other)
    names.add("a", [*other, 1])
    names.add("b", [*left, 1])
    names.add("c", [*right, 1])
    names.add("d", [*deep, 1])
    names.add("e", [*trunk, 5, 6])
    names.add("f", [*left, 2])
    names.add("g", span(2000, 5))  # not cached: the end of the walk
    names.add("h", [*right, 3])
    # The trunk weighs 6, of that the right branch 3 (one of them below it) and the left 2.
    view = QueueView(tree)
    assert names.of(heaviest_subtree([*names.values()], view)) == "d c h b f e a g"


def test_dfs_weight_puts_off_what_shares_a_cold_prefix(names):
    names.add("a", [*span(0, 40), 1])
    names.add("b", [*span(0, 40), 2])
    names.add("c", span(500, 40))
    assert names.of(heaviest_subtree([*names.values()], QueueView(cache()))) == "a c b"


def test_random(names):
    for name in "abcdefgh":
        names.add(name, [1])
    waiting = [*names.values()]
    orders = {
        seed: names.of(shuffled(waiting, QueueView(cache(), seed=seed))) for seed in range(99)
    }
    assert all(sorted(order.split()) == list(names) for order in orders.values())
    assert orders[3] == names.of(shuffled(waiting, QueueView(cache(), seed=3)))
    assert len({order[0] for order in orders.values()}) == 8  # everybody is first some time


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn", "shortest-prefill-first"])
def test_long_queues_are_not_sorted(names, policy):
    tree = cache(span(0, 100))
    for i in range(MAX_SORTED - 1):
        names.add(str(i), [500 + i])
    names.add("hit", [*span(0, 100), 1]).num_prefilled_before = -10_000
    queue = queue_of(names, policy)
    view = QueueView(tree, num_prefilled=3)
    first = [names.of([next(queue.in_order(view))])]
    queue.add([names.add("more", [400])])
    first.append(names.of([next(queue.in_order(view))]))
    assert first[1] == "0"
    assert first[0] == ("0" if policy == "shortest-prefill-first" else "hit")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_each_request_once(names, policy):
    rng = random.Random(5)
    trunk = [rng.randrange(9) for _ in range(120)]
    tree = cache(trunk[:90], trunk[:40] + [11] * 30, [12] * 50)
    for i in range(100):
        own = [rng.randrange(9) for _ in range(rng.randrange(1, 50))]
        names.add(
            str(i),
            rng.choice([trunk, [12] * 50, []])[: rng.randrange(121)] + own,
            max_tokens=rng.randrange(9),
            priority=rng.choice([0, 0, 0, 1, -1]),
            client=rng.choice("xyz"),
        ).is_resumed = rng.random() < 0.1
    for shares in (None, FairShares({})):
        queue = queue_of(names, policy, shares=shares)
        order = [*queue.in_order(QueueView(tree, 500, 7))]
        assert sorted(map(id, order)) == sorted(map(id, names.values()))
        levels = [(-r.add.priority, not r.is_resumed) for r in order]
        assert levels == sorted(levels)
        for request in order[::2]:
            queue.remove(request)
        rest = {id(request) for request in order[1::2]}
        assert {id(r) for r in queue.in_order(QueueView(tree, 500, 8))} == rest
        assert {id(r) for r in queue} == rest and len(queue) == len(rest)
        assert queue.num_tokens == sum(r.prompt_len for r in order[1::2])


# ---- before every policy -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof"])
def test_priority_goes_before_the_policy(names, policy):
    tree = cache(span(0, 100))
    names.add("a", span(0, 90), max_tokens=9)
    names.add("b", [1], priority=3, max_tokens=1)
    names.add("c", [2], priority=-1, max_tokens=99)
    names.add("d", span(0, 100), priority=3, max_tokens=5)
    order = names.of(queue_of(names, policy).in_order(QueueView(tree)))
    assert order == {"fcfs": "b d a c", "lpm": "d b a c", "lof": "d b a c"}[policy]


def test_retracted_requests_go_before_others_of_their_priority(names):
    names.add("a", span(0, 100))
    names.add("b", [1])
    names.add("c", [2], priority=1)
    names.add("d", [3])
    names["b"].is_resumed = names["d"].is_resumed = True
    queue = WaitingQueue(POLICIES["lpm"])
    queue.add([names["a"], names["c"]])
    queue.add([names["d"]], front=True)
    queue.add([names["b"]], front=True)
    view = QueueView(cache(span(0, 100)))
    assert names.of(queue.in_order(view)) == "c b d a"


def test_what_goes_to_the_front_keeps_its_order(names):
    for name in "abcd":
        names.add(name, [1])
    queue = WaitingQueue()
    queue.add([names["a"]])
    queue.add([names["c"], names["d"]], front=True)
    queue.add([names["b"]])
    assert names.of(queue.in_order(QueueView(cache()))) == "c d a b"


# ---- fairness ------------------------------------------------------------------------------


def test_fair_shares_interleave_clients(names):
    for i in range(4):
        names.add(f"a{i}", span(0, 10), client="a")
    for i in range(2):
        names.add(f"b{i}", span(0, 15), client="b")
    names.add("c0", [1], client="c")
    # a: 0 10 20 30, b: 0 15 30, c: 0; of equals who came first.
    queue = queue_of(names, shares=FairShares({}))
    assert names.of(queue.in_order(QueueView(cache()))) == "a0 b0 c0 a1 b1 a2 a3"


def test_a_weight_is_a_share(names):
    for i in range(4):
        names.add(f"a{i}", span(0, 10), client="a")
        names.add(f"b{i}", span(0, 10), client="b")
    queue = queue_of(names, shares=FairShares({"a": 2}))
    # a: 0 5 10 15, b: 0 10 20 30, of equals who came first.
    assert names.of(queue.in_order(QueueView(cache()))) == "a0 b0 a1 b1 a2 a3 b2 b3"


def test_who_has_received_more_waits(names):
    names.add("a", [1], client="a")
    names.add("b", [1], client="b")
    names.add("c", [1], client="b", priority=1)
    shares = FairShares({"b": 10})
    for client in "ab":
        shares.arrive(client)
    shares.charge("a", 5, 0)
    shares.charge("b", 10, 50)  # (10 + 2 * 50) / 10 = 11
    assert (shares.used("a"), shares.used("b")) == (5, 11)
    queue = queue_of(names, shares=shares)
    assert names.of(queue.in_order(QueueView(cache()))) == "c a b"


def test_nobody_saves_up_for_a_burst():
    shares = FairShares({})
    shares.arrive("a")
    shares.charge("a", 100, 0)
    shares.arrive("b")
    assert shares.used("b") == 100
    shares.charge("b", 7, 0)
    shares.leave("a")
    shares.arrive("a")  # what it has used counts, though it was away
    assert shares.used("a") == 107
    shares.leave("a")
    shares.leave("b")
    shares.arrive("c")  # nobody is here to be compared with
    assert shares.used("c") == 0


def test_clients_that_are_away_are_forgotten_in_the_end():
    shares = FairShares({})
    shares.arrive("here")
    for i in range(10_000):
        shares.arrive(str(i))
        shares.charge(str(i), 1, 0)
        shares.leave(str(i))
    assert len(shares._used) < 5000
    assert shares.used("here") == 0
