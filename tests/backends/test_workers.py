"""What ends a process fails one call, and the next call has a process again."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from stoker.backends.contract.workers import Ended, Workers


def answer(what):
    if what == "abort":
        os.abort()
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    return (os.getpid(), what), what != "lost"


@pytest.mark.slow
def test_each_way_to_end():
    with Workers(answer, 1) as workers:
        first, _ = workers.run("a")
        assert first != os.getpid() and workers.run("b") == (first, "b")
        with pytest.raises(Ended, match="its process ended by SIGABRT"):
            workers.run("abort")
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
