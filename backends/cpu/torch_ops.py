"""The reference ops, with weights that oneDNN reordered once where it can.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import (
    BatchMeta,
    DeltaNetSpec,
    ExpertWeights,
    LayerState,
    QuantizedExperts,
    QuantizedWeight,
)
from ..quantized import check, of_expert
from ..reference import ReferenceOps, gated
from . import delta_net, quantized
from .probe import attempt


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in oneDNN's own order, or plain [out, in] where `is_reordered` is False."""

    weight: Tensor
    bias: Tensor | None
    is_reordered: bool


class TorchOps(ReferenceOps):
    """Plain torch on the CPU, in float32, bfloat16 and float16."""

    float32_residual = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Reordered weights multiply 1.4 (one row) to 3 times (256 rows) faster in bfloat16."""
        if not can_reorder(weight.dtype):
            return PackedLinear(weight, bias, False)
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return PackedLinear(reordered, bias, True)

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x weight^T + bias."""
        x = x.to(packed.weight.dtype)
        if packed.is_reordered:
            out = torch.ops.mkldnn._linear_pointwise.default(
                x, packed.weight, packed.bias, "none", [], ""
            )
        else:
            out = F.linear(x, packed.weight, packed.bias)
        return out if out_dtype is None else out.to(out_dtype)

    def delta_net(
        self, qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
    ) -> Tensor:
        """See `delta_net.py`."""
        return delta_net.delta_net(qkvz, ba, meta, state, spec)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """See `quantized.pack`."""
        check(weight)
        if weight.kind == "gguf":
            return super().pack_quantized(weight, bias)
        return quantized.pack(weight, bias, self.pack_linear)

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `quantized.linear`."""
        if isinstance(packed, tuple):
            return super().quantized_linear(x, packed, out_dtype)
        return quantized.linear(x, packed, out_dtype, self.linear)

    def pack_quantized_experts(self, weights: QuantizedExperts) -> PackedExperts:
        """Each expert's two linears, packed."""

        def packed(weight: QuantizedWeight, bias: Tensor | None) -> list[Any]:
            biases = [None] * weight.shape[0] if bias is None else bias.unbind()
            return [
                self.pack_quantized(of_expert(weight, expert), b) for expert, b in enumerate(biases)
            ]

        return PackedExperts(
            packed(weights.gate_up, weights.gate_up_bias),
            packed(weights.down, weights.down_bias),
            weights.activation,
            is_quantized=True,
        )

    def quantized_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any
    ) -> Tensor:
        """As `experts`."""
        return self.experts(x, topk_ids, topk_weights, packed)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """Each expert's two linears, packed."""

        def packed(weight: Tensor, bias: Tensor | None) -> list[Any]:
            biases = [None] * len(weight) if bias is None else bias.unbind()
            pairs = zip(weight.unbind(), biases, strict=True)
            # Clones: a packed weight may be a view, which keeps all experts' in memory.
            return [self.pack_linear(w.clone(), b) for w, b in pairs]

        return PackedExperts(
            packed(weights.gate_up, weights.gate_up_bias),
            packed(weights.down, weights.down_bias),
            weights.activation,
        )

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """Tokens sorted by expert; each expert that has any multiplies them at once."""
        ids, order = topk_ids.flatten().sort(stable=True)
        tokens = order // topk_ids.shape[1]
        rows = x[tokens]
        y = torch.empty_like(rows)
        linear = self.quantized_linear if packed.is_quantized else self.linear
        active, counts = ids.unique_consecutive(return_counts=True)
        start = 0
        for expert, count in zip(active.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            inner = gated(linear(rows[part], packed.gate_up[expert]), packed.activation)
            y[part] = linear(inner, packed.down[expert])
            start += count
        y = y.float().mul_(topk_weights.flatten()[order, None])
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, y).to(x.dtype)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One packed linear an expert, and what lies between the two."""

    gate_up: list[Any]
    down: list[Any]
    activation: str
    is_quantized: bool = False


@cache
def can_reorder(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's reordered linear, and gives the right product."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    x = torch.arange(12, dtype=dtype).view(3, 4)
    weight = torch.arange(20, dtype=dtype).view(5, 4)

    def product() -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")

    out = attempt(f"oneDNN linear with reordered {dtype}", product)
    want = F.linear(x.float(), weight.float())
    return out is not None and torch.allclose(out.float(), want, rtol=1e-2)
