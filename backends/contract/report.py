"""`stoker check-backend`: the contract's checks on this machine's device, as a report to send back.

Every provider that can run is checked, not only those that are chosen: a check that fails, or an
exception, is noted and the others go on.

Runs on: gpu.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import registry
from ..api import BackendError, DeviceRuntime, Provider
from .checks import checks
from .target import Check, Target

PACKAGES = ("stoker", "torch", "triton", "amd-aiter", "flashinfer-python", "vllm-xpu-kernels",
            "intel-extension-for-pytorch", "numpy")  # fmt: skip


@dataclass
class Result:
    """The checks of one op of one provider.

    Attributes:
        ops: all ops that the checks call.
        is_chosen: whether the backend uses it.
        worst_error: as a share of what is allowed.
        failed: names of checks, with the reason.
        seconds: of all checks, compilation included.
    """

    op: str
    ops: tuple[str, ...]
    provider: str
    is_chosen: bool
    passed: int = 0
    worst_error: float = 0.0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Report:
    """What was checked, on what.

    Attributes:
        skipped: provider to why it cannot run here.
    """

    backend: str
    device: str
    facts: dict[str, Any]
    versions: dict[str, str]
    skipped: dict[str, str]
    ops: list[Result]

    @property
    def is_good(self) -> bool:
        """Whether something was checked and nothing failed."""
        return bool(self.ops) and not any(result.failed for result in self.ops)

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        facts = {name: str(value) for name, value in self.facts.items()}
        return asdict(self) | {"facts": facts}


def versions() -> dict[str, str]:
    """Of what may matter, where it is installed."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("cuda", "hip", "xpu"):
        if (version := getattr(torch.version, name, None)) is not None:
            found[name] = version
    return found


def check_backend(
    name: str = "auto",
    ops: Iterable[str] = (),
    providers: Iterable[str] = (),
    case: str = "",
) -> Iterator[Report]:
    """Check a backend; yields the report after each op of each provider, the same object.

    Args:
        ops, providers: only these; none means all.
        case: only checks whose names contain it.

    Raises:
        BackendError: the backend cannot run here, or there is no such op, provider or case.
    """
    backend = registry.select(name)
    runtime = backend.runtime
    module = importlib.import_module(f"..{runtime.name}", __package__)
    known = {provider.name: provider for provider in module.providers()}
    for asked, there in ((set(ops), {c.ops[0] for c in checks()}), (set(providers), set(known))):
        if unknown := asked - there:
            raise BackendError(
                f"no {min(unknown)} is checked, there are {', '.join(sorted(there))}"
            )
    if not any(case in str(check) for check in checks()):
        raise BackendError(f"no case contains {case!r}")
    reasons = {name: provider.probe(runtime) for name, provider in known.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    able = [known[name] for name in known if name not in skipped and name in (providers or known)]
    chosen = {op: choice.provider for op, choice in backend.choices.items()}
    report = Report(
        runtime.name, runtime.description, asdict(runtime.facts), versions(), skipped, []
    )
    yield report
    for result in check_providers(runtime, able, chosen, ops, case):
        report.ops.append(result)
        yield report


def check_providers(
    runtime: DeviceRuntime,
    providers: Iterable[Provider],
    chosen: Mapping[str, str],
    ops: Iterable[str] = (),
    case: str = "",
) -> Iterator[Result]:
    """The same of any providers, which must be able to run here.

    Args:
        chosen: which provider a backend uses for an op.
    """
    by_op: dict[str, list[Check]] = {}
    for check in checks():
        if (not ops or check.ops[0] in ops) and case in str(check):
            by_op.setdefault(check.ops[0], []).append(check)
    for provider in providers:
        target = Target(runtime, provider)
        for op, of_op in by_op.items():
            if todo := [check for check in of_op if check.missing(target) is None]:
                called = tuple(dict.fromkeys(name for check in todo for name in check.ops))
                is_chosen = chosen.get(op) == provider.name
                yield _run(Result(op, called, provider.name, is_chosen), target, todo)


@torch.inference_mode()
def _run(result: Result, target: Target, todo: list[Check]) -> Result:
    began = time.perf_counter()
    for check in todo:
        try:
            result.worst_error = max(result.worst_error, check.run(target))
            target.runtime.synchronize()
            result.passed += 1
        except BackendError:  # it says that it does not serve this case
            continue
        except Exception as error:  # whatever a library raises is a result
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = next(iter(str(error).splitlines()), "")[:300]
            place = f"{where.name} line {where.lineno}"
            result.failed.append(f"{check}: {type(error).__name__}: {text} ({place})")
    result.seconds = round(time.perf_counter() - began, 3)
    return result
