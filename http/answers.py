"""Chat answers with tool calls and reasoning: what to look for, what to force, how it is sent.

Runs on: loop.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..engine.api.errors import RequestError, StartError
from ..engine.api.grammar import GrammarSpec, Reasoning
from ..engine.api.sampling_params import SamplingParams
from ..engine.text.answer import AnswerFormat
from ..engine.text.formats import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format_of,
    tool_format_of,
)
from ..engine.text.reader import CallStart, Content, Delta
from ..engine.text.reader import Reasoning as Thoughts
from .openai_types import ChatRequest, NamedTool, Tool

if TYPE_CHECKING:
    from ..engine import Output
    from ..engine.text.chat_template import ChatTemplate
    from ..engine.text.tokenizer import Tokenizer
    from .settings import ServerConfig

FALLBACK = "hermes"  # for models whose own format is unknown, or cannot be forced


class Formats:
    """How the served model writes calls and reasoning.

    Args:
        template: chooses where the configuration says auto.

    Raises:
        StartError: the two formats do not go together.
    """

    def __init__(self, config: "ServerConfig", template: "ChatTemplate | None"):
        sources = template.sources if template else ()
        tools, reasoning = config.tool_call_parser, config.reasoning_parser
        if reasoning == "auto":
            found = reasoning_format_of(sources)
            reasoning = HARMONY if tools == HARMONY else found or "none"
        if tools == "auto":
            tools = HARMONY if reasoning == HARMONY else tool_format_of(sources) or FALLBACK
        if HARMONY in (tools, reasoning) and not {tools, reasoning} <= {HARMONY, "none"}:
            raise StartError(
                f"--tool-call-parser {tools} and --reasoning-parser {reasoning} do not go together"
            )
        self.tools, self.reasoning = tools, reasoning

    def of(self, body: ChatRequest, prompt: str) -> AnswerFormat | None:
        """What to look for in the answers to a prompt; None where all of them is content.

        Raises:
            RequestError: tools may be called, but the server was told to look for no calls.
        """
        separates = body.separate_reasoning is not False
        if self.reasoning == HARMONY or (self.tools == HARMONY and body.may_call):
            form = TOOL_FORMATS[HARMONY]
            tools = _schemas(body.tools) if body.may_call and self.tools != "none" else {}
            return AnswerFormat(
                None, False, form, tools, body.wants_one_call, hides_nothing=not separates
            )
        reasoning = REASONING_FORMATS.get(self.reasoning) if separates else None
        is_open = reasoning is not None and reasoning.is_open(prompt, body.continued_text)
        if not body.may_call:
            return AnswerFormat(reasoning, is_open) if reasoning else None
        if self.tools == "none":
            raise RequestError(
                "this server looks for no tool calls (it runs with --tool-call-parser none): send "
                "tool_choice none",
                param="tool_choice",
            )
        form = TOOL_FORMATS[self.tools]
        if body.forces_call and form.forced is None:
            form = TOOL_FORMATS[FALLBACK]
        return AnswerFormat(reasoning, is_open, form, _schemas(body.tools), body.wants_one_call)

    def before_structure(
        self, answer: AnswerFormat | None, tokenizer: "Tokenizer"
    ) -> Reasoning | None:
        """The free text that a grammar must let pass first."""
        if answer is None:
            return None
        if answer.tool_format is not None and answer.tool_format.has_channels:
            begin = tokenizer.encode("<|channel|>", False)
            return Reasoning(("<|channel|>final<|message|>",), (tuple(begin),), is_open=False)
        if answer.reasoning is None:
            return None
        begins = tuple(tuple(tokenizer.encode(start, False)) for start in answer.reasoning.starts)
        return Reasoning(answer.reasoning.ends, begins, is_open=answer.is_open)


def _schemas(tools: Sequence[Tool] | None) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools or ()}


# --- forced calls ---


def structured(
    formats: Formats,
    body: ChatRequest,
    params: SamplingParams,
    answer: AnswerFormat | None,
    tokenizer: "Tokenizer",
) -> SamplingParams:
    """The parameters with a grammar for forced calls, and with reasoning before any grammar."""
    grammar = params.grammar
    if answer is not None and body.forces_call:
        grammar = _call_grammar(body, answer, tokenizer)
        if answer.tool_format is TOOL_FORMATS[HARMONY]:
            return replace(params, grammar=grammar)  # the call comes first, without thoughts
    before = formats.before_structure(answer, tokenizer)
    if grammar is not None and before is not None:
        grammar = replace(grammar, reasoning=before)
    return params if grammar is params.grammar else replace(params, grammar=grammar)


def _call_grammar(body: ChatRequest, answer: AnswerFormat, tokenizer: "Tokenizer") -> GrammarSpec:
    """What an answer must match to be the calls that the request asks for."""
    form, choice, tools = answer.tool_format, body.tool_choice, body.tools or []
    assert form is not None
    assert form.forced is not None
    begin, middle, end = form.forced
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]

    def text(value: str) -> list[dict[str, Any]]:
        return _literal(value, tokenizer)

    calls = []
    for tool in tools:
        name = json.dumps(tool.function.name)[1:-1] if begin.endswith('"') else tool.function.name
        schema = {"type": "object", **(tool.function.parameters or {})}
        arguments = {"type": "json_schema", "json_schema": schema, "style": form.style}
        calls.append(_sequence([*text(begin + name + middle), arguments, *text(end)]))
    call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    parts = [*text(form.opening), call]
    if not answer.ends_at_call:
        following = _sequence([*text(form.separator), call])
        parts.append({"type": "star", "content": following})
    tag = {"type": "structural_tag", "format": _sequence([*parts, *text(form.closing)])}
    return GrammarSpec("structural_tag", json.dumps(tag), param="tools")


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _literal(text: str, tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """A text as a grammar wants it: special tokens, which no text matches, by their ids."""
    special = {s: i for i in tokenizer.special_ids if (s := tokenizer.token_str(i)) and s in text}
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if special else [text]
    return [
        {"type": "token", "token": special[piece]}
        if piece in special
        else {"type": "const_string", "value": piece}
        for piece in pieces
        if piece
    ]


# --- how it is sent ---


def deltas_of(output: "Output") -> Iterator[dict[str, Any]]:
    """OpenAI's deltas of an output."""
    if output.deltas:
        yield from map(_delta, output.deltas)
    elif output.text:
        yield {"content": output.text}


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Thoughts):
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.number, "id": delta.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}


def message_of(text: str, deltas: Iterable[Delta]) -> dict[str, Any]:
    """The assistant's message out of its content and all deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    calls: list[dict[str, Any]] = []
    thoughts = ""
    for delta in deltas:
        if isinstance(delta, Thoughts):
            thoughts += delta.text
        elif isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        elif not isinstance(delta, Content):
            calls[-1]["function"]["arguments"] += delta.text
    if thoughts:
        message |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    elif thoughts and not text:
        message["content"] = None
    return message


def finish_reason(reason: str, has_calls: bool, body: ChatRequest) -> str:
    """`tool_calls` where the model chose to call. A named call ends with `stop`, as OpenAI's do."""
    is_choice = has_calls and reason == "stop" and not isinstance(body.tool_choice, NamedTool)
    return "tool_calls" if is_choice else reason
