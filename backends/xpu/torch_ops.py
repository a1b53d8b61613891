"""What torch itself has for Intel GPUs: products by oneDNN, and attention over gathered pages.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..cuda import CublasOps, PackedLinear
from ..reference import ReferenceOps, contexts

if TYPE_CHECKING:
    from torch import Tensor

    from ..api import AttentionSpec, BatchMeta, DeviceRuntime, LayerCache


class OneDnnOps(CublasOps):
    """As cuBLAS's, but that no kernel of ours takes the few rows: that was measured on NVIDIA."""

    name = "onednn"

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """It comes with torch."""
        return None if runtime.name == "xpu" else "not an Intel GPU"

    def linear(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x weight^T + bias, rounded to x's type."""
        out = F.linear(x, packed.weight, packed.bias)
        return out if out_dtype is None else out.to(out_dtype)

    def _tile(self, x: Tensor, weight: Tensor, *, has_norm: bool = False) -> None:
        return None


class SdpaOps:
    """scaled_dot_product_attention over pages that are copied side by side, row by row.

    Right everywhere, trees included, and slow: for where neither vllm-xpu-kernels nor Triton runs.
    It reads lengths on the host, so a step that uses it cannot be captured.
    """

    name = "sdpa"

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """It comes with torch."""
        return None if runtime.name == "xpu" else "not an Intel GPU"

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """A call a row; softcaps and sinks, which it lacks, are the reference's."""
        if spec.softcap is not None or spec.sinks is not None or cache.k.dtype != q.dtype:
            return ReferenceOps().attend(q, meta, cache, spec)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        pools = [pool.flatten(0, 1) for pool in cache]
        group = spec.num_heads // spec.num_kv_heads
        for new, slots, visible in contexts(meta, spec.window):
            k, v = (p[slots].transpose(0, 1).repeat_interleave(group, 0)[None] for p in pools)
            heads = F.scaled_dot_product_attention(
                q[new].transpose(0, 1)[None], k, v, attn_mask=visible, scale=spec.scale
            )
            out[new] = heads[0].transpose(0, 1)
        return out.flatten(1)
