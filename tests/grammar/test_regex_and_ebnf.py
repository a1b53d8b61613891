"""Regular expressions, grammars, choices and structural tags, sampled and checked."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.api.errors import RequestError
from stoker.engine.api.grammar import GrammarSpec
from stoker.engine.runtime.grammar import regex
from stoker.engine.runtime.grammar.api import GrammarError

NUM_SAMPLES = 20

REGEXES = {
    "digits": r"\d{3}-\d{4}",
    "anchored": r"^[a-z]+$",
    "alternatives": r"yes|no|maybe( later)?",
    "classes": r"[^\W\d_]{2,5}\s[A-F]?",
    "escapes": r"\(\[\{\\\}\]\)\.\*\+\?\^\$\|",
    "hexadecimal": r"\x41[\u0042-\u0044]\u{1F600}?",
    "unicode": r"[か-も]{3}é+漢",
    "dot": r".{5}",
    "line breaks": r"a\nb\tc",
    "nested groups": r"((a|b)(c|(d|e)){2}){1,3}",
    "named groups": r"(?P<year>\d{4})-(?<month>0[1-9]|1[0-2])",
    "lazy": r"<b>[^<]{0,6}?</b>",
    "empty alternative": r"x(|y|z)w",
    "e-mail": r"[a-z0-9]{1,6}@[a-z]{2,5}\.(com|org)",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
}
REFUSED_REGEXES = {
    "look-ahead": r"(?=a)a",
    "back-reference": r"(a)\1",
    "word boundary": r"\bword\b",
    "flags": r"(?i)abc",
    "anchor inside": r"a^b",
    "unbalanced": r"(ab",
    "unknown escape": r"\q",
    "surrogate": r"\ud800",
    "huge repeat": r"(a{1000}){1000}",
    "deep nesting": "(" * 60 + "a" + ")" * 60,
    "a class of nothing": r"a[^\s\S]",
    "a repeated class of nothing": r"[^\s\S]+b",
    "two classes of nothing": r"(x[^\w\W]|[^\d\D]{2,})y",
    "a lone surrogate": "a[\ud800]",
}
GRAMMARS = {
    "greeting": (
        'root ::= "Hello, " name "!"\nname ::= [A-Z] [a-z]{1,6}',
        r"Hello, [A-Z][a-z]{1,6}!",
    ),
    "sum": (
        'root ::= num (op num){1,3}\nop ::= "+" | "-"\nnum ::= [1-9] [0-9]?',
        r"[1-9]\d?([+-][1-9]\d?){1,3}",
    ),
    "list": ('root ::= "[" item ("," item)* "]"\nitem ::= "a" | "bc"', r"\[(a|bc)(,(a|bc))*\]"),
    "recursion": ('root ::= "(" root ")" | "x"', r"\(*x\)*"),
    "unicode": ('root ::= [か-も]{2} "é" "\\u6f22"?', "[か-も]{2}é漢?"),
}


def _samples(grammar, random_model):
    texts = [random_model.sample(grammar.matcher(), seed) for seed in range(NUM_SAMPLES)]
    assert None not in texts, "an output did not end"
    return texts


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", REGEXES)
def test_sampled_outputs_match_the_regular_expression(name, library, compiled, random_model):
    source = REGEXES[name].replace("(?<", "(?P<")
    pattern = re.compile(re.sub(r"\\u\{1F600\}", "😀", source))
    for text in _samples(compiled("regex", REGEXES[name], library), random_model):
        assert pattern.fullmatch(text), text


@pytest.mark.parametrize("name", REFUSED_REGEXES)
def test_what_is_no_regular_language_or_too_large_is_refused(name, compiled):
    with pytest.raises(RequestError) as error:
        compiled("regex", REFUSED_REGEXES[name])
    assert error.value.status == 400


def test_unicode_properties_go_to_the_library_that_knows_them(compiled, random_model):
    grammar = compiled("regex", r"\p{Lu}{2}\p{Nd}")
    assert type(grammar).__name__ == "LlguidanceCompiled"
    for text in _samples(grammar, random_model):
        assert len(text) == 3
        assert text[:2].isupper()
        assert text[2].isdecimal()


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_sampled_outputs_match_the_grammar(name, library, compiled, random_model):
    source, expected = GRAMMARS[name]
    for text in _samples(compiled("ebnf", source, library), random_model):
        assert re.fullmatch(expected, text), text
        if name == "recursion":
            assert text.count("(") == text.count(")")


@pytest.mark.parametrize(
    "source", ["", 'start ::= "a"', "root ::= other", "root ::= [a-", "root ::= root"]
)
def test_a_wrong_grammar_is_refused(source, compiled):
    with pytest.raises(RequestError) as error:
        compiled("ebnf", source)
    assert error.value.status == 400


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_a_choice_is_one_of_the_texts(library, compiled, random_model):
    texts = ["yes", "no", "not sure", "naïve 漢字 😀", 'quote " and \\', "[a-z]*"]
    grammar = compiled("choice", json.dumps(texts), library)
    samples = _samples(grammar, random_model)
    assert set(samples) <= set(texts)
    assert len(set(samples)) > 1


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_a_structural_tag_holds_its_schemas(library, compiled, random_model):
    number = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    call = {
        "type": "tag",
        "begin": "<f>",
        "end": "</f>",
        "content": {"type": "json_schema", "json_schema": number},
    }
    text = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "Now: "},
            {
                "type": "tags_with_separator",
                "tags": [call],
                "separator": "\n",
                "at_least_one": True,
            },
            {"type": "optional", "content": {"type": "regex", "pattern": "[!?]{2}"}},
        ],
    }
    grammar = compiled("structural_tag", json.dumps({"format": text}), library)
    for sample in _samples(grammar, random_model):
        assert re.fullmatch(r"Now: (<f>[^<]*</f>\n?)+([!?]{2})?", sample), sample
        for inner in re.findall(r"<f>(.*?)</f>", sample, re.DOTALL):
            assert isinstance(json.loads(inner)["n"], int)


def test_the_older_form_of_structural_tags_waits_for_its_trigger(compiled, vocabulary, tokenizer):
    tag = {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    grammar = compiled("structural_tag", json.dumps(tag))

    def accepts(text):
        matcher = grammar.matcher()
        ids = [*tokenizer.encode(text, False), vocabulary.stop_ids[0]]
        return all(matcher.accept(i) for i in ids)

    assert accepts("free text, a < b")
    assert accepts("then <f>12</f> and more <f>3</f>")
    assert not accepts("then <f>twelve</f>")
    assert not accepts("then <f>12")


@pytest.mark.parametrize(
    ("tag", "pointer"),
    [
        ({}, "/format"),
        ({"format": {"type": "nothing"}}, "/format"),
        ({"format": {"type": "regex", "pattern": "("}}, "/format/pattern"),
        (
            {"format": {"type": "json_schema", "json_schema": {"not": {}}}},
            "/format/json_schema/not",
        ),
        (
            {
                "format": {
                    "type": "tag",
                    "begin": "a",
                    "end": "b",
                    "extra": 1,
                    "content": {"type": "any_text"},
                }
            },
            "/format/extra",
        ),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "any_order": True}},
            "/format/any_order",
        ),
    ],
)
def test_a_wrong_structural_tag_is_refused_with_its_pointer(tag, pointer, compiled):
    with pytest.raises(RequestError, match=re.escape(f" {pointer}:")):
        compiled("structural_tag", json.dumps(tag))


def _whole_formats():
    """Each kind of format with all that it needs."""
    text = {"type": "any_text"}
    digit = {"type": "regex", "pattern": "[0-9]"}
    tag = {"type": "tag", "begin": "<f>", "content": digit, "end": "</f>"}
    signed = {"type": "tag", "begin": {"type": "token", "token": 3}, "content": digit, "end": "."}
    return [
        {"type": "const_string", "value": "a"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "token", "token": 3},
        {"type": "grammar", "grammar": 'root ::= "a"'},
        digit,
        {"type": "sequence", "elements": [digit, text]},
        {"type": "or", "elements": [digit, tag]},
        tag,
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]},
        {"type": "token_triggered_tags", "trigger_tokens": [3], "tags": [signed]},
        {"type": "tags_with_separator", "tags": [tag], "separator": ","},
        {"type": "optional", "content": digit},
        {"type": "plus", "content": digit},
        {"type": "star", "content": digit},
        {"type": "repeat", "min": 1, "max": 3, "content": digit},
        {"type": "dispatch", "rules": [["<f", digit]]},
        {"type": "token_dispatch", "rules": [[3, digit]]},
    ]


@pytest.mark.parametrize("form", _whole_formats(), ids=lambda form: form["type"])
def test_a_format_without_one_of_its_fields_is_refused_with_its_pointer(form, compiled):
    compiled("structural_tag", json.dumps({"format": form}))
    for name in form.keys() - {"type"}:
        less = {key: value for key, value in form.items() if key != name}
        for wrong in (less, {**form, name: None}, {**form, name: 1.5}, {**form, name: [[]]}):
            outer = {"type": "sequence", "elements": [wrong]}
            with pytest.raises(RequestError, match=f" /format/elements/0/{name}[:/]"):
                compiled("structural_tag", json.dumps({"format": outer}))


@pytest.mark.parametrize(
    ("tag", "pointer"),
    [
        ({"structures": [{"begin": "<f>"}], "triggers": ["<f"]}, "/structures/0/end"),
        ({"structures": [{"end": "<f>"}], "triggers": ["<f"]}, "/structures/0/begin"),
        ({"structures": [{"begin": "<f>", "end": "x"}]}, "/triggers"),
    ],
)
def test_the_older_form_names_what_it_lacks(tag, pointer, compiled):
    with pytest.raises(RequestError, match=f" {pointer}:"):
        compiled("structural_tag", json.dumps(tag))


def test_a_set_is_written_one_bracket_for_each_length_in_utf8():
    node = regex.parse("[^a]")
    assert regex.write(node) == (
        r"(?:[\u{0}-\u{60}b-\u{7f}]|[\u{80}-\u{7ff}]|[\u{800}-\u{d7ff}\u{e000}-\u{ffff}]|"
        r"[\u{10000}-\u{10ffff}])"
    )


NOTHING = st.sampled_from([r"[^\s\S]", r"[^\d\D]", r"[^\0-\U0010ffff]"])
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", r"\s", r"[^\S\d]", "", "."]) | NOTHING,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{0}", "{2}", "{0,2}", "{1,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)
TEXTS = ["".join(chars) for n in range(5) for chars in itertools.product("ab ", repeat=n)]


@given(EXPRESSIONS)
@settings(max_examples=300, deadline=None)
def test_classes_of_nothing_match_what_pythons_do(source):
    expected = [text for text in TEXTS if re.fullmatch(source, text)]
    try:
        node = regex.parse(source.replace(r"\U0010ffff", r"\u{10ffff}"))
    except GrammarError as error:
        assert "no text matches" in str(error)
        assert expected == []
        return
    written = re.sub(r"\\u\{(\w+)\}", lambda m: rf"\U{int(m[1], 16):08x}", regex.write(node))
    assert [text for text in TEXTS if re.fullmatch(written, text)] == expected


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_what_is_left_beside_a_class_of_nothing(library, compiled, random_model):
    for kind, source, outputs in (
        ("regex", r"a[^\s\S]*b", {"ab"}),
        ("regex", r"(x|[^\s\S]|y[^\s\S])", {"x"}),
        ("json_schema", '{"type": "string", "pattern": "^(a[^\\\\s\\\\S]|b)$"}', {'"b"'}),
    ):
        assert set(_samples(compiled(kind, source, library), random_model)) == outputs


def test_a_pattern_that_nothing_matches_is_refused_with_its_pointer(compiled):
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": r"^a[^\s\S]b$"}}}
    with pytest.raises(RequestError, match=r"/properties/x/pattern: no text matches"):
        compiled("json_schema", json.dumps(schema))
    tag = {"format": {"type": "regex", "pattern": r"a[^\s\S]"}}
    with pytest.raises(RequestError, match=r"/format/pattern: no text matches"):
        compiled("structural_tag", json.dumps(tag))


def test_equal_sources_are_compiled_once_and_errors_are_remembered(compilers):
    compiler = compilers["xgrammar"]
    before = compiler.num_misses
    spec = GrammarSpec("regex", "once[0-9]")
    first, second = compiler.submit(spec), compiler.submit(spec)
    assert first.result() is second.result() is compiler.submit(spec).result()
    bad = GrammarSpec("regex", "once(", param="regex")
    for _ in range(2):
        with pytest.raises(RequestError) as error:
            compiler.submit(bad).result()
        assert error.value.param == "regex"
    assert compiler.num_misses == before + 2
