"""The KV pool's tensors, one pair a layer.

Runs on: gpu.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ...backends.api import LayerCache

KVSpec = list[tuple[int, int]]  # a layer's (num_kv_heads, head_dim)


def bytes_per_token(kv_spec: KVSpec, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return sum(2 * heads * dim for heads, dim in kv_spec) * dtype.itemsize


def allocate(
    kv_spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Zeroed pools [num_pages, page_size, num_kv_heads, head_dim]: some kernels read page tails."""

    def zeros(heads: int, dim: int) -> Tensor:
        shape = (num_pages, page_size, heads, dim)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy's zeros take no memory before they are written to; torch's are written at once.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

    return [LayerCache(zeros(heads, dim), zeros(heads, dim)) for heads, dim in kv_spec]
