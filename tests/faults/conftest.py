"""The tiny model of tests/runtime, a server process with faults, and coroutine tests."""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

HERE = Path(__file__).parent
LIMIT_S = 30  # for each test

_spec = importlib.util.spec_from_file_location("tiny", HERE.parent / "runtime" / "conftest.py")
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)
tiny_model = _tiny.tiny_model


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run coroutine tests, each on a loop of its own and with a limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), LIMIT_S))
    return True


sys.path.insert(0, str(HERE))
forks = multiprocessing.get_context("forkserver")  # torch is imported once, not once a server
forks.set_forkserver_preload(["faulty_serve"])


@pytest.fixture(scope="session")
def fork_server():
    """Started while the folder is on its path: before Python 3.12 it takes no other hint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()


class Process:
    """`stoker serve` with faulty_serve.py's faults. `await ready()` before anything else."""

    def __init__(self, model: Path, *flags: str, **variables: str):
        from faulty_serve import run

        arguments = [
            *("serve", str(model), "--port", "0"),
            *("--backend", "cpu", "--dtype", "float32", "--threads", "1"),
            *flags,
        ]
        self.folder = tempfile.TemporaryDirectory()
        self.stdout, self.stderr = (Path(self.folder.name, name) for name in ("out", "err"))
        self.stdout.touch(), self.stderr.touch()
        self.process = forks.Process(
            target=run,
            args=(arguments, {"STOKER_CHECK": "1"} | variables, self.stdout, self.stderr),
        )
        self.process.start()
        self.url = ""

    async def printed(self, pattern: str) -> re.Match[str]:
        """What it has written to stdout, as soon as it is there."""
        while not (found := re.search(pattern, self.stdout.read_text())):
            assert self.process.is_alive(), self.errors()
            await asyncio.sleep(0.02)
        return found

    async def ready(self) -> "Process":
        """Until it serves."""
        found = await self.printed(r"http://127.0.0.1:(\d+)(?=/v1)")
        self.url, self.port = found[0], int(found[1])
        return self

    def errors(self) -> str:
        """What it wrote to stderr so far."""
        return self.stderr.read_text()

    async def exit_code(self, limit_s: float) -> int | None:
        """Of the process, that ends within this time."""
        await asyncio.to_thread(self.process.join, limit_s)
        return self.process.exitcode

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.folder.cleanup()

    # -- requests

    async def get(self, path: str) -> tuple[int, dict]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as reply:
            return reply.status, await reply.json()

    async def post(self, body: dict, path: str = "/v1/completions", **headers) -> SimpleNamespace:
        """A whole answer: status, headers, json, and the data lines of a stream."""
        url = self.url + path
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as reply,
        ):
            raw = await reply.read()
        is_json = reply.content_type == "application/json"
        return SimpleNamespace(
            status=reply.status,
            headers=reply.headers,
            json=json.loads(raw) if is_json else None,
            lines=re.findall(rb"^data: (.*)$", raw, re.MULTILINE),
        )

    async def tokens(self, prompt: list[int], max_tokens: int = 12, **fields) -> list[int]:
        """The greedy tokens of a prompt."""
        reply = await self.post(completion(prompt, max_tokens, **fields))
        assert reply.status == 200, reply.json
        return reply.json["choices"][0]["token_ids"]

    def connect(self, body: dict, *, rcvbuf: int | None = None) -> socket.socket:
        """A plain socket over which a request was sent; nothing is read from it."""
        sock = socket.socket()
        if rcvbuf is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    async def stats(self) -> dict:
        """The engine's figures."""
        status, info = await self.get("/server_info")
        assert status == 200
        return info["stats"]

    async def until(self, is_so, limit_s: float = 10.0) -> dict:
        """The figures, as soon as they are so."""
        end = time.monotonic() + limit_s
        while not is_so(stats := await self.stats()):
            assert time.monotonic() < end, stats
            await asyncio.sleep(0.02)
        return stats

    async def assert_clean(self) -> None:
        """Nothing runs, every page is free once the cache is empty, and the server is well."""
        await self.until(lambda s: s["num_running"] == s["num_waiting"] == 0)
        reply = await self.post({}, "/flush_cache")
        assert reply.json == {"success": True, "kept_tokens": 0}
        stats = await self.until(lambda s: s["num_free_pages"] == s["num_pages"])
        assert (stats["num_cached_pages"], stats["num_waiting_tokens"]) == (0, 0)
        status, health = await self.get("/health")
        assert (status, health["status"]) == (200, "ok")
        assert health["heartbeat_age_s"] < 1.0

    def num_sockets(self) -> int:
        """Its open sockets."""
        count = 0
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(file).startswith("socket:")
        return count


def completion(prompt: list[int], max_tokens: int = 12, **fields) -> dict:
    """A greedy request."""
    base = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    never = {"logit_bias": {"252": -100}, "return_token_ids": True}  # says what brings no fault
    return base | never | fields


def reset(sock: socket.socket) -> None:
    """Close a connection with a reset, as a client that crashed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture
def faults():
    """This file, which the tests cannot import."""
    return SimpleNamespace(Process=Process, completion=completion, reset=reset, signal=signal)


@pytest.fixture
def start(tiny_model, fork_server):
    """Starts server processes and kills what is left of them."""
    processes = []

    def start(*flags, **variables) -> Process:
        processes.append(Process(tiny_model, *flags, **variables))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture(scope="module")
def server(tiny_model, fork_server):
    """One server for the faults that it must survive."""
    process = Process(
        tiny_model,
        *("--max-running-requests", "8", "--max-queued-requests", "60", "--queue-timeout", "2"),
        *("--chunked-prefill-size", "16", "--page-size", "4", "--kv-tokens", "4000"),
        *("--max-tokens-behind", "100"),
        FAULT_STEP_S="0.004",
    )
    yield process
    process.close()
