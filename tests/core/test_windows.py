"""Layers with a sliding window in a page pool of their own.

The device (conftest.Device) reads what a window sees out of the window pool, and compares it with
the whole context's KV, so a window page that is missing, stale, or another's changes the tokens.
"""

import random

import pytest

from stoker.engine.api.messages import Abort
from stoker.engine.core import arriving
from stoker.engine.core.configure import split_pool
from stoker.engine.core.windows import Windows, pages_of_window

OPTIONS = {"page_size": 4, "num_pages": 200, "window": 8, "num_window_pages": 100}  # of engine_of
PROMPT = [3 + i % 41 for i in range(40)]


def test_a_request_holds_a_window(engine_of):
    engine = engine_of(max_step_tokens=8)
    windows = engine.scheduler.windows
    engine.add(PROMPT, max_tokens=60)
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        if engine.outputs.get((1, 0)):
            most = max(most, windows.pool.capacity - windows.num_available)
    assert most <= pages_of_window(8, 4) == 5
    assert len(engine.turn((1, 0))) == 100


def test_a_small_window_pool_serves_long_contexts(engine_of):
    """Eight requests of 100 tokens, beside 172 window tokens."""
    engine = engine_of(num_pages=210, num_window_pages=44, max_step_tokens=16)
    for i in range(8):
        engine.add([*PROMPT, i], max_tokens=59)
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    assert max(plan.num_rows for plan in engine.plans) == 8
    assert engine.scheduler.stats().retractions == 0


def test_prompts_and_turns_go_on_at_the_ends_of_others(engine_of):
    engine = engine_of()
    assert [engine.serve(PROMPT, max_tokens=21) for _ in range(2)] == [0, 36]
    assert engine.serve([*engine.turn((1, 0)), 1, 2, 3]) == 60
    assert engine.serve(PROMPT[:22]) == 0  # what it sees there is gone


def test_what_two_prompts_share_a_third_begins_with(engine_of):
    engine = engine_of()
    cached = [engine.serve([*PROMPT[:24], *[i] * 16]) for i in range(4)]
    assert cached == [0, 0, 24, 24]


def test_those_who_come_together_wait_for_what_they_share(engine_of, monkeypatch):
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)
    engine = engine_of(max_step_tokens=8)
    for i in range(4):
        engine.add([*PROMPT[:24], *[i] * 16], max_tokens=3)
    engine.run()
    engine.assert_outputs()
    assert engine.scheduler.stats().cached_tokens == 3 * 24


def test_window_pages_go_before_the_others_and_come_back(engine_of):
    engine = engine_of(num_window_pages=11)
    engine.serve(PROMPT, max_tokens=1)
    engine.serve([7] * 40, max_tokens=40)
    tree = engine.scheduler.tree
    assert tree.num_evicted == 0 and tree.find(engine.adds[1].prompt, ("ns0",))[1] == 0
    assert [engine.serve(PROMPT, max_tokens=1) for _ in range(2)] == [0, 36]


def test_what_is_kept_for_others_goes_before_a_request_fails(engine_of):
    engine = engine_of(num_window_pages=1 + pages_of_window(8, 4))
    for i in range(3):  # the second and third keep what it takes to go on at 24
        engine.serve([*PROMPT[:24], *[i] * 40], max_tokens=8)
    assert set(engine.reasons.values()) == {"length"}


def test_pinned_prefixes_keep_their_window_pages(engine_of):
    engine = engine_of(num_window_pages=14)
    engine.serve(PROMPT, max_tokens=1, pin=1)
    for i in range(4):
        engine.serve([i] * 40, max_tokens=4)
    assert engine.serve(PROMPT, max_tokens=1) == 36


@pytest.mark.parametrize(("length", "at_least"), [(64, 0.9), (256, 2.2), (1024, 2.0)])
def test_more_requests_run_in_the_memory_of_one_pool(core, length, at_least):
    """As Gemma 3's: of six layers one sees all; contexts of 2, 8 and 32 windows."""
    window, page_size, layer_tokens = 32, 4, 6 * 2048
    tokens, windowed = split_pool(layer_tokens, 1, 5, 0.3, 10**6, 10**6)
    most = []
    for num_tokens, options in (
        (layer_tokens // 6, {}),
        (tokens, {"window": window, "num_window_pages": 1 + windowed // page_size}),
    ):
        engine = core.Engine(
            overlap=True,
            check=False,
            page_size=page_size,
            num_pages=1 + num_tokens // page_size,
            max_running=64,
            max_step_tokens=512,
            max_model_len=2048,
            conservativeness=1.0,
            **options,
        )
        for i in range(64):
            engine.add([i] * (length - 32), max_tokens=32)
        engine.run()
        engine.assert_outputs()
        most.append(max(plan.num_decode_rows for plan in engine.plans))
    print(f"contexts of {length}: {most[0]} and {most[1]} requests at once")
    assert most[1] >= at_least * most[0]


def test_a_window_as_long_as_a_page_and_of_one_token(engine_of):
    for window in (1, 4):
        engine = engine_of(window=window)
        assert [engine.serve(PROMPT) for _ in range(2)] == [0, 36]


def test_a_pool_smaller_than_a_window_is_refused(core):
    with pytest.raises(ValueError, match="cannot hold a window of 64"):
        core.Engine(overlap=False, page_size=4, window=64, num_window_pages=16)


def test_an_abort_while_the_prompt_is_computed(engine_of):
    engine = engine_of(max_step_tokens=8)
    engine.add(PROMPT)
    for _ in range(4):
        engine.step()
    engine.scheduler.handle(Abort(1))
    engine.run()
    assert engine.serve(PROMPT) >= 16


def run_random(core, seed, **options):
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    options |= {"page_size": page_size, "num_pages": 1 + 96 // page_size}
    return core.run_random(seed, **options, **core.random_windows(rng, page_size))


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_give_the_tokens_of_requests_alone(core, monkeypatch, seed):
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)
    run_random(core, seed)


def free_a_page_too_early(monkeypatch):
    original = Windows.commit

    def commit(self, rows):
        self.window -= 2 * self._page_size
        original(self, rows)
        self.window += 2 * self._page_size

    monkeypatch.setattr(Windows, "commit", commit)


def begin_anywhere(monkeypatch):
    monkeypatch.setattr(Windows, "point", lambda self, node, end: end)


def own_nothing_of_what_is_matched(monkeypatch):
    original = Windows.open

    def open_(self, request, node, num_matched):
        original(self, request, node, num_matched)
        first, end = self._first(num_matched), num_matched // self._page_size
        pages = self._slots.window_table[request.slot, first:end]
        self._num_owners[pages] -= 1

    monkeypatch.setattr(Windows, "open", open_)


def free_a_page_of_two_owners(monkeypatch):
    original = Windows._release

    def release(self, pages):
        self._num_owners[pages[self._num_owners[pages] == 2]] = 1
        original(self, pages)

    monkeypatch.setattr(Windows, "_release", release)


def leak_what_was_kept(monkeypatch):
    original = Windows.published

    def published(self, request):
        request.kept.clear()
        original(self, request)

    monkeypatch.setattr(Windows, "published", published)


@pytest.mark.parametrize(
    "fault",
    [
        free_a_page_too_early,
        begin_anywhere,
        own_nothing_of_what_is_matched,
        free_a_page_of_two_owners,
        leak_what_was_kept,
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, core, fault):
    fault(monkeypatch)
    core.assert_caught(fault, lambda seed: run_random(core, seed, use_radix=True), 60, KeyError)
