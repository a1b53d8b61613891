"""llguidance: grammars matched by derivatives, computed as they are needed, within fixed limits.

A worker only tries a grammar out: building it again here takes milliseconds, by then known.

Runs on: worker, pool, gpu.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .api import MAX_WHITESPACE, GrammarError, Vocabulary

SPECIAL = b"\xff"  # llguidance marks special tokens by this byte, which no UTF-8 has
BASE_BYTES = 1 << 20  # what a grammar's lexer grows to; llguidance does not tell


@cache
def _library() -> Any:
    import llguidance

    return llguidance


@cache
def _executor() -> Any:
    return _library().LLExecutor(max(1, min(16, (os.cpu_count() or 1) // 2)))


class _Tokens:
    """What llguidance asks of a tokenizer.

    It spells a text that is forced (`"name": `) as the tokenizer would, and allows no other way.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        padded = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self.special_token_ids = [i for i, data in enumerate(padded) if not data]
        self.tokens = [data or b"%b<%d>" % (SPECIAL, i) for i, data in enumerate(padded)]
        self._vocabulary = vocabulary
        self._ids = {data: i for i, data in enumerate(vocabulary.tokens) if data}
        self._longest = max(map(len, self._ids))

    def __call__(self, data: bytes | str) -> list[int]:
        data = data.encode() if isinstance(data, str) else data
        if self._vocabulary.encode is not None:
            ids = self._vocabulary.encode(data.decode("utf-8", "replace"))
            if b"".join([self.tokens[i] for i in ids]) == data:
                return ids
        ids, at = [], 0
        while at < len(data):  # the longest token first
            for length in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._ids.get(data[at : at + length])) is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                return ids
        return ids


class LlguidanceBackend:
    """Compiles and loads for one vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary):
        library = _library()
        self._size = vocabulary.size
        self._stop_ids = vocabulary.stop_ids
        self._tokenizer = library.LLTokenizer(
            library.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.stop_ids),
        )
        self._limits = library.LLParserLimits(verbose_errors=False)

    def compile(self, kind: str, source: str) -> bytes:
        """See api.Backend."""
        matcher = self._build(kind, source).matcher()
        matcher.fill_mask(np.zeros(-(-self._size // 32), np.int32))
        _raise_error(matcher.handle)
        return b""

    def load(self, kind: str, source: str, data: bytes) -> LlguidanceCompiled:
        """See api.Backend."""
        return self._build(kind, source)

    def _build(self, kind: str, source: str) -> LlguidanceCompiled:
        library = _library()
        try:
            if kind == "json_schema":
                spaces = rf"[ \n\t\r]{{0,{MAX_WHITESPACE}}}"
                grammar = library.LLMatcher.grammar_from_json_schema(
                    source, overrides={"whitespace_pattern": spaces}
                )
            elif kind == "regex":
                grammar = library.LLMatcher.grammar_from_regex(source)
            elif kind == "ebnf":
                grammar = library.grammar_from("ebnf", source)
            else:
                grammar = library.LLMatcher.grammar_from_lark(source)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)[:500]) from None
        handle = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _raise_error(handle)
        if warnings := handle.get_grammar_warnings():
            raise GrammarError(warnings[0][:500])
        return LlguidanceCompiled(handle, BASE_BYTES + 16 * len(grammar), self._stop_ids)


def _raise_error(handle: Any) -> None:
    if handle.is_error():
        raise GrammarError(handle.get_error().split("\n<")[0][:500])


@dataclass(frozen=True, slots=True)
class LlguidanceCompiled:
    """A grammar; `handle` stands at its beginning and is only ever copied."""

    handle: Any
    num_bytes: int
    stop_ids: tuple[int, ...]

    def matcher(self) -> LlguidanceMatcher:
        """See api.Compiled."""
        return LlguidanceMatcher(self.handle.deep_copy(), self.stop_ids)

    def fill_masks(self, matchers: Sequence[Any], table: np.ndarray, rows: list[int]) -> list[bool]:
        """See api.Compiled."""
        pairs = [(m.handle, row) for m, row in zip(matchers, rows, strict=True)]
        _executor().unsafe_compute_mask_ptr(
            pairs, table.ctypes.data, table.strides[0], table.shape[0]
        )
        return [not m.handle.is_error() for m in matchers]


class LlguidanceMatcher:
    """One sequence's place in a grammar."""

    __slots__ = ("_stop_ids", "handle", "is_terminated")

    def __init__(self, handle: Any, stop_ids: tuple[int, ...]):
        self.handle = handle
        self.is_terminated = False  # llguidance says so of a grammar that only could end
        self._stop_ids = stop_ids

    def accept(self, token: int) -> bool:
        """See api.Matcher."""
        if token not in self._stop_ids:  # a token that does not fit breaks what consume_token has
            return self.handle.try_consume_tokens([token]) == 1
        self.is_terminated = self.handle.consume_token(token)
        return self.is_terminated

    def fill_mask(self, row: np.ndarray) -> bool:
        """See api.Matcher."""
        self.handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return not self.handle.is_error()

    def rollback(self, num_tokens: int) -> None:
        """See api.Matcher."""
        if num_tokens:
            self.handle.rollback(num_tokens)
            self.is_terminated = False
