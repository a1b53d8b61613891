"""The interface of a grammar library: compile in a worker process, load, match.

    source --compile--> bytes    in a worker process, which may be killed
    bytes  --load-----> Compiled in this process, in bounded time
    Compiled.matcher() > Matcher one a sequence

Runs on: any (pure).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

MAX_WHITESPACE = 20  # characters between two JSON tokens: a new line and ten levels of two spaces


class GrammarError(Exception):
    """The source is wrong, or the library cannot enforce it. The text is for the client."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]
    eos_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of an id."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of a tokenizer.

    Attributes:
        tokens: the bytes of each id; none for special tokens, which no text matches.
        size: of the model's logits; ids beyond `tokens` are never allowed.
        stop_ids: the ids that are allowed where the grammar may end.
        texts: the bytes of each id, special tokens included.
        encode: the tokenizer, where it is at hand.
    """

    tokens: tuple[bytes, ...]
    size: int
    stop_ids: tuple[int, ...]
    texts: tuple[bytes, ...] = ()
    encode: Callable[[str], list[int]] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """A tokenizer's, for a model with `size` logits."""
        texts = tuple(tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, size)))
        special = tokenizer.special_ids | tokenizer.eos_ids
        tokens = tuple(b"" if i in special else data for i, data in enumerate(texts))
        stop_ids = tuple(sorted(i for i in tokenizer.eos_ids if i < len(texts)))
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return cls(tokens, size, stop_ids, texts, encode)

    @cached_property
    def mask_words(self) -> int:
        """int32 words of a mask row: ceil(size / 32)."""
        return -(-self.size // 32)


class Matcher(Protocol):
    """Where one sequence stands in a grammar. Not safe for two threads at once."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and no change that counts, where the grammar forbids it."""

    def fill_mask(self, row: np.ndarray) -> bool:
        """Set bit t % 32 of word t // 32 where token t is allowed: int32 [mask_words].

        Returns False where the library gave up (its limits); the row then means nothing.
        """

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (of a rejected draft)."""

    @property
    def is_terminated(self) -> bool:
        """Whether the grammar has ended with a stop token."""


class Compiled(Protocol):
    """A grammar that is ready for this vocabulary. Immutable; shared by requests."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""

    def matcher(self) -> Matcher:
        """At the grammar's beginning."""

    def fill_masks(self, matchers: Sequence[Any], table: np.ndarray, rows: list[int]) -> list[bool]:
        """`fill_mask` of many matchers of this library at once, on several threads, GIL-free.

        Args:
            matchers: of any grammars that this library compiled.
            table: int32 [any, mask_words], C-contiguous; rows: the row of each matcher.
        """


class Backend(Protocol):
    """A grammar library, for one vocabulary."""

    name: str

    def compile(self, kind: str, source: str) -> bytes:
        """Compile; slow, and not to be trusted with hostile sources. Raises GrammarError."""

    def load(self, kind: str, source: str, data: bytes) -> Compiled:
        """What `compile` gave for this source, ready to use. Raises GrammarError."""
