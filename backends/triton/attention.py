"""Paged attention for decode, extend (prefill with a cached prefix), verification and mixtures.

Decode splits every context into work items of about equal length. A one-block planning kernel
lists them on the device, once a step, so that the grid depends on the number of rows alone and a
captured CUDA graph serves any lengths. The query heads of a KV head share a tile. The last of a
row's items to finish merges the partial results (the log-sum-exp rule of FlashAttention).

A prefix shared by several decode rows is read once: a tile holds the heads of many rows, and its
partial results join the merge of each row.

Extend tiles hold (new tokens x query heads of one KV head); a tile finds its row by bisection of
qo_indptr, so that its grid too depends on sizes alone.

Runs on: gpu.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import AttentionSpec, BatchMeta, LayerCache
from .arch import Arch, current_arch

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
PLAN_KEY = "triton"  # in BatchMeta.plans
SHARED_KEY = "triton.shared"  # in BatchMeta.plans; a runner that captures graphs puts it there
SHARED_TILE = 64  # (rows x heads) of a tile in the shared-prefix pass
MERGE_BLOCK = 16  # partial results merged at once


class Tile(NamedTuple):
    """Block sizes of an attention kernel: queries, keys, warps, software-pipelining depth."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# For head_dim 128 and two bytes an element; `_fit` shrinks them for more.
DECODE_TILES = {
    "sm_80": Tile(16, 64, 4, 3),
    "sm_90": Tile(16, 64, 4, 3),
    "sm_100": Tile(16, 64, 4, 3),
    "gfx942": Tile(16, 64, 4, 1),
    "gfx950": Tile(16, 64, 4, 2),
}
EXTEND_TILES = {
    "sm_80": Tile(128, 64, 8, 3),
    "sm_90": Tile(128, 128, 8, 2),
    "sm_100": Tile(128, 64, 8, 3),
    "gfx942": Tile(128, 32, 4, 1),
    "gfx950": Tile(128, 64, 4, 2),
}
FALLBACK_TILE = Tile(16, 32, 4, 1)
DECODE_ITEMS_PER_CORE = 8  # work items (x KV heads) that keep a multiprocessor busy
MIN_CHUNK = 128  # tokens; a shorter work item costs more to start and merge than it gains


def _fit(tile: Tile, q: Tensor, cache: LayerCache) -> Tile:
    """Shrink a tile for rows of more than 256 bytes, and for float32, which has no tensor cores."""
    row_bytes = triton.next_power_of_2(q.shape[-1]) * max(q.element_size(), cache.k.element_size())
    shrink = max(1, row_bytes // 256)
    if q.dtype == torch.float32:
        return Tile(min(tile.queries, 32), 32, 4, 1)
    queries = tile.queries if row_bytes <= 256 else min(tile.queries, 64)
    return tile._replace(queries=queries, keys=max(16, tile.keys // shrink))


@triton.jit
def _attend_range(
    q,
    m,
    denominator,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    end,
    positions,
    mask_ptr,
    scale,
    softcap,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Fold the tokens [start, end) of a context into a running softmax (base 2).

    BOUNDED: end - start need not be a multiple of BLOCK_N. k_ptr and v_ptr point to the KV head,
    mask_ptr [BLOCK_M] to the tree mask's rows. Masked slots are never multiplied, so what lies in
    unused slots (NaN included) does not matter.
    """
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + n
        if PAGE_SIZE % BLOCK_N == 0 and not BOUNDED:
            page = tl.load(table_ptr + t0 // PAGE_SIZE).to(tl.int64)
            k_rows = page * stride_kp + (t0 % PAGE_SIZE + n) * stride_kt
            v_rows = page * stride_vp + (t0 % PAGE_SIZE + n) * stride_vt
        else:
            if BOUNDED:
                pages = tl.load(table_ptr + t // PAGE_SIZE, mask=t < end, other=0).to(tl.int64)
            else:
                pages = tl.load(table_ptr + t // PAGE_SIZE).to(tl.int64)
            k_rows = pages * stride_kp + (t % PAGE_SIZE) * stride_kt
            v_rows = pages * stride_vp + (t % PAGE_SIZE) * stride_vt
        k_ptrs = k_ptr + k_rows[:, None] + d[None, :]
        v_ptrs = v_ptr + v_rows[:, None] + d[None, :]
        if BOUNDED or HEAD_DIM != BLOCK_D:
            live = (t < end)[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_ptrs, mask=live, other=0.0)
        else:
            k = tl.load(k_ptrs)
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            e = tl.exp2(logits * (2 * LOG2_E / softcap))
            logits = softcap * (1 - 2 / (e + 1))
        logits *= LOG2_E
        if BOUNDED:
            logits = tl.where((t < end)[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(t[None, :] <= positions[:, None], logits, float("-inf"))
        if WINDOW > 0:
            logits = tl.where(t[None, :] > positions[:, None] - WINDOW, logits, float("-inf"))
        if HAS_TREE:
            seen = tl.load(mask_ptr[:, None] + t[None, :], mask=(t < end)[None, :], other=0)
            logits = tl.where(seen != 0, logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(logits, 1))
        if CAUSAL or WINDOW > 0 or HAS_TREE:  # a tile may hold nothing for some query
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_safe = m_new
        alpha = tl.exp2(m - m_safe)
        p = tl.exp2(logits - m_safe[:, None])
        denominator = denominator * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if BOUNDED or HEAD_DIM != BLOCK_D:
            v = tl.load(v_ptrs, mask=live, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new
    return m, denominator, acc


@triton.jit
def _finish(
    m,
    denominator,
    acc,
    heads,
    live,
    out_ptrs,
    lse_ptrs,
    sinks_ptr,
    v_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Divide by the softmax's denominator and store; lse is natural and leaves the sink out."""
    if HAS_LSE:
        tl.store(lse_ptrs, (m + tl.log2(denominator)) * LN_2, mask=live)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(m, sinks)
        rescale = tl.exp2(m - top)
        denominator = denominator * rescale + tl.exp2(sinks - top)
        acc = acc * rescale[:, None]
    denominator = tl.where(denominator > 0, denominator, 1.0)
    out = acc * (v_scale / denominator)[:, None]
    d = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptrs[:, None] + d[None, :],
        out.to(out_ptrs.dtype.element_ty),
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "capacity", "max_items"])
def _plan_decode(
    kv_lens_ptr,
    shared_lens_ptr,
    work_ptr,
    work_indptr_ptr,
    counters_ptr,
    num_rows,
    capacity,
    max_items,
    window,
    NUM_KV_HEADS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """List the work items (row, start, end) of a decode step; work is [3, capacity].

    A chunk of ceil(sum of lengths / max_items) tokens or more bounds their number by
    num_rows + max_items, whatever the lengths.
    """
    r = tl.arange(0, BLOCK_R)
    live = r < num_rows
    end = tl.load(kv_lens_ptr + r, mask=live, other=0)
    begin = tl.zeros([BLOCK_R], tl.int32)
    if HAS_SHARED:
        begin = tl.minimum(tl.load(shared_lens_ptr + r, mask=live, other=0), end)
    if window > 0:
        begin = tl.maximum(end - window, 0)
    tokens = end - begin
    chunk = tl.maximum(tl.cdiv(tl.sum(tokens, 0), max_items), MIN_TOKENS)
    # Even chunks within a row, in whole blocks.
    size = tl.cdiv(tokens, tl.maximum(tl.cdiv(tokens, chunk), 1))
    size = tl.maximum(tl.cdiv(size, BLOCK_N), 1) * BLOCK_N
    count = tl.cdiv(tokens, size)
    first = tl.cumsum(count, 0) - count
    tl.store(work_indptr_ptr + r, first, mask=live)
    tl.store(work_indptr_ptr + num_rows, tl.sum(count, 0))
    for h in range(NUM_KV_HEADS):
        tl.store(counters_ptr + r * NUM_KV_HEADS + h, tl.zeros([BLOCK_R], tl.int32), mask=live)
    for i in range(0, tl.max(count, 0)):
        item = work_ptr + first + i
        there = i < count
        tl.store(item, r, mask=there)
        tl.store(item + capacity, begin + i * size, mask=there)
        tl.store(item + 2 * capacity, tl.minimum(begin + (i + 1) * size, end), mask=there)


@triton.jit(do_not_specialize=["num_rows", "capacity", "num_shared_splits"])
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
    work_indptr_ptr,
    counters_ptr,
    shared_lens_ptr,
    slots_ptr,
    table_ptr,
    num_rows,
    capacity,
    shared_chunk_min,
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
    BLOCK_S: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """One work item of one KV head: [GROUP, HEAD_DIM] queries against a chunk of the context."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(work_indptr_ptr + num_rows):
        return
    row = tl.load(work_ptr + item)
    start = tl.load(work_ptr + capacity + item)
    end = tl.load(work_ptr + 2 * capacity + item)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    first = tl.load(work_indptr_ptr + row)
    count = tl.load(work_indptr_ptr + row + 1) - first

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
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m, denominator, acc = _attend_range(
        q, m, denominator, acc,
        k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, table_ptr + slot * stride_table,
        start, end, h, h, scale, softcap, stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE,
        BOUNDED=True, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
    )  # fmt: skip

    num_shared = 0
    if HAS_SHARED:
        shared_len = tl.load(shared_lens_ptr + row)
        chunk = tl.maximum(tl.cdiv(shared_len, num_shared_splits), shared_chunk_min)
        num_shared = tl.cdiv(shared_len, chunk)
    out_ptrs = out_ptr + (row.to(tl.int64) * NUM_HEADS + heads) * HEAD_DIM
    lse_ptrs = lse_ptr + row * NUM_HEADS + heads
    if count + num_shared == 1:
        _finish(
            m, denominator, acc, heads, live, out_ptrs, lse_ptrs, sinks_ptr, v_scale,
            HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
    else:
        at = item.to(tl.int64) * NUM_HEADS + heads
        full = live[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
                 acc / denominator[:, None], mask=full)  # fmt: skip
        tl.store(partial_lse_ptr + at, m + tl.log2(denominator), mask=live)
        # Every warp's stores come before the counter's release, and the last block's acquire
        # comes before its loads, which go past the L1 cache.
        tl.debug_barrier()
        counter_ptr = counters_ptr + row * NUM_KV_HEADS + kv_head
        finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if finished == count - 1:
            tl.debug_barrier()
            tl.store(counter_ptr, 0)  # ready for the next layer
            for i in range(GROUP):
                head = kv_head * GROUP + i
                top = float("-inf")
                weight = 0.0
                merged = tl.zeros([BLOCK_D], tl.float32)
                top, weight, merged = _merge(
                    top, weight, merged, partial_ptr, partial_lse_ptr, first, count, head,
                    NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_S,
                )  # fmt: skip
                if HAS_SHARED:
                    top, weight, merged = _merge(
                        top, weight, merged, partial_ptr, partial_lse_ptr,
                        capacity + row * num_shared_splits, num_shared, head,
                        NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_S,
                    )  # fmt: skip
                one = tl.arange(0, 1)
                _finish(
                    top + tl.zeros([1], tl.float32), weight + tl.zeros([1], tl.float32),
                    merged[None, :], head + one, one == 0,
                    out_ptr + (row.to(tl.int64) * NUM_HEADS + head + one) * HEAD_DIM,
                    lse_ptr + row * NUM_HEADS + head + one, sinks_ptr, v_scale,
                    HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
                )  # fmt: skip


@triton.jit
def _merge(
    top,
    weight,
    merged,
    partial_ptr,
    partial_lse_ptr,
    first,
    count,
    head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fold the partial results [first, first + count) of one head: sum of o_i 2^(lse_i)."""
    d = tl.arange(0, BLOCK_D)
    for s0 in range(0, count, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        live = s < count
        at = (first + s).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(partial_lse_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
            mask=live[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        alpha = tl.exp2(top - new_top)
        p = tl.exp2(lse - new_top)
        weight = weight * alpha + tl.sum(p, 0)
        merged = merged * alpha + tl.sum(part * p[:, None], 0)
        top = new_top
    return top, weight, merged


@triton.jit(do_not_specialize=["capacity", "num_splits"])
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
    capacity,
    chunk_min,
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
    """One chunk of a shared prefix for [ROWS x GROUP] queries of one KV head."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    shared_len = tl.load(tile_lens_ptr + tile)
    chunk = tl.maximum(tl.cdiv(shared_len, num_splits), chunk_min)
    start = split * chunk
    if start >= shared_len:
        return
    end = tl.minimum(start + chunk, shared_len)
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows = tl.load(tile_rows_ptr + tile * ROWS + i // GROUP, mask=i < ROWS * GROUP, other=-1)
    live = rows >= 0
    heads = kv_head * GROUP + i % GROUP
    slot = tl.load(slots_ptr + tl.load(tile_rows_ptr + tile * ROWS)).to(tl.int64)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    full = live[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + rows.to(tl.int64)[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :],
        mask=full,
        other=0.0,
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m, denominator, acc = _attend_range(
        q, m, denominator, acc,
        k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, table_ptr + slot * stride_table,
        start, end, i, i, scale, softcap, stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE,
        BOUNDED=True, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
    )  # fmt: skip
    at = (capacity + rows * num_splits + split).to(tl.int64) * NUM_HEADS + heads
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
             acc / denominator[:, None], mask=full)  # fmt: skip
    tl.store(partial_lse_ptr + at, m + tl.log2(denominator), mask=live)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _extend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    slots_ptr,
    table_ptr,
    tree_ptr,
    tree_indptr_ptr,
    first_row,
    num_rows,
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
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One tile of TOKENS new tokens x GROUP query heads against its row's whole context.

    Row r's tiles begin at number (qo_indptr[r] - qo_indptr[first_row]) // TOKENS + r - first_row:
    increasing in r and never short of room, at the price of one idle tile a row at most. Later
    tiles see more context, so they go first.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tl.program_id(0) // NUM_KV_HEADS
    origin = tl.load(qo_indptr_ptr + first_row)
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(qo_indptr_ptr + middle) - origin) // TOKENS + middle - first_row
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    row = low
    row_begin = tl.load(qo_indptr_ptr + row)
    q_len = tl.load(qo_indptr_ptr + row + 1) - row_begin
    token0 = (tile - (row_begin - origin) // TOKENS - (row - first_row)) * TOKENS
    if token0 >= q_len:
        return
    kv_len = tl.load(kv_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)

    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = token0 + i // GROUP
    live = (token < q_len) & (i < TOKENS * GROUP)
    heads = kv_head * GROUP + i % GROUP
    positions = kv_len - q_len + token
    first_position = kv_len - q_len + token0
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    at = (row_begin + token).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_head = k_ptr + kv_head * stride_kh
    v_head = v_ptr + kv_head * stride_vh
    table = table_ptr + slot * stride_table
    if HAS_TREE:
        end = kv_len
        tree_rows = tl.minimum(token, q_len - 1).to(tl.int64) * kv_len
        mask_ptrs = tree_ptr + tl.load(tree_indptr_ptr + row) + tree_rows
    else:
        end = tl.minimum(first_position + TOKENS, kv_len)
        mask_ptrs = i
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    elif not HAS_TREE:  # up to the diagonal no mask is needed
        begin = (first_position + 1) // BLOCK_N * BLOCK_N
        m, denominator, acc = _attend_range(
            q, m, denominator, acc, k_head, v_head, table,
            0, begin, positions, mask_ptrs, scale, softcap,
            stride_kp, stride_kt, stride_vp, stride_vt,
            HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE,
            BOUNDED=False, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
        )  # fmt: skip
    m, denominator, acc = _attend_range(
        q, m, denominator, acc, k_head, v_head, table,
        begin, end, positions, mask_ptrs, scale, softcap,
        stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE,
        BOUNDED=True, CAUSAL=not HAS_TREE, WINDOW=WINDOW, HAS_TREE=HAS_TREE,
        HAS_SOFTCAP=HAS_SOFTCAP,
    )  # fmt: skip
    _finish(
        m, denominator, acc, heads, live,
        out_ptr + (at * NUM_HEADS + heads) * HEAD_DIM, lse_ptr + at * NUM_HEADS + heads,
        sinks_ptr, v_scale, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
    )  # fmt: skip


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


def rows_per_shared_tile(spec: AttentionSpec) -> int:
    """How many rows fit in one tile of the shared-prefix pass."""
    return max(1, SHARED_TILE // (spec.num_heads // spec.num_kv_heads))


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


@dataclass(slots=True)
class _DecodePlan:
    """The work items of a decode step and the buffers that its layers use in turn."""

    work: Tensor  # int32 [3, capacity]: row, start, end
    work_indptr: Tensor  # int32 [rows + 1]
    counters: Tensor  # int32 [rows, num_kv_heads] finished items
    partial: Tensor  # float32 [capacity + rows * num_shared_splits, num_heads, head_dim]
    partial_lse: Tensor  # float32 [capacity + rows * num_shared_splits, num_heads], base 2
    shared: SharedPrefixes | None
    num_shared_splits: int


def _shared_prefixes(meta: BatchMeta, spec: AttentionSpec) -> SharedPrefixes | None:
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


def _plan(meta: BatchMeta, spec: AttentionSpec, rows: int, arch: Arch, tile: Tile) -> _DecodePlan:
    plans = meta.plans.setdefault(PLAN_KEY, {})
    key = (spec.window, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    if key in plans:
        return plans[key]
    device = meta.kv_lens.device
    shared = _shared_prefixes(meta, spec)
    max_items = max(1, DECODE_ITEMS_PER_CORE * arch.num_cores // spec.num_kv_heads)
    capacity = rows + max_items
    splits = 0
    if shared is not None:
        programs = len(shared.tile_lens) * spec.num_kv_heads
        splits = min(16, max(1, 2 * arch.num_cores // programs))
    size = capacity + rows * splits
    work_indptr = torch.empty(rows + 1, dtype=torch.int32, device=device)
    plan = _DecodePlan(
        work=torch.empty(3, capacity, dtype=torch.int32, device=device),
        work_indptr=work_indptr,
        counters=torch.empty(rows, spec.num_kv_heads, dtype=torch.int32, device=device),
        partial=torch.empty(size, spec.num_heads, spec.head_dim, device=device),
        partial_lse=torch.empty(size, spec.num_heads, device=device),
        shared=shared,
        num_shared_splits=splits,
    )
    _plan_decode[(1,)](
        meta.kv_lens,
        shared.row_lens if shared else work_indptr,
        plan.work,
        plan.work_indptr,
        plan.counters,
        rows,
        capacity,
        max_items,
        spec.window or 0,
        NUM_KV_HEADS=spec.num_kv_heads,
        MIN_TOKENS=MIN_CHUNK,
        BLOCK_N=tile.keys,
        BLOCK_R=max(256, triton.next_power_of_2(rows)),
        HAS_SHARED=shared is not None,
        num_warps=4,
    )
    plans[key] = plan
    return plan


def _cache_strides(cache: LayerCache) -> tuple[int, ...]:
    assert cache.k.stride(3) == 1 and cache.v.stride(3) == 1
    return (*cache.k.stride()[:3], *cache.v.stride()[:3])


def _decode_rows(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    k_scale: float,
    v_scale: float,
    tile: Tile | None,
) -> None:
    arch = current_arch()
    tile = tile or _fit(DECODE_TILES.get(arch.name, FALLBACK_TILE), q, cache)
    rows = meta.num_decode_rows
    plan = _plan(meta, spec, rows, arch, tile)
    group = spec.num_heads // spec.num_kv_heads
    block_d = max(16, triton.next_power_of_2(spec.head_dim))
    strides = (*q.stride()[:2], *_cache_strides(cache), meta.block_table.stride(0))
    shared = plan.shared
    if shared is not None:
        shared_rows = shared.tile_rows.shape[1]
        wide = _fit(EXTEND_TILES.get(arch.name, FALLBACK_TILE), q, cache)
        _shared_prefix[(spec.num_kv_heads, len(shared.tile_lens), plan.num_shared_splits)](
            q,
            cache.k,
            cache.v,
            plan.partial,
            plan.partial_lse,
            shared.tile_rows,
            shared.tile_lens,
            meta.slots,
            meta.block_table,
            plan.work.shape[1],
            MIN_CHUNK,
            plan.num_shared_splits,
            spec.scale * k_scale,
            spec.softcap or 0.0,
            *strides,
            NUM_KV_HEADS=spec.num_kv_heads,
            GROUP=group,
            ROWS=shared_rows,
            HEAD_DIM=spec.head_dim,
            BLOCK_D=block_d,
            BLOCK_M=max(16, triton.next_power_of_2(shared_rows * group)),
            BLOCK_N=min(wide.keys, 64),
            PAGE_SIZE=meta.page_size,
            HAS_SOFTCAP=spec.softcap is not None,
            num_warps=4,
            num_stages=wide.num_stages,
        )
    _decode[(spec.num_kv_heads, plan.work.shape[1])](
        q,
        cache.k,
        cache.v,
        out,
        lse if lse is not None else plan.partial_lse,
        spec.sinks if spec.sinks is not None else plan.partial_lse,
        plan.partial,
        plan.partial_lse,
        plan.work,
        plan.work_indptr,
        plan.counters,
        shared.row_lens if shared is not None else plan.work_indptr,
        meta.slots,
        meta.block_table,
        rows,
        plan.work.shape[1],
        MIN_CHUNK,
        plan.num_shared_splits,
        spec.scale * k_scale,
        spec.softcap or 0.0,
        v_scale,
        *strides,
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_d,
        BLOCK_M=max(tile.queries, triton.next_power_of_2(group)),
        BLOCK_N=tile.keys,
        BLOCK_S=MERGE_BLOCK,
        PAGE_SIZE=meta.page_size,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.sinks is not None,
        HAS_LSE=lse is not None,
        HAS_SHARED=shared is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _extend_rows(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    k_scale: float,
    v_scale: float,
    first_row: int,
    tile: Tile | None,
) -> None:
    arch = current_arch()
    tile = tile or _fit(EXTEND_TILES.get(arch.name, FALLBACK_TILE), q, cache)
    if meta.tree_mask is not None:  # the mask's addresses take registers
        tile = tile._replace(queries=min(tile.queries, 64), keys=min(tile.keys, 64))
    elif cache.k.dtype != q.dtype:
        tile = tile._replace(keys=min(tile.keys, 64))
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(tile.queries, triton.next_power_of_2(group))
    tokens = block_m // group
    num_tokens = q.shape[0] - first_row  # the rows before have one token each
    num_tiles = num_tokens // tokens + meta.num_rows - first_row
    tree, tree_indptr = meta.tree_mask, meta.qo_indptr
    if tree is not None:
        plans = meta.plans.setdefault(PLAN_KEY, {})
        if "tree_indptr" not in plans:
            sizes = meta.qo_indptr.diff().long() * meta.kv_lens
            plans["tree_indptr"] = sizes.cumsum(0) - sizes
        tree_indptr = plans["tree_indptr"]
    _extend[(num_tiles * spec.num_kv_heads,)](
        q,
        cache.k,
        cache.v,
        out,
        lse if lse is not None else out,
        spec.sinks if spec.sinks is not None else out,
        meta.qo_indptr,
        meta.kv_lens,
        meta.slots,
        meta.block_table,
        tree.view(torch.uint8) if tree is not None else out,
        tree_indptr,
        first_row,
        meta.num_rows,
        spec.scale * k_scale,
        spec.softcap or 0.0,
        v_scale,
        *q.stride()[:2],
        *_cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        TOKENS=tokens,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(spec.head_dim)),
        BLOCK_M=block_m,
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        WINDOW=spec.window or 0,
        HAS_TREE=tree is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def attend(
    q: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    *,
    lse: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    decode_tile: Tile | None = None,
    extend_tile: Tile | None = None,
) -> Tensor:
    """Attention of the new tokens over their contexts, all of which lie in the pages.

    Args:
        q: [num_tokens, num_heads, head_dim]; the last dimension is dense.
        lse: float32 [num_tokens, num_heads], filled with each query's log-sum-exp (natural,
            without the sink) where given, for merging.
        k_scale, v_scale: what stored values of an fp8 cache are multiplied by.
        decode_tile, extend_tile: block sizes to use instead of the tables' (for tuning).

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    assert q.stride(2) == 1
    out = torch.empty(q.shape[0], spec.num_heads * spec.head_dim, dtype=q.dtype, device=q.device)
    num_decode = meta.num_decode_rows if meta.tree_mask is None else 0
    if num_decode:
        _decode_rows(q, out, lse, meta, cache, spec, k_scale, v_scale, decode_tile)
    if meta.num_rows > num_decode:
        _extend_rows(q, out, lse, meta, cache, spec, k_scale, v_scale, num_decode, extend_tile)
    return out
