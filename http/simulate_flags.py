"""The flags of `stoker simulate`. Nothing heavy is imported here: every command reads them.

Runs on: loop.
"""

import argparse
from pathlib import Path
from typing import Any, cast

from pydantic import create_model

from ..engine.api.config import EngineConfig, option
from .flag_types import non_negative, non_negative_int, positive, positive_int, share
from .settings import add_flags

GROUPS = ("scheduling", "memory")  # of the engine's settings, those that a simulation heeds,
UNSIMULATED = (  # but for these,
    "kv_cache_dtype",
    "window_kv_ratio",
    "state_snapshots",
    "warm_prefixes",
    "cache_events",
)
ALSO = ("model", "max_model_len", "dtype", "queue_timeout", "seed", "check")  # and these
MODEL = "a config.json, its folder, or a known shape (qwen3-8b, ...; a wrong name lists them)"
ROUTERS = ("round-robin", "least-loaded", "cache-aware")


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate`: those of the engine that a simulation heeds, and its own."""
    parser.usage = f"{parser.prog} (--card NAME | --steps FILE) [options] [MODEL]"
    add_flags(parser, _simulated_config())
    group = parser.add_argument_group("device")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add(
        "--card",
        help="compute a step's time from this card's roofline (H200, MI300X, ...; a wrong name "
        "lists the right ones) and the shape of MODEL",
    )
    add(
        "--steps",
        type=Path,
        metavar="FILE",
        help="fit a step's time to the log of a measured run (serve or bench offline with "
        "--step-log); the settings of that run hold where no flag says otherwise",
    )
    group.add_argument(
        "--request-ms",
        type=non_negative,
        help="what a request takes outside the engine, HTTP and client (default: 3.8)",
    )

    add = parser.add_argument_group("load").add_argument
    add("--trace", type=Path, metavar="FILE", help="serve these requests (JSONL, docs/simulate.md)")
    add(
        "--block-size",
        type=positive_int,
        default=512,
        help="tokens that a prefix id of the trace stands for (default: %(default)s)",
    )
    add("--requests", type=positive_int, default=256, help="how many (default: %(default)s)")
    add("--rate", type=positive, help="requests a second (open loop)")
    add(
        "--burstiness",
        type=positive,
        default=1.0,
        help="with --rate: shape of the gamma law between arrivals; 1 is Poisson, less comes in "
        "bursts, inf is a clock (default: %(default)s)",
    )
    add("--concurrency", type=positive_int, help="requests under way (closed loop)")
    laws = "a number, uniform:LOW:HIGH, normal:MEAN:STD, lognormal:MEDIAN:SIGMA, exponential:MEAN"
    for name, default in (("prompt", "512"), ("output", "128")):
        text = f"tokens of each {name}: {laws} (default: %(default)s)"
        add(f"--{name}-len", type=_lengths, default=default, help=text)
    add(
        "--prefix-len",
        type=non_negative_int,
        default=0,
        help="tokens before a prompt that others share with it",
    )
    add("--num-prefixes", type=positive_int, default=1, help="how many such prefixes there are")
    add(
        "--max-tokens",
        type=positive_int,
        help="limit that clients ask for; answers end before it by a stop token",
    )
    add("--load-seed", type=int, default=0, help="same seed, same load")

    add = parser.add_argument_group("fleet").add_argument
    add("--engines", type=positive_int, default=1, help="how many (default: %(default)s)")
    add(
        "--router",
        choices=ROUTERS,
        default="least-loaded",
        help="who gets a request, with several engines (default: %(default)s)",
    )

    add = parser.add_argument_group("result").add_argument
    add("--slo-ttft-ms", type=positive, help="a good request's longest TTFT")
    add("--slo-tpot-ms", type=positive, help="a good request's longest TPOT")
    add(
        "--find-rate",
        type=share,
        metavar="SHARE",
        help="search the highest rate at which this share of the requests is good, as 0.99; --rate "
        "is where the search begins",
    )
    add("--json", type=Path, metavar="FILE", help="write the result to this file")
    add("--plots", type=Path, metavar="DIR", help="draw PNGs into this folder (needs matplotlib)")


def _simulated_config() -> type[EngineConfig]:
    """The engine's fields that a simulation heeds."""
    fields: dict[str, Any] = {}
    for name, info in EngineConfig.model_fields.items():
        extra = cast("dict[str, str]", info.json_schema_extra)
        if name in ALSO or (extra["group"] in GROUPS and name not in UNSIMULATED):
            fields[name] = (info.annotation, info)
    fields["model"] = (str, option(EngineConfig.model_fields["model"].default, MODEL, "model"))
    return create_model("SimulatedConfig", **fields)


def _lengths(text: str) -> Any:
    from ..engine.simulate_load import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
