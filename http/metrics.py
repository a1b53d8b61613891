"""Prometheus metrics: ours (`stoker_*`) and, from the same numbers, the names of vLLM's.

The counts live in plain Python and become Prometheus families only when /metrics is read, so that
a token costs one bisect. No label holds anything that a client chose.

Runs on: loop.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ..engine.api.messages import Stats, TierStats
from .overhead import Overhead, overhead

if TYPE_CHECKING:
    from ..engine import Output

FINISH_REASONS = ("stop", "length", "abort", "overload", "error")
REJECTIONS = ("queue_full", "queue_timeout", "draining", "aborted", "engine_dead")
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.5, 1, 5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Histogram:
    """Counts of values below each bound."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` times the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        """The Prometheus form: cumulative counts."""
        bounds = [*map(str, self.bounds), "+Inf"]
        buckets = [*zip(bounds, accumulate(self.counts), strict=True)]
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.sum)


class Metrics:
    """What the server counts. `stats` gives the engine's own counters."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]):
        self.model_name = model_name
        self.stats = stats
        self.ttft = Histogram(SECONDS)
        self.queue = Histogram(SECONDS)
        self.tpot = Histogram(TOKEN_SECONDS)
        self.itl = Histogram(TOKEN_SECONDS)
        self.e2e = Histogram(SECONDS)
        self.prepare = Histogram(SECONDS)
        self.grammar = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = dict.fromkeys(REJECTIONS, 0)
        self.disconnects = 0
        self.overhead = Overhead()  # of the latest second with steps
        self._loop_began_s = time.thread_time()  # what the start took is not counted
        self._overhead_since = (stats(), 0.0)
        self.finish_rate = 0.0  # choices a second, a moving average
        self._last_tick: tuple[float, int] | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # type: ignore[arg-type]

    @property
    def loop_cpu_s(self) -> float:
        """CPU time of the event loop's thread, which must be the caller."""
        return time.thread_time() - self._loop_began_s

    def tick(self) -> None:
        """Once a second, on the loop's thread: what can only be measured over time."""
        stats, loop_cpu_s = self.stats(), self.loop_cpu_s
        before, before_s = self._overhead_since
        if stats.steps > before.steps:
            self.overhead = overhead(before, stats, loop_cpu_s - before_s)
        self._overhead_since = (stats, loop_cpu_s)
        now, finished = time.monotonic(), sum(self.finished.values())
        if self._last_tick:
            before_s, count = self._last_tick
            rate = (finished - count) / max(now - before_s, 1e-3)
            self.finish_rate += 0.2 * (rate - self.finish_rate)
        self._last_tick = (now, finished)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All families; prometheus_client calls this."""
        yield from self._ours()
        yield from self._as_vllm()

    def _ours(self) -> Iterator[Metric]:
        s = self.stats()
        for name, text, value in (
            ("requests_running", "choices that are computed now", s.num_running),
            ("requests_waiting", "choices that wait for their turn", s.num_waiting),
            ("waiting_tokens", "prompt tokens that wait", s.num_waiting_tokens),
            ("kv_pages", "pages of the KV pool", s.num_pages),
            ("kv_pages_free", "pages that nothing uses", s.num_free_pages),
            ("kv_pages_cached", "pages of the prefix cache", s.num_cached_pages),
            ("kv_pages_locked", "of these, pages that requests use", s.num_locked_pages),
            ("prefix_cache_nodes", "edges of the prefix cache's tree", s.num_tree_nodes),
            ("step_tokens", "tokens of the latest step", s.batch_tokens),
            (
                "prefix_hit_rate",
                "share of all prompt tokens that came out of the prefix cache",
                s.cached_tokens / s.prompt_tokens if s.prompt_tokens else 0.0,
            ),
        ):
            yield GaugeMetricFamily("stoker_" + name, text, value)
        yield _labelled(
            "stoker_step_seconds",
            "time of the GPU thread by phase of a step",
            "phase",
            {phase: getattr(s, phase + "_s") for phase in ("plan", "launch", "wait", "commit")},
        )
        own_s = s.plan_s + s.launch_s + s.commit_s
        for name, text, total in (
            ("steps", "steps of the engine", s.steps),
            ("undone_steps", "steps without device memory, done again smaller", s.undone_steps),
            ("prompt_tokens", "prompt tokens, cached ones included", s.prompt_tokens),
            ("cached_tokens", "prompt tokens that came out of the prefix cache", s.cached_tokens),
            ("generated_tokens", "tokens generated", s.generated_tokens),
            ("retractions", "running requests taken back to the queue", s.retractions),
            ("preemptions", "retractions in favour of a higher priority", s.preemptions),
            ("evicted_pages", "pages taken from the prefix cache", s.evicted_pages),
            ("disconnects", "requests whose client went away", self.disconnects),
            ("gpu_thread_cpu_seconds", "CPU time of the GPU thread's own work", s.cpu_s),
            (
                "gpu_thread_stall_seconds",
                "its work's time without a core or the GIL",
                own_s - s.cpu_s,
            ),
            ("device_seconds", "time that the device worked on steps", s.device_s),
            ("mask_seconds", "time that filling grammars' masks took, beside it", s.mask_s),
            ("masks", "grammars' masks that were filled", s.num_masks),
            ("loop_cpu_seconds", "CPU time of the event loop's thread", self.loop_cpu_s),
        ):
            yield CounterMetricFamily("stoker_" + name, text, total)
        yield from _tiers(s.tiers)
        yield _labelled("stoker_choices_finished", "choices by their end", "reason", self.finished)
        yield _labelled("stoker_rejections", "requests refused", "reason", self.rejected)
        spent = self.overhead
        for name, text, value in (
            ("python_seconds_per_step", "the GPU thread's own work", spent.python_ms / 1e3),
            ("gil_wait_seconds_per_step", "of it, without a processor", spent.gil_wait_ms / 1e3),
            ("loop_seconds_per_token", "CPU time of the event loop", spent.loop_us / 1e6),
            ("device_idle_share", "of the time with work", spent.device_idle),
        ):
            text += ", in the latest second with steps"
            yield GaugeMetricFamily("stoker_" + name, text, value)
        for name, text, histogram in self._histograms():
            yield histogram.family("stoker_" + name, text)

    def _histograms(self) -> Iterable[tuple[str, str, Histogram]]:
        return (
            ("ttft_seconds", "from the request's arrival to its first token", self.ttft),
            ("queue_seconds", "from the prompt's submission to its first step", self.queue),
            ("tpot_seconds", "a choice's mean time a token, its first one apart", self.tpot),
            ("itl_seconds", "between tokens of one choice", self.itl),
            ("e2e_seconds", "from the request's arrival to its end", self.e2e),
            ("prepare_seconds", "validation, chat template and tokenization", self.prepare),
            ("grammar_seconds", "waiting for a grammar to be compiled", self.grammar),
            ("request_prompt_tokens", "prompt tokens a request", self.prompt_tokens),
            ("request_output_tokens", "output tokens a choice", self.output_tokens),
        )

    def _as_vllm(self) -> Iterator[Metric]:
        s = self.stats()
        used = s.num_pages - s.num_free_pages - s.num_cached_pages + s.num_locked_pages
        gauges = {
            "num_requests_running": s.num_running,
            "num_requests_waiting": s.num_waiting,
            "kv_cache_usage_perc": used / s.num_pages if s.num_pages else 0.0,
        }
        counters = {
            "prompt_tokens": s.prompt_tokens,
            "generation_tokens": s.generated_tokens,
            "num_preemptions": s.retractions,
            "prefix_cache_queries": s.prompt_tokens,
            "prefix_cache_hits": s.cached_tokens,
        }
        histograms = {
            "time_to_first_token_seconds": self.ttft,
            "request_queue_time_seconds": self.queue,
            "request_time_per_output_token_seconds": self.tpot,
            "inter_token_latency_seconds": self.itl,
            "e2e_request_latency_seconds": self.e2e,
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.output_tokens,
        }
        names, values = ["model_name"], [self.model_name]
        for name, value in gauges.items():
            gauge = GaugeMetricFamily("vllm:" + name, "as vLLM's", labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, value in counters.items():
            counter = CounterMetricFamily("vllm:" + name, "as vLLM's", labels=names)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "as vLLM's", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, histogram in histograms.items():
            ours = histogram.family("vllm:" + name, "as vLLM's")
            for sample in ours.samples:
                sample.labels["model_name"] = self.model_name
            yield ours


class Meter:
    """Watches the outputs of one prompt: latencies, and how each choice ended.

    Attributes:
        submit_s, queue_s: when the prompt went to the engine, and how long it waited there.
        first_s, last_s: when each choice's first and latest tokens came, 0 before.
        num_output: output tokens of its choices that have ended.
    """

    __slots__ = (
        *("arrival_s", "submit_s", "queue_s", "first_s", "last_s"),
        *("metrics", "num_output", "unfinished"),
    )

    def __init__(self, metrics: Metrics, arrival_s: float, num_choices: int):
        self.metrics = metrics
        self.arrival_s = arrival_s
        self.submit_s = time.perf_counter()
        self.queue_s = 0.0
        self.first_s = [0.0] * num_choices
        self.last_s = [0.0] * num_choices
        self.num_output = 0
        self.unfinished = num_choices

    def __call__(self, output: "Output") -> None:
        """Note the next output. On the hot path: every token passes here."""
        now = time.perf_counter()
        last = self.last_s[output.choice]
        self.last_s[output.choice] = now
        count = len(output.token_ids)
        if not last:
            self.first_s[output.choice] = now
            self.queue_s = output.queue_s
            self.metrics.queue.observe(output.queue_s)
            self.metrics.ttft.observe(now - self.arrival_s)
        elif count:
            self.metrics.itl.observe((now - last) / count, count)
        if output.finish_reason:
            self.unfinished -= 1
            self.num_output += output.num_output
            self.metrics.finished[output.finish_reason] += 1
            self.metrics.e2e.observe(now - self.arrival_s)
            if output.num_output > 1:
                spent_s = now - self.first_s[output.choice]
                self.metrics.tpot.observe(spent_s / (output.num_output - 1))
            self.metrics.output_tokens.observe(output.num_output)

    def close(self, reason: str) -> None:
        """The request ends here: its other choices count as `reason`."""
        self.metrics.finished[reason] += self.unfinished
        self.unfinished = 0


def _tiers(t: TierStats) -> Iterator[Metric]:
    """The cache tiers below the device; nothing where there are none."""
    if not t.num_host_pages:
        return
    for name, text, value in (
        ("host_cache_pages", "pages that the host cache holds", t.num_host_pages),
        ("host_cache_pages_used", "pages of the host cache in use", t.num_host_used),
    ):
        yield GaugeMetricFamily("stoker_" + name, text, value)
    yield _labelled(
        "stoker_tier_cached_tokens",
        "prompt tokens that came out of a tier below the device",
        "tier",
        dict(t.cached_tokens),
    )
    moves = ("saved", "unsaved", "loaded", "fetched", "damaged", "put", "unput", "evicted")
    yield _labelled(
        "stoker_tier_pages",
        "pages by what happened: saved to the host, loaded from it, evicted from it, fetched from "
        "a store, found damaged there, put into one; unsaved and unput: for want of room",
        "event",
        {move: getattr(t, move + "_pages") for move in moves},
    )
    yield CounterMetricFamily(
        "stoker_prefetch_timeouts",
        "requests that went on before the stores had answered",
        t.prefetch_timeouts,
    )


def _labelled(name: str, text: str, label: str, counts: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
