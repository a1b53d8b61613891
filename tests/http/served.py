"""A server with a fake engine on a free port, and a client that checks what every answer owes."""

import asyncio
import json
import socket
import time
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from fake_engine import FakeEngine

from stoker.engine.api.config import EngineConfig
from stoker.http.app import make_app
from stoker.http.connection import listen, make_runner, tls
from stoker.http.serving import SERVER
from stoker.http.settings import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Any
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after a check of its form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert len(self.raw) < 3000
        return error


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": user(text), "temperature": 0, "max_tokens": 8, **fields}


def text(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}


class Served:
    """`async with Served(flag=...) as s`: s.engine, s.server, s.post, s.get, s.events."""

    def __init__(self, *, max_model_len: int = 4096, sndbuf: int | None = None, **flags: Any):
        self.sndbuf = sndbuf
        self.config = ServerConfig(**{"model": "fake", "keep_alive_s": 30, **flags})
        self.max_model_len = max_model_len

    async def __aenter__(self) -> "Served":
        names = EngineConfig.model_fields
        engine_config = EngineConfig(**{name: getattr(self.config, name) for name in names})
        self.engine = FakeEngine(engine_config, max_model_len=self.max_model_len)
        app = make_app(self.engine, self.config)
        self.server = app[SERVER]
        self.runner = make_runner(app)
        await self.runner.setup()
        sock = listen(self.config.model_copy(update={"port": 0}))
        if self.sndbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.sndbuf)
        await web.SockSite(self.runner, sock, ssl_context=tls(self.config)).start()
        self.port = 0 if self.config.uds else sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.runner.cleanup()
        await self.engine.close()
        assert not self.server.works
        assert not self.server.event_streams

    async def request(
        self, method: str, path: str, body: Any = None, *, raw: Any = None, headers: Any = None
    ) -> Reply:
        data = json.dumps(body).encode() if body is not None else raw
        headers = {"Content-Type": "application/json", **(headers or {})}
        url = self.url + path
        async with self.session.request(method, url, data=data, headers=headers) as response:
            reply = Reply(response.status, response.headers, await response.read())
        assert reply.headers["X-Request-Id"]
        return reply

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.request("POST", path, body, **options)

    async def ok(self, path: str, body: Any, **options: Any) -> Any:
        reply = await self.post(path, body, **options)
        assert reply.status == 200, reply.raw
        return reply.json

    async def raw_events(self, path: str, body: Any, **options: Any) -> list[bytes]:
        """The `data:` lines of a stream, after a check of its frame."""
        reply = await self.post(path, {**body, "stream": True}, **options)
        assert reply.status == 200, reply.raw
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert reply.headers["Cache-Control"] == "no-cache"
        assert reply.headers["X-Accel-Buffering"] == "no"
        events = reply.raw.split(b"\n\n")
        assert events.pop() == b""
        return [event[6:] for event in events if event.startswith(b"data: ")]

    async def events(self, path: str, body: Any, **options: Any) -> list[Any]:
        """The JSON of a stream's events; [DONE] ends it, once."""
        lines = await self.raw_events(path, body, **options)
        assert lines.count(b"[DONE]") == 1
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def until_idle(self, limit_s: float = 3.0) -> None:
        """Wait until nothing of any request is left."""
        began = time.perf_counter()
        while self.engine.gpu.jobs or self.server.works or self.engine.num_streams:
            assert time.perf_counter() - began < limit_s, "work goes on"
            await asyncio.sleep(0.01)


def joined(events: list[Any], index: int = 0) -> str:
    """The text of a choice out of its chunks."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
