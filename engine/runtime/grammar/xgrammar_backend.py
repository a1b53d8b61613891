"""xgrammar: grammars compiled to token masks ahead, which a worker serializes for this process.

Only its native bindings are loaded. The Python package around them imports torch and transformers;
a compile worker must start fast, and a server needs no transformers.

Runs on: worker, pool, gpu.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .api import MAX_WHITESPACE, GrammarError, Vocabulary

RAW_BYTES = 0  # xgrammar's VocabType.RAW: the tokens' bytes as they are
CACHE_BYTES = 64 << 20  # rules of earlier grammars that a worker keeps
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


@cache
def _bindings() -> Any:
    found = importlib.util.find_spec("xgrammar")
    if found is None or not found.submodule_search_locations:
        raise ImportError("xgrammar is not installed")
    package = types.ModuleType("_stoker_xgrammar")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[package.__name__] = package
    importlib.import_module(f"{package.__name__}.load_binding")
    return importlib.import_module(f"{package.__name__}.tvm_ffi_binding._ffi_api")


@cache
def _filler() -> Any:
    return _bindings().BatchGrammarMatcher(max(1, min(16, (os.cpu_count() or 1) // 2)))


class XgrammarBackend:
    """Compiles and loads for one vocabulary."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary):
        self._core = _bindings()
        self._tokenizer = self._core.TokenizerInfo(
            list(vocabulary.tokens), RAW_BYTES, vocabulary.size, list(vocabulary.stop_ids), False
        )
        self._compiler: Any = None

    def compile(self, kind: str, source: str) -> bytes:
        """See api.Backend."""
        if self._compiler is None:
            self._compiler = self._core.GrammarCompiler(
                self._tokenizer, 1, True, CACHE_BYTES, False
            )
        try:
            if kind == "json_schema":
                compiled = self._compiler.compile_json_schema(
                    source, True, None, None, True, MAX_WHITESPACE, False
                )
            elif kind == "regex":
                compiled = self._compiler.compile_regex(source)
            elif kind == "ebnf":
                compiled = self._compiler.compile_grammar_from_strings(source, "root")
            else:
                compiled = self._compiler.compile_structural_tag(source)
        except (RuntimeError, ValueError, TypeError) as error:
            lines = [_SOURCE_LINE.sub("", line) for line in str(error).strip().splitlines()]
            raise GrammarError(lines[-1][:500] if lines else "no reason given") from None
        return compiled.serialize_json().encode()

    def load(self, kind: str, source: str, data: bytes) -> XgrammarCompiled:
        """See api.Backend."""
        try:
            handle = self._core.CompiledGrammar.deserialize_json(data.decode(), self._tokenizer)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(f"the compiled grammar cannot be loaded: {error}") from None
        return XgrammarCompiled(handle, handle.memory_size_bytes())


@dataclass(frozen=True, slots=True)
class XgrammarCompiled:
    """A compiled grammar with its masks."""

    handle: Any
    num_bytes: int

    def matcher(self) -> XgrammarMatcher:
        """See api.Compiled."""
        return XgrammarMatcher(_bindings().GrammarMatcher(self.handle, None, False, -1, None))

    def fill_masks(self, matchers: Sequence[Any], table: np.ndarray, rows: list[int]) -> list[bool]:
        """See api.Compiled."""
        _filler().batch_fill_next_token_bitmask([m.handle for m in matchers], table, rows, False)
        return [True] * len(rows)


@dataclass(frozen=True, slots=True)
class XgrammarMatcher:
    """One sequence's place in a grammar."""

    handle: Any

    def accept(self, token: int) -> bool:
        """See api.Matcher."""
        return self.handle.accept_token(token, False)

    def fill_mask(self, row: np.ndarray) -> bool:
        """See api.Matcher."""
        self.handle.fill_next_token_bitmask(row[None], 0, False)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See api.Matcher."""
        self.handle.rollback(num_tokens)

    @property
    def is_terminated(self) -> bool:
        """See api.Matcher."""
        return self.handle.is_terminated()
