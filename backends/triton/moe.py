"""Mixtures of experts: the products of tokens with the experts that `routing` chose.

A pair is a token and one of its experts; pairs are numbered token by token. Two ways:

* One or two tokens: each pair streams its expert's weights through a pipeline of asynchronous
  copies, two kernels in all. The second sums a token's experts along with the inner dimension.
* More: a kernel (for very many pairs two) sorts the pairs by expert, so that tiles of pairs of one
  expert are matrix products, and a last one sums each token's parts in the order of its experts.
  Grids depend on sizes alone: nothing waits for the host, and all of it can be captured.

Gate and up projections are interleaved row by row when packed, so that both of a pair lie in one
thread's registers when the first product ends. Tiles come from a table that
benchmarks/tune_moe.py measures, `moe_tiles.json` beside this file, else from `default_tiles`.

Runs on: gpu.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..api import ExpertWeights
from .arch import current_arch
from .fused import rms_norm
from .moe_sort import sort_pairs

TABLE = Path(__file__).with_name("moe_tiles.json")
HAS_DESCRIPTORS = ("sm_90", "sm_100", "interpreter")
SUM_BLOCK = 1024  # columns a program of the last sum


class Tile(NamedTuple):
    """A block of a product: rows (pairs) x block_out, block_in at a time.

    Attributes:
        rows: 1 for the kernels that do not sort.
        stages: blocks of the weights that are in flight.
        swapped: the weights are the left operand of the matrix instruction, whose left side has
            at least 64 rows on Hopper.
        described: weights come by tensor descriptor (TMA), where the GPU has them.
    """

    rows: int
    block_out: int
    block_in: int
    num_warps: int
    stages: int
    swapped: bool = False
    described: bool = False


class Tiles(NamedTuple):
    """Those of the two products; both have as many rows."""

    gate_up: Tile
    down: Tile


class PackedExperts(NamedTuple):
    """Weights as the kernels read them.

    Attributes:
        gate_up: [num_experts, 2 * inner, hidden], rows gate, up, gate, up, ...
        down: [num_experts, hidden, inner].
        gate_up_bias, down_bias: [num_experts, 2 * inner], as gate_up; [num_experts, hidden].
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str


def default_tiles(num_pairs: int, num_experts: int, top_k: int) -> Tiles:
    """Tiles for sizes that the table does not have.

    By what fits, not by measurement: several programs a multiprocessor while weights are streamed,
    so that one's start and end hide behind the others; large products beyond.
    """
    if num_pairs == top_k or (num_pairs == 2 * top_k and 4 * num_pairs <= num_experts):
        return Tiles(Tile(1, 16, 256, 4, 4), Tile(1, 8, 256, 2, 6))
    per_expert = num_pairs / num_experts
    if per_expert <= 16:
        few = Tile(16, 64, 128, 4, 4, swapped=True)
        return Tiles(few, few)
    if per_expert <= 48:
        some = Tile(32, 128, 128, 4, 3, swapped=True)
        return Tiles(some, some)
    if per_expert <= 96:
        return Tiles(Tile(64, 256, 64, 4, 3), Tile(64, 128, 64, 4, 4))
    return Tiles(Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 3))


def table_key(num_experts: int, inner: int, hidden: int, dtype: torch.dtype) -> str:
    """A shape's name in the table."""
    return f"{num_experts} x {inner} x {hidden} {str(dtype).removeprefix('torch.')}"


@functools.lru_cache(4096)
def choose_tiles(
    num_pairs: int, top_k: int, num_experts: int, inner: int, hidden: int, dtype: torch.dtype
) -> Tiles:
    """The measured tiles of the next larger number of pairs in the table, or default ones."""
    by_shape: Mapping[str, Any] = _table().get(current_arch().name, {})
    measured = by_shape.get(table_key(num_experts, inner, hidden, dtype))
    if not measured:
        return default_tiles(num_pairs, num_experts, top_k)
    limits = sorted(int(limit) for limit in measured)
    limit = next((n for n in limits if n >= num_pairs), limits[-1])
    gate_up, down = measured[str(limit)]
    return Tiles(Tile(*gate_up), Tile(*down))


@functools.cache
def _table() -> Mapping[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


# ------------------------------------------------------------------------------- parts of both


@triton.jit
def _load_weights(
    weight, first_row, rows, start, k, num_in, DESCRIBED: tl.constexpr, EVEN: tl.constexpr
):
    """A block [BLOCK_OUT, BLOCK_IN] of all experts' rows, [num_experts * num_out, num_in]."""
    if DESCRIBED:
        w = weight.load([first_row, start])
    elif EVEN:
        w = tl.load(weight + rows[:, None] * num_in + (start + k)[None, :])
    else:
        ptrs = weight + rows[:, None] * num_in + (start + k)[None, :]
        w = tl.load(ptrs, mask=(start + k < num_in)[None, :], other=0.0)
    return w


@triton.jit
def _activate(y, ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """[ROWS, 2 * WIDTH] of gate, up, gate, up, ... to [ROWS, WIDTH]."""
    gate, up = tl.split(tl.reshape(y, [ROWS, WIDTH, 2]))
    if ACTIVATION == "silu":
        out = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        out = gate * tl.sigmoid(inner) * up
    else:  # swiglu_clamped; NaN stays NaN
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL)
        out = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return out


# ----------------------------------------------------------------------------------- few pairs


@triton.jit
def _pair_gate_up(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    ids_ptr,
    row_scales_ptr,
    out_ptr,
    num_out,
    num_in,
    stride_x,
    stride_row_scales,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK_OUT rows of gate and up for one pair; out is [num_pairs, inner].

    With a norm of x, its scale of a row is one factor, which is applied to the result. So are the
    scales of the weight's rows where SCALE_GROUP is 0; else so many columns share one of each row.
    """
    pair = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_OUT
    n = first + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    row = tl.minimum(n, num_out - 1)
    rows = expert * num_out + row
    row_scales_ptr += expert * stride_row_scales
    x_ptr += (pair // TOP_K).to(tl.int64) * stride_x
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        w = _load_weights(weight_ptr, 0, rows, start, k, num_in, False, EVEN)
        column = start + k
        if EVEN:
            x = tl.load(x_ptr + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            if EVEN:
                x *= tl.load(norm_ptr + column).to(tl.float32)
            else:
                x *= tl.load(norm_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
        if SCALE_GROUP > 0:
            group_scales = row_scales_ptr + start // SCALE_GROUP * num_out
            acc += w.to(tl.float32) * x[None, :] * tl.load(group_scales + row)[:, None]
        else:
            acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if SCALE_GROUP == 0:
        y *= tl.load(row_scales_ptr + row)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / num_in + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    y = tl.reshape(_activate(y, 1, BLOCK_OUT // 2, ACTIVATION), [BLOCK_OUT // 2])
    c = first // 2 + tl.arange(0, BLOCK_OUT // 2)
    inner = num_out // 2
    tl.store(out_ptr + pair * inner + c, y.to(out_ptr.dtype.element_ty), mask=c < inner)


@triton.jit
def _pair_down(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    scales_ptr,
    row_scales_ptr,
    out_ptr,
    num_out,
    num_in,
    stride_row_scales,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK_OUT outputs of one token: one loop over its experts' inner dimensions.

    x is [num_tokens * TOP_K, num_in]. The result is added to what is there where ADD. SCALE_GROUP:
    columns that share a scale of each row, 0 for all, negative where there are none.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_IN)
    j = tl.arange(0, triton.next_power_of_2(TOP_K))
    ids = tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=0)
    scales = tl.load(scales_ptr + token * TOP_K + j, mask=j < TOP_K, other=0.0)
    x_ptr += token * TOP_K * num_in
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    blocks = tl.cdiv(num_in, BLOCK_IN)
    for i in tl.range(0, TOP_K * blocks, num_stages=STAGES):
        rank = i // blocks
        start = i % blocks * BLOCK_IN
        column = start + k
        expert = tl.sum(tl.where(j == rank, ids, 0), 0).to(tl.int64)
        scale = tl.sum(tl.where(j == rank, scales, 0.0), 0)
        rows = expert * num_out + row
        w = _load_weights(weight_ptr, 0, rows, start, k, num_in, False, EVEN)
        if EVEN:
            x = tl.load(x_ptr + rank * num_in + column)
        else:
            x = tl.load(x_ptr + rank * num_in + column, mask=column < num_in, other=0.0)
        x = x.to(tl.float32) * scale
        if SCALE_GROUP >= 0:
            group = start // SCALE_GROUP if SCALE_GROUP > 0 else 0
            row_scales = row_scales_ptr + expert * stride_row_scales + group * num_out
            acc += w.to(tl.float32) * x[None, :] * tl.load(row_scales + row)[:, None]
        else:
            acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + ids.to(tl.int64)[:, None] * num_out + row[None, :]
        bias = tl.load(bias_ptrs, mask=(j < TOP_K)[:, None], other=0.0)
        y += tl.sum(bias.to(tl.float32) * scales[:, None], 0)
    out_ptrs = out_ptr + token * num_out + n
    if ADD:
        y += tl.load(out_ptrs, mask=n < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=n < num_out)


# ---------------------------------------------------------------------------------- many pairs


@triton.jit
def store_rows(
    y,
    rows,
    first,
    place,
    live,
    pair,
    bias_ptr,
    scales_ptr,
    out_ptr,
    num_out,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store a tile's block y [ROWS, BLOCK_OUT]: activated by place, or weighted by pair."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    if IS_GATE_UP:
        y = _activate(y, ROWS, BLOCK_OUT // 2, ACTIVATION)
        c = first // 2 + tl.arange(0, BLOCK_OUT // 2)
        width = num_out // 2
        out_ptrs = out_ptr + place.to(tl.int64)[:, None] * width + c[None, :]
    else:
        y *= tl.load(scales_ptr + pair, mask=live, other=0.0)[:, None]
        c = first + tl.arange(0, BLOCK_OUT)
        width = num_out
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < width)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped(
    x_ptr,
    weight,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    scales_ptr,
    out_ptr,
    num_tiles,
    num_out,
    num_in,
    stride_x,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A block of one tile's product.

    The first product gathers tokens and writes [num_pairs, inner] in sorted order; the second
    reads that, multiplies by the pairs' weights and scatters [num_pairs, hidden] by pair.
    """
    blocks = tl.cdiv(num_out, BLOCK_OUT)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_OUT
    expert = tl.load(tiles_ptr + tile)
    if expert >= NUM_EXPERTS:
        return
    place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    live = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
    pair = tl.load(order_ptr + place, mask=live, other=0)
    # Rows beyond the last multiply something and are not stored.
    source = pair // TOP_K if IS_GATE_UP else tl.where(live, place, 0)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_x
    n = first + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    first_row = expert * num_out + first
    rows = expert.to(tl.int64) * num_out + tl.minimum(n, num_out - 1)
    if SWAPPED:
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        w = _load_weights(weight, first_row, rows, start, k, num_in, DESCRIBED, EVEN)
        column = start + k
        if EVEN:
            x = tl.load(x_ptrs + column[None, :])
        else:
            x = tl.load(x_ptrs + column[None, :], mask=(column < num_in)[None, :], other=0.0)
        if SWAPPED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    store_rows(
        acc.T if SWAPPED else acc, rows, first, place, live, pair, bias_ptr, scales_ptr, out_ptr,
        num_out, ROWS, BLOCK_OUT, IS_GATE_UP, ACTIVATION, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _sum_parts(
    parts_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < size
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        part = tl.load(parts_ptr + (token * TOP_K + rank) * size + c, mask=live, other=0.0)
        total += part.to(tl.float32)
    if ADD:
        total += tl.load(out_ptr + token * size + c, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + c, total.to(out_ptr.dtype.element_ty), mask=live)


# --------------------------------------------------------------------------------------- hosts


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Gate and up rows take turns."""
    w = weights
    return PackedExperts(
        take_turns(w.gate_up),
        w.down.contiguous(),
        None if w.gate_up_bias is None else take_turns(w.gate_up_bias),
        None if w.down_bias is None else w.down_bias.contiguous(),
        w.activation,
    )


def take_turns(x: Tensor) -> Tensor:
    """[num_experts, 2 * inner, ...] of all gate rows, then all up rows, to gate, up, gate, up."""
    gate, up = x.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    tiles: Tiles | None = None,
) -> Tensor:
    """The weighted sum of each token's experts: [num_tokens, hidden].

    Args:
        tiles: instead of those of `choose_tiles`.
    """
    assert x.stride(1) == 1 and topk_ids.is_contiguous() and topk_weights.is_contiguous()
    out = x.new_empty(len(x), packed.down.shape[1])
    if len(x) == 0:
        return out
    if tiles is None:
        tiles = _tiles_for(topk_ids, packed)
    if tiles.gate_up.rows == 1:
        one_by_one(x, topk_ids, topk_weights, packed, tiles, out)
    else:
        _sorted(x, topk_ids, topk_weights, packed, tiles, out)
    return out


def norm_experts_add(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
) -> None:
    """residual += experts(rms_norm(residual)), in place, [num_tokens, hidden]."""
    assert residual.is_contiguous()
    if len(residual) == 0:
        return
    tiles = _tiles_for(topk_ids, packed)
    if tiles.gate_up.rows == 1:
        norm = norm_weight, eps
        one_by_one(residual, topk_ids, topk_weights, packed, tiles, residual, norm, add=True)
    else:
        x = rms_norm(residual, norm_weight, eps)
        _sorted(x, topk_ids, topk_weights, packed, tiles, residual, add=True)


def _tiles_for(ids: Tensor, packed: PackedExperts) -> Tiles:
    num_experts, hidden, inner = packed.down.shape
    shape = (num_experts, inner, hidden)
    return choose_tiles(ids.numel(), ids.shape[1], *shape, packed.down.dtype)


class RowScales(NamedTuple):
    """Of codes: float32 [num_experts, groups, out], and how many columns share one, 0 for all."""

    scales: Tensor
    group: int


def one_by_one(
    x: Tensor,
    ids: Tensor,
    scales: Tensor,
    packed: PackedExperts,
    t: Tiles,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
    *,
    add: bool = False,
    row_scales: tuple[RowScales, RowScales] | None = None,
) -> None:
    """The experts of few tokens, each pair by itself.

    Args:
        norm: weight and eps of an RMS norm of x.
        add: to what is in `out`, instead of overwriting it.
        row_scales: of both weights, where they are codes of 8 bits.
    """
    num_tokens, top_k = ids.shape
    of_gate_up, of_down = row_scales or (RowScales(x, -1), RowScales(x, -1))
    hidden, inner = packed.down.shape[1:]
    y = x.new_empty(num_tokens * top_k, inner)
    norm_weight, eps = norm or (x, 0.0)
    bias, tile = packed.gate_up_bias, fit(t.gate_up, x, hidden)
    _pair_gate_up[(triton.cdiv(2 * inner, tile.block_out), num_tokens * top_k)](
        x,
        packed.gate_up,
        bias if bias is not None else x,
        norm_weight,
        ids,
        of_gate_up.scales,
        y,
        2 * inner,
        hidden,
        x.stride(0),
        of_gate_up.scales.stride(0),
        eps,
        TOP_K=top_k,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        ACTIVATION=packed.activation,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        SCALE_GROUP=of_gate_up.group,
        EVEN=hidden % tile.block_in == 0,
        num_warps=tile.num_warps,
    )
    bias, tile = packed.down_bias, fit(t.down, x, inner)
    _pair_down[(triton.cdiv(hidden, tile.block_out), num_tokens)](
        y,
        packed.down,
        bias if bias is not None else x,
        ids,
        scales,
        of_down.scales,
        out,
        hidden,
        inner,
        of_down.scales.stride(0),
        TOP_K=top_k,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        ADD=add,
        SCALE_GROUP=of_down.group,
        EVEN=inner % tile.block_in == 0,
        num_warps=tile.num_warps,
    )


def _sorted(
    x: Tensor,
    ids: Tensor,
    scales: Tensor,
    packed: PackedExperts,
    t: Tiles,
    out: Tensor,
    *,
    add: bool = False,
) -> None:
    top_k = ids.shape[1]
    num_experts, hidden, inner = packed.down.shape
    order, tiles = sort_pairs(ids, num_experts, t.gate_up.rows)
    num_pairs, num_tiles = order.shape[0], tiles.shape[1]
    y = x.new_empty(num_pairs, inner)
    parts = x.new_empty(num_pairs, hidden)
    for source, weight, bias, target, tile in (
        (x, packed.gate_up, packed.gate_up_bias, y, t.gate_up),
        (y, packed.down, packed.down_bias, parts, t.down),
    ):
        num_out, num_in = weight.shape[1:]
        tile = fit(tile, x, num_in)
        operand: Tensor | TensorDescriptor = weight
        if tile.described:
            rows = weight.view(-1, num_in)
            operand = TensorDescriptor.from_tensor(rows, [tile.block_out, tile.block_in])
        _grouped[(triton.cdiv(num_out, tile.block_out) * num_tiles,)](
            source,
            operand,
            bias if bias is not None else x,
            order,
            tiles,
            scales,
            target,
            num_tiles,
            num_out,
            num_in,
            source.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            IS_GATE_UP=source is x,
            ROWS=tile.rows,
            BLOCK_OUT=tile.block_out,
            BLOCK_IN=tile.block_in,
            STAGES=tile.stages,
            SWAPPED=tile.swapped,
            DESCRIBED=tile.described,
            ACTIVATION=packed.activation,
            HAS_BIAS=bias is not None,
            EVEN=num_in % tile.block_in == 0,
            num_warps=tile.num_warps,
        )
    sum_parts(parts, out, add=add)


def sum_parts(parts: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out [num_tokens, hidden] = the sums of each token's parts [num_pairs, hidden], or += them."""
    num_tokens, size = out.shape
    block = min(SUM_BLOCK, triton.next_power_of_2(size))
    _sum_parts[(num_tokens, triton.cdiv(size, block))](
        parts, out, size, TOP_K=len(parts) // num_tokens, BLOCK=block, ADD=add, num_warps=4
    )
    return out


def fit(tile: Tile, x: Tensor, num_in: int) -> Tile:
    """A tile that suits x's type and the GPU's shared memory, for products over num_in."""
    arch = current_arch()
    block_in = min(tile.block_in, max(16, triton.next_power_of_2(num_in)))
    if x.element_size() == 4:
        block_in = max(16, block_in // 2)
    num_rows = tile.block_out + (tile.rows if tile.rows > 1 else 0)
    while block_in > 16 and num_rows * block_in * x.element_size() > arch.shared_bytes:
        block_in //= 2
    stage_bytes = num_rows * block_in * x.element_size()
    described = tile.described and arch.name in HAS_DESCRIPTORS
    return tile._replace(
        block_in=block_in,
        stages=max(1, min(tile.stages, arch.shared_bytes // stage_bytes)),
        described=described and num_in * x.element_size() % 16 == 0,
    )
