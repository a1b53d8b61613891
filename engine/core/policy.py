"""In which order waiting requests are tried. Admission stops at the first that does not fit.

Runs on: any (pure).
"""

from collections.abc import Callable, Iterable, Sequence

from .request import Request

Policy = Callable[[Sequence[Request]], Iterable[Request]]


def fcfs(waiting: Sequence[Request]) -> Iterable[Request]:
    """First come, first served: the queue's own order (retracted requests are at its front)."""
    return waiting
