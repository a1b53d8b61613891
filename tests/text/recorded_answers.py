# ruff: noqa: E501, RUF001
"""Answers as models of each family write them, after the public descriptions of the formats, and
what they say. What they say is written by hand here, or follows from how they were put together.

An expected call is (name, arguments): an object where the arguments are whole, else their text.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    },
    "add_note": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "meta": {"$ref": "#/$defs/meta"},
            "pinned": {"type": "boolean"},
            "due": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "score": {"type": "number"},
        },
        "$defs": {"meta": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
Call = tuple[str, Any]


@dataclass(frozen=True)
class Answer:
    """A recorded answer.

    Attributes:
        tools: name of the tool format, or "".
        thinks: name of the reasoning format, or "".
    """

    tools: str
    what: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    thinks: str = ""
    is_open: bool = False
    is_cut: bool = False
    single: bool = False

    def __str__(self) -> str:
        return f"{self.tools or self.thinks}-{self.what}".replace(" ", "_")


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- how each family writes calls: (name, arguments) one after the other ---


def tagged(begin: str, end: str, name: str = "name", arguments: str = "arguments") -> Any:
    def write(calls: list[Call]) -> str:
        return "\n".join(begin + js({name: n, arguments: a}) + end for n, a in calls)

    return write


def listed(begin: str, end: str, name: str = "name", arguments: str = "arguments") -> Any:
    def write(calls: list[Call]) -> str:
        return begin + js([{name: n, arguments: a} for n, a in calls]) + end

    return write


def headed(before: str, name_end: str, after: str, opening: str = "", closing: str = "") -> Any:
    def write(calls: list[Call]) -> str:
        return opening + "".join(before + n + name_end + js(a) + after for n, a in calls) + closing

    return write


def kimi(calls: list[Call]) -> str:
    inner = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{js(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(inner) + "<|tool_calls_section_end|>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else js(value)


def coder(calls: list[Call]) -> str:
    def one(n: str, a: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in a.items())
        return f"<tool_call>\n<function={n}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def seed(calls: list[Call]) -> str:
    return coder(calls).replace("tool_call>", "seed:tool_call>")


def glm(calls: list[Call]) -> str:
    def one(n: str, a: dict[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in a.items()
        )
        return f"<tool_call>{n}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def minimax(calls: list[Call]) -> str:
    def one(n: str, a: dict[str, Any]) -> str:
        inner = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in a.items())
        return f'<invoke name="{n}">\n{inner}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(one(*c) for c in calls) + "</minimax:tool_call>"


def dsml(calls: list[Call]) -> str:
    def one(n: str, a: dict[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{k}" string="{js(isinstance(v, str))}">{plain(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in a.items()
        )
        return f'<｜DSML｜invoke name="{n}">\n{inner}</｜DSML｜invoke>\n'

    inner = "".join(one(*call) for call in calls)
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


def pythonic(begin: str, end: str) -> Any:
    def write(calls: list[Call]) -> str:
        def one(n: str, a: dict[str, Any]) -> str:
            return f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})"

        return begin + "[" + ", ".join(one(*call) for call in calls) + "]" + end

    return write


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{js(a)}<|call|>"
        for n, a in calls
    )


def functionary(calls: list[Call]) -> str:
    return ">>>".join(f"{n}\n{js(a)}" for n, a in calls)


DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FAMILIES: dict[str, Callable[[list[Call]], str]] = {
    "hermes": tagged("<tool_call>\n", "\n</tool_call>"),
    "llama3-json": lambda calls: "; ".join(js({"name": n, "parameters": a}) for n, a in calls),
    "pythonic": pythonic("", ""),
    "llama4-pythonic": pythonic("<|python_start|>", "<|python_end|>"),
    "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral-json": listed("[TOOL_CALLS] ", ""),
    "mistral": headed("[TOOL_CALLS]", "[ARGS]", ""),
    "deepseek-v3": headed(
        f"{DS[1]}function{DS[2]}", "\n```json\n", f"\n```{DS_END[0]}", DS[0], DS_END[1]
    ),
    "deepseek-v3.1": headed(DS[1], DS[2], DS_END[0], DS[0], DS_END[1]),
    "deepseek-v3.2": dsml,
    "qwen3-coder": coder,
    "seed-oss": seed,
    "glm": glm,
    "minimax-m2": minimax,
    "gpt-oss": harmony,
    "kimi-k2": kimi,
    "granite": listed("<|tool_call|>", ""),
    "phi4-mini": listed("functools", ""),
    "functionary": functionary,
    "functionary-v3.1": headed("<function=", ">", "</function>\n"),
    "xlam": listed("", ""),
    "jamba": listed("<tool_calls>\n", "\n</tool_calls>"),
    "cohere": listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "internlm": tagged("<|action_start|> <|plugin|>\n", "<|action_end|>", arguments="parameters"),
}
# Before these there can be no content: their calls are the first that the answer has.
ONLY_FIRST = {"llama3-json", "pythonic", "xlam"}
# Text in these is a message of its own.
CHANNELS = {"gpt-oss", "functionary"}
# Values in these are text between tags.
XML = {"qwen3-coder", "seed-oss", "glm", "minimax-m2", "deepseek-v3.2"}

OSLO: Call = ("get_weather", {"city": "Oslo", "days": 2})
EMOJI: Call = ("get_weather", {"city": "東京 🗼 naïve \u200d👩‍🚀", "unit": "C"})
NESTED: Call = (
    "add_note",
    {
        "text": "a\n\tb",
        "tags": ["x", "y, z", "]}", "{("],
        "meta": {"deep": {"er": [1, [2, {"k": None}], -3.5e-7]}, "f": False},
        "pinned": True,
    },
)
QUOTES: Call = ("add_note", {"text": 'she said "hi\\there" {"a": [1]} \'ok\'', "tags": ['"', "\\"]})
NOTHING: Call = ("now", {})

SCENARIOS: dict[str, tuple[str, list[Call], str]] = {
    "one call": ("", [OSLO], ""),
    "two parallel calls": ("", [OSLO, EMOJI], ""),
    "three calls": ("", [NOTHING, NESTED, OSLO], ""),
    "text before": ("Let me look <that> up [1].", [OSLO], ""),
    "text after": ("", [OSLO], "Done: {ok} ✅"),
    "text around": ("First,\nthis:", [QUOTES], "and so on."),
    "unicode": ("", [EMOJI], ""),
    "nested objects": ("", [NESTED], ""),
    "escaped quotes": ("", [QUOTES], ""),
    "empty arguments": ("", [NOTHING], ""),
}


def _scenarios() -> list[Answer]:
    answers = []
    for family, write in FAMILIES.items():
        for what, (before, calls, after) in SCENARIOS.items():
            if family in ONLY_FIRST and before:
                continue
            text = write(calls)
            if family == "gpt-oss":
                text = (f"<|channel|>final<|message|>{before}<|end|>" if before else "") + text
                text += f"<|start|>assistant<|channel|>final<|message|>{after}" if after else ""
            elif family == "functionary":
                text = (f"all\n{before}>>>" if before else "") + text
                text += f">>>all\n{after}" if after else ""
            else:
                text = "\n\n".join(filter(None, (before, text, after)))
            answers.append(Answer(family, what, text, before + after, tuple(calls)))
        words = "A plain answer with <b>, {braces}, [lists] and f(x) = 1. 🎉\n"
        plain_text = {
            "gpt-oss": f"<|channel|>final<|message|>{words}",
            "functionary": f"all\n{words}",
        }.get(family, words)
        answers.append(Answer(family, "plain text", plain_text, words))
        answers.append(Answer(family, "no markup at all", "\n Just\ntext \n", "\n Just\ntext \n"))
        answers.append(Answer(family, "nothing", "", ""))
    return answers


def _quirks() -> list[Answer]:
    """What does not go by the book, family by family."""
    h_call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    city = '{"city": "Oslo"}'
    weather = ("get_weather", {"city": "Oslo"})
    return [
        # hermes and qwen
        Answer("hermes", "arguments first",
               '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>',
               calls=(weather,)),
        Answer("hermes", "arguments as a string",
               r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>',
               calls=(weather,)),
        Answer("hermes", "no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(NOTHING,)),
        Answer("hermes", "null arguments", '<tool_call>{"name":"now","arguments":null}</tool_call>',
               calls=(NOTHING,)),
        Answer("hermes", "other members",
               '<tool_call>{"id": 1, "name": "now", "type": {"a": ["}"]}, "arguments": {} , "x": "y"}'
               "</tool_call>", calls=(NOTHING,)),
        Answer("hermes", "no space at all", '<tool_call>{"name":"get_weather","arguments":'
               '{"city":"Oslo"}}</tool_call><tool_call>{"name":"now","arguments":{}}</tool_call>',
               calls=(weather, NOTHING)),
        Answer("hermes", "end tag missing", '<tool_call>\n{"name": "now", "arguments": {}}',
               calls=(NOTHING,)),
        Answer("hermes", "raw newline and stray backslash in a string",
               '<tool_call>{"name": "add_note", "arguments": {"text": "a\nb\\d\tc"}}</tool_call>',
               calls=(("add_note", {"text": "a\nb\\d\tc"}),)),
        Answer("hermes", "escapes",
               r'<tool_call>{"name": "add_note", "arguments": {"text": "\ud83c\udf89 \u00e9\/"}}'
               "</tool_call>", calls=(("add_note", {"text": "🎉 é/"}),)),
        Answer("hermes", "unknown tool", '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>',
               content='<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'),
        Answer("hermes", "malformed then good", "<tool_call>oops</tool_call> " + h_call,
               content="<tool_call>oops</tool_call>", calls=(NOTHING,)),
        Answer("hermes", "good then malformed", h_call + "\n<tool_call>{now}</tool_call>",
               content="<tool_call>{now}</tool_call>", calls=(NOTHING,)),
        Answer("hermes", "malformed inside of the arguments",
               '<tool_call>{"name": "get_weather", "arguments": {"city": Oslo}}</tool_call>',
               content="Oslo}}</tool_call>", calls=(("get_weather", '{"city": '),)),
        Answer("hermes", "malformed before the name",
               '<tool_call>{"arguments": {"city": Oslo}, "name": "get_weather"}</tool_call>',
               content='<tool_call>{"arguments": {"city": Oslo}, "name": "get_weather"}</tool_call>'),
        Answer("hermes", "no object as arguments", '<tool_call>{"name": "now", "arguments": [1]}',
               content='<tool_call>{"name": "now", "arguments": [1]}'),
        Answer("hermes", "trailing comma",
               '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo",}}</tool_call>',
               content="}}</tool_call>", calls=(("get_weather", '{"city": "Oslo",'),)),
        Answer("hermes", "truncated in the tag", "Well <tool_c", content="Well <tool_c", is_cut=True),
        Answer("hermes", "truncated in the name", '<tool_call>{"name": "get_we',
               content='<tool_call>{"name": "get_we', is_cut=True),
        Answer("hermes", "truncated in the arguments",
               '<tool_call>{"name": "get_weather", "arguments": {"city": "Os',
               calls=(("get_weather", '{"city": "Os'),), is_cut=True),
        Answer("hermes", "truncated in a number and an escape",
               '<tool_call>{"name": "get_weather", "arguments": {"days": 1',
               calls=(("get_weather", '{"days": 1'),), is_cut=True),
        Answer("hermes", "only the first call", h_call + h_call + " more", calls=(NOTHING,),
               single=True),
        Answer("hermes", "tag in prose", "Use <tool_call> tags, or <tool_calls>, or < tool_call>.",
               content="Use <tool_call> tags, or <tool_calls>, or < tool_call>."),
        Answer("hermes", "tag in a string",
               '<tool_call>{"name": "add_note", "arguments": {"text": "</tool_call><tool_call>"}}'
               "</tool_call>", calls=(("add_note", {"text": "</tool_call><tool_call>"}),)),
        Answer("hermes", "very deep", '<tool_call>{"name": "now", "arguments": ' + "[" * 200,
               content='<tool_call>{"name": "now", "arguments": ' + "[" * 200),
        # llama 3
        Answer("llama3-json", "python tag", '<|python_tag|>{"name": "now", "parameters": {}}',
               calls=(NOTHING,)),
        Answer("llama3-json", "python tag in text",
               'I call: <|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
               content="I call:", calls=(NOTHING,)),
        Answer("llama3-json", "newline between", '\n{"name": "now", "parameters": {}}\n{"name": "now"}',
               calls=(NOTHING, NOTHING)),
        Answer("llama3-json", "an object that is no call", '{"temperature": 3}',
               content='{"temperature": 3}'),
        Answer("llama3-json", "an object in text", 'Sure: {"name": "now", "parameters": {}}',
               content='Sure: {"name": "now", "parameters": {}}'),
        Answer("llama3-json", "code", '<|python_tag|>brave.call(query="x")',
               content='<|python_tag|>brave.call(query="x")'),
        Answer("llama3-json", "truncated", '{"name": "get_weather", "parameters": {"city": "Os',
               calls=(("get_weather", '{"city": "Os'),), is_cut=True),
        Answer("llama3-json", "malformed second", '{"name": "now"}; {"name": "never"}',
               content='; {"name": "never"}', calls=(NOTHING,)),
        # python
        Answer("pythonic", "spaces and trailing commas",
               "[ get_weather( city = 'Oslo' , days=-2,\n) , now() , ]",
               calls=(("get_weather", {"city": "Oslo", "days": -2}), NOTHING)),
        Answer("pythonic", "JSON literals", '[add_note(pinned=true, due=null, text="\\n\\x41")]',
               calls=(("add_note", {"pinned": True, "due": None, "text": "\nA"}),)),
        Answer("pythonic", "tuples and concatenation", "[add_note(tags=('a', 'b'), text='x' 'y')]",
               calls=(("add_note", {"tags": ["a", "b"], "text": "xy"}),)),
        Answer("pythonic", "a list that is no call", "[link](http://x) and [1, 2]",
               content="[link](http://x) and [1, 2]"),
        Answer("pythonic", "unknown tool", "[rm(path='/')]", content="[rm(path='/')]"),
        Answer("pythonic", "code in an argument", "[get_weather(days=1, city=open('x'))]",
               content="city=open('x'))]", calls=(("get_weather", {"days": 1}),)),
        Answer("pythonic", "positional", "[get_weather('Oslo')] ok", content="'Oslo')] ok",
               calls=(("get_weather", {}),)),
        Answer("pythonic", "half a surrogate pair", "[get_weather(days=1, city='\\ud800')]",
               content="city='\\ud800')]", calls=(("get_weather", {"days": 1}),)),
        Answer("pythonic", "truncated", "[get_weather(days=1, city='Os", content="city='Os",
               calls=(("get_weather", '{"days": 1'),), is_cut=True),
        Answer("pythonic", "very deep", "[get_weather(days=" + "[" * 100,
               content="days=" + "[" * 100, calls=(("get_weather", {}),)),
        # mistral
        Answer("mistral", "with an id", '[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}',
               calls=(NOTHING,)),
        Answer("mistral", "without ARGS", "[TOOL_CALLS]get_weather" + city, calls=(weather,)),
        Answer("mistral", "the old list", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
               calls=(NOTHING,)),
        Answer("mistral", "unknown tool", "[TOOL_CALLS]rm[ARGS]{}", content="[TOOL_CALLS]rm[ARGS]{}"),
        Answer("mistral", "truncated", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"ci',
               calls=(NOTHING, ("get_weather", '{"ci')), is_cut=True),
        Answer("mistral", "truncated name", "[TOOL_CALLS]get_wea", content="[TOOL_CALLS]get_wea",
               is_cut=True),
        Answer("mistral-json", "empty list", "[TOOL_CALLS] []", content="[TOOL_CALLS] []"),
        Answer("mistral-json", "truncated", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"na',
               content=', {"na', calls=(NOTHING,), is_cut=True),
        # deepseek
        Answer("deepseek-v3", "newlines between",
               f"{DS[0]}\n{DS[1]}function{DS[2]}now\n```json\n{{}}\n```\n{DS_END[0]}\n"
               f"{DS[1]}function{DS[2]}get_weather\n```json\n{city}\n```{DS_END[0]}\n{DS_END[1]}\n",
               calls=(NOTHING, weather)),
        Answer("deepseek-v3", "malformed", f"{DS[0]}{DS[1]}function{DS[2]}now\nnothing{DS_END[0]}",
               content=f"{DS[0]}{DS[1]}function{DS[2]}now\nnothing{DS_END[0]}"),
        Answer("deepseek-v3", "truncated", f"{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{{",
               calls=(("get_weather", "{"),), is_cut=True),
        Answer("deepseek-v3.1", "no section", f"Hm. {DS[1]}now{DS[2]}{{}}{DS_END[0]}",
               content="Hm.", calls=(NOTHING,)),
        Answer("deepseek-v3.1", "malformed", f"{DS[0]}{DS[1]}rm{DS[2]}{{}}{DS_END[0]}{DS_END[1]}",
               content=f"{DS[0]}{DS[1]}rm{DS[2]}{{}}{DS_END[0]}{DS_END[1]}"),
        Answer("deepseek-v3.1", "truncated", f"{DS[0]}{DS[1]}get_weather{DS[2]}{{\"city\": tr",
               calls=(("get_weather", '{"city": tr'),), is_cut=True),
        Answer("deepseek-v3.2", "truncated",
               '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" '
               'string="true">Os', calls=(("get_weather", '{"city": "Os'),), is_cut=True),
        # qwen3-coder
        Answer("qwen3-coder", "one line, no tool_call tag",
               "<function=get_weather><parameter=city>Oslo</parameter></function>", calls=(weather,)),
        Answer("qwen3-coder", "types by the schema",
               "<tool_call><function=add_note><parameter=text>\n1\n\n</parameter>"
               "<parameter=due>\nnull\n</parameter><parameter=pinned>True</parameter>"
               "<parameter=score>\n1.50\n</parameter><parameter=tags>\n[1, \"a\"]\n</parameter>"
               "<parameter=other>{\"a\": 1}</parameter></function></tool_call>",
               calls=(("add_note", {"text": "1\n", "due": None, "pinned": True, "score": 1.5,
                                    "tags": [1, "a"], "other": {"a": 1}}),)),
        Answer("qwen3-coder", "what is not of its type is text",
               "<tool_call><function=get_weather><parameter=days>two</parameter>"
               "<parameter=unit>NaN</parameter></function></tool_call>",
               calls=(("get_weather", {"days": "two", "unit": "NaN"}),)),
        Answer("qwen3-coder", "tags and quotes in text",
               '<tool_call><function=add_note><parameter=text>a < b </p> "q" \\ <parameter></parameter>'
               "</function></tool_call>",
               calls=(("add_note", {"text": 'a < b </p> "q" \\ <parameter>'}),)),
        Answer("qwen3-coder", "unknown tool", "<tool_call><function=rm></function></tool_call>",
               content="<tool_call><function=rm></function></tool_call>"),
        Answer("qwen3-coder", "malformed after a parameter",
               "<tool_call><function=get_weather><parameter=city>Oslo</parameter>oops",
               content="oops", calls=(weather,)),
        Answer("qwen3-coder", "truncated",
               "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
               calls=(("get_weather", '{"city": "Os'),), is_cut=True),
        # glm
        Answer("glm", "one line", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo"
               "</arg_value></tool_call><tool_call>now</tool_call>", calls=(weather, NOTHING)),
        Answer("glm", "value is missing", "<tool_call>get_weather\n<arg_key>city</arg_key>Oslo",
               content="<arg_key>city</arg_key>Oslo", calls=(("get_weather", {}),)),
        Answer("glm", "unknown tool", "<tool_call>rm\n</tool_call>",
               content="<tool_call>rm\n</tool_call>"),
        Answer("glm", "truncated", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os",
               calls=(("get_weather", '{"city": "Os'),), is_cut=True),
        # harmony
        Answer("gpt-oss", "thoughts, preamble, call",
               "<|channel|>analysis<|message|>Need the time.<|end|><|start|>assistant<|channel|>"
               "commentary<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary "
               "to=functions.now <|constrain|>json<|message|>{}",
               content="One moment.", reasoning="Need the time.", calls=(NOTHING,)),
        Answer("gpt-oss", "recipient in the role",
               "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.get_weather"
               f"<|channel|>commentary json<|message|>{city}<|call|>",
               reasoning="x", calls=(weather,)),
        Answer("gpt-oss", "recipient at once", f" to=functions.get_weather<|channel|>commentary "
               f"<|constrain|>json<|message|>{city}<|call|>", calls=(weather,)),
        Answer("gpt-oss", "thoughts and answer", "<|channel|>analysis<|message|> a\n<|end|>"
               "<|start|>assistant<|channel|>final<|message|> b\n<|return|>",
               content=" b\n", reasoning=" a\n"),
        Answer("gpt-oss", "only thoughts", "<|channel|>analysis<|message|>It is 4.",
               content="It is 4.", reasoning="It is 4."),
        Answer("gpt-oss", "truncated in thoughts", "<|channel|>analysis<|message|>It is",
               reasoning="It is", is_cut=True),
        Answer("gpt-oss", "truncated in a header", "<|channel|>ana", is_cut=True),
        Answer("gpt-oss", "truncated in a call",
               '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"ci',
               calls=(("get_weather", '{"ci'),), is_cut=True),
        Answer("gpt-oss", "unknown recipient",
               "<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}<|call|>",
               content="<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}"),
        Answer("gpt-oss", "header without end", "<|channel|>" + "x" * 600,
               content="<|channel|>" + "x" * 600),
        # kimi, granite, phi, functionary, others
        Answer("kimi-k2", "newlines", "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions."
               "get_weather:3 <|tool_call_argument_begin|> " + city + "\n<|tool_call_end|>\n"
               "<|tool_calls_section_end|>", calls=(weather,)),
        Answer("kimi-k2", "truncated", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now",
               content="<|tool_calls_section_begin|><|tool_call_begin|>functions.now", is_cut=True),
        Answer("granite", "with a space", '<|tool_call|> [{"name": "now", "arguments": {}}]',
               calls=(NOTHING,)),
        Answer("granite", "truncated", '<|tool_call|>[{"name": "get_weather", "arguments": {"a": [',
               calls=(("get_weather", '{"a": ['),), is_cut=True),
        Answer("granite", "malformed", "<|tool_call|>now()", content="<|tool_call|>now()"),
        Answer("phi4-mini", "tagged", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
               calls=(NOTHING,)),
        Answer("phi4-mini", "a word of prose", "Use functools.partial.",
               content="Use functools.partial."),
        Answer("phi4-mini", "truncated", 'functools[{"name": "now", "arguments": {"a',
               calls=(("now", '{"a'),), is_cut=True),
        Answer("functionary", "unknown tool", ">>>rm\n{}", content=">>>rm\n{}"),
        Answer("functionary", "truncated", 'get_weather\n{"city"', calls=(("get_weather", '{"city"'),),
               is_cut=True),
        Answer("functionary", "truncated header", "all\nYes.>>>get_wea", content="Yes.>>>get_wea",
               is_cut=True),
        Answer("functionary-v3.1", "malformed", "<function=now>nothing</function>",
               content="<function=now>nothing</function>"),
        Answer("xlam", "fenced", '```json\n[{"name": "now", "arguments": {}}]\n```', calls=(NOTHING,)),
        Answer("xlam", "a list that is no call", "[1, 2]", content="[1, 2]"),
    ]  # fmt: skip


def _reasoning() -> list[Answer]:
    answers = []
    tags = {
        "deepseek-r1": ("<think>", "</think>"),
        "qwen3-thinking": ("<think>", "</think>"),
        "minimax": ("<think>", "</think>"),
        "qwen3": ("<think>", "</think>"),
        "glm": ("<think>", "</think>"),
        "deepseek-v3": ("<think>", "</think>"),
        "kimi-k2": ("<think>", "</think>"),
        "kimi": ("◁think▷", "◁/think▷"),
        "magistral": ("[THINK]", "[/THINK]"),
        "seed-oss": ("<seed:think>", "</seed:think>"),
        "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
        "granite": ("Here is my thought process:", "Here is my response:"),
    }
    for name, (start, end) in tags.items():
        always = name in ("deepseek-r1", "qwen3-thinking", "minimax")

        def add(what: str, text: str, *, _name: str = name, **fields: Any) -> None:
            answers.append(Answer("", what, text, thinks=_name, **fields))

        add("thoughts and answer", f"{start}\nHm, 2 + 2…\n{end}\n\nFour 🎉\n",
            reasoning="Hm, 2 + 2…", content="Four 🎉\n")  # fmt: skip
        add("tight", f"{start}a{end}b", reasoning="a", content="b")
        add("empty thoughts", f"{start}\n\n{end}\n\nb", content="b")
        add("opened by the prompt", f"a < b {end} c", is_open=True, reasoning="a < b", content="c")
        add("opened twice", f"\n{start}a{end}c", is_open=True, reasoning="a", content="c")
        add("a second tag is text", f"{start}a{end}b {start} c", reasoning="a",
            content=f"b {start} c")  # fmt: skip
        add("never closed", f"{start}only this", reasoning="only this", content="only this")
        add("cut", f"{start}and then {end[:3]}", reasoning=f"and then {end[:3]}", is_cut=True)
        if always:
            add("no tag", "just words", is_open=True, reasoning="just words", content="just words")
        else:
            add("no thoughts", "\njust words", content="\njust words")
            add("no thoughts, tag later", f"so {start} is a tag", content=f"so {start} is a tag")
    answers += [
        Answer("hermes", "thoughts and a call",
               '<think>\nI should.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n'
               "</tool_call>", reasoning="I should.", calls=(NOTHING,), thinks="qwen3"),
        Answer("hermes", "a call among the thoughts",
               '<think>\n<tool_call>{"name": "now"}</tool_call>\n</think>\nOk', content="Ok",
               reasoning='<tool_call>{"name": "now"}</tool_call>', thinks="qwen3"),
        Answer("glm", "thoughts, text and a call",
               "\n<think>Hm</think>\nWait.\n<tool_call>now\n</tool_call>", content="Wait.",
               reasoning="Hm", calls=(NOTHING,), thinks="glm"),
        Answer("kimi-k2", "calls end the thoughts", "<think>Now " + kimi([NOTHING]), reasoning="Now",
               calls=(NOTHING,), thinks="kimi-k2"),
        Answer("mistral", "thoughts and a call", "[THINK]Hm[/THINK]So:[TOOL_CALLS]now[ARGS]{}",
               content="So:", reasoning="Hm", calls=(NOTHING,), thinks="magistral"),
        Answer("deepseek-v3.1", "thoughts and a call", f"Hm</think>{DS[0]}{DS[1]}now{DS[2]}{{}}"
               f"{DS_END[0]}{DS_END[1]}", reasoning="Hm", calls=(NOTHING,), thinks="deepseek-v3",
               is_open=True),
    ]  # fmt: skip
    return answers


def _long() -> list[Answer]:
    """One long answer a family: text, then calls with much in them."""
    words = 'Once upon a time in 東京 <there> was \\"a\\" { bracket [ and\n\nmore… ' * 20
    words = words.strip()
    big: Call = ("add_note", {"text": words, "tags": [f"tag {i} 🎈" for i in range(40)]})
    answers = []
    for family, write in FAMILIES.items():
        before = "" if family in ONLY_FIRST else words
        text = write([OSLO, big, NESTED, big])
        if family == "gpt-oss":
            text = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant" + text
        elif family == "functionary":
            text = f"all\n{before}>>>" + text
        else:
            text = before + text
        answers.append(Answer(family, "long", text, before, (OSLO, big, NESTED, big)))
    return answers


SHORT = [*_scenarios(), *_quirks(), *_reasoning()]
LONG = _long()
