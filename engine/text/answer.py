"""An answer as its tokens arrive: content, reasoning and tool calls, each as it comes.

Runs on: loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenizer import Detokenizer, StopStrings
from .formats import ReasoningFormat, ToolFormat
from .reader import CallArguments, Content, Delta, Reader, Reasoning, Steps
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the answers to one request may hold beside content.

    Attributes:
        reasoning: tags around the reasoning.
        is_open: the prompt ends inside of it.
        tool_format: how calls are written; a format with channels also without tools.
        tools: name to parameters' JSON schema, of those that may be called.
        ends_at_call: the answer ends with its first call.
        hides_nothing: reasoning in channels is content.
    """

    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    tool_format: ToolFormat | None = None
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    ends_at_call: bool = False
    hides_nothing: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be visible where it is a special token."""
        parts = (self.reasoning, self.tool_format)
        return tuple(marker for part in parts if part for marker in part.markers)


class AnswerParser:
    """Text to deltas: those of all pieces together say what the whole text says at once."""

    def __init__(self, form: AnswerFormat):
        new_id = form.tool_format.new_id if form.tool_format else None
        self._form = form
        self._reader = Reader(form.tools.keys(), ends_at_call=form.ends_at_call, new_id=new_id)
        self._steps: Steps[None] | None = self._read()
        self._advance()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        return self._reader.is_reasoning

    @property
    def is_done(self) -> bool:
        """Whether the only call that was asked for is complete."""
        return self._reader.is_done

    def feed(self, text: str) -> list[Delta]:
        """Take more text. Returns what it brings, adjacent pieces of a kind as one."""
        if not text or self._steps is None:
            return []
        self._reader.push(text)
        return self._advance()

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """The end of the text: what was held back.

        Args:
            is_cut: it ended at a limit, not because the model was done.
        """
        self._reader.is_closed, self._reader.is_cut = True, is_cut
        return self._advance()

    def _read(self) -> Steps[None]:
        form, r = self._form, self._reader
        if form.reasoning:
            yield from form.reasoning.read(r, form.is_open)
        if form.tool_format:
            yield from form.tool_format.read(r, form.tools)
        else:
            yield from r.copy_until((), r.content, hold="")

    def _advance(self) -> list[Delta]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        deltas, self._reader.deltas = self._reader.deltas, []
        if self._form.hides_nothing:
            deltas = [Content(d.text) if type(d) is Reasoning else d for d in deltas]
        return _joined(deltas) if len(deltas) > 1 else deltas


def _joined(deltas: list[Delta]) -> list[Delta]:
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(last, CallArguments) and isinstance(delta, CallArguments):
            if last.number == delta.number:
                joined[-1] = CallArguments(last.number, last.text + delta.text)
                continue
        elif isinstance(last, Content | Reasoning) and type(last) is type(delta):
            joined[-1] = type(last)(last.text + delta.text)
            continue
        joined.append(delta)
    return joined


class AnswerDetokenizer:
    """A Detokenizer whose text is the content, and which keeps the other deltas.

    Stop strings are looked for in content only.

    Attributes:
        stopped: the stop string that was found; "" where the only call is complete.
        num_tokens: ids taken so far. Those after the end do not count.
        num_reasoning: of them, those that belong to reasoning and its tags.
        is_cut: set before `flush` where a limit ended the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: AnswerFormat,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._plain = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=form.markers
        )
        self._parser = AnswerParser(form)
        self._stops = StopStrings(stop, include_stop) if stop else None
        self._deltas: list[Delta] = []
        self.stopped: str | None = None
        self.num_tokens = self.num_reasoning = 0
        self.is_cut = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids and return the content that is safe to show."""
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            was_reasoning = self._parser.is_reasoning
            pieces.append(self._keep(self._parser.feed(self._plain.feed((token_id,)))))
            self.num_tokens += 1
            self.num_reasoning += was_reasoning or self._parser.is_reasoning
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the content, after the last id."""
        if self.stopped is not None:
            return ""
        deltas = self._parser.feed(self._plain.flush()) + self._parser.finish(self.is_cut)
        return self._keep(deltas) + self._flush_stops()

    def take_deltas(self) -> tuple[Delta, ...]:
        """What came since the last call, content included."""
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    def _keep(self, deltas: list[Delta]) -> str:
        text = ""
        for delta in deltas:
            if type(delta) is not Content:
                text += self._flush_stops()
                self._deltas.append(delta)
            elif self._stops is None:
                text += delta.text
                self._deltas.append(delta)
            else:
                text += self._show(self._stops.feed(delta.text))
                if self._stops.found is not None:
                    self.stopped = self._stops.found
                    return text
        if self._parser.is_done:
            text += self._flush_stops()
            self.stopped = ""
        return text

    def _flush_stops(self) -> str:
        return self._show(self._stops.flush()) if self._stops else ""

    def _show(self, text: str) -> str:
        if text:
            self._deltas.append(Content(text))
        return text
