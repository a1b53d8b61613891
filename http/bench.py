"""The speed of a server under load (`bench serve`) and of the engine alone (`bench offline`).

`bench serve` sends prompts of random token ids to /v1/completions of any OpenAI-compatible server.
With --rate arrivals do not wait for answers (open loop); else --concurrency requests are always
under way (closed loop). TTFT runs from sending to the first chunk, ITL is the time between chunks,
TPOT a request's time after its first token over its other tokens.

Runs on: loop.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ..engine.api.errors import StartError
from ..engine.api.messages import Stats
from .flag_types import http_url, non_negative_int, positive, positive_int, share_or_zero
from .overhead import overhead

if TYPE_CHECKING:
    import aiohttp

    from ..engine import AsyncEngine

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Sample:
    """What happened to one request; times are of perf_counter."""

    sent_s: float
    chunks_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From sending to the first chunk."""
        return self.chunks_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time a token after the first."""
        return (self.chunks_s[-1] - self.chunks_s[0]) / max(self.num_output - 1, 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between chunks."""
        return [b - a for a, b in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench serve`."""
    add = parser.add_argument
    parser.usage = f"{parser.prog} [options]"
    add(
        "--url",
        type=http_url,
        default="http://127.0.0.1:8000",
        help="base URL (default: %(default)s)",
    )
    add("--key", help="API key")
    add("--model", help="name of the model; the server's first by default")
    add("--rate", type=positive, help="requests a second (open loop)")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="with --rate")
    add("--concurrency", type=positive_int, default=16, help="requests under way without --rate")
    add("--goodput-ttft-ms", type=positive, help="a good request's longest TTFT")
    add("--goodput-tpot-ms", type=positive, help="a good request's longest TPOT")
    add("--json", type=Path, help="write the result to this file")
    add("--plot", type=Path, help="draw TTFT and ITL over time into this PNG (needs matplotlib)")
    _add_load_flags(parser)


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench offline`."""
    parser.add_argument("--json", type=Path, help="write the result to this file")
    _add_load_flags(parser, seed_flag="--load-seed")


def _add_load_flags(parser: argparse.ArgumentParser, seed_flag: str = "--seed") -> None:
    add = parser.add_argument
    add("--requests", type=positive_int, default=64, help="how many (default: %(default)s)")
    add(
        "--prompt-len",
        type=positive_int,
        default=128,
        help="tokens a prompt (default: %(default)s)",
    )
    add(
        "--output-len",
        type=positive_int,
        default=64,
        help="tokens an answer (default: %(default)s)",
    )
    add("--prefix-len", type=non_negative_int, default=0, help="tokens that all prompts begin with")
    add("--spread", type=share_or_zero, default=0.0, help="lengths vary by this share, 0 to 1")
    add(
        "--vocab",
        type=positive_int,
        default=32000,
        help="prompts use ids below this (default: %(default)s)",
    )
    add(seed_flag, dest="load_seed", type=int, default=0, help="same seed, same load")


def make_load(arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Prompts and output lengths: random ids, lengths uniform around the given ones."""
    draw = random.Random(arguments.load_seed)
    low = min(1000, arguments.vocab // 4)  # the first ids are often special ones

    def ids(count: int) -> list[int]:
        return [draw.randrange(low, arguments.vocab) for _ in range(count)]

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + arguments.spread * draw.uniform(-1, 1))))

    prefix = ids(arguments.prefix_len)
    return [
        (prefix + ids(length(arguments.prompt_len)), length(arguments.output_len))
        for _ in range(arguments.requests)
    ]


async def bench_serve(arguments: argparse.Namespace) -> int:
    """Run the load and print the result; 1 where a request failed.

    Raises:
        StartError: the server does not answer, or --plot cannot draw.
    """
    import aiohttp

    if arguments.plot:
        need_matplotlib("--plot")
    url = arguments.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        model = arguments.model or await _first_model(session, url)
        load = make_load(arguments)
        samples: list[Sample] = []
        before = await _figures(session, url)

        async def one(prompt: list[int], num_tokens: int) -> None:
            samples.append(await _request(session, url, model, prompt, num_tokens))

        async with asyncio.TaskGroup() as group:
            if arguments.rate:
                async for job in _arrivals(load, arguments):
                    group.create_task(one(*job))
            else:
                jobs = iter(load)

                async def worker() -> None:
                    for job in jobs:
                        await one(*job)

                for _ in range(arguments.concurrency):
                    group.create_task(worker())
        after = await _figures(session, url)
    result = summarise(samples, arguments.goodput_ttft_ms, arguments.goodput_tpot_ms)
    if before and after:
        (stats, cpu_s), (stats_after, cpu_after_s) = before, after
        result |= overhead(stats, stats_after, cpu_after_s - cpu_s).rows()
    _print(result)
    if arguments.json:
        write_json(arguments.json, result)
    if arguments.plot:
        _plot(samples, arguments.plot)
    return 1 if result["failed"] else 0


async def _first_model(session: "aiohttp.ClientSession", url: str) -> str:
    import aiohttp

    try:
        async with session.get(url + "/v1/models") as response:
            if response.status != 200:
                raise StartError(f"{url}/v1/models answers {response.status}")
            return (await response.json())["data"][0]["id"]
    except aiohttp.ClientError as error:
        raise StartError(f"no server at {url}: {error}") from None


async def _figures(session: "aiohttp.ClientSession", url: str) -> tuple[Stats, float] | None:
    """The engine's counters and the loop's CPU time, where the server is Stoker."""
    async with session.get(url + "/server_info") as response:
        if response.status != 200:
            return None
        info = await response.json()
    try:
        stats = {field.name: info["stats"][field.name] for field in fields(Stats)}
        return Stats(**stats), float(info["loop_cpu_s"])
    except (KeyError, TypeError):
        return None


async def _arrivals(
    load: Sequence[tuple[list[int], int]], arguments: argparse.Namespace
) -> AsyncIterator[tuple[list[int], int]]:
    """The jobs at their times, which do not depend on the answers."""
    draw = random.Random(arguments.load_seed + 1)
    due = time.perf_counter()
    for job in load:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield job
        is_poisson = arguments.arrivals == "poisson"
        due += draw.expovariate(arguments.rate) if is_poisson else 1 / arguments.rate


async def _request(
    session: "aiohttp.ClientSession", url: str, model: str, prompt: list[int], num_tokens: int
) -> Sample:
    import aiohttp

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample(time.perf_counter(), num_prompt=len(prompt))
    try:
        async with session.post(url + "/v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"{response.status} {(await response.text())[:200]}"
                return sample
            async for line in response.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                now = time.perf_counter()
                event = orjson.loads(line[5:])
                if "error" in event:
                    sample.error = event["error"]["message"]
                if event.get("choices"):
                    sample.chunks_s.append(now)
                if usage := event.get("usage"):
                    sample.num_output = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    sample.num_cached = details.get("cached_tokens") or 0
    except (aiohttp.ClientError, ConnectionError) as error:
        sample.error = repr(error)
    if not sample.error and not sample.chunks_s:
        sample.error = "no chunk"
    return sample


def summarise(
    samples: Sequence[Sample], ttft_ms: float | None = None, tpot_ms: float | None = None
) -> dict[str, Any]:
    """Throughput and percentiles; goodput counts requests within the given latencies."""
    good = [sample for sample in samples if not sample.error]
    failed = [sample for sample in samples if sample.error]
    result: dict[str, Any] = {"requests": len(samples), "failed": len(failed)}
    if failed:
        result["first_error"] = failed[0].error
    if not good:
        return result
    seconds = max(s.chunks_s[-1] for s in good) - min(s.sent_s for s in good)
    output = sum(s.num_output for s in good)
    prompt = sum(s.num_prompt for s in good)
    result |= {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(s.num_cached for s in good),
        "ttft_ms": percentiles([s.ttft_s * 1e3 for s in good]),
        "tpot_ms": percentiles([s.tpot_s * 1e3 for s in good if s.num_output > 1]),
        "itl_ms": percentiles([gap * 1e3 for s in good for gap in s.itls_s]),
        "e2e_ms": percentiles([(s.chunks_s[-1] - s.sent_s) * 1e3 for s in good]),
    }
    if ttft_ms is not None or tpot_ms is not None:
        within = [
            s
            for s in good
            if (ttft_ms is None or s.ttft_s * 1e3 <= ttft_ms)
            and (tpot_ms is None or s.tpot_s * 1e3 <= tpot_ms)
        ]
        result["goodput_requests_per_s"] = len(within) / seconds
    return result


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 (nearest rank) and the largest."""
    if not values:
        return {}
    ordered = sorted(values)
    named = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    return {"mean": statistics.fmean(ordered), **named, "max": ordered[-1]}


def _print(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {number:.2f}" for key, number in value.items())
        elif isinstance(value, float):
            value = f"{value:.2f}"
        print(f"{name:>24}  {value}")


def need_matplotlib(flag: str) -> None:
    """Raise StartError where the flag could not draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise StartError(f"{flag} needs matplotlib: pip install matplotlib") from None


def write_json(file: Path, values: dict[str, Any]) -> None:
    """What --json asks for. Raises StartError."""
    try:
        file.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise StartError(f"--json {file}: {error.strerror}") from None


def _plot(samples: Sequence[Sample], file: Path) -> None:
    from matplotlib.figure import Figure

    good = [sample for sample in samples if not sample.error]
    start = min(sample.sent_s for sample in samples)
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([s.sent_s - start for s in good], [s.ttft_s * 1e3 for s in good], ".")
    above.set_ylabel("TTFT (ms)")
    points = [
        (at - start, gap * 1e3)
        for s in good
        for at, gap in zip(s.chunks_s[1:], s.itls_s, strict=True)
    ]
    below.plot([x for x, _ in points], [y for _, y in points], ",")
    below.set_ylabel("ITL (ms)")
    below.set_xlabel("time (s)")
    figure.savefig(file)


async def bench_offline(engine: "AsyncEngine", arguments: argparse.Namespace) -> int:
    """Submit the whole load at once and print the throughput; 1 where a request failed."""
    from ..engine import SamplingParams

    arguments.vocab = min(arguments.vocab, engine.vocab_size)
    load = make_load(arguments)
    samples = []
    before, cpu_s = engine.stats, time.thread_time()

    async def one(prompt: list[int], num_tokens: int) -> None:
        sample = Sample(time.perf_counter(), num_prompt=len(prompt))
        samples.append(sample)
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        async for output in engine.submit(prompt, params):
            sample.chunks_s.append(time.perf_counter())
            sample.num_output = output.num_output
            sample.num_cached = output.num_cached

    try:
        async with asyncio.TaskGroup() as group:
            for job in load:
                group.create_task(one(*job))
    except ExceptionGroup as errors:
        print(f"stoker: {errors.exceptions[0]}", file=sys.stderr)
        return 1
    result = summarise(samples)
    result |= overhead(before, engine.stats, time.thread_time() - cpu_s).rows()
    _print(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0
