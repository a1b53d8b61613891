"""The providers that can run here, as parameters of the contract's checks."""

import importlib
from dataclasses import dataclass, field

import pytest

from stoker.backends import registry
from stoker.backends.api import BackendError
from stoker.backends.contract import checks


@dataclass(frozen=True)
class Target(checks.Target):
    """A provider on a device, and what a passed test says about it.

    Attributes:
        proves: (backend, label) that a passed test of an op earns; see `proofs.py`.
        asked: ops that the running test has asked for.
    """

    proves: tuple[tuple[str, str], ...] = ()
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    def op(self, name: str):
        """The provider's method, or a skip where it does not have this op."""
        method = getattr(self.provider, name, None)
        if method is None:
            pytest.skip(f"{self.provider.name} does not have {name}")
        self.asked.add(name)
        return method


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
        proves = ((record.name, "ran"),)
        found += [
            pytest.param(
                Target(runtime, provider, proves), id=f"{record.name}-{provider.name}", marks=marks
            )
            for provider in module.providers()
            if provider.probe(runtime) is None
        ]
    return found
