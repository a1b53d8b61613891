"""Connections: what is no HTTP, early refusals, half-closed clients, TLS, Unix sockets."""

import asyncio
import json
import socket
import ssl
import subprocess

import aiohttp
import pytest
from served import CHAT, TEXT, Served, chat, text

from stoker.engine.api.errors import StartError
from stoker.http.connection import listen, tls
from stoker.http.settings import ServerConfig

LONG = {"max_tokens": 4000, "ignore_eos": True}


async def exchange(s: Served, data: bytes, *, half_close: bool = False) -> tuple[bytes, bytes]:
    """Send bytes over a bare socket; the answer's head, without interim ones, and its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
    writer.write(data)
    if half_close:
        writer.write_eof()
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    while raw.startswith(b"HTTP/1.1 100"):
        raw = raw.partition(b"\r\n\r\n")[2]
    head, _, body = raw.partition(b"\r\n\r\n")
    return head, body


def post(path: str, body: dict, version: str = "1.1", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n", 400),  # TLS
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9.9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
    ],
)
async def test_what_is_no_http_gets_an_error_object(data, status):
    async with Served() as s:
        head, body = await exchange(s, data)
        assert f" {status} ".encode() in head[:15], head
        assert b"\r\nServer: stoker\r\n" in head
        assert b"X-Request-Id: " in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(body) < 1000
        assert (await s.get("/health")).status == 200


async def test_the_server_header_has_no_version():
    async with Served() as s:
        for reply in (await s.get("/health"), await s.get("/no"), await s.post(CHAT, chat())):
            assert reply.headers["Server"] == "stoker"


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent():
    async with Served(max_body_bytes=10_000) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n".encode())
        raw = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        assert b" 413 " in raw[:15]
        assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("path", [TEXT, "/health", "/no/such"])
async def test_an_expectation_that_nobody_knows(path, caplog):
    caplog.set_level("INFO", logger="stoker.access")
    async with Served(access_log=True) as s:
        asked = post(path, text(), "1.1", "Expect: foo", "X-Request-Id: r1", "Connection: close")
        head, body = await exchange(s, asked)
        assert head.startswith(b"HTTP/1.1 417 ")
        assert b"\r\nServer: stoker" in head and b"\r\nX-Request-Id: r1" in head
        error = json.loads(body)["error"]
        assert "100-continue" in error["message"] and error["type"] == "invalid_request_error"
        assert f"r1 POST {path} 417" in caplog.text
        asked = post(TEXT, text(), "1.1", "Expect: 100-continue", "Connection: close")
        head, _ = await exchange(s, asked)
        assert b" 200 " in head[:15]


# --- half-closed clients ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_client_gets_its_answer(stream):
    async with Served() as s:
        s.engine.step_s = 0.02
        body = text(max_tokens=20, ignore_eos=True, stream=stream)
        head, answer = await exchange(s, post(TEXT, body), half_close=True)
        assert b" 200 " in head[:15]
        if stream:
            assert answer.count(b"data: ") == 21
            assert b"data: [DONE]" in answer
        else:
            assert json.loads(answer)["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decode"])
async def test_a_client_that_closes_at_once_is_noticed(stream, phase):
    """A close looks like a half-close until something is written."""
    async with Served() as s:
        s.engine.step_s = 0.005
        if phase == "queued":
            s.engine.paused.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(post(TEXT, text(stream=stream, **LONG)))
        while not s.engine.gpu.jobs:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        writer.close()
        await s.until_idle(limit_s=2.0)
        s.engine.paused.set()
        assert s.server.metrics.disconnects == 1
        assert s.engine.gpu.stats.generated_tokens < 1000


@pytest.mark.parametrize(
    "data",
    [
        post(TEXT, text(**LONG), "1.0"),
        post(TEXT, text(**LONG))[:-5],  # the rest of the body never comes
        b"GET /hea",
        b"",
    ],
)
async def test_nobody_waits_for_other_half_closed_clients(data):
    async with Served(body_timeout_s=30) as s:
        s.engine.step_s = 0.01
        head, _ = await exchange(s, data, half_close=True)
        assert b" 200 " not in head[:15]
        await s.until_idle()


# --- TLS and Unix sockets ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_tls(certificate):
    cert, key = certificate
    async with Served(ssl_certfile=cert, ssl_keyfile=key) as s:
        s.url = s.url.replace("http:", "https:")
        trust = ssl.create_default_context(cafile=str(cert))
        await s.session.close()
        s.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))
        whole = await s.ok(TEXT, text(max_tokens=30))
        events = await s.events(TEXT, text(max_tokens=30))
        pieces = [event["choices"][0]["text"] for event in events]
        assert "".join(pieces) == whole["choices"][0]["text"]
        for raw in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",):  # plain HTTP at the TLS port
            reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
            writer.write(raw)
            assert b"200" not in await reader.read()
            writer.close()


def test_tls_that_cannot_work(certificate, tmp_path):
    cert, key = certificate
    assert tls(ServerConfig()) is None
    for files in (
        {"ssl_certfile": tmp_path / "no"},
        {"ssl_certfile": key, "ssl_keyfile": cert},
        {"ssl_certfile": cert},  # it holds no key
        {"ssl_keyfile": key},
    ):
        with pytest.raises(StartError, match="--ssl"):
            tls(ServerConfig(**files))


async def test_unix_socket(tmp_path):
    path = tmp_path / "s.sock"
    async with Served(uds=path) as s:
        assert path.stat().st_mode & 0o777 == 0o660
        await s.session.close()
        s.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))
        s.url = "http://localhost"
        await s.ok(CHAT, chat())
        assert len(await s.events(TEXT, text(max_tokens=5))) == 5
        with pytest.raises(StartError, match="another server"):
            listen(s.config)
    listen(ServerConfig(uds=path)).close()  # what is left of a dead server is no hindrance
    path.unlink()
    path.write_text("a file of somebody")
    with pytest.raises(StartError, match="cannot listen"):
        listen(ServerConfig(uds=path))
    assert path.read_text() == "a file of somebody"


def test_a_socket_is_bound_but_does_not_listen_before_it_serves():
    sock = listen(ServerConfig(port=0))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())
    sock.close()
