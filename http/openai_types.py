"""The requests of OpenAI's chat and completions routes: fields, types and limits.

Types are strict ("5" is no number), unknown fields are ignored, a null field is an absent field.
What would change the answer but cannot be honoured is refused, never ignored. Ranges of sampling
fields are checked in `SamplingParams.validate`, which every route shares.

Runs on: any (pure).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..engine.api.chat import ChatMessage, Wire
from ..engine.api.errors import RequestError
from ..engine.api.sampling_params import (
    LIMITS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from .structured import StructureFields

MAX_PROMPTS = 1024
MAX_MESSAGES = 10_000
MAX_TOOLS = 1000
MAX_STOP_TOKENS = 1024
MAX_TEMPLATE = 1 << 18
DEFAULT_COMPLETION_TOKENS = 16
REFUSED = {
    "allowed_token_ids": "allowed tokens (use logit_bias)",
    "audio": "audio",
    "bad_words": "forbidden words (use logit_bias)",
    "custom_logit_processor": "code in a request",
    "documents": "documents beside the messages (put them into one)",
    "function_call": "the old functions API (use tools)",
    "functions": "the old functions API (use tools)",
    "input_embeds": "embeddings as a prompt",
    "logits_processors": "code in a request",
    "lora_path": "adapters",
    "prompt_embeds": "embeddings as a prompt",
    "return_hidden_states": "hidden states",
    "return_tokens_as_token_ids": "ids in place of tokens (use return_token_ids)",
    "session_params": "sessions",
    "stop_regex": "stopping by regular expressions",
    "suffix": "filling in the middle",
    "thinking_token_budget": "a limit for reasoning alone (use max_tokens)",
    "use_beam_search": "beam search",
    "web_search_options": "searching the web",
}

TokenIds = list[int]
Prompt = str | Sequence[int]
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS_SCHEMA,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS_SCHEMA]},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ],
    "description": "a text, token ids, or a list of either",
}


def refuse(body: Any, unsupported: Mapping[str, str]) -> Any:
    """The body. Raises RequestError for a field in it that there is no support for."""
    for name in unsupported.keys() & body.keys() if isinstance(body, dict) else ():
        if body[name]:  # empty ones ask for nothing
            raise RequestError(f"{name}: there is no support for {unsupported[name]}", param=name)
    return body


class StreamOptions(Wire):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _limited(name: str) -> Any:
    """A field with limits that are stated here and checked in `SamplingParams.validate`."""
    low, high = LIMITS[name]
    return Field(None, json_schema_extra={"minimum": low, "maximum": high})


class SamplingFields(StructureFields):
    """What chat, completions and their extensions share."""

    model: str | None = None
    temperature: float | None = _limited("temperature")
    top_p: float | None = _limited("top_p")
    top_k: int | None = None
    min_p: float | None = _limited("min_p")
    presence_penalty: float | None = _limited("presence_penalty")
    frequency_penalty: float | None = _limited("frequency_penalty")
    repetition_penalty: float | None = _limited("repetition_penalty")
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = _limited("seed")
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = _limited("prompt_logprobs")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="keep only so many of the prompt's last tokens; -1: as many as fit into the "
        "context beside max_tokens. All of the prompt is read first, so one with more ids than 4 "
        "times the context, or with more characters than the context's tokens can hold, is "
        "refused whatever is kept of it: this bounds what a request can cost",
    )
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    user: str | None = Field(None, max_length=512)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    rid: str | None = Field(None, min_length=1, max_length=128)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        return refuse(body, REFUSED)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "SamplingFields":
        if self.stream_options and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs excludes stream", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or positive", param="truncate_prompt_tokens"
            )
        return self

    def params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The engine's parameters: these fields over the model's own defaults.

        Args:
            defaults: from the model's generation_config.json.
        """
        names = (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
            "max_tokens min_tokens n seed include_stop_str_in_output ignore_eos "
            "skip_special_tokens prompt_logprobs"
        ).split()
        given = {name: getattr(self, name) for name in names}
        chosen = dict(defaults) | {k: v for k, v in given.items() if v is not None} | overrides
        if chosen.get("top_p") == 0:  # OpenAI allows it: nothing but the likeliest token
            chosen |= {"top_p": 1.0, "temperature": 0.0}
        if self.no_stop_trim:  # SGLang's name for it
            chosen["include_stop_str_in_output"] = True
        if self.stop is not None:
            chosen["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            chosen["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            chosen["logit_bias"] = _logit_bias(self.logit_bias)
        return SamplingParams(**chosen, grammar=self.grammar())

    @property
    def namespace(self) -> tuple[str, ...]:
        """Where its prefixes are cached."""
        return ("salt", self.cache_salt) if self.cache_salt else ()

    @property
    def ids(self) -> set[str]:
        """The names that the client gave the request."""
        return {name for name in (self.request_id, self.rid) if name}


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestError("logit_bias: keys must be token ids", param="logit_bias") from None


class Function(Wire):
    """A function that the model may call; `parameters` is a JSON schema.

    Calls that tool_choice forces match the schema, `strict` or not. Where the model chooses to
    call, its arguments are as it writes them.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def _of_an_object(cls, schema: Any) -> Any:
        if schema is True:  # JSON Schema's other way to allow everything
            return {}
        if isinstance(schema, dict) and schema.get("type", "object") != "object":
            raise ValueError("a function's parameters are an object: its type must be object")
        return schema


class Tool(Wire):
    """A tool: so far always a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    """The function that must be called."""

    name: str


class NamedTool(Wire):
    """A tool choice that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatFields(Wire):
    """What makes a chat's prompt; /tokenize takes these too."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE)
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @field_validator("tools")
    @classmethod
    def _have_names_of_their_own(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names: set[str] = set()
        for i, tool in enumerate(tools or ()):
            if tool.function.name in names:
                raise RequestError(
                    f"two tools have the name {tool.function.name}",
                    param=f"tools.{i}.function.name",
                )
            names.add(tool.function.name)
        return tools

    @model_validator(mode="after")
    def _check_template_options(self) -> "ChatFields":
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise RequestError(
                "continue_final_message needs an assistant message at the end",
                param="continue_final_message",
            )
        return self

    def template_input(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and options for the engine's chat template."""
        variables = dict(self.chat_template_kwargs or {})
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            if thinks is None and self.reasoning_effort == "none":
                thinks = False
        if thinks is not None:
            for name in ("enable_thinking", "thinking"):  # Qwen's and GLM's name, DeepSeek's
                variables.setdefault(name, thinks)
        options: dict[str, Any] = {"template_kwargs": variables}
        if self.tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        ends_open = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        options["continue_final_message"] = ends_open
        options["add_generation_prompt"] = not ends_open if prompted is None else prompted
        return [message.model_dump(exclude_none=True) for message in self.messages], options


class ChatRequest(SamplingFields, ChatFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    # What these ask for by default is what there is.
    modalities: list[Literal["text"]] | None = Field(None, max_length=8)
    verbosity: Literal["medium"] | None = None
    include_reasoning: Literal[True] | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        """Whether the answer must call a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def wants_one_call(self) -> bool:
        """Whether the answer ends with its first call.

        Where calls are forced, others follow only if the client asks for them: left free to, weak
        models repeat themselves up to the limit.
        """
        if isinstance(self.tool_choice, NamedTool):
            return True
        default = self.tool_choice != "required"
        return not (default if self.parallel_tool_calls is None else self.parallel_tool_calls)

    @property
    def continued_text(self) -> str | None:
        """The text that the answer goes on with, where it continues the last message."""
        if not self.continue_final_message:
            return None
        content = self.messages[-1].content or ""
        if isinstance(content, str):
            return content
        return "".join(str(part.get("text") or "") for part in content)

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )
        choice, tools = self.tool_choice, self.tools or []
        if choice in ("auto", "required") and not tools:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedTool):
            if choice.function.name not in {tool.function.name for tool in tools}:
                raise RequestError(
                    f"tool_choice names {choice.function.name[:64]!r}, which is not among tools",
                    param="tool_choice.function.name",
                )
        if self.forces_call and (spec := self.grammar()) is not None:
            raise RequestError(
                f"a tool_choice that forces a call excludes {spec.param}", param="tool_choice"
            )
        return self

    def chat_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters; max_completion_tokens wins over max_tokens."""
        overrides: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            overrides["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            overrides["logprobs"] = self.top_logprobs or 0
        return self.params(defaults, **overrides)


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is a list of prompts after validation."""

    prompt: Annotated[list[Prompt], WithJsonSchema(PROMPT_SCHEMA)]
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompts(cls, value: Any, _: Any) -> list[Prompt]:
        return as_prompts(value)

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise RequestError(f"best_of ({best_of}) must be at least n ({n})", param="best_of")
        if best_of is not None and best_of > n and (self.stream or self.echo):
            raise RequestError("best_of above n excludes stream and echo", param="best_of")
        if self.max_tokens is not None and self.max_tokens < (0 if self.echo else 1):
            raise RequestError(
                f"max_tokens must be at least 1 (0 with echo), got {self.max_tokens}",
                param="max_tokens",
            )
        return self

    def completion_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters: 16 tokens unless asked for more."""
        overrides: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is None:
            overrides["max_tokens"] = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        if self.best_of is not None and self.best_of > (self.n or 1):
            overrides["n"] = self.best_of
            overrides["logprobs"] = self.logprobs or 0  # the choices are ranked by them
        if self.echo and self.logprobs is not None:
            overrides["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.params(defaults, **overrides)


def as_prompts(value: Any) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list of prompts, none of them empty."""
    if value and isinstance(value, str):
        return [value]
    if (ids := _ids(value)) is not None:
        return [ids]
    if not isinstance(value, list) or not value:
        raise ValueError("want a text, a list of token ids, or a list of these; not empty")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts, the limit is {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for prompt in value:
        given = prompt if prompt and isinstance(prompt, str) else _ids(prompt)
        if given is None:
            raise ValueError("each prompt must be a text or a list of token ids, and not empty")
        prompts.append(given)
    return prompts


def _ids(value: Any) -> Sequence[int] | None:
    """A list of token ids as an array where they fit one, or None for what is no such list.

    A prompt of 4,096 ids keeps the loop a millisecond if each is looked at in Python.
    """
    if not isinstance(value, list) or not value:
        return None
    try:
        ids: Sequence[int] = array("i", value)
    except TypeError:
        return None
    except OverflowError:  # the engine says which id is outside of the vocabulary
        ids = value
    # Python takes true and false for numbers; the letter e finds both, and floats too.
    return None if b"e" in orjson.dumps(value) else ids
