"""A prefix that several decode rows share is read once, for the query heads of many rows.

Runs on: gpu.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..api import SHARED_TILE_ROWS, AttentionSpec, BatchMeta, LayerCache, SharedPrefixes
from .arch import Arch
from .flash import (
    FALLBACK_TILE,
    POINTERS,
    Tile,
    attend_range,
    block_dim,
    cache_strides,
    fit,
    for_keys,
    store_partial,
)

SHARED_TILES = {
    "sm_80": Tile(64, 64, 4, 3),
    "sm_90": Tile(64, 64, 4, 4),
    "sm_100": Tile(64, 64, 4, 3),
    "gfx942": Tile(64, 32, 4, 1),
    "gfx950": Tile(64, 64, 4, 2),
}
SHARED_QUERIES = 64  # (rows x heads) of a program, at most where a row has no more
MIN_SHARED_CHUNK = tl.constexpr(128)
PROGRAMS_PER_CORE = 1  # each split more is a partial result more to merge
MAX_SPLITS = 16


def rows_per_program(group: int) -> int:
    """How many rows of a tile a program takes, for a group of query heads: a power of two."""
    return min(SHARED_TILE_ROWS, 1 << max(1, SHARED_QUERIES // group).bit_length() - 1)


def num_shared_splits(num_rows: int, spec: AttentionSpec, arch: Arch) -> int:
    """Into how many chunks a prefix is cut at most; it depends on sizes alone."""
    rows = rows_per_program(spec.num_heads // spec.num_kv_heads)
    programs = -(-num_rows // rows) * spec.num_kv_heads
    return min(MAX_SPLITS, max(1, PROGRAMS_PER_CORE * arch.num_cores // programs))


@triton.jit
def shared_chunk(length, num_splits):
    """Tokens of a prefix that one block reads."""
    chunk = tl.cdiv(tl.cdiv(length, num_splits), MIN_SHARED_CHUNK)
    return tl.maximum(chunk, 1) * MIN_SHARED_CHUNK


@triton.jit(do_not_specialize=["first_partial", "num_splits", "stride_table"])
def _shared_prefix(
    q_ptr,
    k_ptr,
    v_ptr,
    partial_ptr,
    partial_lse_ptr,
    tile_rows_ptr,
    tile_lens_ptr,
    slots_ptr,
    table_ptr,
    first_partial,
    num_splits,
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One chunk of a shared prefix for [ROWS x GROUP] queries of one KV head: a part of a tile.

    Row r's partial result of split s is number first_partial + r * num_splits + s.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    split = tl.program_id(2)
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    shared_len = tl.load(tile_lens_ptr + tile)
    leader = tl.load(tile_rows_ptr + tile * (PARTS * ROWS))
    rows_ptr = tile_rows_ptr + (tile * PARTS + part) * ROWS
    rows = tl.load(rows_ptr + i // GROUP, mask=i < ROWS * GROUP, other=-1)
    chunk = shared_chunk(shared_len, num_splits)
    start = split * chunk
    if (start >= shared_len) | (tl.max(rows, 0) < 0):
        return
    end = tl.minimum(start + chunk, shared_len)
    live = rows >= 0
    heads = kv_head * GROUP + i % GROUP
    slot = tl.load(slots_ptr + leader).to(tl.int64)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    q = tl.load(
        q_ptr + rows.to(tl.int64)[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    q = for_keys(q, k_ptr.dtype.element_ty)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m, denominator, acc = attend_range(
        q, m, denominator, acc,
        k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, table_ptr + slot * stride_table,
        0, 0, start, end, i, i, scale, softcap, stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, POINTERS,
        BOUNDED=True, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
    )  # fmt: skip
    at = (first_partial + rows * num_splits + split).to(tl.int64) * NUM_HEADS + heads
    store_partial(
        m, denominator, acc, at, live, partial_ptr, partial_lse_ptr, HEAD_DIM, BLOCK_D
    )  # fmt: skip


def attend_shared(
    q: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    shared: SharedPrefixes,
    partial: Tensor,
    partial_lse: Tensor,
    first_partial: int,
    num_splits: int,
    arch: Arch,
) -> None:
    """Partial results of the shared prefixes, for `_decode` to merge."""
    tile = fit(SHARED_TILES.get(arch.name, FALLBACK_TILE), q, cache)
    group = spec.num_heads // spec.num_kv_heads
    rows = rows_per_program(group)
    parts = SHARED_TILE_ROWS // rows
    _shared_prefix[(spec.num_kv_heads, len(shared.tile_lens) * parts, num_splits)](
        q,
        cache.k,
        cache.v,
        partial,
        partial_lse,
        shared.tile_rows,
        shared.tile_lens,
        meta.slots,
        meta.block_table,
        first_partial,
        num_splits,
        spec.scale * spec.k_scale,
        spec.softcap or 0.0,
        *q.stride()[:2],
        *cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        ROWS=rows,
        PARTS=parts,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_dim(spec.head_dim),
        BLOCK_M=max(16, triton.next_power_of_2(rows * group)),
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        HAS_SOFTCAP=spec.softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
