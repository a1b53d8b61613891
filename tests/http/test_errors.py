"""Every way to be wrong gets OpenAI's error object, with the field named."""

import json

import pytest
from served import CHAT, TEXT, Served, chat, text, user

from stoker.engine.api.errors import EngineError, Overloaded

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BAD = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0"),
    (CHAT, {"messages": [*user("a"), {"role": "wizard", "content": "x"}]}, "messages.1.role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
    ),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(temperature=-0.5), "temperature"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(max_tokens="many"), "max_tokens"),
    (CHAT, chat(max_tokens=1.5), "max_tokens"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(min_p=-0.1), "min_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(presence_penalty=2.5), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2.5), "frequency_penalty"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=129), "n"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(min_tokens=9), "min_tokens"),
    (CHAT, chat(stop=[1, 2]), "stop.0"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a"] * 33), "stop"),
    (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids"),
    (CHAT, chat(top_logprobs=3), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logit_bias={"abc": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"-3": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": "x"}), "logit_bias.5"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (CHAT, chat(response_format={"type": "structural_tag"}), "response_format.format"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        "response_format.json_schema.schema",
    ),
    (CHAT, chat(regex="("), "regex"),
    (CHAT, chat(regex="a", choice=["b"]), "choice"),
    (CHAT, chat(json_schema="{"), "json_schema"),
    (CHAT, chat(choice=[]), "choice"),
    (
        CHAT,
        chat(structured_outputs={"whitespace_pattern": " "}),
        "structured_outputs.whitespace_pattern",
    ),
    (CHAT, chat(tools="x"), "tools"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools.0.function"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), "tools.0.function.name"),
    (CHAT, chat(tools=[tool("f"), tool("g"), tool("f")]), "tools.2.function.name"),
    (CHAT, chat(tools=[tool("f"), tool("a b")]), "tools.1.function.name"),
    (CHAT, chat(tools=[tool("x" * 65)]), "tools.0.function.name"),
    (CHAT, chat(tools=[tool("f\n")]), "tools.0.function.name"),
    (CHAT, chat(tools=[tool("f", {"type": "string"})]), "tools.0.function.parameters"),
    (CHAT, chat(tools=[tool("f", {"type": ["object"]})]), "tools.0.function.parameters"),
    (CHAT, chat(tools=[tool("f", False)]), "tools.0.function.parameters"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nope"}}),
        "tool_choice.function.name",
    ),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(cache_salt="x" * 129), "cache_salt"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    (CHAT, chat(guided_json={"type": "nothing"}), "guided_json"),
    (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "x"}),
        "chat_template_kwargs.chat_template",
    ),
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
    ),
    (CHAT, chat(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (TEXT, {}, "prompt"),
    (TEXT, text(""), "prompt"),
    (TEXT, text([]), "prompt"),
    (TEXT, text([[]]), "prompt"),
    (TEXT, text(["a", ""]), "prompt"),
    (TEXT, text([True]), "prompt"),
    (TEXT, text([1, True]), "prompt"),
    (TEXT, text([1, 2.0]), "prompt"),
    (TEXT, text([1, 2**40]), "prompt"),
    (TEXT, text([1.5]), "prompt"),
    (TEXT, text({"a": 1}), "prompt"),
    (TEXT, text([1, "a"]), "prompt"),
    (TEXT, text([-1]), "prompt"),
    (TEXT, text([10**12]), "prompt"),
    (TEXT, text([[1], [10**9]]), "prompt"),
    (TEXT, text(["a"] * 1025), "prompt"),
    (TEXT, text(max_tokens=0), "max_tokens"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(suffix="end"), "suffix"),
    (TEXT, text(n=3, best_of=2), "best_of"),
    (TEXT, text(best_of=2, stream=True), "best_of"),
    (TEXT, text(["a"] * 100, n=11), "n"),
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": 3}}, "temperature"),
    ("/generate", {"text": 5}, "text"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/abort_request", {}, "rid"),
]


async def test_bad_fields():
    async with Served() as s:
        for path, body, param in BAD:
            reply = await s.post(path, body)
            assert reply.status == 400, (body, reply.raw)
            assert reply.error["param"] == param, (body, reply.error)
            assert reply.error["type"] == "invalid_request_error"
        assert s.engine.gpu.jobs == []
        await s.ok(CHAT, chat())


async def test_a_bad_stream_is_a_plain_error():
    async with Served() as s:
        for path, body, param in BAD:
            if path in (CHAT, TEXT) and param not in ("stream_options",):
                reply = await s.post(path, {**body, "stream": True})
                assert reply.status == 400, (body, reply.raw)
                assert reply.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{not json",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b"[" * 5000,
    ],
)
async def test_what_is_no_json_object(raw):
    async with Served() as s:
        reply = await s.post(TEXT, raw=raw)
        assert reply.status == 400
        assert reply.error["code"] is None


async def test_routes_and_methods():
    async with Served() as s:
        reply = await s.post("/v1/no/such", {})
        assert (reply.status, reply.error["type"]) == (404, "not_found_error")
        reply = await s.get(CHAT)
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        assert reply.error["code"] == "method_not_allowed"
        reply = await s.post(CHAT, chat(model="no-such"))
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert reply.error["param"] == "model"
        reply = await s.get("/v1/models/no/such")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_content_type_and_encoding():
    async with Served() as s:
        raw = json.dumps(chat()).encode()
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Encoding": "gzip"},
            {"Content-Encoding": "br"},
        ):
            reply = await s.post(CHAT, raw=raw, headers=headers)
            assert reply.status == 415, headers
            assert reply.error["type"] == "invalid_request_error"
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
            reply = await s.post(CHAT, raw=raw, headers={"Content-Type": kind})
            assert reply.status == 200


async def test_body_limit():
    async with Served(max_body_bytes=10_000) as s:
        fits = json.dumps(chat()).encode().ljust(10_000)
        assert (await s.post(CHAT, raw=fits)).status == 200
        reply = await s.post(CHAT, raw=fits + b" ")
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert "10000" in reply.error["message"]


async def test_two_megabytes_are_judged_by_their_tokens():
    async with Served() as s:
        reply = await s.post(CHAT, chat("a" * (2 << 20)))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_a_slow_body_is_given_up():
    async with Served(body_timeout_s=0.2) as s:

        async def slowly():
            yield b'{"prompt": '
            import asyncio

            await asyncio.sleep(1)
            yield b'"a"}'

        reply = await s.post(TEXT, raw=slowly())
        assert reply.status == 408


async def test_context_length():
    async with Served(max_model_len=64) as s:
        for body in (text([1] * 64), text([1] * 65), text([1] * 65, stream=True)):
            reply = await s.post(TEXT, body)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert "64" in reply.error["message"]
            assert str(len(body["prompt"])) in reply.error["message"]
        reply = await s.ok(TEXT, text([1] * 63, max_tokens=2**40))
        assert reply["usage"]["completion_tokens"] == 1
        assert reply["choices"][0]["finish_reason"] == "length"
        reply = await s.ok(TEXT, text([1] * 64, max_tokens=0, echo=True))
        assert reply["usage"]["completion_tokens"] == 0


async def test_truncation_keeps_the_end():
    async with Served(max_model_len=64) as s:
        ids = [65 + i % 26 for i in range(100)]
        reply = await s.ok(TEXT, text(ids, truncate_prompt_tokens=10, return_token_ids=True))
        assert reply["choices"][0]["prompt_token_ids"] == ids[-10:]
        reply = await s.ok(TEXT, text(ids, truncate_prompt_tokens=-1, max_tokens=14))
        assert reply["usage"]["prompt_tokens"] == 50
        reply = await s.post(TEXT, text([65] * 257, truncate_prompt_tokens=-1))
        assert reply.status == 400  # the field's description says so
        assert "256: 4 times the context, also where" in reply.error["message"]


async def test_a_small_body_gets_a_small_error():
    async with Served() as s:
        body = chat(stop=[[]] * 20_000, logit_bias={str(i): "x" for i in range(1000)})
        body["messages"] = [{"role": 1}] * 10_000
        reply = await s.post(CHAT, body)
        assert reply.status == 400
        assert len(reply.raw) < 2500
        reply = await s.post(CHAT, chat(model="m" * 100_000))
        assert len(reply.raw) < 2500


PART = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "limit"),
    [
        (TEXT, text([1] * 257), "prompt", 256),
        (TEXT, text([[1], [1] * 257]), "prompt.1", 256),
        (TEXT, text(["a"] * 1025), "prompt", 1024),
        ("/generate", {"input_ids": [1] * 257}, "input_ids", 256),
        ("/generate", {"text": "a", "sampling_params": {"stop": ["a"] * 33}}, None, 32),
        (CHAT, chat(stop=["a"] * 33), "stop", 32),
        (CHAT, chat(messages=user("a") * 10_001), "messages", 10_000),
        (CHAT, {"messages": [{"role": "user", "content": [PART] * 1001}]}, None, 1000),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1001}]}, None, 1000),
        (CHAT, {"messages": [{"role": "user", "content": [PART] * 1000}] * 21}, "messages", 20_000),
        (CHAT, chat(tools=[TOOL] * 1001), "tools", 1000),
        (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", 1024),
        ("/detokenize", {"tokens": [1] * 1_000_001}, "tokens", 1_000_000),
        (CHAT, chat(odd=[1] * (1 << 20) + [1, 2]), None, 1 << 20),
        (CHAT, chat(chat_template_kwargs={"x": [{}] * (1 << 17)}), None, 1 << 17),
    ],
)
async def test_long_lists_name_their_limit(path, body, field, limit):
    async with Served(max_model_len=64) as s:
        reply = await s.post(path, body)
        assert reply.status == 400
        assert str(limit) in reply.error["message"]
        if field:
            assert reply.error["param"] == field


async def test_errors_of_the_engine():
    async with Served() as s:
        s.engine.refusal = EngineError("the step failed")
        for body in (chat(), chat(stream=True)):
            reply = await s.post(CHAT, body)
            assert (reply.status, reply.error["type"]) == (500, "server_error")
        s.engine.refusal = Overloaded("no memory", retry_after_s=2.5)
        reply = await s.post(CHAT, chat())
        assert (reply.status, reply.headers["Retry-After"]) == (503, "3")
        assert reply.error["code"] == "overloaded"
        s.engine.refusal = RuntimeError("/secret/path.py")
        reply = await s.post(CHAT, chat())
        assert reply.status == 500
        assert b"secret" not in reply.raw


async def test_an_error_in_a_running_stream():
    async with Served() as s:
        s.engine.step_s = 0.005

        def fail():
            for stream in list(s.engine._streams.values()):
                stream._fail(EngineError("the step failed"))

        import asyncio

        asyncio.get_running_loop().call_later(0.1, fail)
        lines = await s.raw_events(TEXT, text(max_tokens=1000, ignore_eos=True))
        assert lines[-1] == b"[DONE]"
        assert json.loads(lines[-2])["error"]["message"] == "the step failed"
        assert len(lines) > 3
