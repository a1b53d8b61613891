"""The engine in virtual time: the real scheduler, pages and radix tree, a cost model for a device.

    result = simulate(requests, EngineConfig(), spec, RooflineCost(find_card("H200"), shape))
    print(result.summary(slo_ttft_ms=500, slo_tpot_ms=20))

The loop is that of gpu_thread.py, with time as a number: drain the inbox, plan, launch, wait for
the step before, commit. Nothing is random here: the same requests give the same result.

Runs on: any (pure).
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .api.config import EngineConfig
from .api.messages import Add, Fact, Refused, Stats, Tokens
from .api.sampling_params import SamplingParams
from .core.budget import StepCost, calibration_chunks, pairs_of
from .core.configure import chunk_tokens, make_scheduler
from .core.plan import StepPlan, StepResult
from .core.routing import ROUTERS, RoundRobin, Router
from .core.scheduler import Scheduler
from .core.shape import StepShape
from .simulate_cost import CostModel
from .simulate_load import OWN, STOP, LoadRequest, made_tokens

__all__ = ["REQUEST_S", "ROUTERS", "EngineSpec", "Record", "Result", "SimulatedEngine", "simulate"]

# HTTP and client, before the engine has a request: as measured beside an H200, 9.7 ms to the first
# token where the device needs 5.9. Of it the event loop is busy with one request at a time.
REQUEST_S = 3.8e-3
REQUEST_LOOP_S = 0.5e-3
POLL_S = 1e-3  # a scheduler with nothing to launch is asked again after this
MAX_POLLS = 100_000  # in a row
OUTPUT = OWN * 2  # block ids of answers
PERCENTILES = (50, 90, 99)
PARAMS = SamplingParams(temperature=0.0)
STOPS = frozenset([STOP])


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine measures at its start.

    Attributes:
        kv_tokens: size of the KV pool. is_cpu: whether a CPU's defaults hold.
    """

    kv_tokens: int
    page_size: int
    max_model_len: int
    is_cpu: bool = False


@dataclass(slots=True)
class Record:
    """What became of one request; times are virtual.

    Attributes:
        tokens_s: when each token of the answer was there.
        engine: which of the fleet served it.
        error: why it was refused, if it was.
    """

    request: LoadRequest
    sent_s: float = 0.0
    tokens_s: array = field(default_factory=lambda: array("d"))
    num_cached: int = 0
    engine: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.tokens_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time a token after the first."""
        return (self.tokens_s[-1] - self.tokens_s[0]) / max(len(self.tokens_s) - 1, 1)


class SimulatedEngine:
    """One engine and its clock.

    Attributes:
        inbox: what will be there when, by time.
        now: the time of its GPU thread.
        series: a row (time, running, waiting, pages of requests, cached pages, tokens of the
            step, retractions so far) a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: EngineSpec,
        cost: CostModel,
        requests: Sequence[LoadRequest],
    ):
        learnt = StepCost()
        if not spec.is_cpu:  # as ModelRunner.calibrate
            limit = min(chunk_tokens(config, is_cpu=False), spec.kv_tokens - spec.page_size)
            for n, context in calibration_chunks(limit):
                learnt.observe(n, pairs_of(n, context), cost.device_s(StepShape.chunk(n, context)))
        self.scheduler: Scheduler = make_scheduler(
            config,
            kv_tokens=spec.kv_tokens,
            page_size=spec.page_size,
            max_model_len=spec.max_model_len,
            is_cpu=spec.is_cpu,
            cost=learnt,
        )
        self.inbox: deque[tuple[float, Add]] = deque()
        self.now = 0.0
        self.series: list[tuple[float, ...]] = []
        self.device_s = 0.0  # time in which the device worked
        self._cost = cost
        self._overlap = cost.is_async and not config.disable_overlap
        self._check = config.check
        self._requests = requests
        self._launched: deque[tuple[StepPlan, float, float]] = deque()  # plan, seconds, end
        self._device_free_s = 0.0
        self._num_polls = 0
        # By slot: the request, and the context length at which its last token is sampled.
        n = config.max_running_requests + 1
        self._index = np.zeros(n, np.int64)
        self._last_len = np.zeros(n, np.int64)
        self._known: set[int] = set()  # slots whose answer is given

    @property
    def next_s(self) -> float | None:
        """When it takes its next turn; None when it has nothing to do."""
        if self._launched or self.scheduler.has_work:
            return self.now
        return max(self.now, self.inbox[0][0]) if self.inbox else None

    def turn(self) -> list[Fact]:
        """One turn of the loop; afterwards `now` is when its facts are known."""
        scheduler = self.scheduler
        started = self.next_s
        assert started is not None
        self.now = started
        while self.inbox and self.inbox[0][0] <= self.now:
            scheduler.handle(self.inbox.popleft()[1])
        plan = scheduler.plan(self.now)
        if plan is not None:
            shape = StepShape.of(plan)
            seconds = self._cost.device_s(shape)
            launched_s = self.now + self._cost.host_s(shape)
            # A device that works beside the thread begins with the first kernel that it gets.
            begins_s = self.now if self._cost.is_async else launched_s
            self._device_free_s = max(self._device_free_s, begins_s) + seconds
            self._device_free_s = max(self._device_free_s, launched_s)
            self.now = launched_s
            self._launched.append((plan, seconds, self._device_free_s))
            self.device_s += seconds
            self._admit(plan)
            self._num_polls = 0
        facts = scheduler.drain_facts()
        if self._launched and (plan is None or not self._overlap or len(self._launched) > 1):
            done, seconds, end_s = self._launched.popleft()
            self.now = max(self.now, end_s)
            facts += scheduler.commit(self._result(done, seconds), self.now)
            self._note(scheduler.stats())
        elif plan is None and not facts:
            self._idle()
        if self._check:
            scheduler.check()
        return facts

    def _idle(self) -> None:
        """Nothing to launch and nothing to wait for, although there is work: time must pass."""
        self._num_polls += 1
        if self._num_polls > MAX_POLLS:
            raise RuntimeError(f"the scheduler is stuck: {self.scheduler.stats()}")
        self.now += POLL_S

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            slot, index = admission.slot, admission.seed
            request = self._requests[index]
            self._index[slot] = index
            ends_itself = request.max_tokens > request.output_len
            last = request.prompt_len + request.output_len - 1
            self._last_len[slot] = last if ends_itself else -1
            self._known.discard(slot)
            if request.output:
                self._known.add(slot)

    def _result(self, plan: StepPlan, seconds: float) -> StepResult:
        """The tokens that the requests' answers have there."""
        slots = plan.slots
        tokens = made_tokens(self._index[slots] + OUTPUT, plan.kv_lens)
        if self._known:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._known and plan.samples[row]:
                    request = self._requests[self._index[slot]]
                    at = int(plan.kv_lens[row]) - request.prompt_len
                    # One step too many is computed of a request whose end is not known yet.
                    tokens[row] = request.output[min(at, request.output_len - 1)]
        tokens[plan.kv_lens == self._last_len[slots]] = STOP
        tokens[~plan.samples] = -1
        return StepResult(plan.step, tokens, np.ones(len(tokens), np.bool_), seconds)

    def _note(self, stats: Stats) -> None:
        own = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
        self.series.append(
            (
                self.now,
                stats.num_running,
                stats.num_waiting,
                own,
                stats.num_cached_pages,
                stats.batch_tokens,
                stats.retractions,
            )
        )


SERIES = ("time_s", "running", "waiting", "own_pages", "cached_pages", "step_tokens", "retractions")


@dataclass(slots=True)
class Result:
    """What a simulation gave.

    Attributes:
        records: one a request, in the order of the load.
        stats: each engine's last figures.
        series: each engine's rows of SERIES, float64 [num_steps, len(SERIES)].
        device_s: time in which each engine's device worked.
        wall_s: what the simulation itself took.
    """

    records: list[Record]
    stats: list[Stats]
    series: list[np.ndarray]
    device_s: list[float]
    wall_s: float

    @property
    def virtual_s(self) -> float:
        """From the first request's sending to the last token."""
        ended = [record.tokens_s[-1] for record in self.records if record.tokens_s]
        return max(ended, default=0.0) - min(record.sent_s for record in self.records)

    def summary(
        self, *, slo_ttft_ms: float | None = None, slo_tpot_ms: float | None = None
    ) -> dict[str, Any]:
        """Throughput, latencies in ms and cache figures, under the names of `stoker bench --json`.

        With a latency objective also goodput: requests a second that met it, and their share.
        """
        good = [record for record in self.records if record.error is None]
        failed = [record.error for record in self.records if record.error is not None]
        seconds = max(self.virtual_s, 1e-9)
        output = sum(len(record.tokens_s) for record in good)
        prompt = sum(record.request.prompt_len for record in good)
        cached = sum(stats.cached_tokens for stats in self.stats)
        prompts = sum(stats.prompt_tokens for stats in self.stats)
        result: dict[str, Any] = {"requests": len(self.records), "failed": len(failed)}
        if failed:
            result["first_error"] = failed[0]
        ttft_ms = np.array([record.ttft_s for record in good]) * 1e3
        tpot_ms = np.array([record.tpot_s for record in good]) * 1e3
        is_long = np.array([len(record.tokens_s) > 1 for record in good], bool)
        e2e_ms = np.array([record.tokens_s[-1] - record.sent_s for record in good]) * 1e3
        itl = [np.diff(np.frombuffer(record.tokens_s)) for record in good]
        result |= {
            "seconds": seconds,
            "requests_per_s": len(good) / seconds,
            "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": (output + prompt) / seconds,
            "output_tokens": output,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "hit_rate": cached / prompts if prompts else 0.0,
            "retractions": sum(stats.retractions for stats in self.stats),
            "evicted_pages": sum(stats.evicted_pages for stats in self.stats),
            "steps": sum(stats.steps for stats in self.stats),
            "device_busy": sum(self.device_s) / (seconds * len(self.stats)),
            "ttft_ms": _percentiles(ttft_ms),
            "tpot_ms": _percentiles(tpot_ms[is_long]),
            "itl_ms": _percentiles(np.concatenate([np.empty(0), *itl]) * 1e3),
            "e2e_ms": _percentiles(e2e_ms),
        }
        if slo_ttft_ms is not None or slo_tpot_ms is not None:
            met = np.ones(len(good), bool)
            if slo_ttft_ms is not None:
                met &= ttft_ms <= slo_ttft_ms
            if slo_tpot_ms is not None:
                met &= tpot_ms <= slo_tpot_ms
            result["goodput_requests_per_s"] = int(met.sum()) / seconds
            result["slo_attainment"] = int(met.sum()) / len(self.records)
        return result

    def over_time(self, engine: int, num_points: int = 200) -> dict[str, list[float]]:
        """An engine's series by name, thinned to the last row of num_points equal times."""
        rows = self.series[engine]
        if len(rows) > num_points:
            times = np.linspace(rows[0, 0], rows[-1, 0], num_points)
            at = np.searchsorted(rows[:, 0], times, side="right") - 1
            rows = rows[np.unique(at)]
        return {name: column.tolist() for name, column in zip(SERIES, rows.T, strict=True)}


def _percentiles(values: np.ndarray) -> dict[str, float]:
    """Mean, p50, p90, p99 (nearest rank) and the largest; empty where there are no values."""
    if not len(values):
        return {}
    ranks = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    named = {f"p{p}": rank for p, rank in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def simulate(
    requests: Sequence[LoadRequest],
    config: EngineConfig,
    spec: EngineSpec,
    cost: CostModel,
    *,
    concurrency: int | None = None,
    num_engines: int = 1,
    router: Router | None = None,
    request_s: float = REQUEST_S,
    on_progress: Callable[[int], object] | None = None,
) -> Result:
    """Serve requests in virtual time until all have ended.

    Args:
        concurrency: so many are under way, a new one is sent when one ends, and arrival times mean
            nothing (closed loop). None: each is sent at its time (open loop).
        router: who gets a request in a fleet; in turn by default.
        request_s: time between the client and the engine's inbox.
        on_progress: called with the number of requests that have ended.
    """
    return _Fleet(
        requests, config, spec, cost, concurrency, num_engines, router, request_s, on_progress
    ).run()


class _Fleet:
    """Clients, router and engines. Whatever is next in virtual time happens next."""

    def __init__(
        self,
        requests: Sequence[LoadRequest],
        config: EngineConfig,
        spec: EngineSpec,
        cost: CostModel,
        concurrency: int | None,
        num_engines: int,
        router: Router | None,
        request_s: float,
        on_progress: Callable[[int], object] | None,
    ):
        self.engines = [SimulatedEngine(config, spec, cost, requests) for _ in range(num_engines)]
        self.records = [Record(request) for request in requests]
        self.router = router or RoundRobin(num_engines)
        self.request_s = request_s
        self.request_loop_s = min(REQUEST_LOOP_S, request_s)
        self.loop_free_s = [0.0] * num_engines
        self.on_progress = on_progress or (lambda _: None)
        self.is_closed = concurrency is not None
        self.loads = [0] * num_engines
        self.num_sent = 0
        self.num_ended = 0
        # Requests that are sent or that end: (time, order, index, whether it ends).
        self.events: list[tuple[float, int, int, bool]] = []
        self.num_events = 0
        first = requests if concurrency is None else requests[:concurrency]
        for request in first:
            self._send_next(0.0 if self.is_closed else request.arrival_s)

    def run(self) -> Result:
        """Until nothing is left."""
        began = time.perf_counter()
        while True:
            engine = self._next_engine()
            next_s = None if engine is None else self.engines[engine].next_s
            if self.events and (next_s is None or self.events[0][0] <= next_s):
                self._happen(*heapq.heappop(self.events))
            elif engine is not None:
                self._turn(engine)
            else:
                break
        return Result(
            self.records,
            [engine.scheduler.stats() for engine in self.engines],
            [np.array(engine.series).reshape(-1, len(SERIES)) for engine in self.engines],
            [engine.device_s for engine in self.engines],
            time.perf_counter() - began,
        )

    def _next_engine(self) -> int | None:
        times = [(engine.next_s, i) for i, engine in enumerate(self.engines)]
        return min(((t, i) for t, i in times if t is not None), default=(0.0, None))[1]

    def _push(self, at: float, index: int, is_end: bool) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, index, is_end))

    def _send_next(self, at: float) -> None:
        if self.num_sent < len(self.records):
            self._push(at, self.num_sent, False)
            self.num_sent += 1

    def _happen(self, at: float, _: int, index: int, is_end: bool) -> None:
        record = self.records[index]
        if is_end:
            self.loads[record.engine] -= 1
            self.num_ended += 1
            self.on_progress(self.num_ended)
            if self.is_closed:
                self._send_next(at)
            return
        request = record.request
        prompt = request.prompt_tokens(index)
        namespace = request.options.get("namespace", ())
        record.sent_s = at
        record.engine = self.router.pick(prompt, namespace, list(self.loads), at)
        self.loads[record.engine] += 1
        add = Add(
            request_id=index,
            prompt=array("i", prompt.tobytes()),
            params=PARAMS,
            max_tokens=request.max_tokens,
            stop_token_ids=STOPS,
            seed=index,
            arrival_s=at,
            **request.options,
        )
        begins = max(at + self.request_s - self.request_loop_s, self.loop_free_s[record.engine])
        self.loop_free_s[record.engine] = received = begins + self.request_loop_s
        self.engines[record.engine].inbox.append((received, add))

    def _turn(self, i: int) -> None:
        engine = self.engines[i]
        facts = engine.turn()
        now = engine.now
        for fact in facts:
            if isinstance(fact, Tokens):
                record = self.records[fact.request_id]
                if fact.token_ids:
                    record.tokens_s.append(now)
                record.num_cached = fact.num_cached
                if fact.finish_reason is not None:
                    self._push(now, fact.request_id, True)
            elif isinstance(fact, Refused):
                self.records[fact.request_id].error = str(fact.error)
                self._push(now, fact.request_id, True)
