"""Whatever a body holds, the client gets an answer that names its mistake, never a 5xx."""

import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from served import CHAT, TEXT, Served, chat, text, user

from stoker.engine.api.errors import RequestError
from stoker.http.native_api import GenerateRequest, TokenizeChatRequest
from stoker.http.openai_api import parse
from stoker.http.openai_types import REFUSED, ChatRequest, CompletionRequest

scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "function", "json_schema", "auto", "required", "assistant"])
)
keys = st.text(max_size=6) | st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "arguments", "json_schema", "schema"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def bodies(kind, base):
    names = st.sampled_from(sorted({*kind.model_fields, *REFUSED}))
    return st.dictionaries(names, values, max_size=5).map(lambda fields: {**base, **fields})


def check(kind, body, params):
    try:
        parsed = parse(kind, body)
        params(parsed).validate(258)
    except RequestError as error:
        assert len(error.message) < 20_000
        assert error.status == 400
        if error.param is not None:
            top = error.param.split(".")[0]
            assert top in kind.model_fields or top in REFUSED or top == "prompt_logprobs"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies(ChatRequest, {"messages": user("x")}))
@example({"messages": [{"role": "user", "content": [1]}]})
def test_chat_fields(body):
    check(ChatRequest, body, lambda parsed: parsed.chat_params({}))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies(CompletionRequest, {"prompt": "x"}))
def test_completion_fields(body):
    check(CompletionRequest, body, lambda parsed: parsed.completion_params({}))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies(GenerateRequest, {"text": "x"}))
def test_generate_fields(body):
    try:
        parse(GenerateRequest, body)
    except RequestError as error:
        assert error.status == 400


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(keys, values, max_size=4), max_size=3))
def test_messages(messages):
    try:
        parse(TokenizeChatRequest, {"messages": messages}).template_input()
    except RequestError as error:
        assert error.param is not None


async def test_odd_bodies_over_http():
    deep = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    odd = [
        (CHAT, chat(tools=[tool])),
        (CHAT, chat(chat_template_kwargs={"messages": "x"})),
        (CHAT, chat(chat_template_kwargs={"__class__": "x"})),
        (CHAT, chat(chat_template_kwargs={"thinking": deep})),
        (CHAT, chat(messages=[{"role": "assistant", "content": None}])),
        (CHAT, chat(messages=[{"role": "tool", "content": "x", "tool_call_id": "\u0000"}])),
        (CHAT, chat("\u0000\u202e\ufeff" * 10)),
        (CHAT, chat(stop=["\u0000"], logit_bias={})),
        (CHAT, chat(max_tokens=2**63)),
        (CHAT, chat(seed=-(2**63))),
        (TEXT, text("x", max_tokens=2**64 - 1)),
        (TEXT, text("<bos><eos>")),
        (TEXT, text([257] * 5)),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}),
        ("/tokenize", {"prompt": "x" * 100_000}),
        ("/detokenize", {"tokens": []}),
    ]
    async with Served() as s:
        for path, body in odd:
            reply = await s.post(path, body)
            assert reply.status in (200, 400), (path, reply.raw)
            assert json.loads(reply.raw)
        for depth in (600, 1000, 1100, 100_000):
            schema = '{"a":' * depth + "1" + "}" * depth
            tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
            assert (await s.post(CHAT, raw=body.encode())).status in (200, 400)
        await s.ok(CHAT, chat())
