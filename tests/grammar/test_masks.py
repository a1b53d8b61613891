"""Masks by slot and the gate before a structure, against the matchers themselves."""

import numpy as np
import pytest

from stoker.engine.api.grammar import GrammarSpec, Reasoning
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.plan import Admission
from stoker.engine.runtime.grammar.compiler import Grammar
from stoker.engine.runtime.grammar.gate import Gate
from stoker.engine.runtime.grammar.masks import Masks


@pytest.fixture
def grammar(compiled, vocabulary):
    def make(source, library="xgrammar", **more):
        return Grammar(compiled("regex", source, library), vocabulary, **more)

    return make


@pytest.fixture
def masks(vocabulary):
    masks = Masks(8, vocabulary.size)
    yield masks
    masks.close()


def admission(slot, grammar, output=(), stop_ids=(2,)):
    tokens = np.array([5, 6, *output], np.int32)
    return Admission(
        slot=slot,
        params=SamplingParams(),
        tokens=tokens,
        prompt_len=2,
        stop_token_ids=tuple(stop_ids),
        seed=0,
        grammar=grammar,
    )


def allowed(row):
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture
def ids_of(tokenizer):
    return lambda text: tokenizer.encode(text, False)


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_each_row_has_its_own_place_in_the_grammar(library, grammar, masks, ids_of, vocabulary):
    masks.admit(admission(1, grammar("[0-9]{2}", library)))
    masks.admit(admission(3, grammar("abc", library), ids_of("a")))
    masks.admit(admission(4, None))
    digits, letters = masks.begin([1, 3])
    first, second = (allowed(row) for row in masks.take())
    assert {vocabulary.tokens[i] for i in first} >= {b"0", b"9"}
    assert all(vocabulary.tokens[i].isdigit() for i in first)
    assert {vocabulary.tokens[i] for i in second} <= {b"b", b"bc"}
    digits.accept(ids_of("12"))
    letters.accept(ids_of("bc"))
    masks.begin([3, 1])
    assert [allowed(row) for row in masks.take()] == [{2}, {2}]


def test_a_retracted_request_goes_on_where_it_was(grammar, masks, ids_of):
    compiled = grammar("(one|two) (three|four)")
    [running] = (masks.admit(admission(1, compiled)), masks.begin([1]))[1]
    masks.take()
    running.accept(ids_of("two "))
    masks.begin([1])
    before = masks.take().copy()
    masks.admit(admission(5, compiled, ids_of("two ")))
    masks.begin([5])
    assert np.array_equal(masks.take(), before)


def test_min_tokens_holds_back_the_end_unless_nothing_else_is_left(grammar, masks, ids_of):
    masks.admit(admission(1, grammar("a+", min_tokens=3), stop_ids=(2, *ids_of("aa"))))
    masks.admit(admission(2, grammar("ab", min_tokens=3)))
    many, few = masks.begin([1, 2])
    masks.take()
    many.accept(ids_of("a"))
    few.accept(ids_of("ab"))
    masks.begin([1, 2])
    early, ended = (allowed(row) for row in masks.take())
    assert 2 not in early and not early & set(ids_of("aa")) and early
    assert ended == {2}
    many.accept(ids_of("a") * 2)
    masks.begin([1])
    assert 2 in allowed(masks.take()[0])


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_a_token_that_does_not_fit_empties_the_mask_of_its_request_alone(
    library, grammar, masks, ids_of
):
    compiled = grammar("abc", library)
    masks.admit(admission(1, compiled))
    masks.admit(admission(2, compiled))
    wrong, right = masks.begin([1, 2])
    masks.take()
    wrong.accept(ids_of("x"))
    right.accept(ids_of("a"))
    masks.begin([1, 2])
    broken, whole = (allowed(row) for row in masks.take())
    assert not broken
    assert whole


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_a_draft_is_taken_back(library, grammar, ids_of, vocabulary):
    matcher = grammar("[a-c]{3,5}", library).matcher()
    rows = np.zeros((2, vocabulary.mask_words), np.int32)
    assert matcher.accept(ids_of("a")[0])
    matcher.fill_mask(rows[0])
    for letter in "bc":
        assert matcher.accept(ids_of(letter)[0])
    assert matcher.accept(2)
    assert matcher.is_terminated
    matcher.rollback(3)
    assert not matcher.is_terminated
    matcher.fill_mask(rows[1])
    assert np.array_equal(*rows)


class TestGate:
    """Reasoning passes freely; the structure begins behind its end."""

    @pytest.fixture
    def gate(self, grammar):
        def make(**more):
            reasoning = Reasoning(("</think>", "Answer:"), **more)
            return grammar("[0-9]{2}", reasoning=reasoning).matcher()

        return make

    def test_only_the_end_is_forbidden_inside(self, gate, ids_of, vocabulary):
        matcher = gate()
        row = np.zeros(vocabulary.mask_words, np.int32)
        for token in ids_of("free </thin> text"):
            matcher.fill_mask(row)
            assert set(range(vocabulary.size)) - allowed(row) == {2}
            assert matcher.accept(token)
        assert matcher.is_open

    @pytest.mark.parametrize("end", ["</think>", " \n</think>", "Answer:"])
    def test_the_structure_begins_behind_the_end(self, gate, end, ids_of, vocabulary):
        matcher = gate()
        for token in ids_of("well" + end):
            assert matcher.accept(token)
        assert not matcher.is_open
        row = np.zeros(vocabulary.mask_words, np.int32)
        matcher.fill_mask(row)
        assert all(vocabulary.tokens[i].isdigit() for i in allowed(row))
        assert all(matcher.accept(token) for token in [*ids_of("42"), 2])
        assert matcher.is_terminated

    @pytest.mark.parametrize(("last", "is_fine"), [(b"ink>\n\n", True), (b"ink>{", False)])
    def test_only_space_may_follow_inside_of_the_ends_last_token(self, last, is_fine):
        reasoning = Reasoning(("</think>",))
        gate = Gate(None, reasoning, (2,), [b"</th", last].__getitem__)
        assert gate.accept(0)
        assert gate.accept(1) == is_fine

    def test_reasoning_that_the_prompt_has_not_opened_may_be_left_out(
        self, gate, ids_of, vocabulary
    ):
        row = np.zeros(vocabulary.mask_words, np.int32)
        matcher = gate(begins=((7,),), is_open=False)
        matcher.fill_mask(row)
        assert 7 in allowed(row)
        assert all(matcher.accept(token) for token in [*ids_of("42"), 2])
        matcher = gate(begins=((7,),), is_open=False)
        assert matcher.accept(7)
        assert matcher.is_open
        assert all(matcher.accept(token) for token in ids_of("hm</think>42"))
        matcher.fill_mask(row)
        assert allowed(row) == {2}

    @pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
    @pytest.mark.parametrize("pattern", ["<tool>[0-9]{2}", "[0-9]{2}"])
    def test_a_begin_of_several_tokens_is_one_of_two_ways(
        self, grammar, ids_of, vocabulary, masks, library, pattern
    ):
        """Not special tokens: the structure may begin with the same ones."""
        begin = tuple(ids_of("<think>"))
        assert len(begin) > 1
        reasoning = Reasoning(("</think>",), (begin,), is_open=False)
        compiled = grammar(pattern, library, reasoning=reasoning)

        def after(tokens):
            masks.admit(admission(1, compiled))
            [constraint] = masks.begin([1])
            first = allowed(masks.take()[0])
            constraint.accept(tokens)
            masks.begin([1])
            row = allowed(masks.take()[0])
            matcher = compiled.matcher()
            assert all(matcher.accept(token) for token in tokens)
            alone = np.zeros(vocabulary.mask_words, np.int32)
            matcher.fill_mask(alone)
            assert row == allowed(alone)
            return first, row

        first, second = after(begin[:1])
        assert {vocabulary.tokens[i][:1] for i in first} <= {b"<", *(b"%d" % i for i in range(10))}
        assert begin[0] in first and begin[1] in second
        if pattern.startswith("["):
            assert second == {begin[1]}
        _, inside = after(begin)
        assert len(inside) == vocabulary.size - 1
        structure = ids_of("<tool>42" if "tool" in pattern else "42")
        for tokens in (structure, [*begin, *ids_of("hm</think>"), *structure]):
            assert after(tokens)[1] == {2}
        matcher = compiled.matcher()
        path = [*begin, *ids_of("hm</think>"), *structure]
        for num_back in range(1, len(path) + 1):
            assert all(matcher.accept(token) for token in path)
            matcher.rollback(num_back)
            assert all(matcher.accept(token) for token in path[len(path) - num_back :])
            matcher.rollback(len(path))
            assert not matcher.accept(ids_of("x")[0])
            assert all(matcher.accept(token) for token in structure)
            matcher.rollback(len(structure))

    def test_rollback_crosses_the_end_of_reasoning(self, gate, ids_of, vocabulary):
        row = np.zeros(vocabulary.mask_words, np.int32)
        tokens = ids_of("so</think>42")
        for begin in ({}, {"begins": ((7,),), "is_open": False}):
            matcher = gate(**begin)
            path = ([7] if begin else []) + tokens
            for num_back in range(1, len(path) + 1):
                assert all(matcher.accept(token) for token in path)
                matcher.rollback(num_back)
                assert all(matcher.accept(token) for token in path[len(path) - num_back :])
                matcher.fill_mask(row)
                assert allowed(row) == {2}
                matcher.rollback(len(path))


def test_specs_of_one_source_are_one_whoever_asks():
    assert GrammarSpec("regex", "a", param="regex") == GrammarSpec("regex", "a")
