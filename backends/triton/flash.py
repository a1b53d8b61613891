"""What the attention kernels share: the running softmax over a range of keys, merging, storing.

All logits and log-sum-exps inside the kernels are base 2.

Runs on: gpu.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import LayerCache

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
# Where keys and values come from.
POINTERS = tl.constexpr(0)  # any pages
PAGES = tl.constexpr(1)  # tensor descriptors over a pool whose pages hold whole blocks
DENSE = tl.constexpr(2)  # tensor descriptors over a copy without pages


class Tile(NamedTuple):
    """Block sizes of an attention kernel: queries, keys, warps, software-pipelining depth."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


FALLBACK_TILE = Tile(16, 32, 4, 1)


def fit(tile: Tile, q: Tensor, cache: LayerCache) -> Tile:
    """Shrink a tile for rows of more than 256 bytes, and for float32, which has no tensor cores."""
    row_bytes = triton.next_power_of_2(q.shape[-1]) * max(q.element_size(), cache.k.element_size())
    shrink = max(1, row_bytes // 256)
    if q.dtype == torch.float32:
        return Tile(min(tile.queries, 32), 32, 4, 1)
    queries = tile.queries if row_bytes <= 256 else min(tile.queries, 64)
    return tile._replace(queries=queries, keys=max(16, tile.keys // shrink))


def block_dim(head_dim: int) -> int:
    """The power of two that holds a head, as tl.dot wants it."""
    return max(16, triton.next_power_of_2(head_dim))


def cache_strides(cache: LayerCache) -> tuple[int, ...]:
    """Of k, then of v: page, token in the page, head."""
    assert cache.k.stride(3) == 1 and cache.v.stride(3) == 1
    return (*cache.k.stride()[:3], *cache.v.stride()[:3])


@triton.jit
def for_keys(q, KEY: tl.constexpr):
    """Queries in the type that keys are multiplied in.

    float16 for fp8 keys, which hold it exactly: two take one instruction, to bfloat16 five.
    """
    if KEY.primitive_bitwidth == 8:
        q = q.to(tl.float16)
    return q


@triton.jit
def attend_range(
    q,
    m,
    denominator,
    acc,
    k_source,
    v_source,
    table_ptr,
    first_key,
    column,
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
    SOURCE: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr = False,
):
    """Fold the tokens [start, end) of a context into a running softmax.

    BOUNDED: end - start need not be a multiple of BLOCK_N. ALIGNED: start is one of it. Sources:
    for POINTERS the first element of the KV head, else descriptors of blocks [BLOCK_N, HEAD_DIM],
    where the head begins at `column` and, for DENSE, the context at row `first_key`. mask_ptr
    [BLOCK_M] points to the tree mask's rows. What lies in unused slots (NaN included) does not
    matter.
    """
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        factor = 1.0
    # Page ids are loaded an iteration ahead: a chain of loads would halve the pipeline's depth.
    # WHOLE: a block lies in one page.
    WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0 and (ALIGNED or not BOUNDED)
    if SOURCE == POINTERS and not WHOLE:
        pages = tl.load(table_ptr + (start + n) // PAGE_SIZE, mask=start + n < end, other=0)
    elif SOURCE != DENSE:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < end, other=0)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + n
        if SOURCE == POINTERS:
            if WHOLE:
                k_rows = page.to(tl.int64) * stride_kp + (t0 % PAGE_SIZE + n) * stride_kt
                v_rows = page.to(tl.int64) * stride_vp + (t0 % PAGE_SIZE + n) * stride_vt
            else:
                k_rows = pages.to(tl.int64) * stride_kp + (t % PAGE_SIZE) * stride_kt
                v_rows = pages.to(tl.int64) * stride_vp + (t % PAGE_SIZE) * stride_vt
                ahead = t + BLOCK_N
                pages = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < end, other=0)
            k_ptrs = k_source + k_rows[:, None] + d[None, :]
            v_ptrs = v_source + v_rows[:, None] + d[None, :]
            if BOUNDED or HEAD_DIM != BLOCK_D:
                live = (t < end)[:, None] & (d < HEAD_DIM)[None, :]
                k = tl.load(k_ptrs, mask=live, other=0.0)
            else:
                k = tl.load(k_ptrs)
        else:
            key = first_key + t0
            if SOURCE == PAGES:
                key = page * PAGE_SIZE + t0 % PAGE_SIZE
            k = k_source.load([key, column])
        if SOURCE == PAGES or (SOURCE == POINTERS and WHOLE):
            ahead0 = t0 + BLOCK_N
            page = tl.load(table_ptr + ahead0 // PAGE_SIZE, mask=ahead0 < end, other=0)
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            e = tl.exp2(logits * (2 * LOG2_E * scale / softcap))
            logits = softcap * LOG2_E * (1 - 2 / (e + 1))
        if BOUNDED:
            logits = tl.where((t < end)[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(t[None, :] <= positions[:, None], logits, float("-inf"))
        if WINDOW > 0:
            logits = tl.where(t[None, :] > positions[:, None] - WINDOW, logits, float("-inf"))
        if HAS_TREE:
            seen = tl.load(mask_ptr[:, None] + t[None, :], mask=(t < end)[None, :], other=0)
            logits = tl.where(seen != 0, logits, float("-inf"))
        # The scale joins the subtraction: one multiply-add an element.
        m_new = tl.maximum(m, tl.max(logits, 1) * factor)
        if CAUSAL or WINDOW > 0 or HAS_TREE:  # a tile may hold nothing for some query
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_safe = m_new
        alpha = tl.exp2(m - m_safe)
        p = tl.exp2(logits * factor - m_safe[:, None])
        denominator = denominator * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if SOURCE != POINTERS:
            v = v_source.load([key, column])
            if SOURCE == PAGES and BOUNDED:
                v = tl.where((t < end)[:, None], v, 0.0)
        elif BOUNDED or HEAD_DIM != BLOCK_D:
            v = tl.load(v_ptrs, mask=live, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new
    return m, denominator, acc


@triton.jit
def finish(
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


@triton.jit
def store_partial(
    m,
    denominator,
    acc,
    at,
    live,
    partial_ptr,
    partial_lse_ptr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a normalized partial result and its log-sum-exp at [at], a row of one head each.

    Where nothing was attended to, the log-sum-exp alone (-inf), which `merge` obeys.
    """
    d = tl.arange(0, BLOCK_D)
    some = denominator > 0
    tl.store(
        partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
        acc / tl.where(some, denominator, 1.0)[:, None],
        mask=(live & some)[:, None] & (d < HEAD_DIM)[None, :],
    )
    tl.store(partial_lse_ptr + at, m + tl.log2(denominator), mask=live)


@triton.jit
def merge(
    top,
    weight,
    merged,
    partial_ptr,
    partial_lse_ptr,
    first,
    step,
    count,
    heads,
    live,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fold the partial results first, first + step, ... (count of them) into a running softmax.

    A log-sum-exp of -inf marks one that was not written. Loads go past the L1 cache: other
    blocks wrote them a moment ago.
    """
    d = tl.arange(0, BLOCK_D)
    for s0 in range(0, count, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        there = (s < count)[:, None] & live[None, :]
        at = (first + s * step).to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + at[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha = tl.exp2(top - safe)
        p = tl.exp2(lse - safe[None, :])
        weight = weight * alpha + tl.sum(p, 0)
        part = tl.where(p[:, :, None] > 0, part * p[:, :, None], 0.0)
        merged = merged * alpha[:, None] + tl.sum(part, 0)
        top = new_top
    return top, weight, merged


def merge_block(heads: int, head_dim: int, num_warps: int) -> int:
    """BLOCK_S of `merge` for tiles of this many heads: 64 registers a thread."""
    per_split = triton.next_power_of_2(heads) * block_dim(head_dim)
    return max(1, min(16, 2048 * num_warps // per_split))
