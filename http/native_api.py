"""SGLang's native /generate, vLLM's tokenizer routes, and those that watch or steer the server.

Runs on: loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import Field, field_validator, model_validator

from ..engine.api.chat import Wire
from ..engine.api.errors import RequestError
from ..engine.api.grammar import GrammarSpec
from ..engine.api.messages import TokenLogprob
from ..engine.api.sampling_params import MAX_LOGPROBS, SamplingParams
from .connection import PRODUCT
from .errors import EngineStopped, error_response
from .limits import MAX_DETOKENIZED
from .logprobs import chosen_logprob
from .openai_api import (
    chat_text,
    json_response,
    model_name,
    parse,
    text_prompt,
    truncate,
)
from .openai_types import ChatFields, SamplingFields, TokenIds, as_prompts, refuse
from .serving import CALLER, SERVER, Choice, new_id
from .settings import version
from .sse import DONE, EventStream, event

if TYPE_CHECKING:
    from ..engine import Output, Stream

DEFAULT_NEW_TOKENS = 128
MISPLACED = (
    *("model", "stream", "stream_options", "priority", "request_id", "rid"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "add_special_tokens"),
)
REFUSED = {
    "audio_data": "audio",
    "custom_logit_processor": "code in a request",
    "image_data": "images",
    "input_embeds": "embeddings as a prompt",
    "lora_id": "adapters",
    "lora_path": "adapters",
    "return_hidden_states": "hidden states",
    "return_text_in_logprobs": "texts among log-probabilities (use /tokenize's token_strs)",
    "session_params": "sessions",
    "token_ids_logprob": "log-probabilities of chosen tokens",
    "video_data": "video",
}


class NativeSampling(SamplingFields):
    """SGLang's sampling_params by its names: max_new_tokens is its max_tokens, and so on."""

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    sampling_seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_misplaced(cls, sampling: Any) -> Any:
        for name in MISPLACED if isinstance(sampling, dict) else ():
            if sampling.get(name):
                raise RequestError(
                    f"{name} does not belong inside sampling_params",
                    param=f"sampling_params.{name}",
                )
        return sampling

    @model_validator(mode="after")
    def _no_contradiction(self) -> "NativeSampling":
        for name, own in (
            ("max_tokens", self.max_new_tokens),
            ("min_tokens", self.min_new_tokens),
            ("seed", self.sampling_seed),
        ):
            if own is not None and getattr(self, name) not in (None, own):
                raise RequestError(
                    f"sampling_params has two values for {name}", param=f"sampling_params.{name}"
                )
        return self

    def grammar(self) -> GrammarSpec | None:
        """What the output must match."""
        spec = super().grammar()
        return spec and replace(spec, param=f"sampling_params.{spec.param}")

    def native_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The engine's parameters: 128 tokens unless asked for more."""
        if self.max_tokens is None:
            own = self.max_new_tokens
            overrides["max_tokens"] = DEFAULT_NEW_TOKENS if own is None else own
        if self.sampling_seed is not None:
            overrides["seed"] = self.sampling_seed
        if self.min_new_tokens is not None:
            overrides["min_tokens"] = self.min_new_tokens
        return self.params(defaults, **overrides)


class GenerateRequest(Wire):
    """POST /generate. Lists mean a batch, answered by a list."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    model: str | None = None
    rid: str | None = Field(None, min_length=1, max_length=128)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        given = body.keys() - cls.model_fields.keys() if isinstance(body, dict) else set()
        for name in given & (NativeSampling.model_fields.keys() | set(MISPLACED)):
            if body[name] is not None:
                where = "is not of /generate" if name in MISPLACED else "belongs in sampling_params"
                raise RequestError(f"{name} {where}", param=name)
        return refuse(body, REFUSED)

    @field_validator("text", "input_ids", mode="wrap")
    @classmethod
    def _prompts(cls, value: Any, _: Any) -> Any:
        as_prompts(value)
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", param="text")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the prompt came as a list of prompts."""
        if self.input_ids is not None:
            return isinstance(self.input_ids[0], list)
        return isinstance(self.text, list)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate: SGLang's wire. Streamed text is cumulative, as there."""
    server = request.app[SERVER]
    async with server.work(request) as work:
        body = parse(GenerateRequest, await server.body(request))
        sampling = body.sampling_params or NativeSampling.model_validate({})
        model_name(server, body.model)
        overrides: dict[str, Any] = {}
        if body.return_logprob:
            overrides["logprobs"] = body.top_logprobs_num or 0
            if (body.logprob_start_len if body.logprob_start_len is not None else -1) >= 0:
                overrides["prompt_logprobs"] = body.top_logprobs_num or 0
        params = sampling.native_params(server.engine.default_sampling, **overrides)
        given = as_prompts(body.input_ids if body.text is None else body.text)
        prompts = await asyncio.gather(*(text_prompt(server, prompt) for prompt in given))
        prompts = [truncate(server, sampling, params.max_tokens, prompt) for prompt in prompts]
        reply_id = body.rid or body.request_id or new_id("")
        work.ids |= {name for name in (reply_id, body.request_id) if name}
        streams = server.submit(
            work,
            prompts,
            params,
            priority=body.priority or 0,
            namespace=sampling.namespace,
            grammar=await server.compile_grammar(params),
        )
        if body.stream:
            async with EventStream(server, request, work) as events:
                await events.pump_all(
                    [
                        _cumulative(body, reply_id, stream, i * params.n, params.n)
                        for i, stream in enumerate(streams)
                    ]
                )
                await events.finish(DONE)
            return events.response
        choices = [
            (stream, choice)
            for stream, group in zip(streams, await server.collect(work), strict=True)
            for choice in group
        ]
        if not body.is_batch and params.n == 1:
            return json_response(_reply(body, reply_id, *choices[0]))
        return json_response(
            [_reply(body, f"{reply_id}_{i}", *choice) for i, choice in enumerate(choices)]
        )


def _reply(
    body: GenerateRequest, reply_id: str, stream: "Stream", choice: Choice
) -> dict[str, Any]:
    finish: dict[str, Any] | None = None
    if choice.finish_reason == "stop":
        finish = {"type": "stop", "matched": choice.stop_reason}
    elif choice.finish_reason == "length":
        finish = {"type": "length", "length": choice.num_output}
    meta: dict[str, Any] = {
        "id": reply_id,
        "finish_reason": finish,
        "prompt_tokens": len(stream.prompt_tokens),
        "completion_tokens": choice.num_output,
        "cached_tokens": choice.num_cached,
    }
    if body.return_logprob:
        meta |= _logprobs("output", choice.token_ids, choice.logprobs or (), body)
        if choice.prompt_logprobs is not None:
            start = body.logprob_start_len or 0
            tokens = list(stream.prompt_tokens)[start:]
            meta |= _logprobs("input", tokens, choice.prompt_logprobs[start:], body)
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _logprobs(
    side: str,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    body: GenerateRequest,
) -> dict[str, Any]:
    """Rows of (logprob, token id, text); the text is null, as in SGLang by default."""
    pairs = list(zip(tokens, entries, strict=True))
    rows: dict[str, Any] = {
        f"{side}_token_logprobs": [
            [chosen_logprob(token, entry) if entry else None, token, None] for token, entry in pairs
        ]
    }
    if body.top_logprobs_num:
        rows[f"{side}_top_logprobs"] = [
            [
                [value, token, None]
                for token, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ]
            if entry
            else None
            for _, entry in pairs
        ]
    return rows


def _cumulative(
    body: GenerateRequest, reply_id: str, stream: "Stream", first_index: int, n: int
) -> Callable[["Output"], bytes]:
    """An encoder whose events hold all of a choice so far.

    Args:
        first_index: the index of the prompt's choice 0.
    """
    choices: dict[int, Choice] = {}

    def encode(output: "Output") -> bytes:
        choice = choices.setdefault(output.choice, Choice(finish_reason=""))
        choice.add(output)
        if body.is_batch or n > 1:
            index = first_index + output.choice
            reply = _reply(body, f"{reply_id}_{index}", stream, choice) | {"index": index}
        else:
            reply = _reply(body, reply_id, stream, choice)
        return event(reply)

    return encode


# --- the tokenizer ---


class TokenizeRequest(Wire):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """POST /tokenize with a chat."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds = Field(max_length=MAX_DETOKENIZED)
    skip_special_tokens: bool | None = None


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    server = request.app[SERVER]
    raw = await server.body(request)
    body: TokenizeRequest | TokenizeChatRequest
    if "messages" in raw:
        body = parse(TokenizeChatRequest, raw)
        text = await chat_text(server, body)
        tokens: Sequence[int] = await server.engine.encode(text, add_special_tokens=False)
    else:
        body = parse(TokenizeRequest, raw)
        special = body.add_special_tokens is not False
        tokens = await text_prompt(server, body.prompt, add_special_tokens=special)
    model_name(server, body.model)
    texts: list[str] | None = None
    if body.return_token_strs:
        texts = [server.engine.tokenizer.token_str(token) for token in tokens]
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": server.engine.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: what a client needs that tokenizes through /tokenize."""
    engine = request.app[SERVER].engine
    template = engine.chat_template
    return json_response(
        {
            **engine.tokenizer.special_tokens,
            "vocab_size": engine.vocab_size,
            "model_max_length": engine.max_model_len,
            "chat_template": template.source if template else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    server = request.app[SERVER]
    body = parse(DetokenizeRequest, await server.body(request))
    model_name(server, body.model)
    tokens, size = body.tokens, server.engine.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        wrong = next(token for token in tokens if not 0 <= token < size)
        raise RequestError(
            f"tokens: id {wrong} is outside the vocabulary of {size}", param="tokens"
        )
    skips = body.skip_special_tokens is True
    prompt = await asyncio.to_thread(server.engine.tokenizer.decode, tokens, skips)
    return json_response({"prompt": prompt})


# --- watching and steering ---


async def home(_: web.Request) -> web.Response:
    """GET /: where to go from here."""
    return json_response({"server": PRODUCT, "api": "/v1", "docs": "/docs", "health": "/health"})


async def health(request: web.Request) -> web.Response:
    """GET /health: whether the GPU thread still makes progress; touches no device."""
    server = request.app[SERVER]
    age_s = server.engine.heartbeat_age_s
    if server.is_alive():
        return json_response({"status": "ok", "heartbeat_age_s": round(age_s, 3)})
    is_stuck = server.fatal is None and server.engine.is_healthy
    message = f"no progress for {age_s:.0f} s" if is_stuck else "the engine has stopped"
    return error_response(message, 503, code="engine_error")


async def ready(request: web.Request) -> web.Response:
    """GET /ready: whether new work would be taken now."""
    reason = request.app[SERVER].unready()
    if reason is None:
        return json_response({"status": "ready"})
    return error_response(f"not ready: {reason}", 503, code=reason, headers={"Retry-After": "1"})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    return web.Response(
        body=request.app[SERVER].metrics.text(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def show_version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": version()})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: the configuration without its secrets, and figures of the latest step."""
    server = request.app[SERVER]
    stats = server.engine.stats
    return json_response(
        {
            "version": version(),
            "config": server.config.public(),
            "max_model_len": server.engine.max_model_len,
            "vocab_size": server.engine.vocab_size,
            "uptime_s": time.time() - server.created,
            "stats": {name: getattr(stats, name) for name in stats.__slots__},
            "loop_cpu_s": server.metrics.loop_cpu_s,
        }
    )


async def flush_cache(request: web.Request) -> web.Response:
    """POST /flush_cache: empty the prefix cache."""
    server = request.app[SERVER]
    if not server.is_alive():
        raise EngineStopped
    return json_response({"success": True, "kept_tokens": await server.engine.flush_cache()})


class AbortRequest(Wire):
    """POST /abort_request: one id, or all."""

    rid: str | None = Field(None, min_length=1, max_length=128)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    abort_all: bool | None = None


async def abort(request: web.Request) -> web.Response:
    """POST /abort_request: end one's own running requests; an admin those of everybody."""
    server = request.app[SERVER]
    body = parse(AbortRequest, await server.body(request))
    name = body.rid or body.request_id
    if (name is None) != bool(body.abort_all):
        raise RequestError("give either rid or abort_all", param="rid")
    if body.abort_all and not request[CALLER].is_admin:
        raise RequestError("abort_all needs the admin key", param="abort_all", status=403)
    return json_response({"aborted": server.abort(request[CALLER], name)})
