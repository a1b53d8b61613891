"""What the scheduler costs a step: plan and commit of 256 decoding requests beside a large tree.

    python benchmarks/scheduler.py

Prints microseconds, median and 99th percentile: a step of 256 running streams with 10,000 nodes in
the tree, the same while requests come and go, and a match of a cached prompt of 4,096 tokens.
"""

import time
from array import array
from collections import deque

import numpy as np

from stoker.engine.api.messages import Add, Tokens
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.plan import StepPlan, StepResult
from stoker.engine.core.scheduler import Scheduler

NUM_RUNNING = 256
NUM_NODES = 10_000
PROMPT_LEN = 512
MATCH_LEN = 4096
STEPS = 600
VOCAB = 32_000

rng = np.random.default_rng(0)


def add(request_id: int, prompt: np.ndarray, max_tokens: int) -> Add:
    return Add(
        request_id=request_id,
        prompt=array("i", prompt.tolist()),
        params=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset([VOCAB]),
        seed=request_id,
        arrival_s=0.0,
        namespace=("base",),
    )


def fill(scheduler: Scheduler) -> None:
    """NUM_NODES nodes: branches of 64 tokens off shared trunks of 256."""
    trunk = np.empty(0, np.int32)
    i = 0
    while scheduler.tree.num_nodes < NUM_NODES:
        if i % 100 == 0:
            trunk = rng.integers(0, VOCAB, 256, dtype=np.int32)
        tokens = np.concatenate([trunk, rng.integers(0, VOCAB, 64, dtype=np.int32)])
        pages = scheduler.pool.take(len(tokens) // scheduler.page_size)
        _, _, num_present = scheduler.tree.insert(tokens, pages, ("base",), float(i))
        scheduler.pool.release(pages[: num_present // scheduler.page_size])
        i += 1


def result_of(plan: StepPlan) -> StepResult:
    tokens = np.where(plan.samples, 7, -1).astype(np.int32)
    return StepResult(plan.step, tokens, np.ones(len(tokens), np.bool_))


def steps(page_size: int, *, turnover: bool) -> list[float]:
    """Microseconds of plan + commit, with one step in flight.

    With turnover, every other step one request ends and another, with a cached trunk, takes its
    place.
    """
    scheduler = Scheduler(
        num_pages=2_000_000 // page_size,
        page_size=page_size,
        max_running=NUM_RUNNING,
        max_step_tokens=8192,
        max_model_len=8192,
    )
    fill(scheduler)
    trunk = rng.integers(0, VOCAB, PROMPT_LEN // 2, dtype=np.int32)

    def new(request_id: int, max_tokens: int) -> Add:
        own = rng.integers(0, VOCAB, PROMPT_LEN // 2, dtype=np.int32)
        return add(request_id, np.concatenate([trunk, own]), max_tokens)

    for i in range(NUM_RUNNING):
        scheduler.handle(new(i, 2 * (i + 1) + 60 if turnover else 4000))
    in_flight: deque[StepPlan] = deque()
    times: list[float] = []
    next_id = NUM_RUNNING
    now = 0.0
    while len(times) < STEPS:
        now += 0.01
        begin = time.perf_counter()
        plan = scheduler.plan(now)
        planned = time.perf_counter()
        assert plan is not None
        result = result_of(in_flight[0]) if in_flight else None
        in_flight.append(plan)
        middle = time.perf_counter()
        facts = []
        if result is not None:
            in_flight.popleft()
            facts = scheduler.commit(result, now)
        end = time.perf_counter()
        if plan.num_decode_rows >= NUM_RUNNING * 3 // 4:
            times.append((planned - begin + end - middle) * 1e6)
        for fact in facts:
            if isinstance(fact, Tokens) and fact.finish_reason is not None:
                scheduler.handle(new(next_id, 512))
                next_id += 1
    scheduler.check()
    return times


def matches(page_size: int) -> list[float]:
    """Microseconds of a match of MATCH_LEN cached tokens in a tree of NUM_NODES nodes."""
    scheduler = Scheduler(
        num_pages=2_000_000 // page_size,
        page_size=page_size,
        max_running=1,
        max_step_tokens=8192,
        max_model_len=8192,
    )
    fill(scheduler)
    prompt = rng.integers(0, VOCAB, MATCH_LEN, dtype=np.int32)
    scheduler.tree.insert(
        prompt, scheduler.pool.take(MATCH_LEN // page_size), ("base",), float(NUM_NODES)
    )
    times = []
    for i in range(2000):
        begin = time.perf_counter()
        _, _, num_matched = scheduler.tree.match(prompt, ("base",), float(i))
        times.append((time.perf_counter() - begin) * 1e6)
        assert num_matched == MATCH_LEN
    return times


def report(name: str, times: list[float]) -> None:
    median, p99 = np.percentile(times, [50, 99])
    print(f"{name:<58} {median:8.1f} us  p99 {p99:8.1f} us")


def main() -> None:
    for page_size in (1, 16):
        report(f"{NUM_RUNNING} streams, page size {page_size}", steps(page_size, turnover=False))
        report(
            f"{NUM_RUNNING} streams, page size {page_size}, requests come and go",
            steps(page_size, turnover=True),
        )
        report(f"match of {MATCH_LEN} tokens, page size {page_size}", matches(page_size))


if __name__ == "__main__":
    main()
