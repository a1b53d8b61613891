"""Streamed text against the whole text, and stop strings against a naive search of it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.engine.text.detokenizer import Detokenizer
from stoker.engine.text.tokenizer import Tokenizer

# Bytes 0-255 as the first ids, then words, then a special token.
WORDS = ["ab", "abc", "b", " ", "  x", "é", "🎉", "END", "E", "ND\n"]
NUM_TEXT = 256 + len(WORDS)
SPECIAL = NUM_TEXT


def make_tokenizer(space_prefix: bool) -> Tokenizer:
    tokens = [*(f"<0x{b:02X}>" for b in range(256)), *(w.replace(" ", "▁") for w in WORDS), "<s>"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [6] * 256 + [1] * len(WORDS) + [3],
            "tokenizer.ggml.add_space_prefix": space_prefix,
            "tokenizer.ggml.bos_token_id": SPECIAL,
        }
    )


TOKENIZERS = {flag: make_tokenizer(flag) for flag in (False, True)}

any_id = st.one_of(
    st.integers(256, NUM_TEXT - 1),
    st.integers(0, 255),
    st.sampled_from([0xF0, 0x9F, 0x8E, 0x89, 0xC3, 0xA9, SPECIAL, SPECIAL + 1, 1 << 20]),
)
STOPS = ["ab", "abc", "bc", "b", "END", "\n", "é", "\ufffd", "x a", "abab", "🎉E"]
stops = st.lists(st.sampled_from(STOPS), max_size=3)


def cut(ids: list[int], lens: list[int]) -> list[list[int]]:
    chunks = []
    for n in lens:
        chunks.append(ids[:n])
        ids = ids[n:]
    return [*chunks, ids]


def naive_stop(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Read on until the text ends with a stop string."""
    for end in range(len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end if include else end - len(s)], s
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(any_id, max_size=24),
    lens=st.lists(st.integers(0, 5), max_size=8),
    stop=stops,
    include=st.booleans(),
    skip=st.booleans(),
    at_start=st.booleans(),
    space_prefix=st.booleans(),
)
@example([256, 258, 267], [1, 1], ["abc", "b"], False, True, False, False)
def test_stream_equals_whole(ids, lens, stop, include, skip, at_start, space_prefix):
    tokenizer, stop = TOKENIZERS[space_prefix], tuple(stop)
    whole = tokenizer.decode(ids, skip, at_start=at_start)
    expected, stopped = naive_stop(whole, stop, include)
    detokenizer = Detokenizer(tokenizer, stop, include, skip, at_start=at_start)
    pieces = []
    for chunk in cut(ids, lens):
        pieces.append(detokenizer.feed(chunk))
        # What is out is the beginning of the answer, and never a stop string or a part of one
        # that the answer does not have.
        assert expected.startswith("".join(pieces))
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == expected
    assert detokenizer.stopped == stopped
    assert detokenizer.flush() == ""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(any_id, min_size=1, max_size=24), stop=stops.filter(bool))
def test_counts_the_tokens_up_to_the_stop(ids, stop):
    """The count does not depend on the cut, and it is the least that holds the stop string."""
    tokenizer, stop = TOKENIZERS[False], tuple(stop)
    together = Detokenizer(tokenizer, stop)
    together.feed(ids)
    single = Detokenizer(tokenizer, stop)
    for token_id in ids:
        single.feed([token_id])
    assert together.num_tokens == single.num_tokens
    if together.stopped is None:
        assert together.num_tokens == len(ids)
    else:
        n = together.num_tokens
        before, last = Detokenizer(tokenizer, stop), Detokenizer(tokenizer, stop)
        before.feed(ids[: n - 1])
        last.feed(ids[:n])
        assert (before.stopped, last.stopped) == (None, together.stopped)


def test_a_character_comes_out_whole():
    detokenizer = Detokenizer(TOKENIZERS[False])
    assert [detokenizer.feed([b]) for b in "a🎉".encode()] == ["a", "", "", "", "🎉"]
    assert detokenizer.flush() == ""


def test_truncated_and_invalid_bytes():
    detokenizer = Detokenizer(TOKENIZERS[False])
    assert detokenizer.feed([0xF0, 0x9F]) == ""
    assert detokenizer.flush() == "\ufffd"  # one for the truncated character
    detokenizer = Detokenizer(TOKENIZERS[False])
    assert detokenizer.feed([0xF0, 0x9F]) == ""
    assert detokenizer.feed([ord("a")]) == "\ufffda"
    assert detokenizer.feed([0xFF, 0xC3, 0xA9]) == "\ufffdé"


def test_special_token_inside_a_character():
    """A skipped token is not there, so the bytes around it meet."""
    detokenizer = Detokenizer(TOKENIZERS[False])
    assert detokenizer.feed([0xC3, SPECIAL, 0xA9]) == "é"
    shown = Detokenizer(TOKENIZERS[False], skip_special_tokens=False)
    assert shown.feed([0xC3, SPECIAL, 0xA9]) + shown.flush() == "\ufffd<s>\ufffd"


def test_holds_back_what_may_become_a_stop_string():
    detokenizer = Detokenizer(TOKENIZERS[False], ("END", "\n\n"))
    assert detokenizer.feed([256]) == "ab"
    assert detokenizer.feed([264]) == ""  # E
    assert detokenizer.feed([264]) == "E"  # EE: the first cannot begin END any more
    assert detokenizer.feed([258]) == "Eb"
    assert detokenizer.feed([264, 265]) == ""  # E ND\n
    assert detokenizer.stopped == "END"
    assert detokenizer.num_tokens == 6
    assert detokenizer.feed([256]) == ""
    assert detokenizer.num_tokens == 6


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [
        (("abcd", "bc"), "a", "bc"),  # bc is complete first
        (("abcd", "abc"), "", "abc"),
        (("c", "bc", "abc"), "", "abc"),  # they end together: the longest
        (("d", "e"), "abc", "d"),
    ],
)
def test_the_stop_string_that_is_complete_first(stop, text, stopped):
    for chunks in ([[*b"abcde"]], [[b] for b in b"abcde"]):
        detokenizer = Detokenizer(TOKENIZERS[False], stop)
        assert "".join(map(detokenizer.feed, chunks)) + detokenizer.flush() == text
        assert detokenizer.stopped == stopped


def test_include_stop_keeps_it():
    detokenizer = Detokenizer(TOKENIZERS[False], ("ND",), include_stop=True)
    assert detokenizer.feed([256, 264, 265]) == "abEND"


def test_unfinished_stop_string_comes_out_at_the_end():
    detokenizer = Detokenizer(TOKENIZERS[False], ("ENDE",))
    assert detokenizer.feed([263]) == ""
    assert detokenizer.flush() == "END"


def test_first_space():
    """SentencePiece's first space belongs to a text's beginning, not to a continuation."""
    starts = Detokenizer(TOKENIZERS[True], at_start=True)
    assert [starts.feed([i]) for i in (SPECIAL, 259, 256, 259, 256)] == ["", "", "ab", " ", "ab"]
    continues = Detokenizer(TOKENIZERS[True])
    assert continues.feed([259, 256]) == " ab"


def test_many_long_stop_strings_stay_fast():
    """A text that is always about to match must not cost a scan of all lengths each token."""
    stop = tuple("a" * 1023 + chr(ord("b") + n) for n in range(32))
    detokenizer = Detokenizer(TOKENIZERS[False], stop)
    text = "".join(detokenizer.feed([ord("a")]) for _ in range(3000)) + detokenizer.flush()
    assert text == "a" * 3000
