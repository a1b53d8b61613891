"""Chat messages to prompt text, by the model's own Jinja template.

A template comes out of a downloaded model, so it is not trusted: Jinja's sandbox keeps it from
Python, and each render has a deadline and a limit on every string it makes.

Runs on: pool.
"""

import functools
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from ..api.errors import RequestError, StartError

log = logging.getLogger(__name__)

Message = dict[str, Any]
ContentFormat = Literal["string", "parts", "either"]

MAX_CHARS = 1 << 25  # of one rendered prompt, and of each string on the way to it
_MAX_PRODUCT = 1 << 30  # of a text's and an argument's lengths: replace('a', long) multiplies them
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    )
)
_REASONING = ("reasoning_content", "thinking", "reasoning")

_deadline_s: ContextVar[float] = ContextVar("deadline_s")


class ChatTemplate:
    """A model's chat template, or its lack of one.

    Args:
        source: Jinja source; several by name, of which "tool_use" serves requests with tools
            and "default" the others; None where the model has none.
        tokens: special tokens by name (`bos_token`, ...), which the template may use.
        timeout_s: one render's limit in seconds.

    Attributes:
        source: of the default template.
        content_format: what it takes as a message's content.

    Raises:
        StartError: the source is no valid template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        tokens: Mapping[str, str],
        *,
        timeout_s: float = 5.0,
    ):
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        environment = _ChatEnvironment()
        self.source = sources.get("default")
        self._tokens = dict(tokens)
        self._timeout_s = timeout_s
        self._reserved = _RESERVED | environment.globals.keys() | tokens.keys()
        self._templates: dict[str, jinja2.Template] = {}
        self._knows_developer = any("developer" in text for text in sources.values())
        self.content_format: ContentFormat = "string"
        self._no_content: dict[str, Any] = {"content": ""}
        for name, text in sources.items():
            try:
                tree = environment.parse(text)
                if name == "default":
                    self.content_format = _content_format(tree)
                    self._no_content = _no_content(tree)
                self._templates[name] = environment.template(tree)
            except (jinja2.TemplateError, RecursionError) as e:
                raise StartError(f"the model's chat template {name!r} is not valid: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included: encode it with add_special_tokens=False.

        Args:
            messages: as JSON has them, best out of `normalise_messages`.
            continue_final_message: the prompt ends with the last message's text, every trailing
                space kept, so that the model goes on with it.
            template_kwargs: more variables for the template, as in `enable_thinking`.

        Raises:
            RequestError: the template refuses the messages, or cannot render them in time.
        """
        template = self._template(tools)
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        for name in template_kwargs or ():
            if name in self._reserved or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}",
                    param=f"chat_template_kwargs.{name}",
                )
        messages = [_plain_message(message) for message in messages]
        final, mark = "", ""
        if continue_final_message:
            # The mark shows where the text ends in the prompt, and keeps a template from
            # trimming the spaces before it.
            mark = f"<{uuid.uuid4().hex}>"
            messages[-1], final = _marked(messages[-1], mark)
        messages = [{**self._no_content, **message} for message in messages]
        text = self._run(
            template,
            {
                **self._tokens,
                **(template_kwargs or {}),
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if mark:
            end = text.rfind(mark)
            if end < 0 or final.strip() not in text[:end]:
                raise RequestError(
                    "the model's chat template leaves out text of the final message, so it cannot "
                    "be continued",
                    param="continue_final_message",
                )
            text = text[:end]
        return text

    def normalise_messages(
        self, messages: Sequence[Message], *, part_types: Iterable[str] = ()
    ) -> list[Message]:
        """Messages in the form that this template reads, see `normalise_messages`."""
        messages = normalise_messages(messages, self.content_format, part_types=part_types)
        if not self._knows_developer:
            for message in messages:
                if message.get("role") == "developer":
                    message["role"] = "system"
        return messages

    def _template(self, tools: Sequence[dict[str, Any]] | None) -> jinja2.Template:
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise RequestError(
            "this model has no chat template, so it cannot serve chat; send the prompt to the "
            "completions route, or start the server with a chat template",
            param="messages",
            code="no_chat_template",
        )

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        token = _deadline_s.set(time.monotonic() + self._timeout_s)
        pieces, num_chars = [], 0
        try:
            for piece in template.generate(variables):
                _check_time()
                num_chars += len(piece)
                _check_length(num_chars)
                pieces.append(piece)
        except TimeoutError:
            raise RequestError(
                f"the chat template took longer than {self._timeout_s:g} s", param="messages"
            ) from None
        except _Refusal as e:
            raise RequestError(str(e), param="messages") from None
        except SecurityError as e:
            raise RequestError(f"the chat template was stopped: {e}", param="messages") from e
        except Exception as e:  # whatever the template's expressions raise on these messages
            log.info("the chat template fails: %s: %s", type(e).__name__, e)
            raise RequestError(
                "the chat template cannot render these messages: a field is missing or has a "
                "type or form that it does not know",
                param="messages",
            ) from e
        finally:
            _deadline_s.reset(token)
        return "".join(pieces)


def normalise_messages(
    messages: Sequence[Message], wants: ContentFormat, *, part_types: Iterable[str] = ()
) -> list[Message]:
    """Copies of messages with content and tool calls as templates read them.

    Text parts become one string, joined by newlines, where the template wants a string, and a
    string becomes a text part where it wants parts. A tool call's arguments become an object.

    Args:
        part_types: kinds of parts besides text that the model takes.

    Raises:
        RequestError: a part that is no text, or arguments that are no JSON object.
    """
    return [
        _normalised(message, wants, frozenset(part_types), f"messages.{i}")
        for i, message in enumerate(messages)
    ]


def _normalised(
    message: Message, wants: ContentFormat, part_types: frozenset[str], path: str
) -> Message:
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(part, part_types, f"{path}.content.{i}") for i, part in enumerate(content)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        if wants == "string" or (wants == "either" and len(texts) == len(parts) == 1):
            if len(texts) < len(parts):
                raise RequestError(
                    "the model's chat template takes text only", param=f"{path}.content"
                )
            message["content"] = "\n".join(texts)
        else:
            message["content"] = parts
    elif isinstance(content, str) and wants == "parts":
        message["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        message["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls.{i}")
            for i, call in enumerate(message["tool_calls"])
        ]
    return message


def _part(part: Any, part_types: frozenset[str], path: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        if not isinstance(part.get("text"), str):
            raise RequestError("a text part needs a string `text`", param=f"{path}.text")
        return {"type": "text", "text": part["text"]}
    if isinstance(kind, str) and kind in part_types:
        return dict(part)
    raise RequestError(f"this model takes no content of type {kind!r}", param=f"{path}.type")


def _tool_call(call: Any, path: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            "a tool call's arguments must be a JSON object", param=f"{path}.function.arguments"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _plain_message(message: Message) -> Message:
    """Without null fields, and with the model's reasoning under the names that templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _marked(message: Message, mark: str) -> tuple[Message, str]:
    """The message with a mark after its text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}, content
    if isinstance(content, list):
        for i, part in reversed(list(enumerate(content))):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                marked = {**part, "text": text + mark}
                return {**message, "content": [*content[:i], marked, *content[i + 1 :]]}, text
    raise RequestError("the final message has no text to continue", param="continue_final_message")


class _Refusal(jinja2.TemplateError):
    """What a template says with raise_exception."""


class _Generation(Extension):
    """`{% generation %}` blocks mark what the model wrote, for training. Here they only scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, with limits on time and size.

    The sandbox stops `range` at 100,000. Loops inside loops are stopped by the clock, which each
    round reads. Strings that grow are stopped where an operator, a call or a filter made them.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(f) for name, f in self.filters.items()}
        self.filters["check_time"] = _check_time
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def template(self, tree: nodes.Template) -> jinja2.Template:
        """A template out of its syntax tree, with the clock put into its loops."""
        code = self.compile(_Clock().visit(tree))
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(count, int):
                    limit = MAX_CHARS if isinstance(items, str) else MAX_RANGE
                    if len(items) * count > limit:
                        raise SecurityError("a repeated value is too long")
        if operator == "**" and (abs(left) > MAX_RANGE or abs(right) > 64):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return _check_length_of(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja wraps str.format, to keep it from attributes.
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(receiver, str) and getattr(obj, "__name__", "") in ("format", "format_map"):
            _check_widths(receiver)
        _check_arguments(receiver, args, kwargs)
        return _check_length_of(super().call(context, obj, *args, **kwargs))


class _Clock(NodeTransformer):
    """Reads the clock in each round of a loop and each call of a macro, and bounds `a ~ b`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, self._check(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, self._check(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "join", [], [], None, None, lineno=node.lineno)

    @staticmethod
    def _check(node: nodes.Node) -> nodes.ExprStmt:
        context = nodes.ContextReference(lineno=node.lineno)  # no constant: that would be folded
        call = nodes.Filter(context, "check_time", [], [], None, None, lineno=node.lineno)
        return nodes.ExprStmt(call, lineno=node.lineno)


def _check_time(_: Any = None) -> None:
    if time.monotonic() > _deadline_s.get():
        raise TimeoutError


def _check_length(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"the text is longer than {MAX_CHARS} characters")


def _check_length_of(value: Any) -> Any:
    if isinstance(value, str):
        _check_length(len(value))
    return value


def _check_arguments(value: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths and counts stay small, and so does what `replace` and `join` can make of a value."""
    size = len(value) if isinstance(value, str | list) else 1
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_CHARS:
            raise SecurityError(f"the number {argument} is too large")
        if isinstance(argument, str) and size * len(argument) > _MAX_PRODUCT:
            raise SecurityError("a filter or method would make too long a text")


def _check_widths(pattern: str) -> None:
    if re.search(r"[0-9]{6}|\*", pattern):
        raise SecurityError("a format string asks for too wide a field")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # Jinja's marks, as `pass_context`, are attributes: they stay
    def call(*args: Any, **kwargs: Any) -> Any:
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        if function is FILTERS["format"]:
            _check_widths(str(args[at]))
        _check_arguments(args[at], args[at + 1 :], kwargs)
        return _check_length_of(function(*args, **kwargs))

    return call


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables that hold a message's content."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return names


def _no_content(tree: nodes.Template) -> dict[str, Any]:
    """What stands for the content of a message without one, as calls of tools often are.

    None or nothing where the template asks for these; others may join it to text, so "".
    """
    names = _content_names(tree)
    tests = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, names)}
    if "none" in tests:
        return {"content": None}
    asks_in = any(
        isinstance(compare.expr, nodes.Const)
        and compare.expr.value == "content"
        and any(operand.op in ("in", "notin") for operand in compare.ops)
        for compare in tree.find_all(nodes.Compare)
    )
    return {} if asks_in or tests & {"defined", "undefined"} else {"content": ""}


def _content_format(tree: nodes.Template) -> ContentFormat:
    """Whether a template takes strings, lists of parts, or both: parts are looped over."""
    aliases = _content_names(tree)
    if not any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For)):
        return "string"
    tests_string = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return "either" if tests_string else "parts"


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps through filters."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
