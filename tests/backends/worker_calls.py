"""What the processes of test_workers.py call, in a module that they can import."""

import os
import time


def answer(what):
    """(pid, what), and whether the process goes on; or one of the ways to end."""
    if what == "abort":
        os.abort()
    if what == "real time":
        os.kill(os.getpid(), 40)
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    return (os.getpid(), what), what != "lost"
