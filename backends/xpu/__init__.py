"""Intel GPUs: torch's XPU device, its graphs, and the providers of its ops.

Graphs are off unless STOKER_XPU_GRAPHS=1: vLLM's warnings about XPUGraph are many, and it was never
tried here.

Runs on: gpu.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ..api import BackendError, DeviceFacts
from ..reference import ReferenceOps
from ..triton import TritonOps
from .ipex import IpexOps
from .ops import XpuKernelOps, XpuRopeOps
from .torch_ops import OneDnnOps, SdpaOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..api import Provider

GRAPHS = "STOKER_XPU_GRAPHS"


def facts(properties: Any) -> DeviceFacts:
    """Of torch.xpu.get_device_properties."""
    is_alchemist = "Arc(TM) A" in properties.name  # vLLM refuses bfloat16 there, as broken
    return DeviceFacts(
        arch=str(properties.name),
        warp_size=max(getattr(properties, "sub_group_sizes", None) or (32,)),
        shared_bytes=getattr(properties, "local_mem_size", 65_536),
        dist_backend="xccl",
        has_bf16=getattr(properties, "has_bfloat16_conversions", True) and not is_alchemist,
        fp8=torch.float8_e4m3fn,
    )


class XpuRuntime:
    """One XPU device. Work is queued on the current stream."""

    name = "xpu"
    is_async = True
    default_page_size = 64

    def __init__(self, index: int = 0) -> None:
        if getattr(torch.version, "xpu", None) is None:
            raise BackendError("this build of torch is not for Intel GPUs (no torch.version.xpu)")
        if not torch.xpu.is_available():
            raise BackendError("there is no Intel GPU that SYCL can use (see sycl-ls)")
        self.device = torch.device("xpu", index)
        self.has_graphs = os.environ.get(GRAPHS) == "1" and hasattr(torch.xpu, "XPUGraph")
        self._graph_pool: Any = None
        properties = torch.xpu.get_device_properties(self.device)
        self.facts = facts(properties)
        self.num_cores = properties.max_compute_units
        gib = properties.total_memory / 2**30
        self.description = f"{properties.name}, {self.num_cores} compute units, {gib:.0f} GiB"

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes; what torch's allocator holds unused counts as free."""
        free, total = torch.xpu.mem_get_info(self.device)
        cached = torch.xpu.memory_reserved(self.device) - torch.xpu.memory_allocated(self.device)
        return free + cached, total

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The weights' own type, in 16 bits."""
        is_half = model_dtype == torch.float16 or not self.facts.has_bf16
        return torch.float16 if is_half else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.xpu.synchronize(self.device)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function on the stream that captures it, capture it, return what replays it."""
        if self._graph_pool is None:
            self._graph_pool = torch.xpu.graph_pool_handle()
            self._capture_stream = torch.xpu.Stream(self.device)
        stream = self._capture_stream
        stream.wait_stream(torch.xpu.current_stream(self.device))
        with torch.xpu.stream(stream):
            function()
        torch.xpu.current_stream(self.device).wait_stream(stream)
        graph = torch.xpu.XPUGraph()
        with torch.xpu.graph(graph, pool=self._graph_pool, stream=stream):
            function()
        return graph.replay


def runtime() -> XpuRuntime:
    """The first visible device (ZE_AFFINITY_MASK chooses)."""
    return XpuRuntime()


def providers() -> list[Provider]:
    """Best first."""
    return [
        XpuKernelOps(),
        TritonOps(),
        OneDnnOps(),
        SdpaOps(),
        XpuRopeOps(),
        IpexOps(),
        ReferenceOps(),
    ]
