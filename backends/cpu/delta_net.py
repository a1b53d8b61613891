"""The gated delta net on the CPU: states of decode rows changed in place, longer rows in chunks.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..delta_net import Projected, by_row, gated_norm, heads, split

if TYPE_CHECKING:
    from ..api import BatchMeta, DeltaNetSpec, LayerState

CHUNK = 64  # tokens


def delta_net(
    qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
) -> Tensor:
    """See `Ops.delta_net`."""
    projected, num_decodes = split(qkvz, ba, spec), meta.num_decode_rows
    out = qkvz.new_empty(len(qkvz), spec.num_value_heads, spec.value_dim)
    if num_decodes:
        first = Projected(*(part[:num_decodes] for part in projected))
        out[:num_decodes] = _decode(first, meta, state, spec).to(out.dtype)
    by_row(projected, meta, num_decodes, state, spec, _scan_chunks, out)
    return out.flatten(1)


def _decode(projected: Projected, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec) -> Tensor:
    """One token of each row: [rows, num_value_heads, value_dim]."""
    x, z, beta, log_decay = projected
    slots, kv_lens = (t[: len(x)] for t in (meta.slots, meta.kv_lens))
    begins = slots[kv_lens == 1].long()
    if len(begins):
        state.conv[begins], state.recurrent[begins] = 0, 0
    slots = slots.long()
    inputs = torch.cat((state.conv[slots].to(x.dtype), x[:, :, None]), dim=2)
    state.conv[slots] = inputs[:, :, 1:].to(state.conv.dtype)
    q, k, v = (t[:, :, None] for t in heads(F.silu((inputs * spec.conv.to(x.dtype)).sum(2)), spec))
    beta, decay = beta[:, :, None, None], log_decay.exp_()[:, :, None, None]
    y = torch.empty_like(v)
    # States are changed where they lie: to gather and scatter them takes more than the rest.
    for row, slot in enumerate(slots.tolist()):
        memory = state.recurrent[slot].mul_(decay[row])
        added = torch.baddbmm(v[row], k[row], memory, alpha=-1).mul_(beta[row])
        memory.baddbmm_(k[row].transpose(1, 2), added)
        torch.bmm(q[row], memory, out=y[row])
    return gated_norm(y[:, :, 0], z, spec)


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunk after chunk; formulas and names are those of `triton/delta_net.py`."""
    num_tokens = len(q)
    padding = -num_tokens % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[num_tokens, heads, ...] to [heads, chunks, CHUNK, ...], with zeros behind."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
        return x.transpose(0, 1).unflatten(1, (-1, CHUNK))

    q, k, v = chunks(q), chunks(k), chunks(v)
    b, g = chunks(beta[..., None]), chunks(log_decay[..., None]).cumsum(2)
    decay = g.exp()
    ratio = (g - g.transpose(2, 3)).clamp_(max=0).exp_()
    a = (k @ k.transpose(2, 3) * ratio * b).tril_(-1)
    # (I + A)^-1 of both sides of V - exp(G) K S at once; only the state is missing.
    both = torch.cat((v, k * decay), dim=3) * b
    both = torch.linalg.solve_triangular(a, both, upper=False, unitriangular=True)
    of_values, of_keys = both.split([v.shape[3], k.shape[3]], dim=3)
    p = (q @ k.transpose(2, 3)).mul_(ratio).tril_()
    queries, kept = q * decay, k * (g[:, :, -1:] - g).exp()
    last = decay[:, :, -1:]
    out = torch.empty_like(v)
    for n in range(v.shape[1]):
        added = torch.baddbmm(of_values[:, n], of_keys[:, n], state, alpha=-1)
        torch.baddbmm(queries[:, n] @ state, p[:, n], added, out=out[:, n])
        state = torch.baddbmm(state * last[:, n], kept[:, n].transpose(1, 2), added)
    return out.flatten(1, 2)[:, :num_tokens].transpose(0, 1), state
