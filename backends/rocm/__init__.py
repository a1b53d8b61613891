"""AMD GPUs: torch's HIP device, its graphs, and the providers of its ops.

torch calls the device "cuda", and streams, events and memory are torch.cuda's. Never go by
torch.cuda.get_device_capability here: an MI200's is (9, 0), an H100's as well.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..api import BackendError, DeviceFacts
from ..cuda import CudaRuntime
from ..reference import ReferenceOps
from .aiter_ops import AiterOps, AiterPagedOps, AiterRopeOps
from .hipblaslt import HipblasltOps
from .triton_ops import RocmTritonOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..api import Provider

LDS_BYTES = {"gfx950": 163_840}  # 64 KiB on all before
CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")


def facts(arch: str) -> DeviceFacts:
    """Of an architecture, as "gfx942" (MI300), "gfx950" (MI350), "gfx90a" (MI200), "gfx1100".

    The fp8 of gfx942 is e4m3fnuz, whose exponents mean half and which has no -0; gfx950's and
    RDNA4's is everybody's e4m3fn.
    """
    fp8, is_cdna = None, arch in CDNA
    if arch == "gfx942":
        fp8 = torch.float8_e4m3fnuz
    elif arch == "gfx950" or arch.startswith("gfx12"):
        fp8 = torch.float8_e4m3fn
    return DeviceFacts(
        arch=arch,
        warp_size=64 if is_cdna else 32,
        shared_bytes=LDS_BYTES.get(arch, 65_536),
        dist_backend="nccl",  # RCCL's name in torch
        has_bf16=arch not in ("gfx900", "gfx906"),
        fp8=fp8,
    )


class RocmRuntime(CudaRuntime):
    """One HIP device. Work is queued on the current stream."""

    name = "rocm"

    def __init__(self, index: int = 0) -> None:
        if torch.version.hip is None:
            raise BackendError("this build of torch is not for ROCm (torch.version.hip is None)")
        if not torch.cuda.is_available():
            raise BackendError("there is no AMD GPU that HIP can use (see rocminfo)")
        self.device = torch.device("cuda", index)
        self._graph_pool = None
        properties = torch.cuda.get_device_properties(self.device)
        self.facts = facts(properties.gcnArchName.split(":")[0])  # "gfx942:sramecc+:xnack-"
        self.num_cores = properties.multi_processor_count
        gib = properties.total_memory / 2**30
        self.description = f"{properties.name}, {self.facts.arch}, {gib:.0f} GiB"

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function on the stream that captures it, capture it, return what replays it.

        Each is run before, on that stream: AITER compiles some kernels at their first call and
        keeps workspaces by stream, hipBLAS its handle; and HIP does not refuse everything that a
        capture cannot hold.
        """
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._capture_stream = torch.cuda.Stream(self.device)
        self._run_beside(function)
        return self._capture(function)


def runtime() -> RocmRuntime:
    """The first visible device."""
    return RocmRuntime()


def providers() -> list[Provider]:
    """Best first."""
    return [
        AiterOps(),
        RocmTritonOps(),
        HipblasltOps(),
        AiterPagedOps(),
        AiterRopeOps(),
        ReferenceOps(),
    ]
