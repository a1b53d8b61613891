"""Paged attention for decode, extend (prefill with a cached prefix), verification and mixtures.

The first rows of a batch have one new token each and go to `decode`, the others to `extend`.

Runs on: gpu.
"""

import torch
from torch import Tensor

from ..api import AttentionSpec, BatchMeta, LayerCache
from .decode import decode_rows
from .extend import extend_rows
from .flash import Tile


def attend(
    q: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    *,
    lse: Tensor | None = None,
    decode_tile: Tile | None = None,
    extend_tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of the new tokens over their contexts, all of which lie in the pages.

    Args:
        q: [num_tokens, num_heads, head_dim]; the last dimension is dense.
        lse: float32 [num_tokens, num_heads], filled with each query's log-sum-exp (natural,
            without the sink) where given, for merging.
        decode_tile, extend_tile, splits: to use instead of the tables' (for tuning).

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    assert q.stride(2) == 1
    out = torch.empty(q.shape[0], spec.num_heads * spec.head_dim, dtype=q.dtype, device=q.device)
    num_decode = meta.num_decode_rows if meta.tree_mask is None else 0
    if num_decode:
        decode_rows(q, out, lse, meta, cache, spec, decode_tile)
    if meta.num_rows > num_decode:
        extend_rows(q, out, lse, meta, cache, spec, num_decode, extend_tile, splits)
    return out
