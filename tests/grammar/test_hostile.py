"""Sources that are made to hurt: refused in time, while a stream goes on."""

import json
import os
import signal
import time

import pytest

from stoker.engine.api.errors import Overloaded, RequestError
from stoker.engine.api.grammar import GrammarSpec
from stoker.engine.runtime.grammar.compiler import GrammarCompiler

TIMEOUT_S = 2.0


def _nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _branching(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {
            "anyOf": [
                {"type": "array", "items": schema},
                {"type": "object", "properties": {"a": schema}},
            ]
        }
    return schema


def _cycle(length):
    defs = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % length}"} for i in range(length)}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


HOSTILE = {
    "deep nesting": ("json_schema", json.dumps(_nested(150))),
    "brackets": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "exponential branches": ("json_schema", json.dumps(_branching(10))),
    "many optional properties": (
        "json_schema",
        json.dumps(
            {
                "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
                "minProperties": 2500,
                "additionalProperties": False,
            }
        ),
    ),
    "cyclic refs": ("json_schema", json.dumps(_cycle(1000))),
    "infinite value": (
        "json_schema",
        json.dumps(
            {
                "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
                "$ref": "#/$defs/a",
            }
        ),
    ),
    "huge enum": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]})),
    "huge repeat": ("regex", "((a{1,999}){1,999}){1,999}"),
    "nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "look-ahead bomb": ("regex", "(?=(a+)+$)(a|aa)+$"),
    "deep grammar": ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
}


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(vocabulary, "xgrammar", timeout_s=TIMEOUT_S, num_workers=1)
    compiler.submit(GrammarSpec("regex", "a")).result()  # the worker has started
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_source_is_refused_in_time(name, compiler):
    began = time.monotonic()
    with pytest.raises(RequestError) as error:
        compiler.submit(GrammarSpec(*HOSTILE[name])).result()
    assert error.value.status == 400
    assert time.monotonic() - began < TIMEOUT_S + 3
    assert len(error.value.message) < 1000


def test_a_worker_that_was_killed_is_replaced(vocabulary):
    """A compile that takes longer than its deadline costs its worker, and nobody else anything."""
    compiler = GrammarCompiler(vocabulary, "xgrammar", timeout_s=1.0, num_workers=1)
    slow = "|".join("x" * i + "y" for i in range(400))
    with pytest.raises(RequestError, match="too complex"):
        compiler.submit(GrammarSpec("regex", slow)).result()
    assert compiler.submit(GrammarSpec("regex", "ab")).result().matcher()
    compiler.close()


def test_workers_that_end_while_idle_are_replaced(vocabulary):
    compiler = GrammarCompiler(vocabulary, "xgrammar", timeout_s=10, num_workers=1)
    for source in ("a", "b", "c"):
        assert compiler.submit(GrammarSpec("regex", source)).result().matcher()
        (worker,) = compiler._idle
        worker._process.kill()
        worker._process.wait()
    assert compiler._num_alive == 1
    compiler.close()


def test_a_busy_machine_is_not_the_grammar_s_fault(vocabulary):
    """A worker that gets no processor time: 503, and the next time it is tried again."""
    compiler = GrammarCompiler(vocabulary, "xgrammar", timeout_s=1.5, num_workers=1)
    compiler.submit(GrammarSpec("regex", "a")).result()
    os.kill(compiler._idle[0]._process.pid, signal.SIGSTOP)
    with pytest.raises(Overloaded, match="busy"):
        compiler.submit(GrammarSpec("regex", "b")).result()
    assert compiler.submit(GrammarSpec("regex", "b")).result().matcher()
    compiler.close()


def test_the_cache_is_bounded_by_bytes(vocabulary):
    compiler = GrammarCompiler(
        vocabulary, "llguidance", timeout_s=10, num_workers=1, cache_bytes=3 << 20
    )
    specs = [GrammarSpec("regex", f"a{{{n}}}") for n in range(1, 6)]
    for spec in specs:
        compiler.submit(spec).result()
    compiler.submit(specs[-1]).result()
    assert (compiler.num_hits, compiler.num_misses) == (1, 5)
    compiler.submit(specs[0]).result()  # was dropped
    assert (compiler.num_hits, compiler.num_misses) == (1, 6)
    compiler.close()
