"""A device whose steps take a time that is known by heart."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.engine.api.config import EngineConfig
from stoker.engine.simulate import EngineSpec, simulate

_SPEC = importlib.util.spec_from_file_location(
    "tiny", Path(__file__).parents[1] / "runtime" / "conftest.py"
)
_tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_tiny)
tiny_model = _tiny.tiny_model


@dataclass(frozen=True)
class KnownCost:
    """base + per_token * tokens; the thread's own work takes host."""

    base: float = 1.0
    per_token: float = 0.0
    host: float = 0.0
    is_async: bool = False

    def device_s(self, shape) -> float:
        return self.base + self.per_token * shape.tokens

    def host_s(self, shape) -> float:
        return self.host


@pytest.fixture
def run():
    """simulate() on a CPU-like engine, with the ledger checked after every step."""

    def run(requests, cost=None, *, kv_tokens=4096, page_size=1, max_model_len=1024, **options):
        fields = EngineConfig.model_fields.keys() & options.keys()
        config = EngineConfig(check=True, **{name: options.pop(name) for name in fields})
        spec = EngineSpec(kv_tokens, page_size, max_model_len, is_cpu=True)
        return simulate(requests, config, spec, cost or KnownCost(), request_s=0.0, **options)

    run.cost = KnownCost
    return run
