"""A chat in the terminal, with a server over HTTP or with an engine in this process.

Runs on: loop.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import aiohttp
import orjson

from ..engine.api.errors import EngineError, RequestError, StartError, StokerError
from ..engine.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..engine import AsyncEngine

Message = dict[str, str]

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit leaves."


class Model(Protocol):
    """Whoever answers."""

    def reply(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer to a conversation, piece by piece. Raises StokerError."""
        ...


class RemoteModel:
    """A model behind a chat completions route.

    Args:
        url: base URL, with or without /v1.
        options: fields to add to each request.
    """

    def __init__(self, url: str, key: str | None, options: dict[str, Any]):
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.options = options
        self.session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )

    async def __aenter__(self) -> Self:
        """Raises StartError where no server answers, or it does not take the key."""
        url, wrong = self.url.removesuffix("/chat/completions") + "/models", ""
        try:
            async with self.session.get(url) as response:
                if response.status != 200:
                    wrong = _message(await response.read())
        except aiohttp.ClientError as error:
            wrong = str(error)
        if wrong:
            await self.session.close()
            raise StartError(f"{url}: {wrong}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def reply(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer, piece by piece."""
        body = {"messages": messages, "stream": True, **self.options}
        try:
            async with self.session.post(self.url, json=body) as response:
                if response.status != 200:
                    raise RequestError(_message(await response.read()))
                async for line in response.content:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    event = orjson.loads(line[5:])
                    if "error" in event:
                        raise EngineError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}: {error}") from None


class LocalModel:
    """An engine in this process. Raises StartError for a model without a chat template."""

    def __init__(self, engine: "AsyncEngine", options: dict[str, Any]):
        if engine.chat_template is None:
            raise StartError(
                f"{engine.model_name} has no chat template: use stoker generate, or --chat-template"
            )
        self.engine = engine
        self.params = SamplingParams(**{**engine.default_sampling, **options})

    async def reply(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer, piece by piece."""
        text = await self.engine.render([dict(message) for message in messages])
        tokens = await self.engine.encode(text, add_special_tokens=False)
        stream = self.engine.submit(tokens, self.params)
        try:
            async for output in stream:
                yield output.text
        finally:
            stream.abort()


def _message(raw: bytes) -> str:
    try:
        return str(orjson.loads(raw)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")


async def converse(model: Model, system: str | None = None) -> None:
    """Read questions and print answers until /exit or the end of the input.

    Ctrl-C ends the answer, not the chat.
    """
    messages = _fresh(system)
    print(HELP)
    loop = asyncio.get_running_loop()
    hint = partial(print, "\n(Ctrl-D or /exit leaves)\n> ", end="", flush=True)
    while True:
        loop.add_signal_handler(signal.SIGINT, hint)  # the thread that reads cannot be interrupted
        try:
            line = (await asyncio.to_thread(input, "> ")).strip()
        except EOFError:
            print()
            return
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/reset":
            messages = _fresh(system)
        elif command == "/system":
            system = rest or None
            messages = _fresh(system)
        elif command.startswith("/"):
            print(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = await _answer(model, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _fresh(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


async def _answer(model: Model, messages: list[Message]) -> str | None:
    """Print an answer as it comes; what was printed, or None where it failed."""
    pieces: list[str] = []

    async def show() -> None:
        async for piece in model.reply(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)

    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    task = asyncio.create_task(show())
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        print(" (stopped)", end="")
    except StokerError as error:
        print(f"error: {error}")
        return None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    took = time.perf_counter() - began
    print(f"\n[{len(pieces)} pieces, {len(pieces) / max(took, 1e-9):.1f} a second]")
    return "".join(pieces)
