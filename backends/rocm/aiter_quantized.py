"""AITER's products of 8-bit weights with activations that are rounded to the same type.

Weights with other codes, blocks or roundings go to our kernels.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..vendors import HALVES
from . import package
from .fp8 import FNUZ, weight_to_fnuz

if TYPE_CHECKING:
    from ..api import QuantizedExperts, QuantizedWeight

GROUP = 128  # activations that share a scale, and both sides of a block of weights
TILE = (16, 16)  # of shuffled weights


class EightBitWeight(NamedTuple):
    """Codes [out, in]; scales float32 [out, 1], or [out / GROUP, in / GROUP] of blocks."""

    codes: Tensor
    scales: Tensor
    is_blocked: bool
    bias: Tensor | None


class EightBitExperts(NamedTuple):
    """Shuffled codes as in `aiter_ops.ShuffledExperts`, and their scales."""

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor
    down_scales: Tensor
    quant_type: Any


class AiterQuantizedOps:
    """The ops of quantized weights."""

    _ours: Any
    _fp8: torch.dtype | None = None

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """Codes of the GPU's own fp8, shuffled where a scale serves a row; compiles the product."""
        weight = weight_to_fnuz(weight) if self._fp8 == FNUZ else weight
        is_blocked = weight.block == (GROUP, GROUP)
        if not self._is_served(weight, is_blocked) or (is_blocked and weight.kind == "int8"):
            return self._ours.pack_quantized(weight, bias)
        codes, scales = weight.codes.contiguous(), weight.scales
        assert scales is not None
        if not is_blocked:
            scales = scales.repeat_interleave(weight.block[0], 0)[: len(codes)]
            if weight.kind == "fp8":
                codes = package.shuffle_weight(x=codes, layout=TILE)
        packed = EightBitWeight(codes, scales.contiguous(), is_blocked, bias)
        half = torch.bfloat16 if bias is None else bias.dtype
        self.quantized_linear(
            torch.zeros(1, weight.shape[1], dtype=half, device=codes.device), packed
        )
        return packed

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """gemm_a8w8_blockscale, gemm_a8w8_bpreshuffle (fp8) or gemm_a8w8 (int8)."""
        if not isinstance(packed, EightBitWeight):
            return self._ours.quantized_linear(x, packed, out_dtype)
        if len(x) == 0:
            return x.new_empty(0, len(packed.codes), dtype=out_dtype)
        dtype, x = packed.codes.dtype, x.contiguous()
        half = x.dtype if x.dtype in HALVES else torch.bfloat16
        if packed.is_blocked:
            codes, scales = package.per_group_quant_hip(x=x, quant_dtype=dtype, group_size=GROUP)
            product = package.gemm_a8w8_blockscale
        else:
            codes, scales = package.per_token_quant_hip(x=x, quant_dtype=dtype)
            is_int8 = dtype == torch.int8
            product = package.gemm_a8w8 if is_int8 else package.gemm_a8w8_bpreshuffle
        out = product(XQ=codes, WQ=packed.codes, x_scale=scales, w_scale=packed.scales, dtype=half)
        if packed.bias is not None:
            out += packed.bias
        return out if out_dtype is None else out.to(out_dtype)

    def pack_quantized_experts(self, weights: QuantizedExperts) -> Any:
        """Shuffled codes; compiles what a step calls."""
        w = weights
        parts = [weight_to_fnuz(p) if self._fp8 == FNUZ else p for p in (w.gate_up, w.down)]
        is_blocked = all(p.block == (GROUP, GROUP) for p in parts)
        if (
            w.activation != "silu"
            or w.gate_up_bias is not None
            or w.down_bias is not None
            or any(p.kind != "fp8" or not self._is_served(p, is_blocked) for p in parts)
            or parts[1].shape[-1] % GROUP
        ):
            return self._ours.pack_quantized_experts(weights)
        codes = [package.shuffle_weight(x=p.codes, layout=TILE) for p in parts]
        scales = [p.scales for p in parts if p.scales is not None]
        if not is_blocked:
            scales = [
                s.repeat_interleave(p.block[0], 1)[:, : p.shape[1]].contiguous()
                for s, p in zip(scales, parts, strict=True)
            ]
        quant_type = package.quant_type("per_128x128" if is_blocked else "per_Token")
        packed = EightBitExperts(codes[0], codes[1], scales[0], scales[1], quant_type)
        hidden = torch.zeros(1, parts[1].shape[1], dtype=torch.bfloat16, device=codes[0].device)
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=hidden.device)
        self.quantized_experts(hidden, nothing, nothing.float(), packed)
        return packed

    def quantized_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any
    ) -> Tensor:
        """fused_moe, which rounds the activations itself."""
        if not isinstance(packed, EightBitExperts):
            return self._ours.quantized_experts(x, topk_ids, topk_weights, packed)
        if len(x) == 0:
            return torch.empty_like(x)
        return package.fused_moe(
            hidden_states=x.contiguous(),
            w1=packed.gate_up,
            w2=packed.down,
            topk_weight=topk_weights,
            topk_ids=topk_ids,
            quant_type=packed.quant_type,
            w1_scale=packed.gate_up_scales,
            w2_scale=packed.down_scales,
        )

    def _is_served(self, weight: QuantizedWeight, is_blocked: bool) -> bool:
        """By its codes, scales and sizes; an activation's scale is measured each time."""
        if weight.scales is None or weight.offsets is not None or weight.order is not None:
            return False
        if weight.kind != "int8" and weight.codes.dtype != self._fp8:
            return False
        num_out, num_in = weight.shape[-2:]
        if is_blocked:
            return weight.activations == "group" and num_out % GROUP == num_in % GROUP == 0
        is_by_token = weight.activations == "token" and weight.block[1] == num_in
        return is_by_token and num_out % 16 == num_in % 32 == 0
