"""Products with fp8 weights by cuBLAS's and CUTLASS's kernels, as torch has them, for many rows.

With a scale a row and a token, or one for each 128 x 128 of the weight and 128 columns of a token.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from ..triton import TritonOps

if has_triton := importlib.util.find_spec("triton") is not None:
    from ..triton import quantized

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from ..api import DeviceRuntime, QuantizedWeight

MIN_ROWS = 65  # from which torch's kernels are used
ALIGNMENT = 16  # of both sizes of a weight
BLOCK = 128  # and where blocks share a scale
BLOCKED_ROWS = 8  # a multiple of which cuBLAS wants with those


class ScaledMMOps:
    """Quantized products: torch's for fp8, else our kernels."""

    name = "scaled_mm"
    gguf_types = TritonOps.gguf_types

    def __init__(self) -> None:
        self._beside = TritonOps()

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """It needs our kernels for the rest, and a GPU that multiplies fp8."""
        if runtime.name != "cuda":
            return "not a CUDA device"
        if not has_triton:
            return "the kernel that rounds activations needs triton, which is not installed"
        if getattr(runtime, "capability", (0, 0)) < (9, 0):
            return "torch multiplies fp8 with such scales from sm_90 on"
        return None

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """As our kernels want it, which torch's take as well."""
        return self._beside.pack_quantized(weight, bias)

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """By torch where it is faster."""
        if x.shape[0] >= MIN_ROWS and suits(packed, out_dtype or x.dtype):
            return scaled_mm(x, packed)
        return self._beside.quantized_linear(x, packed, out_dtype)


def suits(packed: quantized.PackedQuantized, out_dtype: torch.dtype) -> bool:
    """Whether torch has a kernel: it writes bfloat16."""
    alignment = ALIGNMENT if packed.group == 0 else BLOCK
    return (
        packed.scaled is not None
        and packed.scaled.dtype == torch.float8_e4m3fn
        and (packed.group == 0 or packed.block_scales is not None)
        and out_dtype == torch.bfloat16
        and all(size % alignment == 0 for size in packed.scaled.shape)
    )


def scaled_mm(x: Tensor, packed: quantized.PackedQuantized) -> Tensor:
    """[num_tokens, in] to bfloat16 [num_tokens, out]."""
    weight, group, blocks = packed.scaled, packed.group, packed.block_scales
    assert weight is not None
    rounded = quantized.round_rows(
        x, weight.dtype, group, packed.input_scale, multiple=BLOCKED_ROWS if group else 1
    )
    out = torch._scaled_mm(
        rounded.codes,
        weight.t(),
        scale_a=rounded.scales.t(),
        scale_b=packed.scales if blocks is None else blocks.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=blocks is None,
    )[: len(x)]
    return out if packed.bias is None else out.add_(packed.bias)
