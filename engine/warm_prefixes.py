"""Computes prompts out of a file, so that the requests that begin with them find them cached.

A line of the file is a JSON object with `prompt` (a text or token ids) or `messages` (of a chat
whose beginning it is), and may have `cache_salt` and `pin`: prefixes that are pinned higher are
evicted later, and any pinned one after all that are not.

Runs on: loop.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .api.chat import ChatMessage
from .api.errors import RequestError, StartError
from .api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine

AT_ONCE = 16


class Prefix(BaseModel):
    """One line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    cache_salt: str | None = None
    pin: int = Field(1, ge=0, le=1000)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("want either prompt or messages")
        return self


def read_prefixes(file: Path) -> list[tuple[str, Prefix]]:
    """The lines of a file, each with its place. Raises StartError."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--warm-prefixes {file}: {error}") from None
    prefixes = []
    for number, line in enumerate(lines, 1):
        place = f"--warm-prefixes {file}, line {number}"
        if not line.strip():
            continue
        try:
            prefixes.append((place, Prefix(**json.loads(line))))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            text = first["msg"].removeprefix("Value error, ")
            raise StartError(f"{place}: {name + ': ' if name else ''}{text}") from None
        except (ValueError, TypeError) as error:
            raise StartError(f"{place}: want a JSON object: {error}") from None
    return prefixes


async def warm(engine: AsyncEngine, prefixes: list[tuple[str, Prefix]]) -> None:
    """Compute prefixes; their whole pages stay cached. Raises StartError."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(place: str, prefix: Prefix) -> None:
        async with places:
            try:
                if prefix.messages is not None:
                    messages = [m.model_dump(exclude_none=True) for m in prefix.messages]
                    text = await engine.render(messages, add_generation_prompt=False)
                    tokens: Any = await engine.encode(text, add_special_tokens=False)
                elif isinstance(prefix.prompt, str):
                    tokens = await engine.encode(prefix.prompt)
                else:
                    tokens = prefix.prompt
                # The namespace of the HTTP API's cache_salt.
                namespace = ("salt", prefix.cache_salt) if prefix.cache_salt else ()
                params = SamplingParams(max_tokens=0)
                async for _ in engine.submit(tokens, params, namespace=namespace, pin=prefix.pin):
                    pass
            except RequestError as error:
                raise StartError(f"{place}: {error}") from None

    try:
        async with asyncio.TaskGroup() as group:
            for place, prefix in prefixes:
                group.create_task(one(place, prefix))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
