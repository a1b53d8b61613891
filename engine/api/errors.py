"""Whose fault it is, told by the type.

    StokerError
      RequestError     the client's: a bad field, too long a prompt (4xx, names the field)
      Overloaded       nobody's: the queue is full, or the server drains (503 with Retry-After)
      EngineError      ours: a step failed, the engine stopped (500, no internals in the text)
      StartError       the operator's: a wrong path, an unknown model, no memory (exit code 2)

Runs on: any (pure).
"""


class StokerError(Exception):
    """Base of every error that Stoker raises on purpose."""


class RequestError(StokerError):
    """The request cannot be served as sent.

    Args:
        message: one sentence that names the field, the value and the limit.
        param: dotted path of the field, as in `messages.0.content`.
        code: machine-readable code, as in `context_length_exceeded`.
        status: HTTP status, 400 unless another says more.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class Overloaded(StokerError):
    """No room now; the client may come back after `retry_after_s` seconds.

    Args:
        reason: "queue_full", "queue_timeout", "draining", or "aborted".
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "queue_full"):
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.reason = reason


class EngineError(StokerError):
    """The engine failed. The message is for the client, so it holds no internals."""


class StartError(StokerError):
    """The engine cannot start. The message is one line that says what to change."""
