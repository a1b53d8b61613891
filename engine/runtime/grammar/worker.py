"""A process that compiles grammars for another one: one request at a time, until its input ends.

It may be killed at any moment, and it may crash: nothing depends on it but the request it works on.
It imports no torch, so that it starts in a fraction of a second.

    in:  vocabulary, then requests;  out: "ready", then one answer a request
    a frame is its length (4 bytes, little-endian) and its bytes; an answer's payload is a frame

Runs on: worker.
"""

import json
import os
import struct
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from .api import Backend, Compiled, GrammarError, Vocabulary
from .schema import SchemaError
from .translate import check_nesting, translate

NICENESS = 10  # where there is no SCHED_IDLE
MAX_MEMORY = 4 << 30
PROBE_TOKENS = 48
MAX_MASK_S = 0.05  # processor time of one mask
LENGTH = struct.Struct("<I")


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Send one frame."""
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """Receive one frame. Raises EOFError where the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def pack_vocabulary(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as a frame's bytes."""
    head = json.dumps(
        {
            "size": vocabulary.size,
            "stop_ids": vocabulary.stop_ids,
            "lengths": [len(token) for token in vocabulary.tokens],
        }
    ).encode()
    return LENGTH.pack(len(head)) + head + b"".join(vocabulary.tokens)


def unpack_vocabulary(data: bytes) -> Vocabulary:
    """The vocabulary of a frame."""
    (length,) = LENGTH.unpack_from(data)
    at = LENGTH.size + length
    head = json.loads(data[LENGTH.size : at])
    tokens = []
    for size in head["lengths"]:
        tokens.append(data[at : at + size])
        at += size
    return Vocabulary(tuple(tokens), head["size"], tuple(head["stop_ids"]))


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The grammar library of this name. Raises ImportError where it is not installed."""
    if name == "xgrammar":
        from .xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary)
    from .llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary)


def probe(compiled: Compiled, vocabulary: Vocabulary) -> None:
    """Walk a little way into a grammar, to see that its masks are quick and lead somewhere.

    Raises:
        GrammarError: a mask takes too long, or the grammar allows nothing.
    """
    matcher = compiled.matcher()
    row = np.zeros(vocabulary.mask_words, np.int32)
    draw = np.random.default_rng(0)
    for i in range(PROBE_TOKENS):
        began = time.process_time()
        is_filled = matcher.fill_mask(row)
        if not is_filled or time.process_time() - began > MAX_MASK_S:
            raise GrammarError("the grammar is too complex to follow token by token")
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise GrammarError(
                f"the grammar allows nothing {f'after {i} tokens' if i else 'at all'}"
            )
        token = int(draw.choice(allowed))
        if token in vocabulary.stop_ids:
            return
        if not matcher.accept(token):
            raise GrammarError("the grammar forbids what its mask allows")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on this platform; the deadline still holds
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(
    request: dict[str, Any], vocabulary: Vocabulary, backends: dict[str, Backend]
) -> tuple[dict[str, Any], bytes]:
    """The answer to a request: the first library that enforces its source, or why none does."""
    reasons: list[str] = []
    try:
        check_nesting(request["source"])
        for name in request["libraries"]:
            try:
                kind, source = translate(request["kind"], request["source"], name)
                if name not in backends:
                    backends[name] = make_backend(name, vocabulary)
                payload = backends[name].compile(kind, source)
                if len(payload) > request["max_bytes"]:
                    raise GrammarError(f"compiled, it takes {len(payload)} bytes: too many")
                probe(backends[name].load(kind, source, payload), vocabulary)
                return {"error": None, "library": name, "kind": kind, "source": source}, payload
            except SchemaError:
                raise
            except (GrammarError, MemoryError, ImportError) as error:
                reasons.append(str(error) or "out of memory")
    except (SchemaError, RecursionError) as error:
        reasons = [str(error)]
    return {"error": "; ".join(dict.fromkeys(reasons))}, b""


def main() -> None:
    """Serve standard input until it ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm-ffi would import it
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the frames
    if hasattr(os, "SCHED_IDLE"):  # only on what the engine's threads leave
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(NICENESS)
    _limit_memory()
    vocabulary = unpack_vocabulary(read_frame(source))
    backends: dict[str, Backend] = {}
    write_frame(sink, b"ready")
    while True:
        try:
            request = json.loads(read_frame(source))
        except EOFError:
            return
        answer, payload = _serve(request, vocabulary, backends)
        write_frame(sink, json.dumps(answer).encode())
        write_frame(sink, payload)


if __name__ == "__main__":
    main()
