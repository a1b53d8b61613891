"""The KV pool's tensors, one pair a layer.

Runs on: gpu.
"""

import torch

from ...backends.api import LayerCache

KVSpec = list[tuple[int, int]]  # a layer's (num_kv_heads, head_dim)


def bytes_per_token(kv_spec: KVSpec, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return sum(2 * heads * dim for heads, dim in kv_spec) * dtype.itemsize


def allocate(
    kv_spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Zeroed pools [num_pages, page_size, num_kv_heads, head_dim]: some kernels read page tails."""
    return [
        LayerCache(
            *(
                torch.zeros(num_pages, page_size, heads, dim, dtype=dtype, device=device)
                for _ in "kv"
            )
        )
        for heads, dim in kv_spec
    ]
