"""Tiny calls of a provider's ops, so that what a library compiles at first use is compiled early.

Experts and quantized weights warm up where they are packed: only there their shapes are known.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..api import AttentionSpec, LayerCache

if importlib.util.find_spec("triton") is not None:
    from ..triton.warm import tiny_batch

SIZE = 1024  # of the vectors that are normed and gated
ROWS = 4
Q_LENS = (1, 64, 300)  # decode, a short extend, a long one: libraries have kernels for each


def op_steps(
    ops: Any,
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> list[Callable[[], object]]:
    """Calls of norms, gates and attention."""
    x = torch.zeros(ROWS, SIZE, dtype=dtype, device=device)
    weight = torch.zeros(SIZE, dtype=dtype, device=device)
    steps: list[Callable[[], object]] = [
        partial(ops.rms_norm, x, weight, 1e-6),
        partial(ops.add_rms_norm, x, x.clone(), weight, 1e-6),
        partial(ops.silu_and_mul, x),
        partial(ops.gelu_and_mul, x),
    ]
    for spec in specs:
        shape = (1, page_size, spec.num_kv_heads, spec.head_dim)
        k = torch.zeros(shape, dtype=spec.kv_dtype or dtype, device=device)
        for q_len in Q_LENS:
            meta = tiny_batch(ROWS, q_len, page_size, device, is_shared=False)
            size = (meta.num_tokens, spec.num_heads, spec.head_dim)
            q = torch.zeros(size, dtype=dtype, device=device)
            steps.append(partial(ops.attend, q, meta, LayerCache(k, k), spec))
    return steps
