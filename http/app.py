"""The aiohttp application: routes, middleware, and the server's life from start to drain.

Runs on: loop.
"""

import asyncio
import contextlib
import gc
import hashlib
import hmac
import logging
import re
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from ..engine.api.errors import StartError, StokerError
from . import native_api, openai_api
from .errors import error_response, stoker_response
from .openai_api import SERVER
from .serving import CALLER, Caller, Server
from .settings import ServerConfig

if TYPE_CHECKING:
    from ..engine import AsyncEngine

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset(("/health", "/ready", "/metrics"))  # served without a key
ADMIN_ROUTES = frozenset(("/flush_cache",))
EXIT_ENGINE_DEAD = 70
MAX_HEADERS, MAX_HEADER_BYTES = 128, 8190
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

ROUTES = (
    ("POST", "/v1/chat/completions", openai_api.chat_completions),
    ("POST", "/v1/completions", openai_api.completions),
    ("GET", "/v1/models", openai_api.list_models),
    ("GET", "/v1/models/{id:.+}", openai_api.retrieve_model),
    ("POST", "/generate", native_api.generate),
    ("POST", "/tokenize", native_api.tokenize),
    ("POST", "/detokenize", native_api.detokenize),
    ("POST", "/abort_request", native_api.abort),
    ("POST", "/abort", native_api.abort),
    ("POST", "/flush_cache", native_api.flush_cache),
    ("GET", "/server_info", native_api.server_info),
    ("GET", "/version", native_api.show_version),
    ("GET", "/health", native_api.health),
    ("GET", "/ready", native_api.ready),
    ("GET", "/metrics", native_api.metrics),
)


def make_app(engine: "AsyncEngine", config: ServerConfig) -> web.Application:
    """The application that serves this engine. Raises StartError for a bad key file."""
    server = Server(engine, config)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[_errors_as_json, _preflight, _Access(config)],
    )
    app[SERVER] = server
    for method, path, handler in ROUTES:
        if method == "GET":
            app.router.add_get(path, handler)  # and HEAD
        else:
            app.router.add_post(path, handler)

    async def ticking(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(server.tick())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(ticking)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """The application with the limits and habits that aiohttp does not have by default."""
    config = app[SERVER].config
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves cancels its handler
        auto_decompress=False,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        shutdown_timeout=2.0,
        access_log_class=_AccessLog,
        access_log=logging.getLogger("stoker.access") if config.access_log else None,
    )


def listen(config: ServerConfig) -> socket.socket:
    """A socket that is bound but does not listen yet: the port is taken before a model loads.

    Raises:
        StartError: the address is wrong or in use.
    """
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


async def serve(
    engine: "AsyncEngine", config: ServerConfig, sock: socket.socket, announce: Callable[[], None]
) -> int:
    """Serve until a signal or the engine's death. Returns the process's exit code.

    The first SIGTERM or SIGINT drains: new work gets 503, running work has `drain_timeout`
    seconds. The second ends what still runs.
    """
    app = make_app(engine, config)
    server = app[SERVER]
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if server.is_draining:
            log.warning("second signal: aborting %d requests", len(server.works))
            server.end_all()
        else:
            log.info("draining %d requests, up to %g s", len(server.works), config.drain_timeout)
            server.is_draining = True
            stop.set()

    def on_fatal(error: BaseException) -> None:
        log.critical("the engine died", exc_info=error)
        server.fatal = error
        stop.set()

    engine.on_fatal = on_fatal
    runner = make_runner(app)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=2048).start()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    gc.collect()
    gc.freeze()  # the model's objects stay: later collections need not look at them
    announce()
    try:
        await stop.wait()
        await server.finish(1.0 if server.fatal else config.drain_timeout)
    finally:
        await runner.cleanup()
        await engine.close()
        gc.unfreeze()  # else libraries report what they hold as leaked
    return EXIT_ENGINE_DEAD if server.fatal else 0


# --- middleware, outermost first ---


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request and note its arrival; what is raised becomes OpenAI's error object."""
    given = request.headers.get("X-Request-Id", "")
    name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    request[CALLER] = Caller(name, time.perf_counter())
    try:
        return await handler(request)
    except StokerError as error:
        log.debug("%s %s: %s", request[CALLER].id, request.path, error)
        return stoker_response(error)
    except web.HTTPException as error:
        return _explain(request, error)
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s failed", request[CALLER].id, request.path)
        return error_response("internal error", 500)


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's question whether a page of an allowed origin may call the server."""
    if request.method == "OPTIONS" and _allowed_origin(request):
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": "authorization, content-type, x-request-id",
            },
        )
    return await handler(request)


def _allowed_origin(request: web.Request) -> str | None:
    origin, allowed = request.headers.get("Origin"), request.app[SERVER].config.cors_origin
    return origin if origin in allowed or "*" in allowed else None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every response carries, streams included."""
    response.headers["X-Request-Id"] = request[CALLER].id
    if request.app[SERVER].is_draining:
        response.force_close()
        response.headers["Connection"] = "close"
    if origin := _allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"


class _Access:
    """Who may call what. It judges the route that was matched, never the text of the path."""

    __middleware_version__ = 1

    def __init__(self, config: ServerConfig):
        self.keys = [_digest(key) for key in config.keys()]
        self.admin_keys = [_digest(config.admin_key)] if config.admin_key else []

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = resource.canonical if resource else None
        digest = _digest(_bearer(request.headers.get("Authorization", "")))
        is_admin = _is_any(digest, self.admin_keys)
        is_locked = bool(self.keys or self.admin_keys)
        caller = request[CALLER]
        caller.is_admin = is_admin or not is_locked
        if path in OPEN_ROUTES:
            return await handler(request)
        has_key = not self.keys or _is_any(digest, self.keys) or is_admin
        if not has_key:
            return error_response(
                "give a valid API key, as in Authorization: Bearer KEY",
                401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        if path in ADMIN_ROUTES and not caller.is_admin:
            return error_response("this route needs the admin key (--admin-key)", 403)
        if self.keys:
            caller.key_digest = digest.hex()
        return await handler(request)


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_any(digest: bytes, known: Iterable[bytes]) -> bool:
    """Compare with all, in constant time."""
    return any([hmac.compare_digest(digest, one) for one in known])


def _explain(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: f"there is no route {request.method} {request.path[:256]}",
        405: f"{request.path[:256]} does not take {request.method[:32]}",
        413: f"the body is larger than {request.app[SERVER].config.max_body_bytes} bytes",
    }
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return error_response(messages.get(error.status, error.reason), error.status, headers=headers)


class _AccessLog(AbstractAccessLogger):
    """One line a request, without its query string."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.info(
            "%s %s %s %d %.3fs",
            request[CALLER].id if CALLER in request else "-",
            request.method,
            request.path,
            response.status,
            time,
        )
