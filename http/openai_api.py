"""OpenAI's chat, completions and models routes: translation only.

Everything that can be wrong with a request is found before the first byte of a stream: fields,
template, tokens, limits. Then outputs become choices, at once or chunk by chunk.

Runs on: loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from ..engine.api.errors import RequestError
from ..engine.api.messages import TokenLogprob
from ..engine.text.reader import CallStart, Content, Reasoning
from . import answers
from .errors import invalid
from .logprobs import LegacyLogprobs, chat_logprobs, prompt_logprobs
from .openai_types import (
    ChatFields,
    ChatRequest,
    CompletionRequest,
    Prompt,
    SamplingFields,
    StreamOptions,
)
from .serving import SERVER, Choice, Server, Work, new_id
from .sse import DONE, ChunkEncoder, EventStream, event

if TYPE_CHECKING:
    from ..engine import Output, Stream

Body = TypeVar("Body", bound=BaseModel)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    server = request.app[SERVER]
    async with server.work(request) as work:
        body = parse(ChatRequest, await server.body(request))
        model = model_name(server, body.model)
        params = body.chat_params(server.engine.default_sampling)
        text = await chat_text(server, body)
        answer = server.formats.of(body, text)
        params = answers.structured(server.formats, body, params, answer, server.engine.tokenizer)
        grammar = await server.compile_grammar(params)
        special = body.add_special_tokens is True
        prompt: Sequence[int] = await server.engine.encode(text, add_special_tokens=special)
        prompt = truncate(server, body, params.max_tokens, prompt)
        reply_id = new_id("chatcmpl-")
        work.ids |= {reply_id, *body.ids}
        [stream] = server.submit(
            work,
            [prompt],
            params,
            priority=body.priority or 0,
            user=body.user,
            namespace=body.namespace,
            answer=answer,
            grammar=grammar,
        )
        envelope = {"id": reply_id, "created": int(time.time()), "model": model}
        if body.stream:
            envelope["object"] = "chat.completion.chunk"
            makers = [_chat_chunks(server, body, stream)]
            return await _stream(
                server, request, work, body, envelope, PLAIN_CHAT, makers, params.n
            )
        [choices] = await server.collect(work)
        reply = {**envelope, "object": "chat.completion"}
        reply["choices"] = [_chat_choice(server, body, i, c) for i, c in enumerate(choices)]
        reply["usage"] = usage([stream], [choices])
        reply |= _prompt_ids(body, stream)
        if body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(server, body, stream, choices[0])
        return json_response(reply)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    server = request.app[SERVER]
    async with server.work(request) as work:
        body = parse(CompletionRequest, await server.body(request))
        model = model_name(server, body.model)
        params = body.completion_params(server.engine.default_sampling)
        special = body.add_special_tokens is not False
        jobs = (text_prompt(server, prompt, add_special_tokens=special) for prompt in body.prompt)
        prompts = await asyncio.gather(*jobs)
        prompts = [truncate(server, body, params.max_tokens, prompt) for prompt in prompts]
        reply_id = new_id("cmpl-")
        work.ids |= {reply_id, *body.ids}
        streams = server.submit(
            work,
            prompts,
            params,
            priority=body.priority or 0,
            user=body.user,
            namespace=body.namespace,
            grammar=await server.compile_grammar(params),
        )
        envelope = {
            "id": reply_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        echoes = [_echo(server, body, i, stream) for i, stream in enumerate(streams)]
        if body.stream:
            makers = [
                _text_chunks(server, body, stream, echo, params.n)
                for stream, echo in zip(streams, echoes, strict=True)
            ]
            return await _stream(
                server, request, work, body, envelope, PLAIN_TEXT, makers, params.n
            )
        groups = await server.collect(work)
        kept = [_best(group, body.n or 1) for group in groups]
        choices = [
            _completion_choice(server, body, i * len(group) + j, choice, stream, echo)
            for i, (group, stream, echo) in enumerate(zip(kept, streams, echoes, strict=True))
            for j, choice in enumerate(group)
        ]
        return json_response({**envelope, "choices": choices, "usage": usage(streams, groups)})


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    server = request.app[SERVER]
    cards = [_model_card(server, name) for name in server.model_names]
    return json_response({"object": "list", "data": cards})


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; the id may hold slashes."""
    server = request.app[SERVER]
    return json_response(_model_card(server, model_name(server, request.match_info["id"])))


def _model_card(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "stoker",
        "root": server.engine.model_name,
        "parent": None,
        "max_model_len": server.engine.max_model_len,
    }


def json_response(value: Any) -> web.Response:
    """A JSON response."""
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def parse(kind: type[Body], body: dict[str, Any]) -> Body:
    """The body as a request model. Raises RequestError."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid(error, body) from None


def model_name(server: Server, name: str | None) -> str:
    """The name to answer with; an absent one means the first. Raises RequestError (404)."""
    if name is None:
        return server.model_names[0]
    if name not in server.model_names:
        raise RequestError(
            f"the model {name[:128]!r} does not exist, there is {server.model_names[0]!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return name


async def chat_text(server: Server, body: ChatFields) -> str:
    """The conversation as the chat template writes it, its special tokens included."""
    messages, options = body.template_input()
    if body.chat_template is not None:
        if not server.config.trust_request_chat_template:
            raise RequestError(
                "chat_template: the server takes no templates from requests (it runs without "
                "--trust-request-chat-template)",
                param="chat_template",
            )
        options["source"] = body.chat_template
    return await server.engine.render(messages, **options)


async def text_prompt(
    server: Server, prompt: Prompt, *, add_special_tokens: bool = True
) -> Sequence[int]:
    """A prompt as token ids."""
    if isinstance(prompt, str):
        return await server.engine.encode(prompt, add_special_tokens=add_special_tokens)
    return prompt


def truncate(
    server: Server, body: SamplingFields, max_tokens: int | None, prompt: Sequence[int]
) -> Sequence[int]:
    """Keep the prompt's last tokens where the client asks for it; -1 means what fits."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(server.engine.max_model_len - max(max_tokens or 1, 1), 1)
    return prompt[-keep:]


def usage(streams: Sequence["Stream"], groups: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """Tokens counted: each prompt once, all its choices; cached ones as the first choice saw."""
    return _usage(
        sum(len(stream.prompt_tokens) for stream in streams),
        sum(choice.num_output for group in groups for choice in group),
        sum(group[0].num_cached for group in groups),
        sum(choice.num_reasoning for group in groups for choice in group),
    )


def _usage(prompt: int, completion: int, cached: int, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _best(group: list[Choice], n: int) -> list[Choice]:
    """The n choices with the highest mean log-probability a token, best first."""
    if len(group) <= n:
        return group

    def score(choice: Choice) -> float:
        values = [token.logprob for token in choice.logprobs or ()]
        return sum(values) / len(values) if values else 0.0

    return sorted(group, key=score, reverse=True)[:n]


# --- whole answers ---


def _chat_choice(server: Server, body: ChatRequest, index: int, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        content = chat_logprobs(server, choice.token_ids, choice.logprobs or ())
        logprobs = {"content": content, "refusal": None}
    message = answers.message_of(choice.text, choice.deltas)
    reply = {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": answers.finish_reason(choice.finish_reason, "tool_calls" in message, body),
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        reply["token_ids"] = choice.token_ids
    return reply


def _echo(server: Server, body: CompletionRequest, index: int, stream: "Stream") -> str:
    """The text that goes before the answer: the prompt as it was sent, or as its ids read."""
    if not body.echo:
        return ""
    prompt = body.prompt[index]
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return server.engine.tokenizer.decode(stream.prompt_tokens, _skips(body))


def _prompt_ids(body: SamplingFields, stream: "Stream") -> dict[str, Any]:
    return {"prompt_token_ids": list(stream.prompt_tokens)} if body.return_token_ids else {}


def _skips(body: SamplingFields) -> bool:
    return body.skip_special_tokens is not False


def _completion_choice(
    server: Server,
    body: CompletionRequest,
    index: int,
    choice: Choice,
    stream: "Stream",
    echo: str,
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        tokens: Sequence[int] = choice.token_ids
        entries: Sequence[TokenLogprob | None] = choice.logprobs or ()
        if body.echo:
            tokens = [*stream.prompt_tokens, *tokens]
            entries = [*(choice.prompt_logprobs or ()), *entries]
        logprobs = LegacyLogprobs(server, _skips(body)).take(tokens, entries)
    reply = {
        "index": index,
        "text": echo + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        reply |= {"token_ids": choice.token_ids, "prompt_token_ids": list(stream.prompt_tokens)}
    if body.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(server, body, stream, choice)
    return reply


# --- streams ---


_DELTA = b'{"index":INDEX,"delta":{%b},"logprobs":null,"finish_reason":null}'
PLAIN_CHAT: Mapping[type, bytes] = {
    Content: _DELTA % b'"content":TEXT',
    Reasoning: _DELTA % b'"reasoning_content":TEXT,"reasoning":TEXT',
}
PLAIN_TEXT: Mapping[type, bytes] = {
    Content: b'{"index":INDEX,"text":TEXT,"logprobs":null,"finish_reason":null}'
}


def _chat_chunks(
    server: Server, body: ChatRequest, stream: "Stream"
) -> Callable[["Output", int, bool], list[dict[str, Any]]]:
    """How an output becomes chat choices: the role first, the end last, each in its own chunk."""
    callers: set[int] = set()  # choices that called a tool

    def choices(output: "Output", index: int, is_first: bool) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []

        def add(delta: dict[str, Any], **fields: Any) -> None:
            empty = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(empty | fields)

        if is_first:
            add({"role": "assistant", "content": ""}, **_prompt_ids(body, stream))
        fields: dict[str, Any] = {}
        if body.logprobs and output.logprobs:
            content = chat_logprobs(server, output.token_ids, output.logprobs)
            fields["logprobs"] = {"content": content, "refusal": None}
        if body.return_token_ids and output.token_ids:
            fields["token_ids"] = output.token_ids
        for delta in answers.deltas_of(output):
            add(delta, **fields)
            fields = {}
        if fields:
            add({"content": ""}, **fields)
        if output.deltas:
            callers.update(index for d in output.deltas if isinstance(d, CallStart))
        if output.finish_reason:
            reason = answers.finish_reason(output.finish_reason, index in callers, body)
            add({}, finish_reason=reason, stop_reason=output.stop_reason)
        return chunks

    return choices


def _text_chunks(
    server: Server, body: CompletionRequest, stream: "Stream", echo: str, n: int
) -> Callable[["Output", int, bool], list[dict[str, Any]]]:
    """How an output becomes completion choices; the echoed prompt is a chunk of its own."""
    legacy = [LegacyLogprobs(server, _skips(body)) for _ in range(n)]

    def choices(output: "Output", index: int, is_first: bool) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []

        def add(text: str, tokens: Sequence[int], entries: Any, **fields: Any) -> None:
            logprobs = None
            if body.logprobs is not None and tokens:
                logprobs = legacy[output.choice].take(tokens, entries)
            empty = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
            chunks.append(empty | fields)

        if is_first and (echo or body.return_token_ids):
            tokens = stream.prompt_tokens if body.echo else ()
            add(echo, tokens, output.prompt_logprobs, **_prompt_ids(body, stream))
        fields: dict[str, Any] = {}
        if body.return_token_ids:
            fields["token_ids"] = output.token_ids
        if output.finish_reason:
            fields |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if output.text or output.token_ids or output.finish_reason:
            add(output.text, output.token_ids, output.logprobs, **fields)
        return chunks

    return choices


async def _stream(
    server: Server,
    request: web.Request,
    work: Work,
    body: ChatRequest | CompletionRequest,
    envelope: dict[str, Any],
    plain: Mapping[type, bytes],
    makers: Sequence[Callable[["Output", int, bool], list[dict[str, Any]]]],
    n: int,
) -> web.StreamResponse:
    """All prompts of a request as one event stream."""
    options = body.stream_options or StreamOptions()
    num_prompt = sum(len(stream.prompt_tokens) for stream in work.streams)
    encoders: list[ChunkEncoder] = []

    def so_far() -> dict[str, Any]:
        return _usage(
            num_prompt,
            sum(sum(encoder.num_output) for encoder in encoders),
            sum(encoder.num_cached for encoder in encoders),
            sum(sum(encoder.num_reasoning) for encoder in encoders),
        )

    each = so_far if options.include_usage and options.continuous_usage_stats else None
    has_logprobs = body.logprobs is not None and body.logprobs is not False
    is_plain = not has_logprobs and not body.return_token_ids
    for i, maker in enumerate(makers):
        encoders.append(
            ChunkEncoder(envelope, i * n, n, plain, maker, is_plain=is_plain, usage=each)
        )
    async with EventStream(server, request, work) as events:
        await events.pump_all(encoders)
        last = b""
        if options.include_usage:
            last = event({**envelope, "choices": [], "usage": so_far()})
        await events.finish(last + DONE)
    return events.response
