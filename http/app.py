"""The aiohttp application: routes, middleware, and the server's life from start to drain.

Runs on: loop.
"""

import asyncio
import contextlib
import gc
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from ..engine.api.errors import EngineError, StokerError
from .access import Access, Handler, allowed_origin, preflight
from .cli import EXIT_ENGINE_DEAD
from .connection import OUTERMOST, PRODUCT, is_gone, make_runner, tls
from .errors import error_response, note_failure, stoker_response
from .logs import REQUEST_ID
from .openapi import ROUTES
from .routes import TABLE
from .serving import CALLER, SERVER, Caller, Server, new_id
from .settings import ServerConfig

if TYPE_CHECKING:
    from ..engine import AsyncEngine

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(engine: "AsyncEngine", config: ServerConfig) -> web.Application:
    """The application that serves this engine. Raises StartError for a bad key file."""
    server = Server(engine, config)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[preflight, Access(config, TABLE)],
    )
    app[SERVER] = server
    app[ROUTES] = TABLE
    app[OUTERMOST] = _errors_as_json
    for route in TABLE:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # and HEAD
        else:
            app.router.add_post(route.path, route.handler)

    async def ticking(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(server.tick())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if server.tracer is not None:
            await asyncio.to_thread(server.tracer.close)

    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(ticking)
    return app


async def serve(
    engine: "AsyncEngine", config: ServerConfig, sock: socket.socket, announce: Callable[[], None]
) -> int:
    """Serve until a signal or the engine's death. Returns the process's exit code, 0 or 70.

    The first SIGTERM or SIGINT drains: new work gets 503, running work has `drain_timeout`
    seconds. The second ends what still runs. When the engine dies, running work gets 500.
    """
    app = make_app(engine, config)
    server = app[SERVER]
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if server.is_draining:
            log.warning("second signal: aborting %s", _requests(len(server.works)))
            server.end_all()
        else:
            log.info("draining %s, up to %g s", _requests(len(server.works)), config.drain_timeout)
            server.is_draining = True
            stop.set()

    def on_fatal(error: BaseException) -> None:
        server.fatal = error
        stop.set()

    engine.on_fatal = on_fatal
    if not engine.is_healthy:
        on_fatal(EngineError("the engine died before it served"))
    runner = make_runner(app)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=2048, ssl_context=tls(config)).start()
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


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


# --- around every request ---


async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request and note its arrival; what is raised becomes OpenAI's error object."""
    given = request.headers.get("X-Request-Id", "")
    name = given if _REQUEST_ID.fullmatch(given) else new_id("")
    REQUEST_ID.set(name)  # each request has a task, so a context, of its own
    request[CALLER] = Caller(name, time.perf_counter())
    try:
        return await handler(request)
    except StokerError as error:
        if not note_failure(error, request.path):
            log.debug("%s: %s", request.path, error)
        return stoker_response(error)
    except web.HTTPException as error:
        return _explain(request, error)
    except Exception as error:
        if isinstance(error, ConnectionError) and is_gone(request):
            raise
        log.exception("%s failed", request.path)
        return error_response("internal error", 500)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every response carries, streams included."""
    response.headers["X-Request-Id"] = request[CALLER].id
    response.headers["Server"] = PRODUCT
    if request.app[SERVER].is_draining:
        response.force_close()
        response.headers["Connection"] = "close"
    if origin := allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"


def _explain(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: f"there is no route {request.method} {request.path[:256]}",
        405: f"{request.path[:256]} does not take {request.method[:32]}",
        413: f"the body is larger than {request.app[SERVER].config.max_body_bytes} bytes",
        417: "Expect: want 100-continue, or nothing",
    }
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return error_response(messages.get(error.status, error.reason), error.status, headers=headers)
