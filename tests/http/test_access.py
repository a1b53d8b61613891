"""Who may call what; headers in and out."""

import asyncio
import json

import pytest
from served import CHAT, TEXT, Served, chat, text

from stoker.http.routes import TABLE

KEY, OTHER, ADMIN = "key-one", "key-twö", "key-admin"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_but_four_needs_a_key():
    async with Served(api_key=(KEY,), admin_key=ADMIN) as s:
        for method, path, *_ in TABLE:
            reply = await s.request(method, path.replace("{id:.+}", "fake/model"), {})
            if path in ("/", "/health", "/ready", "/metrics"):
                assert reply.status == 200
            else:
                assert reply.status == 401, path
                assert reply.error["code"] == "invalid_api_key"
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert (await s.post("/no/such/route", {})).status == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"BEARER  {KEY} ", 200),
        (f"Bearer {OTHER}", 200),
        (f"Bearer {ADMIN}", 200),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("", 401),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY} {KEY}", 401),
        ("Bearer éé", 401),
    ],
)
async def test_bearer(header, status, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"\n{OTHER}\n\n")
    async with Served(api_key=(KEY,), api_key_file=file, admin_key=ADMIN) as s:
        reply = await s.get("/v1/models", headers={"Authorization": header})
        assert reply.status == status


async def test_bytes_that_are_no_utf8_in_the_header():
    async with Served(api_key=(KEY,)) as s:
        for value in (b"Bearer \xff\xfe", b"Bearer \xc3\xa9", b"\xff"):
            raw = await raw_request(s, b"GET /v1/models HTTP/1.1", b"x", b"Authorization: " + value)
            assert b" 401 " in raw[:15]


async def raw_request(s: Served, line: bytes, host: bytes, *headers: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
    lines = [line, b"Host: " + host, b"Connection: close", *headers]
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    raw = await reader.read()
    writer.close()
    return raw


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("GET /v1/models HTTP/1.1", "x/health?"),
        ("GET /v1/models HTTP/1.1", "x/health#"),
        ("GET http://x/health/../v1/models HTTP/1.1", "x"),
        ("GET http://x/v1/models HTTP/1.1", "x"),
        ("GET /health/../v1/models HTTP/1.1", "x"),
        ("GET /v1/models?/health HTTP/1.1", "x"),
        ("GET /v1/models;/health HTTP/1.1", "x"),
        ("GET /health%2f..%2fv1/models HTTP/1.1", "x"),
        ("GET //v1/models HTTP/1.1", "x"),
        ("OPTIONS /v1/models HTTP/1.1", "x"),
        ("POST /health HTTP/1.1", "x"),
    ],
)
async def test_the_matched_route_is_what_is_authorised(line, host):
    async with Served(api_key=(KEY,)) as s:
        raw = await raw_request(s, line.encode(), host.encode())
        assert b" 401 " in raw[:15], raw
        assert b'"data"' not in raw


async def test_admin_routes():
    async with Served() as s:  # no keys at all: everybody is trusted
        assert (await s.post("/flush_cache")).status == 200
        assert (await s.post("/abort_request", {"abort_all": True})).json == {"aborted": 0}
    async with Served(api_key=(KEY,)) as s:  # keys, but none for this
        assert (await s.post("/flush_cache", headers=bearer(KEY))).status == 403
    async with Served(api_key=(KEY,), admin_key=ADMIN) as s:
        reply = await s.post("/flush_cache", headers=bearer(KEY))
        assert (reply.status, reply.error["type"]) == (403, "permission_error")
        everything = {"abort_all": True}
        assert (await s.post("/abort", everything, headers=bearer(KEY))).status == 403
        assert (await s.post("/abort", everything, headers=bearer(ADMIN))).status == 200
        assert (await s.post("/flush_cache", headers=bearer(ADMIN))).status == 200
    async with Served(admin_key=ADMIN) as s:  # only steering is locked
        assert (await s.post("/flush_cache")).status == 403
        await s.ok(CHAT, chat())


async def test_a_key_aborts_only_its_own_requests():
    async with Served(api_key=(KEY, OTHER), admin_key=ADMIN) as s:
        s.engine.paused.clear()

        async def aborted(key, path="/abort_request"):
            reply = await s.post(path, {"rid": "mine"}, headers=bearer(key))
            return reply.json["aborted"]

        for key in (KEY, ADMIN):
            running = asyncio.create_task(s.post(CHAT, chat(rid="mine"), headers=bearer(KEY)))
            while not s.engine.gpu.jobs:
                await asyncio.sleep(0.01)
            assert await aborted(OTHER) == await aborted(OTHER, "/abort") == 0
            assert await aborted(key) == 1
            assert (await running).status == 409


async def test_no_route_shows_a_secret():
    async with Served(api_key=(KEY, "k-second"), admin_key=ADMIN, access_log=True) as s:
        for method, path, *_ in TABLE:
            if method == "GET":
                path = path.replace("{id:.+}", "fake/model")
                reply = await s.get(path, headers=bearer(ADMIN))
                assert reply.status in (200, 400)  # 400: it is not switched on
                for secret in (KEY, "k-second", ADMIN):
                    assert secret.encode() not in reply.raw
        info = (await s.get("/server_info", headers=bearer(KEY))).json
        assert info["config"]["api_key"] == "redacted"
        assert info["config"]["port"] == 8000
        assert info["max_model_len"] == 4096


async def test_isolated_caches():
    async with Served(api_key=(KEY, OTHER), isolate_cache_per_key=True) as s:

        async def cached(key):
            reply = await s.ok(TEXT, text("a long prompt"), headers=bearer(key))
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(KEY) == 0
        assert await cached(OTHER) == 0
        assert await cached(KEY) > 0
        assert KEY not in str([add.namespace for add in s.engine.gpu.adds])


async def test_request_ids():
    async with Served() as s:
        for path, body in ((CHAT, chat()), (CHAT, chat(stream=True)), (CHAT, {})):
            reply = await s.post(path, body, headers={"X-Request-Id": "abc-123"})
            assert reply.headers["X-Request-Id"] == "abc-123"
        made = (await s.post(CHAT, chat())).headers["X-Request-Id"]
        for odd in ("z" * 129, "a b", "ä", ""):
            reply = await s.post(CHAT, chat(), headers={"X-Request-Id": odd})
            given = reply.headers["X-Request-Id"]
            assert given != odd
            assert len(given) == len(made) == 32
        reply = await s.post(CHAT, chat(), headers={"X-Request-Id": "z" * 128})
        assert reply.headers["X-Request-Id"] == "z" * 128


async def test_big_and_many_headers():
    async with Served() as s:
        for headers in ([b"X-Big: " + b"a" * 20_000], [b"X-%d: 1" % i for i in range(200)]):
            raw = await raw_request(s, b"GET /v1/models HTTP/1.1", b"x", *headers)
            assert b" 431 " in raw[:15]
            assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert (await s.get("/health")).status == 200


async def test_cors():
    async with Served() as s:
        origin = {"Origin": "https://a.example"}
        reply = await s.post(CHAT, chat(), headers=origin)
        assert not any(name.startswith("Access-Control") for name in reply.headers)
        assert (await s.request("OPTIONS", CHAT, headers=origin)).status == 405
    async with Served(cors_origin=("https://a.example",), api_key=(KEY,)) as s:
        reply = await s.request("OPTIONS", CHAT, headers=origin)
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert "authorization" in reply.headers["Access-Control-Allow-Headers"]
        for body in (chat(), chat(stream=True)):
            reply = await s.post(CHAT, body, headers=origin | bearer(KEY))
            assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "Access-Control-Allow-Credentials" not in reply.headers
        other = {"Origin": "https://b.example"}
        reply = await s.request("OPTIONS", CHAT, headers=other)
        assert reply.status == 401
        assert "Access-Control-Allow-Origin" not in reply.headers


async def test_access_log_has_no_query(caplog):
    caplog.set_level("INFO", logger="stoker.access")
    async with Served(access_log=True) as s:
        await s.get("/v1/models?secret=1", headers={"X-Request-Id": "r1"})
    assert "r1 GET /v1/models 200" in caplog.text
    assert "secret" not in caplog.text


async def test_prompts_are_not_logged(caplog):
    caplog.set_level("DEBUG")
    async with Served(access_log=True) as s:
        await s.ok(CHAT, chat("my-private-words"))
        await s.post(CHAT, chat("my-private-words", temperature=9))
        assert json.loads((await s.get("/v1/models")).raw)
    assert "my-private-words" not in caplog.text
