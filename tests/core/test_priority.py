"""Priorities, preemption and fair shares in a running scheduler."""

import pytest

from stoker.engine.api.messages import Abort
from stoker.engine.core.fairness import FairShares
from stoker.engine.core.policy import POLICIES


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def overlap(request):
    return request.param


def prompt(n, first=1):
    return [first + i % 40 for i in range(n)]


def admitted(engine):
    """Request ids in order of admission, again where they were retracted."""
    by_seed = {add.seed: i for i, add in engine.adds.items()}
    return [by_seed[a.seed] for plan in engine.plans for a in plan.admitted]


def running(engine):
    return [request.request_id for request in engine.scheduler.slots.owners()]


def test_higher_priorities_are_admitted_first(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_running=1)
    for priority in (0, 5, -3, 5):
        engine.add(prompt(4), max_tokens=3, priority=priority)
    engine.run()
    assert admitted(engine) == [2, 4, 1, 3]


def test_the_lowest_priority_is_retracted_first(make_engine, overlap):
    engine = make_engine(
        overlap=overlap, num_pages=50, max_step_tokens=64, conservativeness=0.1, check=True
    )
    engine.add(prompt(8), max_tokens=40, priority=-1)  # has generated most
    for _ in range(5):
        engine.step()
    engine.add(prompt(8, 10), max_tokens=30)
    engine.add(prompt(8, 20), max_tokens=30)
    while not engine.scheduler.stats().retractions:
        engine.step()
    assert [r.request_id for r in engine.scheduler.waiting] == [1]
    engine.run()
    engine.assert_outputs()


def test_a_full_engine_is_preempted_for_a_slot(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_running=2, num_pages=200, preemption_gap=10)
    engine.add(prompt(4), max_tokens=20, priority=1)
    engine.add(prompt(4, 10), max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.add(prompt(4, 20), max_tokens=5, priority=10)  # 10 above the second, 9 above the first
    engine.step()
    engine.step()
    assert running(engine) == [1, 3]
    assert [r.request_id for r in engine.scheduler.waiting] == [2]
    stats = engine.scheduler.stats()
    assert (stats.preemptions, stats.retractions) == (1, 1)
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    assert admitted(engine) == [1, 2, 3, 2]
    assert engine.scheduler.stats().preemptions == 1


def test_without_the_option_or_the_gap_nobody_is_preempted(make_engine, overlap):
    for gap, priority in ((None, 100), (10, 9)):
        engine = make_engine(overlap=overlap, max_running=1, num_pages=200, preemption_gap=gap)
        engine.add(prompt(4), max_tokens=20)
        engine.step()
        engine.add(prompt(4, 20), max_tokens=5, priority=priority)
        engine.run()
        assert admitted(engine) == [1, 2] and engine.scheduler.stats().preemptions == 0


def test_the_newest_of_the_lowest_make_room_for_a_long_prompt(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=81, max_step_tokens=64, preemption_gap=1)
    for i, priority in enumerate([0, 0, 0, 3]):
        engine.add(prompt(10, 11 * i), max_tokens=12, priority=priority)
    for _ in range(4):
        engine.step()
    assert sorted(running(engine)) == [1, 2, 3, 4]
    engine.add(prompt(30, 5), max_tokens=4, priority=2)
    for _ in range(2):
        engine.step()
    # Two of the three are enough; the fourth is above it.
    assert sorted(running(engine)) == [1, 4, 5]
    assert engine.scheduler.stats().preemptions == 2
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()


def test_nobody_is_preempted_where_that_would_not_be_enough(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=64, max_step_tokens=64, preemption_gap=1)
    engine.add(prompt(20), max_tokens=20, priority=9)
    engine.add(prompt(4, 11), max_tokens=4)
    engine.step()
    assert running(engine) == [1, 2]
    engine.add(prompt(50, 5), max_tokens=4, priority=5)
    engine.step()
    engine.step()
    assert running(engine) == [1, 2] and engine.scheduler.stats().preemptions == 0
    engine.run()
    engine.assert_outputs()


def test_preemption_can_be_followed_by_an_abort(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_running=1, num_pages=200, preemption_gap=1)
    engine.add(prompt(4), max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.add(prompt(4, 20), max_tokens=5, priority=1)
    engine.step()
    # With a step in flight the place is given away in the next step only.
    assert running(engine) == ([] if overlap else [2])
    engine.scheduler.handle(Abort(2))
    engine.run()
    engine.assert_outputs()
    assert (
        admitted(engine) == ([1, 1] if overlap else [1, 2, 1]) and engine.reasons[1, 0] == "length"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_random_loads_with_priorities_and_shares(core, policy):
    preemptions = retractions = 0
    for seed in range(8):
        engine = core.run_random(
            seed,
            policy=POLICIES[policy],
            preemption_gap=2,
            shares=FairShares({"a": 3}) if seed % 2 else None,
            use_radix=True,
        )
        preemptions += engine.scheduler.stats().preemptions
        retractions += engine.scheduler.stats().retractions
    assert retractions > preemptions > 0


# ---- fair shares ---------------------------------------------------------------------------


def served(engine):
    """Tokens that each client was given."""
    tokens = {}
    for (request_id, _), output in engine.outputs.items():
        client = engine.adds[request_id].client
        tokens[client] = tokens.get(client, 0) + len(output)
    return tokens


def two_clients(make_engine, overlap, shares, num_heavy=30):
    """One client has queued many requests before the other's first come."""
    engine = make_engine(
        overlap=overlap, max_running=4, num_pages=400, check=False, shares=shares, use_radix=False
    )
    for i in range(num_heavy):
        engine.add(prompt(8, i), max_tokens=10, client="heavy")
    for _ in range(12):
        engine.step()
    before = served(engine)["heavy"]
    for i in range(10):
        engine.add(prompt(8, 7 * i), max_tokens=10, client="light")
    while ("light" not in served(engine)) or served(engine)["light"] < 100:
        engine.step()
    return served(engine)["heavy"] - before


def test_a_heavy_client_does_not_shut_out_a_light_one(make_engine, overlap):
    # Unfair: all 300 of the heavy one's tokens come first.
    assert two_clients(make_engine, overlap, None) > 240
    # Fair: equal parts, but for what runs already.
    assert 60 <= two_clients(make_engine, overlap, FairShares({})) <= 140
    # A weight of 3: a third.
    assert 20 <= two_clients(make_engine, overlap, FairShares({"light": 3})) <= 75


def test_clients_are_charged_for_what_is_computed(make_engine, overlap):
    shares = FairShares({"b": 2})
    engine = make_engine(overlap=overlap, num_pages=200, shares=shares)
    shares.arrive("here")  # somebody is always active, so nobody starts anew
    engine.add(prompt(10), max_tokens=5, client="a")
    engine.run()
    # 10 of the prompt, and 4 of the output at 2: the last token is never computed.
    assert shares.used("a") == 10 + 2 * 4
    engine.add(prompt(10), max_tokens=5, client="b")  # its first 9 tokens are cached
    engine.run()
    assert shares.used("b") == (1 + 2 * 4) / 2


def test_no_client_is_left_active(make_engine, overlap):
    shares = FairShares({})
    engine = make_engine(overlap=overlap, num_pages=200, shares=shares)
    engine.add(prompt(10), max_tokens=5, n=3, client="a")
    engine.add(prompt(10), max_tokens=5, client="b")
    engine.step()
    engine.scheduler.handle(Abort(1, 2))
    engine.scheduler.handle(Abort(2))
    engine.run()
    assert not shares._num_active


# ---- prompts that leave room ---------------------------------------------------------------


def test_a_long_prompt_leaves_room_for_shorter_ones(make_engine, overlap):
    def finished(policy):
        engine = make_engine(
            overlap=overlap,
            max_step_tokens=200,
            max_model_len=2000,
            num_pages=4000,
            policy=POLICIES[policy],
        )
        engine.add(prompt(1500), max_tokens=2)
        engine.step()
        for i in range(3):
            engine.add(prompt(20, 3 + 7 * i), max_tokens=2)
        engine.run()
        engine.assert_outputs()
        return list(dict.fromkeys(fact.request_id for fact in engine.facts))

    assert finished("fcfs") == [1, 2, 3, 4]
    assert finished("shortest-prefill-first") == [2, 3, 4, 1]
