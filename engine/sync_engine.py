"""The engine for plain code: blocking calls, batches, no event loop of one's own.

Runs on: any (pure).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .api.config import EngineConfig
from .api.errors import EngineError, Overloaded
from .api.messages import FinishReason, TokenLogprob
from .api.sampling_params import SamplingParams
from .async_engine import AsyncEngine, Stream

QUEUE_POLL_S = 0.02


@dataclass(slots=True)
class Completion:
    """One finished choice of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt: int = 0
    num_cached: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Engine:
    """A model in this process, also inside a notebook: its loop runs on a thread of its own.

    with Engine(model="smollm2-135m") as engine:
        for c in engine.generate(["Hello", "Good evening"], SamplingParams(max_tokens=16)):
            print(c.text)
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any):
        """Load the model. Raises StartError with one line that says what is wrong."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stoker-loop", daemon=True
        )
        self._thread.start()
        self._is_closed = False
        try:
            self.engine = self._wait(AsyncEngine.start(config, **options))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts (texts or token ids); n choices each, in order.

        Args:
            params: one for all, or one a prompt.
            progress: show a bar.

        Raises:
            RequestError: the first prompt that cannot be served; the others are aborted.
        """
        self._check_open()
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if batch and isinstance(batch[0], int):
            raise ValueError("prompts must be a list of prompts: [[1, 2, 3]], not [1, 2, 3]")
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or SamplingParams()] * len(batch)
        )
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(each)} sampling parameters")
        return self._wait(self._generate(batch, each, progress))

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Completion:
        """Answer a conversation, through the model's chat template."""
        self._check_open()

        async def run() -> Completion:
            text = await self.engine.render(
                messages, add_generation_prompt=True, **template_options
            )
            tokens = await self.engine.encode(text, add_special_tokens=False)
            return (await self._complete(tokens, params or SamplingParams()))[0]

        return self._wait(run())

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")

    def close(self) -> None:
        """Stop; no thread is left."""
        if not self._is_closed:
            self._is_closed = True
            self._wait(self.engine.close())
            self._stop_loop()

    async def _generate(
        self, prompts: list[Any], params: list[SamplingParams], progress: bool
    ) -> list[Completion]:
        from rich.progress import Progress

        with Progress(disable=not progress) as bar:
            task = bar.add_task("generate", total=len(prompts))
            most = max((p.n for p in params), default=1)
            window = asyncio.Semaphore(max(1, self.engine.config.max_queued_requests // most))

            async def one(prompt: Any, p: SamplingParams) -> list[Completion]:
                async with window:
                    done = await self._complete(prompt, p)
                bar.advance(task)
                return done

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(x, p)) for x, p in zip(prompts, params, strict=True)]
        return [c for t in tasks for c in t.result()]

    async def _complete(self, prompt: Any, params: SamplingParams) -> list[Completion]:
        done = [Completion() for _ in range(params.n)]
        tokens = await self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        async for out in await self._submit(tokens, params):
            c = done[out.choice]
            c.text += out.text
            c.token_ids += out.token_ids
            c.finish_reason, c.stop_reason = out.finish_reason, out.stop_reason
            c.num_prompt, c.num_cached = len(tokens), out.num_cached
            if out.logprobs is not None:
                c.logprobs = (c.logprobs or []) + list(out.logprobs)
            c.prompt_logprobs = c.prompt_logprobs or out.prompt_logprobs
        for c in done[1:]:  # the prompt is scored once
            c.prompt_logprobs = done[0].prompt_logprobs
        return done

    async def _submit(self, tokens: Sequence[int], params: SamplingParams) -> Stream:
        """Queue a prompt, as soon as the queue's limit in tokens lets it in."""
        spec = params.grammar
        grammar = None if spec is None else await self.engine.compile_grammar(spec)
        while True:
            try:
                return self.engine.submit(tokens, params, grammar=grammar)
            except Overloaded as error:
                if error.reason != "queue_full":
                    raise
            await asyncio.sleep(QUEUE_POLL_S)

    def _wait(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
