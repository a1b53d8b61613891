"""The engine as asyncio sees it: submit a prompt, iterate over its output, abort by leaving.

Runs on: loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import random
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import compile_ahead
from .api.config import EngineConfig
from .api.errors import EngineError, Overloaded, RequestError, StartError
from .api.grammar import GrammarSpec
from .api.messages import (
    Abort,
    Add,
    CacheEvent,
    Fact,
    FinishReason,
    Flush,
    Flushed,
    Message,
    Refused,
    Shutdown,
    Stats,
    TokenLogprob,
    Tokens,
)
from .api.sampling_params import SamplingParams
from .cache_feed import CacheFeed
from .text.answer import AnswerDetokenizer, AnswerFormat
from .text.chat_template import ChatTemplate
from .text.detokenizer import Detokenizer
from .warm_prefixes import read_prefixes, warm

if TYPE_CHECKING:
    from .runtime.grammar.compiler import Grammar, GrammarCompiler
    from .text.reader import Delta
    from .text.tokenizer import Tokenizer

log = logging.getLogger("stoker")

POOL_THREADS = 4
SHUTDOWN_WAIT_S = 30.0
STUCK_WAIT_S = 1.0  # nothing is gained by waiting for a thread that is stuck
MAX_UNREAD = 4  # outputs of a stream that nobody has taken, from which on they are merged
MAX_MERGED = 64  # tokens of one Output
SPIN_COUNT = "2000"  # about 30 us


@dataclass(slots=True)  # not frozen: a token's takes 0.4 us to make instead of 2
class Output:
    """New output of one choice.

    Attributes:
        text: what is new and safe to show: whole characters, no part of a stop string.
        token_ids: what is new; the text of the last of them may still be held back.
        finish_reason: set once a choice, with its last output.
        stop_reason: the stop string or the token id that ended it, None for end of sequence.
        num_cached: prompt tokens that came out of the prefix cache.
        num_output: output tokens of this choice so far, the stop token included.
        prompt_logprobs: once, where asked for; the first prompt token's entry is None.
        queue_s: seconds that the request waited for its first step.
        deltas: with an AnswerFormat, what is new: content, reasoning, and calls of tools. `text` is
            of the content only.
        num_reasoning: output tokens so far that were reasoning.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_cached: int
    num_output: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    queue_s: float = 0.0
    deltas: tuple[Delta, ...] = ()
    num_reasoning: int = 0

    def merged(self, later: Output) -> Output:
        """With a later output of the same choice, as one: who reads slowly loses nothing."""
        both: dict[str, Any] = {
            "text": self.text + later.text,
            "token_ids": self.token_ids + later.token_ids,
            "prompt_logprobs": self.prompt_logprobs or later.prompt_logprobs,
            "deltas": self.deltas + later.deltas,
        }
        if self.logprobs is not None:
            both["logprobs"] = self.logprobs + (later.logprobs or ())
        return replace(later, **both)


class Stream:
    """The output of one request: an async iterator over Output, of all its choices as they come.

    Outputs that nobody takes in time are merged, so a loop that is behind does less for a token.
    Leaving the iteration early, or cancelling the task that iterates, aborts the request.
    """

    __slots__ = (
        *("_detokenizers", "_engine", "_error", "_includes_stop", "_outputs", "_request_id"),
        *("_taker", "_unseen", "_waiter", "prompt_tokens"),
    )

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: int,
        prompt: array,
        params: SamplingParams,
        answer: AnswerFormat | None = None,
    ):
        self.prompt_tokens = prompt
        self._engine = engine
        self._request_id = request_id
        self._includes_stop = params.include_stop_str_in_output
        options = params.stop, self._includes_stop, params.skip_special_tokens
        self._detokenizers = {
            i: Detokenizer(engine.tokenizer, *options)
            if answer is None
            else AnswerDetokenizer(engine.tokenizer, answer, *options)
            for i in range(params.n)
        }  # of the choices that still run
        self._unseen = [params.n, len(prompt)]  # see AsyncEngine
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[Output], object] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._detokenizers:
                raise StopAsyncIteration
            await self._wait()
        return self._outputs.popleft()

    async def forward(self, take: Callable[[Output], object]) -> None:
        """Call `take` with each output as it comes, until the last.

        As iterating, but no token costs a switch of tasks. What `take` raises ends it.
        """
        self._taker = take
        try:
            self._hand_over()
            while self._taker is not None:
                await self._wait()
        finally:
            self._taker = None
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = self._engine.loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop the request, if it still runs. What it computed stays in the prefix cache."""
        if self._detokenizers:
            self._detokenizers.clear()
            self._engine._abort(self._request_id)
        self._wake()

    async def aclose(self) -> None:
        """Same as abort, for contextlib.aclosing."""
        self.abort()

    def _take(self, fact: Tokens) -> None:
        """Turn tokens into text. Called by the engine, once a step at most."""
        _, choice, ids, logprobs, finish, stop_id, num_cached, prompt_logprobs, queue_s = fact
        detokenizer = self._detokenizers.get(choice)
        if detokenizer is None:
            return  # ended by a stop string, while the next step was already running
        stop_reason: str | int | None = stop_id
        num_before = detokenizer.num_tokens
        is_hidden_stop = stop_id is not None and not self._includes_stop
        text = detokenizer.feed(ids[:-1] if is_hidden_stop else ids)
        if detokenizer.stopped is not None:
            ids = ids[: detokenizer.num_tokens - num_before]
            logprobs = logprobs[: len(ids)] if logprobs else logprobs
            if finish is None:
                self._engine._abort(self._request_id, choice)
            finish, stop_reason = "stop", detokenizer.stopped or None
        elif finish is not None:
            if type(detokenizer) is AnswerDetokenizer:
                detokenizer.is_cut = finish == "length"
            text += detokenizer.flush()
        if finish is not None:
            if stop_reason in self._engine.tokenizer.eos_ids:
                stop_reason = None
            del self._detokenizers[choice]
            if not self._detokenizers:
                self._engine._forget(self._request_id)
        output = Output(
            choice,
            text,
            ids,
            logprobs,
            finish,
            stop_reason,
            num_cached,
            num_before + len(ids),
            prompt_logprobs,
            queue_s,
        )
        outputs = self._outputs
        if type(detokenizer) is AnswerDetokenizer:
            output.deltas = detokenizer.take_deltas()
            output.num_reasoning = detokenizer.num_reasoning
            outputs.append(output)
        elif (
            len(outputs) >= MAX_UNREAD
            and outputs[-1].choice == choice
            and len(outputs[-1].token_ids) < MAX_MERGED
        ):
            outputs[-1] = outputs[-1].merged(output)
        else:
            outputs.append(output)
        self._wake()

    def _hand_over(self) -> None:
        """Give the outputs to whom `forward` was told; wake it where this is the end."""
        take, outputs = self._taker, self._outputs
        if take is None:
            return
        try:
            while outputs:
                take(outputs.popleft())
        except Exception as error:
            self._error = error
        if self._error is not None or not self._detokenizers:
            self._taker = None
            self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._detokenizers:
            self._detokenizers.clear()
            self._engine._forget(self._request_id)
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None:
            self._engine._hand_over_soon(self)
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class AsyncEngine:
    """One model, served to this event loop.

        async with await AsyncEngine.start(EngineConfig(model="smollm2-135m")) as engine:
            async for out in engine.generate("Hello", SamplingParams(max_tokens=16)):
                print(out.text, end="")

    Attributes:
        model_name: what clients call the model.
        max_model_len: longest prompt + output, in tokens.
        default_sampling: what the model's generation_config.json recommends.
        cache_feed: what enters and leaves the prefix cache, with cache_events=True.
        on_fatal: called with the error when the GPU thread dies; the engine is lost then.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_name: str
    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, Any]
    start_phases: dict[str, float]

    def __init__(self, config: EngineConfig):
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.stats = Stats()
        self.cache_feed = CacheFeed()
        self.on_fatal: Callable[[BaseException], None] | None = None
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        # [choices, prompt tokens] of the requests that were sent, and which `stats` does not know.
        self._unseen: deque[list[int]] = deque()
        self._unseen_choices = 0
        self._num_seen = 0
        self._handing: list[Stream] = []  # which have news for who forwards them
        self._replies: dict[int, asyncio.Future[int]] = {}
        self._pool = ThreadPoolExecutor(
            min(POOL_THREADS, os.cpu_count() or 1), thread_name_prefix="stoker-pool"
        )
        self._death: BaseException | None = None
        self._is_draining = False
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._random = random.Random()
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> AsyncEngine:
        """Load a model and get ready.

        Args:
            config: or its fields as keyword arguments.
            progress: called as progress(phase, done, total) from other threads while files are
                fetched and weights are read.

        Raises:
            StartError: one line that says what is wrong.
        """
        engine = cls(config or EngineConfig.of(**options))
        file = engine.config.warm_prefixes
        try:
            prefixes = read_prefixes(Path(file)) if file is not None else []
            await engine._start(progress)
        except BaseException:
            engine._pool.shutdown(wait=False)
            raise
        try:
            await warm(engine, prefixes)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start(self, progress: Callable[[str, int, int], None] | None) -> None:
        # OpenMP's threads wait for each other hundreds of times a step. Long spinning is a
        # disaster where they have not all cores to themselves, as beside this very loop.
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        config, loop = self.config, self.loop
        ahead = compile_ahead.start(config)
        from .build import Builder, check_each_step  # torch comes in here, not with the module

        builder = Builder(config, progress, ahead)
        ready: asyncio.Future[None] = loop.create_future()

        def on_ready(error: BaseException | None) -> None:
            def settle() -> None:
                if not ready.cancelled():
                    ready.set_result(None) if error is None else ready.set_exception(error)

            loop.call_soon_threadsafe(settle)

        from .gpu_thread import GPUThread

        self._thread = GPUThread(
            builder.load,
            lambda facts, stats: self._call(self._deliver, facts, stats),
            on_ready,
            lambda error: self._call(self._die, error),
            overlap=False if config.disable_overlap else None,
            check=check_each_step(config),
            open_log=builder.open_step_log,
        )
        await loop.run_in_executor(self._pool, builder.find_files)
        self._thread.start()
        text = loop.run_in_executor(self._pool, builder.load_text)
        try:
            await ready
            self.tokenizer, self.chat_template = await text
        except (StartError, asyncio.CancelledError):
            if ahead is not None:
                ahead.stop()
            self._thread.inbox.put(Shutdown())
            # A thread that still loads would be torn down in the middle of it at exit.
            await asyncio.to_thread(self._thread.join, SHUTDOWN_WAIT_S)
            raise
        self.model_name = builder.model_name
        self.max_model_len = builder.max_model_len
        self.vocab_size = builder.vocab_size
        self.default_sampling = builder.default_sampling
        self.start_phases = builder.phases
        self._watchdog = asyncio.create_task(self._watch())

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- requests

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed in the pool.

        Raises:
            RequestError: the text is certainly longer than the context (seen before any work).
        """
        self._check_open()
        limit = self.tokenizer.max_chars(self.max_model_len)
        if len(text) > limit:
            raise RequestError(
                f"the prompt has {len(text)} characters, which is more than {self.max_model_len} "
                "tokens can hold",
                param="prompt",
                code="context_length_exceeded",
            )
        return await self.loop.run_in_executor(
            self._pool, self.tokenizer.encode, text, add_special_tokens
        )

    async def render(
        self, messages: list[dict[str, Any]], *, source: str | None = None, **options: Any
    ) -> str:
        """The chat template's text of some messages, rendered in the pool.

        Args:
            source: a template to use in place of the model's.
        """
        model_template = self.chat_template
        if model_template is None and source is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start with "
                "--chat-template FILE",
                param="messages",
            )

        def run() -> str:
            template = model_template
            if source is not None:
                template = ChatTemplate.of_request(source, self.tokenizer.special_tokens)
            assert template is not None
            return template.render(template.normalise_messages(messages), **options)

        return await self.loop.run_in_executor(self._pool, run)

    async def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """What `submit` takes for an output that must match, compiled in a process of its own.

        Raises:
            RequestError: the grammar is wrong, cannot be enforced, or takes too long to compile.
            Overloaded: too many grammars are being compiled.
        """
        self._check_open()
        grammars = self._grammars
        if grammars is None:
            grammars = await self.loop.run_in_executor(self._pool, self._make_compiler)
        # Others may wait for the same grammar: who leaves must not cancel it.
        compiled = await asyncio.shield(asyncio.wrap_future(grammars.submit(spec)))
        return grammars.bind(compiled, spec)

    def _make_compiler(self) -> GrammarCompiler:
        with self._grammars_lock:
            if self._grammars is not None:  # two requests came at once
                return self._grammars
            from .runtime.grammar.api import Vocabulary
            from .runtime.grammar.compiler import GrammarCompiler

            self._grammars = GrammarCompiler(
                Vocabulary.of(self.tokenizer, self.vocab_size),
                self.config.grammar_backend,
                timeout_s=self.config.grammar_timeout,
            )
            return self._grammars

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        grammar: Grammar | None = None,
        answer: AnswerFormat | None = None,
        priority: int = 0,
        client: str = "",
        namespace: tuple[str, ...] = (),
        pin: int = 0,
    ) -> Stream:
        """Queue a prompt of token ids.

        Args:
            grammar: compiled from params.grammar, where there is one.
            answer: how to read the text; the outputs then have deltas.
            pin: keeps the prompt's pages in the cache longer than all that is pinned lower.

        Raises:
            RequestError: a field is out of its limits, or the prompt is too long.
            Overloaded: the queue is full, or the engine drains.
            EngineError: the engine has stopped.
        """
        self._check_open()
        if self._is_draining:
            raise Overloaded("the server is shutting down", retry_after_s=5, reason="draining")
        if full := self.full_queue(len(prompt)):
            raise Overloaded(f"the queue is full ({full})", reason="queue_full")
        params.validate(self.vocab_size)
        tokens = self._checked_prompt(prompt)
        room = self.max_model_len - len(tokens)
        scores_only = params.max_tokens == 0
        if room < (0 if scores_only else 1):
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with at least one new token it must fit "
                f"the context of {self.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        max_tokens = min(room, room if params.max_tokens is None else params.max_tokens)
        if params.min_tokens > max_tokens:  # there is no room for so many
            params = replace(params, min_tokens=max_tokens)
        if grammar is not None:  # its masks hold min_tokens back; its end comes before them
            grammar = replace(grammar, min_tokens=params.min_tokens)
            params = replace(params, min_tokens=0)
        request_id = next(self._ids)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or grammar is not None:  # a grammar must be able to end
            stop_ids |= self.tokenizer.eos_ids
        add = Add(
            request_id,
            tokens,
            params,
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
            seed=params.seed if params.seed is not None else self._random.getrandbits(63),
            arrival_s=time.monotonic(),
            namespace=namespace,
            priority=priority,
            client=client,
            pin=pin,
            grammar=grammar,
        )
        stream = Stream(self, request_id, tokens, params, answer)
        self._streams[request_id] = stream
        self._unseen.append(stream._unseen)
        self._unseen_choices += params.n
        self._idle.clear()
        self._send(add)
        return stream

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        client: str = "",
        namespace: tuple[str, ...] = (),
    ) -> AsyncIterator[Output]:
        """Iterate over the output of a text or of token ids. Leaving the loop aborts."""
        tokens = await self.encode(prompt) if isinstance(prompt, str) else prompt
        params = params or SamplingParams()
        spec = params.grammar
        grammar = None if spec is None else await self.compile_grammar(spec)
        stream = self.submit(
            tokens,
            params,
            grammar=grammar,
            priority=priority,
            client=client,
            namespace=namespace,
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    def _checked_prompt(self, prompt: Sequence[int]) -> array:
        try:
            wide = np.asarray(prompt, np.int64)
        except (OverflowError, ValueError, TypeError):
            wide = np.array([-1])
        if wide.ndim != 1 or wide.size == 0:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        outside = (wide < 0) | (wide >= self.vocab_size)
        if outside.any():
            at = int(outside.argmax())
            raise RequestError(
                f"prompt: token id {prompt[at]} at position {at} is outside the vocabulary of "
                f"{self.vocab_size}",
                param="prompt",
            )
        return array("i", wide.astype(np.int32).tobytes())

    def _check_open(self) -> None:
        if self._death is not None or self._is_closed:
            raise EngineError("the engine has stopped")

    # -- control

    @property
    def is_healthy(self) -> bool:
        """Whether the GPU thread lives."""
        return self._death is None and self._thread.is_alive()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the GPU thread last began a step or looked at its inbox."""
        return time.monotonic() - self._thread.heartbeat_s

    @property
    def num_streams(self) -> int:
        """Requests that are waiting or running."""
        return len(self._streams)

    def full_queue(self, num_tokens: int = 1) -> str | None:
        """The limit that a prompt of so many tokens would pass in the queue, or None.

        What was sent since the latest step counts too. A queue that is empty takes any prompt.
        """
        config, stats = self.config, self.stats
        room = 0 if stats.num_waiting else config.max_running_requests - stats.num_running
        limit = config.max_queued_requests
        if stats.num_waiting + self._unseen_choices >= limit + room:
            return f"{limit} requests"
        if (most := config.max_queued_tokens) is not None:
            unseen = itertools.islice(self._unseen, room, None)  # those before begin at once
            queued = stats.num_waiting_tokens + sum(tokens for _, tokens in unseen)
            if queued and queued + num_tokens > most:
                return f"{most} tokens"
        return None

    async def flush_cache(self) -> int:
        """Empty the prefix cache; returns how many tokens stay, because requests use them."""
        self._check_open()
        reply_id = next(self._ids)
        reply = self._replies[reply_id] = self.loop.create_future()
        self._send(Flush(reply_id))
        return await reply

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False if some had to be aborted."""
        self._is_draining = True
        self.cache_feed.close()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for stream in list(self._streams.values()):
                stream._fail(EngineError("the server shut down before the request ended"))
            return False
        return True

    async def close(self) -> None:
        """Abort what still runs and end the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_draining = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        for request_id, stream in list(self._streams.items()):
            stream._fail(EngineError("the engine was closed"))
            self._send(Abort(request_id))
        self.cache_feed.close()
        self._send(Shutdown())
        wait_s = SHUTDOWN_WAIT_S if self._death is None else STUCK_WAIT_S
        await asyncio.to_thread(self._thread.join, wait_s)
        self._pool.shutdown(wait=False)
        if self._grammars is not None:
            self._grammars.close()

    # -- called by streams and by the GPU thread's messages

    def _send(self, message: Message) -> None:
        self._thread.inbox.put(message)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call something; the GPU thread uses this."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is gone, and nobody closed the engine
            self._thread.inbox.put(Shutdown())

    def _abort(self, request_id: int, choice: int | None = None) -> None:
        self._send(Abort(request_id, choice))
        if choice is None:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        if (stream := self._streams.pop(request_id, None)) is not None:
            self._see(stream._unseen)
        if not self._streams:
            self._idle.set()

    def _see(self, unseen: list[int]) -> None:
        """A request counts in `stats` from now on, or no longer at all."""
        self._unseen_choices -= unseen[0]
        unseen[:] = (0, 0)

    def _deliver(self, facts: list[Fact], stats: Stats) -> None:
        self.stats = stats
        while self._num_seen < stats.received:
            self._see(self._unseen.popleft())
            self._num_seen += 1
        streams = self._streams
        for fact in facts:
            if type(fact) is Tokens:
                if (stream := streams.get(fact.request_id)) is not None:
                    try:
                        stream._take(fact)
                    except Exception:  # the other streams' tokens must not be lost
                        log.exception("the output of request %d failed", fact.request_id)
                        self._abort(fact.request_id)
                        stream._fail(EngineError("the request's output could not be decoded"))
            elif type(fact) is Refused:
                if (stream := streams.get(fact.request_id)) is not None:
                    self._send(Abort(fact.request_id))  # its other choices
                    stream._fail(fact.error)
            elif type(fact) is CacheEvent:
                self.cache_feed.publish(fact)
            elif type(fact) is Flushed:
                reply = self._replies.pop(fact.reply_id)
                if not reply.done():  # whoever asked may have left
                    reply.set_result(fact.num_kept)

    def _hand_over_soon(self, stream: Stream) -> None:
        """Once what the loop has to do now is done: of a loop behind by steps, all at once."""
        if not self._handing:
            self.loop.call_soon(self._hand_over)
        self._handing.append(stream)

    def _hand_over(self) -> None:
        streams, self._handing = self._handing, []
        for stream in streams:
            stream._hand_over()

    def _die(self, error: BaseException) -> None:
        if self._death is not None:
            return
        log.critical("the engine is lost: %s", error or type(error).__name__, exc_info=error)
        self._death = error
        for stream in list(self._streams.values()):
            stream._fail(EngineError("the engine failed while it worked on this request"))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineError("the engine has stopped"))
        self._replies.clear()
        if self.on_fatal is not None:
            self.on_fatal(error)

    async def _watch(self) -> None:
        """Give the engine up when its GPU thread gets nowhere for long, and show where all stand.

        Time counts only as far as this loop runs, so that a paused process is not taken for stuck.
        """
        limit = self.config.watchdog_s
        interval = min(1.0, limit / 4)
        stuck_s, last = 0.0, self._thread.heartbeat_s
        while stuck_s < limit:
            await asyncio.sleep(interval)
            heartbeat = self._thread.heartbeat_s
            stuck_s = stuck_s + interval if heartbeat == last else 0.0
            last = heartbeat
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        self._die(EngineError(f"the GPU thread has been stuck for {limit:g} s"))
