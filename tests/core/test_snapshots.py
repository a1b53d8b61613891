"""Models with recurrent states: what a request may begin with, and what it leaves for others.

The device (conftest.Device) goes on from its slot's state, so a state that is missing, late, or
another's changes the tokens, which are compared with those of a request alone.
"""

import random
from functools import partial

import pytest

from stoker.engine.api.messages import Abort
from stoker.engine.core import arriving
from stoker.engine.core.snapshots import Snapshots

OPTIONS = {"page_size": 4, "num_pages": 200, "num_snapshots": 12, "save_every": 4}  # of engine_of
PROMPT = [3 + i % 41 for i in range(40)]


def test_the_same_prompt_begins_at_its_last_page_boundary(engine_of):
    engine = engine_of()
    assert [engine.serve(PROMPT) for _ in range(2)] == [0, 36]
    assert engine.serve([*PROMPT, 1]) == 40  # the second has decoded to 40 and beyond
    assert engine.serve(PROMPT[:30]) == 0  # between snapshots there is none


def test_the_next_turn_begins_near_the_end_of_the_last(engine_of):
    engine = engine_of(save_every=8)
    engine.serve(PROMPT, max_tokens=21)
    # 36 at the prompt's end; 44, 52 and 60 on the way, of which the last stays; 60 are computed.
    assert engine.serve([*engine.turn((1, 0)), 1, 2, 3]) == 60


def test_what_two_prompts_share_a_third_begins_with(engine_of):
    engine = engine_of()
    shared = PROMPT[:24]
    cached = [engine.serve([*shared, *[i] * 9]) for i in range(4)]
    assert cached == [0, 0, 24, 24]


def test_those_who_come_together_wait_for_what_they_share(engine_of, monkeypatch):
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)
    engine = engine_of(max_step_tokens=8)
    for i in range(4):
        engine.add([*PROMPT[:24], *[i] * 9], max_tokens=3)
    engine.run()
    engine.assert_outputs()
    computed = sum(plan.num_tokens for plan in engine.plans)
    assert computed - 4 * (9 + 3 - 1) <= 24 + 4  # one pass more each with overlap


def test_siblings_begin_with_the_prompt_of_the_first(engine_of):
    engine = engine_of()
    engine.add(PROMPT, n=3)
    engine.run()
    engine.assert_outputs()
    assert engine.scheduler.stats().cached_tokens == 2 * 36


def test_a_prompt_that_is_too_short_for_a_snapshot_is_not_cut(engine_of):
    engine = engine_of(save_every=64)
    assert [engine.serve(PROMPT, max_tokens=3) for _ in range(2)] == [0, 0]
    assert engine.plans[0].num_tokens == 32 and engine.plans[1].num_tokens == 8


@pytest.mark.parametrize("options", [{"num_snapshots": 0}, {"use_radix": False}])
def test_without_snapshots_nothing_is_found(engine_of, options):
    engine = engine_of(**options)
    assert [engine.serve(PROMPT) for _ in range(2)] == [0, 0]
    assert not any(plan.state_saves.size for plan in engine.plans)


def test_the_least_recently_used_snapshot_goes(engine_of):
    engine = engine_of(num_snapshots=3, save_every=32)
    prompts = [[i] * 40 for i in range(4)]
    for prompt in prompts[:3]:
        engine.serve(prompt, max_tokens=1)
    assert engine.serve(prompts[0], max_tokens=1) == 36
    engine.serve(prompts[3], max_tokens=1)
    assert [engine.serve(prompts[i], max_tokens=1) for i in (0, 3, 1)] == [36, 36, 0]


def test_pinned_prefixes_keep_their_snapshots(engine_of):
    engine = engine_of(num_snapshots=2, save_every=32)
    engine.serve(PROMPT, max_tokens=1, pin=1)
    for i in range(3):
        engine.serve([i] * 40, max_tokens=1)
    assert engine.serve(PROMPT, max_tokens=1) == 36


def test_a_snapshot_goes_with_its_pages(engine_of):
    engine = engine_of(num_pages=21)
    engine.serve(PROMPT, max_tokens=1)
    engine.serve([7] * 60, max_tokens=1)  # takes 15 of 20 pages
    assert engine.serve(PROMPT, max_tokens=1) == 0


def test_an_abort_leaves_what_was_computed(engine_of):
    engine = engine_of(max_step_tokens=8)
    engine.add(PROMPT)
    for _ in range(4):
        engine.step()
    engine.scheduler.handle(Abort(1))
    engine.run()
    assert engine.serve(PROMPT) >= 16


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_give_the_tokens_of_requests_alone(core, monkeypatch, seed):
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)
    core.run_random(seed, **core.random_snapshots(random.Random(seed)))


def trust_at_launch(monkeypatch):
    """A snapshot of a step in flight is the request's at once."""
    original = Snapshots.write

    def write(self, plan, step):
        original(self, plan, step)
        for save in step.saves:
            save.request.snapshots.append((save.end, save.row))
        step.saves.clear()

    monkeypatch.setattr(Snapshots, "write", write)


def begin_anywhere(monkeypatch):
    monkeypatch.setattr(Snapshots, "point", lambda self, node, end: end)


def keep_the_snapshot_of_a_shortened_node(monkeypatch):
    monkeypatch.setattr(Snapshots, "cut", lambda self, node, num_pages: None)


def forget_to_restore(monkeypatch):
    original = Snapshots.write

    def write(self, plan, step):
        self._restores.popitem() if self._restores else None
        original(self, plan, step)

    monkeypatch.setattr(Snapshots, "write", write)


def save_between_pages(monkeypatch):
    original = Snapshots.write

    def write(self, plan, step):
        self._page_size, size = 1, self._page_size
        original(self, plan, step)
        self._page_size = size

    monkeypatch.setattr(Snapshots, "write", write)


@pytest.mark.parametrize(
    "fault",
    [
        trust_at_launch,
        begin_anywhere,
        keep_the_snapshot_of_a_shortened_node,
        forget_to_restore,
        save_between_pages,
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, core, fault):
    fault(monkeypatch)
    options = {"use_radix": True, "num_snapshots": 5, "save_every": 4}
    core.assert_caught(fault, partial(core.run_random, **options), 60)
