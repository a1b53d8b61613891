"""The tensors that outlive a step: a KV pool for each layer with attention, states for others.

Runs on: gpu.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...backends.api import LayerCache, LayerState

# A layer's (num_kv_heads, key_dim, value_dim); with latent attention the value is part of the key,
# and has no dimension of its own.
KVSpec = list[tuple[int, int, int]]
# Layers with a recurrent state, by number: the shapes of LayerState's conv and recurrent, of a row.
StateSpec = Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]


def bytes_per_token(kv_spec: KVSpec, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return sum(heads * (key + value) for heads, key, value in kv_spec) * dtype.itemsize


def allocate(
    kv_spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Zeroed pools [num_pages, page_size, num_kv_heads, head_dim]: some kernels read page tails."""

    def zeros(heads: int, dim: int) -> Tensor:
        shape = (num_pages, page_size, heads, dim)
        if device.type != "cpu" or not dim:
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy's zeros take no memory before they are written to; torch's are written at once.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

    return [LayerCache(zeros(heads, key), zeros(heads, value)) for heads, key, value in kv_spec]


def bytes_per_state(state_spec: StateSpec, dtype: torch.dtype) -> int:
    """Bytes that the state of one request takes over all layers."""
    return sum(
        math.prod(conv) * dtype.itemsize + math.prod(recurrent) * 4
        for conv, recurrent in state_spec.values()
    )


def with_states(
    pools: list[LayerCache],
    state_spec: StateSpec,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache | LayerState]:
    """What each layer keeps, in the order of the layers: the pools, and zeroed states between.

    Args:
        num_rows: of each state, request slots and snapshots together.
    """
    caches: list[LayerCache | LayerState] = list(pools)
    for layer, (conv, recurrent) in sorted(state_spec.items()):
        state = LayerState(
            torch.zeros(num_rows, *conv, dtype=dtype, device=device),
            torch.zeros(num_rows, *recurrent, dtype=torch.float32, device=device),
        )
        caches.insert(layer, state)
    return caches
