"""Who may call what, how often, and from which web pages.

Runs on: loop.
"""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from .errors import RateLimited, error_response
from .openapi import Route
from .serving import CALLER, SERVER
from .settings import ServerConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """Judges the route that was matched, never the text of the path or of the Host header."""

    __middleware_version__ = 1

    def __init__(self, config: ServerConfig, routes: Iterable[Route]):
        self.routes = {(route.method, route.template): route for route in routes}
        self.keys = [_digest(key) for key in config.keys()]
        self.admin_keys = [_digest(config.admin_key)] if config.admin_key else []
        self.limit = RateLimit(config.rate_limit) if config.rate_limit else None

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource  # None where nothing matched
        method = "GET" if request.method == "HEAD" else request.method
        route = self.routes.get((method, resource.canonical)) if resource else None
        digest = _digest(_bearer(request.headers.get("Authorization", "")))
        is_admin = _is_any(digest, self.admin_keys)
        is_locked = bool(self.keys or self.admin_keys)
        caller = request[CALLER]
        caller.is_admin = is_admin or not is_locked
        if route and route.access == "open":
            return await handler(request)
        has_key = not self.keys or _is_any(digest, self.keys) or is_admin
        if not has_key:
            return error_response(
                "give a valid API key, as in Authorization: Bearer KEY",
                401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        if route and route.access == "admin" and not caller.is_admin:
            return error_response("this route needs the admin key (--admin-key)", 403)
        if self.keys:
            caller.key_digest = digest.hex()
            if self.limit and route and route.is_work and not is_admin:
                self.limit.take(digest, time.monotonic())
        return await handler(request)


class RateLimit:
    """So many requests a minute for each key, all of them at once or spread out.

    The generic cell rate algorithm: a key has a theoretical arrival time, which each request puts
    off by a share of the minute and which may lie at most a minute ahead.
    """

    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self._due_s: dict[bytes, float] = {}  # only valid keys come here, so it is bounded

    def take(self, key: bytes, now: float) -> None:
        """Count a request at `now` (seconds). Raises RateLimited."""
        due = max(self._due_s.get(key, now), now) + 60 / self.per_minute
        if due > now + 60 + 1e-6:
            raise RateLimited(
                f"this API key may make {self.per_minute} requests a minute",
                retry_after_s=due - now - 60,
            )
        self._due_s[key] = due


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's question whether a page of an allowed origin may call the server."""
    if request.method == "OPTIONS" and allowed_origin(request):
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": "authorization, content-type, x-request-id",
            },
        )
    return await handler(request)


def allowed_origin(request: web.Request) -> str | None:
    """The page's origin, where its pages may call the server."""
    origin, allowed = request.headers.get("Origin"), request.app[SERVER].config.cors_origin
    return origin if origin in allowed or "*" in allowed else None


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_any(digest: bytes, known: Iterable[bytes]) -> bool:
    """Compare with all, in constant time."""
    return any([hmac.compare_digest(digest, one) for one in known])
