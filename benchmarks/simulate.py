"""How fast `stoker simulate` is: one engine with 256 streams, on one core.

    python benchmarks/simulate.py

Prints virtual seconds for each second of the processor, and microseconds a step, for 256 streams of
the Llama-3.1-8B shape on an H200's roofline: all at once, and coming and going.
"""

import argparse
import time

from stoker.engine.api.config import EngineConfig
from stoker.engine.simulate import EngineSpec, simulate
from stoker.engine.simulate_load import Lengths, LoadRequest, SyntheticLoad
from stoker.engine.simulate_roofline import ModelShape, RooflineCost, find_card

STREAMS = 256


def report(name: str, requests: list[LoadRequest]) -> None:
    cost = RooflineCost(find_card("H200"), ModelShape.load("llama-3.1-8b"))
    spec = EngineSpec(cost.kv_tokens(0.9), page_size=64, max_model_len=131072)
    began = time.process_time()
    result = simulate(requests, EngineConfig(), spec, cost, concurrency=STREAMS)
    cpu_s = time.process_time() - began
    speed = result.virtual_s / cpu_s
    step_us = cpu_s / result.stats[0].steps * 1e6
    print(
        f"{name:<34} {result.virtual_s:6.1f} s in {cpu_s:5.2f} s of CPU: "
        f"{speed:5.1f} times real time, {step_us:5.0f} us a step"
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    long = SyntheticLoad(STREAMS, Lengths.parse("128"), Lengths.parse("1024"))
    report(f"{STREAMS} streams of 1,024 tokens", long.requests(0))
    mixed = SyntheticLoad(
        6 * STREAMS, Lengths.parse("lognormal:400:0.8"), Lengths.parse("lognormal:200:0.6")
    )
    report(f"{STREAMS} streams that come and go", mixed.requests(0))


if __name__ == "__main__":
    main()
