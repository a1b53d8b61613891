"""The real asyncio facade over a pretended GPU thread: known tokens, known log-probabilities.

The "model" has one token a byte. It says ANSWER over and over, greedy from its start, sampled from
somewhere that depends on the seed and the choice, with end-of-sequence after each round.
"""

import asyncio
import time
from dataclasses import dataclass, replace

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stoker.engine.api.config import EngineConfig
from stoker.engine.api.messages import (
    Abort,
    Add,
    Flush,
    Flushed,
    Message,
    Refused,
    Stats,
    TokenLogprob,
    Tokens,
)
from stoker.engine.async_engine import AsyncEngine
from stoker.engine.text.chat_template import ChatTemplate
from stoker.engine.text.tokenizer import Tokenizer

ANSWER = "Rivers run to the sea, naïve 漢字 and 😀 too."
BOS, EOS = "<bos>", "<eos>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if thinking %}think{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and two special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    special = {"bos_token": BOS, "eos_token": EOS}
    return Tokenizer(backend, special_tokens=special, add_bos=True)


@dataclass
class Job:
    """A choice under way."""

    add: Add
    choice: int
    num_cached: int
    num_output: int = 0


class FakeGPU:
    """Stands where the GPU thread stands; `step` makes one token for each running choice."""

    def __init__(self, engine: "FakeEngine"):
        self.engine = engine
        self.inbox = self
        self.jobs: list[Job] = []
        self.seen: dict[tuple[str, ...], list[list[int]]] = {}
        self.adds: list[Add] = []
        self.aborts: list[Abort] = []
        self.stats = Stats(num_pages=1000, num_free_pages=1000)
        self.wake = asyncio.Event()
        self.lives = True
        self.heartbeat_lag_s = 0.0

    @property
    def heartbeat_s(self) -> float:
        return time.monotonic() - self.heartbeat_lag_s

    def is_alive(self) -> bool:
        return self.lives

    def join(self, timeout: float) -> None:
        self.lives = False

    def put(self, message: Message) -> None:
        if isinstance(message, Add):
            self.adds.append(message)
            self.stats = replace(self.stats, received=self.stats.received + 1)
            if self.engine.refusal is not None:
                fact = Refused(message.request_id, self.engine.refusal)
                asyncio.get_running_loop().call_soon(self.engine._deliver, [fact], self.stats)
                return
            cached = self._cached(message)
            self.jobs += [Job(message, i, cached) for i in range(message.params.n)]
            counters = {
                "prompt_tokens": self.stats.prompt_tokens + len(message.prompt),
                "cached_tokens": self.stats.cached_tokens + cached,
            }
            self.stats = replace(self.stats, **counters)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            self.jobs = [
                job
                for job in self.jobs
                if job.add.request_id != message.request_id
                or message.choice not in (None, job.choice)
            ]
        elif isinstance(message, Flush):
            self.seen.clear()
            fact = Flushed(message.reply_id, 0)
            asyncio.get_running_loop().call_soon(self.engine._deliver, [fact], self.stats)
        self.wake.set()

    def _cached(self, add: Add) -> int:
        """Longest prefix shared with an earlier prompt of the namespace, its last token apart."""
        prompt, best = list(add.prompt), 0
        for other in self.seen.setdefault(add.namespace, []):
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            best = max(best, same)
        self.seen[add.namespace].append(prompt)
        return 0 if add.params.prompt_logprobs is not None else min(best, len(prompt) - 1)

    async def run(self) -> None:
        while True:
            self.publish()
            if not self.jobs:
                self.wake.clear()
                await self.wake.wait()
            if not self.engine.paused.is_set():
                await self.engine.paused.wait()
            await asyncio.sleep(self.engine.step_s)
            self.step()

    def publish(self) -> None:
        """The stats of the moment, as the GPU thread posts them after a step."""
        running = min(len(self.jobs), self.engine.config.max_running_requests)
        waiting = self.jobs[running:]
        self.stats = replace(
            self.stats,
            steps=self.stats.steps + 1,
            num_running=running,
            num_waiting=len(waiting),
            num_waiting_tokens=sum(len(job.add.prompt) for job in waiting),
        )
        self.engine._deliver([], self.stats)

    def step(self) -> None:
        running = self.jobs[: self.engine.config.max_running_requests]
        facts = [self._token(job) for job in reversed(running)]  # choice 0 comes last
        ended = {
            id(job)
            for job, fact in zip(reversed(running), facts, strict=True)
            if fact.finish_reason
        }
        self.jobs = [job for job in self.jobs if id(job) not in ended]
        generated = self.stats.generated_tokens + sum(len(fact.token_ids) for fact in facts)
        self.stats = replace(self.stats, generated_tokens=generated)
        self.engine._deliver(facts, self.stats)

    def _token(self, job: Job) -> Tokens:
        add, params = job.add, job.add.params
        prompt_logprobs = None
        # As the engine: once a prompt, with choice 0.
        if (job.choice, job.num_output) == (0, 0) and params.prompt_logprobs is not None:
            rest = [self._logprob(token, params.prompt_logprobs) for token in add.prompt[1:]]
            prompt_logprobs = (None, *rest)
        if add.max_tokens == 0:
            return Tokens(
                add.request_id,
                job.choice,
                (),
                finish_reason="length",
                num_cached=job.num_cached,
                prompt_logprobs=prompt_logprobs,
            )
        token = self.engine.token_at(add, job.choice, job.num_output)
        job.num_output += 1
        is_stop = token in add.stop_token_ids and job.num_output > params.min_tokens
        finish = "stop" if is_stop else "length" if job.num_output >= add.max_tokens else None
        logprobs = None
        if params.logprobs is not None:
            logprobs = (self._logprob(token, params.logprobs),)
        return Tokens(
            add.request_id,
            job.choice,
            (token,),
            logprobs,
            finish,
            token if is_stop else None,
            job.num_cached,
            prompt_logprobs,
            self.engine.queue_s,
        )

    def _logprob(self, token: int, k: int) -> TokenLogprob:
        """The token is the likeliest; the k-th candidate has probability zero."""
        ids = tuple((token + i) % self.engine.vocab_size for i in range(k))
        values = [-0.1 - i for i in range(k)]
        if k > 2:
            values[-1] = float("-inf")
        return TokenLogprob(-0.1, ids, tuple(values))


class FakeEngine(AsyncEngine):
    """An AsyncEngine without a model.

    Attributes:
        step_s: time of a step.
        queue_s: what it says of each request's time in the queue.
        paused: cleared, no step is made.
        refusal: where set, every new request fails with it.
    """

    def __init__(self, config: EngineConfig | None = None, *, max_model_len: int = 4096):
        super().__init__(config or EngineConfig(model="fake"))
        self.tokenizer = byte_tokenizer()
        self.chat_template = ChatTemplate(TEMPLATE, self.tokenizer.special_tokens)
        self.model_name = "fake/model"
        self.max_model_len = max_model_len
        self.vocab_size = self.tokenizer.vocab_size
        self.default_sampling = {}
        self.start_phases = {"load": 0.0}
        self.step_s = 0.0
        self.queue_s = 0.0
        self.paused = asyncio.Event()
        self.paused.set()
        self.refusal: Exception | None = None
        self.sequence = [*self.tokenizer.encode(ANSWER, False), *self.tokenizer.eos_ids]
        self.gpu = self._thread = FakeGPU(self)  # type: ignore[assignment]
        self._task = asyncio.create_task(self.gpu.run())

    def token_at(self, add: Add, choice: int, index: int) -> int:
        """The model: the i-th output token of a choice."""
        begin = 0 if add.params.is_greedy else (add.seed + 7 * choice) % len(self.sequence)
        bias = add.params.logit_bias
        if bias and max(bias.values()) > 50:
            return max(bias, key=lambda token: bias[token])
        token = self.sequence[(begin + index) % len(self.sequence)]
        return token + 1 if bias.get(token, 0) < -50 else token

    async def close(self) -> None:
        self._task.cancel()
        await super().close()
