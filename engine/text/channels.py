"""Formats in which every part of an answer is a message with a recipient.

Harmony (gpt-oss): `<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final
<|message|>answer`; a call's header says `to=functions.NAME`. Functionary v3.2: `>>>all\\nanswer`,
`>>>NAME\\n{arguments}`.

Runs on: loop.
"""

import re

from .reader import Enough, Malformed, Reader, Steps, Truncated

HARMONY_MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


def read_harmony(r: Reader) -> Steps[None]:
    """Read messages. Preambles to calls, in the commentary channel, are content."""
    begin = yield from r.accept(*_BEGINS, " to=", "to=")
    try:
        while True:
            if begin in _BEGINS or "to=" in (begin or ""):
                try:
                    yield from _message(r, begin or "")
                except Malformed:
                    r.give_back()
                except Truncated:
                    return  # inside of a header, or of arguments that have been passed on
            begin = yield from r.copy_until(HARMONY_MARKERS, r.content)
            if begin is None:
                return
            if begin not in _BEGINS:
                r.drop()
    except Enough:
        r.is_done = True


def _message(r: Reader, begin: str) -> Steps[None]:
    header, _ = yield from r.take_until("<|message|>")
    header = begin + header
    if recipient := _RECIPIENT.search(header):
        r.begin_call(r.check_name(recipient[1]))
        yield from r.json(r.arguments)
        r.end_call()
        yield from r.skip_spaces()
        r.drop()
        return
    r.drop()
    r.is_reasoning = bool(_ANALYSIS.search(header))
    sink = r.reasoning if r.is_reasoning else r.content
    end = yield from r.copy_until(_ENDS, sink, hold="")
    if end is None and r.is_reasoning:
        r.leave_open()
    r.is_reasoning = False
    if end == "<|start|>":  # the message's own end is missing
        r.at -= len(end)
    r.drop()


def read_functionary(r: Reader) -> Steps[None]:
    """Read parts, each with its recipient in the first line: `all` or a tool."""
    try:
        yield from r.accept(">>>")
        while True:
            try:
                header, _ = yield from r.take_until("\n")
                name = header.strip()
                if name != "all":
                    r.check_name(name)
                    if (yield from r.skip_spaces()) != "{":
                        raise Malformed
                    r.begin_call(name)
                    yield from r.json(r.arguments)
                    r.end_call()
                    yield from r.skip_spaces()
                r.drop()
            except Malformed:
                r.give_back()
            except Truncated:
                r.at = len(r.text)
                r.give_back()
            if (yield from r.copy_until((">>>",), r.content)) is None:
                return
    except Enough:
        r.is_done = True
