"""Server-sent events: the path that every streamed token takes.

A chunk is built from bytes made once a stream: only the new text is encoded. A client that reads
slowly gets fewer, larger chunks; one that falls too far behind is cut off. An idle stream gets
comments. The 200 goes out with the first event, so that what fails before it is a plain error.

A step's tokens come after milliseconds of idleness, when nothing of these streams is in the
processor's caches any more: what they cost is the memory that they touch. Hence the slots, and
plain attributes where closures and properties would do.

Runs on: loop.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import orjson
from aiohttp import HttpVersion11, web

from ..engine.api.errors import EngineError, Overloaded, StokerError
from ..engine.text.reader import Content
from .errors import note_failure, stoker_object
from .metrics import Meter
from .serving import Server, Work, check_end, run_all

if TYPE_CHECKING:
    from ..engine import Output, Stream

log = logging.getLogger(__name__)

BEHIND_BYTES = 32 << 10  # unsent bytes from which on a client counts as behind
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    """A JSON value as one event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class ChunkEncoder:
    """Outputs of one prompt as OpenAI chunks; counts what the usage needs as they pass.

    Attributes:
        num_output, num_reasoning: output tokens of each choice, while every chunk carries the
            usage; in any case at the end.

    Args:
        envelope: the fields that all chunks share; `choices` comes after them.
        first_index: the index of the prompt's choice 0.
        n: how many choices the prompt has.
        plain: the JSON of a choice that has nothing but one delta of this kind, with INDEX and
            TEXT to fill in; Content's also for text where there are no deltas.
        choices: the choices of any other output, a chunk each: (output, index, is_first).
        is_plain: whether outputs inside a choice have only text or deltas.
        usage: where every chunk carries the usage so far, this gives it.
    """

    __slots__ = (
        *("choices", "first_index", "has_begun", "head", "is_plain", "num_cached", "num_output"),
        *("num_reasoning", "parts", "plain", "usage"),
    )

    def __init__(
        self,
        envelope: dict[str, Any],
        first_index: int,
        n: int,
        plain: Mapping[type, bytes],
        choices: Callable[["Output", int, bool], list[dict[str, Any]]],
        *,
        is_plain: bool,
        usage: Callable[[], dict[str, Any]] | None = None,
    ):
        self.head = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self.first_index = first_index
        self.plain = plain
        # By choice, once it has begun and where it is plain: what is around a delta's text.
        self.parts: list[dict[type, list[bytes]]] = [{}] * n
        self.choices = choices
        self.is_plain = is_plain and usage is None
        self.usage = usage
        self.has_begun = [False] * n
        self.num_output = [0] * n
        self.num_reasoning = [0] * n
        self.num_cached = 0

    def __call__(self, output: "Output") -> bytes:
        """The events of one output; none where it brings nothing to show."""
        i = output.choice
        parts = self.parts[i]
        if parts and not output.finish_reason:
            deltas = output.deltas
            if not deltas:
                return orjson.dumps(output.text).join(parts[Content]) if output.text else b""
            if len(deltas) == 1 and (around := parts.get(type(deltas[0]))):
                return orjson.dumps(deltas[0].text).join(around)  # type: ignore[union-attr]
        index = self.first_index + i
        is_first = not self.has_begun[i]
        if is_first:
            self.has_begun[i] = True
            if self.is_plain:
                self.parts[i] = {kind: self._parts(t, index) for kind, t in self.plain.items()}
            if i == 0:
                self.num_cached = output.num_cached
        self.num_output[i] = output.num_output
        self.num_reasoning[i] = output.num_reasoning
        usage = b"" if self.usage is None else b',"usage":' + orjson.dumps(self.usage())
        return b"".join(
            self.head + orjson.dumps(choice) + b"]" + usage + b"}\n\n"
            for choice in self.choices(output, index, is_first)
        )

    def _parts(self, plain: bytes, index: int) -> list[bytes]:
        before, *others = plain.split(b"TEXT")
        before = self.head + before.replace(b"INDEX", b"%d" % index)
        return [before, *others[:-1], others[-1] + b"]}\n\n"]


class EventStream:
    """One streamed response. Use as a context manager: errors become the last event.

    Attributes:
        is_started: whether the 200 went out.
    """

    __slots__ = (
        *("_fd", "_transport", "is_chunked", "is_started", "last_write_s"),
        *("request", "response", "server", "work"),
    )

    def __init__(self, server: Server, request: web.Request, work: Work):
        self.server = server
        self.request = request
        self.work = work
        self.response = web.StreamResponse(headers=HEADERS)
        self.is_chunked = True
        self.is_started = False
        self._transport = request.transport
        self._fd = -1  # the socket's, where bytes may go to it directly
        self.last_write_s = time.perf_counter()

    async def __aenter__(self) -> Self:
        self.server.event_streams.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.server.event_streams.discard(self)
        if error is None or not self.is_started:
            return False
        cause = self.work.cause(error)
        if isinstance(cause, ConnectionError):
            self.server.metrics.disconnects += 1
            return True  # the client is gone, nobody is left to tell
        if not isinstance(cause, Exception):
            return False
        if isinstance(cause, Overloaded) and cause is error:
            self.server.note_overload(cause)
        if not isinstance(cause, StokerError):
            log.error("a stream failed", exc_info=cause)
            cause = EngineError("internal error")
        else:
            note_failure(cause, "a stream")
        with contextlib.suppress(ConnectionError):
            await self.finish(event(stoker_object(cause)) + DONE)
        return True

    async def start(self) -> None:
        """Send the headers."""
        try:
            await self.response.prepare(self.request)
        finally:
            self.is_started = self.response.prepared
        self.is_chunked = self.request.version >= HttpVersion11
        transport = self._transport
        if transport is not None and transport.get_extra_info("ssl_object") is None:
            self._fd = transport.get_extra_info("socket").fileno()
        self.last_write_s = time.perf_counter()

    def write(self, data: bytes) -> None:
        """Write whole events, without waiting for the client: aiohttp's own write would.

        Raises:
            ConnectionError: the client is gone.
        """
        if not data:
            return  # an empty chunk would end the response
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if self.is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._fd >= 0 and not transport.get_write_buffer_size():  # type: ignore[attr-defined]
            # A system call of ours frees the GIL, which the GPU thread wants; uvloop's does not.
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise ConnectionResetError("the client is gone") from error
        if data:
            transport.write(data)

    def unsent_bytes(self) -> int:
        """Bytes that the client's socket has not taken yet."""
        transport = self._transport
        return transport.get_write_buffer_size() if transport else 0  # type: ignore[attr-defined]

    async def finish(self, data: bytes = DONE) -> None:
        """Write the last events; a client that does not read them in time is cut off."""
        try:
            async with asyncio.timeout(self.server.config.stall_timeout_s):
                if not self.is_started:
                    await self.start()
                self.write(data)
                await self.response.write_eof()
        except TimeoutError:
            self.cut_off("the client did not read the end of its answer")

    async def pump_all(self, encoders: Sequence[Callable[["Output"], bytes]]) -> None:
        """Send the outputs of all prompts as they come, each through its encoder."""
        jobs = zip(self.work.streams, self.work.meters, encoders, strict=True)
        await run_all([self.pump(*job) for job in jobs])

    async def pump(
        self, stream: "Stream", meter: Meter, encode: Callable[["Output"], bytes]
    ) -> None:
        """Send one prompt's outputs as they come.

        Raises:
            Overloaded: the engine gave the request up.
            ConnectionError: the client went away, or was cut off because it reads too slowly.
        """
        # Until the headers are out, outputs are fetched; from then on they come by themselves.
        sender = _Sender(self, meter, encode)
        take = self.work.taker(sender.take)
        async for output in stream:
            take(output)
            await sender.start()
            if self.is_started:
                break
        await stream.forward(take)
        sender.catch_up()

    async def keep_alive(self) -> None:
        """Send a comment if the stream has been silent for long."""
        silent_s = time.perf_counter() - self.last_write_s
        if silent_s < self.server.config.keep_alive_s or self.unsent_bytes():
            return
        with contextlib.suppress(ConnectionError):  # the handler learns it by being cancelled
            if not self.is_started:
                await self.start()
            self.write(COMMENT)
            self.last_write_s += silent_s

    def cut_off(self, reason: str) -> NoReturn:
        """Close the connection, whatever is still to be sent."""
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]
        raise ConnectionAbortedError(reason)


class _Sender:
    """Sends the outputs of one prompt; on the hot path.

    Attributes:
        early: what came before the headers were sent.
        behind: by choice, what waits for the client to read.
    """

    __slots__ = ("behind", "early", "encode", "events", "meter")

    def __init__(self, events: EventStream, meter: Meter, encode: Callable[["Output"], bytes]):
        self.events = events
        self.meter = meter
        self.encode = encode
        self.early: list[Output] = []
        self.behind: dict[int, Output] = {}

    def take(self, output: "Output") -> None:
        """Send the next output, or keep it for later."""
        self.meter(output)
        if output.finish_reason:
            check_end(output)
        if self.events.is_started:
            self._send(output)
        else:
            self.early.append(output)

    async def start(self) -> None:
        """Send what came before the headers, and these first."""
        if self.early and not self.events.is_started:
            await self.events.start()
        for output in self.early:
            self._send(output)
        self.early.clear()

    def catch_up(self) -> None:
        """Send what was kept."""
        for output in self.behind.values():
            self.events.write(self.encode(output))
        self.behind.clear()

    def _send(self, output: "Output") -> None:
        events = self.events
        if events.unsent_bytes() > BEHIND_BYTES:
            self._keep(output)
            return
        events.last_write_s = self.meter.last_s[output.choice]
        if self.behind:
            before = self.behind.pop(output.choice, None)
            output = before.merged(output) if before else output
            self.catch_up()
        events.write(self.encode(output))

    def _keep(self, output: "Output") -> None:
        before = self.behind.get(output.choice)
        self.behind[output.choice] = before.merged(output) if before else output
        limit = self.events.server.config.max_tokens_behind
        if sum(len(kept.token_ids) for kept in self.behind.values()) > limit:
            self.events.cut_off(f"the client is more than {limit} tokens behind")
