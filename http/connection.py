"""Sockets and connections: listening, TLS, and what aiohttp does not do by itself.

A request that is no HTTP gets OpenAI's error object too. A client that has closed only its sending
side still gets its answer; one that is gone is found out within a moment.

Runs on: loop.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import LineTooLong

from ..engine.api.errors import StartError
from .errors import error_response
from .serving import CALLER, SERVER, new_id
from .settings import ServerConfig

log = logging.getLogger(__name__)

MAX_HEADERS, MAX_HEADER_BYTES = 128, 8190
PRODUCT = "stoker"  # the Server header; no version: it would tell which holes to try
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = 0.1

# A middleware around all that aiohttp does with a request: it judges Expect before the others run.
OUTERMOST: web.AppKey[Callable[..., Awaitable[web.StreamResponse]]] = web.AppKey("outermost")


def listen(config: ServerConfig) -> socket.socket:
    """A socket that is bound but does not listen yet: the port is taken before a model loads.

    Raises:
        StartError: the address is wrong or in use.
    """
    if config.uds is not None:
        return _listen_unix(config.uds)
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise StartError(f"cannot listen on {config.host}:{config.port}: {why}") from None
    return sock


class _UnixSocket(socket.socket):
    """A Unix socket that knows the file it has made."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        self._made: tuple[Path, tuple[int, int]] | None = None

    def bind(self, path: Any) -> None:
        """Make the file."""
        super().bind(str(path))
        self._made = Path(path).absolute(), _file_id(path)

    def unlink(self) -> None:
        """Remove the file, unless another has come into its place."""
        if self._made is not None:
            path, made = self._made
            with contextlib.suppress(OSError):  # it has gone, or the folder is closed to us now
                if _file_id(path) == made:
                    path.unlink()


def remove_file(sock: socket.socket) -> None:
    """Remove what a Unix socket has left in the file system."""
    if isinstance(sock, _UnixSocket):
        sock.unlink()


def _file_id(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _listen_unix(path: Path) -> socket.socket:
    sock = _UnixSocket()
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if sock.connect_ex(str(path)) == 0:
                raise OSError(None, "another server listens there")
            path.unlink()  # a server that was killed left it
        sock.bind(path)
        os.chmod(path, 0o660)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


def tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The certificate to serve with, or None for plain HTTP. Raises StartError."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise StartError("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl's errors are OSErrors
        raise StartError(f"--ssl-certfile {config.ssl_certfile}: {error}") from None
    return context


def make_runner(app: web.Application) -> web.AppRunner:
    """The application with the limits and habits that aiohttp does not have by default."""
    config = app[SERVER].config
    return _Runner(
        app,
        handler_cancellation=True,  # a client that leaves cancels its handler
        auto_decompress=False,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        shutdown_timeout=2.0,
        access_log_class=AccessLog,
        access_log=logging.getLogger("stoker.access") if config.access_log else None,
    )


def is_gone(request: web.Request) -> bool:
    """Whether the client has left, or was cut off."""
    return request.transport is None or request.transport.is_closing()


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            partial(self.app[OUTERMOST], handler=made.request_handler),
            request_factory=made.request_factory,
            **self._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> "Connection":
        return Connection(self, loop=self._loop, **self._kwargs)


class Connection(web.RequestHandler):
    """aiohttp's protocol, with our errors and with half-closed clients."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What the parser refuses, as OpenAI's error object."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was already on its way")
        headers = {"Server": PRODUCT, "X-Request-Id": new_id("")}
        if status >= 500:
            log.error("%s: a request failed", headers["X-Request-Id"], exc_info=exc)
        text = "internal error" if status >= 500 else (message or "this is no HTTP request")
        if isinstance(exc, LineTooLong):
            status, text = 431, f"the request line or a header is over {MAX_HEADER_BYTES} bytes"
        elif text.startswith("Too many headers"):
            status, text = 431, f"there are more than {MAX_HEADERS} headers"
        response = error_response(text, status, headers=headers)
        response.force_close()
        return response

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio allows it
        """The client sends no more. Whether it still reads is known only by writing to it: an
        interim response means nothing to one that does; one that is gone resets the connection.
        """
        if self.transport is None or self.transport.get_extra_info("ssl_object") is not None:
            return False  # TLS has no half-closed state
        if self._waiter is not None and not self._waiter.done():
            return False  # nothing is to be answered
        self.close()  # once what came is answered
        asyncio.get_running_loop().call_soon(self._probe, PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        request, transport = self._current_request, self.transport
        if transport is None or (request is not None and request.writer.output_size):
            return  # closed, or from here on the answer's own bytes tell
        if request is None:
            is_lost = self._waiter is not None
        else:  # HTTP/1.0 has no interim responses
            is_lost = request.version < HttpVersion11 or not request.content.is_eof()
        if is_lost:
            transport.close()
            return
        if request is not None:
            transport.write(CONTINUE)
        asyncio.get_running_loop().call_later(next_s, self._probe, min(2 * next_s, 2.0))


class AccessLog(AbstractAccessLogger):
    """One line a request, without its query string."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log an answer that was sent."""
        fields: dict[str, Any] = {
            "request_id": request[CALLER].id if CALLER in request else "-",
            "method": request.method,
            "path": request.path,
            "status": response.status,
            "seconds": round(time, 6),
        }
        self.logger.info(
            "%(request_id)s %(method)s %(path)s %(status)d %(seconds).3fs",
            fields,
            extra={"fields": fields},
        )
