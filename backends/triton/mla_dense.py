"""Latent attention over up-projected keys and values, and the write of what it keeps.

A head's key has a part of its own and one that all heads share, which is never copied to each: a
tile of queries is multiplied by both. Keys lie without pages, so tensor descriptors (TMA) fetch
whole blocks where the hardware has them.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..api import BatchMeta, DenseRows, LayerCache, MLASpec, Rope
from .arch import current_arch
from .flash import FALLBACK_TILE, LOG2_E, Tile, block_dim, finish
from .row_tiles import find_tile, num_tiles

DENSE_TILES = {
    "sm_80": Tile(128, 32, 8, 2),
    "sm_90": Tile(128, 128, 8, 2),
    "sm_100": Tile(128, 64, 8, 2),
    "gfx942": Tile(64, 32, 4, 1),
    "gfx950": Tile(128, 64, 8, 1),
}
DESCRIPTOR_TILES = {
    "sm_90": Tile(128, 64, 8, 3),
    "sm_100": Tile(128, 64, 8, 3),
    "interpreter": Tile(32, 32, 4, 1),
}
MAX_WIDTH = 384  # of a head's key and value; beyond it (GLM-4.7-Flash), half of such a tile
FLOAT32_TILE = Tile(32, 32, 4, 1)  # without tensor cores
WRITE_HEADS = 16  # of queries that a program of mla_write rotates


@triton.jit
def _fold_keys(
    q,
    q_rope,
    m,
    denominator,
    acc,
    kv,
    v,
    k_rope,
    first_key,
    head,
    start,
    end,
    last_keys,
    scale,
    stride_kv,
    stride_kr,
    NOPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Fold the keys [start, end) of a row into a running softmax; see `flash.attend_range`.

    Without CAUSAL, end - start is a multiple of BLOCK_N and every query sees all of them. kv, v
    and k_rope are pointers, or descriptors.
    """
    n = tl.arange(0, BLOCK_N)
    k_dim = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_E)
    v_dim = tl.arange(0, BLOCK_V)
    column = head * (NOPE + VALUE)
    factor = scale * LOG2_E
    for t0 in range(start, end, BLOCK_N):
        live = (t0 + n < end)[:, None]
        if IS_DESCRIBED:
            k = kv.load([first_key + t0, column])
            shared = k_rope.load([first_key + t0, ROPE_COLUMN])
        else:
            rows = (first_key + t0 + n).to(tl.int64)
            rows_kv = kv + (rows * stride_kv + column)[:, None]
            rows_kr = k_rope + (rows * stride_kr)[:, None]
            if CAUSAL or NOPE != BLOCK_K or ROPE != BLOCK_E:
                k = tl.load(
                    rows_kv + k_dim[None, :], mask=live & (k_dim < NOPE)[None, :], other=0.0
                )
                shared = tl.load(rows_kr + e[None, :], mask=live & (e < ROPE)[None, :], other=0.0)
            else:
                k = tl.load(rows_kv + k_dim[None, :])
                shared = tl.load(rows_kr + e[None, :])
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.dot(q_rope, tl.trans(shared), logits, input_precision="ieee")
        if CAUSAL:
            t = t0 + n
            seen = (t < end)[None, :] & (t[None, :] <= last_keys[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(logits, 1) * factor)
        m_safe = m_new
        if CAUSAL:  # a tile may hold nothing for some query
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        p = tl.exp2(logits * factor - m_safe[:, None])
        denominator = denominator * alpha + tl.sum(p, 1)
        if IS_DESCRIBED:
            values = v.load([first_key + t0, column + NOPE])
            if CAUSAL:  # behind the row's end there may be anything
                values = tl.where(live, values, 0.0)
        elif CAUSAL or VALUE != BLOCK_V:
            values = tl.load(
                rows_kv + NOPE + v_dim[None, :], mask=live & (v_dim < VALUE)[None, :], other=0.0
            )
        else:
            values = tl.load(rows_kv + NOPE + v_dim[None, :])
        acc = tl.dot(p.to(q.dtype), values, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, denominator, acc


@triton.jit(do_not_specialize=["num_rows"])
def _mla_dense(
    q_ptr,
    kv,
    v,
    k_rope,
    out_ptr,
    lse_ptr,
    qo_indptr_ptr,
    kv_indptr_ptr,
    offsets_ptr,
    num_rows,
    scale,
    stride_qt,
    stride_qh,
    stride_kv,
    stride_kr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
):
    """BLOCK_M new tokens of one head against their row's keys; tiles that see more go first."""
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.num_programs(0) // NUM_HEADS - 1 - tl.program_id(0) // NUM_HEADS
    row, row_begin, q_len, token0 = find_tile(qo_indptr_ptr, 0, num_rows, tile, BLOCK_M)
    if token0 >= q_len:
        return
    first_key = tl.load(kv_indptr_ptr + row)
    num_keys = tl.load(kv_indptr_ptr + row + 1) - first_key
    offset = tl.load(offsets_ptr + row)

    i = token0 + tl.arange(0, BLOCK_M)
    k_dim = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_E)
    live = i < q_len
    at = (row_begin + i).to(tl.int64)
    q_rows = q_ptr + (at * stride_qt + head * stride_qh)[:, None]
    q = tl.load(q_rows + k_dim[None, :], mask=live[:, None] & (k_dim < NOPE)[None, :], other=0.0)
    q_rope = tl.load(
        q_rows + NOPE + e[None, :], mask=live[:, None] & (e < ROPE)[None, :], other=0.0
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    end = tl.maximum(tl.minimum(offset + token0 + BLOCK_M, num_keys), 0)
    # Up to the diagonal no mask is needed.
    diagonal = tl.maximum(tl.minimum(offset + token0 + 1, end), 0) // BLOCK_N * BLOCK_N
    m, denominator, acc = _fold_keys(
        q, q_rope, m, denominator, acc, kv, v, k_rope, first_key, head, 0, diagonal, offset + i,
        scale, stride_kv, stride_kr, NOPE, BLOCK_K, ROPE, BLOCK_E, VALUE, BLOCK_V, BLOCK_N,
        ROPE_COLUMN, IS_DESCRIBED, CAUSAL=False,
    )  # fmt: skip
    m, denominator, acc = _fold_keys(
        q, q_rope, m, denominator, acc, kv, v, k_rope, first_key, head, diagonal, end, offset + i,
        scale, stride_kv, stride_kr, NOPE, BLOCK_K, ROPE, BLOCK_E, VALUE, BLOCK_V, BLOCK_N,
        ROPE_COLUMN, IS_DESCRIBED, CAUSAL=True,
    )  # fmt: skip
    row_head = at * NUM_HEADS + head
    finish(
        m, denominator, acc, i, live, out_ptr + row_head * VALUE, lse_ptr + row_head, lse_ptr, 1.0,
        VALUE, BLOCK_V, HAS_SINKS=False, HAS_LSE=True,
    )  # fmt: skip


def mla_attend_dense(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    rows: DenseRows,
    spec: MLASpec,
    *,
    tile: Tile | None = None,
    described: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `Ops.mla_attend_dense`.

    Args:
        tile: to use instead of the tables' (for tuning).
        described: tensor descriptors may be used where there are some.
    """
    num_tokens, heads, _ = q.shape
    nope, value = spec.nope_dim, spec.value_dim
    assert q.stride(2) == k_rope.stride(1) == 1 and kv.is_contiguous()
    assert q.dtype == kv.dtype == k_rope.dtype
    out = torch.empty(num_tokens, heads, value, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
    arch = current_arch().name
    blocks = [block_dim(n) for n in (nope, spec.rope_dim, value)]
    is_described = (
        described
        and arch in DESCRIPTOR_TILES
        and q.element_size() == 2
        and blocks == [nope, spec.rope_dim, value]
        and k_rope.stride(0) % 8 == 0
        and k_rope.storage_offset() == spec.rank  # of rows that were gathered whole
    )
    if tile is None:
        if q.element_size() > 2:
            tile = FLOAT32_TILE
        else:
            tile = (DESCRIPTOR_TILES if is_described else DENSE_TILES).get(arch, FALLBACK_TILE)
            if sum(blocks) > MAX_WIDTH:
                half = max(16, tile.queries // 2), max(16, tile.keys // 2)
                tile = Tile(*half, 4, min(tile.num_stages, 2))
    keys, values, shared = kv, kv, k_rope
    if is_described:
        wide = kv.view(len(kv), -1)
        whole = torch.as_strided(k_rope, (len(kv), spec.rank + spec.rope_dim), k_rope.stride(), 0)
        keys, values, shared = (
            TensorDescriptor.from_tensor(x, [tile.keys, n])
            for x, n in ((wide, nope), (wide, value), (whole, spec.rope_dim))
        )
    num_rows = len(rows.offsets)
    _mla_dense[(num_tiles(num_tokens, num_rows, tile.queries) * heads,)](
        q,
        keys,
        values,
        shared,
        out,
        lse,
        *rows,
        num_rows,
        spec.scale,
        *q.stride()[:2],
        kv.stride(0),
        k_rope.stride(0),
        NUM_HEADS=heads,
        NOPE=nope,
        BLOCK_K=blocks[0],
        ROPE=spec.rope_dim,
        BLOCK_E=blocks[1],
        VALUE=value,
        BLOCK_V=blocks[2],
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        ROPE_COLUMN=spec.rank if is_described else 0,
        IS_DESCRIBED=is_described,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


@triton.jit
def _mla_write(
    latent_ptr,
    q_rope_ptr,
    pool_ptr,
    norm_ptr,
    positions_ptr,
    out_slots_ptr,
    cos_sin_ptr,
    eps,
    stride_l,
    stride_qt,
    stride_qh,
    stride_p,
    stride_t,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One token: its latent and key in program 0, HEADS of its queries in each other."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    half = i < HALF
    at_a = i
    at_b = i + HALF
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos = tl.load(cos_sin + i, mask=half, other=0.0)
    sin = tl.load(cos_sin + HALF + i, mask=half, other=0.0)
    if block == 0:
        slot = tl.load(out_slots_ptr + token)
        if slot < 0:
            return
        source = latent_ptr + token * stride_l
        target = pool_ptr + slot // PAGE_SIZE * stride_p + slot % PAGE_SIZE * stride_t
        r = tl.arange(0, BLOCK_R)
        x = tl.load(source + r, mask=r < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(target + r, x.to(pool_ptr.dtype.element_ty), mask=r < RANK)
        first = tl.load(source + RANK + at_a, mask=half, other=0.0).to(tl.float32)
        second = tl.load(source + RANK + at_b, mask=half, other=0.0).to(tl.float32)
        k_a = (first * cos - second * sin).to(pool_ptr.dtype.element_ty)
        k_b = (second * cos + first * sin).to(pool_ptr.dtype.element_ty)
        tl.store(target + RANK + at_a, k_a, mask=half)
        tl.store(target + RANK + at_b, k_b, mask=half)
    else:
        heads = (block - 1) * HEADS + tl.arange(0, HEADS)
        rows = q_rope_ptr + token * stride_qt + (heads * stride_qh)[:, None]
        live = (heads < NUM_HEADS)[:, None] & half[None, :]
        a = tl.load(rows + at_a[None, :], mask=live, other=0.0).to(tl.float32)
        b = tl.load(rows + at_b[None, :], mask=live, other=0.0).to(tl.float32)
        q_a = (a * cos - b * sin).to(q_rope_ptr.dtype.element_ty)
        q_b = (b * cos + a * sin).to(q_rope_ptr.dtype.element_ty)
        tl.store(rows + at_a[None, :], q_a, mask=live)
        tl.store(rows + at_b[None, :], q_b, mask=live)


def mla_write(
    latent: Tensor,
    q_rope: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: MLASpec,
    rope: Rope,
    norm: Tensor,
    eps: float,
) -> None:
    """See `Ops.mla_write`: one pass over all of it."""
    assert latent.stride(1) == q_rope.stride(2) == cache.k.stride(3) == 1
    assert rope.rotary_dim == spec.rope_dim
    half = spec.rope_dim // 2
    _mla_write[(len(latent), 1 + triton.cdiv(spec.num_heads, WRITE_HEADS))](
        latent,
        q_rope,
        cache.k,
        norm,
        meta.positions,
        meta.out_slots,
        rope.cos_sin,
        eps,
        latent.stride(0),
        *q_rope.stride()[:2],
        *cache.k.stride()[:2],
        NUM_HEADS=spec.num_heads,
        RANK=spec.rank,
        BLOCK_R=triton.next_power_of_2(spec.rank),
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        HEADS=WRITE_HEADS,
        PAGE_SIZE=meta.page_size,
        INTERLEAVED=rope.interleaved,
        num_warps=4,
    )
