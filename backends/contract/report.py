"""`stoker check-backend`: the contract's checks on this machine's device, as a report to send back.

Every provider that can run is checked, not only those that are chosen: a check that fails, or an
exception, is noted and the others go on. In processes of their own (workers.py) that holds for
what ends a process, too: a fault of the device, or of a library.

Runs on: gpu.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import registry
from ..api import BackendError, DeviceRuntime, Provider
from .checks import checks
from .target import Check, Target
from .workers import Ended, Workers

MOST_JOBS = 16
CHECKS_A_CALL = 6  # of one process; those of one op share kernels
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

    def add(self, done: Done) -> None:
        """Take in what some of the checks gave."""
        self.passed += done.passed
        self.worst_error = max(self.worst_error, done.worst_error)
        self.failed += done.failed
        self.seconds = round(self.seconds + done.seconds, 3)


@dataclass
class Done:
    """What some of the checks gave.

    Attributes:
        left: those that were not run, since the device answers nothing more in that process.
        is_lost: whether that is so.
    """

    passed: int = 0
    worst_error: float = 0.0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    left: tuple[str, ...] = ()
    is_lost: bool = False


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
    jobs: int | None = None,
) -> Iterator[Report]:
    """Check a backend; yields the report after each op of each provider, the same object.

    Args:
        ops, providers: only these; none means all.
        case: only checks whose names contain it.
        jobs: processes that check side by side; 0 checks in this one, as None does on a CPU.

    Raises:
        BackendError: the backend cannot run here, or there is no such op, provider or case.
    """
    backend = registry.select(name)
    runtime = backend.runtime
    known = _providers(runtime.name)
    called = {op for check in _checks().values() for op in check.ops}
    for asked, there in ((set(ops), called), (set(providers), set(known))):
        if unknown := asked - there:
            raise BackendError(
                f"no {min(unknown)} is checked, there are {', '.join(sorted(there))}"
            )
    if not any(case in name for name in _checks()):
        raise BackendError(f"no case contains {case!r}")
    reasons = {name: provider.probe(runtime) for name, provider in known.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = {op: choice.provider for op, choice in backend.choices.items()}
    report = Report(
        runtime.name, runtime.description, asdict(runtime.facts), versions(), skipped, []
    )
    yield report
    todo = []
    for name, provider in known.items():
        if name not in skipped and name in (providers or known):
            target = Target(runtime, provider)
            for op, of_op in _by_op(target, set(ops), case).items():
                all_ops = tuple(dict.fromkeys(name for check in of_op for name in check.ops))
                todo.append((target, of_op, Result(op, all_ops, name, chosen.get(op) == name)))
    if jobs is None:
        jobs = 0 if runtime.name == "cpu" else min(MOST_JOBS, os.cpu_count() or 1)
    if not jobs:
        for target, of_op, result in todo:
            done = _run(target, list(map(str, of_op)))
            for left in done.left:
                done.failed.append(f"{left}: not run: after the check before, the device is lost")
            result.add(done)
            report.ops.append(result)
            yield report
        return
    with ThreadPoolExecutor(jobs) as threads, Workers(_run_in_worker, jobs) as workers:
        waiting = []
        for _, of_op, result in todo:
            run = functools.partial(_run_isolated, workers, runtime.name, result.provider)
            names = list(map(str, of_op))
            parts = (names[i : i + CHECKS_A_CALL] for i in range(0, len(names), CHECKS_A_CALL))
            waiting.append((result, [threads.submit(run, part) for part in parts]))
        for result, futures in waiting:
            for done in (done for future in futures for done in future.result()):
                result.add(done)
            report.ops.append(result)
            yield report


def _providers(backend: str) -> dict[str, Provider]:
    module = importlib.import_module(f"..{backend}", __package__)
    return {provider.name: provider for provider in module.providers()}


@functools.cache
def _checks() -> dict[str, Check]:
    return {str(check): check for check in checks()}


def _by_op(target: Target, ops: set[str], case: str) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for name, check in _checks().items():
        asked = (not ops or not ops.isdisjoint(check.ops)) and case in name
        if asked and check.missing(target) is None:
            found.setdefault(check.ops[0], []).append(check)
    return found


@torch.inference_mode()
def _run(target: Target, names: Sequence[str]) -> Done:
    done, began = Done(), time.perf_counter()
    for i, name in enumerate(names):
        try:
            done.worst_error = max(done.worst_error, _checks()[name].run(target))
            target.runtime.synchronize()
            done.passed += 1
        except BackendError:  # it says that it does not serve this case
            continue
        except Exception as error:  # whatever a library raises is a result
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = next(iter(str(error).splitlines()), "")[:300]
            place = f"{where.name} line {where.lineno}"
            done.failed.append(f"{name}: {type(error).__name__}: {text} ({place})")
            if not _answers(target.runtime):
                done.is_lost, done.left = True, tuple(names[i + 1 :])
                break
    done.seconds = time.perf_counter() - began
    return done


def _answers(runtime: DeviceRuntime) -> bool:
    try:
        torch.ones(1, device=runtime.device).item()
    except Exception:  # after an illegal access, say, all further calls fail
        return False
    return True


# ----------------------------------------------------------------- in processes of their own


@functools.cache
def _target(backend: str, provider: str) -> Target:
    torch.set_num_threads(1)  # of the oracle: the processes share the cores
    runtime, found = registry.select(backend).runtime, _providers(backend)[provider]
    if (reason := found.probe(runtime)) is not None:  # it prepares what the ops need
        raise BackendError(f"{provider}: {reason}")
    return Target(runtime, found)


def _run_in_worker(backend: str, provider: str, names: Sequence[str]) -> tuple[Done, bool]:
    done = _run(_target(backend, provider), names)
    return done, not done.is_lost


def _run_isolated(
    workers: Workers, backend: str, provider: str, names: Sequence[str]
) -> list[Done]:
    """All checks, though one may end its process, or break the device in it."""
    try:
        done: Done = workers.run(backend, provider, names)
    except Ended as error:
        if len(names) == 1:
            return [Done(failed=[f"{names[0]}: {error}"])]
        alone = [_run_isolated(workers, backend, provider, [name]) for name in names]
        return [done for of_one in alone for done in of_one]
    rest = _run_isolated(workers, backend, provider, done.left) if done.left else []
    return [done, *rest]
