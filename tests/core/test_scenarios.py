"""Small stories with a known moral, in steps instead of seconds."""

import random

import pytest

from stoker.engine.core.policy import POLICIES


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def overlap(request):
    return request.param


def rush_hour(core, overlap, conservativeness):
    """Forty at once, twice what fits to the end: retractions, and steps until all are served."""
    retractions = steps = 0
    for seed in range(3):
        engine = core.Engine(
            overlap=overlap,
            num_pages=1201,
            max_running=40,
            max_step_tokens=256,
            conservativeness=conservativeness,
            check=False,
        )
        rng = random.Random(seed)
        for _ in range(40):
            prompt = [rng.randrange(core.VOCAB) for _ in range(rng.randrange(4, 12))]
            engine.add(prompt, max_tokens=60)
        engine.run()
        engine.assert_outputs()
        engine.assert_drained()
        retractions += engine.scheduler.stats().retractions
        steps += engine.scheduler.stats().steps
    return retractions, steps


def test_rush_hour(core, overlap):
    bold, usual, careful = (rush_hour(core, overlap, c) for c in (0.3, 1.0, 1.6))
    assert bold[0] > 2 * usual[0] > 4 * careful[0] > 0
    # Retracted work is done twice, but caution leaves memory unused: here it costs more.
    assert bold[1] < usual[1] < careful[1]


def shared_prompts(core, overlap, policy):
    """Three system prompts take turns in a cache that holds two: hit rate and longest wait."""
    engine = core.Engine(
        overlap=overlap,
        num_pages=231,
        max_running=2,
        max_step_tokens=128,
        policy=POLICIES[policy],
        check=False,
    )
    rng = random.Random(2)
    systems = [[rng.randrange(core.VOCAB) for _ in range(100)] for _ in range(3)]
    for i in range(120):
        engine.add(systems[i % 3] + [rng.randrange(core.VOCAB) for _ in range(6)], max_tokens=4)
        for _ in range(2 if i > 20 else 0):  # a queue, then as many come as are served
            engine.step()
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    stats = engine.scheduler.stats()
    longest_wait = max(fact.queue_s for fact in engine.facts)
    return stats.cached_tokens / stats.prompt_tokens, longest_wait


def test_shared_system_prompts(core, overlap):
    first_come = shared_prompts(core, overlap, "fcfs")
    by_prefix = shared_prompts(core, overlap, "lpm")
    assert first_come[0] < 0.3 and by_prefix[0] > 0.8  # the hit rate goes up
    assert by_prefix[1] > 1.5 * first_come[1]  # and so does the longest wait


def small_pool(core, overlap, conservativeness, max_output):
    """48 slots, eight requests of 4 tokens that may generate 20 more and generate max_output."""
    engine = core.Engine(
        overlap=overlap,
        num_pages=49,
        max_running=8,
        max_step_tokens=64,
        conservativeness=conservativeness,
    )
    for i in range(8):
        stop = range(core.VOCAB) if max_output < 20 else ()
        engine.add([1, 2, 3, 4 + i], max_tokens=20, stop=stop, min_tokens=max_output)
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.scheduler.stats().num_running)
    engine.assert_outputs()
    engine.assert_drained()
    stats = engine.scheduler.stats()
    assert stats.generated_tokens == 8 * max_output
    return most, stats.retractions, stats.steps


def test_a_pool_of_48_slots_booked_and_on_demand(core, overlap):
    booked, on_demand = 10.0, 0.1
    # Booked, a request keeps room for all that it may generate: two fit (4 + 20 each), not three.
    most, retractions, steps = small_pool(core, overlap, booked, max_output=4)
    assert (most, retractions) == (2, 0)
    # On demand all eight run at once: they end early, and nobody is retracted.
    most, retractions, fewer_steps = small_pool(core, overlap, on_demand, max_output=4)
    assert (most, retractions) == (8, 0) and fewer_steps < steps / 2
    # When all use what they may, the bet is lost: some are retracted, and still it is faster.
    most, retractions, steps = small_pool(core, overlap, booked, max_output=20)
    assert (most, retractions) == (2, 0)
    most, retractions, fewer_steps = small_pool(core, overlap, on_demand, max_output=20)
    assert most == 8 and retractions >= 4 and fewer_steps < steps


def test_one_request_cannot_block_the_queue_for_ever(core, overlap):
    """It asks for more than the pool: it is cut to what fits, runs alone, and the rest goes on."""
    engine = core.Engine(overlap=overlap, num_pages=65, max_model_len=1000, max_step_tokens=64)
    engine.add(range(10), max_tokens=8)
    engine.add(range(10, 50), max_tokens=900)
    for i in range(3):
        engine.add([i] * 10, max_tokens=8)
    engine.run()
    assert [len(engine.outputs[i, 0]) for i in range(1, 6)] == [8, 25, 8, 8, 8]
    order = list(dict.fromkeys(fact.request_id for fact in engine.facts))
    assert order[:2] == [1, 2]  # nobody overtook it
    engine.assert_drained()
