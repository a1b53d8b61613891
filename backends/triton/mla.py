"""Latent attention (MLA) with its up-projections left outside: every head reads the same latents.

One KV head whose key is a latent and a part that rotates, and whose value is the latent: a block of
latents is loaded once and serves both products, for all query heads of a tile.

Decode cuts every context into work items of about equal length, listed on the device, so that a
captured graph serves any lengths; a second kernel merges a row's items. Other rows go in tiles of
(new tokens x heads), split along the keys where tiles are few.

Runs on: gpu.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..api import BatchMeta, LayerCache, MLASpec
from .arch import Arch, current_arch
from .extend import num_splits, tree_indptr
from .flash import FALLBACK_TILE, LOG2_E, Tile, block_dim, finish, merge, store_partial
from .row_tiles import find_tile, num_tiles

PLAN_KEY = "triton.mla"  # in BatchMeta.plans
# (heads, latents): for a rank of 512 in two bytes. Up to 16 heads a tile is bound by memory.
FEW_HEADS_TILES = {
    "sm_80": Tile(16, 32, 4, 2),
    "sm_90": Tile(16, 32, 4, 3),
    "sm_100": Tile(16, 32, 4, 3),
    "gfx942": Tile(16, 32, 4, 1),
    "gfx950": Tile(16, 32, 4, 2),
}
WIDE_TILES = {  # (heads, or new tokens x heads; latents)
    "sm_80": Tile(64, 32, 8, 2),
    "sm_90": Tile(64, 64, 8, 2),
    "sm_100": Tile(64, 64, 8, 2),
    "gfx942": Tile(32, 16, 4, 1),
    "gfx950": Tile(32, 32, 4, 1),
}
HAS_DESCRIPTORS = ("sm_90", "sm_100", "interpreter")  # in hardware; they spare address registers
FLOAT32_TILE = Tile(16, 16, 4, 1)  # without tensor cores
ITEMS_PER_CORE = 2  # work items (x tiles of heads) that keep a multiprocessor busy
MIN_CHUNK = 128  # tokens; a shorter work item costs more to start and merge than it gains
CHUNK_ALIGN = 64  # tokens; a work item holds whole blocks of latents, but for the last of a row
PLAN_ROWS = (256, 1024)  # block sizes of the planning kernel; powers of two beyond
ITEM = tl.constexpr(8)  # int32 numbers of a work item: row, slot, start, end, is_whole, -, -, -
FEW_ROWS = 16  # up to which a program merges one head


@dataclass(slots=True)
class MLAPlan:
    """The work items of a decode step and the buffers that its layers use in turn."""

    work: Tensor  # int32 [capacity, ITEM]; row -1 marks an unused item
    parts: Tensor  # int32 [rows, 2], the number of each row's first item, and of its items
    partial: Tensor  # float32 [capacity, num_heads, rank]
    partial_lse: Tensor  # float32 [capacity, num_heads], base 2


@triton.jit(do_not_specialize=["num_rows", "capacity", "max_items", "min_tokens"])
def _mla_plan(
    kv_lens_ptr,
    slots_ptr,
    work_ptr,
    parts_ptr,
    num_rows,
    capacity,
    max_items,
    min_tokens,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """List the work items of a decode step: at most num_rows + max_items, whatever the lengths."""
    r = tl.arange(0, BLOCK_R)
    live = r < num_rows
    tokens = tl.load(kv_lens_ptr + r, mask=live, other=0)
    slot = tl.load(slots_ptr + r, mask=live, other=0)
    chunk = tl.maximum(tl.cdiv(tl.sum(tokens, 0), max_items), min_tokens)
    # Rounded: a context a little longer than the others' is not worth a merge.
    count = tl.maximum((tokens + chunk // 2) // chunk, 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(tokens, count), ALIGN), 1) * ALIGN
    count = tl.cdiv(tokens, size)
    first = tl.cumsum(count, 0) - count
    tl.store(parts_ptr + 2 * r, first, mask=live)
    tl.store(parts_ptr + 2 * r + 1, count, mask=live)
    for i in range(0, tl.max(count, 0)):
        item = work_ptr + (first + i) * ITEM
        there = i < count
        tl.store(item, r, mask=there)
        tl.store(item + 1, slot, mask=there)
        tl.store(item + 2, i * size, mask=there)
        tl.store(item + 3, tl.minimum((i + 1) * size, tokens), mask=there)
        tl.store(item + 4, (count == 1).to(tl.int32), mask=there)
    for i0 in range(tl.sum(count, 0), capacity, BLOCK_R):
        tl.store(work_ptr + (i0 + r) * ITEM, -1 + tl.zeros([BLOCK_R], tl.int32),
                 mask=i0 + r < capacity)  # fmt: skip


@triton.jit
def _fold_latents(
    q,
    q_rope,
    m,
    denominator,
    acc,
    latents,
    k_ropes,
    pool_ptr,
    table_ptr,
    start,
    end,
    positions,
    mask_ptrs,
    scale,
    stride_p,
    stride_t,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """Fold the tokens [start, end) of a context into a running softmax; see `flash.attend_range`.

    IS_DESCRIBED: they are whole blocks, each in one page, of the descriptors latents and k_ropes.
    What lies in unused slots (NaN included) does not matter.
    """
    r = tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    factor = scale * LOG2_E
    # Page ids are loaded an iteration ahead: a chain of loads would halve the pipeline's depth.
    if IS_DESCRIBED:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        pages = tl.load(table_ptr + (start + n) // PAGE_SIZE, mask=start + n < end, other=0)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + n
        if IS_DESCRIBED:
            slot = page * PAGE_SIZE + t0 % PAGE_SIZE
            latent = latents.load([slot, 0])
            k_rope = k_ropes.load([slot, RANK])
            ahead0 = t0 + BLOCK_N
            page = tl.load(table_ptr + ahead0 // PAGE_SIZE, mask=ahead0 < end, other=0)
        else:
            slots = pool_ptr + pages.to(tl.int64) * stride_p + (t % PAGE_SIZE) * stride_t
            ahead = t + BLOCK_N
            pages = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < end, other=0)
            live = (t < end)[:, None]
            latent = tl.load(
                slots[:, None] + r[None, :], mask=live & (r < RANK)[None, :], other=0.0
            ).to(q.dtype)
            k_rope = tl.load(
                slots[:, None] + RANK + e[None, :], mask=live & (e < ROPE)[None, :], other=0.0
            ).to(q.dtype)
        logits = tl.dot(q, tl.trans(latent), input_precision="ieee")
        logits = tl.dot(q_rope, tl.trans(k_rope), logits, input_precision="ieee")
        if not IS_DESCRIBED:
            logits = tl.where((t < end)[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(t[None, :] <= positions[:, None], logits, float("-inf"))
        if HAS_TREE:
            seen = tl.load(mask_ptrs[:, None] + t[None, :], mask=(t < end)[None, :], other=0)
            logits = tl.where(seen != 0, logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(logits, 1) * factor)
        if CAUSAL or HAS_TREE:  # a tile may hold nothing for some query
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_safe = m_new
        alpha = tl.exp2(m - m_safe)
        p = tl.exp2(logits * factor - m_safe[:, None])
        denominator = denominator * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), latent, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, denominator, acc


@triton.jit(do_not_specialize=["stride_table"])
def _mla_decode(
    q_ptr,
    q_rope_ptr,
    pool_ptr,
    latents,
    k_ropes,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    work_ptr,
    table_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_et,
    stride_eh,
    stride_p,
    stride_t,
    stride_table,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
):
    """One work item for BLOCK_M heads: their queries against a chunk of the row's context."""
    item = tl.program_id(1)
    row = tl.load(work_ptr + item * ITEM)
    slot = tl.load(work_ptr + item * ITEM + 1).to(tl.int64)
    start = tl.load(work_ptr + item * ITEM + 2)
    end = tl.load(work_ptr + item * ITEM + 3)
    is_whole = tl.load(work_ptr + item * ITEM + 4)
    if row < 0:
        return
    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = heads < NUM_HEADS
    r = tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    token = row.to(tl.int64)
    q = tl.load(
        q_ptr + token * stride_qt + heads[:, None] * stride_qh + r[None, :],
        mask=live[:, None] & (r < RANK)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        q_rope_ptr + token * stride_et + heads[:, None] * stride_eh + e[None, :],
        mask=live[:, None] & (e < ROPE)[None, :],
        other=0.0,
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    table = table_ptr + slot * stride_table
    if IS_DESCRIBED:
        whole = end // BLOCK_N * BLOCK_N
        m, denominator, acc = _fold_latents(
            q, q_rope, m, denominator, acc, latents, k_ropes, pool_ptr, table,
            start, whole, heads, heads, scale, stride_p, stride_t, RANK, BLOCK_R, ROPE, BLOCK_E,
            BLOCK_N, PAGE_SIZE, IS_DESCRIBED=True, CAUSAL=False, HAS_TREE=False,
        )  # fmt: skip
        start = whole
    m, denominator, acc = _fold_latents(
        q, q_rope, m, denominator, acc, latents, k_ropes, pool_ptr, table,
        start, end, heads, heads, scale, stride_p, stride_t, RANK, BLOCK_R, ROPE, BLOCK_E,
        BLOCK_N, PAGE_SIZE, IS_DESCRIBED=False, CAUSAL=False, HAS_TREE=False,
    )  # fmt: skip
    if is_whole != 0:
        at = token * NUM_HEADS + heads
        finish(
            m, denominator, acc, heads, live, out_ptr + at * RANK, partial_lse_ptr + heads,
            partial_lse_ptr, 1.0, RANK, BLOCK_R, HAS_SINKS=False, HAS_LSE=False,
        )  # fmt: skip
    else:
        at = item.to(tl.int64) * NUM_HEADS + heads
        store_partial(m, denominator, acc, at, live, partial_ptr, partial_lse_ptr, RANK, BLOCK_R)


@triton.jit(do_not_specialize=["first_token", "num_parts"])
def _mla_merge(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    parts_ptr,
    first_token,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_PLANNED: tl.constexpr,
):
    """Merge the parts of one new token for HEADS heads.

    IS_PLANNED: they are a row's work items, of which a single one needs no merge. Else each of
    num_parts splits holds a part of every token.
    """
    token = tl.program_id(0)
    first = token
    step = tl.num_programs(0)
    count = num_parts
    if IS_PLANNED:
        first = tl.load(parts_ptr + 2 * token)
        count = tl.load(parts_ptr + 2 * token + 1)
        step = 1
        if count <= 1:
            return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = heads < NUM_HEADS
    top, weight, merged = merge(
        tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32),
        tl.zeros([HEADS, BLOCK_R], tl.float32), partial_ptr, partial_lse_ptr,
        first, step, count, heads, live, NUM_HEADS, RANK, BLOCK_R, BLOCK_S,
    )  # fmt: skip
    at = (first_token + token).to(tl.int64) * NUM_HEADS + heads
    finish(
        top, weight, merged, heads, live, out_ptr + at * RANK, partial_lse_ptr + heads,
        partial_lse_ptr, 1.0, RANK, BLOCK_R, HAS_SINKS=False, HAS_LSE=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits", "num_tokens", "stride_table"])
def _mla_extend(
    q_ptr,
    q_rope_ptr,
    pool_ptr,
    latents,
    k_ropes,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    slots_ptr,
    table_ptr,
    tree_ptr,
    tree_indptr_ptr,
    first_row,
    num_rows,
    num_splits,
    num_tokens,
    scale,
    stride_qt,
    stride_qh,
    stride_et,
    stride_eh,
    stride_p,
    stride_t,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """One tile of TOKENS new tokens x GROUP heads against its row's context, or a split of it.

    Tiles that see more context go first.
    """
    NUM_GROUPS: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    group = tl.program_id(0) % NUM_GROUPS
    tile = tl.num_programs(0) // NUM_GROUPS - 1 - tl.program_id(0) // NUM_GROUPS
    split = tl.program_id(1)
    row, row_begin, q_len, token0 = find_tile(qo_indptr_ptr, first_row, num_rows, tile, TOKENS)
    if token0 >= q_len:
        return
    kv_len = tl.load(kv_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)

    i = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    token = token0 + i // GROUP
    heads = group * GROUP + i % GROUP
    live = (token < q_len) & (i < TOKENS * GROUP) & (heads < NUM_HEADS)
    first_position = kv_len - q_len + token0
    at = (row_begin + token).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * stride_qt + heads[:, None] * stride_qh + r[None, :],
        mask=live[:, None] & (r < RANK)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        q_rope_ptr + at[:, None] * stride_et + heads[:, None] * stride_eh + e[None, :],
        mask=live[:, None] & (e < ROPE)[None, :],
        other=0.0,
    )
    if HAS_TREE:
        end = kv_len
        tree_rows = tl.minimum(token, q_len - 1).to(tl.int64) * kv_len
        mask_ptrs = tree_ptr + tl.load(tree_indptr_ptr + row) + tree_rows
    else:
        end = tl.minimum(first_position + TOKENS, kv_len)
        mask_ptrs = i
    begin = 0
    if IS_SPLIT:
        size = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
        begin = split * size
        end = tl.minimum(begin + size, end)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    table = table_ptr + slot * stride_table
    positions = kv_len - q_len + token
    if IS_DESCRIBED:  # up to the diagonal no mask is needed
        diagonal = tl.minimum(first_position + 1, end) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, begin)
        m, denominator, acc = _fold_latents(
            q, q_rope, m, denominator, acc, latents, k_ropes, pool_ptr, table,
            begin, diagonal, positions, mask_ptrs, scale, stride_p, stride_t, RANK, BLOCK_R, ROPE,
            BLOCK_E, BLOCK_N, PAGE_SIZE, IS_DESCRIBED=True, CAUSAL=False, HAS_TREE=False,
        )  # fmt: skip
        begin = diagonal
    m, denominator, acc = _fold_latents(
        q, q_rope, m, denominator, acc, latents, k_ropes, pool_ptr, table,
        begin, end, positions, mask_ptrs, scale, stride_p, stride_t, RANK, BLOCK_R, ROPE, BLOCK_E,
        BLOCK_N, PAGE_SIZE, IS_DESCRIBED=False, CAUSAL=not HAS_TREE, HAS_TREE=HAS_TREE,
    )  # fmt: skip
    if IS_SPLIT:
        part = ((split * num_tokens).to(tl.int64) + at - first_row) * NUM_HEADS + heads
        store_partial(m, denominator, acc, part, live, partial_ptr, partial_lse_ptr, RANK, BLOCK_R)
    else:
        finish(
            m, denominator, acc, heads, live, out_ptr + (at * NUM_HEADS + heads) * RANK,
            partial_lse_ptr + heads, partial_lse_ptr, 1.0, RANK, BLOCK_R,
            HAS_SINKS=False, HAS_LSE=False,
        )  # fmt: skip


def mla_attend(
    q_latent: Tensor,
    q_rope: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: MLASpec,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `Ops.mla_attend`.

    Args:
        tile, splits: to use instead of the tables' (for tuning).
    """
    assert q_latent.stride(2) == q_rope.stride(2) == cache.k.stride(3) == 1
    assert q_latent.dtype == q_rope.dtype
    num_tokens = q_latent.shape[0]
    out = torch.empty(
        num_tokens, spec.num_heads, spec.rank, dtype=q_latent.dtype, device=q_latent.device
    )
    num_decode = meta.num_decode_rows if meta.tree_mask is None else 0
    if num_decode:
        _decode_rows(q_latent, q_rope, out, meta, cache, spec, tile)
    if meta.num_rows > num_decode:
        _extend_rows(q_latent, q_rope, out, meta, cache, spec, num_decode, tile, splits)
    return out


def plan_decode(meta: BatchMeta, spec: MLASpec, rows: int, head_tiles: int, arch: Arch) -> MLAPlan:
    """The work items, made once a step for all layers."""
    plans = meta.plans.setdefault(PLAN_KEY, {})
    key = (spec.num_heads, spec.rank)
    if key in plans:
        return plans[key]
    device = meta.kv_lens.device
    max_items = max(1, ITEMS_PER_CORE * arch.num_cores // head_tiles)
    capacity = rows + max_items
    plan = plans[key] = MLAPlan(
        work=torch.empty(capacity, ITEM.value, dtype=torch.int32, device=device),
        parts=torch.empty(rows, 2, dtype=torch.int32, device=device),
        partial=torch.empty(capacity, spec.num_heads, spec.rank, device=device),
        partial_lse=torch.empty(capacity, spec.num_heads, device=device),
    )
    _mla_plan[(1,)](
        meta.kv_lens,
        meta.slots,
        plan.work,
        plan.parts,
        rows,
        capacity,
        max_items,
        MIN_CHUNK,
        ALIGN=CHUNK_ALIGN,
        BLOCK_R=next((n for n in PLAN_ROWS if n >= rows), triton.next_power_of_2(rows)),
        num_warps=4,
    )
    return plan


def _decode_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    out: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: MLASpec,
    tile: Tile | None,
) -> None:
    arch = current_arch()
    rows, heads = meta.num_decode_rows, spec.num_heads
    tiles = FEW_HEADS_TILES if heads <= 16 else WIDE_TILES
    tile = tile or _fit(tiles.get(arch.name, FALLBACK_TILE), q_latent)
    block_m = min(tile.queries, max(16, triton.next_power_of_2(heads)))
    head_tiles = triton.cdiv(heads, block_m)
    described = _described(q_latent, meta, cache, spec, tile)
    plan = plan_decode(meta, spec, rows, head_tiles, arch)
    _mla_decode[(head_tiles, len(plan.work))](
        q_latent,
        q_rope,
        cache.k,
        *described,
        out,
        plan.partial,
        plan.partial_lse,
        plan.work,
        meta.block_table,
        spec.scale,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *cache.k.stride()[:2],
        meta.block_table.stride(0),
        NUM_HEADS=heads,
        BLOCK_M=block_m,
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        IS_DESCRIBED=described[0] is not cache.k,
        **_dims(spec),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merged_heads = 1 if rows <= FEW_ROWS else 4
    _merge(plan.partial, plan.partial_lse, out, plan.parts, 0, rows, 0, merged_heads, spec)


def _extend_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    out: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: MLASpec,
    first_row: int,
    tile: Tile | None,
    splits: int | None,
) -> None:
    arch, tree, heads = current_arch(), meta.tree_mask, spec.num_heads
    tile = tile or _fit(WIDE_TILES.get(arch.name, FALLBACK_TILE), q_latent)
    described = _described(q_latent, meta, cache, spec, tile)
    groups = triton.cdiv(heads, tile.queries)
    group = triton.cdiv(heads, groups)
    tokens = tile.queries // group
    num_tokens = q_latent.shape[0] - first_row  # the rows before have one token each
    num_programs = num_tiles(num_tokens, meta.num_rows - first_row, tokens) * groups
    if splits is None:
        busy = triton.cdiv(num_tokens, tokens) * groups
        splits = num_splits(busy, arch.num_cores, meta.max_kv_len)
    partial = partial_lse = out
    if splits > 1:
        shape = (splits, num_tokens, heads)
        partial = torch.empty(*shape, spec.rank, device=out.device, dtype=torch.float32)
        partial_lse = torch.empty(shape, device=out.device, dtype=torch.float32)
    _mla_extend[(num_programs, splits)](
        q_latent,
        q_rope,
        cache.k,
        *described,
        out,
        partial,
        partial_lse,
        meta.qo_indptr,
        meta.kv_lens,
        meta.slots,
        meta.block_table,
        tree.view(torch.uint8) if tree is not None else out,
        tree_indptr(meta) if tree is not None else meta.kv_lens,
        first_row,
        meta.num_rows,
        splits,
        num_tokens,
        spec.scale,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *cache.k.stride()[:2],
        meta.block_table.stride(0),
        NUM_HEADS=heads,
        GROUP=group,
        TOKENS=tokens,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        PAGE_SIZE=meta.page_size,
        IS_DESCRIBED=described[0] is not cache.k,
        IS_SPLIT=splits > 1,
        HAS_TREE=tree is not None,
        **_dims(spec),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge(partial, partial_lse, out, meta.kv_lens, first_row, num_tokens, splits, 4, spec)


def _merge(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    parts: Tensor,
    first_token: int,
    num_tokens: int,
    splits: int,
    heads: int,
    spec: MLASpec,
) -> None:
    """Of splits, or (0) of the parts that are listed for each row."""
    _mla_merge[(num_tokens, triton.cdiv(spec.num_heads, heads))](
        partial,
        partial_lse,
        out,
        parts,
        first_token,
        splits,
        NUM_HEADS=spec.num_heads,
        HEADS=heads,
        RANK=spec.rank,
        BLOCK_R=block_dim(spec.rank),
        BLOCK_S=16 // heads,
        IS_PLANNED=not splits,
        num_warps=4,
    )


def _dims(spec: MLASpec) -> dict[str, int]:
    """Sizes of the two parts of a key, and the powers of two that hold them."""
    return {
        "RANK": spec.rank,
        "BLOCK_R": block_dim(spec.rank),
        "ROPE": spec.rope_dim,
        "BLOCK_E": block_dim(spec.rope_dim),
    }


def _described(
    q: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec, tile: Tile
) -> tuple[Any, Any]:
    """Descriptors of blocks of latents and of keys' rotary parts; the pool twice without them."""
    pool, dims = cache.k, (spec.rank, spec.rope_dim)
    if (
        current_arch().name not in HAS_DESCRIPTORS
        or meta.tree_mask is not None
        or meta.page_size % tile.keys
        or pool.dtype != q.dtype
        or pool.element_size() != 2
        or not pool.is_contiguous()
        or any(block_dim(n) != n for n in dims)
    ):
        return pool, pool
    rows = pool.view(-1, sum(dims))
    return tuple(TensorDescriptor.from_tensor(rows, [tile.keys, n]) for n in dims)


def _fit(tile: Tile, q: Tensor) -> Tile:
    return FLOAT32_TILE if q.element_size() > 2 else tile
