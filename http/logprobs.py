"""Log-probabilities as OpenAI's chat and completions and vLLM's prompt_logprobs write them.

Runs on: loop.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.api.messages import TokenLogprob
from .openai_types import SamplingFields
from .serving import Choice, Server

if TYPE_CHECKING:
    from ..engine import Stream

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


def _clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def chosen_logprob(token: int, entry: TokenLogprob) -> float:
    """The token's value, bit for bit the one among the likeliest where it is there: clients
    compare the two with == to see whether it was the greedy choice."""
    if token in entry.top_token_ids:
        return _clamp(entry.top_logprobs[entry.top_token_ids.index(token)])
    return _clamp(entry.logprob)


def chat_logprobs(
    server: Server, tokens: Iterable[int], entries: Iterable[TokenLogprob]
) -> list[dict[str, Any]]:
    """Chat's `logprobs.content`. `bytes` come from the vocabulary, exact for cut characters."""
    token_bytes = server.engine.tokenizer.token_bytes

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    return [
        one(token, chosen_logprob(token, entry))
        | {
            "top_logprobs": [
                one(other, _clamp(value))
                for other, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ]
        }
        for token, entry in zip(tokens, entries, strict=True)
    ]


class LegacyLogprobs:
    """Completions' log-probabilities of one choice, with offsets that run on between chunks."""

    def __init__(self, server: Server, skip_special_tokens: bool):
        tokenizer = server.engine.tokenizer
        self.token_bytes = tokenizer.token_bytes
        self.hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0

    def take(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The next tokens' part: tokens, token_logprobs, top_logprobs, text_offset."""
        names: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(tokens, entries, strict=True):
            name = self._name(token)
            names.append(name)
            offsets.append(self.offset)
            if token not in self.hidden:
                self.offset += len(self.decoder.decode(self.token_bytes(token)))
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            value = chosen_logprob(token, entry)
            values.append(value)
            top: dict[str, float] = {}
            for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                top.setdefault(self._name(other), _clamp(logprob))
            top.setdefault(name, value)
            tops.append(top)
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # OpenAI's spelling of a token that is part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    server: Server, body: SamplingFields, stream: "Stream", choice: Choice
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token, the likeliest ones and itself, by token id.

    The rank of a token that is not among the likeliest is not known.
    """
    rows: list[dict[str, Any] | None] = []
    for token, entry in zip(stream.prompt_tokens, choice.prompt_logprobs or (), strict=True):
        if entry is None:
            rows.append(None)
            continue
        ranked = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        found: dict[int, tuple[float, int | None]] = {
            other: (value, rank)
            for rank, (other, value) in enumerate(ranked, 1)
            if rank <= (body.prompt_logprobs or 0)
        }
        found.setdefault(token, (entry.logprob, None))
        rows.append(
            {
                str(other): {
                    "logprob": _clamp(value),
                    "rank": rank,
                    "decoded_token": server.engine.tokenizer.token_str(other),
                }
                for other, (value, rank) in found.items()
            }
        )
    return rows
