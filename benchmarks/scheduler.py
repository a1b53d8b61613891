"""What the scheduler costs a step, beside a large prefix cache.

    python benchmarks/scheduler.py

Prints microseconds, median and 99th percentile: plan and commit of 256 running streams with 10,000
nodes in the tree and of 1,024 with 100,000, also while requests come and go; a match of a cached
prompt of 4,096 tokens; the order of 128 waiting requests under each queue policy; evictions.
"""

import argparse
import time
from array import array
from collections import deque
from dataclasses import replace

import numpy as np

from stoker.engine.api.messages import Add, Tokens
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.eviction import POLICIES as EVICTION_POLICIES
from stoker.engine.core.fairness import FairShares
from stoker.engine.core.plan import StepPlan, StepResult
from stoker.engine.core.policy import MAX_SORTED, POLICIES, QueueView
from stoker.engine.core.scheduler import Scheduler

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


def fill(scheduler: Scheduler, num_nodes: int) -> list[np.ndarray]:
    """So many nodes: branches of 64 tokens off shared trunks of 256; gives the trunks."""
    trunks: list[np.ndarray] = []
    i = 0
    while scheduler.tree.num_nodes < num_nodes:
        if i % 100 == 0:
            trunk = rng.integers(0, VOCAB, 256, dtype=np.int32)
            trunks.append(trunk)
        tokens = np.concatenate([trunk, rng.integers(0, VOCAB, 64, dtype=np.int32)])
        pages = scheduler.pool.take(len(tokens) // scheduler.page_size)
        _, _, num_present = scheduler.tree.insert(tokens, pages, ("base",), float(i))
        scheduler.pool.release(pages[: num_present // scheduler.page_size])
        i += 1
    return trunks


def result_of(plan: StepPlan) -> StepResult:
    tokens = np.where(plan.samples, 7, -1).astype(np.int32)
    return StepResult(plan.step, tokens, np.ones(len(tokens), np.bool_))


def steps(num_running: int, num_nodes: int, page_size: int, *, turnover: bool) -> list[float]:
    """Microseconds of plan + commit, with one step in flight.

    With turnover, every other step one request ends and another, with a cached trunk, takes its
    place.
    """
    scheduler = Scheduler(
        num_pages=(2_000_000 + 100 * num_nodes) // page_size,
        page_size=page_size,
        max_running=num_running,
        max_step_tokens=8192,
        max_model_len=8192,
    )
    fill(scheduler, num_nodes)
    trunk = rng.integers(0, VOCAB, PROMPT_LEN // 2, dtype=np.int32)

    def new(request_id: int, max_tokens: int) -> Add:
        own = rng.integers(0, VOCAB, PROMPT_LEN // 2, dtype=np.int32)
        return add(request_id, np.concatenate([trunk, own]), max_tokens)

    for i in range(num_running):
        scheduler.handle(new(i, 2 * (i + 1) + 60 if turnover else 4000))
    in_flight: deque[StepPlan] = deque()
    times: list[float] = []
    next_id = num_running
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
        if plan.num_decode_rows >= num_running * 3 // 4:
            times.append((planned - begin + end - middle) * 1e6)
        for fact in facts:
            if isinstance(fact, Tokens) and fact.finish_reason is not None:
                scheduler.handle(new(next_id, 512))
                next_id += 1
    scheduler.check()
    return times


def matches(page_size: int) -> list[float]:
    """Microseconds of a match of MATCH_LEN cached tokens in a tree of 10,000 nodes."""
    scheduler = Scheduler(
        num_pages=2_000_000 // page_size,
        page_size=page_size,
        max_running=1,
        max_step_tokens=8192,
        max_model_len=8192,
    )
    fill(scheduler, 10_000)
    prompt = rng.integers(0, VOCAB, MATCH_LEN, dtype=np.int32)
    scheduler.tree.insert(prompt, scheduler.pool.take(MATCH_LEN // page_size), ("base",), 10_000.0)
    times = []
    for i in range(2000):
        begin = time.perf_counter()
        _, _, num_matched = scheduler.tree.match(prompt, ("base",), float(i))
        times.append((time.perf_counter() - begin) * 1e6)
        assert num_matched == MATCH_LEN
    return times


def orders(name: str, num_waiting: int, *, is_fair: bool = False) -> list[float]:
    """Microseconds until the order of waiting requests, half of them cached, is known."""
    scheduler = Scheduler(
        num_pages=4_000_000,
        page_size=1,
        max_running=1,
        max_step_tokens=8192,
        max_model_len=8192,
        policy=POLICIES[name],
        shares=FairShares({}) if is_fair else None,
    )
    trunks = fill(scheduler, 10_000)
    for i in range(num_waiting):
        beginning = trunks[i % len(trunks)] if i % 2 else rng.integers(0, VOCAB, 256)
        prompt = np.concatenate([beginning, rng.integers(0, VOCAB, PROMPT_LEN - 256)])
        message = add(i, prompt, int(rng.integers(1, 500)))
        scheduler.handle(replace(message, client=str(i % 16)))
    times = []
    for i in range(200):
        begin = time.perf_counter()
        order = scheduler.waiting.in_order(QueueView(scheduler.tree, 10_000, i))
        for _ in range(16):  # as far as a step may look
            next(order)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def evictions(name: str) -> list[float]:
    """Microseconds for 64 pages of a tree of 100,000 nodes, half of which were used again."""
    scheduler = Scheduler(
        num_pages=12_000_000,
        page_size=1,
        max_running=1,
        max_step_tokens=8192,
        max_model_len=8192,
        eviction=EVICTION_POLICIES[name],
    )
    tree = scheduler.tree
    fill(scheduler, 100_000)
    for i, node in enumerate(list(tree.nodes())):
        if i % 2 and not node.children:
            node.last_access_s = 1e6 + i  # as a match would
            tree.count_hit(node)
    times = []
    for _ in range(2000):
        begin = time.perf_counter()
        pages = tree.evict(64)
        times.append((time.perf_counter() - begin) * 1e6)
        assert len(pages) == 64
    return times


def report(name: str, times: list[float]) -> None:
    median, p99 = np.percentile(times, [50, 99])
    print(f"{name:<58} {median:8.1f} us  p99 {p99:8.1f} us")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    for num_running, num_nodes, page_size in ((256, 10_000, 1), (256, 10_000, 16)):
        name = f"{num_running} streams, {num_nodes:,} nodes, page size {page_size}"
        report(name, steps(num_running, num_nodes, page_size, turnover=False))
        name += ", requests come and go"
        report(name, steps(num_running, num_nodes, page_size, turnover=True))
    for turnover in (False, True):
        name = "1024 streams, 100,000 nodes, page size 16" + ", come and go" * turnover
        report(name, steps(1024, 100_000, 16, turnover=turnover))
    for page_size in (1, 16):
        report(f"match of {MATCH_LEN} tokens, page size {page_size}", matches(page_size))
    for policy in POLICIES:
        report(f"order of {MAX_SORTED} waiting under {policy}", orders(policy, MAX_SORTED))
    report("order of 4096 waiting under lof", orders("lof", 4096))
    report("order of 4096 waiting of 16 clients", orders("fcfs", 4096, is_fair=True))
    for rule in EVICTION_POLICIES:
        report(f"eviction of 64 pages under {rule}", evictions(rule))


if __name__ == "__main__":
    main()
