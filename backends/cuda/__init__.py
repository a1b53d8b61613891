"""NVIDIA GPUs: the device, its graphs, and the providers of its ops.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..api import BackendError
from ..reference import ReferenceOps
from ..triton import TritonOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

    from ..api import Provider


class CudaRuntime:
    """One CUDA device. Work is queued on the current stream."""

    name = "cuda"
    is_async = True
    has_graphs = True
    default_page_size = 16
    collectives = "nccl"

    def __init__(self, index: int = 0) -> None:
        if torch.version.hip is not None:
            raise BackendError("this build of torch is for ROCm")
        if torch.version.cuda is None:
            raise BackendError("this build of torch has no CUDA")
        if not torch.cuda.is_available():
            raise BackendError("there is no CUDA device")
        self.device = torch.device("cuda", index)
        self._graph_pool: Any = None
        properties = torch.cuda.get_device_properties(self.device)
        self.capability = (properties.major, properties.minor)
        self.num_cores = properties.multi_processor_count
        gib = properties.total_memory / 2**30
        arch = f"sm_{properties.major}{properties.minor}"
        self.description = f"{properties.name}, {arch}, {gib:.0f} GiB"

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes; what torch's allocator holds unused counts as free."""
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached, total

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The weights' own type, in 16 bits; bfloat16 needs Ampere (sm_80)."""
        if model_dtype == torch.float16 or self.capability < (8, 0):
            return torch.float16
        return torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Warm a function up on the stream that captures it, capture it, return what replays it."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            function()
            if self._graph_pool is None:
                self._graph_pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
                function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay


class CublasOps:
    """Matrix products by cuBLAS. Its library handle must exist before a graph is captured."""

    name = "cublas"

    def probe(self, runtime: Any) -> str | None:
        """It comes with torch."""
        return None if runtime.name == "cuda" else "not a CUDA device"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """The transposed view and the bias."""
        return weight.t(), bias

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x weight^T + bias; a float32 result comes straight from the accumulators."""
        weight, bias = packed
        if out_dtype not in (None, x.dtype):
            out = torch.mm(x, weight, out_dtype=out_dtype)
            return out if bias is None else out.add_(bias)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def runtime() -> CudaRuntime:
    """The first visible device."""
    return CudaRuntime()


def providers() -> list[Provider]:
    """Best first."""
    return [TritonOps(), CublasOps(), ReferenceOps()]
