"""Grammars for this process: checked, compiled in workers under a deadline, kept by size.

Blocking calls for pool threads; the event loop awaits them. A request that waits here is not in the
scheduler: it holds nothing and delays nobody.

Runs on: pool.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ...api.errors import Overloaded, RequestError
from ...api.grammar import GrammarSpec, Reasoning
from .api import Backend, Compiled, GrammarError, Matcher, Vocabulary
from .gate import Gate
from .worker import LENGTH, make_backend, pack_vocabulary, write_frame

log = logging.getLogger("stoker")

BackendName = Literal["xgrammar", "llguidance"]

MAX_SOURCE = 256 << 10
MAX_COMPILED_BYTES = 64 << 20
MAX_WAITING = 32  # threads that wait for workers
MAX_FAILURES = 256  # remembered, so that a bad schema costs its deadline once
START_S = 30.0  # to start a worker; it is no request's fault when a machine is slow
BUSY_SHARE = 0.5  # of the deadline, in processor time: with less, the machine was at fault


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request carries into the engine: compiled, when it begins, and when it may end."""

    compiled: Compiled
    vocabulary: Vocabulary
    reasoning: Reasoning | None = None
    min_tokens: int = 0

    def matcher(self) -> Matcher:
        """For one sequence, at its beginning."""
        inner = self.compiled.matcher()
        if self.reasoning is None:
            return inner
        texts = self.vocabulary.texts
        return Gate(inner, self.reasoning, self.vocabulary.stop_ids, texts.__getitem__)


class _Killed(Exception):
    """The worker ran into the deadline, or crashed."""


class _Gone(Exception):
    """The worker had ended before it was asked."""


class _Worker:
    """One compile process and the pipe to it."""

    def __init__(self, vocabulary: bytes):
        path = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.spent_s = 0.0  # processor time of the last request
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        try:
            write_frame(self._stdin, vocabulary)
            if self._read(time.monotonic() + START_S) != b"ready":
                raise _Killed
        except (OSError, _Killed):
            self.kill()
            raise RuntimeError("the grammar worker does not start") from None

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _read(self, deadline: float) -> bytes:
        (length,) = LENGTH.unpack(self._take(LENGTH.size, deadline))
        return self._take(length, deadline)

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise _Killed
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise _Killed
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def compile(self, request: dict[str, Any], deadline: float) -> tuple[str, str, str, bytes]:
        """Library, kind and source that were compiled, and what they gave.

        Raises GrammarError with the reason, _Gone, or _Killed.
        """
        if self._process.poll() is not None:
            raise _Gone
        began = self.processor_s()
        try:
            write_frame(self._stdin, json.dumps(request).encode())
            answer = json.loads(self._read(deadline))
            payload = self._read(deadline)
        except OSError:
            raise _Killed from None
        finally:
            self.spent_s = self.processor_s() - began
        if answer["error"] is not None:
            raise GrammarError(answer["error"])
        return answer["library"], answer["kind"], answer["source"], payload

    def processor_s(self) -> float:
        """Processor time that the process has used; the clock's where the OS does not tell."""
        try:
            with open(f"/proc/{self._process.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was not written yet has no reader
                pipe.close()


class GrammarCompiler:
    """Compiles for one tokenizer.

    Args:
        vocabulary: of the model.
        backend: the library that is tried first.
        timeout_s: from the call to the answer, waiting for a worker included.
        num_workers: processes at most; each starts with the first request that needs it.
        cache_bytes: compiled grammars that are kept, the longest unused go first.

    Attributes:
        num_hits, num_misses: of the cache.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: BackendName,
        *,
        timeout_s: float,
        num_workers: int = 2,
        cache_bytes: int = 256 << 20,
    ):
        self.num_hits = 0
        self.num_misses = 0
        self._vocabulary = vocabulary
        self._order: tuple[BackendName, BackendName] = (
            ("xgrammar", "llguidance") if backend == "xgrammar" else ("llguidance", "xgrammar")
        )
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._lock = threading.Condition()
        self._cache: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._failures: OrderedDict[tuple[str, str], RequestError] = OrderedDict()
        self._running: dict[tuple[str, str], Future[Compiled]] = {}
        self._backends: dict[str, Backend] = {}
        self._idle: list[_Worker] = []
        self._num_alive = 0  # workers, those that start included
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="stoker-grammar")
        self._is_closed = False

    def submit(self, spec: GrammarSpec) -> Future[Compiled]:
        """The compiled grammar, now or later. Equal sources that wait are compiled once.

        The future raises RequestError (400) where the source is wrong, cannot be enforced or takes
        too long, Overloaded where no worker gets to it in time.
        """
        key = (spec.kind, spec.source)
        with self._lock:
            if (compiled := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                self.num_hits += 1
                done: Future[Compiled] = Future()
                done.set_result(compiled)
                return done
            if (error := self._failures.get(key)) is not None:
                self._failures.move_to_end(key)
                return _failed(RequestError(error.message, param=spec.param, code=error.code))
            if (running := self._running.get(key)) is not None:
                return running
            if len(spec.source) > MAX_SOURCE:
                reason = f"{len(spec.source)} characters, the limit is {MAX_SOURCE}"
                return _failed(_refusal(spec, reason))
            self.num_misses += 1
            deadline = time.monotonic() + self._timeout_s
            future = self._running[key] = self._threads.submit(self._compile, spec, key, deadline)
            return future

    def bind(self, compiled: Compiled, spec: GrammarSpec) -> Grammar:
        """What a request carries."""
        return Grammar(compiled, self._vocabulary, spec.reasoning)

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._is_closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec, key: tuple[str, str], deadline: float) -> Compiled:
        try:
            compiled = self._with_worker(spec, deadline)
        except RequestError as error:  # not Overloaded: that may be better the next time
            with self._lock:
                self._failures[key] = error
                if len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
            raise
        else:
            with self._lock:
                self._cache[key] = compiled
                self._cached_bytes += compiled.num_bytes + len(spec.source)
                while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                    (_, source), dropped = self._cache.popitem(last=False)
                    self._cached_bytes -= dropped.num_bytes + len(source)
            return compiled
        finally:
            with self._lock:
                del self._running[key]

    def _with_worker(self, spec: GrammarSpec, deadline: float) -> Compiled:
        """Check and compile in a worker, load here."""
        request = {
            "libraries": self._order,
            "kind": spec.kind,
            "source": spec.source,
            "max_bytes": MAX_COMPILED_BYTES,
        }
        while True:
            worker = self._worker(deadline)
            try:
                name, kind, source, data = worker.compile(request, deadline)
                break
            except _Gone:
                self._replace(worker)
            except _Killed:
                is_late = time.monotonic() >= deadline
                self._replace(worker)
                if is_late and worker.spent_s < BUSY_SHARE * self._timeout_s:
                    raise Overloaded(
                        "this machine is too busy to compile a grammar", retry_after_s=1
                    ) from None
                reason = f"not compiled within {self._timeout_s:g} s"
                raise _refusal(
                    spec, f"too complex: {reason if is_late else 'its compilation failed'}"
                ) from None
            except GrammarError as error:
                self._give_back(worker)
                raise _refusal(spec, str(error)) from None
        self._give_back(worker)
        with self._lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self._vocabulary)
            backend = self._backends[name]
        return backend.load(kind, source, data)

    def _replace(self, worker: _Worker) -> None:
        """Start another in the place of one that has ended or must."""
        try:
            worker.kill()
        finally:
            with self._lock:
                self._num_alive -= 1
            self._start_worker()

    def _worker(self, deadline: float) -> _Worker:
        """One that is idle; starts one where fewer run than may."""
        with self._lock:
            is_short = not self._idle and self._num_alive < self._num_workers
        if is_short:
            self._start_worker()
        with self._lock:
            while not self._idle:
                if not self._lock.wait(max(0.0, deadline - time.monotonic())):
                    raise Overloaded("too many grammars are being compiled", retry_after_s=1)
            return self._idle.pop()

    def _start_worker(self) -> None:
        """On a thread of its own: a start that takes long is waited for by who needs it."""
        with self._lock:
            self._num_alive += 1
        threading.Thread(target=self._run_worker, name="stoker-grammar", daemon=True).start()

    def _run_worker(self) -> None:
        try:
            worker = _Worker(pack_vocabulary(self._vocabulary))
        except RuntimeError:
            log.exception("a grammar worker does not start")
            with self._lock:
                self._num_alive -= 1
            return
        self._give_back(worker)

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                self._lock.notify_all()
                return
        worker.kill()


def _failed(error: RequestError) -> Future[Compiled]:
    future: Future[Compiled] = Future()
    future.set_exception(error)
    return future


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.param}: {reason}", param=spec.param, code="invalid_grammar")
