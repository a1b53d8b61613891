# ruff: noqa: RUF001 (DeepSeek's markers)
"""The law of parsing: however an answer is cut into pieces, its deltas together say the same."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorded_answers import FAMILIES, LONG, SHORT, TOOLS, Answer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stoker.engine.text.answer import AnswerDetokenizer, AnswerFormat, AnswerParser
from stoker.engine.text.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format_of,
    tool_format_of,
)
from stoker.engine.text.reader import CallArguments, CallStart, Content, Reasoning
from stoker.engine.text.tokenizer import Tokenizer

PAIRS_UP_TO = 60  # characters: every two cuts
CUTS_UP_TO = 700  # characters: every cut
RANDOM_SPLITS = 1000
PYTHONIC = {"pythonic", "llama4-pythonic", "lfm2"}  # values that are not JSON arrive whole


def parser_of(answer: Answer) -> AnswerParser:
    reasoning = REASONING_FORMATS.get(answer.thinks)
    is_open = answer.is_open or bool(reasoning and reasoning.is_always_open)
    form = TOOL_FORMATS.get(answer.tools)
    tools = TOOLS if form else {}
    return AnswerParser(AnswerFormat(reasoning, is_open, form, tools, answer.single))


def said(answer: Answer, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of all deltas together."""
    parser = parser_of(answer)
    texts: dict[type, str] = {Content: "", Reasoning: ""}
    calls: list[list[str]] = []
    ids = set()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    for delta in deltas + parser.finish(answer.is_cut):
        if isinstance(delta, CallStart):
            assert delta.number == len(calls)
            assert delta.id not in ids
            ids.add(delta.id)
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            assert delta.number == len(calls) - 1, "calls are never interleaved"
            assert delta.text
            calls[-1][1] += delta.text
        else:
            assert delta.text
            texts[type(delta)] += delta.text
    return texts[Content], texts[Reasoning], [(name, text) for name, text in calls]


@pytest.mark.parametrize("answer", SHORT + LONG, ids=str)
def test_says_what_was_recorded(answer):
    content, reasoning, calls = said(answer, [answer.text])
    assert (content, reasoning) == (answer.content, answer.reasoning)
    assert [name for name, _ in calls] == [name for name, _ in answer.calls]
    for (_, text), (_, expected) in zip(calls, answer.calls, strict=True):
        assert (text if isinstance(expected, str) else json.loads(text)) == expected


@pytest.mark.parametrize("answer", SHORT, ids=str)
def test_every_split_of_short_answers(answer):
    text = answer.text
    whole = said(answer, [text])
    assert said(answer, list(text)) == whole
    assert len(text) <= CUTS_UP_TO
    for cut in range(1, len(text)):
        assert said(answer, [text[:cut], text[cut:]]) == whole, cut
    if len(text) <= PAIRS_UP_TO:
        for a, b in itertools.combinations(range(len(text) + 1), 2):
            assert said(answer, [text[:a], text[a:b], text[b:]]) == whole, (a, b)


@pytest.mark.parametrize("answer", LONG, ids=str)
def test_random_splits_of_long_answers(answer):
    text, draw = answer.text, random.Random(answer.tools)
    whole = said(answer, [text])
    assert said(answer, list(text)) == whole
    for _ in range(RANDOM_SPLITS):
        cuts = sorted(draw.sample(range(1, len(text)), draw.randint(1, 8)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert said(answer, pieces) == whole, cuts


@pytest.mark.parametrize("answer", [a for a in SHORT if a.tools], ids=str)
def test_cut_short_it_says_a_part_of_the_whole(answer):
    """What max_tokens cuts off takes nothing else with it; half a tag may stand at the end."""
    _, reasoning, calls = said(answer, [answer.text])
    for end in range(0, len(answer.text), 3):
        part = Answer(**{**vars(answer), "text": answer.text[:end], "is_cut": True})
        _, part_reasoning, part_calls = said(part, [part.text])
        texts = [(part_reasoning, reasoning)]
        for (name, text), (whole_name, whole_text) in zip(part_calls, calls, strict=False):
            assert name == whole_name
            texts.append((text, whole_text))
        assert len(part_calls) <= len(calls)
        for text, whole_text in texts:
            pairs = zip(text, whole_text, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert len(text) - common < len("<|tool_calls_section_begin|>"), (end, text)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - PYTHONIC))
def test_arguments_stream(family):
    """A text in the arguments arrives while the model writes it, not when it is complete."""
    parser, seen = parser_of(Answer(family, "", "")), ""
    text = FAMILIES[family]([("add_note", {"text": "é" * 500})])
    for end, char in enumerate(text, 1):
        seen += "".join(d.text for d in parser.feed(char) if isinstance(d, CallArguments))
        assert seen.count("é") == text.count("é", 0, end)
    assert json.loads(seen) == {"text": "é" * 500}


RUBBLE = r"""
{ } [ ] " ' \ , : ( ) = ; > a é 1 - null ```json ``` now get_weather city='x' functions.now:0
to=functions.now \u00e {"name":"now","arguments": {"city":"Os
""".split()


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_any_text_is_read_to_its_end(tools):
    """Rubble of a format's own markers: no error, no endless loop, nothing lost, and the law."""
    draw = random.Random(tools)
    for i in range(300):
        thinks = draw.choice(list(REASONING_FORMATS)) if i % 2 else ""
        markers = [*TOOL_FORMATS[tools].markers]
        markers += REASONING_FORMATS[thinks].markers if thinks else ()
        pieces = draw.choices([*RUBBLE, " ", "\n", "all\n", *4 * markers], k=draw.randint(1, 14))
        answer = Answer(tools, "", "".join(pieces), thinks=thinks, is_cut=i % 3 == 0)
        content, reasoning, calls = whole = said(answer, [answer.text])
        assert said(answer, pieces) == whole, answer.text
        assert said(answer, list(answer.text)) == whole, answer.text
        if not calls and not thinks and tools not in ("gpt-oss", "functionary"):
            assert (content, reasoning) == (answer.text, "")


# --- tokens ---

MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


def tokenizer_with(*special: str) -> Tokenizer:
    """A token a byte, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, special_tokens={})


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_special_tokens_of_the_format_are_seen_and_no_others(size):
    tokenizer = tokenizer_with("<|pad|>", *MARKERS)
    form = AnswerFormat(None, False, TOOL_FORMATS["deepseek-v3.1"], TOOLS)
    section, begin, sep, end = MARKERS
    text = f'Só<|pad|>:{section}{begin}now{sep}{{"é": "🎉"}}{end}'
    ids = tokenizer.encode(text, False)
    detokenizer = AnswerDetokenizer(tokenizer, form)
    content = "".join(detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size))
    content += detokenizer.flush()
    deltas = detokenizer.take_deltas()
    assert content == "".join(d.text for d in deltas if isinstance(d, Content)) == "Só:"
    assert [d.name for d in deltas if isinstance(d, CallStart)] == ["now"]
    assert "".join(d.text for d in deltas if isinstance(d, CallArguments)) == '{"é": "🎉"}'
    assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("stop", "include", "content", "num_tokens"),
    [
        ("END", False, "Yes. ", 24),
        ("END", True, "Yes. END", 24),
        ("hm", False, "Yes. END no EN", 30),  # only in the reasoning: not seen
        ("no E", False, "Yes. END ", 29),
    ],
)
def test_stop_strings_hold_for_content(size, stop, include, content, num_tokens):
    tokenizer = tokenizer_with()
    ids = tokenizer.encode("<think>hm</think>Yes. END no EN", False)
    form = AnswerFormat(REASONING_FORMATS["qwen3"])
    detokenizer = AnswerDetokenizer(tokenizer, form, (stop,), include)
    shown = "".join(detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size))
    shown += detokenizer.flush()
    assert shown == content
    assert detokenizer.num_tokens == num_tokens + 1
    assert detokenizer.stopped == (stop if num_tokens < 30 else None)
    assert detokenizer.num_reasoning == len(">hm</think>")
    assert [d.text for d in detokenizer.take_deltas() if isinstance(d, Reasoning)]


def test_formats_are_told_by_their_templates():
    for name, form in TOOL_FORMATS.items():
        if form.signs:
            assert tool_format_of(["{% if tools %}" + " ".join(form.signs)]) == name
    assert tool_format_of(["{{ messages }}"]) is None
    assert reasoning_format_of(["{{ messages }}"]) is None
    assert reasoning_format_of(["{{ '<think>' }}"]) == "qwen3"
    assert reasoning_format_of(["x</think>"]) == "qwen3"
    assert reasoning_format_of(["[THINK]"]) == "magistral"
    assert reasoning_format_of(["<|channel|>analysis<|message|>"]) == "gpt-oss"
    assert reasoning_format_of(["<think> <|tool_calls_section_begin|>"]) == "kimi-k2"


def test_no_text_of_a_format_begins_another():
    for form in TOOL_FORMATS.values():
        for a, b in itertools.permutations(set(form.markers), 2):
            begins = getattr(form.syntax, "begins", ())
            assert not (a in begins and b in begins and b.startswith(a))
