"""Steps that the device has no memory for: undone, planned again smaller, with the same tokens."""

import random

import numpy as np
import pytest

from stoker.engine.api.errors import EngineError, Overloaded
from stoker.engine.core.plan import FROM_DEVICE

GREEDY_ROOM = 20


class SmallDevice:
    """Stands before a core test's device: a step of more tokens than `limit` fails.

    A step that fails was done in part, or not at all, and what the device knows of its requests is
    wrong afterwards: whatever is not told again shows in the tokens.
    """

    def __init__(self, device, limit, seed=0):
        self.device = device
        self.limit = limit
        self.rng = random.Random(seed)
        self.failures = 0

    def __getattr__(self, name):
        return getattr(self.device, name)

    def launch(self, plan):
        if plan.num_tokens <= self.limit(self.rng):
            return self.device.launch(plan)
        if self.rng.random() < 0.5:
            self.device.launch(plan)
        told = {a.slot for a in plan.admitted} | {*plan.slots.tolist(), *plan.page_slots.tolist()}
        for slot in told:
            self.device.admissions.pop(slot, None)
            self.device.table[slot] = 0
            self.device.last_token[slot] = -99
        self.failures += 1
        raise MemoryError


@pytest.fixture
def small(core, monkeypatch):
    """Engines whose steps may fail; make(limit, ...) as core.Engine."""

    def step(engine):
        engine.now += 1.0
        scheduler = engine.scheduler
        plan = scheduler.plan(engine.now)
        if plan is not None:
            try:
                engine.results.append(engine.device.launch(plan))
                engine.plans.append(plan)
            except MemoryError:
                plan = None
                scheduler.undo(1 << 20)
        scheduler.check()
        if engine.results and (plan is None or not engine.overlap or len(engine.results) > 1):
            engine.take(scheduler.commit(engine.results.popleft(), engine.now))
            scheduler.check()
        engine.take(scheduler.drain_facts())

    start = core.Engine.__init__

    def init(self, **kw):
        limit, seed = kw.pop("limit"), kw.pop("seed", 0)
        start(self, **kw)
        self.device = SmallDevice(self.device, limit, seed)

    monkeypatch.setattr(core.Engine, "__init__", init)
    monkeypatch.setattr(core.Engine, "step", step)
    return core


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
def test_random_loads_on_a_device_that_is_short_of_memory(small, overlap):
    failures = 0
    for seed in range(25):
        engine = small.run_random(
            seed,
            overlap=overlap,
            # Some steps of every size fail, single tokens excepted.
            limit=lambda rng: rng.choice([1, 1, 4, 100]),
        )
        failures += engine.device.failures
        assert engine.scheduler.stats().undone_steps == engine.device.failures
    assert failures > 100


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
def test_steps_shrink_to_what_fits_and_grow_again(small, overlap):
    limit = 5
    engine = small.Engine(overlap=overlap, limit=lambda _: limit)
    for i in range(8):
        engine.add([i, 1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=GREEDY_ROOM)
    for _ in range(40):
        engine.step()
    sizes = [plan.num_tokens for plan in engine.plans]
    assert 2 <= max(sizes) <= 5
    assert engine.device.failures == 2  # two prompts of 10, then one
    limit = 100
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    for _ in range(5):
        engine.add(list(range(40)), max_tokens=GREEDY_ROOM * 3)
        engine.run()
    assert engine.scheduler.limits.num_tokens == engine.max_step_tokens
    assert engine.device.failures == 2
    engine.add([50 - i for i in range(40)], max_tokens=1)
    engine.run()
    assert engine.plans[-2].num_tokens == engine.max_step_tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
def test_a_request_that_never_fits_fails_alone(small, overlap):
    engine = small.Engine(overlap=overlap, limit=lambda _: 32)
    launch = SmallDevice.launch

    def fail_long_contexts(self, plan):
        if plan.kv_lens.max() > 60:
            raise MemoryError
        return launch(self, plan)

    engine.device.launch = fail_long_contexts.__get__(engine.device)
    engine.add(np.arange(50).tolist(), max_tokens=30)
    engine.add([1, 2, 3], max_tokens=GREEDY_ROOM)
    engine.add([4, 5], max_tokens=GREEDY_ROOM)
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    error = engine.reasons.pop((1, 0))
    assert isinstance(error, EngineError)
    assert str(error) == (
        "the device has no memory for one token after 60 of this request, with 1 MiB free"
    )
    assert set(engine.reasons.values()) == {"length"}
    assert len(engine.outputs[1, 0]) in (10, 11)


def test_after_an_undo_the_step_before_is_committed_first(make_engine):
    """What the device sampled then may be overwritten: it is not asked for it again."""
    engine = make_engine(overlap=True)
    scheduler = engine.scheduler
    engine.add([1, 2, 3], max_tokens=5)
    engine.add([4, 5, 6, 7], max_tokens=5)
    first = engine.device.launch(scheduler.plan(1.0))
    second = scheduler.plan(2.0)
    assert second.tokens.tolist() == [FROM_DEVICE] * 2
    scheduler.undo(0)
    assert scheduler.plan(3.0) is None
    engine.take(scheduler.commit(first, 4.0))
    again = scheduler.plan(5.0)
    assert again.tokens.tolist() == engine.outputs[1, 0]  # half as many tokens fit
    assert [admission.slot for admission in again.admitted] == again.slots.tolist()
    engine.results.append(engine.device.launch(again))
    engine.run()
    engine.assert_outputs()


def test_who_waits_too_long_is_refused(make_engine):
    engine = make_engine(overlap=False, max_running=1, queue_timeout_s=50)
    engine.add([1], max_tokens=100)
    for _ in range(10):
        engine.step()
    late = [engine.add([2, 3], max_tokens=2), engine.add([4], max_tokens=2, n=3)]
    for _ in range(49):
        engine.step()
    assert not engine.reasons
    for _ in range(2):
        engine.step()
    refused = [error for error in engine.reasons.values() if isinstance(error, Overloaded)]
    assert len(refused) == 4 and "longer than 50 s" in refused[0].message
    assert {key[0] for key in engine.reasons} == {add.request_id for add in late}
    in_time = engine.add([5], max_tokens=2)
    engine.run()
    assert engine.reasons[in_time.request_id, 0] == engine.reasons[1, 0] == "length"
    engine.assert_drained()
    assert engine.scheduler.stats().received == 4


def test_a_retracted_request_does_not_time_out(make_engine):
    """It had its turn; its client has seen output."""
    engine = make_engine(
        overlap=False, num_pages=65, max_running=4, conservativeness=0.1, queue_timeout_s=3
    )
    for i in range(4):
        engine.add([i, 1, 2], max_tokens=30)
    engine.run()
    assert engine.scheduler.stats().retractions > 0
    assert set(engine.reasons.values()) == {"length"}
    engine.assert_outputs()
