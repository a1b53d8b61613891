"""Which backend and which provider of each op: chosen once, at start, with the reasons kept.

A backend's module has `runtime() -> DeviceRuntime`, which raises BackendError where there is no
such device, and `providers() -> list[Provider]`, best first, whose last has every op.

Runs on: any (pure).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import labels
from .api import BackendError, MLASpec

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from .api import AttentionSpec, DeviceRuntime, Ops, Provider


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendModule:
    """A backend's name and the module that is imported when it is asked for."""

    name: str
    module: str


BACKENDS = tuple(BackendModule(name, f".{name}") for name in ("cuda", "rocm", "xpu", "cpu"))

ATTEND_OPS = ("attend",)
LATENT_OPS = ("mla_attend", "mla_attend_dense")
NEVER_SEEN = ("rocm", "xpu")  # until a report of such a device is in tests/data/reports

# Ops that share a private format come from one provider.
OP_GROUPS = (
    ("pack_linear", "linear", "norm_linear", "norm_gated_linear", "linear_add"),
    ("pack_quantized", "quantized_linear"),
    ("rms_norm",),
    ("add_rms_norm",),
    ATTEND_OPS,
    ("write_qkv",),  # after attend, whose layout of pages it must write
    ("mla_write",),
    LATENT_OPS,
    ("delta_net",),
    ("silu_and_mul",),
    ("gelu_and_mul",),
    ("route",),
    ("pack_experts", "experts"),
    ("pack_quantized_experts", "quantized_experts"),
    ("sample",),
)
OP_NAMES = tuple(op for group in OP_GROUPS for op in group)

# Made of other ops: present only where one provider serves it and all of those.
NOT_IN_A_LAYER = (  # of plain linears and a dense MLP
    "pack_linear",
    "pack_quantized",
    "quantized_linear",
    "delta_net",
    "route",
    "pack_experts",
    "experts",
    "pack_quantized_experts",
    "quantized_experts",
    "sample",
)
FUSED_OPS = {
    "pack_quantized_rows": ("pack_quantized", "quantized_linear"),
    "quantized_rows": ("pack_quantized", "quantized_linear"),
    "decoder_layer": tuple(op for op in OP_NAMES if op not in NOT_IN_A_LAYER),
    "norm_experts_add": ("rms_norm", "pack_experts", "experts"),
}

# Ops that the engine can do without; present where any provider that can run has them.
OPTIONAL_OPS = ("copy_pages",)


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of one op, and why those before it were passed over."""

    op: str
    provider: str
    passed_over: Mapping[str, str]


class Candidates(NamedTuple):
    """Who can serve the ops of attention, best first; one alone where it was asked for."""

    providers: tuple[Provider, ...]
    is_forced: bool


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and its ops. `ops` holds bound methods, so that a call costs no look-up.

    Attributes:
        providers: those that were chosen for an op.
        candidates: of ATTEND_OPS and of LATENT_OPS.
    """

    runtime: DeviceRuntime
    ops: Ops
    choices: dict[str, Choice]
    providers: tuple[Provider, ...]
    candidates: dict[tuple[str, ...], Candidates]

    def settle(
        self, specs: Iterable[AttentionSpec | MLASpec], dtype: torch.dtype, page_size: int
    ) -> None:
        """Have providers say, now that the model is known, whether they serve its attention.

        Raises:
            BackendError: the one that was asked for does not.
        """
        others, latent = _by_kind(specs)
        if others or not latent:
            self._settle(ATTEND_OPS, others, dtype, page_size)
        if latent:
            self._settle(LATENT_OPS, latent, dtype, page_size)

    def _settle(
        self, ops: tuple[str, ...], specs: tuple[Any, ...], dtype: torch.dtype, page_size: int
    ) -> None:
        providers, is_forced = self.candidates[ops]
        passed_over = dict(self.choices[ops[0]].passed_over)
        for provider in providers:
            reason = None
            if hasattr(provider, "settle"):
                reason = provider.settle(specs, dtype, page_size, self.runtime, is_forced=is_forced)
            if reason is None:
                break
            if is_forced:
                raise BackendError(
                    f"{ops[0]} of backend {self.runtime.name} cannot come from {provider.name}: "
                    + reason
                )
            passed_over[provider.name] = reason
        for op in ops:
            self.choices[op] = Choice(op, provider.name, passed_over)
            setattr(self.ops, op, getattr(provider, op))
        self.ops.replan = getattr(provider, "replan", None)
        reasons = "".join(f"; {name}: {reason}" for name, reason in passed_over.items())
        logger.info("attention by %s%s", provider.name, reasons)

    def warm_steps(
        self, specs: Iterable[AttentionSpec | MLASpec], dtype: torch.dtype, page_size: int
    ) -> list[Callable[[], None]]:
        """What launches the kernels that steps with such attention layers can meet."""
        others, latent = _by_kind(specs)
        return [
            step
            for provider in self.providers
            for name, kinds in (("warm_steps", others), ("mla_warm_steps", latent))
            if hasattr(provider, name)
            for step in getattr(provider, name)(kinds, dtype, page_size, self.runtime.device)
        ]

    def warm(
        self, specs: Iterable[AttentionSpec | MLASpec], dtype: torch.dtype, page_size: int
    ) -> None:
        """Launch them, in threads: LLVM and ptxas work without the GIL.

        Not to be called while a graph is captured.
        """
        device = self.runtime.device

        def bind() -> None:  # a thread's current device is the first one
            if device.index is not None:
                importlib.import_module("torch").accelerator.set_device_index(device.index)

        with ThreadPoolExecutor(os.cpu_count(), initializer=bind) as pool:
            for done in [pool.submit(step) for step in self.warm_steps(specs, dtype, page_size)]:
                done.result()


class Row(NamedTuple):
    """A line of `stoker backends`."""

    backend: str
    device: str
    op: str
    provider: str
    reason: str  # "" for what is used, else why it is not
    labels: str  # how far it was verified, see labels.py


def select(name: str = "auto", overrides: Mapping[str, str] | None = None) -> Backend:
    """The backend of this name, or the first that works here.

    Args:
        overrides: op to the name of the provider that must be used.

    Raises:
        BackendError: it cannot run here, or an override names what is not there or cannot run.
    """
    known = {record.name: record for record in BACKENDS}
    if name != "auto":
        if name not in known:
            raise BackendError(f"unknown backend {name!r}, there are {', '.join(known)}")
        module, runtime = _open(known[name])
        return _labelled(assemble(module, runtime, overrides or {}))
    reasons = []
    for record in BACKENDS:
        try:
            module, runtime = _open(record)
        except BackendError as error:
            reasons.append(str(error))
        else:
            why = "".join(f"; {reason}" for reason in reasons)
            logger.info("backend %s on %s%s", record.name, runtime.description, why)
            return _labelled(assemble(module, runtime, overrides or {}))
    raise BackendError("no backend can run: " + "; ".join(reasons))


def _labelled(backend: Backend) -> Backend:
    """The backend, with a warning where nothing that it would use was ever run on such a device."""
    name = backend.runtime.name
    chosen = ((choice.op, choice.provider) for choice in backend.choices.values())
    if name in NEVER_SEEN and not any("ran" in labels.of(name, *pair) for pair in chosen):
        logger.warning(
            "backend %s was never run on its own devices: `stoker backends` says how far it was "
            "verified, `stoker check-backend` whether it is right here",
            name,
        )
    return backend


def build(name: str, specs: Iterable[AttentionSpec | MLASpec], dtype: torch.dtype) -> list[str]:
    """Have the providers of a backend build, ahead, what a model with such layers needs.

    Returns:
        What was built.

    Raises:
        BackendError: the backend cannot run here.
    """
    specs = tuple(specs)
    module, _ = _open({record.name: record for record in BACKENDS}[name])
    built = []
    for provider in module.providers():
        if hasattr(provider, "build"):
            built += provider.build(specs, dtype)
    return built


def describe() -> list[Row]:
    """What each backend would use here, and why not the rest."""
    table = []
    for record in BACKENDS:
        try:
            module, runtime = _open(record)
        except BackendError as error:
            table.append(Row(record.name, "", "", "", str(error), ""))
            continue
        for choice in assemble(module, runtime, {}).choices.values():
            for provider, reason in {**choice.passed_over, choice.provider: ""}.items():
                verified = ", ".join(labels.of(record.name, choice.op, provider))
                row = (record.name, runtime.description, choice.op, provider, reason, verified)
                table.append(Row(*row))
    return table


def _open(record: BackendModule) -> tuple[ModuleType, DeviceRuntime]:
    try:
        module = importlib.import_module(record.module, __package__)
        return module, module.runtime()
    except (ImportError, BackendError) as error:
        raise BackendError(f"backend {record.name} cannot run here: {error}") from error


def assemble(module: ModuleType, runtime: DeviceRuntime, overrides: Mapping[str, str]) -> Backend:
    """Choose a provider for each op. Raises BackendError."""
    providers: list[Provider] = module.providers()
    reasons = {provider.name: provider.probe(runtime) for provider in providers}
    if unknown := set(overrides) - set(OP_NAMES):
        raise BackendError(f"unknown op {min(unknown)!r}, there are {', '.join(OP_NAMES)}")
    methods: dict[str, Any] = {}
    choices = {}
    layout = ""
    candidates: dict[tuple[str, ...], Candidates] = {}
    for group in OP_GROUPS:
        forced = next((overrides[op] for op in group if op in overrides), None)
        passed_over: dict[str, str] = {}
        for provider in providers:
            if not all(hasattr(provider, op) for op in group):
                passed_over[provider.name] = "does not have this op"
            elif reason := reasons[provider.name]:
                passed_over[provider.name] = reason
            elif forced not in (None, provider.name):
                passed_over[provider.name] = f"{forced} is asked for"
            elif group == ("write_qkv",) and _layout(provider) != layout:
                passed_over[provider.name] = f"attend wants pages as {layout}"
            else:
                break
        else:
            reason = passed_over.get(forced or "", "there is no such provider")
            raise BackendError(
                f"{group[-1]} of backend {runtime.name} cannot come from {forced}: {reason}"
            )
        if group == ATTEND_OPS:
            layout = _layout(provider)
        if group in (ATTEND_OPS, LATENT_OPS):
            able = [p for p in providers if all(hasattr(p, op) for op in group)]
            alike = [p for p in able if not reasons[p.name] and _layout(p) == _layout(provider)]
            asked = forced is not None
            candidates[group] = Candidates((provider,) if asked else tuple(alike), asked)
        for op in group:
            methods[op] = getattr(provider, op)
            choices[op] = Choice(op, provider.name, passed_over)
    for op, parts in FUSED_OPS.items():
        names = {choices[part].provider for part in parts}
        whole = next((p for p in providers if {p.name} == names and hasattr(p, op)), None)
        if whole is not None:
            methods[op] = getattr(whole, op)
            choices[op] = Choice(op, whole.name, {})
    for op in OPTIONAL_OPS:
        best = next((p for p in providers if hasattr(p, op) and not reasons[p.name]), None)
        if best is not None:
            methods[op] = getattr(best, op)
            choices[op] = Choice(op, best.name, {})
    used = {choice.provider for choice in choices.values()}
    chosen = tuple(provider for provider in providers if provider.name in used)
    methods["float32_residual"] = all(getattr(p, "float32_residual", False) for p in chosen)
    methods["replan"] = None
    by_name = {provider.name: provider for provider in providers}
    packer = by_name[choices["pack_quantized"].provider]
    methods["gguf_types"] = getattr(packer, "gguf_types", frozenset())
    ops = cast("Ops", SimpleNamespace(**methods))
    return Backend(runtime, ops, choices, chosen, candidates)


def _by_kind(
    specs: Iterable[AttentionSpec | MLASpec],
) -> tuple[tuple[AttentionSpec, ...], tuple[MLASpec, ...]]:
    specs = tuple(specs)
    latent = tuple(spec for spec in specs if isinstance(spec, MLASpec))
    return tuple(spec for spec in specs if not isinstance(spec, MLASpec)), latent


def _layout(provider: Provider) -> str:
    return getattr(provider, "kv_layout", "NHD")
