"""What the simulator serves: requests out of a trace, or drawn from laws.

A trace has one JSON object a line:

    {"arrival_s": 0.5, "prompt_len": 1000, "prefix_ids": [7, 8], "output_len": 120}

`prefix_ids` name blocks of tokens: prompts whose lists begin alike begin with the same tokens.
What of `prompt_len` the blocks do not fill is the request's own. Instead of these two,
`prompt_tokens` gives the ids themselves, and instead of `output_len`, `output_tokens` those of the
answer, so that a later turn finds it in the cache. `max_tokens` is the limit that the client asks
for (the answer's length by default); `priority`, `client` and `namespace` (a list) are passed on.
The names of the Mooncake traces are read too: `timestamp` (milliseconds), `input_length`,
`output_length`, `hash_ids`. Other fields are ignored.

Runs on: any (pure).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .api.errors import StartError

BLOCK_SIZE = 512  # tokens that a prefix id stands for, as in the Mooncake traces
STOP = 2**30  # the token that ends an answer before its limit; ids made here are smaller
OWN = 2**40  # block ids from here on are a request's own

_ALIASES = {
    "input_length": "prompt_len",
    "output_length": "output_len",
    "hash_ids": "prefix_ids",
}
_OPTIONS = {"priority": int, "client": str, "namespace": list}
_LAWS = "a number, uniform:LOW:HIGH, normal:MEAN:STD, lognormal:MEDIAN:SIGMA, exponential:MEAN"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, without its tokens, which are made when they are needed.

    Attributes:
        arrival_s: when the client sends it; unused in a closed loop.
        prompt_len, output_len: tokens.
        max_tokens: the limit that the client asks for, at least output_len.
        prefix_ids: blocks of `block_size` tokens at the prompt's beginning.
        prompt, output: the tokens themselves, where known.
        options: further fields of its Add.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    max_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_size: int = BLOCK_SIZE
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def prompt_tokens(self, index: int) -> np.ndarray:
        """int32 [prompt_len]; `index` makes what the prefix does not fill its own."""
        if self.prompt:
            return np.array(self.prompt, np.int32)
        blocks = np.array([*self.prefix_ids, OWN + index], np.uint64)
        sizes = np.array([self.block_size] * len(self.prefix_ids) + [self.prompt_len])
        offsets = np.concatenate([np.arange(size) for size in sizes])[: self.prompt_len]
        return made_tokens(np.repeat(blocks, sizes)[: self.prompt_len], offsets)


def made_tokens(block: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Token ids below STOP for places in blocks, int32: two rounds of SplitMix64's finisher."""
    z = block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offset.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return (z >> np.uint64(34)).astype(np.int32)


# ---- traces ----------------------------------------------------------------------------------


def read_trace(
    path: Path, *, block_size: int = BLOCK_SIZE, max_tokens: int | None = None
) -> list[LoadRequest]:
    """The requests of a trace, by arrival.

    Args:
        max_tokens: the limit that requests without one ask for.

    Raises:
        StartError: the file cannot be read, or a line is wrong; it names line and field.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_parse(json.loads(line), block_size, max_tokens))
        except ValueError as error:
            raise StartError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise StartError(f"{path}: the trace has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse(row: Any, block_size: int, max_tokens: int | None) -> LoadRequest:
    if not isinstance(row, dict):
        raise ValueError(f"want an object, got {row!r:.40}")
    row = {_ALIASES.get(name, name): value for name, value in row.items()}
    if "timestamp" in row and "arrival_s" not in row:
        row["arrival_s"] = _number(row.pop("timestamp"), "timestamp") / 1e3
    arrival_s = _number(row.pop("arrival_s", None), "arrival_s")
    prompt = _ids(row.pop("prompt_tokens", []), "prompt_tokens", STOP)
    output = _ids(row.pop("output_tokens", []), "output_tokens", STOP)
    prefix = _ids(row.pop("prefix_ids", []), "prefix_ids", OWN)
    if prompt and prefix:
        raise ValueError("prefix_ids: the prompt is given by prompt_tokens already")
    prompt_len = _count(row.pop("prompt_len", len(prompt) or None), "prompt_len")
    output_len = _count(row.pop("output_len", len(output) or None), "output_len")
    if prompt and prompt_len != len(prompt):
        raise ValueError(f"prompt_len: {prompt_len}, but there are {len(prompt)} prompt_tokens")
    if output and output_len != len(output):
        raise ValueError(f"output_len: {output_len}, but there are {len(output)} output_tokens")
    limit = _count(row.pop("max_tokens", max(output_len, max_tokens or 0)), "max_tokens")
    if limit < output_len:
        raise ValueError(f"max_tokens: {limit} is less than output_len {output_len}")
    options = {name: row[name] for name in _OPTIONS if name in row}
    for name, value in options.items():
        if type(value) is not _OPTIONS[name]:
            raise ValueError(f"{name}: want a {_OPTIONS[name].__name__}, got {value!r:.40}")
    if "namespace" in options:
        options["namespace"] = tuple(map(str, options["namespace"]))
    return LoadRequest(
        arrival_s, prompt_len, output_len, limit, prefix, block_size, prompt, output, options
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: want a number of 0 or more, got {value!r:.40}")
    return float(value)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"{name}: want a positive integer, got {value!r:.40}")
    return value


def _ids(value: Any, name: str, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item < limit for item in value
    ):
        raise ValueError(f"{name}: want a list of integers from 0 to {limit - 1}")
    return tuple(value)


# ---- laws ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts or answers are; `parse` reads the law."""

    law: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, `uniform:100:900`, `normal:512:128`, `lognormal:400:0.8` or `exponential:300`.

        Raises:
            ValueError: it is none of these.
        """
        law, _, rest = text.rpartition("constant:")[2].partition(":")
        numbers = rest.split(":") if rest else []
        if not numbers:
            law, numbers = "constant", [law]
        wanted = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
        try:
            values = tuple(map(float, numbers))
        except ValueError:
            values = ()
        if len(values) != wanted.get(law) or not all(0 <= v < 2**31 for v in values):
            raise ValueError(f"want {_LAWS}; got {text!r}")
        return cls(law, values)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n lengths of at least 1, int64 [n]."""
        a, b = (*self.values, 0.0)[:2]
        laws: dict[str, Callable[[], np.ndarray]] = {
            "constant": lambda: np.full(n, a),
            "uniform": lambda: rng.uniform(a, b, n),
            "normal": lambda: rng.normal(a, b, n),
            "lognormal": lambda: a * np.exp(rng.normal(0.0, b, n)),
            "exponential": lambda: rng.exponential(a, n),
        }
        return np.clip(np.rint(laws[self.law]()), 1, 2**31 - 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Requests drawn from laws; the same seed draws the same ones.

    Attributes:
        rate: arrivals a second; None where all arrive at once, or a closed loop sends them.
        burstiness: shape of the gamma law of the times between arrivals: 1 is Poisson, less comes
            in bursts, infinity is a clock.
        prompt_len, output_len: lengths; the shared prefix comes before the prompt.
        prefix_len, num_prefixes: tokens of each shared prefix, and how many there are to draw from.
        max_tokens: the limit that clients ask for; the answer's length by default.
    """

    num_requests: int
    prompt_len: Lengths
    output_len: Lengths
    rate: float | None = None
    burstiness: float = 1.0
    prefix_len: int = 0
    num_prefixes: int = 1
    max_tokens: int | None = None

    def requests(self, seed: int) -> list[LoadRequest]:
        """Draw them all, by arrival."""
        rng = np.random.default_rng(seed)
        n = self.num_requests
        arrivals = np.zeros(n)
        if self.rate is not None:
            gaps = np.full(n, 1 / self.rate)
            if self.burstiness < math.inf:
                gaps = rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), n)
            arrivals = np.cumsum(gaps) - gaps[0]
        prompts, outputs = self.prompt_len.draw(rng, n), self.output_len.draw(rng, n)
        prefixes = rng.integers(0, self.num_prefixes, n)
        return list(self._requests(arrivals, prompts, outputs, prefixes))

    def _requests(self, *columns: np.ndarray) -> Iterator[LoadRequest]:
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for arrival_s, prompt_len, output_len, prefix in rows:
            yield LoadRequest(
                arrival_s,
                self.prefix_len + prompt_len,
                output_len,
                max(output_len, self.max_tokens or 0),
                (prefix,) if self.prefix_len else (),
                self.prefix_len or BLOCK_SIZE,
            )
