"""Portable Triton kernels that the GPU backends share.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ..gguf_blocks import BLOCK_TYPES

VENDORS = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel"}  # of Triton's backends

if importlib.util.find_spec("triton") is not None:
    import triton

    from . import (
        attention,
        delta_net,
        fused,
        mla,
        mla_dense,
        moe,
        moe_quantized,
        page_copies,
        routing,
        sampling,
        warm,
    )
    from . import quantized as quantized_products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    import torch
    from torch import Tensor

    from ..api import (
        AttentionSpec,
        BatchMeta,
        DeltaNetSpec,
        DenseRows,
        DeviceRuntime,
        ExpertWeights,
        LayerCache,
        LayerState,
        MLASpec,
        QuantizedExperts,
        QuantizedWeight,
        Rope,
        RouterSpec,
        SamplingRows,
    )


class TritonOps:
    """The ops that have a kernel here; each compiles at its first use, if not by `warm_steps`."""

    name = "triton"
    gguf_types = frozenset(BLOCK_TYPES)  # regrouped when they are packed

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Triton needs a GPU that it has a backend for, or its interpreter (TRITON_INTERPRET=1)."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        vendor = VENDORS.get(runtime.name)
        if vendor is not None and importlib.util.find_spec(f"triton.backends.{vendor}") is None:
            return f"this triton has no {vendor} backend: it is not the one that came with torch"
        if runtime.device.type == "cpu" and not triton.knobs.runtime.interpret:
            return "triton has no CPU target"
        return None

    def warm_steps(
        self,
        specs: Iterable[AttentionSpec],
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
    ) -> list[Callable[[], None]]:
        """See `warm.attention_steps`."""
        return warm.attention_steps(specs, dtype, page_size, device)

    def mla_warm_steps(
        self,
        specs: Iterable[MLASpec],
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
    ) -> list[Callable[[], None]]:
        """See `warm.mla_steps`."""
        return warm.mla_steps(specs, dtype, page_size, device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `fused.rms_norm`."""
        return fused.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `fused.add_rms_norm`."""
        return fused.add_rms_norm(x, residual, weight, eps)

    def write_qkv(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cache: LayerCache,
        spec: AttentionSpec,
        rope: Rope | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See `fused.write_qkv`."""
        return fused.write_qkv(qkv, meta, cache, spec, rope, q_norm, k_norm, eps)

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """See `attention.attend`."""
        return attention.attend(q, meta, cache, spec)

    def mla_write(
        self,
        latent: Tensor,
        q_rope: Tensor,
        meta: BatchMeta,
        cache: LayerCache,
        spec: MLASpec,
        rope: Rope,
        norm: Tensor,
        eps: float,
    ) -> None:
        """See `mla_dense.mla_write`."""
        mla_dense.mla_write(latent, q_rope, meta, cache, spec, rope, norm, eps)

    def mla_attend(
        self, q_latent: Tensor, q_rope: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec
    ) -> Tensor:
        """See `mla.mla_attend`."""
        return mla.mla_attend(q_latent, q_rope, meta, cache, spec)

    def mla_attend_dense(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, rows: DenseRows, spec: MLASpec
    ) -> tuple[Tensor, Tensor]:
        """See `mla_dense.mla_attend_dense`."""
        return mla_dense.mla_attend_dense(q, kv, k_rope, rows, spec)

    def delta_net(
        self, qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
    ) -> Tensor:
        """See `delta_net.delta_net`."""
        return delta_net.delta_net(qkvz, ba, meta, state, spec)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `fused.silu_and_mul`."""
        return fused.silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """See `fused.gelu_and_mul`."""
        return fused.gelu_and_mul(x)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: Tensor | None
    ) -> quantized_products.PackedQuantized:
        """See `quantized.pack_quantized`."""
        return quantized_products.pack_quantized(weight, bias)

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `quantized.quantized_linear`."""
        return quantized_products.quantized_linear(x, packed, out_dtype)

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `routing.route`."""
        return routing.route(logits, spec, bias)

    def pack_experts(self, weights: ExpertWeights) -> moe.PackedExperts:
        """See `moe.pack_experts`."""
        return moe.pack_experts(weights)

    def experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: moe.PackedExperts
    ) -> Tensor:
        """See `moe.experts`."""
        return moe.experts(x, topk_ids, topk_weights, packed)

    def norm_experts_add(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        topk_ids: Tensor,
        topk_weights: Tensor,
        packed: moe.PackedExperts,
    ) -> None:
        """See `moe.norm_experts_add`."""
        moe.norm_experts_add(residual, norm_weight, eps, topk_ids, topk_weights, packed)

    def pack_quantized_experts(
        self, weights: QuantizedExperts
    ) -> moe_quantized.PackedQuantizedExperts:
        """See `moe_quantized.pack_quantized_experts`."""
        return moe_quantized.pack_quantized_experts(weights)

    def quantized_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any
    ) -> Tensor:
        """See `moe_quantized.quantized_experts`."""
        return moe_quantized.quantized_experts(x, topk_ids, topk_weights, packed)

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """See `sampling.sample`."""
        return sampling.sample(logits, rows)

    def copy_pages(
        self,
        parts: Tensor,
        max_page_bytes: int,
        pages: Tensor,
        records: int,
        record_bytes: int,
        rows: Tensor,
        *,
        to_pool: bool,
        is_host: bool,
    ) -> None:
        """See `page_copies.copy_pages`."""
        page_copies.copy_pages(
            parts,
            max_page_bytes,
            pages,
            records,
            record_bytes,
            rows,
            to_pool=to_pool,
            is_host=is_host,
        )
