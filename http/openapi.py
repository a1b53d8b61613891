"""/openapi.json and /docs, generated from the table of routes and the request models.

Runs on: any (pure).
"""

import html
import inspect
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Literal, NamedTuple

from aiohttp import web
from pydantic import BaseModel, TypeAdapter

from ..engine.api.sampling_params import SamplingParams
from .settings import version


class Route(NamedTuple):
    """A route, who may call it, what it takes and gives.

    Attributes:
        body: the request model; several where a field tells them apart.
        answer: the type of the answer's JSON, or the media type of a text.
        access: open to all, with an API key, or with the admin key where there are keys.
        is_work: the engine works for it: it may be queued, refused, limited by rate, aborted.
        may_stream: `stream: true` is answered by server-sent events.
        statuses: what else it may answer.
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: Any = None
    answer: Any = dict[str, Any]
    access: Literal["open", "key", "admin"] = "key"
    is_work: bool = False
    may_stream: bool = False
    statuses: tuple[int, ...] = ()

    @property
    def template(self) -> str:
        """The path as OpenAPI and aiohttp show it, without the parameters' patterns."""
        return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", self.path)


ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("routes", tuple)

# --- what answers hold; these only describe, so that no answer is validated on the way out ---


class ErrorFields(BaseModel):
    """What went wrong; `param` is the dotted path of the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every error."""

    error: ErrorFields


class CachedTokens(BaseModel):
    """Of the prompt's tokens, those out of the prefix cache."""

    cached_tokens: int


class ReasoningTokens(BaseModel):
    """Of the output tokens, those of reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens counted: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None


class FunctionCall(BaseModel):
    """Which function to call; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    """One answer."""

    message: Message


class TextChoice(_Choice):
    """One continuation."""

    text: str


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Answer):
    """A whole answer of chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Answer):
    """A whole answer of completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    """A prompt's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of some tokens."""

    prompt: str


# --- the document ---

REASONS = {
    200: "done",
    400: "the request is wrong; param names the field",
    401: "no valid API key",
    403: "the admin key is needed",
    404: "no such model",
    408: "the body did not arrive in time",
    409: "aborted by /abort_request",
    413: "the body is too large",
    415: "not JSON, or encoded",
    429: "too many requests with this API key; Retry-After says when to come back",
    500: "the engine failed",
    503: "overloaded, draining or stopped; Retry-After says when to come back",
    504: "the request took longer than its time limit",
}


@cache
def document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """The OpenAPI 3.1 description of these routes."""
    kinds = {Error, *(kind for route in routes for kind in (*_bodies(route), route.answer))}
    inputs: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]] = [
        (kind, "validation", TypeAdapter(kind)) for kind in kinds if not isinstance(kind, str)
    ]
    schemas, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    definitions = dict(sorted(shared["$defs"].items()))
    for definition in definitions.values():
        _describe(definition.get("properties", {}))
    paths: dict[str, Any] = {}
    for route in routes:
        bodies = [schemas[kind, "validation"] for kind in _bodies(route)]
        answer = schemas.get((route.answer, "validation"), {"type": "string"})
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(
            route, bodies, answer, schemas[Error, "validation"]
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stoker",
            "version": version(),
            "description": "OpenAI's API and extensions. Unknown fields are ignored, null fields "
            "are absent fields, and known fields are honoured or refused.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(fields: dict[str, Any]) -> None:
    """Take the texts for sampling fields from where these are defined."""
    found = re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", SamplingParams.__doc__ or "", re.M)
    texts = {name: text for names, text in found for name in names.split(", ")}
    for name, field in fields.items():
        field.pop("title", None)
        if "temperature" in fields and name in texts:
            field.setdefault("description", " ".join(texts[name].split()))


def _bodies(route: Route) -> tuple[Any, ...]:
    if route.body is None:
        return ()
    return route.body if isinstance(route.body, tuple) else (route.body,)


def _operation(
    route: Route, bodies: list[Any], answer: dict[str, Any], error: dict[str, Any]
) -> dict[str, Any]:
    media_type = route.answer if isinstance(route.answer, str) else "application/json"
    content = {media_type: {"schema": answer}}
    if route.may_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = {500, 503, *route.statuses}
    if route.access != "open":
        statuses.add(401)
    if route.access == "admin":
        statuses.add(403)
    if bodies:
        statuses |= {400, 408, 413, 415}
    if route.is_work:
        statuses |= {404, 409, 429, 504}
    responses: dict[str, Any] = {"200": {"description": REASONS[200], "content": content}}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": REASONS[status],
            "content": {"application/json": {"schema": error}},
        }
    said = inspect.cleandoc(route.handler.__doc__ or "").partition(".\n")[0].rstrip(".")
    operation: dict[str, Any] = {
        "summary": said.partition(": ")[2] or said,
        "responses": responses,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)", route.path)
        ],
    }
    if route.access != "open":
        operation["security"] = [{"key": []}]
    if bodies:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


# --- a page to read ---

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #ccc;padding:.2em .6em;"
    "vertical-align:top}code{font-size:13px}summary{cursor:pointer;padding:.3em 0}"
    "small{color:#666}"
)


def page(description: dict[str, Any]) -> str:
    """The same document as HTML without scripts or outside resources."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Stoker</title>",
        f"<style>{STYLE}</style><h1>Stoker {html.escape(description['info']['version'])}</h1>",
        f"<p>{html.escape(description['info']['description'])} "
        "<a href=openapi.json>openapi.json</a></p>",
    ]
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            summary = html.escape(operation["summary"])
            parts.append(
                f"<details><summary><code><b>{method.upper()}</b> {html.escape(path)}</code> "
                f"{summary}</summary><table>"
            )
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for schema in _resolved(body.get("schema", {}), schemas):
                required = schema.get("required", ())
                for name, field in schema.get("properties", {}).items():
                    mark = " <small>required</small>" if name in required else ""
                    text = html.escape(field.get("description", ""))
                    kind = html.escape(_kind(field))
                    parts.append(
                        f"<tr><td><code>{name}</code>{mark}<td><code>{kind}</code><td>{text}"
                    )
            for status, response in operation["responses"].items():
                text = html.escape(response["description"])
                parts.append(f"<tr><td>{status}<td><td>{text}")
            parts.append("</table></details>")
    return "\n".join(parts)


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """The object schemas behind a reference, or behind several."""
    if "$ref" in schema:
        return [schemas[schema["$ref"].rpartition("/")[2]]]
    return [one for part in schema.get("anyOf", ()) for one in _resolved(part, schemas)]


def _kind(field: dict[str, Any]) -> str:
    """A field's type and limits in a few characters."""
    if "anyOf" in field:
        kinds = [_kind(one) for one in field["anyOf"] if one.get("type") != "null"]
        text = " | ".join(dict.fromkeys(kinds))
    elif "$ref" in field:
        text = field["$ref"].rpartition("/")[2]
    elif "enum" in field:
        text = " | ".join(map(str, field["enum"]))
    elif field.get("type") == "array":
        text = f"[{_kind(field.get('items', {}))}]"
    else:
        text = str(field.get("const", field.get("type", "any")))
    limits = [
        f"{sign} {field[name]}"
        for name, sign in (
            *(("minimum", "≥"), ("maximum", "≤"), ("minItems", "≥"), ("maxItems", "≤")),
            *(("minLength", "length ≥"), ("maxLength", "length ≤"), ("maxProperties", "≤")),
        )
        if name in field
    ]
    return " ".join([text, *limits])


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json: this API for programs."""
    return web.json_response(document(request.app[ROUTES]))


async def docs(request: web.Request) -> web.Response:
    """GET /docs: this API for people."""
    return web.Response(
        text=page(document(request.app[ROUTES])),
        content_type="text/html",
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )
