"""Faults of the engine, of clients and of the operator, in a server process over real sockets.

The ledger is checked after each step (STOKER_CHECK): a page that is lost would end the process.
"""

import asyncio
import contextlib
import json
import random
import signal
import time

RAISE, HANG, POISON, HUGE = 250, 251, 252, 253  # as faulty_serve.py has them


def prompt(seed: int, length: int = 20) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(200) for _ in range(length)]


# --- what ends the process ---


async def test_an_error_on_the_gpu_thread_ends_the_process(start, faults):
    server = await start(FAULT_STEP_S="0.005").ready()
    health = []

    async def watch():
        while True:
            try:
                health.append((await server.get("/health"))[0])
            except OSError:
                return  # the server is gone
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    long = faults.completion(prompt(1), 400)
    whole = [asyncio.create_task(server.post(long)) for _ in range(3)]
    streamed = asyncio.create_task(server.post(long | {"stream": True}))
    await server.until(lambda s: s["num_running"] == 4)
    reply = await server.post(faults.completion([RAISE, 1, 2]))
    for one in (reply, *await asyncio.gather(*whole)):
        assert (one.status, one.json["error"]["type"]) == (500, "server_error")
        assert "secret" not in str(one.json)
    lines = (await streamed).lines
    assert json.loads(lines[-2])["error"]["code"] == "engine_error"
    assert lines[-1] == b"[DONE]"
    assert await server.exit_code(10) == 70
    await watching
    assert health.count(200) > 2
    assert 200 not in health[health.index(503) :] if 503 in health else True
    assert "illegal memory access" in server.errors()  # the operator sees it


async def test_a_stuck_gpu_thread_ends_the_process(start, faults):
    server = await start("--watchdog-s", "1", FAULT_STEP_S="0.005").ready()
    await asyncio.sleep(1.5)  # an idle thread is not a stuck one
    await server.tokens(prompt(1))
    began = time.monotonic()
    stuck = asyncio.create_task(server.post(faults.completion([HANG, 1, 2])))
    stream = asyncio.create_task(server.post(faults.completion(prompt(2), 400, stream=True)))
    await asyncio.sleep(0.5)
    status, health = await server.get("/health")  # the loop is well
    assert (status, health["heartbeat_age_s"] > 0.2) == (200, True)
    assert (await stuck).status == 500
    assert time.monotonic() - began > 0.9
    await stream
    assert await server.exit_code(10) == 70
    errors = server.errors()
    assert "stuck for 1 s" in errors
    assert "in faulty_launch" in errors and "in _loop" in errors  # where the thread stands


# --- what the process survives ---


async def test_a_poisoned_request_fails_alone(server, faults):
    await server.ready()
    prompts = [prompt(i, 10 + 7 * i) for i in range(6)]
    expected = [await server.tokens(p) for p in prompts]
    for _ in range(3):  # again: the poisoned pages have new owners
        poisoned = [
            asyncio.create_task(server.post(faults.completion([POISON, *prompt(9, n)], stream=s)))
            for n, s in ((3, False), (60, False), (30, True))
        ]
        tasks = [server.tokens(p, cache_salt=str(random.random())) for p in prompts]
        assert await asyncio.gather(*tasks) == expected
        for task in poisoned:
            reply = await task
            error = reply.json["error"] if reply.json else json.loads(reply.lines[-2])["error"]
            assert error["code"] == "engine_error"
            assert "no finite value" in error["message"]
    await server.assert_clean()


async def test_steps_without_device_memory_are_done_smaller(server, faults):
    await server.ready()
    before = (await server.stats())["undone_steps"]
    others = [asyncio.create_task(server.tokens(prompt(i, 40), 60)) for i in range(3)]
    reply = await server.post(faults.completion([HUGE, *prompt(4, 40)], cache_salt="a"))
    assert reply.status == 200
    await asyncio.gather(*others)
    assert (await server.stats())["undone_steps"] > before
    assert "tried to allocate 1024 GiB" in server.errors()
    await server.assert_clean()


async def test_a_slow_reader_is_cut_off(server, faults):
    await server.ready()
    before = await server.stats()
    body = faults.completion(prompt(5), 450, stream=True, n=4, logprobs=20)
    sock = server.connect(body, rcvbuf=4096)
    sock.settimeout(5)
    await server.until(lambda s: s["num_running"] == 4)
    others = [asyncio.create_task(server.tokens(prompt(i))) for i in range(4)]
    stats = await server.until(lambda s: s["num_running"] == 0)
    await asyncio.gather(*others)
    made = stats["generated_tokens"] - before["generated_tokens"]
    assert 100 < made < 4 * 450  # it was ended, by its reading alone
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(1 << 20):
            received += more
    sock.close()
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")
    await server.assert_clean()


async def test_a_queue_has_an_end_and_a_limit_in_time(server, faults):
    await server.ready()
    long = faults.completion(prompt(6), 480, stream=True)
    running = [server.connect(long) for _ in range(8)]
    await server.until(lambda s: s["num_running"] == 8)
    began = time.monotonic()
    waiting = [asyncio.create_task(server.post(faults.completion(prompt(i)))) for i in range(60)]
    waiting[0].add_done_callback(lambda _: None)
    await server.until(lambda s: s["num_waiting"] == 60)
    refused = await server.post(faults.completion(prompt(7)))
    assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (await server.get("/ready"))[0] == 503
    late = [reply for reply in await asyncio.gather(*waiting) if reply.status != 200]
    assert len(late) == 60 and 1.9 < time.monotonic() - began < 4
    assert {(reply.status, reply.json["error"]["code"]) for reply in late} == {(503, "overloaded")}
    assert "longer than 2 s" in late[0].json["error"]["message"]
    assert int(late[0].headers["Retry-After"]) >= 1
    for sock in running:
        faults.reset(sock)
    await server.assert_clean()


async def test_a_deadline_ends_a_request(server, faults):
    await server.ready()
    body = faults.completion(prompt(8), 480)
    reply = await server.post(body, **{"X-Request-Timeout": "0.3"})
    assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
    await server.assert_clean()


async def test_200_abrupt_disconnects(server, faults):
    """In every phase: most wait for one of 8 places, prompts are computed 16 tokens a step, every
    fourth waits for a grammar of its own to be compiled."""
    await server.ready()
    await server.assert_clean()
    num_sockets = server.num_sockets()
    draw = random.Random(1)

    async def come_and_go(i: int) -> None:
        body = faults.completion(
            prompt(i % 20, draw.choice([3, 60, 300])),
            draw.choice([1, 20, 200]),
            stream=draw.random() < 0.5,
            n=draw.choice([1, 1, 2]),
            **({"regex": f"(ab|cd){{2,40}}{i}"} if i % 4 == 0 else {}),
        )
        await asyncio.sleep(draw.random() * 2.5)
        sock = server.connect(body)
        await asyncio.sleep(draw.choice([0, 0.01, 0.1, 0.5]))
        faults.reset(sock)

    ends = [asyncio.create_task(come_and_go(i)) for i in range(200)]
    bystander = asyncio.create_task(server.tokens(prompt(99), 300))
    await asyncio.gather(*ends)
    assert len(await bystander) == 300
    await server.assert_clean()
    for _ in range(50):
        if server.num_sockets() <= num_sockets:
            break
        await asyncio.sleep(0.05)
    assert server.num_sockets() <= num_sockets


# --- signals ---


async def test_sigterm_under_load_drains(start, faults):
    server = await start("--max-running-requests", "8", FAULT_STEP_S="0.005").ready()
    expected = await server.tokens(prompt(0), 60)
    body = faults.completion(prompt(0), 60, stream=True)
    streams = [asyncio.create_task(server.post(body)) for _ in range(24)]
    await server.until(lambda s: s["num_running"] == 8 and s["num_waiting"] == 16)
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    refused = await server.post(body)
    assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
    assert refused.headers["Connection"] == "close"
    assert int(refused.headers["Retry-After"]) > 0
    for stream in streams:  # those that waited too
        lines = (await stream).lines
        assert lines[-1] == b"[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert [t for choice in choices for t in choice.get("token_ids", ())] == expected
        assert choices[-1]["finish_reason"] == "length"
    assert await server.exit_code(5) == 0


async def test_a_second_signal_aborts(start, faults):
    server = await start("--max-running-requests", "2", FAULT_STEP_S="0.02").ready()
    body = faults.completion(prompt(0), 480, stream=True)
    streams = [asyncio.create_task(server.post(body)) for _ in range(4)]
    whole = asyncio.create_task(server.post(body | {"stream": False}))
    await server.until(lambda s: s["num_running"] == 2 and s["num_waiting"] == 3)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert server.process.is_alive()
    server.signal(signal.SIGTERM)
    replies = [await stream for stream in streams]
    for reply in replies:  # an error of its own, or as the last event of a stream that began
        error = reply.json["error"] if reply.json else json.loads(reply.lines[-2])["error"]
        assert error["code"] == "overloaded"
    assert (await whole).status == 503
    assert await server.exit_code(5) == 0
    assert time.monotonic() - began < 5


async def test_sigterm_while_the_model_loads(start):
    server = start(FAULT_LOAD_S="60")
    await server.printed("loading")
    server.signal(signal.SIGTERM)
    assert await server.exit_code(5) == 128 + signal.SIGTERM
