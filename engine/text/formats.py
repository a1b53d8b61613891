# ruff: noqa: RUF001 (DeepSeek's markers are written with full-width bars)
"""Which tool calls and which reasoning a model writes: formats by name, and the choice by its
chat template.

Runs on: any (pure).
"""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .channels import HARMONY_MARKERS, read_functionary, read_harmony
from .reader import Reader, Steps
from .tool_syntax import HeaderCalls, JsonCalls, PythonCalls, Syntax, Tools, XmlCalls, read_answer


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        syntax: a syntax of calls inside of content, or what reads a whole answer.
        signs: a chat template with all of these is of this family.
        forced: how a call is written where a grammar forces it: before the name, between name
            and arguments, after them. None: the hermes form is forced.
        style: of the arguments there, by xgrammar's names.
        opening, separator, closing: of forced calls, around and between them.
        markers: text that must stay visible where it is a special token.
    """

    syntax: Syntax | Callable[[Reader], Steps[None]]
    signs: tuple[str, ...] = ()
    forced: tuple[str, str, str] | None = None
    style: str = "json"
    opening: str = ""
    separator: str = ""
    closing: str = ""
    extra_markers: tuple[str, ...] = ()
    new_id: Callable[[], str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts of the syntax."""
        fields = () if callable(self.syntax) else vars(self.syntax).values()
        texts = [text for f in fields for text in (f if isinstance(f, tuple) else (f,))]
        return (*self.extra_markers, *(t for t in texts if isinstance(t, str) and t))

    @property
    def has_channels(self) -> bool:
        """The format brings its own reasoning, and an answer without tools has it too."""
        return self.syntax is read_harmony

    def read(self, r: Reader, tools: Tools) -> Steps[None]:
        """Read an answer with calls."""
        if callable(self.syntax):
            yield from self.syntax(r)
        else:
            yield from read_answer(r, self.syntax, tools)


def _mistral_id() -> str:
    """Nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _qwen_xml(section: str, section_end: str) -> XmlCalls:
    return XmlCalls(
        section=section,
        section_end=section_end,
        call="<function=",
        name_ends=(">",),
        call_end="</function>",
        parameter="<parameter=",
        key_ends=(">",),
        value="",
        value_end="</parameter>",
        strips=True,
    )


def _invoke_xml(section: str, section_end: str, dsml: str = "") -> XmlCalls:
    key_ends = ('" string="true">', '" string="false">') if dsml else ('">',)
    return XmlCalls(
        section=section,
        section_end=section_end,
        call=f'<{dsml}invoke name="',
        name_ends=('">',),
        call_end=f"</{dsml}invoke>",
        parameter=f'<{dsml}parameter name="',
        key_ends=key_ends,
        value="",
        value_end=f"</{dsml}parameter>",
        strips=not dsml,
    )


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
_DEEPSEEK_END = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = "<|tool_calls_section_begin|>"

# The first whose signs are all in the chat template is the model's.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "gpt-oss": ToolFormat(
        read_harmony,
        signs=("<|channel|>", "<|message|>"),
        forced=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        separator="<|end|><|start|>assistant",
        extra_markers=HARMONY_MARKERS,
    ),
    "functionary": ToolFormat(
        read_functionary, signs=(">>>all",), forced=("", "\n", ""), separator=">>>"
    ),
    "kimi-k2": ToolFormat(
        HeaderCalls(
            begin="<|tool_call_begin|>",
            name_ends=("<|tool_call_argument_begin|>",),
            end="<|tool_call_end|>",
            prefix="functions.",
            is_numbered=True,
            section=_KIMI,
            section_end="<|tool_calls_section_end|>",
        ),
        signs=(_KIMI,),
        forced=(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        opening=_KIMI,
        closing="<|tool_calls_section_end|>",
    ),
    "deepseek-v3.2": ToolFormat(
        _invoke_xml("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
        signs=("｜DSML｜",),
        forced=('<｜DSML｜invoke name="', '">\n', "\n</｜DSML｜invoke>\n"),
        style="deepseek_xml",
        opening="<｜DSML｜function_calls>\n",
        closing="</｜DSML｜function_calls>",
    ),
    "deepseek-v3": ToolFormat(
        HeaderCalls(
            begin=f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}",
            name_ends=("\n",),
            end=_DEEPSEEK_END[0],
            section=_DEEPSEEK[0],
            section_end=_DEEPSEEK_END[1],
        ),
        signs=(_DEEPSEEK[2], "```json"),
        forced=(
            f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}",
            "\n```json\n",
            f"\n```{_DEEPSEEK_END[0]}",
        ),
        opening=_DEEPSEEK[0],
        separator="\n",
        closing=_DEEPSEEK_END[1],
    ),
    "deepseek-v3.1": ToolFormat(
        HeaderCalls(
            begin=_DEEPSEEK[1],
            name_ends=(_DEEPSEEK[2],),
            end=_DEEPSEEK_END[0],
            section=_DEEPSEEK[0],
            section_end=_DEEPSEEK_END[1],
        ),
        signs=(_DEEPSEEK[2],),
        forced=(_DEEPSEEK[1], _DEEPSEEK[2], _DEEPSEEK_END[0]),
        opening=_DEEPSEEK[0],
        closing=_DEEPSEEK_END[1],
    ),
    "glm": ToolFormat(
        XmlCalls(
            section="<tool_call>",
            section_end="",
            call="",
            name_ends=("\n", "<arg_key>", "</tool_call>"),
            call_end="</tool_call>",
            parameter="<arg_key>",
            key_ends=("</arg_key>",),
            value="<arg_value>",
            value_end="</arg_value>",
        ),
        signs=("<arg_key>",),
        forced=("<tool_call>", "\n", "\n</tool_call>"),
        style="glm_xml",
        separator="\n",
    ),
    "minimax-m2": ToolFormat(
        _invoke_xml("<minimax:tool_call>", "</minimax:tool_call>"),
        signs=("<minimax:tool_call>",),
        forced=('<invoke name="', '">\n', "\n</invoke>\n"),
        style="minimax_xml",
        opening="<minimax:tool_call>\n",
        closing="</minimax:tool_call>",
    ),
    "seed-oss": ToolFormat(
        _qwen_xml("<seed:tool_call>", "</seed:tool_call>"),
        signs=("<seed:tool_call>",),
        forced=("<seed:tool_call>\n<function=", ">\n", "\n</function>\n</seed:tool_call>"),
        style="qwen_xml",
        separator="\n",
    ),
    "qwen3-coder": ToolFormat(
        _qwen_xml("<tool_call>", "</tool_call>"),
        signs=("<function=", "<parameter="),
        forced=("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>"),
        style="qwen_xml",
        separator="\n",
    ),
    "functionary-v3.1": ToolFormat(
        HeaderCalls(begin="<function=", name_ends=(">",), end="</function>"),
        signs=("<function=",),
        forced=("<function=", ">", "</function>"),
    ),
    "mistral": ToolFormat(
        HeaderCalls(
            begin="[TOOL_CALLS]",
            name_ends=("[CALL_ID]", "[ARGS]", "{"),
            id_end="[ARGS]",
            json_lists=True,
        ),
        signs=("[TOOL_CALLS]", "[ARGS]"),
        forced=("[TOOL_CALLS]", "[ARGS]", ""),
        new_id=_mistral_id,
    ),
    "mistral-json": ToolFormat(
        HeaderCalls(
            begin="[TOOL_CALLS]",
            name_ends=("[CALL_ID]", "[ARGS]", "{"),
            id_end="[ARGS]",
            json_lists=True,
        ),
        signs=("[TOOL_CALLS]",),
        forced=('{"name": "', '", "arguments": ', "}"),
        opening="[TOOL_CALLS] [",
        separator=", ",
        closing="]",
        new_id=_mistral_id,
    ),
    "cohere": ToolFormat(
        JsonCalls(("<|START_ACTION|>",), end="<|END_ACTION|>"),
        signs=("<|START_ACTION|>",),
        forced=('{"tool_name": "', '", "parameters": ', "}"),
        opening="<|START_ACTION|>[",
        separator=", ",
        closing="]<|END_ACTION|>",
    ),
    "internlm": ToolFormat(
        JsonCalls(
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), end="<|action_end|>"
        ),
        signs=("<|plugin|>",),
        forced=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"),
    ),
    "llama4-pythonic": ToolFormat(
        PythonCalls(("<|python_start|>",), end="<|python_end|>"), signs=("<|python_start|>",)
    ),
    "lfm2": ToolFormat(
        PythonCalls(("<|tool_call_start|>",), end="<|tool_call_end|>"),
        signs=("<|tool_call_start|>",),
    ),
    "pythonic": ToolFormat(PythonCalls((), end="")),
    "llama3-json": ToolFormat(
        JsonCalls(("<|python_tag|>",), first="{"),
        signs=("<|start_header_id|>", "ipython"),
        forced=('{"name": "', '", "parameters": ', "}"),
        separator="; ",
    ),
    "phi4-mini": ToolFormat(
        JsonCalls(("functools", "<|tool_call|>"), end="<|/tool_call|>"),
        signs=("<|tool|>", "<|/tool|>"),
        forced=('{"name": "', '", "arguments": ', "}"),
        opening="<|tool_call|>[",
        separator=", ",
        closing="]<|/tool_call|>",
    ),
    "granite": ToolFormat(
        JsonCalls(("<|tool_call|>",)),
        signs=("<|tool_call|>",),
        forced=('{"name": "', '", "arguments": ', "}"),
        opening="<|tool_call|>[",
        separator=", ",
        closing="]",
    ),
    "jamba": ToolFormat(
        JsonCalls(("<tool_calls>",), end="</tool_calls>"),
        signs=("<tool_calls>",),
        forced=('{"name": "', '", "arguments": ', "}"),
        opening="<tool_calls>[",
        separator=", ",
        closing="]</tool_calls>",
    ),
    "xlam": ToolFormat(
        JsonCalls(("[TOOL_CALLS]", "```json"), end="```", first="["),
        forced=('{"name": "', '", "arguments": ', "}"),
        opening="[",
        separator=", ",
        closing="]",
    ),
    "hermes": ToolFormat(
        JsonCalls(("<tool_call>",), end="</tool_call>"),
        signs=("<tool_call>",),
        forced=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        separator="\n",
    ),
}


@dataclass(frozen=True)
class ReasoningFormat:
    """Tags around what a model thinks first.

    Attributes:
        starts, ends: any of these; the first tag that a chat template has chooses the format.
        is_always_open: an answer begins inside, whatever the prompt ends with.
        interrupts: these end it too, and belong to what follows.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_always_open: bool = False
    interrupts: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts of the format."""
        return self.starts + self.ends

    def is_open(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the answer to this prompt begins inside of the reasoning: its template may have
        opened it, or opened and closed it, or left it to the model.

        Args:
            continued: the text that the answer goes on with, where the prompt ends inside one.
        """
        if continued is not None:
            last = [max(map(continued.rfind, tags)) for tags in (self.starts, self.ends)]
            return last[0] > last[1]
        prompt = prompt[-256:].rstrip()
        if prompt.endswith(self.ends):
            return False
        return self.is_always_open or prompt.endswith(self.starts)

    def read(self, r: Reader, is_open: bool) -> Steps[None]:
        """Read the reasoning, if there is one, and the whitespace after it."""
        yield from r.skip_spaces()
        start = yield from r.accept(*self.starts)
        if start is None and not is_open:
            r.at = r.mark
            return
        r.is_reasoning = True
        yield from r.skip_spaces()
        r.drop()
        end = yield from r.copy_until(self.ends + self.interrupts, r.reasoning)
        if end is None:
            r.leave_open()
            return
        r.is_reasoning = False
        if end in self.interrupts:
            r.at -= len(end)
        yield from r.skip_spaces()
        r.drop()


_THINK = (("<think>",), ("</think>",))
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(*_THINK, is_always_open=True),
    "qwen3-thinking": ReasoningFormat(*_THINK, is_always_open=True),
    "minimax": ReasoningFormat(*_THINK, is_always_open=True),
    "kimi-k2": ReasoningFormat(*_THINK, interrupts=(_KIMI,)),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "magistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "seed-oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "cohere": ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "glm": ReasoningFormat(*_THINK),
    "deepseek-v3": ReasoningFormat(*_THINK),
    "qwen3": ReasoningFormat(*_THINK),
}
HARMONY = "gpt-oss"
TOOL_PARSERS = ("auto", "none", *TOOL_FORMATS)
REASONING_PARSERS = ("auto", "none", HARMONY, *REASONING_FORMATS)


def tool_format_of(templates: Iterable[str]) -> str | None:
    """The name of the format that a chat template is written for, None where none is known."""
    text = "\n".join(templates)
    for name, form in TOOL_FORMATS.items():
        if form.signs and all(sign in text for sign in form.signs):
            return name
    return None


def reasoning_format_of(templates: Iterable[str]) -> str | None:
    """The name of the reasoning format of a chat template, None where there is none.

    A template that opens the tag itself is told from one that leaves it to the model by each
    prompt, so that the formats that are always open need no choice here.
    """
    text = "\n".join(templates)
    if all(sign in text for sign in TOOL_FORMATS[HARMONY].signs):
        return HARMONY
    if _KIMI in text and "<think>" in text:
        return "kimi-k2"
    for name, form in reversed(REASONING_FORMATS.items()):
        if any(tag in text for tag in form.markers):
            return name
    return None
