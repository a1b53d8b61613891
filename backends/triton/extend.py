"""Extend: many new tokens a row over a paged context (prefill, chunks of it, verification).

A tile holds (new tokens x query heads of one KV head) and finds its row by bisection of
qo_indptr, so that the grid depends on sizes alone. Few tiles over a long context are split along
the keys and merged by a second kernel.

Tensor descriptors (TMA) fetch whole blocks of keys, which small pages are not. Where many new
tokens read a context, its pages are first copied into dense scratch memory, once a layer.

Runs on: gpu.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..api import AttentionSpec, BatchMeta, LayerCache
from ..indices import is_captured
from .arch import current_arch
from .flash import (
    DENSE,
    FALLBACK_TILE,
    PAGES,
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
from .row_tiles import find_tile, num_tiles

PLAN_KEY = "triton.extend"  # in BatchMeta.plans
# For head_dim 128 and two bytes an element; `fit` shrinks them for more.
EXTEND_TILES = {
    "sm_80": Tile(128, 64, 8, 3),
    "sm_90": Tile(128, 128, 8, 2),
    "sm_100": Tile(128, 64, 8, 3),
    "gfx942": Tile(128, 32, 4, 1),
    "gfx950": Tile(128, 64, 4, 2),
}
# With tensor descriptors, by architectures that have them in hardware. Measured on an H200 over
# 8192 tokens: 519 TFLOP/s; 128 x 128 with 8 warps 434 to 481, 256 x 64 478, three stages 442.
DESCRIPTOR_TILES = {
    "sm_90": Tile(128, 64, 4, 2),
    "sm_100": Tile(128, 128, 8, 2),
    "interpreter": Tile(32, 32, 4, 1),
}
SHORT_QUERIES = 64  # (new tokens x heads) a row, on average, up to which a tile is that small
DENSE_ALIGN = 128  # keys; each context begins at a multiple of it in the dense copy
DENSE_MAX_BYTES = 256 << 20  # of K and V of one layer; beyond it, pages are read where they are
DENSE_MIN_TOKENS = 256  # new tokens a row, on average, that repay the copy
MIN_SPLIT = 1024  # keys; a shorter split costs more to merge than it gains
MAX_SPLITS = 32
WARPS_PER_CORE = 8  # of this kernel, whose accumulators fill the registers


@dataclass(slots=True)
class DenseCopy:
    """Scratch memory for the contexts of a step's extend rows, one after the other."""

    starts: Tensor  # int32 [rows + 1] where each row's context begins; 0 keys for decode rows
    num_keys: int
    k: Tensor  # [num_keys, num_kv_heads, head_dim] in the type of q
    v: Tensor


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def _copy_pages(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    starts_ptr,
    kv_lens_ptr,
    slots_ptr,
    table_ptr,
    num_rows,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Copy BLOCK_N keys and values of all KV heads; zeros after a context's end."""
    key0 = tl.program_id(0) * BLOCK_N
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) <= key0
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = low
    n = tl.arange(0, BLOCK_N)
    t = key0 - tl.load(starts_ptr + row) + n
    live = t < tl.load(kv_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(table_ptr + slot * stride_table + t // PAGE_SIZE, mask=live, other=0)
    page = page.to(tl.int64)
    k_rows = page * stride_kp + t % PAGE_SIZE * stride_kt
    v_rows = page * stride_vp + t % PAGE_SIZE * stride_vt
    out_rows = (key0 + n).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
    w = tl.arange(0, BLOCK_W)
    for w0 in tl.static_range(0, NUM_KV_HEADS * HEAD_DIM, BLOCK_W):
        x = w0 + w
        inside = (x < NUM_KV_HEADS * HEAD_DIM)[None, :]
        mask = live[:, None] & inside
        k_at = k_rows[:, None] + (x // HEAD_DIM * stride_kh + x % HEAD_DIM)[None, :]
        v_at = v_rows[:, None] + (x // HEAD_DIM * stride_vh + x % HEAD_DIM)[None, :]
        k = tl.load(k_ptr + k_at, mask=mask, other=0.0)
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
        out_at = out_rows[:, None] + x[None, :]
        tl.store(k_out_ptr + out_at, k.to(k_out_ptr.dtype.element_ty), mask=inside)
        tl.store(v_out_ptr + out_at, v.to(v_out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits", "num_tokens", "stride_table"])
def _extend(
    q_ptr,
    k,
    v,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    partial_ptr,
    partial_lse_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    slots_ptr,
    table_ptr,
    starts_ptr,
    tree_ptr,
    tree_indptr_ptr,
    first_row,
    num_rows,
    num_splits,
    num_tokens,
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
    SOURCE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One tile of TOKENS new tokens x GROUP query heads against its row's context, or a split.

    Later tiles see more context, so they go first. k and v are pointers or descriptors, by SOURCE.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)
    row, row_begin, q_len, token0 = find_tile(qo_indptr_ptr, first_row, num_rows, tile, TOKENS)
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
    column = 0
    first_key = 0
    if SOURCE == POINTERS:
        q = for_keys(q, k.dtype.element_ty)
        k += kv_head * stride_kh
        v += kv_head * stride_vh
    else:
        column = kv_head * HEAD_DIM
        if SOURCE == DENSE:
            first_key = tl.load(starts_ptr + row)
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
    if IS_SPLIT:
        size = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin += split * size
        end = tl.minimum(begin + size, end)
    if WINDOW == 0 and not HAS_TREE:  # up to the diagonal no mask is needed
        diagonal = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
        diagonal = tl.maximum(diagonal, begin)
        m, denominator, acc = attend_range(
            q, m, denominator, acc, k, v, table, first_key, column,
            begin, diagonal, positions, mask_ptrs, scale, softcap,
            stride_kp, stride_kt, stride_vp, stride_vt,
            HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, SOURCE,
            BOUNDED=False, CAUSAL=False, WINDOW=0, HAS_TREE=False, HAS_SOFTCAP=HAS_SOFTCAP,
        )  # fmt: skip
        begin = diagonal
    m, denominator, acc = attend_range(
        q, m, denominator, acc, k, v, table, first_key, column,
        begin, end, positions, mask_ptrs, scale, softcap,
        stride_kp, stride_kt, stride_vp, stride_vt,
        HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, SOURCE,
        BOUNDED=True, CAUSAL=not HAS_TREE, WINDOW=WINDOW, HAS_TREE=HAS_TREE,
        HAS_SOFTCAP=HAS_SOFTCAP,
    )  # fmt: skip
    if IS_SPLIT:
        part = ((split * num_tokens).to(tl.int64) + at - first_row) * NUM_HEADS + heads
        store_partial(
            m, denominator, acc, part, live, partial_ptr, partial_lse_ptr, HEAD_DIM, BLOCK_D
        )  # fmt: skip
    else:
        finish(
            m, denominator, acc, heads, live,
            out_ptr + (at * NUM_HEADS + heads) * HEAD_DIM, lse_ptr + at * NUM_HEADS + heads,
            sinks_ptr, v_scale, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_token", "num_splits"])
def _merge_splits(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    first_token,
    num_splits,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge the splits of one new token's heads of one KV head."""
    kv_head = tl.program_id(0)
    token = tl.program_id(1)
    g = tl.arange(0, BLOCK_G)
    live = g < GROUP
    heads = kv_head * GROUP + g
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    top, weight, merged = merge(
        tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32),
        tl.zeros([BLOCK_G, BLOCK_D], tl.float32), partial_ptr, partial_lse_ptr,
        token, tl.num_programs(1), num_splits, heads, live, NUM_HEADS, HEAD_DIM, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    at = (first_token + token).to(tl.int64) * NUM_HEADS + heads
    finish(
        top, weight, merged, heads, live, out_ptr + at * HEAD_DIM, lse_ptr + at, sinks_ptr,
        v_scale, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
    )  # fmt: skip


def num_splits(num_programs: int, num_places: int, max_kv_len: int) -> int:
    """How many splits of the keys take the fewest waves of programs; few where equal.

    num_places: how many programs the device runs at once.
    """
    most = min(MAX_SPLITS, max(1, max_kv_len // MIN_SPLIT))
    # A split more must gain 2 % to pay for its merge.
    return min(
        range(1, most + 1),
        key=lambda s: -(-num_programs * s // num_places) / s * (1 + 0.02 * (s - 1)),
    )


def dense_copy(meta: BatchMeta, spec: AttentionSpec, q: Tensor, first_row: int) -> DenseCopy | None:
    """Scratch for the extend rows' contexts, once a step; None where the copy does not pay."""
    plans = meta.plans.setdefault(PLAN_KEY, {})
    key = ("dense", spec.num_kv_heads, spec.head_dim)
    if key not in plans:
        blocks = -(-meta.kv_lens_cpu[first_row:] // DENSE_ALIGN)
        num_keys = int(blocks.sum()) * DENSE_ALIGN
        shape = (num_keys, spec.num_kv_heads, spec.head_dim)
        num_bytes = 2 * num_keys * spec.num_kv_heads * spec.head_dim * q.element_size()
        num_new = meta.num_tokens - first_row
        if (
            is_captured(meta)  # so the sizes are not known
            or num_new < DENSE_MIN_TOKENS * len(blocks)
            or not 0 < num_bytes <= DENSE_MAX_BYTES
        ):
            plans[key] = None
        else:
            sizes = (meta.kv_lens + (DENSE_ALIGN - 1)) // DENSE_ALIGN * DENSE_ALIGN
            sizes[:first_row] = 0
            plans[key] = DenseCopy(
                starts=torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0)),
                num_keys=num_keys,
                k=torch.empty(shape, dtype=q.dtype, device=q.device),
                v=torch.empty(shape, dtype=q.dtype, device=q.device),
            )
    return plans[key]


def copy_pages(dense: DenseCopy, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> None:
    """Fill the scratch with one layer's contexts."""
    block = min(32, DENSE_ALIGN)
    _copy_pages[(dense.num_keys // block,)](
        cache.k,
        cache.v,
        dense.k,
        dense.v,
        dense.starts,
        meta.kv_lens,
        meta.slots,
        meta.block_table,
        meta.num_rows,
        *cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_N=block,
        BLOCK_W=min(256, triton.next_power_of_2(spec.num_kv_heads * spec.head_dim)),
        PAGE_SIZE=meta.page_size,
        num_warps=8,
    )


def short(tile: Tile) -> Tile:
    """A tile for rows of few queries."""
    num_stages = 3 if tile.num_stages > 1 else 1
    return Tile(min(tile.queries, SHORT_QUERIES), min(tile.keys, 64), 4, num_stages)


def _descriptor(x: Tensor, block_keys: int) -> TensorDescriptor:
    """Blocks [block_keys, head_dim] of [..., num_kv_heads, head_dim], seen as rows of keys."""
    rows = x.view(-1, x.shape[-2] * x.shape[-1])
    return TensorDescriptor.from_tensor(rows, [block_keys, x.shape[-1]])


def tree_indptr(meta: BatchMeta) -> Tensor:
    """Where each row's part of the tree mask begins, once a step."""
    plans = meta.plans.setdefault(PLAN_KEY, {})
    if "tree_indptr" not in plans:
        sizes = meta.qo_indptr.diff().long() * meta.kv_lens
        plans["tree_indptr"] = sizes.cumsum(0) - sizes
    return plans["tree_indptr"]


def extend_rows(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    first_row: int,
    tile: Tile | None,
    splits: int | None,
) -> None:
    """Attention of the rows from first_row on; see `attention.attend`."""
    arch = current_arch()
    tree, source, dense = meta.tree_mask, POINTERS, None
    k, v = cache
    group = spec.num_heads // spec.num_kv_heads
    num_tokens = q.shape[0] - first_row  # the rows before have one token each
    is_short = num_tokens * group <= SHORT_QUERIES * (meta.num_rows - first_row)
    described = DESCRIPTOR_TILES.get(arch.name)
    if tree is not None or spec.window is not None:
        described = None
    if described is not None and q.element_size() == 2 and spec.head_dim in (64, 128, 256):
        wide = fit(described, q, cache)
        wide = tile or (short(wide) if is_short else wide)
        if meta.page_size % wide.keys == 0 and k.dtype == q.dtype and k.is_contiguous():
            source = PAGES
        elif (dense := dense_copy(meta, spec, q, first_row)) is not None:
            source = DENSE
            copy_pages(dense, meta, cache, spec)
            k, v = dense.k, dense.v
        if source is not POINTERS:
            tile = wide
            k, v = _descriptor(k, tile.keys), _descriptor(v, tile.keys)
    if tile is None:
        tile = fit(EXTEND_TILES.get(arch.name, FALLBACK_TILE), q, cache)
        if tree is not None:  # the mask's addresses take registers
            tile = tile._replace(queries=min(tile.queries, 64), keys=min(tile.keys, 64))
        elif is_short:
            tile = short(tile)
        elif cache.k.dtype != q.dtype:
            tile = tile._replace(keys=min(tile.keys, 64))
    block_m = max(tile.queries, triton.next_power_of_2(group))
    tokens = block_m // group
    num_programs = num_tiles(num_tokens, meta.num_rows - first_row, tokens) * spec.num_kv_heads
    reach = meta.max_kv_len if spec.window is None else min(spec.window, meta.max_kv_len)
    if splits is None:  # num_programs counts idle ones
        busy = -(-num_tokens // tokens) * spec.num_kv_heads
        splits = num_splits(busy, arch.num_cores * WARPS_PER_CORE // tile.num_warps, reach)
    partial = partial_lse = out
    if splits > 1:
        partial = torch.empty(
            splits, num_tokens, spec.num_heads, spec.head_dim, device=q.device, dtype=torch.float32
        )
        partial_lse = torch.empty(
            splits, num_tokens, spec.num_heads, device=q.device, dtype=torch.float32
        )
    _extend[(num_programs, splits)](
        q,
        k,
        v,
        out,
        lse if lse is not None else out,
        spec.sinks if spec.sinks is not None else out,
        partial,
        partial_lse,
        meta.qo_indptr,
        meta.kv_lens,
        meta.slots,
        meta.block_table,
        dense.starts if dense is not None else meta.kv_lens,
        tree.view(torch.uint8) if tree is not None else out,
        tree_indptr(meta) if tree is not None else meta.kv_lens,
        first_row,
        meta.num_rows,
        splits,
        num_tokens,
        spec.scale * spec.k_scale,
        spec.softcap or 0.0,
        spec.v_scale,
        *q.stride()[:2],
        *cache_strides(cache),
        meta.block_table.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        TOKENS=tokens,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_dim(spec.head_dim),
        BLOCK_M=block_m,
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        SOURCE=source,
        WINDOW=spec.window or 0,
        IS_SPLIT=splits > 1,
        HAS_TREE=tree is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge_splits[(spec.num_kv_heads, num_tokens)](
            partial,
            partial_lse,
            out,
            lse if lse is not None else out,
            spec.sinks if spec.sinks is not None else out,
            first_row,
            splits,
            spec.v_scale,
            NUM_KV_HEADS=spec.num_kv_heads,
            GROUP=group,
            HEAD_DIM=spec.head_dim,
            BLOCK_D=block_dim(spec.head_dim),
            BLOCK_G=triton.next_power_of_2(group),
            BLOCK_S=merge_block(group, spec.head_dim, 2),
            HAS_SINKS=spec.sinks is not None,
            HAS_LSE=lse is not None,
            num_warps=2,
        )
