"""Jinja for chat templates that nobody trusts: Jinja's sandbox, with limits on time and size.

A thread cannot be killed, so no step of a template may take long. The clock is read in each round
of a loop and each call of a macro; what happens between two looks is bounded by the size of the
values. Sizes are checked where values are made: a list that holds another list twice counts it
twice, for that is what writing it out or comparing it costs.

Runs on: pool.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 25  # of one rendered prompt, and of each string on the way to it
MAX_WEIGHT = 1 << 20  # of a list or dict: what it holds, and what that holds, 64 characters as one
_MAX_INT_BITS = 1 << 12
_MAX_PRODUCT = 1 << 30  # of a text's and an argument's lengths: replace('a', long) multiplies them
# For web pages, and with no bound on what they make or how long they take.
_REMOVED = ("batch", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_CONTAINERS = (list, tuple, dict)

Weights = dict[int, tuple[Any, int]]  # by id; the value is kept, so that its id stays its own
_limits: ContextVar[tuple[float, Weights]] = ContextVar("limits")


@contextmanager
def limits(timeout_s: float) -> Iterator[None]:
    """Render inside of this; a template that runs longer gets TimeoutError."""
    token = _limits.set((time.monotonic() + timeout_s, {}))
    try:
        yield
    finally:
        _limits.reset(token)


def check_time(_: Any = None) -> None:
    """Raise TimeoutError where the time is up."""
    if time.monotonic() > _limits.get()[0]:
        raise TimeoutError


def check_length(num_chars: int) -> None:
    """Raise SecurityError for a text that is too long."""
    if num_chars > MAX_CHARS:
        raise SecurityError(f"the text is longer than {MAX_CHARS} characters")


class Refusal(jinja2.TemplateError):
    """What a template says with raise_exception."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, in a tighter sandbox."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.filters["sum"] = _sum
        self.filters = {n: _bounded(f) for n, f in self.filters.items() if n not in _REMOVED}
        self.filters["check_time"] = check_time
        self.filters["check_size"] = _check_size
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.concat = _concat  # type: ignore[assignment]

    def template(self, tree: nodes.Template) -> jinja2.Template:
        """A template out of its syntax tree, with the checks put into it."""
        code = self.compile(_Checks().visit(tree))
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(count, int):
                    limit = MAX_CHARS if isinstance(items, str) else MAX_WEIGHT
                    if len(items) * count > limit:
                        raise SecurityError("a repeated value is too long")
        if operator == "**" and (abs(left) > MAX_CHARS or abs(right) > 64):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise SecurityError("a number is too large")
        return _check_size(value)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja wraps str.format, to keep it from attributes.
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(receiver, str):
            method = getattr(obj, "__name__", "")
            if method in ("format", "format_map"):
                _check_widths(receiver)
            elif method == "translate":
                raise SecurityError("str.translate may make too long a text")
            elif method == "join" and args:
                args = (list(args[0]), *args[1:])
        _check_arguments(receiver, args, kwargs)
        _check_size(args)
        return _check_size(super().call(context, obj, *args, **kwargs))


class _Generation(Extension):
    """`{% generation %}` blocks mark what the model wrote, for training. Here they only scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Checks(NodeTransformer):
    """Puts the clock into loops and macros, and the scales where lists and texts are made."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, self._clock(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, self._clock(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "join", [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or not any(node.iter_child_nodes()):
            return node
        return nodes.Filter(node, "check_size", [], [], None, None, lineno=node.lineno)

    visit_Tuple = visit_Dict = visit_List

    @staticmethod
    def _clock(node: nodes.Node) -> nodes.ExprStmt:
        context = nodes.ContextReference(lineno=node.lineno)  # no constant: that would be folded
        call = nodes.Filter(context, "check_time", [], [], None, None, lineno=node.lineno)
        return nodes.ExprStmt(call, lineno=node.lineno)


# --- size ---


def _check_size(value: Any) -> Any:
    """The value. Raises SecurityError where it is too large."""
    if isinstance(value, str):
        check_length(len(value))
    elif isinstance(value, _CONTAINERS):
        if _weight(value, _limits.get((0.0, {}))[1]) > MAX_WEIGHT:
            raise SecurityError("a list or mapping holds too much")
    return value


def _weight(value: Any, known: Weights) -> int:
    """What a value weighs. Each list is gone through once, however often it is held."""
    if isinstance(value, str):
        return 1 + (len(value) >> 6)
    if not isinstance(value, _CONTAINERS):
        return 1
    if id(value) not in known:
        items: Iterable[Any] = value.items() if isinstance(value, dict) else value
        known[id(value)] = value, 1 + sum(_weight(item, known) for item in items)
    return known[id(value)][1]


def _check_arguments(value: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths and counts stay small, and so does what `replace` and `join` can make of a value."""
    size = len(value) if isinstance(value, str | list) else 1
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_CHARS:
            raise SecurityError(f"the number {argument} is too large")
        width = argument if isinstance(argument, int) else 0
        length = len(argument) if isinstance(argument, str | list) else abs(width)
        if size * length > _MAX_PRODUCT:
            raise SecurityError("a filter or method would make too long a text")


def _check_widths(pattern: str) -> None:
    if re.search(r"[0-9]{6}|\*|\{[^}]*\{", pattern):
        raise SecurityError("a format string asks for too wide a field")


def _concat(pieces: Iterable[str]) -> str:
    """How blocks and macros join their text."""
    text = "".join(pieces)
    check_length(len(text))
    return text


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # Jinja's marks, as `pass_context`, are attributes: they stay
    def call(*args: Any, **kwargs: Any) -> Any:
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        if function is FILTERS["format"]:
            _check_widths(str(args[at]))
        if function is FILTERS["join"]:
            args = (*args[:at], _check_size(list(args[at])), *args[at + 1 :])
        _check_arguments(args[at], args[at + 1 :], kwargs)
        return _check_size(function(*args, **kwargs))

    return call


# --- what templates call ---


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: no HTML escapes, keys in their own order."""
    if isinstance(indent, int) and indent > 16:
        raise SecurityError("tojson: indent is more than 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_environment
def _sum(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's, of numbers only: lists would be copied for each of them."""
    if not isinstance(start, int | float):
        raise SecurityError("sum adds numbers")
    return FILTERS["sum"](environment, values, attribute, start)  # type: ignore[operator]


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256:
        raise SecurityError("strftime_now: the format is too long")
    return datetime.now().strftime(pattern)
