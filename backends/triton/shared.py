"""A prefix that several decode rows share is read once, for the query heads of many rows.

Runs on: gpu.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import AttentionSpec, BatchMeta, LayerCache
from .arch import Arch
from .flash import (
    FALLBACK_TILE,
    POINTERS,
    Tile,
    attend_range,
    block_dim,
    cache_strides,
    fit,
    store_partial,
)

SHARED_KEY = "triton.shared"  # in BatchMeta.plans; a runner that captures graphs puts it there
SHARED_TILES = {
    "sm_80": Tile(64, 64, 4, 3),
    "sm_90": Tile(64, 64, 4, 3),
    "sm_100": Tile(64, 64, 4, 3),
    "gfx942": Tile(64, 32, 4, 1),
    "gfx950": Tile(64, 64, 4, 2),
}
SHARED_QUERIES = 64  # (rows x heads) of a tile
MIN_SHARED_CHUNK = tl.constexpr(128)
PROGRAMS_PER_CORE = 2
MAX_SPLITS = 16


@dataclass(slots=True)
class SharedPrefixes:
    """Shared prefixes of decode rows, on the device (int32), in tiles of one group's rows.

    Attributes:
        tile_rows: [num_tiles, rows_per_tile] row numbers, -1 where there is none.
        tile_lens: [num_tiles] tokens that the tile's rows share; 0 for an unused tile.
        row_lens: [rows] tokens of each row's context that its tile covers.
    """

    tile_rows: Tensor
    tile_lens: Tensor
    row_lens: Tensor

    def num_splits(self, spec: AttentionSpec, arch: Arch) -> int:
        """Into how many chunks a prefix is cut at most; it depends on sizes alone."""
        programs = len(self.tile_lens) * spec.num_kv_heads
        return min(MAX_SPLITS, max(1, PROGRAMS_PER_CORE * arch.num_cores // programs))


def rows_per_shared_tile(spec: AttentionSpec) -> int:
    """How many rows fit in one tile of the shared-prefix pass."""
    return max(1, SHARED_QUERIES // (spec.num_heads // spec.num_kv_heads))


def tile_shared_groups(
    groups: list[tuple[np.ndarray, int]], num_rows: int, rows_per_tile: int, num_tiles: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The int32 arrays of SharedPrefixes on the host; num_tiles bounds them (zeros fill up).

    A group whose tiles no longer fit is left out, which is slower and still right.
    """
    tile_rows = np.full((num_tiles, rows_per_tile), -1, np.int32)
    tile_lens = np.zeros(num_tiles, np.int32)
    row_lens = np.zeros(num_rows, np.int32)
    used = 0
    for rows, length in groups:
        needed = -(-len(rows) // rows_per_tile)
        if used + needed > num_tiles:
            continue
        padded = np.full(needed * rows_per_tile, -1, np.int32)
        padded[: len(rows)] = rows
        tile_rows[used : used + needed] = padded.reshape(needed, rows_per_tile)
        tile_lens[used : used + needed] = length
        row_lens[rows] = length
        used += needed
    return tile_rows, tile_lens, row_lens


def shared_prefixes(meta: BatchMeta, spec: AttentionSpec) -> SharedPrefixes | None:
    """What the step's rows share, once a step; None where nothing or the layer has a window."""
    if spec.window is not None:
        return None
    if SHARED_KEY not in meta.plans and meta.shared_groups:
        per_tile = rows_per_shared_tile(spec)
        num_tiles = sum(-(-len(rows) // per_tile) for rows, _ in meta.shared_groups)
        arrays = tile_shared_groups(meta.shared_groups, meta.num_rows, per_tile, num_tiles)
        device = meta.kv_lens.device
        meta.plans[SHARED_KEY] = SharedPrefixes(
            *(torch.from_numpy(a).to(device, non_blocking=True) for a in arrays)
        )
    return meta.plans.get(SHARED_KEY)


@triton.jit
def shared_chunk(length, num_splits):
    """Tokens of a prefix that one block reads."""
    chunk = tl.cdiv(tl.cdiv(length, num_splits), MIN_SHARED_CHUNK)
    return tl.maximum(chunk, 1) * MIN_SHARED_CHUNK


@triton.jit(do_not_specialize=["first_partial", "num_splits"])
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One chunk of a shared prefix for [ROWS x GROUP] queries of one KV head.

    Row r's partial result of split s is number first_partial + r * num_splits + s.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    shared_len = tl.load(tile_lens_ptr + tile)
    rows = tl.load(tile_rows_ptr + tile * ROWS + i // GROUP, mask=i < ROWS * GROUP, other=-1)
    leader = tl.load(tile_rows_ptr + tile * ROWS)
    chunk = shared_chunk(shared_len, num_splits)
    start = split * chunk
    if start >= shared_len:
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
    k_scale: float,
    arch: Arch,
) -> None:
    """Partial results of the shared prefixes, for `_decode` to merge."""
    tile = fit(SHARED_TILES.get(arch.name, FALLBACK_TILE), q, cache)
    group = spec.num_heads // spec.num_kv_heads
    num_tiles, rows_per_tile = shared.tile_rows.shape
    _shared_prefix[(spec.num_kv_heads, num_tiles, num_splits)](
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
        spec.scale * k_scale,
        spec.softcap or 0.0,
        *q.stride()[:2],
        *cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        ROWS=rows_per_tile,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_dim(spec.head_dim),
        BLOCK_M=max(16, triton.next_power_of_2(rows_per_tile * group)),
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        HAS_SOFTCAP=spec.softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
