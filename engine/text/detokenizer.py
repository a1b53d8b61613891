"""Token ids to text, piece by piece: no broken character and no part of a stop string gets out.

Runs on: loop.
"""

import codecs
from collections.abc import Sequence

from .reader import open_prefix
from .tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Finds where a text that comes in pieces has to end.

    The text ends at the stop string that is complete first, reading from the left; of several
    that end at one character, the longest is it. So it never waits for a longer match.

    Args:
        stop: the strings, none of them empty.
        include: keep the one that ended the text.

    Attributes:
        found: the one that ended the text.
    """

    __slots__ = ("_held", "_include", "_stop", "found")

    def __init__(self, stop: tuple[str, ...], include: bool):
        self.found: str | None = None
        self._stop = stop
        self._include = include
        self._held = ""  # may be the beginning of a stop string

    def feed(self, text: str) -> str:
        """Text up to a stop string, or up to what may become one."""
        if not text:
            return text
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, at, self.found = min(found)
            self._held = ""
            return text[: end if self._include else at]
        keep = min(open_prefix(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, after the last text."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text of one output, as its tokens arrive.

    The pieces that `feed` and `flush` return are, however the ids are cut into calls, together
    `tokenizer.decode` of the ids, up to the stop string.

    Args:
        stop: the text ends before the first of these, see `StopStrings`.
        include_stop: keep the stop string that ended the text.
        at_start: the ids begin the text, see `Tokenizer.decode`.
        shown: special tokens that stand in one of these texts are no tokens to skip.

    Attributes:
        stopped: the stop string that was found.
        num_tokens: ids taken so far. Those after a stop string do not count.
    """

    __slots__ = (
        "_decoder",
        "_is_plain",
        "_is_split",
        "_stops",
        "_strips_space",
        "_texts",
        "_token_bytes",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        *,
        at_start: bool = False,
        shown: tuple[str, ...] = (),
    ):
        self.stopped: str | None = None
        self.num_tokens = 0
        self._token_bytes = tokenizer.token_bytes
        self._texts = tokenizer.token_texts(skip_special_tokens, shown)
        self._stops = StopStrings(stop, include_stop) if stop else None
        self._decoder = _UTF8("replace")
        self._is_split = False  # the decoder holds a part of a character
        self._strips_space = at_start and tokenizer.strips_first_space
        self._is_plain = not stop and not self._strips_space

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids and return the text that is safe to show."""
        if self._is_plain and not self._is_split:
            texts = self._texts
            try:
                text = "".join([texts[i] for i in token_ids])  # type: ignore[misc]
            except (TypeError, IndexError):  # a part of a character, or an id without an entry
                pass
            else:
                self.num_tokens += len(token_ids)
                return text
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            pieces.append(self._scan(self._decode(token_id)))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the text, after the last id."""
        if self.stopped is not None:
            return ""
        text = self._scan(self._decoder.decode(b"", True))
        self._is_split = False
        return text + self._stops.flush() if self._stops else text

    def _decode(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        if text is None or (self._is_split and text):
            text = self._decoder.decode(self._token_bytes(token_id))
            self._is_split = bool(self._decoder.getstate()[0])
        if self._strips_space and text:
            self._strips_space = False
            self._is_plain = not self._stops
            text = text.removeprefix(" ")
        return text

    def _scan(self, text: str) -> str:
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        self.stopped = self._stops.found
        return text
