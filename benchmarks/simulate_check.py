"""Does `stoker simulate` predict what is measured?

    python benchmarks/simulate_check.py h200    # the roofline against docs/performance.md
    python benchmarks/simulate_check.py cpu     # a server here: fit to one load, predict another
    python benchmarks/simulate_check.py steps   # the same in this process, on a busy machine

`cpu` serves smollm2-135m with --step-log and sends in turn short runs of other lengths and numbers
of streams, and the load that is to be predicted (32 streams, prompts of 128 tokens, 64 out); three
times, some two minutes on a quiet machine. The costs are fitted to the steps of the short runs only
and what they predict is compared with the median of the loads. The client shares the cores with the
server, as everywhere in docs/performance.md. With --client COMMAND that load is sent by
another client, which must print one JSON object with out_tok_s and ttft_p50; {url} in the command
is the server. The exit code is 1 where a prediction is more than 15% off.

`steps` runs both loads through one model runner, a step of one or of the other at random, on one
thread, and counts processor time. So what else the machine does meets both alike.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from stoker.engine.api.config import EngineConfig
from stoker.engine.api.messages import Add, Tokens
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.build import Builder
from stoker.engine.core.configure import make_scheduler
from stoker.engine.core.plan import Admission
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.shape import StepShape
from stoker.engine.runtime.runner import ModelRunner
from stoker.engine.simulate import EngineSpec, Result, simulate
from stoker.engine.simulate_cost import fit
from stoker.engine.simulate_load import Lengths, LoadRequest, SyntheticLoad
from stoker.engine.simulate_roofline import ModelShape, RooflineCost, find_card
from stoker.engine.step_log import StepSample

LIMIT = 0.15
STOKER = [sys.executable, "-m", "stoker.http"]
LOAD = {"requests": 64, "concurrency": 32, "prompt-len": 128, "output-len": 64}
CALIBRATION = (  # requests, streams, prompt, output
    (2, 1, 100, 40),
    (8, 4, 180, 30),
    (24, 12, 90, 40),
    (40, 28, 160, 24),
    (56, 40, 60, 32),
)
ROUNDS = 3  # of calibration and load; another calibration comes last


Loads = Sequence[tuple[int, int, int, int]]


class Comparison:
    """Prints predicted beside measured figures and remembers the worst."""

    def __init__(self) -> None:
        self.worst = 0.0
        print(f"{'':<26}{'measured':>12}{'predicted':>12}{'off':>8}")

    def row(self, name: str, measured: float, predicted: float) -> None:
        off = predicted / measured - 1
        self.worst = max(self.worst, abs(off))
        print(f"{name:<26}{measured:12.4g}{predicted:12.4g}{off:+8.1%}")

    @property
    def exit_code(self) -> int:
        print(f"the worst is {self.worst:.1%} off, the limit is {LIMIT:.0%}")
        return int(self.worst > LIMIT)


# ---- the H200's figures ------------------------------------------------------------------------


def h200() -> int:
    """Figures of docs/performance.md, one H200, Llama-3.1-8B shape."""
    cost = RooflineCost(find_card("H200"), ModelShape.load("llama-3.1-8b"))
    spec = EngineSpec(cost.kv_tokens(0.9), page_size=64, max_model_len=131072)

    def run(requests: list[LoadRequest], concurrency: int | None = None) -> Result:
        return simulate(requests, EngineConfig(), spec, cost, concurrency=concurrency)

    def load(n: int, prompt: int, output: int, shared: int = 0) -> list[LoadRequest]:
        lengths = Lengths.parse(str(prompt)), Lengths.parse(str(output))
        return SyntheticLoad(n, *lengths, prefix_len=shared).requests(0)

    table = Comparison()
    single = run(load(4, 128, 256), 1).summary()
    table.row("single: TPOT ms", 4.15, single["tpot_ms"]["p50"])
    table.row("single: TTFT ms", 9.2, single["ttft_ms"]["p50"])
    decode = run(load(256, 128, 256), 256).summary()
    table.row("decode: output tokens/s", 19_565, decode["output_tokens_per_s"])
    mixed = run(load(512, 1024, 128), 256).summary()
    table.row("mixed: total tokens/s", 36_360, mixed["total_tokens_per_s"])
    table.row("mixed: TTFT s", 1.28, mixed["ttft_ms"]["p50"] / 1e3)
    prefix = run(load(512, 64, 16, 4096), 64).summary()
    table.row("prefix: s", 2.09, prefix["seconds"])
    table.row("prefix: TTFT ms", 79, prefix["ttft_ms"]["p50"])
    streams = load(32, 128, 512)
    long = run([*streams, LoadRequest(2.0, 32_000, 4, 4)])
    table.row("long: TTFT s", 1.53, long.records[-1].ttft_s)
    itl = np.concatenate([np.diff(record.tokens_s) for record in long.records[:-1]])
    table.row("long: streams' ITL p99 ms", 35, float(np.percentile(itl, 99)) * 1e3)
    return table.exit_code


# ---- a server on this CPU ----------------------------------------------------------------------


def cpu(model: str, client: str | None, port: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "all.jsonl"
        measured: list[dict[str, float]] = []
        loads: list[tuple[float, float]] = []  # when they ran
        with _server(model, port, log) as url:
            _bench(url, folder, *CALIBRATION[0])  # the first steps of a server are slower
            began = time.time()
            for _ in range(ROUNDS):
                _calibrate(url, folder)
                load_began = time.time()
                measured.append(
                    _other_client(client, url) if client else _bench(url, folder, *LOAD.values())
                )
                loads.append((load_began, time.time()))
            _calibrate(url, folder)
        header, *lines = log.read_text().splitlines(keepends=True)
        steps = folder / "steps.jsonl"
        kept = [line for line in lines if _is_between(json.loads(line)["at_s"], began, loads)]
        steps.write_text("".join([header, *kept]))
        flags = [f"--{name}={value}" for name, value in LOAD.items()]
        out = folder / "simulated.json"
        subprocess.run([*STOKER, "simulate", "--steps", steps, *flags, "--json", out], check=True)
        predicted = json.loads(out.read_text())["summary"]
    table = Comparison()
    rate, ttft_ms = (median(run[name] for run in measured) for name in ("rate", "ttft_ms"))
    table.row("output tokens/s", rate, predicted["output_tokens_per_s"])
    table.row("TTFT ms", ttft_ms, predicted["ttft_ms"]["p50"])
    print(
        "measured in each round:", *(f"{run['rate']:.0f} {run['ttft_ms']:.0f}" for run in measured)
    )
    return table.exit_code


def _calibrate(url: str, folder: Path) -> None:
    for run in CALIBRATION:
        _bench(url, folder, *run)


def _is_between(at: float, began: float, loads: list[tuple[float, float]]) -> bool:
    """Whether a step belongs to a calibration."""
    return at > began and not any(first <= at <= last for first, last in loads)


@contextmanager
def _server(model: str, port: int, log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    command = [*STOKER, "serve", model, f"--port={port}", f"--step-log={log}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if server.poll() is not None:
                sys.exit("the server did not start")
            try:
                urllib.request.urlopen(url + "/ready")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


# ---- one process ---------------------------------------------------------------------------------


class Lane:
    """Closed loops of requests through a scheduler of its own; its clock is processor time.

    Several lanes share a runner. They write over each other's KV, which changes tokens, not times.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, spec: EngineSpec, loads: Loads):
        self.samples: list[StepSample] = []
        self.now = 0.0
        self.num_output = 0
        self.ttft_s: list[float] = []
        self._runner, self._config, self._spec = runner, config, spec
        self._loads = list(loads)
        self._rng = np.random.default_rng(0)
        self._scheduler: Scheduler | None = None
        self._admissions: dict[int, Admission] = {}
        self._sent_s: dict[int, float] = {}
        self._num_left = 0

    def step(self) -> bool:
        """One step; False when all loads have ended."""
        if self._scheduler is None or not self._scheduler.has_work:
            if not self._loads:
                return False
            self._begin(*self._loads.pop(0))
        scheduler = self._scheduler
        assert scheduler is not None
        t0 = time.thread_time()
        plan = scheduler.plan(self.now)
        planned_s = time.thread_time() - t0
        assert plan is not None
        self._admissions |= {admission.slot: admission for admission in plan.admitted}
        for slot in plan.slots.tolist():  # another lane may have used it
            self._runner.sampler.admit(self._admissions[slot])
        t1 = time.thread_time()
        result = self._runner.launch(plan).wait()
        t2 = time.thread_time()
        facts = scheduler.commit(result, self.now)
        t3 = time.thread_time()
        self.now += planned_s + t3 - t1
        self.samples.append(StepSample(StepShape.of(plan), t2 - t1, planned_s + t3 - t2))
        for fact in facts:
            if isinstance(fact, Tokens):
                self.num_output += 1
                if fact.request_id in self._sent_s:
                    self.ttft_s.append(self.now - self._sent_s.pop(fact.request_id))
                if fact.finish_reason:
                    self._send()
        return True

    def _begin(self, requests: int, streams: int, prompt: int, output: int) -> None:
        spec = self._spec
        self._scheduler = make_scheduler(
            self._config,
            kv_tokens=spec.kv_tokens,
            page_size=spec.page_size,
            max_model_len=spec.max_model_len,
            is_cpu=True,
        )
        self._num_left, self._lengths = requests, (prompt, output)
        for _ in range(streams):
            self._send()

    def _send(self) -> None:
        if not self._num_left or self._scheduler is None:
            return
        self._num_left -= 1
        request_id = self._num_left
        self._sent_s[request_id] = self.now
        prompt_len, max_tokens = self._lengths
        prompt = array("i", self._rng.integers(1000, 30_000, prompt_len).tolist())
        params = SamplingParams(temperature=0.0)
        self._scheduler.handle(
            Add(request_id, prompt, params, max_tokens, frozenset(), 0, self.now)
        )


def steps(model: str) -> int:
    config = EngineConfig(model=model, kv_tokens=40_000, threads=1)
    builder = Builder(config)
    builder.find_files()
    scheduler, runner = builder.load()
    spec = EngineSpec(40_000, scheduler.page_size, builder.max_model_len, is_cpu=True)
    warm = Lane(runner, config, spec, CALIBRATION[:2])
    while warm.step():
        pass
    load = tuple(LOAD.values())
    fitted, predicted = (Lane(runner, config, spec, loads) for loads in (CALIBRATION, (load,)))
    choose = random.Random(0)
    while predicted.step():
        while choose.random() < 0.7 and fitted.step():
            pass
    cost = fit(fitted.samples, is_async=False)
    lengths = Lengths.parse(str(load[2])), Lengths.parse(str(load[3]))
    requests = SyntheticLoad(load[0], *lengths).requests(0)
    result = simulate(requests, config, spec, cost, concurrency=load[1], request_s=0.0)
    summary = result.summary()
    print(f"fitted to {cost.num_steps} steps, mean error {cost.error:.1%}; times are of one thread")
    table = Comparison()
    table.row("steps", len(predicted.samples), summary["steps"])
    rate = predicted.num_output / predicted.now
    table.row("output tokens/s", rate, summary["output_tokens_per_s"])
    table.row("TTFT ms", median(predicted.ttft_s) * 1e3, summary["ttft_ms"]["p50"])
    return table.exit_code


# ---- a server's clients --------------------------------------------------------------------------


def _bench(
    url: str, folder: Path, requests: int, streams: int, prompt: int, output: int
) -> dict[str, float]:
    out = folder / "bench.json"
    seed = time.time_ns() % 2**31  # new prompts each time: nothing is in the cache
    flags = {"url": url, "requests": requests, "concurrency": streams, "prompt-len": prompt}
    flags |= {"output-len": output, "json": out, "seed": seed}
    command = [*STOKER, "bench", "serve", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(out.read_text())
    return {"rate": result["output_tokens_per_s"], "ttft_ms": result["ttft_ms"]["p50"]}


def _other_client(command: str, url: str) -> dict[str, float]:
    line = subprocess.run(
        command.format(url=url), shell=True, check=True, capture_output=True, text=True
    ).stdout
    result = json.loads(line)
    return {"rate": result["out_tok_s"], "ttft_ms": result["ttft_p50"] * 1e3}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("h200", "cpu", "steps"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--client")
    parser.add_argument("--port", type=int, default=8039)
    arguments = parser.parse_args()
    if arguments.what == "h200":
        return h200()
    if arguments.what == "steps":
        return steps(arguments.model)
    return cpu(arguments.model, arguments.client, arguments.port)


if __name__ == "__main__":
    sys.exit(main())
