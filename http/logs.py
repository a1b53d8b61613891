"""Log lines: text or JSON, each with the id of the request that it belongs to.

Runs on: any (pure).
"""

import json
import logging
from contextvars import ContextVar

from .settings import ServerConfig

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


class TextFormatter(logging.Formatter):
    """One line; the request's id comes before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without its traceback."""
        name = REQUEST_ID.get()
        if name and name not in record.message:
            record.message = f"{name} {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `fields` given as extra are part of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := REQUEST_ID.get():
            line["request_id"] = name
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(config: ServerConfig) -> None:
    """Send the log to stderr as the configuration says."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    if config.log_level != "debug":  # a traceback for each malformed request is a way to flood us
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
