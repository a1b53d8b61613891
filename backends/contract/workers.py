"""Calls in processes of their own, side by side: what ends a process (a fault of a library, of the
device, a call that hangs) ends no other, and the next call starts it again.

Runs on: gpu.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 1800.0  # a call; AITER compiles some modules for minutes


class Ended(Exception):
    """The process that ran a call is no more; the text says how it ended."""


class Workers:
    """So many processes, for as many threads.

    Args:
        function: of a module; gives its result, and whether its process can go on.
    """

    def __init__(self, function: Callable[..., tuple[Any, bool]], count: int) -> None:
        self._function = function
        self._all = [_Worker() for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """Calls that are under way, and all further ones, raise Ended."""
        for worker in self._all:
            worker.end()
        for worker in [self._idle.get() for _ in self._all]:
            worker.reap()
            self._idle.put(worker)

    def run(self, *args: Any, seconds: float = SECONDS) -> Any:
        """What the function gives, in the next process that is idle.

        Raises:
            Ended: its process ended before it gave anything, or took too long.
        """
        worker = self._idle.get()
        try:
            return worker.run(self._function, args, seconds)
        finally:
            self._idle.put(worker)


class _Worker:
    """A process, started when it is needed."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection
        self._starting = threading.Lock()
        self._is_over = False

    def run(self, function: Callable[..., tuple[Any, bool]], args: Any, seconds: float) -> Any:
        with self._starting:
            if self._is_over:
                raise Ended("there are no more processes")
            process = self._process = self._process or self._start(function)
        try:
            self._pipe.send(args)
            if not self._pipe.poll(seconds):
                self.kill()
                self.reap()
                raise Ended(f"took more than {seconds:g} s")
            result, goes_on = self._pipe.recv()
        except (EOFError, OSError):
            self.reap()
            raise Ended(_how(process.exitcode)) from None
        if not goes_on:
            self.kill()
            self.reap()
        return result

    def _start(
        self, function: Callable[..., tuple[Any, bool]]
    ) -> multiprocessing.process.BaseProcess:
        # Not forked: a child of a process that has used a device cannot use it.
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, function), daemon=True)
        # An interrupt is the parent's business; a child inherits what this thread blocks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()
        return process

    def end(self) -> None:
        """For good. May be called beside `run`, which then raises Ended."""
        with self._starting:
            self._is_over = True
            self.kill()

    def kill(self) -> None:
        """The next `run` starts it again."""
        process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """By whoever holds the worker: two that wait for one process would not both learn how."""
        if self._process is not None:
            self._process.join()
            self._process = None


def _serve(pipe: Connection, function: Callable[..., tuple[Any, bool]]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            args = pipe.recv()
        except (EOFError, OSError):  # the parent is no more
            return
        answer = function(*args)
        with contextlib.suppress(OSError):
            pipe.send(answer)


def _end_with_parent() -> None:
    """Whatever ends it: a signal that kills runs no `__exit__` there."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have none, but the first and the last
        name = f"signal {-code}"
    return f"its process ended by {name}"
