"""Chat messages to prompt text, by the model's own Jinja template.

A template comes out of a downloaded model, or out of a request, so it is not trusted: see
`sandbox.py`.

Runs on: pool.
"""

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SecurityError

from ..api.errors import RequestError, StartError
from .sandbox import ChatEnvironment, Refusal, check_length, check_time, limits

log = logging.getLogger(__name__)

Message = dict[str, Any]
ContentFormat = Literal["string", "parts", "either"]

MAX_MESSAGE = 1000  # characters of a template's own error
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
_CALL = "<tool_call>\n{}\n</tool_call>"
_TOOLS = (
    "You can call these functions:\n{}\nTo call one, answer with its name and a JSON object of its "
    'arguments, like this:\n<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


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
        self.sources = tuple(sources.values())
        environment = ChatEnvironment()
        self.source = sources.get("default")
        self._tokens = dict(tokens)
        self._timeout_s = timeout_s
        self._reserved = _RESERVED | environment.globals.keys() | tokens.keys()
        self._templates: dict[str, jinja2.Template] = {}
        self._knows_tools = any("tools" in text for text in sources.values())
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
                raise StartError(f"the chat template {name!r} is not valid: {e}") from e

    @classmethod
    def of_request(cls, source: str, tokens: Mapping[str, str]) -> "ChatTemplate":
        """A template that came with a request. Raises RequestError where it is not valid."""
        try:
            return cls(source, tokens)
        except StartError as e:
            raise RequestError(str(e), param="chat_template") from e

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
            tools: where the template does not know of tools, they are explained in the first
                message.
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
        if tools and not self._knows_tools:
            messages = _with_tools(messages, tools)
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
        pieces, num_chars = [], 0
        try:
            with limits(self._timeout_s):
                for piece in template.generate(variables):
                    check_time()
                    num_chars += len(piece)
                    check_length(num_chars)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestError(
                f"the chat template took longer than {self._timeout_s:g} s", param="messages"
            ) from None
        except Refusal as e:
            raise RequestError(str(e)[:MAX_MESSAGE], param="messages") from None
        except SecurityError as e:
            raise RequestError(f"the chat template was stopped: {e}", param="messages") from e
        except Exception as e:  # whatever the template's expressions raise on these messages
            log.info("the chat template fails: %s: %s", type(e).__name__, e)
            raise RequestError(
                f"the chat template cannot render these messages: {str(e)[:MAX_MESSAGE]}",
                param="messages",
            ) from e
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


def _with_tools(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages for a template that knows no tools: what they are and what was called, as text."""
    messages = [dict(message) for message in messages]
    for message in messages:
        calls = [call["function"] for call in message.pop("tool_calls", None) or ()]
        parts = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        if texts := [_CALL.format(json.dumps(part, ensure_ascii=False)) for part in parts]:
            _add_text(message, "\n".join(texts), after=True)
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    _add_text(messages[0], _TOOLS.format(described), after=messages[0].get("role") == "system")
    return messages


def _add_text(message: Message, text: str, *, after: bool) -> None:
    content = message.get("content") or ""
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        message["content"] = [*content, part] if after else [part, *content]
    else:
        pieces = (content, text) if after else (text, content)
        message["content"] = "\n\n".join(filter(None, pieces))


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
