"""Random loads over tiers that are late, wrong and full: no answer changes, nothing leaks."""

import os
import time

import pytest

EVENTS = int(os.environ.get("STOKER_TIER_EVENTS", "12000"))


def finish(engine):
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    stats = engine.tiers.stats()
    assert stats.num_host_used == len(engine.tiers._host)
    for key, entry in engine.tiers._host.items():
        if key in engine.truth:
            assert engine.host[entry.slot].tolist() == engine.truth[key]
    return stats


def test_random_events(tiered):
    """Add, abort, flush, step, and copies that end late, out of order, or fail."""
    began = time.monotonic()
    num_events = seed = 0
    totals = {"loaded_pages": 0, "fetched_pages": 0, "damaged_pages": 0, "put_pages": 0}
    totals |= {"saved_pages": 0, "unsaved_pages": 0, "evicted_pages": 0, "prefetch_timeouts": 0}
    while num_events < EVENTS:
        engine = tiered.random_engine(seed)
        stats = finish(engine)
        num_events += engine.num_events
        for name in totals:
            totals[name] += getattr(stats, name)
        seed += 1
    print(f"\n{num_events} events, {seed} loads, {time.monotonic() - began:.1f} s: {totals}")
    assert all(totals.values()), "a path that no load took"


def test_the_same_seed_gives_the_same_story(tiered):
    stories = []
    for _ in range(2):
        engine = tiered.random_engine(7)
        engine.run()
        stories.append((engine.outputs, engine.reasons, engine.scheduler.stats(), engine.now))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("policy", ["write-through", "write-through-selective", "write-back"])
def test_a_second_engine_finds_what_the_first_stored(tiered, policy):
    """The store outlives the engine; pages of other models and namespaces are not found."""
    store = {}
    options = {"policy": policy, "page_size": 4, "num_pages": 25, "num_slots": 64, "overlap": True}
    options |= {"failures": 0.0, "lateness": 0.2, "write_hits": 1}
    prompt = list(range(40))

    def ask(engine, namespace=0):
        engine.add(prompt, namespace=namespace)
        engine.run()

    first = tiered.Engine(store=store, **options)
    ask(first)
    ask(first)  # a hit
    for start in range(41, 44):  # others push it out
        first.add([start] * 60)
        first.run()
    assert first.cached() == {"host": 0, "disk": 0}
    ask(first)
    assert first.cached()["host"] > 0, "evicted pages come back from the host"

    second = tiered.Engine(store=store, **options)
    ask(second)
    assert second.cached() == {"host": 0, "disk": 36}
    assert second.facts[0].num_cached == 36
    ask(second, namespace=1)
    other = tiered.Engine(store=store, fingerprint=b"another model", **options)
    ask(other)
    assert second.cached()["disk"] == 36 and other.cached()["disk"] == 0
    for engine in (first, second, other):
        finish(engine)
