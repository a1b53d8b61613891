"""The gated delta net in plain torch: its reference, and the parts that the CPU's version shares.

With S a head's state [key_dim, value_dim], g a token's logarithm of the decay and b its beta, a
token reads and writes (Yang et al. 2024, "Gated Delta Networks", eq. 10)

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  output S^T q.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .api import BatchMeta, DeltaNetSpec, LayerState

NORM_EPS = 1e-6  # of the norms of q and k

# (q and k [num_tokens, num_value_heads, key_dim], v [num_tokens, num_value_heads, value_dim],
# beta and log_decay [num_tokens, num_value_heads], state [num_value_heads, key_dim, value_dim])
# to the outputs, of v's shape, and the next state.
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Projected(NamedTuple):
    """What a layer's projections give, by kind, in the type that is computed in.

    Attributes:
        qkv: [num_tokens, channels] before the convolution: q of all heads, then k, then v.
        z: [num_tokens, num_value_heads, value_dim].
        beta, log_decay: [num_tokens, num_value_heads]; log_decay is at most 0.
    """

    qkv: Tensor
    z: Tensor
    beta: Tensor
    log_decay: Tensor


def split(qkvz: Tensor, ba: Tensor, spec: DeltaNetSpec) -> Projected:
    """Take the projections apart: beta = sigmoid(b), log_decay = decay * softplus(a + dt_bias)."""
    dtype = torch.promote_types(qkvz.dtype, torch.float32)
    qkvz, ba = qkvz.to(dtype), ba.to(dtype)
    values = spec.num_value_heads * spec.value_dim
    if spec.interleaved:
        group = spec.num_value_heads // spec.num_key_heads * spec.value_dim
        by_head = qkvz.unflatten(1, (spec.num_key_heads, -1))
        sizes = [spec.key_dim, spec.key_dim, group, group]
        q, k, v, z = (part.flatten(1) for part in by_head.split(sizes, dim=2))
        qkv = torch.cat((q, k, v), dim=1)
        b, a = (x.flatten(1) for x in ba.unflatten(1, (spec.num_key_heads, -1)).chunk(2, dim=2))
    else:
        qkv, z = qkvz.split([qkvz.shape[1] - values, values], dim=1)
        b, a = ba.chunk(2, dim=1)
    log_decay = spec.decay.to(dtype) * F.softplus(a + spec.dt_bias.to(dtype))
    z = z.unflatten(1, (spec.num_value_heads, spec.value_dim))
    return Projected(qkv, z, b.sigmoid(), log_decay)


def heads(convolved: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v by value head out of [num_tokens, channels]; q and k are normed, q is scaled."""
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = convolved.split([keys, keys, convolved.shape[1] - 2 * keys], dim=1)
    q, k = (x.unflatten(1, (spec.num_key_heads, spec.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    group = spec.num_value_heads // spec.num_key_heads
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * spec.key_dim**-0.5, k))
    return q, k, v.unflatten(1, (spec.num_value_heads, spec.value_dim))


def gated_norm(x: Tensor, z: Tensor, spec: DeltaNetSpec) -> Tensor:
    """rms_norm(x) * weight * silu(z) of heads [..., value_dim]."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
    return x * spec.norm.to(x.dtype) * F.silu(z)


def by_row(
    projected: Projected,
    meta: BatchMeta,
    first_row: int,
    state: LayerState,
    spec: DeltaNetSpec,
    scan: Scan,
    out: Tensor,
) -> None:
    """The rows from first_row on, one after the other, into out [num_tokens, heads, value_dim]."""
    weight = spec.conv.to(projected.qkv.dtype)
    width = weight.shape[1]
    for row in range(first_row, meta.num_rows):
        begin, end = int(meta.qo_indptr_cpu[row]), int(meta.qo_indptr_cpu[row + 1])
        q_len, kv_len = end - begin, int(meta.kv_lens_cpu[row])
        if q_len == 0 or kv_len == 0:
            continue
        conv, recurrent = (part[meta.slots[row].long()] for part in state)  # views
        if kv_len == q_len:
            conv.zero_()
            recurrent.zero_()
        own = Projected(*(part[begin:end] for part in projected))
        inputs = torch.cat((conv.T.to(own.qkv.dtype), own.qkv))
        conv.copy_(inputs[-(width - 1) :].T)
        convolved = F.conv1d(inputs.T[None], weight[:, None], groups=len(weight))[0].T
        given = (*heads(F.silu(convolved), spec), own.beta, own.log_decay)
        y, after = scan(*given, recurrent.to(own.qkv.dtype))
        recurrent.copy_(after)
        out[begin:end] = gated_norm(y, own.z, spec).to(out.dtype)


def scan_tokens(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after the other; see `Scan`."""
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state


def delta_net(
    qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
) -> Tensor:
    """See `Ops.delta_net`."""
    out = qkvz.new_zeros(len(qkvz), spec.num_value_heads, spec.value_dim)
    by_row(split(qkvz, ba, spec), meta, 0, state, spec, scan_tokens, out)
    return out.flatten(1)
