"""SmolLM2's vocabulary, compilers, and a sampler that draws random tokens through the masks."""

import asyncio
import inspect
import random

import numpy as np
import pytest

from stoker.engine.api.grammar import GrammarSpec
from stoker.engine.runtime.grammar.api import Vocabulary
from stoker.engine.runtime.grammar.compiler import GrammarCompiler
from stoker.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 500
HURRY_AFTER = 50  # tokens, from which on the sampler tries to come to an end


@pytest.fixture(scope="session")
def tokenizer(smollm2) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2.gguf.metadata)


@pytest.fixture(scope="session")
def vocabulary(tokenizer, smollm2) -> Vocabulary:
    return Vocabulary.of(tokenizer, smollm2.config.vocab_size)


@pytest.fixture(scope="session")
def compilers(vocabulary):
    made = {
        name: GrammarCompiler(vocabulary, name, timeout_s=20.0, num_workers=1)
        for name in ("xgrammar", "llguidance")
    }
    yield made
    for compiler in made.values():
        compiler.close()


def pytest_pyfunc_call(pyfuncitem):
    """Run async tests on a loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class RandomModel:
    """Draws tokens as from random logits at temperature 1, whose bias favours JSON's characters."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        weights = np.array([self._weight(data) for data in vocabulary.tokens])
        weights[list(vocabulary.stop_ids)] = 1e5
        draw = np.random.default_rng(0)
        p = weights / weights.sum()
        self._pool = draw.choice(len(weights), 1 << 17, p=p).tolist()
        closers = {b'"', b"}", b"]", b'"}', b'"]', b"}]", b"]}"}
        self._closers = [i for i, data in enumerate(vocabulary.tokens) if data in closers]
        rare = {b"@", b".", b'"'}  # what unquoted texts must pass before they can end
        self._hurried = np.array(
            [50 if data in rare else 1 / (1 + len(data)) ** 4 for data in vocabulary.tokens]
        )

    @staticmethod
    def _weight(data: bytes) -> float:
        text = data.decode("utf-8", "replace")
        if not text:
            return 0
        if all(c in '"{}[],:' for c in text):
            return 3000 / len(text)
        if all(c in "0123456789.-+eE" for c in text):
            return 300 / len(text)
        return 40 if len(text) == 1 else 20 if text.isspace() else 1

    def _choose(self, row: np.ndarray, num_tokens: int, draw: random.Random) -> int:
        def is_allowed(token: int) -> bool:
            return bool(int(row[token >> 5]) >> (token & 31) & 1)

        is_late = num_tokens > HURRY_AFTER
        if is_late and draw.random() < 0.5:
            for token in (*self.vocabulary.stop_ids, *draw.sample(self._closers, 3)):
                if is_allowed(token):
                    return token
        elif not is_late:
            at = draw.randrange(len(self._pool))
            for token in self._pool[at : at + 100]:
                if is_allowed(token):
                    return token
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(allowed), "the mask allows no token"
        if not is_late:
            return int(allowed[draw.randrange(len(allowed))])
        sums = np.cumsum(self._hurried[allowed])
        return int(allowed[np.searchsorted(sums, draw.random() * sums[-1])])

    def sample(self, matcher, seed: int) -> str | None:
        """A finished output's text; None where it got too long."""
        draw = random.Random(seed)
        row = np.zeros(self.vocabulary.mask_words, np.int32)
        data = b""
        for i in range(MAX_TOKENS):
            assert matcher.fill_mask(row)
            token = self._choose(row, i, draw)
            assert matcher.accept(token)
            if token in self.vocabulary.stop_ids:
                assert matcher.is_terminated
                return data.decode()
            data += self.vocabulary.tokens[token]
        return None


@pytest.fixture(scope="session")
def random_model(vocabulary) -> RandomModel:
    return RandomModel(vocabulary)


@pytest.fixture
def compiled(compilers):
    """Compile a source; equal ones once."""

    def run(kind: str, source: str, library: str = "xgrammar"):
        return compilers[library].submit(GrammarSpec(kind, source)).result()

    return run
