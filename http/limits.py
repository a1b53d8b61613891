"""How much a body may hold, found before pydantic and we walk through it on the loop.

Runs on: any (pure).
"""

from collections.abc import Mapping
from typing import Any

from ..engine.api.errors import RequestError
from ..engine.api.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS
from .openai_types import MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_TOKENS, MAX_TOOLS

MAX_VALUES = 1 << 20  # of one body; orjson keeps the GIL, for some 20 ms then
MAX_CONTAINERS = 1 << 17  # objects and lists of one body
MAX_PARTS = 1000  # of one message's content, or of its tool calls
MAX_ALL_PARTS = 20_000  # of all messages together
MAX_DETOKENIZED = 1_000_000
_SAMPLING = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKENS,
}
_LIMITS = {
    **_SAMPLING,
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "tokens": MAX_DETOKENIZED,
}


def check_raw(raw: bytes, max_model_len: int) -> None:
    """Raise RequestError where parsing would take long.

    Marks inside of strings count too: a text with more of them than this is no prompt that fits.
    """
    for what, marks, limit in (
        ("values, by its commas", b",", max(MAX_VALUES, 4 * max_model_len)),
        ("objects and lists, by its brackets", b"{[", max(MAX_CONTAINERS, 4 * max_model_len)),
    ):
        if len(raw) > limit and sum(raw.count(mark) for mark in marks) > limit:
            raise RequestError(f"the body holds more than {limit} {what}")


def check_sizes(body: Mapping[str, Any], max_model_len: int) -> None:
    """Raise RequestError for the first list that is too long. Types are not judged here."""
    for name, limit in _LIMITS.items():
        _check(name, body.get(name), limit)
    if isinstance(sampling := body.get("sampling_params"), dict):
        for name, limit in _SAMPLING.items():
            _check(f"sampling_params.{name}", sampling.get(name), limit)
    for name in ("prompt", "text", "input_ids"):
        _check_prompts(name, body.get(name), 4 * max_model_len)
    num_parts = 0
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in ("content", "tool_calls"):
            parts = message.get(name) if isinstance(message, dict) else None
            num_parts += _check(f"messages.{i}.{name}", parts, MAX_PARTS)
    if num_parts > MAX_ALL_PARTS:
        raise RequestError(
            f"messages have {num_parts} content parts and tool calls, the limit is {MAX_ALL_PARTS}",
            param="messages",
        )


def _check_prompts(field: str, value: Any, max_ids: int) -> None:
    if not isinstance(value, list) or not value:
        return
    reason = ": 4 times the context, also where truncate_prompt_tokens keeps fewer"
    if isinstance(value[0], int):
        _check(field, value, max_ids, reason)
        return
    _check(field, value, MAX_PROMPTS)
    for i, prompt in enumerate(value):
        _check(f"{field}.{i}", prompt, max_ids, reason)


def _check(field: str, value: Any, limit: int, reason: str = "") -> int:
    """The number of items, 0 for what has none."""
    if not isinstance(value, list | dict):
        return 0
    if len(value) > limit:
        text = f"{field} has {len(value)} items, the limit is {limit}{reason}"
        raise RequestError(text, param=field)
    return len(value)
