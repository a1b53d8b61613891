"""One choice of a request, as the scheduler sees it.

A request has its tokens and how many of them are computed; it is in no phase. Counters that every
step touches live in the scheduler's arrays, by slot; here is what outlives a slot.

Runs on: any (pure).
"""

from __future__ import annotations

from array import array

import numpy as np

from ..api.messages import Add, FinishReason, TokenLogprob
from .radix import Node
from .tiers import Prefetch

MASK64 = 2**64 - 1


class Request:
    """A choice of an `Add`.

    Attributes:
        tokens: prompt and known output, array('i'). prompt: int32 [prompt_len].
        max_tokens: of the Add, clamped to what the context and the pool can hold.
        limit: prompt_len + max_tokens, where it ends at the latest.
        seed: this choice's own, signed 64 bits.
        slot: 1 to max_running while it runs, 0 while it waits.
        node: the end of its prefix in the tree, locked while it runs.
        num_shared: tokens at its beginning whose pages belong to the tree; it owns the rest.
        num_cached: prompt tokens found in the cache at the first admission; -1 before it.
        place: where it stands in the queue (waiting.py).
        num_known: tokens that the cache held at the last match, though it may have to begin before
            their end.
        stops: lengths, rising, at which it is to leave what others need to go on there.
        snapshots: (length, row) of its recurrent state that are not in the tree yet (snapshots.py).
        kept: (index, page) of window pages that are to go to the tree (windows.py).
        num_prefilled_before: prompt tokens that the scheduler had computed when it came.
        num_charged: of its tokens, how many its client was charged for, or had for nothing.
        queue_s: seconds that it waited for its first admission.
        is_published: whether its prompt was put into the tree since its last admission.
        is_resumed: whether it was retracted before.
        is_loading: whether the host tier may hold more of its prefix, which is then copied first.
        prefetch: what it waits for from the stores, if anything.
        page_keys: content keys of its whole pages, as far as they were asked for.
        is_constrained: whether a grammar restricts its output.
        wants_logprobs: whether its facts carry log-probabilities of any kind.
        prompt_logprobs: by position, None where not known; None as a whole when not asked for or
            already sent.
        finish_reason: set once it has ended; "error" where a Refused ended it.
    """

    __slots__ = (
        "add",
        "choice",
        "finish_reason",
        "is_constrained",
        "is_loading",
        "is_published",
        "is_resumed",
        "kept",
        "limit",
        "max_tokens",
        "node",
        "num_cached",
        "num_charged",
        "num_known",
        "num_prefilled_before",
        "num_shared",
        "page_keys",
        "place",
        "prefetch",
        "prompt",
        "prompt_len",
        "prompt_logprobs",
        "queue_s",
        "request_id",
        "seed",
        "slot",
        "snapshots",
        "stop_token_ids",
        "stops",
        "tokens",
        "wants_logprobs",
    )

    def __init__(self, add: Add, choice: int, max_tokens: int):
        self.add = add
        self.request_id = add.request_id
        self.choice = choice
        self.tokens: array = array("i", add.prompt)
        self.prompt = np.frombuffer(add.prompt, np.int32)
        self.prompt_len = len(add.prompt)
        self.max_tokens = max_tokens
        self.limit = self.prompt_len + max_tokens
        self.stop_token_ids = add.stop_token_ids
        self.seed = derive_seed(add.seed, choice)
        self.slot = 0
        self.node: Node | None = None
        self.num_shared = 0
        self.num_cached = -1
        self.num_known = 0
        self.stops: list[int] = []
        self.snapshots: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []
        self.place: tuple[int, bool, int, int] = (0, False, 0, 0)
        self.num_prefilled_before = 0
        self.num_charged = 0
        self.queue_s = 0.0
        self.is_constrained = add.grammar is not None
        self.is_published = False
        self.is_resumed = False
        self.is_loading = False
        self.prefetch: Prefetch | None = None
        self.page_keys: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if add.params.prompt_logprobs is not None and choice == 0:
            self.prompt_logprobs = [None] * self.prompt_len
        self.wants_logprobs = add.params.logprobs is not None or self.prompt_logprobs is not None
        self.finish_reason: FinishReason | None = None

    def end_at(self, token: int) -> FinishReason | None:
        """Whether its last token is the end, and why."""
        length = len(self.tokens)
        if token in self.stop_token_ids and length - self.prompt_len >= self.add.params.min_tokens:
            return "stop"
        return "length" if length >= self.limit else None

    def known_tokens(self, start: int, end: int) -> np.ndarray:
        """A copy of the tokens [start, end), int32."""
        return np.array(self.tokens[start:end], np.int32)


def derive_seed(seed: int, choice: int) -> int:
    """The seed of a choice, signed 64 bits. Choice 0 keeps the seed.

    The others take the choice-th output of SplitMix64 (Steele, Lea, Flood 2014) begun at `seed`.
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
