"""Checks of the optional ops: whole layers, experts with what surrounds them, copies of pages.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..api import LayerWeights
from .cases import (
    ORACLE,
    TOLERANCE,
    AttentionCase,
    make_rope,
    moved,
    oracle_inputs,
    random_experts,
)
from .target import Check, Target, compare, randn, same, up

LAYER = AttentionCase("layer", [(1, 40), (30, 50)], 16, 4, 2, 32)
HIDDEN, INNER = 96, 160
PAGE_BYTES = (4096, 65536, 48)  # of three pools: less than a block, several, very few
OFFSETS = (128, 128 + 4096, 128 + 4096 + 65536)
RECORD_BYTES = 256 * 280


def decoder_layer(t: Target, dtype: torch.dtype, has_input: bool) -> float:
    """A whole layer, with the residual in the type that the provider asks for."""
    inputs, seeds = t.attention(LAYER, dtype), iter(range(1, 20))
    oracle = oracle_inputs(inputs)

    def matrix(num_out: int, num_in: int) -> Tensor:
        return randn(num_out, num_in, seed=next(seeds), dtype=dtype, device=t.device) / num_in**0.5

    heads = LAYER.num_heads + 2 * LAYER.num_kv_heads
    shapes = {
        "qkv": (heads * LAYER.head_dim, HIDDEN),
        "out": (HIDDEN, LAYER.num_heads * LAYER.head_dim),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    matrices = {name: matrix(*shape) for name, shape in shapes.items()}
    norms = [randn(HIDDEN, seed=next(seeds), dtype=dtype, device=t.device) for _ in "ab"]

    def weights(linears: dict[str, Any], norms: list[Tensor], device: Any) -> LayerWeights:
        rope = make_rope(LAYER.head_dim)
        return LayerWeights(
            spec=inputs.spec,
            rope=rope.__class__(rope.cos_sin.to(device), rope.rotary_dim),
            eps=1e-6,
            activation="silu",
            input_norm=norms[0],
            q_norm=None,
            k_norm=None,
            attention_out_norm=None,
            mlp_norm=norms[1],
            mlp_out_norm=None,
            **linears,
        )

    num_tokens = inputs.meta.num_tokens
    wide = torch.float32 if t.has_float32_residual else dtype
    residual = randn(num_tokens, HIDDEN, seed=30, dtype=wide, device=t.device)
    x = randn(num_tokens, HIDDEN, seed=31, dtype=dtype, device=t.device) if has_input else None
    want_residual = up(residual)
    known = {name: (up(matrix), None) for name, matrix in matrices.items()}
    of_oracle = weights(known, [up(norm) for norm in norms], "cpu")
    want = ORACLE.decoder_layer(up(x), want_residual, of_oracle, oracle.meta, oracle.cache)
    packed = {name: t.op("pack_linear")(matrix, None) for name, matrix in matrices.items()}
    cache = t.kept(inputs.cache)
    of_provider = weights(packed, norms, t.device)
    got = t.op("decoder_layer")(x, residual, of_provider, inputs.meta, cache)
    worst = compare(got, want, dtype, scale=8)
    worst = max(worst, compare(residual.to(dtype), want_residual, dtype, scale=8))
    for pool, want_pool in zip(t.nhd(cache), oracle.cache, strict=True):
        worst = max(worst, compare(pool, want_pool, dtype, scale=8))
    return worst


def norm_experts_add(t: Target, dtype: torch.dtype, num_tokens: int) -> float:
    num_experts, top_k, hidden, inner = 4, 2, 64, 32
    weights = random_experts(num_experts, hidden, inner, "silu", True)
    packed = t.op("pack_experts")(moved(weights, t.device, dtype))
    known = ORACLE.pack_experts(moved(moved(weights, "cpu", dtype), "cpu", torch.float64))
    values, ids = randn(num_tokens, num_experts, seed=1).softmax(-1).topk(top_k)
    residual = randn(num_tokens, hidden, seed=2, dtype=dtype, device=t.device)
    norm = randn(hidden, seed=3, dtype=dtype, device=t.device)
    want = up(residual)
    ORACLE.norm_experts_add(want, up(norm), 1e-2, ids.int(), values.double(), known)
    pairs = ids.int().to(t.device), values.to(t.device)
    t.op("norm_experts_add")(residual, norm, 1e-2, *pairs, packed)
    return compare(residual, want, dtype, scale=8)


def copy_pages(t: Target, to_pool: bool) -> float:
    """Pages of three pools to records, or back; bit by bit."""
    gen = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8).to(t.device)

    pools, records = [noise(9, size) for size in PAGE_BYTES], noise(7, RECORD_BYTES)
    pages = torch.tensor([8, 0, 3], dtype=torch.int32, device=t.device)
    rows = torch.tensor([1, 6, 2], dtype=torch.int32, device=t.device)
    want_pools, want_records = [pool.clone() for pool in pools], records.clone()
    for pool, want, offset in zip(pools, want_pools, OFFSETS, strict=True):
        span = slice(offset, offset + pool.shape[1])
        if to_pool:
            want[pages.long()] = records[rows.long(), span]
        else:
            want_records[rows.long(), span] = pool[pages.long()]
    table = [[p.data_ptr(), p.shape[1], o] for p, o in zip(pools, OFFSETS, strict=True)]
    t.op("copy_pages")(
        torch.tensor(table, dtype=torch.int64, device=t.device),
        max(PAGE_BYTES),
        pages,
        records.data_ptr(),
        RECORD_BYTES,
        rows,
        to_pool=to_pool,
        is_host=False,
    )
    for pool, want in zip(pools, want_pools, strict=True):
        same(pool, want, "a pool")
    return same(records, want_records, "a record")


def fused_checks() -> Iterator[Check]:
    """In 16 bits and float32."""
    for dtype, has_input in product(TOLERANCE, (True, False)):
        name = f"{'next' if has_input else 'first'}-{str(dtype).removeprefix('torch.')}"
        run = partial(decoder_layer, dtype=dtype, has_input=has_input)
        yield Check(("decoder_layer", "pack_linear"), name, run)
    for dtype, num_tokens in product(TOLERANCE, (1, 9)):
        name = f"{num_tokens}-{str(dtype).removeprefix('torch.')}"
        run_experts = partial(norm_experts_add, dtype=dtype, num_tokens=num_tokens)
        yield Check(("norm_experts_add", "pack_experts"), name, run_experts)
    for to_pool in (False, True):
        run_copies = partial(copy_pages, to_pool=to_pool)
        yield Check(("copy_pages",), "load" if to_pool else "save", run_copies)
