"""What crosses between the loop and the GPU thread. Nothing mutable does.

Imperatives go to the engine, facts come back. A request is `(request_id, choice)`: the id counts
up in this process, the choice is 0 to n - 1. Token ids cross as `array('i')`, which numpy reads
without a copy.

Runs on: any (pure).
"""

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import StokerError
from .sampling_params import SamplingParams

FinishReason = str  # "stop" | "length" | "abort"


@dataclass(frozen=True, slots=True)
class Add:
    """Serve a prompt.

    Attributes:
        prompt: token ids, 1 to the context's length, each inside the vocabulary.
        max_tokens: resolved limit on new tokens: prompt + max_tokens fits the context.
            0 only computes the prompt (for its logprobs).
        stop_token_ids: the ids that end the output, end-of-sequence included unless ignored.
        seed: 64-bit; choice i derives its own from it.
        namespace: requests share cached prefixes only inside one namespace (adapter, salt, ...).
        priority: larger goes first.
        client: who asks (API key or user), for fairness between clients.
        pin: its prompt stays in the prefix cache longer than all that is pinned lower.
        grammar: compiled, immutable; None for free text. Opaque to the scheduler.
    """

    request_id: int
    prompt: array  # array('i')
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    arrival_s: float
    namespace: tuple[str, ...] = ()
    priority: int = 0
    client: str = ""
    pin: int = 0
    grammar: Any = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request, or one choice of it. Its computed prefix stays cached; no answer comes."""

    request_id: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the prefix cache, in host memory too; stores keep their pages. Answered by Flushed."""

    reply_id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the GPU thread after the step in flight."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position: the token's own, and the likeliest tokens'."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Tokens(NamedTuple):
    """New tokens of one choice. A NamedTuple, because one is made a stream and step.

    Attributes:
        token_ids: this step's tokens; may be empty in the last message.
        logprobs: one a token where asked for.
        finish_reason: set in the last message of the choice.
        stop_token_id: the token that ended it; it is the last of token_ids too.
        num_cached: prompt tokens that came out of the prefix cache.
        prompt_logprobs: with the first message where asked for; entry 0 is None.
        queue_s: seconds from the request's arrival to its first admission.
    """

    request_id: int
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The request, or one choice of it where `choice` says so, ends with this error."""

    request_id: int
    error: StokerError
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """The cache was emptied; `num_kept` tokens stayed because running requests use them."""

    reply_id: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """The prefix cache has changed.

    Attributes:
        kind: "stored" or "removed".
        keys: content keys of the pages (core/page_keys.py).
        parent: of stored pages, the key that the first of them follows.
        tokens: of stored pages, all their tokens, array("i").
        namespace: of stored pages.
    """

    kind: str
    keys: tuple[bytes, ...]
    parent: bytes = b""
    tokens: array | None = None
    namespace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of the cache tiers below the device: host memory, and stores behind it.

    Attributes:
        num_host_pages, num_host_used: pages that the host memory holds, and has in use.
        cached_tokens: by tier, prompt tokens that came out of it (all tiers' and the device's
            together are `Stats.cached_tokens`).
        saved_pages, unsaved_pages: copied to the host, and not copied for want of room there.
        loaded_pages: copied from the host to the device.
        fetched_pages, damaged_pages: read from a store, and dropped since they were not as written.
        put_pages, unput_pages: written to a store, and not written (full, slow or broken).
        evicted_pages: taken from the host memory.
        prefetch_timeouts: requests that went on before the stores had answered.
    """

    num_host_pages: int = 0
    num_host_used: int = 0
    cached_tokens: tuple[tuple[str, int], ...] = ()
    saved_pages: int = 0
    unsaved_pages: int = 0
    loaded_pages: int = 0
    fetched_pages: int = 0
    damaged_pages: int = 0
    put_pages: int = 0
    unput_pages: int = 0
    evicted_pages: int = 0
    prefetch_timeouts: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's figures after a step. Gauges first; counters run up since the start.

    Attributes:
        num_cached_pages: in the prefix cache; of them num_locked_pages are in use, so that they
            cannot be evicted. num_tree_nodes: its size.
        preemptions: retractions in favour of a request of higher priority.
        batch_tokens: tokens of the last step.
        received: requests (Add) that the scheduler has taken in.
        undone_steps: steps for which the device had no memory, planned anew and smaller.
        plan_s, launch_s, commit_s: the GPU thread's own work, wall time; of it, cpu_s is time
            on a processor: the rest is waiting for the GIL or for the host's scheduler.
        wait_s: time in which the GPU thread waited for the device, without the GIL; where the
            device is the thread itself (cpu), the launches.
        device_s: time in which the device worked on steps.
        mask_s: time in which the masks of constrained rows were filled, most of it while the
            device worked; num_masks: how many.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_locked_pages: int = 0
    num_tree_nodes: int = 0
    batch_tokens: int = 0
    received: int = 0
    steps: int = 0
    undone_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    commit_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    device_s: float = 0.0
    mask_s: float = 0.0
    num_masks: int = 0
    tiers: TierStats = TierStats()


Message = Add | Abort | Flush | Shutdown
Fact = Tokens | Refused | Flushed | CacheEvent
