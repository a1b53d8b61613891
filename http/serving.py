"""What every route shares: who runs, who may come in, and how the work of a request ends.

Runs on: loop.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from aiohttp import StreamReader, web

from ..engine.api.errors import Overloaded, RequestError, StokerError
from ..engine.api.messages import TokenLogprob
from ..engine.api.sampling_params import SamplingParams
from .answers import Formats
from .errors import EngineStopped
from .limits import check_raw, check_sizes
from .metrics import Meter, Metrics
from .settings import ServerConfig
from .tracing import Tracer

if TYPE_CHECKING:
    from ..engine import AsyncEngine, Output, Stream
    from ..engine.text.answer import AnswerFormat
    from ..engine.text.reader import Delta
    from .sse import EventStream

    Taker = Callable[[Output], None]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_CHOICES = 1024  # of one HTTP request, over all its prompts
HEARTBEAT_LIMIT_S = 30.0
CLIENT_DIGITS = 12  # of an API key's digest: a client's name in --client-weights


@dataclass(slots=True)
class Caller:
    """What is known of a request before its body is read.

    Attributes:
        id: the client's X-Request-Id, or ours.
        key_digest: of the API key that it came with, where keys are needed.
        is_admin: it came with the admin key, or the server has no keys at all.
    """

    id: str
    arrival_s: float
    key_digest: str | None = None
    is_admin: bool = False


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


@dataclass(eq=False, slots=True)
class Work:
    """One HTTP request that the engine works for.

    Attributes:
        ids: the names under which it can be aborted.
        content: its body, as it comes.
        params: of all its prompts, once they are submitted.
        ended_by: why the server, not the client, ended it.
    """

    caller: Caller
    ids: set[str]
    task: asyncio.Task[Any]
    content: StreamReader
    streams: list["Stream"] = field(default_factory=list)
    meters: list[Meter] = field(default_factory=list)
    params: SamplingParams | None = None
    ended_by: StokerError | None = None

    def taker(self, take: "Taker") -> "Taker":
        """For the outputs of one prompt: every choice's first then has the prompt's logprobs."""
        params = self.params
        if params and params.n > 1 and params.prompt_logprobs is not None:
            return _share_prompt_logprobs(take)
        return take

    def end(self, error: StokerError) -> None:
        """Stop it: its client gets this error."""
        if self.ended_by is None:
            self.ended_by = error
            self.task.cancel()

    def cause(self, error: BaseException) -> BaseException:
        """What ended it: ours where `end` was called, else the error itself."""
        if isinstance(error, asyncio.CancelledError) and self.ended_by:
            self.task.uncancel()
            return self.ended_by
        return error


@dataclass(slots=True)
class Choice:
    """One continuation, so far."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    num_cached: int = 0
    num_output: int = 0
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    deltas: list["Delta"] = field(default_factory=list)
    num_reasoning: int = 0

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.pieces)

    def add(self, output: "Output") -> None:
        """Append what is new. Raises Overloaded where the engine gave up."""
        self.pieces.append(output.text)
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached = max(self.num_cached, output.num_cached)
        self.num_output = output.num_output
        if output.deltas:
            self.deltas.extend(output.deltas)
        if output.finish_reason:
            check_end(output)
            self.num_reasoning = output.num_reasoning
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class Server:
    """The engine and all that is in flight over HTTP."""

    def __init__(self, engine: "AsyncEngine", config: ServerConfig):
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_name or (engine.model_name,)
        self.formats = Formats(config, engine.chat_template)
        self.metrics = Metrics(self.model_names[0], lambda: engine.stats)
        self.tracer: Tracer | None = None
        if config.otlp_traces_endpoint:
            self.tracer = Tracer(config.otlp_traces_endpoint, self.model_names[0])
        self.works: set[Work] = set()
        self.event_streams: set[EventStream] = set()
        self.created = int(time.time())
        self.is_draining = False
        self.fatal: BaseException | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    def unready(self) -> str | None:
        """Why new work would be refused now, or None."""
        if not self.is_alive():
            return "engine_dead"
        if self.is_draining:
            return "draining"
        return "queue_full" if self.engine.full_queue() else None

    def is_alive(self) -> bool:
        """Whether the engine's thread still beats."""
        healthy = self.fatal is None and self.engine.is_healthy
        return healthy and self.engine.heartbeat_age_s < HEARTBEAT_LIMIT_S

    async def body(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object without its null fields: null means absent.

        Raises:
            RequestError: 400, 408 or 415 with what is wrong.
            web.HTTPRequestEntityTooLarge: the body is over the limit.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError("send the body without Content-Encoding", status=415)
        kind = request.content_type if "Content-Type" in request.headers else "application/json"
        if kind != "application/json" and not kind.endswith("+json"):
            raise RequestError(
                f"Content-Type must be application/json, got {kind[:128]}", status=415
            )
        limit = self.config.body_timeout_s
        size = request.content_length or 0
        if size > self.config.max_body_bytes:  # before it is read
            raise web.HTTPRequestEntityTooLarge(self.config.max_body_bytes, size)
        try:
            async with asyncio.timeout(limit):
                raw = await request.read()
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {limit} s", status=408) from None
        check_raw(raw, self.engine.max_model_len)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        check_sizes(body, self.engine.max_model_len)
        return {name: value for name, value in body.items() if value is not None}

    @contextlib.asynccontextmanager
    async def work(self, request: web.Request) -> AsyncIterator[Work]:
        """Admit a request; whatever ends it, nothing of it stays in the engine.

        Raises:
            Overloaded: the server drains, or too many wait.
        """
        self._admit()
        task = asyncio.current_task()
        assert task is not None
        caller = request[CALLER]
        work = Work(caller, {caller.id}, task, request.content)
        self.works.add(work)
        self.idle.clear()
        timer: asyncio.TimerHandle | None = None
        outcome = "abort"
        try:
            limit = self._time_limit(request)
            if limit is not None:
                late = RequestError(
                    f"the request took longer than {limit:g} s", code="timeout", status=504
                )
                timer = asyncio.get_running_loop().call_later(limit, work.end, late)
            yield work
        except asyncio.CancelledError as error:
            cause = work.cause(error)
            if cause is error:
                self.metrics.disconnects += 1
                raise
            raise cause from None
        except BaseException as error:
            outcome = "error"
            if isinstance(error, Overloaded):
                outcome = "overload"
                self.note_overload(error)
            raise
        finally:
            if timer:
                timer.cancel()
            if self.tracer is not None:
                is_whole = work.meters and not any(meter.unfinished for meter in work.meters)
                self.tracer.record(request, work, "ok" if is_whole else outcome)
            for stream, meter in zip(work.streams, work.meters, strict=True):
                if meter.unfinished:
                    stream.abort()
                    meter.close(outcome)
            self.works.remove(work)
            if not self.works:
                self.idle.set()

    def _time_limit(self, request: web.Request) -> float | None:
        """Seconds that it may take: the client may ask for less than the server's limit."""
        ours, text = self.config.request_timeout_s, request.headers.get("X-Request-Timeout")
        if text is None:
            return ours
        try:
            asked = float(text)
        except ValueError:
            asked = 0.0
        if not 0 < asked < math.inf:
            raise RequestError(f"X-Request-Timeout: want seconds above 0, got {text[:32]!r}")
        return asked if ours is None else min(asked, ours)

    def _admit(self) -> None:
        reason = self.unready()
        if reason is None:
            return
        if reason == "engine_dead":
            self.metrics.rejected[reason] += 1
            raise EngineStopped
        if reason == "draining":
            error = Overloaded("the server is shutting down", retry_after_s=5, reason=reason)
        else:
            error = Overloaded("too many requests are waiting", reason=reason)
        self.note_overload(error)
        raise error

    def note_overload(self, error: Overloaded) -> None:
        """Count a refusal, and say when the queue may be gone, by the rate at which choices end."""
        self.metrics.rejected[error.reason] += 1
        rate = self.metrics.finish_rate
        if error.reason in ("queue_full", "queue_timeout") and rate > 0:
            queued = self.engine.num_streams - self.config.max_running_requests
            error.retry_after_s = min(max(queued / rate, 1.0), 60.0)

    async def compile_grammar(self, params: SamplingParams) -> Any:
        """A request's grammar for `submit`, None without. Raises RequestError, Overloaded."""
        if params.grammar is None:
            return None
        began = time.perf_counter()
        try:
            return await self.engine.compile_grammar(params.grammar)
        finally:
            self.metrics.grammar.observe(time.perf_counter() - began)

    def submit(
        self,
        work: Work,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str | None = None,
        namespace: tuple[str, ...] = (),
        answer: "AnswerFormat | None" = None,
        grammar: Any = None,
    ) -> list["Stream"]:
        """Start all prompts of a request, or none.

        Args:
            user: whom --fair-clients counts it for, where there are no API keys.

        Raises:
            RequestError: a prompt is too long or empty, a parameter is out of its limits.
            Overloaded: the engine's queue is full.
        """
        count = len(prompts) * params.n
        if count > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with {params.n} choices each are more than {MAX_CHOICES}",
                param="n",
            )
        if self.config.isolate_cache_per_key and work.caller.key_digest:
            namespace = ("key", work.caller.key_digest, *namespace)
        digest = work.caller.key_digest
        client = (user or "") if digest is None else digest[:CLIENT_DIGITS]
        work.params = params
        for prompt in prompts:
            stream = self.engine.submit(
                prompt,
                params,
                priority=priority,
                client=client,
                namespace=namespace,
                answer=answer,
                grammar=grammar,
            )
            if self.config.log_prompts:
                log.info("prompt %r with %s", self.engine.tokenizer.decode(prompt, False), params)
            work.streams.append(stream)
            work.meters.append(Meter(self.metrics, work.caller.arrival_s, params.n))
            self.metrics.prompt_tokens.observe(len(prompt))
        self.metrics.prepare.observe(time.perf_counter() - work.caller.arrival_s)
        return work.streams

    def abort(self, caller: Caller, matches: str | None) -> int:
        """End the caller's works, an admin's are all, of this id or any. Returns how many."""
        found = [
            work
            for work in self.works
            if (matches is None or matches in work.ids)
            and (caller.is_admin or work.caller.key_digest == caller.key_digest)
        ]
        for work in found:
            work.end(RequestError("the request was aborted", code="aborted", status=409))
        return len(found)

    def end_all(self, *, only_unsent: bool = False) -> None:
        """End every work, or those whose clients still send, because the server goes down."""
        for work in self.works:
            if not (only_unsent and work.content.is_eof()):
                work.end(
                    Overloaded("the server is shutting down", retry_after_s=5, reason="draining")
                )

    async def finish(self, timeout_s: float) -> None:
        """Wait for the running works; those that take too long are ended. Followers go at once, as
        do requests that have not all arrived.
        """
        self.engine.cache_feed.close()
        self.end_all(only_unsent=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        self.end_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), 1.0)

    async def collect(self, work: Work) -> list[list[Choice]]:
        """Wait for all choices of all prompts: one list a prompt, ordered by choice."""
        pairs = zip(work.streams, work.meters, strict=True)
        return await run_all([_collect(work, *pair) for pair in pairs])

    async def tick(self) -> None:
        """Once a second for ever: keep-alive comments and the metrics of time."""
        while True:
            await asyncio.sleep(min(1.0, self.config.keep_alive_s / 4))
            self.metrics.tick()
            for events in tuple(self.event_streams):
                await events.keep_alive()


SERVER: web.AppKey[Server] = web.AppKey("server", Server)


async def run_all(jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines at once. The first error ends the others, and is raised as it is."""
    if len(jobs) == 1:
        return [await jobs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _collect(work: Work, stream: "Stream", meter: Meter) -> list[Choice]:
    choices = [Choice() for _ in meter.last_s]

    def take(output: "Output") -> None:
        meter(output)
        choices[output.choice].add(output)

    await stream.forward(work.taker(take))
    return choices


def _share_prompt_logprobs(take: "Taker") -> "Taker":
    """The engine gives them once, with choice 0: what others say before that is held back."""
    known: tuple[TokenLogprob | None, ...] | None = None
    held: list[Output] = []
    begun: set[int] = set()

    def share(output: "Output") -> None:
        nonlocal known
        if output.finish_reason == "abort":
            take(output)
            return
        known = known or output.prompt_logprobs
        held.append(output)
        if known is None:
            return
        for one in held:
            take(one if one.choice in begun else replace(one, prompt_logprobs=known))
            begun.add(one.choice)
        held.clear()

    return share


def check_end(output: "Output") -> None:
    """Raise where the engine gave the request up: an answer cut short is not an answer."""
    if output.finish_reason == "abort":
        raise Overloaded("the server aborted the request", reason="aborted")


def new_id(prefix: str) -> str:
    """A random id, as in chatcmpl-..."""
    return prefix + uuid.uuid4().hex
