"""Mixtures of experts with quantized weights: the products of `quantized`, in the tiles of `moe`.

Of few pairs of a token and an expert each is a tile of its own; more are sorted by expert. Where
the scheme rounds activations, codes are multiplied, but for one token; else weights are widened in
registers. Gate and up rows take turns, as in `moe`.

Runs on: gpu.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import BackendError, QuantizedExperts, QuantizedWeight
from .arch import Arch, current_arch
from .codes import Codes, pack, scaled_sum, widened_sum
from .moe import PackedExperts, RowScales, Tiles, one_by_one, store_rows, sum_parts, take_turns
from .moe import Tile as MoETile
from .moe_sort import sort_pairs
from .quantized import (
    SCALED_BLOCKS,
    Tile,
    constants,
    fit,
    fit_codes,
    round_rows,
    scaled_codes,
)


class PackedMatrix(NamedTuple):
    """The experts' weights of one of the two products; see `quantized.PackedQuantized`.

    Attributes:
        scaled: [num_experts, out, in]; where it is None, and only there, `widened` is not.
        bias: [num_experts, out], or None.
    """

    widened: Codes | None
    scaled: Tensor | None
    scales: Tensor
    group: int
    input_scale: Tensor | None
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, out, in)."""
        if self.widened is not None:
            num_in = self.widened.num_in
        else:
            assert self.scaled is not None
            num_in = self.scaled.shape[2]
        return self.scales.shape[0], self.scales.shape[-1], num_in


class PackedQuantizedExperts(NamedTuple):
    """gate_up has its rows as gate, up, gate, up, ..."""

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: str


# One token by codes of 8 bits, with scales of rows, or of blocks of columns: 22 and 26 us for
# Qwen3-30B-A3B on an H200, where bfloat16 takes 27 and widened codes 33 and 35.
ONE_TOKEN = Tiles(MoETile(1, 32, 256, 4, 6), MoETile(1, 8, 256, 2, 4))
ONE_TOKEN_BLOCKS = Tiles(MoETile(1, 16, 128, 2, 8), MoETile(1, 8, 128, 2, 8))


@triton.jit
def _rows_of_tile(
    order_ptr,
    tiles_ptr,
    ids_ptr,
    tile,
    num_tiles,
    ROWS: tl.constexpr,
    IS_SORTED: tl.constexpr,
):
    """A tile's expert; its places in the order of the pairs, which are its own, and the pairs."""
    i = tl.arange(0, ROWS)
    if IS_SORTED:
        expert = tl.load(tiles_ptr + tile)
        place = tl.load(tiles_ptr + num_tiles + tile) + i
        live = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
        pair = tl.load(order_ptr + place, mask=live, other=0)
    else:
        expert = tl.load(ids_ptr + tile)
        place = tile + i
        live = i < 1
        pair = tl.where(live, place, 0)
    return expert, place, live, pair


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_widened(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_tiles,
    num_out,
    num_in,
    num_chunks,
    stride_x,
    stride_expert,
    stride_chunk,
    stride_row,
    stride_scales,
    factor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    IS_SORTED: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """A block of one tile's product with widened weights."""
    blocks = tl.cdiv(num_out, BLOCK_OUT)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_OUT
    expert, place, live, pair = _rows_of_tile(
        order_ptr, tiles_ptr, ids_ptr, tile, num_tiles, ROWS, IS_SORTED
    )
    if expert >= NUM_EXPERTS:
        return
    source = pair // TOP_K if IS_GATE_UP else tl.where(live, place, 0)
    row = tl.minimum(first + tl.arange(0, BLOCK_OUT), num_out - 1)
    of_expert = expert.to(tl.int64)
    codes_ptr += of_expert * stride_expert
    acc = widened_sum(
        tl.zeros([BLOCK_OUT, ROWS], tl.float32), x_ptr + source.to(tl.int64)[:, None] * stride_x,
        live[:, None], codes_ptr, scales_ptr + of_expert * stride_scales, row, 0,
        num_chunks // UNROLL, num_out, num_in, stride_chunk, stride_row,
        KIND, PLANES, WIDTH, GROUP, UNROLL, STAGES, EVEN, SCALE, PTX,
    )  # fmt: skip
    store_rows(
        (acc * factor).T, of_expert * num_out + row, first, place, live, pair, bias_ptr,
        weights_ptr, out_ptr, num_out, ROWS, BLOCK_OUT, IS_GATE_UP, ACTIVATION, HAS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "stride_x_scales"])
def _grouped_scaled(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    weights_ptr,
    out_ptr,
    num_tiles,
    num_out,
    num_in,
    stride_x_scales,
    stride_scales,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """A block of one tile's product of codes."""
    blocks = tl.cdiv(num_out, BLOCK_OUT)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_OUT
    expert, place, live, pair = _rows_of_tile(
        order_ptr, tiles_ptr, order_ptr, tile, num_tiles, ROWS, True
    )
    if expert >= NUM_EXPERTS:
        return
    source = pair // TOP_K if IS_GATE_UP else tl.where(live, place, 0)
    row = tl.minimum(first + tl.arange(0, BLOCK_OUT), num_out - 1)
    of_expert = expert.to(tl.int64)
    acc = scaled_sum(
        tl.zeros([BLOCK_OUT, ROWS], tl.float32), x_ptr + source.to(tl.int64)[:, None] * num_in,
        x_scales_ptr + source, live, weight_ptr + of_expert * num_out * num_in,
        scales_ptr + of_expert * stride_scales, row, 0, tl.cdiv(num_in, BLOCK_IN),
        num_out, num_in, stride_x_scales, GROUP, BLOCK_IN, STAGES, EVEN, IS_INT8,
    )  # fmt: skip
    store_rows(
        acc.T, of_expert * num_out + row, first, place, live, pair, bias_ptr, weights_ptr,
        out_ptr, num_out, ROWS, BLOCK_OUT, IS_GATE_UP, ACTIVATION, HAS_BIAS,
    )  # fmt: skip


def pack_quantized_experts(weights: QuantizedExperts) -> PackedQuantizedExperts:
    """Gate and up rows take turns.

    Raises:
        BackendError: there is no kernel for weights of this kind.
    """
    matrices = _interleaved(weights.gate_up), weights.down
    if any(weight.order is not None for weight in matrices):
        raise BackendError("no Triton kernel takes experts whose columns have an order")
    all_scaled = [scaled_codes(weight) for weight in matrices]
    if any(scaled is None for scaled in all_scaled):
        all_scaled = [None, None]
    bias, down_bias = weights.gate_up_bias, weights.down_bias
    biases = (
        None if bias is None else take_turns(bias),
        None if down_bias is None else down_bias.contiguous(),
    )
    gate_up, down = map(_packed, matrices, all_scaled, biases)
    return PackedQuantizedExperts(gate_up, down, weights.activation)


def _packed(weight: QuantizedWeight, scaled: Tensor | None, bias: Tensor | None) -> PackedMatrix:
    codes = pack(weight)
    widened = codes if scaled is None else None
    return PackedMatrix(widened, scaled, codes.scales, codes.group, weight.input_scale, bias)


def _interleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """With gate and up rows in turns, and scales for each row."""
    num_rows, block = weight.shape[1], weight.block[0]

    def of_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else take_turns(x.repeat_interleave(block, 1)[:, :num_rows])

    codes = take_turns(weight.codes.view(torch.uint8)).view(weight.codes.dtype)
    return replace(
        weight,
        codes=codes,
        scales=of_rows(weight.scales),
        offsets=of_rows(weight.offsets),
        block=(1, weight.block[1]),
    )


def quantized_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedQuantizedExperts,
    tile: Tile | None = None,
) -> Tensor:
    """The weighted sum of each token's experts: [num_tokens, hidden].

    Args:
        tile: for both products of several tokens, instead of that of `default_tile`.
    """
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, inner = packed.down.shape
    assert x.stride(1) == 1 and topk_ids.is_contiguous() and topk_weights.is_contiguous()
    if num_tokens == 0:
        return torch.empty_like(x)
    is_scaled = packed.down.widened is None
    if is_scaled and num_tokens == 1:
        return _one_token(x, topk_ids, topk_weights, packed)
    arch, num_pairs = current_arch(), num_tokens * top_k
    if tile is None:
        kind = "" if packed.down.widened is None else packed.down.widened.kind
        tile = default_tile(num_pairs / num_experts, kind, arch)
    order = tiles = topk_ids
    num_tiles = num_pairs
    is_few = num_tokens == 1 or (num_tokens == 2 and 4 * num_pairs <= num_experts)
    is_sorted = is_scaled or not is_few  # 8 tokens of Qwen3-30B-A3B in fp8: 91 us, unsorted 129
    if is_sorted:
        order, tiles = sort_pairs(topk_ids, num_experts, tile.rows)
        num_tiles = tiles.shape[1]
    y = x.new_empty(num_pairs, inner)
    parts = x.new_empty(num_pairs, hidden)
    for source, matrix, target in ((x, packed.gate_up, y), (y, packed.down, parts)):
        num_out, num_in = matrix.shape[1:]
        common = {
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "IS_GATE_UP": source is x,
            "ACTIVATION": packed.activation,
            "HAS_BIAS": matrix.bias is not None,
        }
        bias = matrix.bias if matrix.bias is not None else x
        if is_scaled:
            assert matrix.scaled is not None
            rounded = round_rows(source, matrix.scaled.dtype, matrix.group, matrix.input_scale)
            t = fit(tile, num_in, matrix.group, arch)
            _grouped_scaled[(triton.cdiv(num_out, t.block_out) * num_tiles,)](
                rounded.codes,
                rounded.scales,
                matrix.scaled,
                matrix.scales,
                bias,
                order,
                tiles,
                topk_weights,
                target,
                num_tiles,
                num_out,
                num_in,
                rounded.scales.stride(0),
                matrix.scales.stride(0),
                GROUP=matrix.group,
                ROWS=t.rows,
                BLOCK_OUT=t.block_out,
                BLOCK_IN=t.block_in,
                STAGES=t.stages,
                EVEN=num_in % t.block_in == 0,
                IS_INT8=matrix.scaled.dtype == torch.int8,
                **common,
                num_warps=t.num_warps,
            )
            continue
        codes = matrix.widened
        assert codes is not None
        t = fit_codes(tile, codes, x.element_size(), arch)
        _grouped_widened[(triton.cdiv(num_out, t.block_out) * num_tiles,)](
            source,
            codes.codes,
            codes.scales,
            bias,
            order,
            tiles,
            topk_ids,
            topk_weights,
            target,
            num_tiles,
            num_out,
            num_in,
            codes.num_chunks,
            source.stride(0),
            codes.codes.stride(0),
            codes.codes.stride(-3),
            codes.codes.stride(-2),
            codes.scales.stride(0),
            codes.factor,
            IS_SORTED=is_sorted,
            ROWS=t.rows,
            BLOCK_OUT=t.block_out,
            UNROLL=t.block_in // codes.chunk,
            STAGES=t.stages,
            **common,
            **constants(codes, arch),
            num_warps=t.num_warps,
        )
    return sum_parts(parts, x.new_empty(num_tokens, hidden))


def _one_token(
    x: Tensor, ids: Tensor, weights: Tensor, packed: PackedQuantizedExperts, t: Tiles | None = None
) -> Tensor:
    """By codes of 8 bits, which one row widens as fast as they are read; x is not rounded."""
    up, down = packed.gate_up, packed.down
    assert up.scaled is not None and down.scaled is not None
    plain = PackedExperts(up.scaled, down.scaled, up.bias, down.bias, packed.activation)
    scales = RowScales(up.scales, up.group), RowScales(down.scales, down.group)
    t = t or (ONE_TOKEN_BLOCKS if up.group or down.group else ONE_TOKEN)
    t = Tiles(*(_within(tile, group) for tile, (_, group) in zip(t, scales, strict=True)))
    out = torch.empty_like(x)
    one_by_one(x, ids, weights, plain, t, out, row_scales=scales)
    return out


def _within(tile: MoETile, group: int) -> MoETile:
    return tile._replace(block_in=min(tile.block_in, group)) if group else tile


def default_tile(per_expert: float, widened: str, arch: Arch) -> Tile:
    """By how many pairs an expert has, and of what kind the codes are; "" multiplies codes."""
    if per_expert <= 64:
        rows = 16 if per_expert <= 16 else 32 if per_expert <= 32 else 64
        is_wide = widened == "mxfp4" and 1 <= per_expert <= 32
        return Tile(rows, 128 if is_wide else 64, 256, 4, 3)
    if arch.name == "sm_100" or arch.name.startswith("gfx"):
        return Tile(64, 128, 256 if widened else 128, 4, 3)
    if not widened:
        return SCALED_BLOCKS  # with scales of rows as well: 350 us of 415
    return Tile(128, 256 if widened.startswith("uint4") else 128, 128, 8, 3)
