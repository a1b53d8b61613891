"""AITER's kernels as providers: one adapter a method.

What AITER does not serve (float32, trees, head sizes, activations, kinds of weights) goes to our
own kernels from within the adapter, by a rule that its first lines state.

`unified_attention` reads whole pages and masks what it read: a NaN in a slot that nobody owns would
spread, so the KV pool must be zeroed at first (`kv_buffers.allocate` does that).

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import indices
from ..vendors import HALVES, Scales
from . import package
from .aiter_quantized import TILE, AiterQuantizedOps
from .triton_ops import RocmTritonOps
from .warm import op_steps

if TYPE_CHECKING:
    from ..api import (
        AttentionSpec,
        BatchMeta,
        DeviceRuntime,
        ExpertWeights,
        LayerCache,
        MLASpec,
        Rope,
        RouterSpec,
    )

ARCHS = ("gfx942", "gfx950")  # that its assembly and CK kernels are for
MIN_INNER = 128  # the experts' inner dimension is a multiple of it
MLA_HEADS, MLA_RANK, MLA_ROPE = (16, 128), 512, 64  # that its assembly kernels are for
MAX_TOKEN_LIST = 1 << 24  # entries: 64 MiB; a captured step's is as long as contexts may become
MAX_HEAD_DIM = 128  # compiled for gfx942 with 256, its kernel spills 290 registers, ours none
PAGE = 16  # a page is a tile of its matrix instructions, or several
PARTITION = 256  # tokens that a work item of paged_attention_v1 reads


class ShuffledExperts(NamedTuple):
    """[num_experts, 2 * inner, hidden] and [num_experts, hidden, inner] in tiles."""

    gate_up: Tensor
    down: Tensor


class AiterProvider:
    """Where AITER runs."""

    needs_finite_cache = True
    functions: tuple[package.Function, ...]
    _fp8: torch.dtype | None = None

    def __init__(self) -> None:
        self._ours = RocmTritonOps()
        self._scales = Scales()

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Imports the package, which compiles a part of it where that was not done yet."""
        if runtime.name != "rocm":
            return "not a ROCm device"
        if runtime.facts.arch not in ARCHS:
            return f"its kernels are for {' and '.join(ARCHS)}, not for {runtime.facts.arch}"
        if reason := self._ours.probe(runtime):
            return f"what it does not serve needs our kernels, and {reason}"
        self._fp8 = runtime.facts.fp8
        return package.reason_against(self.functions)


class AiterOps(AiterQuantizedOps, AiterProvider):
    """The ops for which AITER is the first choice."""

    name = "aiter"
    functions = tuple(
        function
        for function in package.FUNCTIONS
        if function
        not in (
            package.paged_attention_v1,
            package.rope_cached_positions_2c_fwd_inplace,
            package.reshape_and_cache_flash,
        )
    )

    def warm_steps(
        self,
        specs: Iterable[AttentionSpec],
        dtype: torch.dtype,
        page_size: int,
        device: torch.device,
    ) -> list[Callable[[], None]]:
        """One step: it compiles with hipcc, a module after the other, what a model can meet."""
        return [partial(_run_all, op_steps(self, tuple(specs), dtype, page_size, device))]

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """unified_attention: decode, extend and mixtures.

        Trees, float32, pages of other sizes and wide heads are ours.
        """
        is_served = meta.tree_mask is None and q.dtype in HALVES
        if not is_served or meta.page_size % PAGE or spec.head_dim > MAX_HEAD_DIM:
            return self._ours.attend(q, meta, cache, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        is_fp8 = cache.k.dtype != q.dtype
        package.unified_attention(
            q=q,
            k=cache.k,
            v=cache.v,
            out=out,
            cu_seqlens_q=meta.qo_indptr,
            max_seqlen_q=indices.max_q_len(meta),
            seqused_k=meta.kv_lens,
            max_seqlen_k=meta.max_kv_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            block_table=indices.row_tables(meta),
            softcap=spec.softcap or 0.0,
            q_descale=None,
            k_descale=self._scales[spec.k_scale, q.device] if is_fp8 else None,
            v_descale=self._scales[spec.v_scale, q.device] if is_fp8 else None,
            sinks=spec.sinks,
        )
        return out.flatten(1)

    def mla_attend(
        self, q_latent: Tensor, q_rope: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec
    ) -> Tensor:
        """Its assembly kernels, decode rows and others apart; other shapes are ours."""
        is_captured = indices.is_captured(meta)
        capacity = indices.num_tokens(meta)
        decodes, rows = meta.num_decode_rows, meta.num_rows
        if (
            spec.num_heads not in MLA_HEADS
            or (spec.rank, spec.rope_dim) != (MLA_RANK, MLA_ROPE)
            or q_latent.dtype != torch.bfloat16
            or cache.k.dtype != torch.bfloat16
            or capacity > MAX_TOKEN_LIST
            or (is_captured and decodes < rows)
        ):
            return self._ours.mla_attend(q_latent, q_rope, meta, cache, spec)
        q = torch.cat((q_latent, q_rope), dim=-1)
        out = torch.empty(q_latent.shape, dtype=q.dtype, device=q.device)
        if (lists := meta.plans.get("rocm.mla")) is None:
            indptr = indices.page_indptr(meta.kv_lens, 1)
            ones = torch.ones_like(meta.kv_lens)  # tokens are pages of one
            lists = meta.plans["rocm.mla"] = indptr, indices.token_list(meta, capacity), ones
        kv_indptr, kv_indices, last_lens = lists
        for function, part, tokens in (
            (package.mla_decode_fwd, slice(0, decodes), slice(0, decodes)),
            (package.mla_prefill_fwd, slice(decodes, rows), slice(decodes, meta.num_tokens)),
        ):
            if part.start == part.stop:
                continue
            of_part = slice(part.start, part.stop + 1)
            function(
                q=q[tokens],
                kv_buffer=cache.k.view(-1, 1, 1, cache.k.shape[-1]),
                o=out[tokens],
                qo_indptr=meta.qo_indptr[of_part] - tokens.start,
                kv_indptr=kv_indptr[of_part],
                kv_indices=kv_indices,
                kv_last_page_lens=last_lens[part],
                max_seqlen_q=1 if tokens.start == 0 and decodes else indices.max_q_len(meta),
                sm_scale=spec.scale,
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rmsnorm2d_fwd, of 16 bits and a weight of the same type."""
        if x.dtype not in HALVES or weight.dtype != x.dtype:
            return self._ours.rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return package.rmsnorm2d_fwd(input=rows, weight=weight, epsilon=eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rmsnorm2d_fwd_with_add, which writes the sum where the residual was."""
        if x.dtype not in HALVES or not weight.dtype == residual.dtype == x.dtype:
            return self._ours.add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(x)
        package.rmsnorm2d_fwd_with_add(
            out=out,
            input=x,
            residual_in=residual,
            residual_out=residual,
            weight=weight,
            epsilon=eps,
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu_and_mul, of 16 bits."""
        if x.dtype not in HALVES:
            return self._ours.silu_and_mul(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        package.silu_and_mul(out=out, input=x)
        return out

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu_tanh_and_mul, of 16 bits."""
        if x.dtype not in HALVES:
            return self._ours.gelu_and_mul(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        package.gelu_tanh_and_mul(out=out, input=x)
        return out

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """topk_softmax, grouped_topk, biased_grouped_topk; what none of them does is ours."""
        if spec.num_shared:
            return self._ours.route(logits, spec, bias)
        num_tokens, num_experts = logits.shape
        gating = logits.contiguous()
        weights = torch.empty(num_tokens, spec.top_k, device=logits.device)
        ids = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=logits.device)
        groups = {"num_expert_group": spec.num_groups, "topk_group": spec.top_groups}
        is_softmax = spec.scoring == "softmax"
        if bias is not None and not is_softmax and spec.num_groups > 1 and spec.renormalize:
            package.biased_grouped_topk(
                gating_output=gating,
                correction_bias=bias,
                topk_weights=weights,
                topk_ids=ids,
                need_renorm=True,
                routed_scaling_factor=spec.scale,
                **groups,
            )
        elif bias is None and spec.num_groups > 1:
            package.grouped_topk(
                gating_output=gating,
                topk_weights=weights,
                topk_ids=ids,
                need_renorm=spec.renormalize,
                is_softmax=is_softmax,
                routed_scaling_factor=spec.scale,
                **groups,
            )
        elif bias is None and is_softmax and spec.scale == 1.0:
            package.topk_softmax(
                topk_weights=weights,
                topk_indices=ids,
                token_expert_indices=torch.empty_like(ids),
                gating_output=gating,
                need_renorm=spec.renormalize,
            )
        else:
            return self._ours.route(logits, spec, bias)
        return ids.clamp_(0, num_experts - 1), weights  # broken logits may give anything

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """Shuffled once into the tiles that fused_moe reads, and its modules compiled."""
        inner, is_plain = weights.down.shape[2], weights.gate_up_bias is weights.down_bias is None
        if (
            weights.down.dtype not in HALVES
            or weights.activation != "silu"
            or not is_plain
            or inner % MIN_INNER
            or weights.down.shape[1] % 32
        ):
            return self._ours.pack_experts(weights)
        packed = ShuffledExperts(
            package.shuffle_weight(x=weights.gate_up, layout=TILE),
            package.shuffle_weight(x=weights.down, layout=TILE),
        )
        x = weights.down.new_zeros(1, weights.down.shape[1])
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=x.device)
        self.experts(x, nothing, nothing.float(), packed)  # compiles
        return packed

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """fused_moe."""
        if not isinstance(packed, ShuffledExperts):
            return self._ours.experts(x, topk_ids, topk_weights, packed)
        if len(x) == 0:
            return torch.empty_like(x)
        return package.fused_moe(
            hidden_states=x.contiguous(),
            w1=packed.gate_up,
            w2=packed.down,
            topk_weight=topk_weights,
            topk_ids=topk_ids,
        )


class AiterPagedOps(AiterProvider):
    """paged_attention_v1 for decode rows, unified_attention for the others; only if asked for."""

    name = "aiter-paged"
    functions = (package.unified_attention, package.paged_attention_v1)

    def __init__(self) -> None:
        super().__init__()
        self._unified = AiterOps()

    def settle(
        self,
        specs: Iterable[AttentionSpec],
        dtype: torch.dtype,
        page_size: int,
        runtime: DeviceRuntime,
        *,
        is_forced: bool,
    ) -> str | None:
        """Whether it is asked for, and can have pages of this size."""
        if page_size not in (16, 32):
            return f"it wants --page-size 16 or 32, not {page_size}"
        if not is_forced:
            return "not measured against unified_attention: --attention-backend asks for it"
        return None

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """Steps of decode rows alone, without sinks."""
        is_decode = meta.num_decode_rows == meta.num_rows and meta.tree_mask is None
        if not is_decode or spec.sinks is not None or q.dtype not in HALVES:
            return self._unified.attend(q, meta, cache, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        parts = -(-meta.max_kv_len // PARTITION)
        elements = q.shape[0] * spec.num_heads * parts
        num_bytes = elements * (spec.head_dim * q.element_size() + 2 * 4)  # outputs, maxima, sums
        package.paged_attention_v1(
            out=out,
            workspace_buffer=torch.empty(num_bytes, dtype=torch.uint8, device=q.device),
            query=q,
            key_cache=cache.k,
            value_cache=cache.v,
            scale=spec.scale,
            block_tables=indices.row_tables(meta),
            cu_query_lens=None,
            context_lens=meta.kv_lens,
            max_context_len=meta.max_kv_len,
            alibi_slopes=None,
            kv_cache_dtype="auto" if cache.k.dtype == q.dtype else "fp8",
            kv_cache_layout="NHD",
            logits_soft_cap=spec.softcap or 0.0,
            k_scale=self._scales[spec.k_scale, q.device],
            v_scale=self._scales[spec.v_scale, q.device],
            sliding_window=spec.window or 0,
        )
        return out.flatten(1)


class AiterRopeOps(AiterProvider):
    """Norms, rotation and the KV write as kernels of their own; only if asked for.

    Our kernel does all of it in one pass.
    """

    name = "aiter-rope"
    functions = (package.rope_cached_positions_2c_fwd_inplace, package.reshape_and_cache_flash)

    def __init__(self) -> None:
        super().__init__()
        self._norms = AiterOps()

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
        """rope_cached_positions_2c_fwd_inplace, then reshape_and_cache_flash."""
        if qkv.dtype not in HALVES or cache.k.dtype != qkv.dtype:
            return self._ours.write_qkv(qkv, meta, cache, spec, rope, q_norm, k_norm, eps)
        heads = qkv.unflatten(1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if q_norm is not None:
            q = self._norms.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self._norms.rms_norm(k, k_norm, eps)
        if rope is not None:
            of_tokens = rope.cos_sin[meta.positions].to(qkv.dtype)[:, None, None]
            cos, sin = (x.contiguous() for x in of_tokens.chunk(2, dim=-1))
            package.rope_cached_positions_2c_fwd_inplace(
                input_x=q[None, ..., : rope.rotary_dim],  # [1, num_tokens, heads, rotary_dim]
                input_y=k[None, ..., : rope.rotary_dim],
                cos=cos,
                sin=sin,
                positions=torch.arange(len(q), device=q.device)[None],
                rotate_style=int(rope.interleaved),
                reuse_freqs_front_part=True,
                nope_first=False,
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


def _run_all(steps: Iterable[Callable[[], object]]) -> None:
    for step in steps:
        step()
