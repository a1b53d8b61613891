"""Decode: one new token a row, over paged contexts of any lengths.

Every context is cut into work items of about equal length. A one-block planning kernel lists
them on the device, once a step, so that the grid depends on the number of rows alone and a
captured CUDA graph serves any lengths. The query heads of a KV head share a tile. The last of a
row's items to finish merges the partial results (the log-sum-exp rule of FlashAttention).

Runs on: gpu.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import AttentionSpec, BatchMeta, LayerCache, SharedPrefixes
from .arch import Arch, current_arch
from .flash import (
    FALLBACK_TILE,
    POINTERS,
    Tile,
    attend_range,
    block_dim,
    cache_strides,
    finish,
    fit,
    for_keys,
    merge,
    merge_block,
    store_partial,
)
from .shared import attend_shared, num_shared_splits, shared_chunk

PLAN_KEY = "triton.decode"  # in BatchMeta.plans
# For head_dim 128 and two bytes an element; `fit` shrinks them for more.
DECODE_TILES = {
    "sm_80": Tile(16, 64, 4, 3),
    "sm_90": Tile(16, 64, 4, 3),
    "sm_100": Tile(16, 64, 4, 3),
    "gfx942": Tile(16, 64, 4, 1),
    "gfx950": Tile(16, 64, 4, 2),
}
# For many rows: two warps an item leave room for more items at once (64 x 256 tokens on an H200:
# 22 us, with four warps 26; one row of 256: 10 and 7).
WIDE_ROWS = 32
WIDE_TILES = {"sm_90": Tile(16, 32, 2, 3)}
ITEMS_PER_CORE = 8  # work items (x KV heads) that keep a multiprocessor busy
MIN_CHUNK = 256  # tokens; a shorter work item costs more to start and merge than it gains
CHUNK_ALIGN = 64  # tokens; a work item holds whole blocks of keys, but for the last of a row
PLAN_ROWS = (256, 1024)  # block sizes of the planning kernel; powers of two beyond
ITEM = tl.constexpr(8)  # int32 numbers of a work item: row, slot, start, end, first, count, -, -


@dataclass(slots=True)
class DecodePlan:
    """The work items of a decode step and the buffers that its layers use in turn."""

    work: Tensor  # int32 [capacity, ITEM]; row -1 marks an unused item
    counters: Tensor  # int32 [rows, num_kv_heads] finished items
    partial: Tensor  # float32 [capacity + rows * num_shared_splits, num_heads, head_dim]
    partial_lse: Tensor  # float32 [capacity + rows * num_shared_splits, num_heads], base 2
    shared: SharedPrefixes | None
    num_shared_splits: int


@triton.jit(do_not_specialize=["num_rows", "capacity", "max_items", "window", "min_tokens"])
def _plan_decode(
    kv_lens_ptr,
    slots_ptr,
    shared_lens_ptr,
    work_ptr,
    counters_ptr,
    num_rows,
    capacity,
    max_items,
    window,
    min_tokens,
    NUM_KV_HEADS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """List the work items of a decode step.

    A chunk of ceil(sum of lengths / max_items) tokens or more bounds their number by
    num_rows + max_items, whatever the lengths.
    """
    r = tl.arange(0, BLOCK_R)
    live = r < num_rows
    end = tl.load(kv_lens_ptr + r, mask=live, other=0)
    slot = tl.load(slots_ptr + r, mask=live, other=0)
    begin = tl.zeros([BLOCK_R], tl.int32)
    if HAS_SHARED:
        begin = tl.minimum(tl.load(shared_lens_ptr + r, mask=live, other=0), end)
    if window > 0:
        begin = tl.maximum(end - window, 0)
    tokens = end - begin
    chunk = tl.maximum(tl.cdiv(tl.sum(tokens, 0), max_items), min_tokens)
    # Even chunks within a row, in whole blocks.
    size = tl.cdiv(tokens, tl.maximum(tl.cdiv(tokens, chunk), 1))
    size = tl.maximum(tl.cdiv(size, ALIGN), 1) * ALIGN
    count = tl.cdiv(tokens, size)
    first = tl.cumsum(count, 0) - count
    for h in range(NUM_KV_HEADS):
        tl.store(counters_ptr + r * NUM_KV_HEADS + h, tl.zeros([BLOCK_R], tl.int32), mask=live)
    for i in range(0, tl.max(count, 0)):
        item = work_ptr + (first + i) * ITEM
        there = i < count
        tl.store(item, r, mask=there)
        tl.store(item + 1, slot, mask=there)
        tl.store(item + 2, begin + i * size, mask=there)
        tl.store(item + 3, tl.minimum(begin + (i + 1) * size, end), mask=there)
        tl.store(item + 4, first, mask=there)
        tl.store(item + 5, count, mask=there)
    for i0 in range(tl.sum(count, 0), capacity, BLOCK_R):
        tl.store(work_ptr + (i0 + r) * ITEM, -1 + tl.zeros([BLOCK_R], tl.int32),
                 mask=i0 + r < capacity)  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "num_shared_splits", "stride_table"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    partial_ptr,
    partial_lse_ptr,
    work_ptr,
    counters_ptr,
    shared_lens_ptr,
    table_ptr,
    capacity,
    num_shared_splits,
    scale,
    softcap,
    v_scale,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One work item of one KV head: [GROUP, HEAD_DIM] queries against a chunk of the context."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # One sector of memory says all; a chain of dependent loads would take as long as the work.
    row = tl.load(work_ptr + item * ITEM)
    slot = tl.load(work_ptr + item * ITEM + 1).to(tl.int64)
    start = tl.load(work_ptr + item * ITEM + 2)
    end = tl.load(work_ptr + item * ITEM + 3)
    first = tl.load(work_ptr + item * ITEM + 4)
    count = tl.load(work_ptr + item * ITEM + 5)
    if row < 0:
        return

    h = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    live = h < GROUP
    heads = kv_head * GROUP + h
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    q = tl.load(
        q_ptr + row.to(tl.int64) * stride_qt + heads[:, None] * stride_qh + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    q = for_keys(q, k_ptr.dtype.element_ty)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SHARED:
        if item == first:  # a row's first item goes on from what its shared prefix gave
            shared_len = tl.load(shared_lens_ptr + row)
            num_shared = tl.cdiv(shared_len, shared_chunk(shared_len, num_shared_splits))
            m, denominator, acc = merge(
                m, denominator, acc, partial_ptr, partial_lse_ptr,
                capacity + row * num_shared_splits, 1, num_shared,
                heads, live, NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SHARED,
            )  # fmt: skip
    m, denominator, acc = attend_range(
        q, m, denominator, acc,
        k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, table_ptr + slot * stride_table,
        0, 0, start, end, h, h, scale, softcap, stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, POINTERS,
        BOUNDED=True, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
        ALIGNED=ALIGNED,
    )  # fmt: skip

    row_head = row * NUM_HEADS + heads
    if count == 1:
        finish(
            m, denominator, acc, heads, live,
            out_ptr + row_head.to(tl.int64) * HEAD_DIM, lse_ptr + row_head, sinks_ptr, v_scale,
            HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
    else:
        at = item.to(tl.int64) * NUM_HEADS + heads
        store_partial(
            m, denominator, acc, at, live, partial_ptr, partial_lse_ptr, HEAD_DIM, BLOCK_D
        )  # fmt: skip
        # Every warp's stores come before the counter's release, and the last block's acquire
        # comes before its loads, which go past the L1 cache.
        tl.debug_barrier()
        counter_ptr = counters_ptr + row * NUM_KV_HEADS + kv_head
        finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if finished == count - 1:
            tl.debug_barrier()
            tl.store(counter_ptr, 0)  # ready for the next layer
            g = tl.arange(0, BLOCK_G)
            live_g = g < GROUP
            heads_g = kv_head * GROUP + g
            top = tl.full([BLOCK_G], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK_G], tl.float32)
            merged = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            top, weight, merged = merge(
                top, weight, merged, partial_ptr, partial_lse_ptr, first, 1, count,
                heads_g, live_g, NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_S,
            )  # fmt: skip
            row_head_g = row * NUM_HEADS + heads_g
            finish(
                top, weight, merged, heads_g, live_g,
                out_ptr + row_head_g.to(tl.int64) * HEAD_DIM, lse_ptr + row_head_g,
                sinks_ptr, v_scale, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
            )  # fmt: skip


def plan_decode(meta: BatchMeta, spec: AttentionSpec, rows: int, arch: Arch) -> DecodePlan:
    """The work items, made once a step for all layers of the same shape."""
    plans = meta.plans.setdefault(PLAN_KEY, {})
    key = (spec.window, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    if key in plans:
        return plans[key]
    device = meta.kv_lens.device
    shared = meta.shared if spec.window is None else None
    max_items = max(1, ITEMS_PER_CORE * arch.num_cores // spec.num_kv_heads)
    capacity = rows + max_items
    splits = 0 if shared is None else num_shared_splits(rows, spec, arch)
    size = capacity + rows * splits
    plan = DecodePlan(
        work=torch.empty(capacity, ITEM.value, dtype=torch.int32, device=device),
        counters=torch.empty(rows, spec.num_kv_heads, dtype=torch.int32, device=device),
        partial=torch.empty(size, spec.num_heads, spec.head_dim, device=device),
        partial_lse=torch.empty(size, spec.num_heads, device=device),
        shared=shared,
        num_shared_splits=splits,
    )
    _plan_decode[(1,)](
        meta.kv_lens,
        meta.slots,
        shared.row_lens if shared else meta.kv_lens,
        plan.work,
        plan.counters,
        rows,
        capacity,
        max_items,
        spec.window or 0,
        MIN_CHUNK,
        NUM_KV_HEADS=spec.num_kv_heads,
        ALIGN=CHUNK_ALIGN,
        BLOCK_R=next((n for n in PLAN_ROWS if n >= rows), triton.next_power_of_2(rows)),
        HAS_SHARED=shared is not None,
        num_warps=4,
    )
    plans[key] = plan
    return plan


def decode_rows(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    tile: Tile | None,
) -> None:
    """Attention of the first num_decode_rows rows; see `attention.attend`."""
    arch = current_arch()
    rows = meta.num_decode_rows
    tiles = WIDE_TILES if rows >= WIDE_ROWS and arch.name in WIDE_TILES else DECODE_TILES
    tile = tile or fit(tiles.get(arch.name, FALLBACK_TILE), q, cache)
    plan = plan_decode(meta, spec, rows, arch)
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(tile.queries, triton.next_power_of_2(group))
    shared = plan.shared
    capacity = len(plan.work)
    if shared is not None:
        attend_shared(
            q, meta, cache, spec, shared, plan.partial, plan.partial_lse, capacity,
            plan.num_shared_splits, arch,
        )  # fmt: skip
    _decode[(spec.num_kv_heads, capacity)](
        q,
        cache.k,
        cache.v,
        out,
        lse if lse is not None else plan.partial_lse,
        spec.sinks if spec.sinks is not None else plan.partial_lse,
        plan.partial,
        plan.partial_lse,
        plan.work,
        plan.counters,
        shared.row_lens if shared is not None else meta.kv_lens,
        meta.block_table,
        capacity,
        plan.num_shared_splits,
        spec.scale * spec.k_scale,
        spec.softcap or 0.0,
        spec.v_scale,
        *q.stride()[:2],
        *cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_dim(spec.head_dim),
        BLOCK_M=block_m,
        BLOCK_N=tile.keys,
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_S=merge_block(group, spec.head_dim, tile.num_warps),
        BLOCK_SHARED=merge_block(block_m, spec.head_dim, tile.num_warps),
        PAGE_SIZE=meta.page_size,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.sinks is not None,
        HAS_LSE=lse is not None,
        HAS_SHARED=shared is not None,
        ALIGNED=spec.window is None and CHUNK_ALIGN % tile.keys == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
