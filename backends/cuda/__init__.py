"""NVIDIA GPUs: the device, its graphs, and the providers of its ops.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..api import BackendError, DeviceFacts
from ..reference import ReferenceOps
from ..triton import TritonOps
from .flashinfer import FlashInferOps
from .flashinfer_mla import FlashInferMLA
from .quantized import ScaledMMOps

if has_triton := importlib.util.find_spec("triton") is not None:
    from ..triton import linear

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..api import Provider
    from ..triton.linear import Tile


def facts(major: int, minor: int, shared_bytes: int = 0) -> DeviceFacts:
    """Of a compute capability; fp8 is multiplied from Ada (sm_89) on, bfloat16 from Ampere."""
    fp8 = torch.float8_e4m3fn if (major, minor) >= (8, 9) else None
    return DeviceFacts(
        arch=f"sm_{major}{minor}",
        warp_size=32,
        shared_bytes=shared_bytes,
        dist_backend="nccl",
        has_bf16=major >= 8,
        fp8=fp8,
    )


class CudaRuntime:
    """One CUDA device. Work is queued on the current stream."""

    name = "cuda"
    is_async = True
    has_graphs = True
    default_page_size = 64  # from 64 on, attention reads pages by tensor descriptors

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
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
        self.facts = facts(*self.capability, shared_bytes)
        self.description = f"{properties.name}, {self.facts.arch}, {gib:.0f} GiB"

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes; what torch's allocator holds unused counts as free."""
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached, total

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The weights' own type, in 16 bits."""
        is_half = model_dtype == torch.float16 or not self.facts.has_bf16
        return torch.float16 if is_half else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function, return what replays it.

        The first runs once before, which makes cuBLAS's handle and workspace. Of the others only
        those that cannot be captured at once do so: they need a library's kernel to be loaded.
        """
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._capture_stream = torch.cuda.Stream(self.device)
            self._run_beside(function)
        try:
            return self._capture(function)
        except RuntimeError:
            self._run_beside(function)
            return self._capture(function)

    def _run_beside(self, function: Callable[[], None]) -> None:
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._capture_stream):
            function()
        return graph.replay


class AbsentCuda(CudaRuntime):
    """A device that is described and not there: its tensors have no memory (torch's meta device).

    What would be captured is kept in `captured`.
    """

    is_async = False

    def __init__(self, capability: tuple[int, int], num_cores: int) -> None:
        self.device = torch.device("meta")
        self.capability, self.num_cores = capability, num_cores
        self.facts = facts(*capability)
        self.description = f"absent, sm_{capability[0]}{capability[1]}"
        self.captured: list[Callable[[], None]] = []

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Keep the function."""
        self.captured.append(function)
        return function


class PackedLinear(NamedTuple):
    """A weight [out, in], its transposed view, and its bias."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor | None


class CublasOps:
    """Matrix products by cuBLAS, and those of few rows by a kernel of ours where it is faster.

    cuBLAS's library handle must exist before a graph is captured.
    """

    name = "cublas"

    def __init__(self) -> None:
        self._beside = TritonOps() if has_triton else ReferenceOps()  # norms and gates

    def probe(self, runtime: Any) -> str | None:
        """It comes with torch."""
        return None if runtime.name == "cuda" else "not a CUDA device"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """The weight as it is."""
        weight = weight.contiguous()
        return PackedLinear(weight, weight.t(), bias)

    def linear(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x weight^T + bias; a float32 result comes straight from the accumulators."""
        weight, transposed, bias = packed
        if tile := self._tile(x, weight):
            out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
            return linear.linear(x, weight, bias, out, tile)
        if out_dtype not in (None, x.dtype):
            out = torch.mm(x, transposed, out_dtype=out_dtype)
            return out if bias is None else out.add_(bias)
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        packed: PackedLinear,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """One kernel for few rows, else two."""
        weight = packed.weight
        if tile := self._tile(x, weight, has_norm=True):
            out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
            return linear.linear(x, weight, packed.bias, out, tile, norm=norm_weight, eps=eps)
        return self.linear(self._beside.rms_norm(x, norm_weight, eps), packed, out_dtype)

    def norm_gated_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, packed: PackedLinear, activation: str
    ) -> Tensor:
        """One kernel for few rows, else three."""
        weight = packed.weight
        if tile := self._tile(x, weight, has_norm=True):
            out = x.new_empty(x.shape[0], weight.shape[0] // 2)
            return linear.linear(
                x, weight, packed.bias, out, tile, norm=norm_weight, eps=eps, gate=activation
            )
        y = self.linear(self._beside.rms_norm(x, norm_weight, eps), packed)
        is_silu = activation == "silu"
        return self._beside.silu_and_mul(y) if is_silu else self._beside.gelu_and_mul(y)

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        """The sum is part of the product, and rounded once."""
        weight, transposed, bias = packed
        if tile := self._tile(x, weight):
            linear.linear(x, weight, bias, residual, tile, add=True)
            return
        residual.addmm_(x, transposed)
        if bias is not None:
            residual += bias

    def _tile(self, x: Tensor, weight: Tensor, *, has_norm: bool = False) -> Tile | None:
        if not has_triton or x.dtype != weight.dtype:
            return None
        return linear.choose_tile(x.shape[0], weight, has_norm=has_norm)


def runtime() -> CudaRuntime:
    """The first visible device."""
    return CudaRuntime()


def providers() -> list[Provider]:
    """Best first."""
    libraries = (FlashInferOps(), FlashInferMLA(), ScaledMMOps())
    return [*libraries, TritonOps(), CublasOps(), ReferenceOps()]
