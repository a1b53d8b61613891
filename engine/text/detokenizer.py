"""Token ids to text, piece by piece: no broken character and no part of a stop string gets out.

Runs on: loop.
"""

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output, as its tokens arrive.

    The pieces that `feed` and `flush` return are, however the ids are cut into calls, together
    `tokenizer.decode` of the ids, up to the stop string.

    The output stops at the stop string that is complete first, reading from the left; of several
    that end at one character, the longest is it. So it never waits for a longer match.

    Args:
        stop: the text ends before the first of these, none of them empty.
        include_stop: keep the stop string that ended the text.
        at_start: the ids begin the text, see `Tokenizer.decode`.

    Attributes:
        stopped: the stop string that was found.
        num_tokens: ids taken so far. Those after a stop string do not count.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_is_plain",
        "_is_split",
        "_stop",
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
    ):
        self.stopped: str | None = None
        self.num_tokens = 0
        self._token_bytes = tokenizer.token_bytes
        self._texts = tokenizer.token_texts(skip_special_tokens)
        self._stop = stop
        self._include_stop = include_stop
        self._decoder = _UTF8("replace")
        self._held = ""  # may be the beginning of a stop string
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
        text, self._held = text + self._held, ""
        return text

    def _decode(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        if text is None or (self._is_split and text):
            text = self._decoder.decode(self._token_bytes(token_id))
            self._is_split = bool(self._decoder.getstate()[0])
        if self._strips_space and text:
            self._strips_space = False
            self._is_plain = not self._stop
            text = text.removeprefix(" ")
        return text

    def _scan(self, text: str) -> str:
        """Text up to a stop string, or up to what may become one."""
        if not self._stop or not text:
            return text
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, at, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include_stop else at]
        keep = min(_open_prefix(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep]


def _open_prefix(text: str, stop: str) -> int:
    """Where the longest end of the text begins that a stop string may go on from."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
