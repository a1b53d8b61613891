"""Every op of the contract in plain torch: the oracle of the contract tests, and a provider.

It computes in float32, or in float64 where the input is float64, and returns the input's type;
so float64 inputs give the oracle and bfloat16 ones what a device without kernels would serve.

Runs on: gpu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from . import delta_net, quantized
from .api import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from .api import (
        BatchMeta,
        DeltaNetSpec,
        DenseRows,
        DeviceRuntime,
        ExpertWeights,
        LayerCache,
        LayerState,
        LayerWeights,
        MLASpec,
        QuantizedExperts,
        QuantizedWeight,
        Rope,
        RouterSpec,
        SamplingRows,
    )

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss
DENSE_LOGITS = 1 << 24  # of all heads, that are in memory at once


class ReferenceOps:
    """All of `Ops`, correct before fast, on any device."""

    name = "torch"

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Plain torch runs everywhere."""
        return None

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Weight and bias as they are."""
        return weight, bias

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x weight^T + bias."""
        weight, bias = packed
        out = F.linear(x.to(weight.dtype), weight, bias)
        return out if out_dtype is None else out.to(out_dtype)

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        packed: Any,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The two ops, one after the other."""
        return self.linear(self.rms_norm(x, norm_weight, eps), packed, out_dtype)

    def norm_gated_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, packed: Any, activation: str
    ) -> Tensor:
        """The three ops, one after the other."""
        x = self.norm_linear(x, norm_weight, eps, packed)
        return self.silu_and_mul(x) if activation == "silu" else self.gelu_and_mul(x)

    def linear_add(self, x: Tensor, packed: Any, residual: Tensor) -> None:
        """The product is rounded to the residual's type before it is added."""
        residual += self.linear(x, packed, residual.dtype)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """Weight and bias as they are."""
        quantized.check(weight)
        return weight, bias

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """round_activations(x) dequantize(weight)^T + bias, rounded once."""
        weight, bias = packed
        return quantized.linear(x, weight, bias, out_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
        y = _up(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        return (y * weight.to(y.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The sum is rounded to the residual's type before it is normed."""
        residual += x
        return self.rms_norm(residual, weight, eps).to(x.dtype)

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
        """Norms and rotation stay unrounded in between."""
        heads = qkv.unflatten(1, (-1, spec.head_dim))  # [num_tokens, heads of q, k and v, head_dim]
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        q, k = _up(q), _up(k)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        if rope is not None:
            q, k = _rotate(q, rope, meta.positions), _rotate(k, rope, meta.positions)
        written = meta.out_slots >= 0
        slots = meta.out_slots[written]
        for pool, new, scale in ((cache.k, k, spec.k_scale), (cache.v, v, spec.v_scale)):
            new = new[written]
            if pool.dtype.itemsize == 1:
                limit = torch.finfo(pool.dtype).max
                new = (_up(new) / scale).clamp(-limit, limit)
            pool.view(-1, *pool.shape[2:])[slots] = new.to(pool.dtype)
        return q.to(qkv.dtype)

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """One row after the other: gather its pages, mask, softmax."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        k, v = (pool.flatten(0, 1) for pool in cache)  # [num_slots, num_kv_heads, head_dim]
        for new, slots, visible in contexts(meta, spec.window):
            out[new] = _attend_row(q[new], k[slots], v[slots], visible, spec)
        return out.flatten(1)

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
        """The norm and the rotation, each rounded once."""
        compressed, k_rope = _up(latent).split([spec.rank, spec.rope_dim], dim=1)
        k_rope = _rotate(k_rope[:, None], rope, meta.positions)[:, 0]
        keys = torch.cat((self.rms_norm(compressed, norm, eps), k_rope), dim=1)
        written = meta.out_slots >= 0
        pool = cache.k.view(-1, keys.shape[1])
        pool[meta.out_slots[written]] = keys[written].to(pool.dtype)
        q_rope.copy_(_rotate(_up(q_rope), rope, meta.positions))

    def mla_attend(
        self, q_latent: Tensor, q_rope: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec
    ) -> Tensor:
        """As `attend`, with one KV head, whose value is the first part of its key."""
        out = torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
        q, keys = torch.cat((q_latent, q_rope), dim=-1), cache.k.flatten(0, 1)
        one_head = AttentionSpec(spec.num_heads, 1, spec.rank + spec.rope_dim, spec.scale)
        for new, slots, visible in contexts(meta, None):
            k = keys[slots]
            out[new] = _attend_row(q[new], k, k[..., : spec.rank], visible, one_head)
        return out

    def mla_attend_dense(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, rows: DenseRows, spec: MLASpec
    ) -> tuple[Tensor, Tensor]:
        """One row after the other, in blocks of new tokens, for memory's sake."""
        num_heads, at = q.shape[1], torch.arange(max(len(q), len(kv)), device=q.device)
        out = q.new_zeros(len(q), num_heads, spec.value_dim)
        lse = _up(q).new_full(q.shape[:2], -math.inf)
        bounds = zip(rows.qo_indptr.tolist(), rows.kv_indptr.tolist(), strict=True)
        for ((q0, k0), (q1, k1)), offset in zip(
            pairwise(bounds), rows.offsets.tolist(), strict=True
        ):
            k, v = _up(kv[k0:k1]).split([spec.nope_dim, spec.value_dim], dim=2)
            k = torch.cat((k, _up(k_rope[k0:k1, None]).expand(-1, num_heads, -1)), dim=2)
            keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
            step = max(1, DENSE_LOGITS // (num_heads * max(1, k1 - k0)))
            for first in range(q0, q1, step):
                new = slice(first, min(first + step, q1))
                seen = min(max(offset + new.stop - q0, 0), k1 - k0)
                logits = _up(q[new]).transpose(0, 1) @ keys[..., :seen] * spec.scale
                logits.masked_fill_(at[:seen] > at[new, None] - q0 + offset, -math.inf)
                total = logits.logsumexp(-1)
                p = logits.sub_(total.masked_fill(total == -math.inf, 0)[..., None]).exp_()
                out[new] = (p @ values[:, :seen]).transpose(0, 1)
                lse[new] = total.t()
        return out, lse.float()

    def delta_net(
        self, qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
    ) -> Tensor:
        """One token after the other; see `delta_net.py`."""
        return delta_net.delta_net(qkvz, ba, meta, state, spec)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """The gate is the first half."""
        gate, up = _up(x).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """The gate is the first half; gelu in its tanh form (Hendrycks and Gimpel 2016)."""
        gate, up = _up(x).chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of equal scores the lower id is chosen first.

        With groups (DeepSeek-V2 and V3), those with the largest scores are chosen first: a
        group's score is its best expert's, or the sum of its best two where there is a bias.
        """
        logits, shared_gate = _up(logits), logits.new_ones(())
        if spec.has_shared_gate:
            logits, shared_gate = logits[:, :-1], logits[:, -1:].sigmoid()
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        choice = choice.masked_fill(choice.isnan(), -math.inf)
        if spec.num_groups > 1:
            grouped = choice.unflatten(1, (spec.num_groups, -1))
            best = grouped.sort(dim=-1, descending=True).values
            of_group = best[..., 0] if bias is None else best[..., :2].sum(-1)
            order = of_group.sort(dim=-1, descending=True, stable=True).indices
            is_chosen = torch.zeros_like(of_group, dtype=torch.bool)
            is_chosen.scatter_(1, order[:, : spec.top_groups], True)
            choice = grouped.masked_fill(~is_chosen[..., None], -math.inf).flatten(1)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
        weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        weights = weights * spec.scale
        if spec.num_shared:
            shared = torch.arange(spec.num_shared, device=ids.device) + logits.shape[1]
            ids = torch.cat((ids, shared.expand(len(ids), -1)), dim=1)
            of_shared = shared_gate.expand(len(ids), spec.num_shared)
            weights = torch.cat((weights, of_shared), dim=1)
        return ids.int(), weights.to(logits.dtype)

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """The weights as they are."""
        return weights

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """One expert after the other."""
        w = packed
        out = torch.zeros_like(_up(x), memory_format=torch.contiguous_format)
        for expert in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert).nonzero(as_tuple=True)
            bias = None if w.gate_up_bias is None else w.gate_up_bias[expert]
            y = gated(F.linear(x[tokens], w.gate_up[expert], bias), w.activation)
            bias = None if w.down_bias is None else w.down_bias[expert]
            y = _up(F.linear(y, w.down[expert], bias))
            out.index_add_(0, tokens, y * topk_weights[tokens, ranks, None].to(y.dtype))
        return out.to(x.dtype)

    def pack_quantized_experts(self, weights: QuantizedExperts) -> Any:
        """The weights as they are."""
        quantized.check(weights.gate_up)
        quantized.check(weights.down)
        return weights

    def quantized_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any
    ) -> Tensor:
        """One expert after the other; both linears round their inputs as their weights say."""
        w = packed
        out = torch.zeros_like(_up(x), memory_format=torch.contiguous_format)
        for expert in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert).nonzero(as_tuple=True)
            bias = None if w.gate_up_bias is None else w.gate_up_bias[expert]
            gate_up = quantized.of_expert(w.gate_up, expert)
            y = gated(quantized.linear(x[tokens], gate_up, bias, None), w.activation)
            bias = None if w.down_bias is None else w.down_bias[expert]
            y = quantized.linear(y, quantized.of_expert(w.down, expert), bias, out.dtype)
            out.index_add_(0, tokens, y * topk_weights[tokens, ranks, None].to(y.dtype))
        return out.to(x.dtype)

    def norm_experts_add(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        topk_ids: Tensor,
        topk_weights: Tensor,
        packed: Any,
    ) -> None:
        """The ops that it is made of."""
        x = self.rms_norm(residual, norm_weight, eps)
        residual += self.experts(x, topk_ids, topk_weights, packed)

    def decoder_layer(
        self,
        x: Tensor | None,
        residual: Tensor,
        weights: LayerWeights,
        meta: BatchMeta,
        cache: LayerCache,
    ) -> Tensor:
        """What the fused op of a provider must give."""
        w, eps = weights, weights.eps
        if x is None:
            x = self.rms_norm(residual, w.input_norm, eps)
        else:
            x = self.add_rms_norm(x, residual, w.input_norm, eps)
        qkv = self.linear(x, w.qkv)
        q = self.write_qkv(qkv, meta, cache, w.spec, w.rope, w.q_norm, w.k_norm, eps)
        x = self.linear(self.attend(q, meta, cache, w.spec), w.out)
        if w.attention_out_norm is not None:
            x = self.rms_norm(x, w.attention_out_norm, eps)
        x = self.linear(self.add_rms_norm(x, residual, w.mlp_norm, eps), w.gate_up)
        x = self.silu_and_mul(x) if w.activation == "silu" else self.gelu_and_mul(x)
        x = self.linear(x, w.down)
        return x if w.mlp_out_norm is None else self.rms_norm(x, w.mlp_out_norm, eps)

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Greedy rows take the likeliest token, of equals the lowest id. For the others

        1. p = softmax(logits / temperature);
        2. top_k keeps the tokens that are at least as likely as the k-th (so ties stay in);
        3. top_p keeps, of these, the smallest set of the likeliest whose share of their mass is
           at least top_p, and all that are as likely as its last;
        4. min_p keeps tokens at least min_p times as likely as the likeliest;
        5. the token is the first, in order of ids, at which the cumulative sum of what is kept
           exceeds u times its total; u = `uniform(seeds, positions)`.

        The filters are thresholds on p, so no provider needs a stable sort, and the choice
        depends on nothing but the row.
        """
        is_finite = logits.amax(-1).isfinite()  # amax passes NaN on
        greedy = logits.argmax(-1)
        if rows.all_greedy:
            return greedy.int(), is_finite
        is_greedy = rows.temperature == 0
        temperature = rows.temperature.double().masked_fill(is_greedy, 1.0)
        p = torch.softmax(logits.double() / temperature[:, None], dim=-1)
        floor = p.amax(-1) * rows.min_p
        if rows.has_top_k or rows.has_top_p:
            filtered = ((rows.top_k < logits.shape[1]) | (rows.top_p < 1)).nonzero()[:, 0]
            floor[filtered] = floor[filtered].maximum(
                _threshold(p[filtered], rows.top_k[filtered], rows.top_p[filtered])
            )
        p.masked_fill_(p < floor[:, None], 0.0)
        cumulative = p.cumsum(-1)
        target = uniform(rows.seeds, rows.positions).double() * cumulative[:, -1]
        token = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        token.clamp_(max=logits.shape[1] - 1)  # NaN logits only; the runner reports those
        return torch.where(is_greedy, greedy, token).int(), is_finite


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float32 in [0, 1) a row: 24 bits of splitmix64 (Steele et al. 2014).

    The seed is mixed first, so that neighbouring seeds do not share a sequence.

    Args:
        seeds: int64 [rows]. positions: int [rows].
    """
    mixed = _mix64(_mix64(seeds) + (positions.long() + 1) * _GOLDEN)
    return (mixed >> 40 & 0xFFFFFF).float() * 2.0**-24


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64; torch's products wrap


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finalizer on int64; the masks make its right shifts logical."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def _threshold(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability [rows] that top_k and then top_p keep."""
    falling = p.sort(dim=-1, descending=True).values
    last = (top_k.long().clamp(1, p.shape[1]) - 1)[:, None]
    kth = falling.gather(1, last)
    falling = falling.masked_fill(falling < kth, 0.0)
    cumulative = falling.cumsum(-1)
    enough = top_p.double()[:, None] * cumulative[:, -1:]
    num_kept = ((cumulative - falling < enough) & (falling > 0)).sum(-1, keepdim=True)
    return falling.gather(1, num_kept.clamp(min=1) - 1)[:, 0]


def gated(x: Tensor, activation: str) -> Tensor:
    """An expert's activation (see `ExpertWeights`) of [num_tokens, 2 n]: [num_tokens, n]."""
    gate, up = _up(x).chunk(2, dim=-1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        gate = gate * torch.sigmoid(SWIGLU_ALPHA * gate)
    else:
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(x.dtype)


def _up(x: Tensor) -> Tensor:
    """x in the type that is computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x [num_tokens, heads, head_dim]."""
    cos, sin = rope.cos_sin[positions].to(x.dtype)[:, None].chunk(2, dim=-1)
    turned, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def contexts(meta: BatchMeta, window: int | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each row: its new tokens, the slots of its context, and bool [q_len, kv_len] who sees."""
    mask_begin, device = 0, meta.block_table.device
    for row in range(meta.num_rows):
        begin, end = int(meta.qo_indptr_cpu[row]), int(meta.qo_indptr_cpu[row + 1])
        q_len, kv_len = end - begin, int(meta.kv_lens_cpu[row])
        if kv_len == 0 or q_len == 0:
            continue
        at = torch.arange(kv_len, device=device)
        table = meta.block_table[meta.slots[row]]
        slots = table[at // meta.page_size].long() * meta.page_size + at % meta.page_size
        if meta.tree_mask is None:
            visible = at <= at[kv_len - q_len :, None]
        else:
            visible = meta.tree_mask[mask_begin : mask_begin + q_len * kv_len].view(q_len, -1)
            mask_begin += q_len * kv_len
        if window is not None:
            visible = visible & (at > at[kv_len - q_len :, None] - window)
        yield slice(begin, end), slots, visible


def _attend_row(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    """One row: q [q_len, num_heads, head_dim], k and v [kv_len, num_kv_heads, head_dim]."""
    q_len, group = q.shape[0], spec.num_heads // spec.num_kv_heads
    # The heads of a group become query rows of their kv head.
    grouped = _up(q).unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    keys, values = (x.to(grouped.dtype).transpose(0, 1) for x in (k, v))
    logits = (grouped @ keys.transpose(1, 2) * (spec.scale * spec.k_scale)).view(
        spec.num_heads, q_len, -1
    )
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~visible, -math.inf)
    if spec.sinks is None:
        p = logits.softmax(-1)
    else:
        sinks = spec.sinks.to(logits.dtype)[:, None, None].expand(-1, q_len, 1)
        p = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
    out = p.view(spec.num_kv_heads, group * q_len, -1) @ values * spec.v_scale
    return out.view(spec.num_heads, q_len, -1).transpose(0, 1).to(q.dtype)
