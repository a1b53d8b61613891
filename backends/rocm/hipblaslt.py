"""Matrix products by hipBLASLt, through torch.

Runs on: gpu.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..cuda import CublasOps, PackedLinear


class HipblasltOps(CublasOps):
    """As cuBLAS's, but that no kernel of ours takes the few rows: that was measured on NVIDIA."""

    name = "hipblaslt"

    def probe(self, runtime: Any) -> str | None:
        """It comes with torch."""
        return None if runtime.name == "rocm" else "not a ROCm device"

    def linear(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x weight^T + bias; a float32 result comes from the accumulators, where torch can."""
        if out_dtype in (None, x.dtype) or _has_wide_products(x.device, x.dtype, out_dtype):
            return super().linear(x, packed, out_dtype)
        return super().linear(x, packed).to(out_dtype)

    def _tile(self, x: Tensor, weight: Tensor, *, has_norm: bool = False) -> None:
        return None


@cache
def _has_wide_products(device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether this build multiplies 16-bit matrices into float32 ones."""
    x = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=out_dtype)
    except RuntimeError:
        return False
    return True
