"""Thousands of broken bodies over HTTP: each is answered, in time, and never with a 5xx.

STOKER_MUTATIONS=20000 for the long run.
"""

import asyncio
import copy
import json
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import CHAT, TEXT, Served, chat, text, user

from stoker.http.native_api import GenerateRequest, NativeSampling
from stoker.http.openai_types import REFUSED, ChatRequest, CompletionRequest

MUTATIONS = int(os.environ.get("STOKER_MUTATIONS", "2000"))
LIMIT_S = 20.0  # of one answer; the machine may be busy

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SEEDS = [
    (CHAT, chat(n=2, seed=1, stop=["a", "b"], logit_bias={"65": 1.5}, top_p=0.5, top_k=3)),
    (CHAT, chat(stream=True, stream_options={"include_usage": True}, logprobs=True)),
    (CHAT, chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}})),
    (CHAT, chat(chat_template_kwargs={"thinking": True}, reasoning_effort="low")),
    (
        CHAT,
        chat(
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                *user("q"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "5"},
            ]
        ),
    ),
    (TEXT, text("a b c", best_of=2, echo=False, logprobs=2, min_tokens=1)),
    (TEXT, text(["a", "b"], echo=True, stream=True, max_tokens=2)),
    (TEXT, text([[65, 66], [67]], truncate_prompt_tokens=1, return_token_ids=True)),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3, "stop": "q"}}),
    (
        "/generate",
        {"input_ids": [[65], [66]], "return_logprob": True, "top_logprobs_num": 2, "stream": True},
    ),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": user("x"), "tools": [TOOL]}),
    ("/detokenize", {"tokens": [65, 66]}),
    ("/abort_request", {"rid": "nobody"}),
]
FIELDS = sorted(
    {
        *(name for kind in (ChatRequest, CompletionRequest) for name in kind.model_fields),
        *(name for kind in (GenerateRequest, NativeSampling) for name in kind.model_fields),
        *REFUSED,
    }
)

values = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2, 5, 128, 129, 1024, 2**31, 2**53, 2**63, -(2**63)),
            *(0.5, -0.0, 1e-9, 1e308, -1e308, "", "5", "text", "auto", "required", "json_object"),
            *("\u0000", "\u202e", "😀", "</s><|im_end|>", "a" * 5000, "[" * 300, "{{ 1/0 }}"),
            *([], {}, [[]], [None], [{}], {"": ""}, {"type": "text"}, {"$ref": "#"}),
            *(["a"] * 33, [0] * 2000, [["x"]] * 40, {str(i): i for i in range(1100)}),
        ]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ),
).map(copy.deepcopy)  # the next mutation may change it


def places(value, path=()):
    """Where in a body something can be changed."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@st.composite
def bodies(draw):
    path, body = draw(st.sampled_from(SEEDS))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["put", "put", "put", "add", "drop", "double"]))
        if kind == "add":
            body[draw(st.sampled_from(FIELDS))] = draw(values)
            continue
        found = [place for place in places(body) if place]
        if not found:
            break
        *parents, last = draw(st.sampled_from(found))
        inside = body
        for key in parents:
            inside = inside[key]
        if kind == "put":
            inside[last] = draw(values)
        elif kind == "drop":
            del inside[last]
        else:
            inside[last] = [inside[last], inside[last]]
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:  # damaged bytes
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=6)) + raw[at + draw(st.integers(0, 6)) :]
    return path, raw


def test_mutated_bodies():
    loop = asyncio.new_event_loop()
    served = Served(max_model_len=48, max_body_bytes=1 << 20)
    statuses: dict[int, int] = {}

    @settings(
        max_examples=MUTATIONS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies())
    def play(request):
        path, raw = request
        reply = loop.run_until_complete(asyncio.wait_for(served.post(path, raw=raw), LIMIT_S))
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        assert reply.status in (200, 400, 404, 413), reply.raw
        if reply.status != 200:
            assert reply.error["message"]
        elif reply.headers["Content-Type"].startswith("text/event-stream"):
            assert reply.raw.endswith(b"data: [DONE]\n\n")
            for line in reply.raw.split(b"\n\n"):
                assert b'"error"' not in line[:20]
        else:
            assert isinstance(json.loads(reply.raw), dict | list)

    loop.run_until_complete(served.__aenter__())
    try:
        play()
        loop.run_until_complete(served.until_idle())
    finally:
        loop.run_until_complete(served.__aexit__())
        loop.close()
    print(sum(statuses.values()), "bodies:", statuses)
    assert min(statuses[200], statuses[400]) > 0.05 * MUTATIONS  # both sides are played
