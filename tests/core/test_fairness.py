"""Who is served when. The ledger's checks do not see this: an unfair scheduler loses no page."""

import random

import pytest

from stoker.engine.core.waiting import WaitingQueue


def heavy_engine(core, seed, overlap, **kw):
    """Small requests whose outputs outgrow the pool, so that some are retracted."""
    engine = core.Engine(
        overlap=overlap,
        num_pages=81,
        max_running=6,
        max_step_tokens=24,
        conservativeness=0.1,
        check=False,
        **kw,
    )
    return engine, random.Random(seed)


def assert_served_in_order(core, seed, overlap):
    """First come, first served; who was retracted comes back before those behind it."""
    engine, rng = heavy_engine(core, seed, overlap)
    watch = core.FairnessWatch(engine)
    for _ in range(60):
        prompt = [rng.randrange(core.VOCAB) for _ in range(rng.randrange(4, 16))]
        engine.add(prompt, max_tokens=rng.randrange(10, 40))
        for _ in range(rng.randrange(6)):
            engine.step()
            watch.look()
    while engine.scheduler.has_work:
        engine.step()
        watch.look()
    assert engine.scheduler.stats().retractions > 0
    assert len(watch.first_admitted) == 60


def assert_nobody_starves(core, seed, overlap):
    """Each request ends within a time that depends on the load before it, not on what follows."""
    engine, rng = heavy_engine(core, seed, overlap)
    deadlines = {}
    now = 0
    while now < 500:
        if now % 2 == 0:  # more than the engine can serve: the queue grows all the time
            prompt = [rng.randrange(core.VOCAB) for _ in range(rng.randrange(4, 16))]
            add = engine.add(prompt, max_tokens=rng.randrange(10, 40))
            alive = [i for i in engine.adds if (i, 0) not in engine.reasons]
            ahead = sum(len(engine.adds[i].prompt) + engine.adds[i].max_tokens for i in alive)
            # At one token a step all of it would be done then; a retracted request computes some
            # of its tokens twice, but several requests run at once.
            deadlines[add.request_id] = now + ahead
        engine.step()
        now += 1
        late = [i for i, when in deadlines.items() if when < now and (i, 0) not in engine.reasons]
        assert not late, f"step {now}: still waiting for {late}"
    assert engine.scheduler.stats().num_waiting > 50


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_served_in_order(core, seed, overlap):
    assert_served_in_order(core, seed, overlap)


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
def test_nobody_starves(core, overlap):
    assert_nobody_starves(core, 0, overlap)


def requeue_at_the_back(monkeypatch, core):
    original = WaitingQueue.add

    def add(self, requests, *, front=False):
        for request in requests:
            request.is_resumed = False
        original(self, requests)

    monkeypatch.setattr(WaitingQueue, "add", add)


def admit_the_newest_first(monkeypatch, core):
    original = WaitingQueue.in_order
    monkeypatch.setattr(
        WaitingQueue, "in_order", lambda self, view: reversed(list(original(self, view)))
    )


@pytest.mark.parametrize(
    ("fault", "property_"),
    [
        (requeue_at_the_back, assert_served_in_order),
        (admit_the_newest_first, assert_served_in_order),
        (admit_the_newest_first, assert_nobody_starves),
    ],
)
def test_planted_unfairness_is_caught(monkeypatch, core, fault, property_):
    fault(monkeypatch, core)
    with pytest.raises(AssertionError, match=r"overtook|not first come|still waiting"):
        property_(core, 0, True)


def test_an_unfair_scheduler_passes_the_ledgers_checks(monkeypatch, core):
    """Why the properties above exist."""
    admit_the_newest_first(monkeypatch, core)
    core.run_random(1)
