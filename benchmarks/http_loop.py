"""What a streamed token costs on the event loop, without a model.

A thread stands for the GPU thread: every --step-ms it posts one token for each of --streams
streams. Clients in other processes read them over HTTP. Printed: CPU time of the loop's thread a
token (the budget is 25 us), tokens a second that arrived, and how long steps really took.

    python benchmarks/http_loop.py --streams 256 --step-ms 5
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import queue
import sys
import threading
import time
from pathlib import Path

import uvloop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "http"))

from fake_engine import FakeEngine  # noqa: E402

from stoker.engine.api.config import EngineConfig  # noqa: E402
from stoker.engine.api.messages import Abort, Add, Shutdown, Stats, TokenLogprob, Tokens  # noqa: E402
from stoker.http.app import make_app, make_runner  # noqa: E402
from stoker.http.settings import ServerConfig  # noqa: E402

BODIES = {
    "completions": {"prompt": [65, 66, 67], "ignore_eos": True, "stream": True},
    "chat": {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": True},
}


class TokenThread(threading.Thread):
    """Posts a token for each running request every `step_s` seconds."""

    def __init__(self, engine: FakeEngine, step_s: float, num_streams: int):
        super().__init__(daemon=True)
        self.inbox = queue.SimpleQueue()
        self.engine = engine
        self.step_s = step_s
        self.num_streams = num_streams
        self.heartbeat_s = time.monotonic()
        self.step_times = []
        self.num_posted = 0
        self.num_running = 0

    def run(self):
        running = {}
        due = time.perf_counter()
        while True:
            self.heartbeat_s = time.monotonic()
            while not self.inbox.empty() or not running:
                message = self.inbox.get()
                if isinstance(message, Add):
                    running[message.request_id] = [message, 0]
                elif isinstance(message, Abort):
                    running.pop(message.request_id, None)
                elif isinstance(message, Shutdown):
                    return
                due = time.perf_counter()
            began = time.perf_counter()
            facts = []
            for request_id, (add, count) in list(running.items()):
                last = count + 1 == add.max_tokens
                logprobs = None
                if add.params.logprobs is not None:
                    k = range(add.params.logprobs)
                    logprobs = (TokenLogprob(-0.5, tuple(k), tuple(-0.5 - i for i in k)),)
                token = 97 + count % 26
                finish = "length" if last else None
                facts.append(Tokens(request_id, 0, (token,), logprobs, finish))
                running[request_id][1] += 1
                if last:
                    del running[request_id]
            self.num_posted += len(facts)
            self.num_running = len(running)
            loop = self.engine.loop
            loop.call_soon_threadsafe(self.engine._deliver, facts, Stats(num_running=len(running)))
            due += self.step_s
            time.sleep(max(0.0, due - time.perf_counter()))
            if len(running) > self.num_streams // 2:
                self.step_times.append(time.perf_counter() - began)


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


async def measure(arguments):
    config = ServerConfig(model="fake", max_running_requests=4096, port=0)
    engine = FakeEngine(EngineConfig(model="fake", max_running_requests=4096))
    thread = engine._thread = TokenThread(engine, arguments.step_ms / 1e3, arguments.streams)
    thread.start()
    runner = make_runner(make_app(engine, config))
    await runner.setup()
    from aiohttp import web

    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    path = "/v1/" + ("chat/completions" if arguments.api == "chat" else "completions")
    body = BODIES[arguments.api] | {"max_tokens": arguments.tokens, "temperature": 0}
    if arguments.logprobs:
        is_chat = arguments.api == "chat"
        body |= {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    share = arguments.streams // arguments.procs
    workers = [
        context.Process(target=clients, args=(port, path, body, share, results))
        for _ in range(arguments.procs)
    ]
    samples = []  # (CPU time, tokens) while all streams run: no request comes or goes
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        await asyncio.sleep(0.02)
        if thread.num_running == share * arguments.procs:
            samples.append((time.thread_time(), thread.num_posted))
    if len(samples) < 2:
        sys.exit("the streams never ran all at once: use more --tokens")
    (cpu, posted), (cpu_end, posted_end) = samples[0], samples[-1]
    num_tokens = share * arguments.procs * arguments.tokens
    events = sum(results.get() for _ in workers)
    steps = sorted(thread.step_times) or [0.0]
    print(
        json.dumps(
            {
                "api": arguments.api,
                "streams": arguments.streams,
                "loop_us_per_token": round((cpu_end - cpu) / (posted_end - posted) * 1e6, 2),
                "events_per_token": round(events / num_tokens, 3),
                "step_ms_asked": arguments.step_ms,
                "step_ms_p50": round(steps[len(steps) // 2] * 1e3, 2),
                "step_ms_p99": round(steps[len(steps) * 99 // 100] * 1e3, 2),
            }
        )
    )
    await runner.cleanup()
    await engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--api", choices=BODIES, default="completions")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--procs", type=int, default=1)
    logging.basicConfig(level="WARNING")
    uvloop.install()
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
