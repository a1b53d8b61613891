"""Multi-head latent attention (DeepSeek-V2, section 2.1): a token keeps one small latent.

Of a head's key and value, both up-projections of the latent, the cache holds the latent alone, and
the key's rotary part, which all heads share. New tokens attend in one of two ways that are equal:

* absorbed: a query is multiplied by the key's up-projection instead, and attends to the latents;
  what comes out is projected up to a value. It reads the cache alone, so it is for few new tokens.
* dense: keys and values of the context are projected up, a bounded part of it at a time, whose
  results are merged by their log-sum-exps. A third of the work for each pair of tokens, so it is
  for prompts, and for many new tokens behind a cached context.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.api import BatchMeta, DenseRows, MLASpec, Rope
from ..api.errors import StartError
from .linear import Linear
from .norms import RMSNorm
from .parameters import Parameters

if TYPE_CHECKING:
    from ...backends.api import LayerCache
    from .config import LatentConfig, ModelConfig

PLAN_KEY = "models.latent"  # in BatchMeta.plans
NORM_EPS = 1e-6  # of the latents' norms, whatever the config says of the others
DENSE_BYTES = 256 << 20  # of a layer's keys and values that are projected up at a time


@dataclass(frozen=True, slots=True)
class DensePart:
    """A part of the contexts of neighbouring rows, one row after the other.

    Attributes:
        tokens: the new tokens of these rows.
        num_merged: how many of them, at the beginning, saw a part of their context before.
        slots: int64 [num_keys] where the keys are in the pool.
    """

    tokens: slice
    num_merged: int
    slots: Tensor
    rows: DenseRows


@dataclass(frozen=True, slots=True)
class StepSplit:
    """How the rows of a step attend: the first absorbed, the others dense.

    Attributes:
        absorbed: the batch of the first rows; None where there are none.
    """

    absorbed: BatchMeta | None
    dense: tuple[DensePart, ...]


class LatentAttention:
    """Latent attention between the linears that read the residual stream and write to it."""

    def __init__(self, name: str, config: ModelConfig, rope: Rope, parameters: Parameters):
        assert config.latent is not None
        self._latent = latent = config.latent
        heads, head_dim = config.num_heads, latent.nope_dim + latent.rope_dim
        self.spec = MLASpec(
            heads,
            latent.kv_rank,
            latent.rope_dim,
            latent.nope_dim,
            latent.value_dim,
            config.attention_scale,
        )
        self.kv_shape = (1, latent.kv_rank + latent.rope_dim, 0)
        self.rope = rope
        self._ops, self._parameters = parameters.ops, parameters
        norms = replace(config, norm_eps=NORM_EPS)
        self._q_up: Linear | None = None
        if latent.q_rank is None:
            if config.qkv_bias:
                raise StartError("model config: attention_bias needs q_lora_rank")
            self._q_size, q_name = heads * head_dim, "q_proj"
        else:
            self._q_size, q_name = latent.q_rank, "q_a_proj"
            self._q_norm = RMSNorm(f"{name}.q_a_layernorm", latent.q_rank, norms, parameters)
            up = {f"{name}.q_b_proj": heads * head_dim}
            self._q_up = Linear(up, latent.q_rank, False, parameters)
        down = {q_name: self._q_size, "kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}
        self.qkv = Linear(
            {f"{name}.{part}": size for part, size in down.items()},
            config.hidden_size,
            config.qkv_bias,
            parameters,
        )
        self._kv_norm = RMSNorm(f"{name}.kv_a_layernorm", latent.kv_rank, norms, parameters)
        # [num_heads, nope_dim + value_dim, kv_rank], plain: both ways take it apart.
        self._kv_up = torch.empty(0)
        kv_name, num_up = f"{name}.kv_b_proj", heads * (latent.nope_dim + latent.value_dim)
        parameters.expect_weight(kv_name, num_up, latent.kv_rank, self._put_kv_up)
        self.out = Linear(
            {f"{name}.o_proj": config.hidden_size},
            heads * latent.value_dim,
            config.o_bias,
            parameters,
        )

    def _put_kv_up(self, tensor: Tensor) -> None:
        tensor = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)
        self._kv_up = tensor.unflatten(0, (self.spec.num_heads, -1)).contiguous()

    def __call__(self, qkv: Tensor, meta: BatchMeta, cache: LayerCache) -> Tensor:
        """What lies between the two linears; latents of the new tokens go to the cache.

        Returns:
            [num_tokens, num_heads * value_dim].
        """
        latent, spec = self._latent, self.spec
        q, compressed = qkv.split([self._q_size, spec.rank + spec.rope_dim], dim=1)
        if self._q_up is not None:
            q = self._q_up(self._q_norm(q))
        q = q.unflatten(1, (spec.num_heads, -1))
        self._ops.mla_write(
            compressed,
            q[..., latent.nope_dim :],
            meta,
            cache,
            spec,
            self.rope,
            self._kv_norm.weight,
            NORM_EPS,
        )
        split = meta.plans.get(PLAN_KEY)
        if split is None:  # once a step for all layers
            split = meta.plans[PLAN_KEY] = self._split(meta)
        out = q.new_empty(*q.shape[:2], latent.value_dim)
        num_absorbed = 0
        if split.absorbed is not None:
            num_absorbed = split.absorbed.num_tokens
            self._absorbed(q[:num_absorbed], out[:num_absorbed], split.absorbed, cache)
        lse: Tensor | None = None
        for part in split.dense:
            more, more_lse = self._dense(q, part, cache)
            if part.num_merged and lse is not None:
                n = part.num_merged
                _merge(out[part.tokens][:n], lse[-n:], more[:n], more_lse[:n])
                out[part.tokens][n:] = more[n:]
                more_lse[:n] = lse[-n:]
            else:
                out[part.tokens] = more
            lse = more_lse
        return out.flatten(1)

    def _absorbed(self, q: Tensor, out: Tensor, meta: BatchMeta, cache: LayerCache) -> None:
        """out [num_tokens, num_heads, value_dim] = attention of q to the latents."""
        nope = self._latent.nope_dim
        q_nope, q_rope = q.split([nope, self.spec.rope_dim], dim=2)
        key_up, value_up = self._kv_up[:, :nope], self._kv_up[:, nope:]
        q_latent = torch.bmm(q_nope.transpose(0, 1), key_up).transpose(0, 1)
        attended = self._ops.mla_attend(q_latent, q_rope, meta, cache, self.spec)
        torch.bmm(attended.transpose(0, 1), value_up.transpose(1, 2), out=out.transpose(0, 1))

    def _dense(self, q: Tensor, part: DensePart, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Attention to a part of the contexts, and its log-sum-exps."""
        keys = cache.k.flatten(0, 2)[part.slots].to(q.dtype)  # [num_keys, rank + rope_dim]
        compressed, k_rope = keys.split([self.spec.rank, self.spec.rope_dim], dim=1)
        kv = F.linear(compressed, self._kv_up.flatten(0, 1)).unflatten(1, self._kv_up.shape[:2])
        return self._ops.mla_attend_dense(q[part.tokens], kv, k_rope, part.rows, self.spec)

    def _split(self, meta: BatchMeta) -> StepSplit:
        """Absorbed where that is less work, where lengths are not known, and for trees."""
        first = meta.num_decode_rows
        is_captured = meta.max_kv_len > meta.kv_lens_cpu.max(initial=0)
        if (
            first == meta.num_rows
            or is_captured
            or meta.tree_mask is not None
            or not self._dense_is_less(meta, first)
        ):
            return StepSplit(meta, ())
        heads, up, _ = self._kv_up.shape
        max_keys = DENSE_BYTES // (heads * up * self._kv_up.element_size())
        return StepSplit(
            first_rows(meta, first) if first else None,
            tuple(dense_parts(meta, first, max(max_keys, 1))),
        )

    def _dense_is_less(self, meta: BatchMeta, first: int) -> bool:
        """Whether it is less work for the rows from `first` on."""
        q_lens = np.diff(meta.qo_indptr_cpu[first:]).astype(np.int64)
        kv_lens = meta.kv_lens_cpu[first:].astype(np.int64)
        num_pairs = int((q_lens * kv_lens - q_lens * (q_lens - 1) // 2).sum())
        return dense_is_less(self._latent, num_pairs, int(q_lens.sum()), int(kv_lens.sum()))


def dense_is_less(latent: LatentConfig, num_pairs: int, num_new: int, num_keys: int) -> bool:
    """By multiplications of one head: for each pair of a new token and a key that it sees, and to
    project each new token's query and value (absorbed), or each key and value (dense).
    """
    absorbed = 2 * latent.kv_rank + latent.rope_dim
    dense = latent.nope_dim + latent.rope_dim + latent.value_dim
    up = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    return num_pairs * dense + num_keys * up < num_pairs * absorbed + num_new * up


def first_rows(meta: BatchMeta, num_rows: int) -> BatchMeta:
    """The decode rows of a batch, or some of them."""
    return replace(
        meta,
        num_rows=num_rows,
        num_tokens=num_rows,
        num_decode_rows=num_rows,
        qo_indptr=meta.qo_indptr[: num_rows + 1],
        kv_lens=meta.kv_lens[:num_rows],
        slots=meta.slots[:num_rows],
        positions=meta.positions[:num_rows],
        out_slots=meta.out_slots[:num_rows],
        qo_indptr_cpu=meta.qo_indptr_cpu[: num_rows + 1],
        kv_lens_cpu=meta.kv_lens_cpu[:num_rows],
        max_kv_len=int(meta.kv_lens_cpu[:num_rows].max()),
        shared=None,
        plans={},
    )


def dense_parts(meta: BatchMeta, first: int, max_keys: int) -> Iterator[DensePart]:
    """The contexts of the rows from `first` on, in parts of max_keys but for the last."""
    device = meta.kv_lens.device
    bounds = np.concatenate(([0], meta.kv_lens_cpu[first:].cumsum()))  # in all contexts' keys
    q_bounds = meta.qo_indptr_cpu[first:]
    for begin in range(0, int(bounds[-1]), max_keys):
        end = min(begin + max_keys, int(bounds[-1]))
        low = int(np.searchsorted(bounds, begin, side="right")) - 1
        high = int(np.searchsorted(bounds, end, side="left"))  # rows low to high - 1
        key_begins = np.maximum(begin - bounds[low:high], 0)
        counts = np.minimum(bounds[low + 1 : high + 1], end) - bounds[low:high] - key_begins
        q_lens = np.diff(q_bounds[low : high + 1])
        num_rows = high - low
        # Rows of this table begin at multiples of 16 bytes, which kernels are compiled for.
        described = np.zeros((4, -(-(num_rows + 1) // 4) * 4), np.int32)
        described[0, : num_rows + 1] = q_bounds[low : high + 1] - q_bounds[low]
        described[1, 1 : num_rows + 1] = counts.cumsum()
        described[2, :num_rows] = meta.kv_lens_cpu[first + low : first + high] - q_lens - key_begins
        described[3, :num_rows] = key_begins
        table = torch.from_numpy(described).to(device, non_blocking=True)  # waits for no step
        qo_indptr, kv_indptr = table[:2, : num_rows + 1].unbind()
        offsets, begins = table[2:, :num_rows].unbind()
        row = torch.repeat_interleave(kv_indptr.diff(), output_size=end - begin)
        position = torch.arange(end - begin, device=device) - kv_indptr[row] + begins[row]
        page = meta.block_table[meta.slots[first + low + row], position // meta.page_size]
        yield DensePart(
            slice(int(q_bounds[low]), int(q_bounds[high])),
            int(q_lens[0]) if key_begins[0] else 0,
            page.long() * meta.page_size + position % meta.page_size,
            DenseRows(qo_indptr, kv_indptr, offsets),
        )


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Fold the attention to more keys into out [n, num_heads, value_dim] and lse, in place."""
    total = torch.logaddexp(lse, more_lse)
    old, new = ((x - total).exp()[..., None] for x in (lse, more_lse))
    out.copy_(out * old + more * new)
    lse.copy_(total)
