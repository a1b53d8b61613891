"""GET /cache_events: what enters and leaves the prefix cache, for routers.

Runs on: loop.
"""

from typing import Any

from aiohttp import web

from ..engine.api.errors import RequestError
from ..engine.api.messages import CacheEvent
from . import sse
from .serving import SERVER


async def cache_events(request: web.Request) -> web.StreamResponse:
    """GET /cache_events: server-sent events from now on.

    The stream ends when the server drains, and for a reader that is far behind: whoever follows
    starts anew then, with nothing known.
    """
    server = request.app[SERVER]
    if not server.config.cache_events:
        raise RequestError("the server was started without --cache-events")
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    await response.write(sse.COMMENT)  # the 200 goes out: the reader knows that it follows
    async for event in server.engine.cache_feed.follow(server.config.keep_alive_s):
        await response.write(sse.COMMENT if event is None else _sse(event))
    return response


def _sse(event: CacheEvent) -> bytes:
    data: dict[str, Any] = {"kind": event.kind, "keys": [key.hex() for key in event.keys]}
    if event.tokens is not None:
        data |= {
            "parent": event.parent.hex(),
            "tokens": event.tokens.tolist(),
            "namespace": event.namespace,
        }
    return sse.event(data)
