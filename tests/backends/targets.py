"""The providers that can run here, as parameters of the contract tests."""

import importlib
from dataclasses import dataclass

import pytest
import torch

from stoker.backends import registry
from stoker.backends.api import BackendError, DeviceRuntime, LayerCache, Provider


@dataclass(frozen=True)
class Target:
    """One provider on one device."""

    runtime: DeviceRuntime
    provider: Provider

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.runtime.device

    @property
    def has_float32_residual(self) -> bool:
        """Whether its ops take a float32 residual beside activations of another type."""
        return getattr(self.provider, "float32_residual", False)

    def require(self, op: str):
        """The provider's method, or a skip where it does not have this op."""
        method = getattr(self.provider, op, None)
        if method is None:
            pytest.skip(f"{self.provider.name} does not have {op}")
        return method

    def kept(self, cache: LayerCache) -> LayerCache:
        """A cache in the contract's order as the provider keeps it."""
        convert = getattr(self.provider, "from_nhd", None)
        return convert(cache) if convert else cache

    def nhd(self, cache: LayerCache) -> LayerCache:
        """The inverse of `kept`."""
        convert = getattr(self.provider, "to_nhd", None)
        return convert(cache) if convert else cache


def targets() -> list:
    """One pytest parameter for each provider that can run; accelerators are marked gpu."""
    found = []
    for record in registry.BACKENDS:
        try:
            module = importlib.import_module(record.module, "stoker.backends")
            runtime = module.runtime()
        except (ImportError, BackendError):
            continue
        marks = () if record.name == "cpu" else (pytest.mark.gpu,)
        found += [
            pytest.param(
                Target(runtime, provider), id=f"{record.name}-{provider.name}", marks=marks
            )
            for provider in module.providers()
            if provider.probe(runtime) is None
        ]
    return found
