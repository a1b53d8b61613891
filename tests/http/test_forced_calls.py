"""What the grammars of forced calls allow, the parser of the same format reads."""

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.runtime.grammar.api import Vocabulary
from stoker.engine.runtime.grammar.compiler import GrammarCompiler
from stoker.engine.text.answer import AnswerFormat, AnswerParser
from stoker.engine.text.formats import TOOL_FORMATS
from stoker.engine.text.reader import CallArguments, CallStart, Content
from stoker.engine.text.tokenizer import Tokenizer
from stoker.http.answers import Formats, structured
from stoker.http.openai_types import ChatRequest
from stoker.http.settings import load_config

# As in the families' own vocabularies, some markers are special tokens, and some are text.
SPECIAL = """<eos> <|channel|> <|message|> <|constrain|> <|end|> <|start|> [TOOL_CALLS] [ARGS]
<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>
<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
<|tool_calls_section_end|> <|tool_call|> <|START_ACTION|> <|END_ACTION|>""".split()  # noqa: RUF001
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Zürich"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "ok": {"type": "boolean"},
        },
        "required": ["text", "n", "ok"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FORCED = [name for name, form in TOOL_FORMATS.items() if form.forced]


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(
        Vocabulary.of(tokenizer, tokenizer.vocab_size), "auto", timeout_s=60, num_workers=1
    )
    yield compiler
    compiler.close()


def grammar_of(compiler, tokenizer, name, **fields):
    """A format's grammar for a request, and a parser."""
    tools = [
        {"type": "function", "function": {"name": n, "parameters": p}} for n, p in TOOLS.items()
    ]
    messages = [{"role": "user", "content": "x"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": tools, **fields})
    formats = Formats(load_config({"tool_call_parser": name, "reasoning_parser": "none"}), None)
    answer = formats.of(body, "")
    assert answer.tool_format is TOOL_FORMATS[name]  # its own, not the fallback
    params = structured(formats, body, SamplingParams(), answer, tokenizer)
    compiled = compiler.submit(params.grammar).result()
    plain = AnswerFormat(None, False, answer.tool_format, answer.tools, answer.ends_at_call)
    return compiler.bind(compiled, params.grammar), plain


def sample(matcher, tokenizer, seed, limit=700):
    """Random tokens that the grammar allows, the end as soon as it is one of them, as text."""
    draw, ids = random.Random(seed), []
    words = -(-tokenizer.vocab_size // 32)
    for _ in range(limit):
        row = np.full(words, -1, np.int32)
        matcher.fill_mask(row)
        allowed = [i for i in range(tokenizer.vocab_size) if row[i >> 5] >> (i & 31) & 1]
        assert allowed, "the grammar has no way on"
        if tokenizer.eos_ids & set(allowed) and (len(allowed) == 1 or draw.random() < 0.6):
            break
        others = [i for i in allowed if i not in tokenizer.eos_ids]
        dense = [i for i in others if not tokenizer.token_str(i).isspace()]
        token = draw.choice(dense or others)
        assert matcher.accept(token)
        ids.append(token)
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def read(form, text):
    """Content and calls of a text; each call is valid for its tool."""
    parser = AnswerParser(form)
    deltas = parser.feed(text) + parser.finish()
    calls = [[d.name, ""] for d in deltas if isinstance(d, CallStart)]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            calls[delta.number][1] += delta.text
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), TOOLS[name])
    return "".join(d.text for d in deltas if isinstance(d, Content)), calls


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_read(compiler, tokenizer, name):
    for parallel in (True, None):
        grammar, form = grammar_of(
            compiler, tokenizer, name, tool_choice="required", parallel_tool_calls=parallel
        )
        most = 0
        for seed in range(3):
            text = sample(grammar.matcher(), tokenizer, seed)
            content, calls = read(form, text)
            assert (content, bool(calls)) == ("", True), text
            most = max(most, len(calls))
        assert most == 1 or parallel
