"""The CPU: memory, threads, and the providers of its ops.

Runs on: gpu.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..api import DeviceFacts
from .native_ops import NativeOps
from .torch_ops import TorchOps

if TYPE_CHECKING:
    from ..api import Provider

_CGROUP_LIMITS = (  # (limit, usage): version 2, then version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class CpuRuntime:
    """The processor as a device: work is done when a call returns, and there are no graphs."""

    name = "cpu"
    is_async = False
    has_graphs = False
    default_page_size = 16

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.features = _cpu_features()
        isa = next(
            (f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f in self.features), ""
        )
        has_bf16 = isa in ("amx_bf16", "avx512_bf16")
        self.facts = DeviceFacts(isa or platform.machine(), 1, 0, "gloo", has_bf16)
        total = self.memory()[1]
        parts = (_cpu_model(), f"{self.num_cores} cores", isa, f"{total / 2**30:.0f} GiB")
        self.description = ", ".join(part for part in parts if part)

    @property
    def num_cores(self) -> int:
        """Cores that this process may use."""
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the machine, or of its control group where that is less."""
        facts = dict(
            line.split(":", 1)
            for line in Path("/proc/meminfo").read_text().splitlines()
            if ":" in line
        )
        free, total = (int(facts[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        for limit_path, usage_path in _CGROUP_LIMITS:
            try:
                limit, usage = (int(Path(p).read_text()) for p in (limit_path, usage_path))
            except (OSError, ValueError):  # no such group, or "max"
                continue
            if limit < total:
                free, total = min(free, max(limit - usage, 0)), limit
        return free, total

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """bfloat16 where the processor multiplies it, else float32."""
        return torch.bfloat16 if self.facts.has_bf16 else torch.float32

    def set_threads(self, count: int | None) -> None:
        """How many threads compute; None is one a core. Call it on the thread that computes."""
        torch.set_num_threads(count or self.num_cores)

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


def runtime() -> CpuRuntime:
    """The processor of this machine."""
    return CpuRuntime()


def providers() -> list[Provider]:
    """Best first."""
    return [NativeOps(), TorchOps()]


def _cpu_features() -> frozenset[str]:
    return frozenset(_cpuinfo("flags").split())


def _cpu_model() -> str:
    return _cpuinfo("model name") or "CPU"


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
