"""Regular expressions, parsed and written anew so that every library reads them alike.

Dialects differ: what `\\s` holds, whether `$` stands before a last line break, which escapes exist.
The language that is written is the one that ECMA-262 and Python agree on: what a class matches in
both. What is no regular language (look-around, back-references) is refused, and what would expand
to too many states, before any library sees it.

Runs on: any (pure).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from .api import GrammarError

MAX_CODE_POINT = 0x10FFFF
MAX_STATES = 200_000
MAX_GROUP_DEPTH = 50
UNBOUNDED = -1

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, inclusive


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Property:
    """One character by a Unicode property, as in \\p{L}; only some libraries know them."""

    text: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """The text's beginning (^) or end ($)."""

    is_end: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times, any number of times where high is UNBOUNDED."""

    node: Node
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    nodes: tuple[Node, ...]


Node = Chars | Property | Anchor | Repeat | Concat | Alt


def _union(parts: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    """All other characters; a surrogate is no character."""
    gaps, start = [], 0
    for low, high in _union((*ranges, (0xD800, 0xDFFF))):
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)


def _points(text: str) -> Ranges:
    return _union((ord(c), ord(c)) for c in text)


ANY: Ranges = _complement(())
_LINE_ENDS = _points("\n\r\u2028\u2029")
_SPACES = _points(" \t\n\v\f\r")
_ALL_SPACES = _union(
    (
        *_SPACES,
        *_points("\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"),
        (0x2000, 0x200A),
    )
)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


@cache
def _where(test: Callable[[str], bool]) -> Ranges:
    return _union((i, i) for i in range(MAX_CODE_POINT + 1) if test(chr(i)))


def _is_digit(char: str) -> bool:
    return unicodedata.category(char) == "Nd"


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _category(letter: str, *, wide: bool) -> Ranges:
    """What \\d, \\s, \\w and their opposites hold; wide: in any dialect, else in each of them."""
    if letter.isupper():
        return _complement(_category(letter.lower(), wide=not wide))
    if letter == "d":
        return _where(_is_digit) if wide else _DIGITS
    if letter == "w":
        return _where(_is_word) if wide else _WORD
    return _ALL_SPACES if wide else _SPACES


_CONTROL = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7}


class _Parser:
    """Recursive descent; positions are of characters, for messages."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("unbalanced parenthesis")
        return node

    def _error(self, what: str) -> GrammarError:
        return GrammarError(f"{what} at position {self._at} of the regular expression")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._error("the expression ends too early")
        self._at += 1
        return char

    def _alternatives(self) -> Node:
        nodes = [self._sequence()]
        while self._skip("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else Alt(tuple(nodes))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            node = self._atom()
            if (bounds := self._bounds()) is not None:
                if isinstance(node, Anchor):
                    raise self._error("an anchor cannot be repeated")
                node = Repeat(node, *bounds)
                self._skip("?")  # laziness says which match is found, not what matches
                if self._peek() in ("+", "*") or self._bounds() is not None:
                    raise self._error("a repeat of a repeat")
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Concat(tuple(nodes))

    def _bounds(self) -> tuple[int, int] | None:
        char = self._peek()
        if char in ("*", "+", "?") and char:
            self._at += 1
            return {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[char]
        if char != "{":
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, self._at)].partition(",")
        if not (low.isdecimal() and low.isascii() and (high.isdecimal() or not high)):
            return None  # a literal brace
        if max(len(low), len(high)) > 9:
            raise self._error("a repeat count is too large")
        self._at = end + 1
        first = int(low)
        last = first if not comma else int(high) if high else UNBOUNDED
        if UNBOUNDED < last < first:
            raise self._error("repeat counts are in the wrong order")
        return first, last

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._set())
        if char == ".":
            return Chars(_complement(_LINE_ENDS))
        if char in "^$":
            return Anchor(char == "$")
        if char in "*+?":
            raise self._error("nothing to repeat")
        if char != "\\":
            return Chars(_points(char))
        letter = self._take()
        if letter in "dDsSwW":
            return Chars(_category(letter, wide=False))
        if letter in "pP":
            return self._property(letter)
        if letter in "bB":
            raise self._error("word boundaries are not supported")
        if letter in "123456789k":
            raise self._error("back-references are not supported")
        if letter in "AZz":
            return Anchor(letter != "A")
        code = self._escaped(letter)
        return Chars(((code, code),))

    def _property(self, letter: str) -> Property:
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0 or end - self._at > 64:
            raise self._error("a Unicode property looks like \\p{L}")
        name = self._text[self._at + 1 : end]
        if not name.replace("_", "").replace("=", "").isalnum() or not name.isascii():
            raise self._error("a Unicode property looks like \\p{L}")
        self._at = end + 1
        return Property(f"\\{letter}{{{name}}}")

    def _group(self) -> Node:
        if self._skip("?"):
            if self._skip("P<") or (
                self._peek() == "<"
                and self._text[self._at + 1 : self._at + 2] not in ("=", "!")
                and self._skip("<")
            ):
                end = self._text.find(">", self._at)
                if not self._text[self._at : max(end, self._at)].isidentifier():
                    raise self._error("a bad group name")
                self._at = end + 1
            elif not self._skip(":"):
                if self._peek() in ("=", "!", "<"):
                    raise self._error("look-around is not supported")
                raise self._error("this kind of group is not supported")
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise self._error(f"groups are nested more than {MAX_GROUP_DEPTH} deep")
        node = self._alternatives()
        self._depth -= 1
        if not self._skip(")"):
            raise self._error("unbalanced parenthesis")
        return node

    def _set(self) -> Ranges:
        is_negated = self._skip("^")
        parts: list[tuple[int, int]] = []
        if self._peek() == "]":
            raise self._error("write \\] for a bracket")  # empty in ECMA-262, a bracket in Python
        while not self._skip("]"):
            low = self._member(is_negated)
            if not isinstance(low, int):
                parts += low
                continue
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(is_negated)
                if not isinstance(last, int) or last < low:
                    raise self._error("a bad range")
                high = last
            parts.append((low, high))
        ranges = _union(parts)
        return _complement(ranges) if is_negated else _complement(_complement(ranges))

    def _member(self, is_negated: bool) -> int | Ranges:
        char = self._take()
        if char == "[" and self._peek() == ":":
            raise self._error("POSIX classes are not supported")
        if char != "\\":
            return ord(char)
        letter = self._take()
        if letter in "dDsSwW":
            return _category(letter, wide=is_negated)
        if letter == "b":
            return 8
        if letter in "pP":
            raise self._error("Unicode properties inside brackets are not supported")
        return self._escaped(letter)

    def _escaped(self, letter: str) -> int:
        if letter in _CONTROL:
            return _CONTROL[letter]
        if letter == "x":
            return self._hex(2)
        if letter == "u":
            if self._skip("{"):
                end = self._text.find("}", self._at)
                if not 0 < end - self._at <= 6:
                    raise self._error("a bad escape")
                code = self._hex(end - self._at)
                self._at = end + 1
            else:
                code = self._hex(4)
            if 0xD800 <= code < 0xE000 or code > MAX_CODE_POINT:
                raise self._error("an escape that is no character")
            return code
        if letter.isalnum():
            raise self._error(f"an unknown escape \\{letter}")
        return ord(letter)

    def _hex(self, length: int) -> int:
        digits = self._text[self._at : self._at + length]
        if len(digits) < length or any(c not in "0123456789abcdefABCDEF" for c in digits):
            raise self._error("a bad escape")
        self._at += length
        return int(digits, 16)


def parse(text: str) -> Node:
    """The tree of an expression, without what can match nothing, as [^\\s\\S].

    Raises:
        GrammarError: the expression is wrong, not regular or too large, or no text matches it.
    """
    node = without(_Parser(text).parse(), "")
    if node is None:
        raise GrammarError("no text matches the regular expression")
    if (states := _num_states(node)) > MAX_STATES:
        raise GrammarError(
            f"the regular expression expands to {states} states, the limit is {MAX_STATES}"
        )
    return node


def _num_states(node: Node) -> int:
    match node:
        case Repeat(inner, low, high):
            return _num_states(inner) * max(low + 1, high)
        case Concat(nodes) | Alt(nodes):
            return sum(map(_num_states, nodes))
    return 1


def anchored(node: Node, *, search: bool) -> Node:
    """The expression of whole texts, without anchors.

    Args:
        search: the expression may match anywhere in the text, except where anchors hold it; else
            it must match all of the text, and anchors at its ends say nothing new.

    Raises:
        GrammarError: an anchor that is not at an end.
    """
    if isinstance(node, Alt):
        return Alt(tuple(anchored(branch, search=search) for branch in node.nodes))
    nodes = list(node.nodes) if isinstance(node, Concat) else [node]
    if len(nodes) == 1 and isinstance(nodes[0], Alt):
        return anchored(nodes[0], search=search)
    any_text = Repeat(Chars(ANY), 0, UNBOUNDED)
    before = after = [any_text] if search else []
    if nodes and nodes[0] == Anchor(is_end=False):
        before, nodes = [], nodes[1:]
    if nodes and nodes[-1] == Anchor(is_end=True):
        after, nodes = [], nodes[:-1]
    if any(map(_has_anchor, nodes)):
        raise GrammarError("anchors are supported only at the ends of a regular expression")
    return Concat((*before, *nodes, *after))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Repeat(inner):
            return _has_anchor(inner)
        case Concat(nodes) | Alt(nodes):
            return any(map(_has_anchor, nodes))
    return False


def without(node: Node, removed: str) -> Node | None:
    """The part of the language that has none of some characters; None where nothing is left."""
    match node:
        case Chars(ranges):
            kept = _complement(_union((*_complement(ranges), *_points(removed))))
            return Chars(kept) if kept else None
        case Repeat(inner, low, high):
            rest = without(inner, removed)
            if rest is None:
                return None if low else Concat(())
            return Repeat(rest, low, high)
        case Concat(nodes):
            parts = [without(n, removed) for n in nodes]
            return None if None in parts else Concat(tuple(p for p in parts if p is not None))
        case Alt(nodes):
            left = tuple(p for n in nodes if (p := without(n, removed)) is not None)
            return Alt(left) if left else None
    return node


def escapable(node: Node) -> Node:
    """The expression of a JSON string that llguidance reads right.

    A set with all control characters but without the quote or the backslash lets these pass too;
    without NUL it does not.
    """
    match node:
        case Chars(ranges) if ranges and ranges[0][0] == 0 and ranges[0][1] >= 0x1F:
            special = {0x22, 0x5C}
            held = {c for c in special for low, high in ranges if low <= c <= high}
            return node if held == special else without(node, "\0") or node
        case Repeat(inner, low, high):
            return Repeat(escapable(inner), low, high)
        case Concat(nodes):
            return Concat(tuple(map(escapable, nodes)))
        case Alt(nodes):
            return Alt(tuple(map(escapable, nodes)))
    return node


def has_property(node: Node) -> bool:
    """Whether a Unicode property occurs."""
    match node:
        case Property():
            return True
        case Repeat(inner):
            return has_property(inner)
        case Concat(nodes) | Alt(nodes):
            return any(map(has_property, nodes))
    return False


def literal(text: str) -> Node:
    """The expression that matches one text."""
    return Concat(tuple(Chars(_points(char)) for char in text))


def write(node: Node) -> str:
    """An expression without anchors as text, in the syntax that all libraries read alike."""
    match node:
        case Chars(ranges):
            return _write_set(ranges)
        case Property(text):
            return text
        case Repeat(inner, low, high):
            last = "" if high == UNBOUNDED else str(high)
            count = {"0,": "*", "1,": "+", "0,1": "?"}.get(f"{low},{last}", f"{{{low},{last}}}")
            return (write(inner) if isinstance(inner, Chars) else f"(?:{write(inner)})") + count
        case Concat(nodes):
            return "".join(f"(?:{write(n)})" if isinstance(n, Alt) else write(n) for n in nodes)
        case Alt(nodes):
            return "|".join(write(n) for n in nodes)
    raise AssertionError("anchors must be gone")


def _write_set(ranges: Ranges) -> str:
    """A set, one pair of brackets for each length in UTF-8.

    xgrammar reads one that crosses these lengths as if overlong forms were characters.
    """
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    parts = []
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, MAX_CODE_POINT)):
        cut = [(max(low, first), min(high, last)) for low, high in ranges]
        kept = [bounds for bounds in cut if bounds[0] <= bounds[1]]
        if kept:
            parts.append("[" + "".join(map(_range, kept)) + "]")
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _range(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return _char(low) if low == high else f"{_char(low)}-{_char(high)}"


def _char(code: int) -> str:
    # xgrammar reads as many digits as there are after \x; braces end them.
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\u{{{code:x}}}"
