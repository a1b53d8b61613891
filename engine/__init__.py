"""Stoker in process: `AsyncEngine` for asyncio, `Engine` for plain code. Importing it loads no torch.

Runs on: loop.
"""

from .api.config import EngineConfig
from .api.errors import EngineError, Overloaded, RequestError, StartError, StokerError
from .api.sampling_params import SamplingParams
from .async_engine import AsyncEngine, Output, Stream
from .sync_engine import Completion, Engine

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Output",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "StartError",
    "StokerError",
    "Stream",
]
