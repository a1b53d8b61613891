"""What ends a process fails one call, and the next call has a process again."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from worker_calls import answer

from stoker.backends.contract.workers import Ended, Workers


@pytest.mark.slow
def test_each_way_to_end():
    with Workers(answer, 1) as workers:
        first, _ = workers.run("a")
        assert first != os.getpid() and workers.run("b") == (first, "b")
        with pytest.raises(Ended, match="its process ended by SIGABRT"):
            workers.run("abort")
        with pytest.raises(Ended, match="its process ended by signal 40"):
            workers.run("real time")
        second, _ = workers.run("c")
        with pytest.raises(Ended, match="exit code 7"):
            workers.run("exit")
        with pytest.raises(Ended, match=r"took more than 0.5 s"):
            workers.run("hang", seconds=0.5)
        third, text = workers.run("lost")  # its result counts, its process goes
        assert text == "lost" and len({first, second, third, workers.run("d")[0]}) == 4
    assert not multiprocessing.active_children()
    with pytest.raises(Ended, match="no more processes"):
        workers.run("e")


def test_leaving_ends_what_is_under_way():
    ended = []

    def call():
        try:
            workers.run("hang")
        except Ended as error:
            ended.append(str(error))

    with Workers(answer, 1) as workers:
        workers.run("a")
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.2)
    thread.join(10)
    assert ended == [f"its process ended by {signal.SIGKILL.name}"]


def test_leaving_ends_what_is_just_starting(monkeypatch):
    starting, start = threading.Event(), multiprocessing.process.BaseProcess.start
    ended = []

    def slow_start(process):
        starting.set()
        time.sleep(0.3)
        start(process)

    def call():
        try:
            workers.run("hang")
        except Ended as error:
            ended.append(str(error))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", slow_start)
    began = time.monotonic()
    with Workers(answer, 1) as workers:
        thread = threading.Thread(target=call)
        thread.start()
        starting.wait()
    thread.join(10)
    assert ended == [f"its process ended by {signal.SIGKILL.name}"]
    assert time.monotonic() - began < 10


PARENT = """
import signal, sys, threading
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
sys.path.insert(0, sys.argv[1])
from stoker.backends.contract.workers import Workers
from worker_calls import answer
with Workers(answer, 2) as workers:
    pids = [workers.run("a")[0] for _ in range(2)]
    threading.Thread(target=workers.run, args=("hang",), daemon=True).start()
    print(*pids, flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGHUP"])
def test_they_end_with_their_parent(name):
    here = os.path.dirname(__file__)
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, here],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)  # one of them hangs by now, the other waits
    parent.send_signal(getattr(signal, name))
    # They hold its stderr: this ends when they have.
    _, errors = parent.communicate(timeout=30)
    assert (parent.returncode, errors) == (-getattr(signal, name), "")
