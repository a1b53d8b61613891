"""What a streamed token costs in Python, on both threads, without a model.

The real GPU thread and scheduler work for a device that is pretended: a step takes --step-ms, in
which the GIL is free. Clients in other processes read the streams over HTTP (--clients 0: tasks on
the same loop read them, without HTTP). Printed, while all streams run:

    gpu_ms_per_step      wall time of the GPU thread's own work (the budget is 1 ms at 256 streams)
    plan, launch, commit its parts
    gil_ms_per_step      of it, time without a processor: waiting for the GIL, or for the host
    loop_us_per_token    CPU time of the loop's thread (the budget is 25 us)
    device_idle          share of the time in which the device had nothing to do

    python benchmarks/http_loop.py --streams 256 --step-ms 8
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import uvloop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "http"))

from fake_engine import FakeEngine  # noqa: E402

from stoker.engine.api.config import EngineConfig  # noqa: E402
from stoker.engine.api.sampling_params import SamplingParams  # noqa: E402
from stoker.engine.core.plan import Logprobs, StepResult  # noqa: E402
from stoker.engine.core.scheduler import Scheduler  # noqa: E402
from stoker.engine.gpu_thread import GPUThread  # noqa: E402
from stoker.http.app import make_app, make_runner  # noqa: E402
from stoker.http.settings import ServerConfig  # noqa: E402

BODIES = {
    "completions": {"prompt": [65, 66, 67], "ignore_eos": True, "stream": True},
    "chat": {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": True},
}
A = ord("a") - ord("!")  # its token: the fake tokenizer's vocabulary begins with "!"
TOP = 5  # log-probabilities a token


class Device:
    """A runner whose steps take `step_s` one after the other; every token is a letter."""

    def __init__(self, step_s):
        self.runtime = SimpleNamespace(is_async=True)
        self.copies = None
        self.masks = SimpleNamespace(fill_s=0.0, num_masks=0)
        self.step_s = step_s
        self.ends_s = 0.0  # of the latest launched step
        self.steps_s = []  # from the end of one to the end of the next

    def launch(self, plan):
        begins_s = max(time.perf_counter(), self.ends_s)
        self.steps_s.append(begins_s + self.step_s - self.ends_s)
        self.ends_s = begins_s + self.step_s
        return Flight(plan, self.ends_s, self.step_s)


class Flight:
    """A step under way."""

    def __init__(self, plan, ends_s, device_s):
        self.plan, self.ends_s, self.device_s = plan, ends_s, device_s

    def wait(self):
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        plan = self.plan
        tokens = np.where(plan.samples, A + plan.step % 26, -1).astype(np.int32)
        ids = tokens[:, None] + np.arange(TOP, dtype=np.int32)
        logprobs = Logprobs(np.zeros(len(tokens), np.float32), ids, -ids.astype(np.float32))
        return StepResult(
            plan.step, tokens, np.ones(len(tokens), bool), self.device_s, logprobs=logprobs
        )


def make_engine(arguments):
    """An engine whose GPU thread drives a Device."""
    config = EngineConfig(model="fake", max_running_requests=arguments.streams)
    engine = FakeEngine(config)
    engine._task.cancel()
    device = Device(arguments.step_ms / 1e3)
    pages = arguments.streams * (arguments.tokens // 16 + 8)
    scheduler = Scheduler(
        num_pages=pages,
        page_size=16,
        max_running=arguments.streams,
        max_step_tokens=8192,
        max_model_len=engine.max_model_len,
    )
    engine._thread = GPUThread(
        lambda: (scheduler, device),
        lambda facts, stats: engine._call(engine._deliver, facts, stats),
        lambda error: None,
        lambda error: engine._call(engine._die, error),
    )
    engine._thread.start()
    return engine, device


async def read_stream(port, path, body):
    """One request over a plain socket: the client must not be what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    events, tail = 0, b""
    while not tail.endswith(b"\r\n0\r\n\r\n") and (chunk := await reader.read(1 << 16)):
        events += chunk.count(b"data: {")
        tail = (tail + chunk)[-7:]
    writer.close()
    return events


def clients(port, path, body, count, results):
    async def run():
        return sum(await asyncio.gather(*(read_stream(port, path, body) for _ in range(count))))

    uvloop.install()
    results.put(asyncio.run(run()))


async def over_http(engine, arguments, samples):
    """All streams over HTTP; samples (CPU time of the loop, Stats) meanwhile. Returns events."""
    config = ServerConfig(model="fake", max_running_requests=arguments.streams, port=0)
    runner = make_runner(make_app(engine, config))
    await runner.setup()
    from aiohttp import web

    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    path = "/v1/" + ("chat/completions" if arguments.api == "chat" else "completions")
    body = BODIES[arguments.api] | {"max_tokens": arguments.tokens, "temperature": 0}
    if arguments.logprobs:
        is_chat = arguments.api == "chat"
        body |= {"logprobs": True, "top_logprobs": TOP} if is_chat else {"logprobs": TOP}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    share = arguments.streams // arguments.clients
    workers = [
        context.Process(target=clients, args=(port, path, body, share, results))
        for _ in range(arguments.clients)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        await asyncio.sleep(0.02)
        samples.append((time.thread_time(), time.perf_counter(), engine.stats))
    await runner.cleanup()
    return sum(results.get() for _ in workers)


async def in_process(engine, arguments, samples):
    """The same, read by tasks on this loop."""
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)

    async def read():
        return sum([1 async for _ in engine.submit([65, 66, 67], params)])

    tasks = [asyncio.create_task(read()) for _ in range(arguments.streams)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.02)
        samples.append((time.thread_time(), time.perf_counter(), engine.stats))
    return sum(task.result() for task in tasks)


async def measure(arguments):
    engine, device = make_engine(arguments)
    samples = []
    run = over_http if arguments.clients else in_process
    events = await run(engine, arguments, samples)
    await engine.close()
    count = arguments.streams // max(arguments.clients, 1) * max(arguments.clients, 1)
    full = [sample for sample in samples if sample[2].num_running == count]
    if len(full) < 2:
        sys.exit("the streams never ran all at once: use more --tokens")
    (cpu_0, wall_0, first), (cpu_1, wall_1, last) = full[0], full[-1]
    spent = {
        name: getattr(last, name) - getattr(first, name)
        for name in (*("steps", "generated_tokens", "plan_s", "launch_s", "commit_s"), "cpu_s")
    }
    own_s = spent["plan_s"] + spent["launch_s"] + spent["commit_s"]
    steps = spent["steps"]
    times = sorted(device.steps_s[first.steps + 1 : last.steps])
    result = {
        "api": arguments.api if arguments.clients else "in process",
        "streams": count,
        "step_ms_asked": arguments.step_ms,
        "step_ms_p50": times[len(times) // 2] * 1e3,
        "step_ms_p99": times[len(times) * 99 // 100] * 1e3,
        "gpu_ms_per_step": own_s / steps * 1e3,
        "plan": spent["plan_s"] / steps * 1e3,
        "launch": spent["launch_s"] / steps * 1e3,
        "commit": spent["commit_s"] / steps * 1e3,
        "gil_ms_per_step": (own_s - spent["cpu_s"]) / steps * 1e3,
        "loop_us_per_token": (cpu_1 - cpu_0) / spent["generated_tokens"] * 1e6,
        "device_idle": 1 - steps * device.step_s / (wall_1 - wall_0),
        "events_per_token": events / (count * arguments.tokens),
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=8)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--api", choices=BODIES, default="completions")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--clients", type=int, default=1, help="processes; 0: no HTTP")
    parser.add_argument("--switch-ms", type=float, help="sys.setswitchinterval (default: 5)")
    arguments = parser.parse_args()
    if arguments.switch_ms:
        sys.setswitchinterval(arguments.switch_ms / 1e3)
    logging.basicConfig(level="WARNING")
    uvloop.install()
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
