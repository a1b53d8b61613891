"""How the tokens of one request are chosen and when they end.

Runs on: any (pure).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import RequestError
from .grammar import GrammarSpec

MAX_N = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
LIMITS = {  # both ends included, except top_p's 0, where it would keep nothing
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 2.0),
    "n": (1, MAX_N),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: dividing by it would overflow


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. The defaults sample from the plain distribution.

    Attributes:
        max_tokens: most tokens to generate; None means up to the context's end.
        min_tokens: end-of-sequence and stop tokens are masked before this many.
        temperature: 0 is greedy, up to 2.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        presence_penalty, frequency_penalty: over the output tokens, in [-2, 2].
        repetition_penalty: over prompt and output tokens (as transformers and vLLM), in
            [1e-6, 2].
        seed: the same seed gives the same tokens in any batch; None draws one.
        n: how many continuations of the one prompt, 1 to 128.
        stop: the text ends before the first of these strings.
        stop_token_ids: the output ends with the first of these tokens.
        include_stop_str_in_output: keep the stop string that ended the text.
        ignore_eos: end only at max_tokens (for benchmarks); stop_token_ids still hold.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: None for none, k for the chosen token's and the k likeliest tokens',
            of the model's own distribution (before penalties and temperature).
        prompt_logprobs: the same for the prompt's tokens. Such a request reads no prefix cache.
        logit_bias: token id to a value in [-100, 100] that is added to its logit.
        grammar: what the output must match. It ends with end of sequence, also under ignore_eos,
            and before min_tokens where the grammar allows nothing more.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: GrammarSpec | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError for the first field that is out of its limits."""
        if isinstance(self.stop, str):
            raise RequestError("stop must be a tuple of strings", param="stop")
        for name in ("max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise RequestError(f"{name} must be an integer, got {value!r:.80}", param=name)
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, low, high, open_low=name == "top_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1, 0 or positive, got {self.top_k}", param="top_k")
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**63)
            _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        else:
            _in_range("min_tokens", self.min_tokens, 0, 2**31)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}", param="stop"
            )
        if any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise RequestError(
                f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
            )
        for token in self.stop_token_ids:
            _token_id("stop_token_ids", token, vocab_size)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", token, vocab_size)
            _in_range("logit_bias", bias, -100.0, 100.0)


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


def _token_id(name: str, token: int, vocab_size: int) -> None:
    if type(token) is not int:
        raise RequestError(f"{name}: {token!r:.80} is no token id", param=name)
    if not 0 <= token < vocab_size:
        raise RequestError(
            f"{name}: token id {token} is outside the vocabulary of {vocab_size}", param=name
        )
