"""The five ways in which models write tool calls, each read as it comes.

* `JsonCalls`: {"name": ..., "arguments": {...}} between tags, alone or in a list;
* `HeaderCalls`: the name between markers, then the arguments as JSON;
* `XmlCalls`: an element for each parameter, its value as plain text;
* `PythonCalls`: [f(a=1), g()];
* channels: harmony's and functionary's messages, each with its recipient.

A call begins, for the client, when its name is known and its arguments start; text that breaks the
syntax before that is content, and text that breaks it later ends the arguments and is content from
there on. Whitespace around calls belongs to the syntax.

Runs on: loop.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .reader import Enough, Malformed, Reader, Steps, Truncated

Tools = Mapping[str, dict[str, Any]]  # name to JSON schema of the parameters

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_IDENTIFIER = re.compile(r"[\w.-]*")
_NO_BRACKET = re.compile(r"[^\"'()\[\]{},]*")
_IN_STRING = {q: re.compile(rf"(?:[^{q}\\]|\\.)*", re.DOTALL) for q in "\"'"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_NESTING = 64


class Syntax(Protocol):
    """How calls are written."""

    @property
    def begins(self) -> tuple[str, ...]:
        """What calls begin with, wherever it stands in the answer."""

    @property
    def first(self) -> str:
        """Characters that begin calls where they are the first of the answer."""

    def read(self, r: Reader, begin: str, tools: Tools) -> Steps[None]:
        """Read calls, the text of `begin` being read already. Raises Malformed, Truncated."""


def read_answer(r: Reader, syntax: Syntax, tools: Tools) -> Steps[None]:
    """Read an answer: content, with calls in it."""
    try:
        if syntax.first and (char := (yield from r.skip_spaces())) and char in syntax.first:
            yield from _attempt(r, syntax, "", tools)
        while True:
            begin = yield from r.copy_until(syntax.begins, r.content)
            if begin is None:
                return
            yield from _attempt(r, syntax, begin, tools)
    except Enough:
        r.is_done = True


def _attempt(r: Reader, syntax: Syntax, begin: str, tools: Tools) -> Steps[None]:
    try:
        yield from syntax.read(r, begin, tools)
    except Malformed:
        r.give_back()
    except Truncated:
        r.at = len(r.text)
        r.give_back()
    else:
        yield from r.skip_spaces()
        r.drop()


@dataclass(frozen=True)
class JsonCalls:
    """JSON objects, or a list of them, after each `begins`; `end` may follow."""

    begins: tuple[str, ...]
    end: str = ""
    first: str = ""

    def read(self, r: Reader, begin: str, tools: Tools) -> Steps[None]:
        """Read one object, several with ; or , between them, or a list."""
        char = yield from r.skip_spaces()
        is_list = char == "["
        r.at += is_list
        while True:
            yield from _call_object(r)
            if (yield from r.skip_spaces()) not in (",", ";", "{"):
                break
            yield from r.accept(",", ";")
        if is_list:
            yield from r.expect("]")
        yield from r.skip_spaces()
        yield from r.accept(self.end)


def _call_object(r: Reader) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}}; other members are read over."""
    yield from r.skip_spaces()
    yield from r.expect("{")
    name, held, has_begun = None, None, False
    while True:
        yield from r.skip_spaces()
        key = yield from r.json_string()
        yield from r.skip_spaces()
        yield from r.expect(":")
        char = yield from r.skip_spaces()
        if key in _NAME_KEYS and name is None:
            name = r.check_name((yield from r.json_string()))
        elif key in _ARGUMENT_KEYS and not has_begun and held is None:
            if char == "{" and name is not None:
                r.begin_call(name)
                has_begun = True
                yield from r.json(r.arguments)
            else:
                held = yield from _held_arguments(r)
        else:
            yield from r.json(lambda _: None)
        if held is not None and name is not None and not has_begun:
            r.begin_call(name)
            has_begun = True
            r.arguments(held)
        yield from r.skip_spaces()
        if (yield from r.expect(",", "}")) == "}":
            break
    if name is None:
        raise Malformed
    if not has_begun:
        r.begin_call(name)
        r.arguments("{}")
    r.end_call()


def _held_arguments(r: Reader) -> Steps[str]:
    """Arguments that cannot be passed on as they come: before the name, as a string, or null."""
    pieces: list[str] = []
    yield from r.json(pieces.append)
    text = "".join(pieces)
    value = _json_or_none(text)
    if isinstance(value, str):  # JSON in JSON
        text = value or "{}"
        value = _json_or_none(text)
    if text == "null":
        return "{}"
    if not isinstance(value, dict) or not _is_unicode(text):
        raise Malformed
    return text


@dataclass(frozen=True)
class HeaderCalls:
    """begin NAME name_end {arguments} end, perhaps inside a section.

    Args:
        id_end: where `name_end` is an id's beginning, this is the id's end (Mistral).
        prefix: stands before the name and is no part of it.
        is_numbered: the header is the call's id, and ends with its number (Kimi).
        section, section_end: what stands around all calls.
    """

    begin: str
    name_ends: tuple[str, ...]
    end: str = ""
    id_end: str = ""
    prefix: str = ""
    is_numbered: bool = False
    section: str = ""
    section_end: str = ""
    json_lists: bool = False  # after `begin` there may be a list of objects instead
    first: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        """The section or, without one, a call."""
        return (self.section, self.begin) if self.section else (self.begin,)

    def read(self, r: Reader, begin: str, tools: Tools) -> Steps[None]:
        """Read calls up to the section's end."""
        char = yield from r.skip_spaces()
        if self.json_lists and char and char in "[{":
            yield from JsonCalls(self.begins).read(r, begin, tools)
            return
        if begin == self.section:
            yield from r.expect(self.begin)
        while True:
            yield from self._call(r)
            yield from r.skip_spaces()
            following = yield from r.accept(self.begin, self.section_end)
            if following != self.begin:
                return

    def _call(self, r: Reader) -> Steps[None]:
        header, end = yield from r.take_until(*self.name_ends)
        name, call_id = header.strip(), None
        if self.is_numbered:
            call_id, name = name, name.rpartition(":")[0] or name
        name = r.check_name(name.removeprefix(self.prefix))
        if end == "{":
            r.at -= 1
        elif self.id_end and end != self.id_end:
            call_id, _ = yield from r.take_until(self.id_end)
        yield from r.skip_spaces()
        yield from r.accept("```json")
        yield from _json_arguments(r, name, call_id)
        yield from r.skip_spaces()
        if self.end:
            yield from r.accept("```")
            yield from r.skip_spaces()
            yield from r.accept(self.end)
        r.end_call()


def _json_arguments(r: Reader, name: str, call_id: str | None = None) -> Steps[None]:
    char = yield from r.skip_spaces()
    if char != "{":
        raise Malformed if char else Truncated
    r.begin_call(name, call_id)
    yield from r.json(r.arguments)


@dataclass(frozen=True)
class XmlCalls:
    """An element for each parameter. Values are text, made JSON by the schema's types.

    Args:
        call: begins a call inside a section; "" where the section is the call.
        name_ends: the first of them ends the name; those with < are read again after it.
        parameter, key_ends: stand around a parameter's name.
        value: stands before its value.
        strips: a newline at each end of a value is no part of it.
    """

    section: str
    section_end: str
    call: str
    name_ends: tuple[str, ...]
    call_end: str
    parameter: str
    key_ends: tuple[str, ...]
    value: str
    value_end: str
    strips: bool = False
    first: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        """The section, and a call that forgot it."""
        return (self.section, self.call) if self.call else (self.section,)

    def read(self, r: Reader, begin: str, tools: Tools) -> Steps[None]:
        """Read calls up to the section's end."""
        if self.call and begin == self.section:
            yield from r.skip_spaces()
            yield from r.expect(self.call)
        while True:
            yield from self._call(r, tools)
            yield from r.skip_spaces()
            following = yield from r.accept(self.call, self.section_end)
            if following != self.call or not self.call:
                return

    def _call(self, r: Reader, tools: Tools) -> Steps[None]:
        name, end = yield from r.take_until(*self.name_ends)
        if end.startswith("<"):
            r.at -= len(end)
        name = r.check_name(name.strip())
        r.begin_call(name)
        r.arguments("{")
        separator = ""
        try:
            while True:
                yield from r.skip_spaces()
                if (yield from r.expect(self.parameter, self.call_end)) == self.call_end:
                    break
                key, key_end = yield from r.take_until(*self.key_ends)
                if self.value:
                    yield from r.skip_spaces()
                    yield from r.expect(self.value)
                r.arguments(f"{separator}{_dumps(key)}: ")
                r.drop()
                separator = ", "
                kinds = _kinds(tools[name], key)
                if "string=" in key_end:  # DeepSeek says it itself
                    kinds = {"string"} if '"true"' in key_end else kinds - {"string"}
                yield from self._value(r, kinds)
        except Malformed:
            r.arguments("}")  # what came before is whole
            raise
        r.arguments("}")
        r.end_call()

    def _value(self, r: Reader, kinds: set[str]) -> Steps[None]:
        if self.strips:
            yield from r.accept("\n")
            r.drop()
        if kinds == {"string"}:
            hold = "\n" if self.strips else ""
            r.arguments('"')
            end = yield from r.copy_until(
                (self.value_end,), lambda text: r.arguments(_dumps(text)[1:-1]), hold=hold
            )
            if end is None:
                raise Truncated
            r.arguments('"')
            r.drop()
            return
        text, _ = yield from r.take_until(self.value_end, limit=None)
        r.arguments(_typed(text.removesuffix("\n") if self.strips else text, kinds))
        r.drop()


@dataclass(frozen=True)
class PythonCalls:
    """A list of Python calls with keyword arguments, perhaps after `begins`."""

    begins: tuple[str, ...]
    end: str
    first: str = "["

    def read(self, r: Reader, begin: str, tools: Tools) -> Steps[None]:
        """Read the list."""
        yield from r.skip_spaces()
        yield from r.expect("[")
        while True:
            yield from r.skip_spaces()
            name = yield from self._word(r)
            yield from r.expect("(")
            r.begin_call(r.check_name(name))
            r.arguments("{")
            yield from self._arguments(r)
            r.end_call()
            yield from r.skip_spaces()
            if (yield from r.expect(",", "]")) == "]":
                break
            if (yield from r.skip_spaces()) == "]":
                r.at += 1
                break
        yield from r.skip_spaces()
        yield from r.accept(self.end)

    def _arguments(self, r: Reader) -> Steps[None]:
        separator = ""
        try:
            while True:
                yield from r.skip_spaces()
                r.drop()
                if (yield from r.accept(")")):
                    break
                key = yield from self._word(r)
                yield from r.skip_spaces()
                yield from r.expect("=")
                value = _python_to_json((yield from self._literal(r)))
                r.arguments(f"{separator}{_dumps(key)}: {value}")
                r.drop()
                separator = ", "
                if (yield from r.expect(",", ")")) == ")":
                    break
        except Malformed:
            r.arguments("}")
            raise
        r.arguments("}")

    @staticmethod
    def _word(r: Reader) -> Steps[str]:
        """Read a name, and spaces after it."""
        while True:
            found = _IDENTIFIER.match(r.text, r.at)
            assert found is not None
            if found.end() < len(r.text) or r.is_closed:
                break
            yield
        if not found.group():
            raise Truncated if r.at >= len(r.text) else Malformed
        r.at = found.end()
        yield from r.skip_spaces()
        return found.group()

    @staticmethod
    def _literal(r: Reader) -> Steps[str]:
        """Read up to the comma or bracket that ends a value."""
        closers: list[str] = []
        begin = r.at - r.mark
        while True:
            found = _NO_BRACKET.match(r.text, r.at)
            assert found is not None
            r.at = found.end()
            if not (char := r.text[r.at : r.at + 1]):
                if r.is_closed:
                    raise Truncated
                yield
            elif char in _IN_STRING:
                r.at += 1
                while True:
                    r.at = _IN_STRING[char].match(r.text, r.at).end()  # type: ignore[union-attr]
                    if r.text.startswith(char, r.at):
                        r.at += 1
                        break
                    if r.is_closed:
                        raise Truncated
                    yield
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
                if len(closers) > _MAX_NESTING:
                    raise Malformed
                r.at += 1
            elif not closers and char in ",)":
                return r.text[r.mark + begin : r.at]
            elif char == ",":
                r.at += 1
            elif closers and closers.pop() == char:
                r.at += 1
            else:
                raise Malformed


# --- values ---


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, as an escape may bring in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_or_none(text: str) -> Any:
    """What a JSON text says. NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _python_to_json(text: str) -> str:
    """A Python literal, or JSON among Python's, as JSON text. Raises Malformed."""
    text = text.strip()
    try:
        result = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        result = text if text == "null" or _json_or_none(text) is not None else ""
    if not result or not _is_unicode(result):
        raise Malformed
    return result


def _typed(text: str, kinds: set[str]) -> str:
    """A parameter's text as JSON: itself where it is JSON of one of the kinds, else a string."""
    bare = text.strip()
    value = _json_or_none(bare)
    if value is None and bare != "null":
        if bare in ("True", "False") and (not kinds or "boolean" in kinds):
            return bare.lower()
        if bare == "None" and "null" in kinds:
            return "null"
        return _dumps(text)
    is_text = isinstance(value, str) and "string" in kinds
    return bare if not kinds or (_kind(value) & kinds and not is_text) else _dumps(text)


def _kind(value: Any) -> set[str]:
    """JSON schema's types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names: dict[type, set[str]] = {
        str: {"string"},
        int: {"integer", "number"},
        list: {"array"},
        dict: {"object"},
        type(None): {"null"},
    }
    return names[type(value)]


def _kinds(schema: Any, key: str) -> set[str]:
    """The types that a schema allows for a property; none where it does not say."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(key) if isinstance(properties, dict) else None
    return _types(found, schema, depth=0)


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for part in ref[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return _types(target, root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(values := schema.get("enum"), list):
        return set().union(*map(_kind, values))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return _union(_types(option, root, depth + 1) for option in options)
    return set()


def _union(sets: Iterable[set[str]]) -> set[str]:
    """All of them; nothing where one of them says nothing."""
    sets = list(sets)
    return set().union(*sets) if all(sets) else set()
