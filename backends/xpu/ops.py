"""vllm-xpu-kernels as a provider: one adapter a method.

What the package does not serve (float32, trees, other activations) goes to our own kernels from
within the adapter, by a rule that its first lines state; to plain torch where Triton is not there.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import indices
from ..api import ExpertWeights
from ..reference import ReferenceOps
from ..triton import TritonOps
from ..vendors import HALVES, Scales
from . import package

if TYPE_CHECKING:
    from torch import Tensor

    from ..api import (
        AttentionSpec,
        BatchMeta,
        DeviceRuntime,
        LayerCache,
        Rope,
        RouterSpec,
    )

# What its libraries have kernels for, by the names of their symbols.
HEAD_DIMS = (64, 96, 128, 192, 256)
TOP_KS = (1, 2, 4, 6, 7, 8, 10, 12, 16)
PAGE_MULTIPLE = 16  # tokens
ROW_MULTIPLE = 16  # values of an expert's row


class TransposedExperts:
    """Experts as the package reads them: [num_experts, in, out], the inputs' dimension first."""

    def __init__(self, weights: ExpertWeights):
        self._weights = _transposed(weights)
        self._fused: Any = None
        self._ours: Any = None

    def fused(self, top_k: int) -> Any:
        """The package's own object, which is for one number of experts a token."""
        if self._fused is None or self._fused.n_experts_per_token != top_k:
            self._fused = package.XpuFusedMoe(
                w13=self._weights.gate_up,
                w13_scales=None,
                w13_bias=None,
                w2=self._weights.down,
                w2_scales=None,
                w2_bias=None,
                n_experts_per_token=top_k,
                activation="silu",
                num_experts=len(self._weights.down),
            )
        return self._fused

    def ours(self, ops: Any) -> Any:
        """Packed anew by other ops: only a call tells how many experts a token has."""
        if self._ours is None:
            self._ours = ops.pack_experts(_transposed(self._weights))
            del self._fused, self._weights
        return self._ours


def _transposed(weights: ExpertWeights) -> ExpertWeights:
    gate_up, down = (w.transpose(1, 2).contiguous() for w in (weights.gate_up, weights.down))
    return ExpertWeights(gate_up, down)


class XpuProvider:
    """Where the package runs."""

    needs_finite_cache = True  # nothing says that it masks what it reads of a page's tail
    callables: tuple[package.Callable, ...]

    def __init__(self) -> None:
        self._ours: Any = TritonOps()
        self._scales = Scales()

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Imports the package's libraries."""
        if runtime.name != "xpu":
            return "not an Intel GPU"
        if self._ours.probe(runtime):
            self._ours = ReferenceOps()
        return package.reason_against(self.callables)


class XpuKernelOps(XpuProvider):
    """The ops for which the package is the first choice."""

    name = "vllm-xpu"
    callables = tuple(
        c
        for c in package.CALLABLES
        if c not in (package.rotary_embedding, package.reshape_and_cache_flash)
    )

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """flash_attn_varlen_func over pages.

        Trees, float32, heads of other sizes, odd pages are ours; so are softcaps, which only its
        reference in plain torch knows, and windows of one token, which that takes for none.
        """
        if (
            meta.tree_mask is not None
            or q.dtype not in HALVES
            or spec.head_dim not in HEAD_DIMS
            or meta.page_size % PAGE_MULTIPLE
            or spec.softcap is not None
            or spec.window == 1
        ):
            return self._ours.attend(q, meta, cache, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale = v_scale = None
        if cache.k.dtype != q.dtype:
            shape = (meta.num_rows, spec.num_kv_heads)
            k_scale = self._scales[spec.k_scale, q.device].expand(shape)
            v_scale = self._scales[spec.v_scale, q.device].expand(shape)
        max_q_len = indices.max_q_len(meta)
        if max_q_len > 1 and indices.is_captured(meta):
            max_q_len += 1  # a bound must not look as if all rows were of one length
        package.flash_attn_varlen_func(
            q=q,
            k=cache.k,
            v=cache.v,
            max_seqlen_q=max_q_len,
            cu_seqlens_q=meta.qo_indptr,
            max_seqlen_k=meta.max_kv_len,
            seqused_k=meta.kv_lens,
            softmax_scale=spec.scale,
            causal=True,
            window_size=[-1, -1] if spec.window is None else [spec.window - 1, 0],
            block_table=indices.row_tables(meta),
            out=out,
            k_descale=k_scale,
            v_descale=v_scale,
            s_aux=None if spec.sinks is None else spec.sinks.to(q.dtype),
        )
        return out.flatten(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm, of 16 bits and a weight of the same type."""
        if x.dtype not in HALVES or weight.dtype != x.dtype:
            return self._ours.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        package.rms_norm(result=out, input=x, weight=weight, epsilon=eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """fused_add_rms_norm, which writes the sum over the residual and the norm over x."""
        if x.dtype not in HALVES or not weight.dtype == residual.dtype == x.dtype:
            return self._ours.add_rms_norm(x, residual, weight, eps)
        out = x.clone()
        package.fused_add_rms_norm(input=out, residual=residual, weight=weight, epsilon=eps)
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu_and_mul, of 16 bits."""
        if x.dtype not in HALVES:
            return self._ours.silu_and_mul(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        package.silu_and_mul(result=out, input=x)
        return out

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu_tanh_and_mul, of 16 bits."""
        if x.dtype not in HALVES:
            return self._ours.gelu_and_mul(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        package.gelu_tanh_and_mul(out=out, input=x)
        return out

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """topk_softmax; groups, biases, sigmoids and scales are ours."""
        is_plain = spec.scoring == "softmax" and spec.num_groups == 1 and spec.scale == 1.0
        if not is_plain or bias is not None or spec.num_shared:
            return self._ours.route(logits, spec, bias)
        num_tokens, num_experts = logits.shape
        weights = torch.empty(num_tokens, spec.top_k, device=logits.device)
        ids = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=logits.device)
        package.topk_softmax(
            topk_weights=weights,
            topk_indices=ids,
            token_expert_indices=torch.empty_like(ids),
            gating_output=logits.contiguous(),
            renormalize=spec.renormalize,
            bias=None,
            is_padding=None,
        )
        return ids.clamp_(0, num_experts - 1), weights  # broken logits may give anything

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """Transposed once; biases, other activations, float32 and odd sizes are ours."""
        _, hidden, inner = weights.down.shape
        is_plain = weights.gate_up_bias is weights.down_bias is None
        if (
            weights.down.dtype not in HALVES
            or weights.activation != "silu"
            or not is_plain
            or hidden % ROW_MULTIPLE
            or inner % ROW_MULTIPLE
        ):
            return self._ours.pack_experts(weights)
        return TransposedExperts(weights)

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """XpuFusedMoe; other numbers of experts a token than TOP_KS are ours."""
        top_k = topk_ids.shape[1]
        if isinstance(packed, TransposedExperts) and top_k not in TOP_KS:
            packed = packed.ours(self._ours)
        if not isinstance(packed, TransposedExperts):
            return self._ours.experts(x, topk_ids, topk_weights, packed)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if len(x):
            packed.fused(top_k).apply(
                output=out,
                hidden_states=x.contiguous(),
                topk_weights=topk_weights,
                topk_ids=topk_ids,
            )
        return out


class XpuRopeOps(XpuProvider):
    """Norms, rotation and the KV write as kernels of their own, cosines in the model's type.

    Behind our own kernel, which does all of it in one pass with cosines in float32: it serves where
    Triton cannot.
    """

    name = "vllm-xpu-rope"
    callables = (package.rms_norm, package.rotary_embedding, package.reshape_and_cache_flash)

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
        """rotary_embedding in place, then reshape_and_cache_flash; slot -1 is nowhere."""
        if qkv.dtype not in HALVES or cache.k.dtype != qkv.dtype:
            return self._ours.write_qkv(qkv, meta, cache, spec, rope, q_norm, k_norm, eps)
        heads = qkv.unflatten(1, (-1, spec.head_dim))
        parts = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        q, k, v = (part.contiguous() for part in parts)
        for x, norm in ((q, q_norm), (k, k_norm)):
            if norm is not None:
                rows = x.flatten(0, 1)
                package.rms_norm(
                    result=rows, input=rows.clone(), weight=norm.to(x.dtype), epsilon=eps
                )
        if rope is not None:
            package.rotary_embedding(
                positions=meta.positions,
                query=q.flatten(1),
                key=k.flatten(1),
                head_size=spec.head_dim,
                cos_sin_cache=rope.cos_sin.to(q.dtype),
                is_neox=not rope.interleaved,
            )
        one = self._scales[1.0, qkv.device]
        package.reshape_and_cache_flash(
            key=k,
            value=v,
            key_cache=cache.k,
            value_cache=cache.v,
            slot_mapping=meta.out_slots,
            kv_cache_dtype="auto",
            k_scale=one,
            v_scale=one,
        )
        return q
