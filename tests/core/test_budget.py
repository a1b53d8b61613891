"""The step's time: learnt from what ran, and kept to while streams run."""

import random
from array import array

import numpy as np
import pytest

from stoker.engine.api.messages import Add
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.budget import LONG_ROUNDING, MIN_CHUNK, StepBudget, StepCost, pairs_of
from stoker.engine.core.plan import StepResult
from stoker.engine.core.scheduler import Scheduler

BASE, PER_TOKEN, PER_PAIR = 5e-3, 21e-6, 2.6e-10


def true_seconds(num_tokens, num_pairs):
    return BASE + PER_TOKEN * num_tokens + PER_PAIR * num_pairs


def learnt():
    cost, rng = StepCost(), random.Random(1)
    for _ in range(200):
        n, context = rng.choice([1, 32, 200, 1000, 8000]), rng.randrange(0, 30000)
        cost.observe(n, pairs_of(n, context), true_seconds(n, pairs_of(n, context)))
    return cost


def test_the_coefficients_are_found():
    cost = learnt()
    assert cost.base_s == pytest.approx(BASE, rel=0.1)
    assert cost.per_token_s == pytest.approx(PER_TOKEN, rel=0.1)
    assert cost.per_pair_s == pytest.approx(PER_PAIR, rel=0.1)


def test_it_follows_a_device_that_gets_slower():
    cost = learnt()
    for _ in range(300):
        cost.observe(1000, pairs_of(1000, 100), 2 * true_seconds(1000, pairs_of(1000, 100)))
    expected = 2 * true_seconds(1000, pairs_of(1000, 100))
    assert cost.seconds(1000, pairs_of(1000, 100)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("context", [0, 500, 28000, 500_000])
def test_the_largest_chunk_that_fits(context):
    cost = learnt()
    n = cost.chunk_within(0.05, context)
    spent = cost.seconds(n, pairs_of(n, context)) - cost.base_s
    more = cost.seconds(n + 2, pairs_of(n + 2, context)) - cost.base_s
    assert spent <= 0.05 * 1.01 and more >= 0.05 * 0.99


def test_a_budget_is_spent_once():
    budget = StepBudget(10_000, learnt(), 0.04)
    first = budget.chunk(5000, 0)
    assert first % LONG_ROUNDING == 0 and 1500 < first < 2000
    budget.spend(first, 0)
    assert budget.is_spent and budget.chunk(5000, 0) == 0


def test_a_prompt_advances_though_no_time_is_left():
    assert StepBudget(10_000, learnt(), -1.0).chunk(5000, 0) == MIN_CHUNK
    assert StepBudget(10_000, learnt(), -1.0).chunk(9, 0) == 9


def run(scheduler, num_steps, is_timed=True):
    """(tokens, seconds, has decode rows) of each step of a device that obeys true_seconds."""
    steps = []
    for now in range(num_steps):
        if (plan := scheduler.plan(float(now))) is None:
            break
        q, kv = plan.q_lens, plan.kv_lens
        seconds = true_seconds(plan.num_tokens, float((q * (kv - (q - 1) / 2)).sum()))
        tokens = np.where(plan.samples, 7, -1).astype(np.int32)
        result = StepResult(plan.step, tokens, np.ones(len(tokens), bool), seconds * is_timed)
        scheduler.commit(result, float(now))
        steps.append((plan.num_tokens, seconds, plan.num_decode_rows > 0))
    return steps


def add(request_id, prompt_len, max_tokens):
    prompt = array("i", [request_id * 100_000 + i for i in range(prompt_len)])
    params = SamplingParams(temperature=0)
    return Add(request_id, prompt, params, max_tokens, frozenset(), 0, 0.0)


def make_scheduler(**options):
    return Scheduler(
        num_pages=40_000,
        page_size=4,
        max_running=64,
        max_step_tokens=8192,
        max_model_len=40_000,
        **options,
    )


def test_a_long_prompt_does_not_stall_streams():
    scheduler = make_scheduler(max_step_s=0.04, cost=learnt())
    for i in range(1, 33):
        scheduler.handle(add(i, 128, 500))
    run(scheduler, 20)
    scheduler.handle(add(99, 32_000, 4))
    steps = run(scheduler, 150)
    chunks = [s for s in steps if s[0] > 64]
    assert all(has_decode for _, _, has_decode in chunks)
    assert max(seconds for _, seconds, _ in chunks) < 0.045
    assert sum(tokens for tokens, _, _ in chunks) > 32_000  # it was computed meanwhile
    # Nobody waits for it, so it may take whole steps: the limit is for running streams only.
    scheduler = make_scheduler(max_step_s=0.04, cost=learnt())
    scheduler.handle(add(1, 32_000, 4))
    assert run(scheduler, 1)[0][0] == 8192


def test_steps_without_chunks_between_chunks():
    scheduler = make_scheduler(prefill_decode_interval=3)
    scheduler.handle(add(1, 8, 500))
    run(scheduler, 4)
    scheduler.handle(add(2, 8191 * 3, 4))
    sizes = [tokens for tokens, _, _ in run(scheduler, 9)]
    assert [size > 1 for size in sizes] == [True, False, False, False] * 2 + [True]


def test_an_untimed_device_teaches_nothing():
    scheduler = make_scheduler(max_step_s=0.001)
    scheduler.handle(add(1, 100, 50))
    run(scheduler, 30, is_timed=False)
    assert not scheduler.limits.cost.is_known


def test_steps_are_stretched_while_many_wait():
    def largest(num_waiting, **options):
        scheduler = make_scheduler(max_step_s=0.04, cost=learnt(), **options)
        scheduler.handle(add(1, 8, 500))
        run(scheduler, 3)
        scheduler.limits.mean_new_tokens = 4000.0
        for i in range(num_waiting):
            scheduler.handle(add(2 + i, 4000, 4))
        return run(scheduler, 1)[0][0]

    assert largest(1) == largest(30) < 2000
    assert largest(1, backlog_stretch=4.0) < 2800
    assert 6000 < largest(30, backlog_stretch=4.0) < 8192


def test_where_attention_costs_nothing_the_tokens_decide():
    cost = StepCost()
    for n in (10, 100, 1000):
        cost.observe(n, 0, 0.001 + n * 1e-5)
    assert cost.chunk_within(0.01, 50_000) == pytest.approx(1000, rel=0.1)
