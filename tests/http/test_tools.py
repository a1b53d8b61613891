"""Tools and reasoning over HTTP: the fake engine says what a model would."""

import itertools
import json

import pytest
from served import CHAT, Served, chat, user

from stoker.engine.api.errors import StartError
from stoker.engine.text.chat_template import ChatTemplate
from stoker.http.settings import load_config

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo ❄"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Answering(Served):
    """A server whose model answers with a certain text."""

    def __init__(self, answer: str, **flags):
        super().__init__(**flags)
        self.answer = answer

    async def __aenter__(self):
        await super().__aenter__()
        tokenizer = self.engine.tokenizer
        self.engine.sequence = [*tokenizer.encode(self.answer, False), *tokenizer.eos_ids]
        return self


def gathered(events, index=0):
    """The message, the finish reason and the number of deltas out of a stream."""
    message = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    reasons, count = [], 0
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            count += 1
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(
                    {k: v if k != "function" else dict(v) for k, v in call.items() if k != "index"}
                )
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert set(call["function"]) == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, reasons, count


async def both(s, **fields):
    """The choice, after a check that the stream says the same; and how many call deltas came."""
    body = chat(**{"max_tokens": 400, **fields})
    [choice] = (await s.ok(CHAT, body))["choices"]
    message, reasons, count = gathered(await s.events(CHAT, body))
    assert reasons == [choice["finish_reason"]]
    whole = choice["message"]
    for name in ("content", "reasoning_content", "reasoning"):
        assert message[name] == (whole.get(name) or "")
    for call, other in itertools.zip_longest(message["tool_calls"], whole.get("tool_calls", [])):
        assert call["function"] == other["function"]
        assert call["id"].startswith("call_")
        assert other["id"].startswith("call_")
    return choice, count


async def test_calls_stream_as_they_come():
    async with Answering(f"Let me see.\n{OSLO}\n{TIME}") as s:
        choice, count = await both(s, tools=TOOLS)
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
        assert "reasoning_content" not in message
        calls = [call["function"] for call in message["tool_calls"]]
        assert [call["name"] for call in calls] == ["get_weather", "now"]
        assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Oslo ❄"}, {}]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert count > 10  # arguments come piece by piece


async def test_a_call_without_text_has_null_content():
    async with Answering(OSLO) as s:
        choice, _ = await both(s, tools=TOOLS)
        assert choice["message"]["content"] is None


async def test_no_calls_are_looked_for_where_none_may_come():
    async with Answering(OSLO) as s:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            choice, _ = await both(s, **fields)
            assert choice["message"]["content"] == OSLO
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "stop"
        choice, _ = await both(s, tools=[NOW])  # a tool that the request does not have
        assert choice["message"]["content"] == OSLO


async def test_one_call_at_most():
    async with Answering(OSLO + TIME + " and more") as s:
        choice, _ = await both(s, tools=TOOLS, parallel_tool_calls=False)
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
        assert choice["message"]["content"] is None
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
        assert s.engine.gpu.aborts  # nothing is generated behind it


async def test_cut_calls_end_with_length():
    async with Answering(OSLO) as s:
        choice, _ = await both(s, tools=TOOLS, max_tokens=len(OSLO) - 24)
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert '{"city": "Oslo ❄"}'.startswith(arguments)


async def test_choices_are_parsed_apart():
    async with Answering(OSLO) as s:
        body = chat(tools=TOOLS, n=3, max_tokens=400)
        choices = (await s.ok(CHAT, body))["choices"]
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
        assert len(ids) == 3
        events = await s.events(CHAT, body)
        for i in range(3):
            message, reasons, _ = gathered(events, i)
            assert message["tool_calls"][0]["function"]["name"] == "get_weather"
            assert reasons == ["tool_calls"]


async def test_logprobs_of_all_tokens_come_with_calls():
    async with Answering(OSLO) as s:
        body = chat(tools=TOOLS, logprobs=True, max_tokens=400)
        [choice] = (await s.ok(CHAT, body))["choices"]
        num_tokens = len(s.engine.sequence)
        assert len(choice["logprobs"]["content"]) == num_tokens
        events = await s.events(CHAT, body)
        parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
        assert sum(map(len, parts)) == num_tokens


# --- forced calls ---


class Forcing(Answering):
    """Keeps the grammars that requests ask for; the fake model needs none."""

    async def __aenter__(self):
        await super().__aenter__()
        self.specs = []

        async def compile_grammar(spec):
            self.specs.append(spec)

        self.engine.compile_grammar = compile_grammar
        return self


def expand(form):
    """All texts that a small grammar allows, each schema as <its city or empty>."""
    match form["type"]:
        case "const_string":
            return [form["value"]]
        case "json_schema":
            assert form["json_schema"]["type"] == "object"
            return ['{"city": "x"}' if form["json_schema"].get("required") else "{}"]
        case "or":
            return [text for element in form["elements"] for text in expand(element)]
        case "sequence":
            parts = itertools.product(*map(expand, form["elements"]))
            return ["".join(part) for part in parts]
        case "star":
            return ["", *expand(form["content"])]
    raise AssertionError(form)


async def test_required_and_named_calls_are_forced():
    named = {"type": "function", "function": {"name": "now"}}
    async with Forcing(OSLO + "\n" + TIME) as s:
        choice, _ = await both(s, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 2
        form = json.loads(s.specs[-1].source)["format"]
        weather = OSLO.replace("Oslo ❄", "x")
        assert set(expand(form)) == {
            weather,
            TIME,
            *(f"{a}\n{b}" for a in (weather, TIME) for b in (weather, TIME)),
        }
        choice, _ = await both(s, tools=TOOLS, tool_choice="required")
        assert len(choice["message"]["tool_calls"]) == 1
        assert set(expand(json.loads(s.specs[-1].source)["format"])) == {weather, TIME}
    async with Forcing(TIME) as s:
        choice, _ = await both(s, tools=TOOLS, tool_choice=named)
        assert choice["finish_reason"] == "stop"  # as OpenAI's
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["now"]
        assert expand(json.loads(s.specs[-1].source)["format"]) == [TIME]
        assert s.specs[-1].reasoning is None


async def test_what_excludes_a_forced_call():
    async with Served(tool_call_parser="none") as s:
        for choice in ("auto", "required", None):
            fields = {"tool_choice": choice} if choice else {}
            reply = await s.post(CHAT, chat(tools=TOOLS, **fields))
            assert (reply.status, reply.error["param"]) == (400, "tool_choice")
        assert (await s.post(CHAT, chat(tools=TOOLS, tool_choice="none"))).status == 200


# --- reasoning ---

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking }}"


async def test_reasoning_is_apart():
    text = "<think>\nIt ends. 4 is even.\n</think>\n\nYes."
    async with Answering(text, reasoning_parser="qwen3") as s:
        choice, _ = await both(s, stop=["ends", "Zz"])  # stops hold for what is visible
        message = choice["message"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == message["reasoning"] == "It ends. 4 is even."
        assert choice["finish_reason"] == "stop"
        choice, _ = await both(s, stop=["es"])
        assert (choice["message"]["content"], choice["stop_reason"]) == ("Y", "es")
        choice, _ = await both(s, separate_reasoning=False)
        assert choice["message"]["content"] == text
        assert "reasoning" not in choice["message"]
        usage = (await s.ok(CHAT, chat(max_tokens=400)))["usage"]
        # The fake model's tokens are bytes: the one that completes the first tag counts.
        want = len(text.partition("\n\n")[0].removeprefix("<think"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": want}
        options = {"stream_options": {"include_usage": True}}
        events = await s.events(CHAT, chat(max_tokens=400, **options))
        assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": want}


async def test_the_prompt_may_open_the_reasoning():
    async with Answering("Hm</think>Yes.", reasoning_parser="qwen3") as s:
        s.engine.chat_template = ChatTemplate(THINKS, {})
        for fields in (
            {"enable_thinking": True},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ):
            choice, _ = await both(s, **fields)
            assert choice["message"]["reasoning_content"] == "Hm"
            assert choice["message"]["content"] == "Yes."
        for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            choice, _ = await both(s, **fields)
            assert choice["message"]["content"] == "Hm</think>Yes."


async def test_an_answer_that_never_leaves_its_reasoning_is_content_too():
    async with Answering("It is 4.", reasoning_parser="deepseek-r1") as s:
        choice, _ = await both(s)
        assert choice["message"]["content"] == "It is 4."
        choice, _ = await both(s, max_tokens=3)
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning_content"] == "It "


async def test_a_named_tools_grammar_holds_only_that_tool():
    many = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(900)]
    named = {"type": "function", "function": {"name": "now"}}
    async with Forcing(TIME, max_model_len=1 << 17) as s:
        await both(s, tools=[NOW], tool_choice=named)
        await both(s, tools=[*many, NOW], tool_choice=named)
        assert len({spec.source for spec in s.specs}) == 1


async def test_parameters_may_be_true_or_left_out():
    async with Forcing(TIME) as s:
        for function in ({"name": "now", "parameters": True}, {"name": "now"}):
            tools = [{"type": "function", "function": function}]
            choice, _ = await both(s, tools=tools, tool_choice="required")
            assert choice["finish_reason"] == "tool_calls"
        assert len({spec.source for spec in s.specs}) == 1


async def test_harmony_has_channels():
    text = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    )
    async with Answering(text, tool_call_parser="gpt-oss") as s:
        choice, _ = await both(s, tools=TOOLS)
        assert choice["message"]["reasoning_content"] == "Hm"
        assert choice["finish_reason"] == "tool_calls"
    async with Answering("<|channel|>final<|message|>Hi", reasoning_parser="gpt-oss") as s:
        choice, _ = await both(s)
        assert choice["message"]["content"] == "Hi"


async def test_forced_calls_come_after_the_reasoning():
    async with Forcing("<think>x</think>" + TIME, reasoning_parser="qwen3") as s:
        choice, _ = await both(s, tools=[NOW], tool_choice="required")
        assert choice["message"]["reasoning_content"] == "x"
        before = s.specs[-1].reasoning
        assert before.ends == ("</think>",)
        assert not before.is_open
        assert before.begins == (tuple(s.engine.tokenizer.encode("<think>", False)),)


def test_parsers_that_do_not_go_together():
    from stoker.http.answers import Formats

    config = load_config({"tool_call_parser": "hermes", "reasoning_parser": "gpt-oss"})
    with pytest.raises(StartError, match="do not go together"):
        Formats(config, None)
    with pytest.raises(StartError, match="--tool-call-parser"):
        load_config({"tool_call_parser": "hermse"})


# --- history and templates ---

HISTORY = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{{ m.reasoning_content if m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{{ c.function.arguments.city }}{% endfor %};{% endfor %}{% if tools %}{% endif %}"
)


async def test_history_with_calls_reaches_the_template_as_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather"}}
    async with Served() as s:
        s.engine.chat_template = ChatTemplate(HISTORY, {})
        for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
            call["function"]["arguments"] = arguments
            messages = [
                *user("w?"),
                {"role": "assistant", "tool_calls": [call], "reasoning": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
            ]
            await s.ok(CHAT, chat(messages=messages, tools=TOOLS))
            prompt = s.engine.tokenizer.decode(s.engine.gpu.adds[-1].prompt)
            assert prompt == 'user:w?;assistant:hmget_weather{"city": "Oslo"}Oslo;tool:5;'
        call["function"]["arguments"] = '{"city": '
        reply = await s.post(CHAT, chat(messages=messages))
        assert reply.status == 400
        assert reply.error["param"] == "messages.1.tool_calls.0.function.arguments"


async def test_tools_are_explained_where_the_template_knows_none():
    async with Answering(OSLO) as s:
        s.engine.chat_template = ChatTemplate(
            "{% for m in messages %}{{ m.content }}{% endfor %}", {}
        )
        choice, _ = await both(s, tools=TOOLS)
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        prompt = s.engine.tokenizer.decode(s.engine.gpu.adds[-1].prompt)
        assert "The weather of a city" in prompt
        assert prompt.endswith("</tool_call>\n\nhi")


async def test_templates_of_requests():
    async with Served() as s:
        reply = await s.post(CHAT, chat(chat_template="{{ 1 }}"))
        assert (reply.status, reply.error["param"]) == (400, "chat_template")
    async with Served(trust_request_chat_template=True) as s:
        await s.ok(CHAT, chat(chat_template="<{{ messages[0].content }}>"))
        assert s.engine.tokenizer.decode(s.engine.gpu.adds[-1].prompt) == "<hi>"
        for bad in ("{% for %}", "{{ x | nope }}"):
            reply = await s.post(CHAT, chat(chat_template=bad))
            assert (reply.status, reply.error["param"]) == (400, "chat_template")
        reply = await s.post(CHAT, chat(chat_template="{{ ''.__class__.__mro__ }}"))
        assert reply.status == 400
