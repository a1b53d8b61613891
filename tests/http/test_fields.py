"""Every field of chat and completions: what is accepted shows in the output, the rest is refused.

One row a field: (name, accepted value with its effect, refused values). The rows are complete: a
new field of a request model fails the last test until it has one.
"""

from typing import Any, NamedTuple

import pytest
from fake_engine import ANSWER
from served import CHAT, TEXT, Served, chat, text, user

from stoker.http.openai_types import REFUSED, ChatRequest, CompletionRequest
from stoker.http.structured import StructureFields


class Row(NamedTuple):
    """`effect(reply, add)` is about the answer's JSON and what the engine was told."""

    name: str
    good: Any
    effect: Any
    bad: tuple[Any, ...] = ()
    more: dict[str, Any] = {}  # noqa: RUF012 (fields that must go with it)


def content(reply):
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def num_output(reply):
    return reply["usage"]["completion_tokens"]


def param(name, want):
    return lambda reply, add: getattr(add.params, name) == want


def asked(prompt):
    """The engine was asked this, after the begin token."""
    return lambda reply, add: "".join(map(chr_of, add.prompt)) == "<bos>" + prompt


LONG = {"max_tokens": 100}
SHARED = [
    Row("model", "fake/model", lambda r, a: r["model"] == "fake/model", (5,)),
    Row("temperature", 0.7, param("temperature", 0.7), (-0.01, 2.01, "1", True, [1])),
    Row("temperature", 2, param("temperature", 2)),
    Row("temperature", 1e-6, lambda r, a: a.params.is_greedy),
    Row("top_p", 0.5, param("top_p", 0.5), (-0.01, 1.01, "x")),
    Row("top_p", 0, lambda r, a: a.params.is_greedy, (), {"temperature": 1}),
    Row("top_k", 5, param("top_k", 5), (-2, 1.5)),
    Row("top_k", 0, lambda r, a: not a.params.is_greedy, (), {"temperature": 1}),
    Row("top_k", -1, param("top_k", -1)),
    Row("min_p", 0.25, param("min_p", 0.25), (-0.01, 1.01)),
    Row("presence_penalty", 2, param("presence_penalty", 2), (2.01, -2.01)),
    Row("frequency_penalty", -2, param("frequency_penalty", -2), (2.01, -2.01)),
    Row("repetition_penalty", 1.5, param("repetition_penalty", 1.5), (0, -1, 2.01)),
    Row("max_tokens", 3, lambda r, a: num_output(r) == 3, (0, -1, "3", 1.5)),
    Row("max_tokens", 2**40, lambda r, a: content(r) == ANSWER),
    Row("min_tokens", 60, lambda r, a: num_output(r) > 60, (-1, 101), LONG),
    Row("n", 3, lambda r, a: [c["index"] for c in r["choices"]] == [0, 1, 2], (0, 129, -1)),
    Row("n", 128, lambda r, a: len(r["choices"]) == 128),
    Row("seed", 7, lambda r, a: a.seed == 7, (2**63, -(2**63) - 1, 1.5, "7")),
    Row("seed", -(2**63), lambda r, a: a.seed == -(2**63)),
    Row("stop", "sea", lambda r, a: content(r) == "Rivers run to the ", ("", 5, [1]), LONG),
    Row("stop", ["zz", "to"], lambda r, a: content(r) == "Rivers run ", (["a"] * 33, [""]), LONG),
    Row("stop_token_ids", [32], lambda r, a: 32 in a.stop_token_ids, ([-1], [10**6], [1] * 1025)),
    Row(
        "include_stop_str_in_output",
        True,
        lambda r, a: content(r) == "Rivers",
        (1, "yes"),
        {"stop": "ers"},
    ),
    Row("no_stop_trim", True, lambda r, a: content(r) == "Rivers", (1, "yes"), {"stop": "ers"}),
    Row("ignore_eos", True, lambda r, a: num_output(r) == 100, (1,), LONG),
    Row(
        "skip_special_tokens",
        False,
        lambda r, a: content(r).startswith(ANSWER + "<eos>"),
        (0,),
        {**LONG, "ignore_eos": True},
    ),
    Row(
        "logit_bias",
        {"65": 100},
        lambda r, a: a.params.logit_bias == {65: 100} and num_output(r) == 8,
        ({"x": 1}, {"65": 101}, {"-1": 1}, {"999": 1}, {"1.5": 1}, [1], {"65": "a"}),
    ),
    Row("stream", False, lambda r, a: "choices" in r, ("yes", 1)),
    Row(
        "prompt_logprobs",
        1,
        lambda r, a: (
            len(_prompt_logprobs(r)) == len(a.prompt)
            and _prompt_logprobs(r)[0] is None
            and _prompt_logprobs(r)[1][str(a.prompt[1])]
            == {"logprob": -0.1, "rank": 1, "decoded_token": chr_of(a.prompt[1])}
        ),
        (-1, 21, True),
    ),
    Row("prompt_logprobs", 0, lambda r, a: len(_prompt_logprobs(r)[1]) == 1),
    Row("truncate_prompt_tokens", 2, lambda r, a: len(a.prompt) == 2, (0, -2, "2")),
    Row("truncate_prompt_tokens", -1, lambda r, a: len(a.prompt) <= 64 - 8),
    Row(
        "return_token_ids",
        True,
        lambda r, a: len(r["choices"][0]["token_ids"]) == 8,
        (1,),
    ),
    Row("cache_salt", "s" * 128, lambda r, a: "s" * 128 in a.namespace, ("", "s" * 129, 5)),
    Row("priority", -5, lambda r, a: a.priority == -5, (2**31, 1.5)),
    Row("user", "u", lambda r, a: a.client == "u", (7, "x" * 513)),
    Row("request_id", "r" * 128, lambda r, a: True, ("", "r" * 129, 5)),  # see test_abort_by_id
    Row("rid", "r" * 128, lambda r, a: True, ("", "r" * 129, 5)),
]
CHAT_ONLY = [
    Row(
        "messages",
        user("abc"),
        lambda r, a: len(a.prompt) == len("<user>abc</user><assistant>") + 1,
        ([], "x", {}, [5]),
    ),
    Row("max_completion_tokens", 3, lambda r, a: num_output(r) == 3, (0, -1, "3")),
    Row("add_special_tokens", True, lambda r, a: list(a.prompt[:2]) == [256, 256], (1,)),
    Row("logprobs", True, lambda r, a: len(_content(r)) == 8, (1, 5)),
    Row(
        "top_logprobs",
        20,
        lambda r, a: len(_content(r)[0]["top_logprobs"]) == 20,
        (-1, 21),
        {"logprobs": True},
    ),
    Row(
        "add_generation_prompt",
        False,
        lambda r, a: len(a.prompt) == len("<user>hi</user>") + 1,
        (1,),
    ),
    Row(
        "continue_final_message",
        True,
        asked("<user>hi</user><assistant>I"),
        (1,),
        {"messages": [*user("hi"), {"role": "assistant", "content": "I"}]},
    ),
    Row(
        "chat_template_kwargs",
        {"thinking": True},
        asked("<user>hi</user>think<assistant>"),
        ([], {str(i): 1 for i in range(65)}, {"messages": []}, {"tokenize": True}),
    ),
    Row("modalities", ["text"], asked("<user>hi</user><assistant>"), (["audio"], "text", [5])),
    Row("modalities", [], lambda r, a: True, (["text", "audio"], ["text"] * 9)),
    Row("verbosity", "medium", lambda r, a: True, ("low", "high", 1)),
    Row("include_reasoning", True, lambda r, a: True, (False,)),
    Row("reasoning_effort", "xhigh", lambda r, a: True, (5, "x", "")),
]
TEXT_ONLY = [
    Row(
        "prompt", [65, 66], lambda r, a: list(a.prompt) == [65, 66], ("", [], [[]], 5, [-1], [258])
    ),
    Row("prompt", ["a", "b"], lambda r, a: len(r["choices"]) == 2, (["a"] * 1025, ["a", 5])),
    Row("max_tokens", None, lambda r, a: num_output(r) == 16),
    Row(
        "max_tokens", 0, lambda r, a: content(r) == "hi" and num_output(r) == 0, (), {"echo": True}
    ),
    Row("add_special_tokens", False, lambda r, a: len(a.prompt) == 2, (1,)),
    Row("echo", True, lambda r, a: content(r) == "hi" + ANSWER[:8], (1,)),
    Row(
        "logprobs", 2, lambda r, a: len(r["choices"][0]["logprobs"]["tokens"]) == 8, (-1, 21, True)
    ),
    Row("best_of", 4, lambda r, a: a.params.n == 4 and len(r["choices"]) == 1, (0, 129)),
    Row("suffix", "", lambda r, a: True, ("end",)),
]
# Their effects are in test_stream_*, and in the tests of structured output and of tools.
BYTES: list[str] = []
ELSEWHERE = {
    *("stream_options", "tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template", "enable_thinking", "separate_reasoning"),
    *StructureFields.model_fields,
}


def chr_of(token):
    return {256: "<bos>"}.get(token) or BYTES[token]


def _prompt_logprobs(reply):
    return reply.get("prompt_logprobs") or reply["choices"][0]["prompt_logprobs"]


def _legacy(reply):
    return reply["choices"][0]["logprobs"]


def _content(reply):
    return reply["choices"][0]["logprobs"]["content"]


async def check(path, row):
    async with Served(max_model_len=64 if row.name == "truncate_prompt_tokens" else 512) as s:
        global BYTES
        BYTES = [s.engine.tokenizer.token_str(i) for i in range(256)]
        base = chat if path == CHAT else text
        reply = await s.ok(path, base(**{**row.more, row.name: row.good}))
        assert row.effect(reply, s.engine.gpu.adds[-1]), (row.good, reply)
        num_adds = len(s.engine.gpu.adds)
        for value in row.bad:
            answer = await s.post(path, base(**{**row.more, row.name: value}))
            assert answer.status == 400, (value, answer.raw)
            assert (answer.error["param"] or "").split(".")[0] == row.name, answer.error
        assert len(s.engine.gpu.adds) == num_adds


def ids(row):
    return f"{row.name}={row.good!r:.20}"


@pytest.mark.parametrize("row", SHARED, ids=ids)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_shared_field(path, row):
    await check(path, row)


@pytest.mark.parametrize("row", CHAT_ONLY, ids=ids)
async def test_chat_field(row):
    await check(CHAT, row)


@pytest.mark.parametrize("row", TEXT_ONLY, ids=ids)
async def test_completions_field(row):
    await check(TEXT, row)


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_refused_field(name):
    """What would change the answer and is not there is refused by name, and null asks nothing."""
    async with Served() as s:
        for path, body in ((CHAT, chat()), (TEXT, text())):
            reply = await s.post(path, {**body, name: {"a": 1}})
            assert (reply.status, reply.error["param"]) == (400, name)
            await s.ok(path, {**body, name: None})


async def test_the_developer_speaks_as_the_system_where_the_template_knows_none():
    async with Served() as s:
        lengths = {}
        for role in ("system", "developer"):
            reply = await s.ok(CHAT, chat(messages=[{"role": role, "content": "x"}, *user("y")]))
            lengths[role] = reply["usage"]["prompt_tokens"]
            assert "<system>x" in s.engine.tokenizer.decode(s.engine.gpu.adds[-1].prompt)
        assert lengths["system"] == lengths["developer"]


@pytest.mark.parametrize("name", ["metadata", "store", "service_tier", "prompt_cache_key"])
async def test_fields_that_change_nothing(name):
    async with Served() as s:
        plain = await s.ok(CHAT, chat())
        for value in ("x", {"a": "b"}, True):
            assert (await s.ok(CHAT, chat(**{name: value})))["choices"] == plain["choices"]


def test_the_rows_are_complete():
    shared = {row.name for row in SHARED}
    for kind, own in ((ChatRequest, CHAT_ONLY), (CompletionRequest, TEXT_ONLY)):
        assert kind.model_fields.keys() - ELSEWHERE <= shared | {row.name for row in own}
