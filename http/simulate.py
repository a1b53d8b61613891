"""`stoker simulate`: how a configuration serves a load, without the device that it is for.

Runs on: loop.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.api.config import EngineConfig
from ..engine.api.errors import StartError
from ..engine.simulate import REQUEST_S, ROUTERS, EngineSpec, Result, simulate
from ..engine.simulate_cost import CostModel, fit
from ..engine.simulate_load import LoadRequest, SyntheticLoad, read_trace
from ..engine.simulate_roofline import ModelShape, RooflineCost, find_card
from ..engine.step_log import read_step_log
from .bench import need_matplotlib, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CARD_PAGE_SIZE = 64
CAPACITY_ROUNDS = 5  # halvings of the last doubling: the rate is found within 3%
MIN_RATE = 1e-3  # that the search tries


@dataclass(frozen=True, slots=True)
class Device:
    """What is simulated: the engine's configuration, what it measures at its start, its speed."""

    config: EngineConfig
    spec: EngineSpec
    cost: CostModel
    about: str


def run_simulate(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Simulate, print, write; 1 where a request failed.

    Args:
        config: settings as given by flags, environment and file.

    Raises:
        StartError: a file or a combination of flags is wrong.
    """
    if arguments.plots:
        need_matplotlib("--plots")
    device = _measured(config, arguments.steps) if arguments.steps else _roofline(config, arguments)
    if arguments.find_rate:
        return _find_rate(device, arguments)
    result = _simulate(device, arguments, _load(arguments, arguments.rate))
    summary = _summary(result, arguments)
    _print(device, result, summary, arguments)
    if arguments.json:
        written = {
            "device": device.about,
            "spec": asdict(device.spec),
            "summary": summary,
            "engines": [
                {"stats": asdict(stats), "over_time": result.over_time(i)}
                for i, stats in enumerate(result.stats)
            ],
            "simulation": {"seconds": result.wall_s, "speed": result.virtual_s / result.wall_s},
        }
        write_json(arguments.json, written)
    if arguments.plots:
        _plot(result, arguments.plots)
    return 1 if summary["failed"] else 0


def _roofline(config: EngineConfig, arguments: argparse.Namespace) -> Device:
    shape = ModelShape.load(config.model)
    itemsize = 4 if config.dtype == "float32" else 2
    cost = RooflineCost(find_card(arguments.card), shape, itemsize)
    max_model_len = min(config.max_model_len or shape.max_model_len, shape.max_model_len)
    tokens = config.kv_tokens or min(
        cost.kv_tokens(config.mem_fraction), config.max_running_requests * max_model_len
    )
    spec = EngineSpec(tokens, config.page_size or CARD_PAGE_SIZE, max_model_len)
    about = f"{shape.name} on {cost.card.name}, by its roofline"
    return Device(config, spec, cost, about)


def _measured(config: EngineConfig, file: Path) -> Device:
    """As the engine that wrote the log was, where the configuration does not say otherwise."""
    engine, samples = read_step_log(file)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    known = EngineConfig.model_fields
    try:
        logged = {name: v for name, v in engine["config"].items() if name in known}
        merged = EngineConfig(**logged | {name: v for name, v in given.items() if name in known})
        cost = fit(samples, is_async=engine["is_async"])
        spec = EngineSpec(
            given.get("kv_tokens") or engine["kv_tokens"],
            given.get("page_size") or engine["page_size"],
            given.get("max_model_len") or engine["max_model_len"],
            engine["is_cpu"],
        )
    except KeyError as error:
        raise StartError(f"{file}: no step log of this version: {error} is missing") from None
    about = (
        f"{engine['model']} on {engine['backend']}, fitted to {cost.num_steps} steps "
        f"(mean error {cost.error:.1%}, {cost.num_outliers} outliers left out)"
    )
    return Device(merged, spec, cost, about)


def _load(arguments: argparse.Namespace, rate: float | None) -> list[LoadRequest]:
    if arguments.trace:
        return read_trace(
            arguments.trace, block_size=arguments.block_size, max_tokens=arguments.max_tokens
        )
    if arguments.concurrency and rate:
        raise StartError("--rate is an open loop, --concurrency a closed one: give one of them")
    return SyntheticLoad(
        arguments.requests,
        arguments.prompt_len,
        arguments.output_len,
        rate,
        arguments.burstiness,
        arguments.prefix_len,
        arguments.num_prefixes,
        arguments.max_tokens,
    ).requests(arguments.load_seed)


def _simulate(device: Device, arguments: argparse.Namespace, requests: list[LoadRequest]) -> Result:
    return simulate(
        requests,
        device.config,
        device.spec,
        device.cost,
        concurrency=arguments.concurrency,
        num_engines=arguments.engines,
        router=ROUTERS[arguments.router](arguments.engines),
        request_s=REQUEST_S if arguments.request_ms is None else arguments.request_ms / 1e3,
    )


def _summary(result: Result, arguments: argparse.Namespace) -> dict[str, Any]:
    return result.summary(slo_ttft_ms=arguments.slo_ttft_ms, slo_tpot_ms=arguments.slo_tpot_ms)


def _find_rate(device: Device, arguments: argparse.Namespace) -> int:
    """Double or halve the rate until that changes whether the objective is met, then bisect."""
    if arguments.slo_ttft_ms is None and arguments.slo_tpot_ms is None:
        raise StartError("--find-rate needs --slo-ttft-ms or --slo-tpot-ms")
    if arguments.trace or arguments.concurrency:
        raise StartError("--find-rate chooses the arrivals: no --trace, no --concurrency")
    tried: dict[float, dict[str, Any]] = {}

    def is_met(rate: float) -> bool:
        if rate not in tried:
            result = _simulate(device, arguments, _load(arguments, rate))
            tried[rate] = _summary(result, arguments)
            share = tried[rate]["slo_attainment"]
            print(f"{rate:10.3f} requests/s: {share:7.2%} good", flush=True)
        return tried[rate]["slo_attainment"] >= arguments.find_rate

    rate = arguments.rate or 1.0
    factor = 2.0 if is_met(rate) else 0.5
    while is_met(rate) == (factor > 1):
        rate *= factor
        if rate > arguments.requests:
            raise StartError("it is met even where all --requests arrive within a second: add some")
        if rate < MIN_RATE:
            raise StartError(f"it is missed even at {rate / factor:.3g} requests a second")
    low, high = sorted((rate, rate / factor))
    for _ in range(CAPACITY_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    print(f"{device.about}: {low:.3g} requests/s keep {arguments.find_rate:.0%} good")
    if arguments.json:
        written = {"device": device.about, "rate": low, "tried": {str(r): tried[r] for r in tried}}
        write_json(arguments.json, written)
    return 0


# ---- what is shown ---------------------------------------------------------------------------


def _print(
    device: Device, result: Result, summary: dict[str, Any], arguments: argparse.Namespace
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    fleet = f", {arguments.engines} engines, {arguments.router}" if arguments.engines > 1 else ""
    console.print(device.about + fleet, soft_wrap=True)
    counts = Table(show_header=False, box=None)
    counts.add_column(justify="right")
    counts.add_column()
    for name, text in _lines(summary):
        counts.add_row(name, text)
    console.print(counts)
    times = Table("ms", "mean", "p50", "p90", "p99", "max")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = [f"{value:.1f}" for value in summary[name].values()]
        times.add_row(name.removesuffix("_ms").upper(), *values)
    console.print(times)
    console.print(
        f"{summary['seconds']:.1f} s simulated in {result.wall_s:.2f} s "
        f"({result.virtual_s / result.wall_s:.0f} times as fast)"
    )


def _lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    s = summary
    lines = [
        ("requests", f"{s['requests']} in {s['seconds']:.1f} s, {s['requests_per_s']:.2f} a second")
    ]
    if s["failed"]:
        lines.append(("failed", f"{s['failed']}: {s['first_error']}"))
    lines += [
        ("tokens/s", f"{s['output_tokens_per_s']:.0f} output, {s['total_tokens_per_s']:.0f} total"),
        ("cache", f"{s['hit_rate']:.1%} of the prompt tokens, {s['evicted_pages']} pages evicted"),
        ("retractions", str(s["retractions"])),
        ("device busy", f"{s['device_busy']:.0%}, {s['steps']} steps"),
    ]
    if "slo_attainment" in s:
        good = f"{s['goodput_requests_per_s']:.2f} requests a second ({s['slo_attainment']:.1%})"
        lines.append(("goodput", good))
    return lines


def _plot(result: Result, folder: Path) -> None:
    """latency.png, and engine-N.png with queue and pool over time of each engine."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    good = [record for record in result.records if record.error is None]
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1)
    above.plot([r.sent_s for r in good], [r.ttft_s * 1e3 for r in good], ".")
    above.set(xlabel="sent (s)", ylabel="TTFT (ms)")
    for name, values in (
        ("TTFT", [r.ttft_s * 1e3 for r in good]),
        ("TPOT", [r.tpot_s * 1e3 for r in good if len(r.tokens_s) > 1]),
    ):
        share = [(i + 1) / len(values) for i in range(len(values))]
        below.step(sorted(values), share, where="post", label=name)
    below.set(xlabel="ms", ylabel="share of requests", xscale="log", ylim=(0, 1))
    below.legend()
    figure.savefig(folder / "latency.png")
    for i in range(len(result.series)):
        series = result.over_time(i, 1000)
        figure = Figure(figsize=(9, 7), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True)
        _draw(axes[0], series, ("running", "waiting"), "requests")
        _draw(axes[1], series, ("own_pages", "cached_pages"), "KV pages")
        axes[1].axhline(result.stats[i].num_pages, color="grey", linestyle=":")
        _draw(axes[2], series, ("step_tokens",), "tokens a step")
        axes[2].set_xlabel("time (s)")
        figure.savefig(folder / f"engine-{i}.png")


def _draw(axes: "Axes", series: dict[str, list[float]], names: tuple[str, ...], unit: str) -> None:
    for name in names:
        axes.plot(series["time_s"], series[name], label=name.replace("_", " "), drawstyle="steps")
    axes.set_ylabel(unit)
    axes.legend()
