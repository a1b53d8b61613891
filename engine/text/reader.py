"""Text that comes in pieces, read by generators that stop where they need more of it.

A model's answer is read once, from left to right, into deltas. Each decision is taken only when the
text that it depends on is there, so the deltas say the same however the text was cut. What a
reader has not made a delta of is kept, so that a call that turns out to be none can become content.

Runs on: loop.
"""

import functools
import json
import re
import secrets
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
Sink = Callable[[str], object]

MAX_DEPTH = 128  # of JSON
MAX_HEADER = 512  # characters of a name or a key
_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[\w.+-]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class Content(NamedTuple):
    """More of the visible answer."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; calls are numbered from 0."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, as JSON text."""

    number: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


class Malformed(Exception):
    """What stands at `at` does not belong in a call."""


class Truncated(Exception):
    """The text ended inside a call."""


class Enough(Exception):
    """The one call that was asked for is complete."""


class Reader:
    """The text, where reading stands in it, and the deltas so far.

    Args:
        names: the tools that may be called.
        ends_at_call: stop after the first call.
        new_id: makes a call's id where the model writes none.

    Attributes:
        at: the next character to read.
        mark: all text before it is accounted for by deltas, or was markup. mark <= at.
        is_closed: no more text will come.
        is_cut: it ended because of a limit on its length, not because the model was done.
        is_reasoning: what is read now is reasoning.
        is_done: the one call that was asked for is complete: the rest is of no interest.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        *,
        ends_at_call: bool = False,
        new_id: Callable[[], str] | None = None,
    ):
        self.names = names
        self.ends_at_call = ends_at_call
        self.new_id = new_id or _new_id
        self.text = ""
        self.at = self.mark = 0
        self.is_closed = self.is_cut = self.is_reasoning = self.is_done = False
        self.num_calls = 0
        self.deltas: list[Delta] = []
        self._ids: set[str] = set()
        self._in_call = False
        self._sent = 0  # of JSON: what its sink has
        self._thoughts: list[str] = []

    def push(self, text: str) -> None:
        """Append text, and forget what is accounted for."""
        self.text = self.text[self.mark :] + text
        self.at -= self.mark
        self._sent -= self.mark
        self.mark = 0

    # --- deltas ---

    def content(self, text: str) -> None:
        """Add to the visible answer."""
        self.deltas.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        self._thoughts.append(text)
        self.deltas.append(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call: from here on it cannot become content any more."""
        if call_id is None or call_id in self._ids:
            call_id = self.new_id()
        self._ids.add(call_id)
        self.deltas.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1
        self._in_call = True
        self.mark = self.at

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        self.deltas.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End a call. Raises Enough where no other is wanted."""
        self._in_call = False
        self.mark = self.at
        if self.ends_at_call:
            raise Enough

    def check_name(self, name: str) -> str:
        """The name. Raises Malformed where there is no such tool."""
        if name not in self.names:
            raise Malformed
        return name

    def drop(self) -> None:
        """What was read is markup."""
        self.mark = self.at

    def give_back(self) -> None:
        """What was read and is no delta yet is content after all."""
        self._in_call = False
        if not self.text[self.mark : self.at].isspace() and self.mark < self.at:
            self.content(self.text[self.mark : self.at])
            self.mark = self.at

    def leave_open(self) -> None:
        """The text ended while the model was thinking. Where that was its own choice, the text is
        its answer: it comes as content too. Streams have shown it as reasoning by then."""
        if not self.is_cut and self._thoughts:
            self.content("".join(self._thoughts))

    # --- pieces of text ---

    def skip_spaces(self) -> Steps[str]:
        """Read whitespace. Returns the character after it."""
        while True:
            self.at = _match(_SPACE, self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_closed:
                return ""
            yield

    def accept(self, *options: str) -> Steps[str | None]:
        """Read the longest of these that comes next, if one does. Empty ones never do."""
        options = tuple(filter(None, options))
        size = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + size]
            open_ones = [s for s in options if len(s) > len(rest) and s.startswith(rest)]
            if not open_ones or self.is_closed:
                found = max((s for s in options if rest.startswith(s)), key=len, default=None)
                self.at += len(found or "")
                return found
            yield

    def expect(self, *options: str) -> Steps[str]:
        """Read one of these. Raises Malformed or Truncated where something else stands here."""
        found = yield from self.accept(*options)
        if found is None:
            raise Truncated if self.at >= len(self.text) else Malformed
        return found

    def take_until(self, *stops: str, limit: int | None = MAX_HEADER) -> Steps[tuple[str, str]]:
        """Read up to one of these, and it too. Returns the text before it, and which it was.

        Raises:
            Malformed: there is none within `limit` characters.
            Truncated: there is none at all.
        """
        pattern, longest = _stops(stops)
        seen = 0
        while True:
            found = pattern.search(self.text, self.at + seen)
            num = (found.start() if found else len(self.text) - longest + 1) - self.at
            if limit is not None and num > limit:
                raise Malformed
            if found:
                taken = self.text[self.at : found.start()]
                self.at = found.end()
                return taken, found.group()
            if self.is_closed:
                raise Truncated
            seen = max(num, 0)
            yield

    def copy_until(
        self, stops: tuple[str, ...], sink: Sink, *, hold: str = "\t\n\r "
    ) -> Steps[str | None]:
        """Pass text on, up to one of the stops, which is read too: returned, or None at the end.

        Text from `mark` on counts, also where it has been read already.

        Args:
            hold: trailing characters that stay back; before a stop they are read, but not marked.
                "\\n" holds a single one back.
        """
        pattern, _ = _stops(stops)
        while True:
            found = pattern.search(self.text, self.mark)
            if found:
                end = found.start()
            elif self.is_closed:
                end, hold = len(self.text), ""
            else:
                ends = (open_prefix(self.text, stop) for stop in stops)
                end = max(min(ends, default=len(self.text)), self.mark)
            if hold == "\n":
                end -= self.text.endswith("\n", self.mark, end)
            elif hold:
                end = self.mark + len(self.text[self.mark : end].rstrip(hold))
            if end > self.mark:
                sink(self.text[self.mark : end])
            self.mark = end
            if found:
                self.at = found.end()
                return found.group()
            self.at = end
            if self.is_closed:
                return None
            yield

    # --- JSON ---

    def json(self, sink: Sink) -> Steps[None]:
        """Read one JSON value and pass its text on, inside a call as it comes.

        Control characters in strings are escaped and stray backslashes doubled, which models
        forget. Every piece that the sink gets leaves valid JSON so far.

        Raises:
            Malformed: `at` is the first character that cannot go on.
            Truncated: all of the text has been passed on.
        """
        self._sent = self.at
        try:
            yield from self._value(sink)
        finally:  # what is well formed is passed on, also where something else follows
            self._pass(sink)

    def _value(self, sink: Sink) -> Steps[None]:
        closers: list[str] = []
        expected = "value"
        while True:
            char = yield from self._next(sink)
            is_key = bool(closers) and closers[-1] == "}" and expected in ("first", "key")
            if expected == "colon":
                if char != ":":
                    raise Malformed
                self.at += 1
                expected = "value"
                continue
            if char in "}]" and expected in ("first", "after"):
                if closers.pop() != char:
                    raise Malformed
                self.at += 1
            elif expected == "after":
                if char != ",":
                    raise Malformed
                self.at += 1
                expected = "key" if closers[-1] == "}" else "value"
                continue
            elif char == '"':
                yield from self._string(sink)
                if is_key:
                    expected = "colon"
                    continue
            elif is_key:
                raise Malformed
            elif char in "{[":
                if len(closers) == MAX_DEPTH:
                    raise Malformed
                closers.append("}" if char == "{" else "]")
                self.at += 1
                expected = "first"
                continue
            else:
                yield from self._scalar(sink, inside=bool(closers))
            if not closers:
                return
            expected = "after"

    def json_string(self) -> Steps[str]:
        """Read a JSON string. Returns what it says."""
        if (yield from self.skip_spaces()) != '"':
            raise Malformed
        pieces: list[str] = []
        self._sent = self.at
        yield from self._string(pieces.append)
        self._pass(pieces.append)
        return json.loads("".join(pieces))

    def _next(self, sink: Sink) -> Steps[str]:
        """The next character that is no whitespace; it is not read."""
        while True:
            self.at = _match(_JSON_SPACE, self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            yield from self._wait(sink)

    def _string(self, sink: Sink) -> Steps[None]:
        self.at += 1
        while True:
            self.at = _match(_PLAIN, self.text, self.at)
            char = self.text[self.at : self.at + 1]
            if char == '"':
                self.at += 1
                return
            if char == "\\" and (escape := _ESCAPE.match(self.text, self.at)):
                self.at = escape.end()
            elif char == "" or (char == "\\" and _OPEN_ESCAPE.fullmatch(self.text, self.at)):
                yield from self._wait(sink)
            else:
                self._pass(sink)
                sink(json.dumps(char)[1:-1])
                self.at += 1
                self._pass(lambda _: None)

    def _scalar(self, sink: Sink, inside: bool) -> Steps[None]:
        while True:
            end = _match(_WORD, self.text, self.at)
            if end < len(self.text) or (self.is_closed and not inside):
                break
            if self.is_closed:
                self.at = end
            yield from self._wait(sink)
        if not _SCALAR.fullmatch(self.text, self.at, end):
            raise Malformed
        self.at = end

    def _wait(self, sink: Sink) -> Steps[None]:
        if self.is_closed:
            self.at = len(self.text)
        self._pass(sink)
        if self.is_closed:
            raise Truncated
        yield

    def _pass(self, sink: Sink) -> None:
        """Give the sink what it does not have yet. Inside a call it is accounted for then."""
        if self._sent < self.at:
            sink(self.text[self._sent : self.at])
            self._sent = self.at
        if self._in_call:
            self.mark = self.at


def open_prefix(text: str, stop: str) -> int:
    """Where the longest end of the text begins that `stop` may go on from."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


@functools.lru_cache(256)
def _stops(stops: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """What finds the first of some texts, the longest where several stand there; its length."""
    ordered = sorted(stops, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)"), max(map(len, stops), default=1)


def _match(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a pattern that always matches ends."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
