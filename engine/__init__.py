"""Stoker in process: `AsyncEngine` for asyncio, `Engine` for plain code.

Importing this package loads no torch; the engines are imported when they are first named.

Runs on: loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api.config import EngineConfig
from .api.errors import EngineError, Overloaded, RequestError, StartError, StokerError
from .api.grammar import GrammarSpec
from .api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine, Output, Stream
    from .sync_engine import Completion, Engine

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "GrammarSpec",
    "Output",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "StartError",
    "StokerError",
    "Stream",
]

_HOME = {
    "AsyncEngine": ".async_engine",
    "Output": ".async_engine",
    "Stream": ".async_engine",
    "Completion": ".sync_engine",
    "Engine": ".sync_engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name], __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
