"""Every error as OpenAI's error object, whatever raised it.

Runs on: loop.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from ..engine.api.errors import EngineError, Overloaded, RequestError, StokerError

log = logging.getLogger(__name__)

MAX_MESSAGE = 2000
MAX_REPORTED = 10
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CODES = {401: "invalid_api_key", 405: "method_not_allowed", 413: "body_too_large"}


class RateLimited(RequestError):
    """The caller was too fast; it may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message, code="rate_limit_exceeded", status=429)
        self.retry_after_s = retry_after_s


def error_object(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`{"error": {...}}` for this status, the message cut to a bounded length."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    code = code or CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    *,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """The same as an HTTP response."""
    body = orjson.dumps(error_object(message, status, code=code))
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def status_of(error: StokerError) -> int:
    """The HTTP status that says whose fault it is."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, Overloaded) else 500


class EngineStopped(EngineError):
    """The engine has died, which it has said itself."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped")


def note_failure(error: StokerError, what: str) -> bool:
    """Log what nobody expected, with its traceback; returns whether it is that."""
    is_failure = status_of(error) == 500 and not isinstance(error, EngineStopped)
    if is_failure:
        log.error("%s failed", what, exc_info=error)
    return is_failure


def stoker_object(error: StokerError) -> dict[str, Any]:
    """The error object of one of our own errors."""
    if isinstance(error, RequestError):
        return error_object(error.message, error.status, param=error.param, code=error.code)
    if isinstance(error, Overloaded):
        return error_object(error.message, 503, code="overloaded")
    message = str(error) if isinstance(error, EngineError) else "internal error"
    return error_object(message, 500, code="engine_error")


def stoker_response(error: StokerError) -> web.Response:
    """The HTTP response of one of our own errors; some say when to come back."""
    headers = {}
    if isinstance(error, Overloaded | RateLimited):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return web.Response(
        body=orjson.dumps(stoker_object(error)),
        status=status_of(error),
        content_type="application/json",
        headers=headers,
    )


def invalid(error: ValidationError, body: Any) -> RequestError:
    """pydantic's findings as one bounded sentence; `param` is the first field's dotted path."""
    found: dict[str, str] = {}  # path to message; a union reports each of its members
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for one in errors:
        path = _path(one["loc"], body, missing=one["type"] == "missing")
        found.setdefault(path, one["msg"].removeprefix("Value error, "))
    first = next(iter(found))
    param = max((path for path in found if path.startswith(first)), key=len)
    lines = [f"{path}: {text}" if path else text for path, text in found.items()]
    if len(lines) > MAX_REPORTED:
        lines[MAX_REPORTED:] = [f"and {len(lines) - MAX_REPORTED} more"]
    return RequestError("; ".join(lines), param=param or None)


def _path(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """The part of pydantic's location that exists in the body: it adds tags of its own."""
    parts = []
    for i, part in enumerate(loc):
        here = isinstance(body, dict) and part in body
        here = here or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        if here:
            body = body[part]
        if here or (missing and i == len(loc) - 1):
            parts.append(str(part))
    return ".".join(parts)
