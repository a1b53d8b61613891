"""Clients that leave, clients that do not read, full queues, draining, a dead engine."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from fake_engine import ANSWER
from served import CHAT, TEXT, Served, chat, joined, text

from stoker.engine.api.errors import Overloaded

LONG = {"max_tokens": 4000, "ignore_eos": True}


async def started(s: Served, count: int = 1) -> None:
    """Until so many choices run."""
    while len(s.engine.gpu.jobs) < count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decode"])
async def test_a_client_that_leaves_frees_its_work(stream, phase):
    async with Served() as s:
        s.engine.step_s = 0.005
        if phase == "queued":
            s.engine.paused.clear()
        jobs = [
            asyncio.create_task(s.post(TEXT, text("hi", stream=stream, **LONG, n=2)))
            for _ in range(4)
        ]
        await started(s, 8)
        await asyncio.sleep(0.05)
        for job in jobs:
            job.cancel()
        await s.until_idle()
        s.engine.paused.set()
        assert s.server.metrics.disconnects == 4
        assert s.server.metrics.finished["abort"] == 8
        await s.ok(CHAT, chat())


async def test_a_client_that_leaves_while_it_is_tokenized(monkeypatch):
    async with Served() as s:
        entered = asyncio.Event()

        async def slow_encode(text, add_special_tokens=True):
            entered.set()
            await asyncio.sleep(10)

        monkeypatch.setattr(s.engine, "encode", slow_encode)
        job = asyncio.create_task(s.post(TEXT, text()))
        await entered.wait()
        job.cancel()
        await s.until_idle()
        assert s.engine.gpu.adds == []


async def deaf_client(s: Served) -> socket.socket:
    """A client that sends a streaming request and never reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", s.port))
    body = json.dumps(text(**LONG, stream=True, logprobs=5)).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)
    await started(s)
    return sock


async def test_a_client_that_does_not_read_is_cut_off():
    async with Served(max_tokens_behind=500, sndbuf=4096) as s:
        sock = await deaf_client(s)
        await s.until_idle(limit_s=20)
        assert s.engine.gpu.stats.generated_tokens < 2000
        assert s.server.metrics.finished["abort"] == 1
        assert s.server.metrics.disconnects == 1
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
                received += more
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
        sock.close()


async def test_a_client_that_does_not_read_the_end():
    async with Served(stall_timeout_s=0.3, max_tokens_behind=100_000, sndbuf=4096) as s:
        sock = await deaf_client(s)
        await s.until_idle(limit_s=20)
        assert s.server.metrics.finished["length"] == 1  # the engine did not wait for the client
        assert s.server.metrics.disconnects == 1
        sock.close()


async def test_idle_streams_get_comments():
    async with Served(keep_alive_s=0.05) as s:
        s.engine.paused.clear()
        job = asyncio.create_task(s.post(CHAT, chat(max_tokens=3, stream=True)))
        await asyncio.sleep(0.4)
        s.engine.paused.set()
        reply = await job
        assert reply.status == 200
        assert 2 <= reply.raw.count(b": keep-alive\n\n") <= 8
        assert reply.raw.startswith(b": keep-alive\n\n")
        assert reply.raw.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_a_comment_is_an_event():
    async with Served(keep_alive_s=0.05) as s:
        s.engine.paused.clear()
        job = asyncio.create_task(s.raw_events(CHAT, chat()))
        await asyncio.sleep(0.2)
        for stream in list(s.engine._streams.values()):
            stream._fail(RuntimeError("/secret"))
        s.engine.paused.set()
        error, done = await job
        assert json.loads(error)["error"]["message"] == "internal error"
        assert done == b"[DONE]"


async def test_a_client_of_http_1_0():
    async with Served() as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        body = json.dumps(text(stream=True, max_tokens=3)).encode()
        writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (TEXT.encode(), len(body)))
        writer.write(body)
        head, _, stream = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 200 " in head
        assert b"chunked" not in head
        assert stream.startswith(b"data: {")
        assert stream.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_probes_may_use_head():
    async with Served() as s:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            reply = await s.request("HEAD", path)
            assert (reply.status, reply.raw) == (200, b"")


async def test_queue_limit():
    async with Served(max_running_requests=1, max_queued_requests=2) as s:
        s.engine.paused.clear()
        jobs = [asyncio.create_task(s.post(TEXT, text(max_tokens=1))) for _ in range(3)]
        await started(s, 3)
        assert (await s.get("/ready")).status == 503
        assert (await s.get("/health")).status == 200
        for body in (text(), text(stream=True)):
            reply = await s.post(TEXT, body)
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert reply.error["type"] == "overloaded_error"
            assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert s.server.metrics.rejected["queue_full"] == 2
        s.engine.paused.set()
        assert [(await job).status for job in jobs] == [200] * 3
        assert (await s.get("/ready")).status == 200


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1), (100.0, 1), (2.0, 4), (0.05, 60)])
async def test_retry_after_is_when_the_queue_may_be_gone(rate, seconds):
    async with Served(max_running_requests=1, max_queued_requests=8) as s:
        s.engine.paused.clear()
        jobs = [asyncio.create_task(s.post(TEXT, text(max_tokens=1))) for _ in range(9)]
        await started(s, 9)
        s.server.metrics.finish_rate = rate  # 8 wait
        assert (await s.post(TEXT, text())).headers["Retry-After"] == str(seconds)
        s.engine.paused.set()
        assert [(await job).status for job in jobs] == [200] * 9


async def test_the_rate_at_which_choices_end_is_measured(monkeypatch):
    async with Served() as s:
        now = 0.0
        monkeypatch.setattr("stoker.http.metrics.time.monotonic", lambda: now)
        s.server.metrics._last_tick = None
        for _ in range(30):  # 5 in 2 seconds
            s.server.metrics.tick()
            s.server.metrics.finished["stop"] += 5
            now += 2.0
        assert s.server.metrics.finish_rate == pytest.approx(2.5, rel=0.01)


async def test_a_batch_that_does_not_fit_the_queue_starts_nothing():
    async with Served(max_running_requests=1, max_queued_requests=2) as s:
        s.engine.paused.clear()
        reply = await s.post(TEXT, text(["a"] * 10))
        assert reply.status == 503
        await s.until_idle()


async def test_queued_token_limit():
    async with Served(max_running_requests=1, max_queued_tokens=16) as s:
        s.engine.paused.clear()
        jobs = [asyncio.create_task(s.post(TEXT, text([1] * 8, max_tokens=1))) for _ in range(3)]
        await started(s, 3)
        s.engine.gpu.publish()
        assert (await s.post(TEXT, text())).status == 503
        s.engine.paused.set()
        assert [(await job).status for job in jobs] == [200] * 3


async def test_what_waited_too_long_ends_by_overload_not_by_error():
    async with Served() as s:
        s.engine.refusal = Overloaded("waited too long", reason="queue_timeout")
        assert (await s.post(TEXT, text(n=2))).status == 503
        assert s.server.metrics.rejected["queue_timeout"] == 1
        assert s.server.metrics.finished["overload"] == 2
        assert s.server.metrics.finished["error"] == 0


async def test_request_timeout():
    async with Served(request_timeout_s=0.2) as s:
        s.engine.step_s = 0.01
        reply = await s.post(TEXT, text(**LONG))
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        lines = await s.raw_events(TEXT, text(**LONG))
        assert json.loads(lines[-2])["error"]["code"] == "timeout"
        assert lines[-1] == b"[DONE]"
        await s.until_idle()


async def test_abort_by_id():
    async with Served() as s:
        s.engine.step_s = 0.005
        names = {"by-header": {"X-Request-Id": "by-header"}, "by-field": None, "by-rid": None}
        bodies = {
            "by-header": text(**LONG),
            "by-field": text(**LONG, request_id="by-field"),
            "by-rid": text(**LONG, rid="by-rid"),
        }
        jobs = {
            name: asyncio.create_task(s.post(TEXT, bodies[name], headers=headers))
            for name, headers in names.items()
        }
        await started(s, 3)
        assert (await s.post("/abort_request", {"rid": "by"})).json == {"aborted": 0}
        for name, job in jobs.items():
            assert (await s.post("/abort_request", {"rid": name})).json == {"aborted": 1}
            reply = await job
            assert (reply.status, reply.error["code"]) == (409, "aborted")
        await s.until_idle()


async def test_drain():
    async with Served() as s:
        s.engine.step_s = 0.01
        job = asyncio.create_task(s.events(TEXT, text(max_tokens=60, ignore_eos=True)))
        await started(s)
        s.server.is_draining = True
        reply = await s.get("/ready")
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert (await s.get("/health")).status == 200
        reply = await s.post(CHAT, chat())
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "5"
        assert reply.headers["Connection"] == "close"
        await s.server.finish(10)
        events = await job
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert joined(events).startswith(ANSWER)
        assert s.server.metrics.rejected["draining"] == 1


async def test_drain_that_takes_too_long():
    async with Served() as s:
        s.engine.step_s = 0.01
        stream = asyncio.create_task(s.raw_events(TEXT, text(**LONG)))
        whole = asyncio.create_task(s.post(TEXT, text(**LONG)))
        await started(s, 2)
        await asyncio.sleep(0.05)
        s.server.is_draining = True
        await s.server.finish(0.1)
        lines = await stream
        assert json.loads(lines[-2])["error"]["type"] == "overloaded_error"
        assert (await whole).status == 503
        await s.until_idle()


async def test_a_dead_engine():
    async with Served() as s:
        s.engine.step_s = 0.01
        jobs = [asyncio.create_task(s.post(TEXT, text(**LONG))) for _ in range(2)]
        lines = asyncio.create_task(s.raw_events(TEXT, text(**LONG)))
        await started(s, 3)
        await asyncio.sleep(0.05)
        s.engine._die(RuntimeError("CUDA error at /secret"))
        for job in jobs:
            reply = await job
            assert (reply.status, reply.error["type"]) == (500, "server_error")
            assert b"secret" not in reply.raw
        assert b"secret" not in b"".join(await lines)
        assert json.loads((await lines)[-2])["error"]["type"] == "server_error"
        assert (await s.get("/health")).status == 503
        assert (await s.get("/ready")).status == 503
        assert (await s.post(CHAT, chat())).status == 500
        assert (await s.post("/flush_cache")).status == 500


async def test_health_watches_the_heartbeat():
    async with Served() as s:
        s.engine.gpu.heartbeat_lag_s = 31
        assert (await s.get("/health")).status == 503
        s.engine.gpu.heartbeat_lag_s = 29
        assert (await s.get("/health")).status == 200


async def test_many_at_once_are_not_mixed_up():
    async with Served(max_running_requests=8) as s:

        async def one(i):
            body = text(f"item {i}:", echo=True, max_tokens=30, temperature=1.0, seed=i)
            if i % 2:
                return joined(await s.events(TEXT, body))
            return (await s.ok(TEXT, body))["choices"][0]["text"]

        connector = aiohttp.TCPConnector(limit=0)
        await s.session.close()
        s.session = aiohttp.ClientSession(connector=connector)
        texts = await asyncio.gather(*(one(i) for i in range(100)))
        for i, answer in enumerate(texts):
            assert answer.startswith(f"item {i}:")
        await s.until_idle()
