"""Products with quantized weights.

Two kinds. *Widened*: codes become the activations' type in registers, and the product is theirs.
*Scaled*: activations are rounded to the codes' type (fp8, int8) by a kernel of its own, matrix
instructions multiply codes, and scales join the sums. Weights are the left operand of the
instruction throughout, whose left side has 64 rows on Hopper while tokens may be few; where they
are, several programs share the columns of a block, and the last one to finish adds up their parts.

Runs on: gpu.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import BackendError, QuantizedWeight
from .arch import Arch, current_arch
from .codes import NO_FP8, PLANES, TRITON_TYPES, Codes, pack, widen

SPLIT_BLOCK_OUT = 16  # the smallest block of outputs: how many counters a weight needs
FEW_ROWS = 64  # up to which columns are shared among programs
MIN_SPLIT_COLUMNS = 512  # a program's, at least
PROGRAMS_PER_CORE = 3  # that fill a multiprocessor which streams weights
SIGNED_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 rounds what is added to it


class Tile(NamedTuple):
    """A block of a product: rows x block_out; `block_in` of widened ones is up to the codes.

    Attributes:
        stages: blocks in flight. splits: programs that share the columns; None for as many as
            fill the device.
    """

    rows: int
    block_out: int
    block_in: int
    num_warps: int
    stages: int
    splits: int | None = None


class WidenedWeight(NamedTuple):
    """See `codes.Codes`."""

    codes: Codes
    num_out: int
    bias: Tensor | None
    order: Tensor | None
    counters: Tensor  # int32, one for each block of outputs, 0 between launches


class ScaledWeight(NamedTuple):
    """Codes [out, in] for matrix instructions of their own type.

    Attributes:
        scales: float32 [out], or [blocks of rows, blocks of columns].
        block: (0, 0), or the size of those.
        input_scale: float32 [1], the activations' fixed scale, or None.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    input_scale: Tensor | None
    bias: Tensor | None
    counters: Tensor


class Rounded(NamedTuple):
    """Activations as codes [num_tokens, in], and scales float32 [groups, num_tokens]."""

    codes: Tensor
    scales: Tensor


# ------------------------------------------------------------------------------------ activations


@triton.jit
def _round_rows(
    x_ptr,
    codes_ptr,
    scales_ptr,
    fixed_ptr,
    num_rows,
    size,
    stride_x,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """One token; GROUP columns share a scale, or all where it is BLOCK. NaN makes its scale NaN."""
    row = tl.program_id(0).to(tl.int64)
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    c = tl.arange(0, BLOCK)
    live = c < size
    x = tl.load(x_ptr + row * stride_x + c, mask=live, other=0.0).to(tl.float32)
    x = tl.reshape(x, [NUM_GROUPS, GROUP])
    if IS_FIXED:
        scale = tl.zeros([NUM_GROUPS], tl.float32) + tl.load(fixed_ptr)
    else:
        scale = tl.max(tl.abs(x), 1) / LARGEST
        scale = tl.where(scale == 0, 1.0, scale)
    is_broken = tl.max((x != x).to(tl.int32), 1) > 0
    y = tl.clamp(x / scale[:, None], -LARGEST, LARGEST)
    if IS_INT8:
        y = (y + SIGNED_ROUNDING) - SIGNED_ROUNDING
    scale = tl.where(is_broken, float("nan"), scale)
    y = tl.reshape(y, [BLOCK]).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + c, y, mask=live)
    g = tl.arange(0, NUM_GROUPS)
    tl.store(scales_ptr + g.to(tl.int64) * num_rows + row, scale, mask=g * GROUP < size)


def round_rows(x: Tensor, dtype: torch.dtype, group: int, fixed: Tensor | None) -> Rounded:
    """Activations [num_tokens, in] as codes of a type, by scales of a token or of its groups.

    Args:
        group: columns that share a scale; 0 for all.
        fixed: float32 [1], the scale of all, or None to measure it.
    """
    assert x.stride(1) == 1
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    codes = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    num_groups = triton.cdiv(size, group) if group else 1
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device)
    is_int8 = dtype == torch.int8
    if num_rows:
        _round_rows[(num_rows,)](
            x,
            codes,
            scales,
            fixed if fixed is not None else scales,
            num_rows,
            size,
            x.stride(0),
            BLOCK=block,
            GROUP=group or block,
            LARGEST=127.0 if is_int8 else torch.finfo(dtype).max,
            IS_INT8=is_int8,
            IS_FIXED=fixed is not None,
            num_warps=min(16, max(1, block // 1024)),
        )
    return Rounded(codes, scales)


# --------------------------------------------------------------------------------------- products


@triton.jit
def _finish(
    acc,
    m,
    n,
    num_rows,
    num_out,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store a block [out, rows], or a part of it; the last of its parts adds them all up."""
    y = acc.T
    live = (m < num_rows)[:, None] & (n < num_out)[None, :]
    at = m.to(tl.int64)[:, None] * num_out + n[None, :]
    is_last = True
    if SPLITS > 1:
        size = num_rows.to(tl.int64) * num_out
        tl.store(partial_ptr + tl.program_id(1) * size + at, y, mask=live)
        tl.debug_barrier()
        finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        is_last = finished == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.debug_barrier()
            tl.store(counter_ptr, 0)  # ready for the next launch
            y = tl.zeros_like(y)
            for split in range(SPLITS):  # past the L1 cache: others wrote them a moment ago
                part = partial_ptr + split * size + at
                y += tl.load(part, mask=live, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])
def _widened(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    row_tiles,
    num_out,
    num_in,
    num_chunks,
    stride_x,
    factor,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """A block [BLOCK_OUT, ROWS] over a split's chunks, UNROLL of them at a time."""
    CHUNK: tl.constexpr = PLANES * WIDTH
    block = tl.program_id(0) // row_tiles
    n = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    row = tl.minimum(n, num_out - 1)  # rows beyond the last repeat it
    live_m = (m < num_rows)[:, None]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    steps = num_chunks // UNROLL
    per_split = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * per_split
    for step in tl.range(first, tl.minimum(first + per_split, steps), num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            chunk = step * UNROLL + u
            rows = (chunk.to(tl.int64) * num_out + row) * WIDTH
            codes = tl.load(codes_ptr + rows[:, None] + k[None, :])
            for p in tl.static_range(PLANES):
                column = chunk * CHUNK + p * WIDTH
                live = live_m
                if not EVEN:
                    live = live_m & (column + k < num_in)[None, :]
                x = tl.load(x_ptrs + column, mask=live, other=0.0)
                if KIND == "mxfp4":
                    if p == 0:
                        words = tl.load(scales_ptr + chunk * num_out + row)
                elif GROUP == 0:
                    words = row
                elif p == 0 or (p * WIDTH) % GROUP == 0 or CHUNK % GROUP != 0:
                    words = tl.load(scales_ptr + column // GROUP * num_out + row)
                w = widen(codes, words, p, KIND, GROUP, DTYPE, SCALE, PTX)
                acc = tl.dot(w, x.T, acc, input_precision="ieee")
    if GROUP == 0:
        acc *= tl.load(scales_ptr + row)[:, None]
    _finish(
        acc * factor, m, n, num_rows, num_out, bias_ptr, out_ptr, partial_ptr,
        counters_ptr + block, SPLITS, HAS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])
def _scaled(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    row_tiles,
    num_out,
    num_in,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """A block [BLOCK_OUT, ROWS] of codes times codes; SCALE_ROWS 0: a scale a row and a token.

    Else the weights' scales are of blocks, and tokens have one for each block of columns, of which
    a step's BLOCK_IN columns are a part.
    """
    block = tl.program_id(0) // row_tiles
    n = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_IN)
    row = tl.minimum(n, num_out - 1)
    live_m = m < num_rows
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * num_in + k[None, :]
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * num_in + k[None, :]
    SUM: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    zeros = tl.zeros([BLOCK_OUT, ROWS], SUM)
    if SCALE_ROWS > 0:
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        scale_ptrs = scales_ptr + row // SCALE_ROWS * tl.cdiv(num_in, SCALE_COLUMNS)
    else:
        acc = zeros
    steps = tl.cdiv(num_in, BLOCK_IN)
    per_split = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * per_split
    for step in tl.range(first, tl.minimum(first + per_split, steps), num_stages=STAGES):
        start = step * BLOCK_IN
        if EVEN:
            w = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=live_m[:, None], other=0.0)
        else:
            live = (start + k < num_in)[None, :]
            w = tl.load(weight_ptrs + start, mask=live, other=0.0)
            x = tl.load(x_ptrs + start, mask=live_m[:, None] & live, other=0.0)
        if SCALE_ROWS > 0:
            group = start // SCALE_COLUMNS
            w_scale = tl.load(scale_ptrs + group)
            x_scale = tl.load(x_scales_ptr + group * num_rows + m, mask=live_m, other=0.0)
            part = tl.dot(w, x.T, zeros, out_dtype=SUM)
            acc += part.to(tl.float32) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc = tl.dot(w, x.T, acc, out_dtype=SUM)
    y = acc.to(tl.float32)
    if SCALE_ROWS == 0:
        x_scale = tl.load(x_scales_ptr + m, mask=live_m, other=0.0)
        y *= tl.load(scales_ptr + row)[:, None] * x_scale[None, :]
    _finish(
        y, m, n, num_rows, num_out, bias_ptr, out_ptr, partial_ptr, counters_ptr + block,
        SPLITS, HAS_BIAS,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ hosts


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None) -> WidenedWeight | ScaledWeight:
    """Codes for one of the two kinds of product.

    Raises:
        BackendError: there is no kernel for a weight of this kind.
    """
    num_out = weight.shape[0]
    counters = torch.zeros(
        triton.cdiv(num_out, SPLIT_BLOCK_OUT), dtype=torch.int32, device=weight.codes.device
    )
    if (scaled := _scaled_weight(weight, bias, counters)) is not None:
        return scaled
    return WidenedWeight(pack(weight), num_out, bias, weight.order, counters)


def _scaled_weight(
    weight: QuantizedWeight, bias: Tensor | None, counters: Tensor
) -> ScaledWeight | None:
    """None where activations stay what they are: by the scheme, or as the GPU has no such type."""
    num_out, num_in = weight.shape
    if weight.activations is None or weight.kind not in ("fp8", "int8") or weight.order is not None:
        return None
    if weight.kind == "fp8" and current_arch().name in NO_FP8:
        return None
    if weight.offsets is not None or weight.scales is None:
        return None
    codes, scales, block = weight.codes.contiguous(), weight.scales, weight.block
    if weight.activations != "group":
        if block[1] < num_in:
            return None
        block = (0, 0)
        scales = scales.repeat_interleave(weight.block[0], 0)[:num_out, 0]
    elif block[1] & (block[1] - 1) or block[1] < 32:
        raise BackendError(f"no Triton kernel takes groups of {block[1]} rounded activations")
    return ScaledWeight(codes, scales.contiguous(), block, weight.input_scale, bias, counters)


def quantized_linear(
    x: Tensor,
    packed: WidenedWeight | ScaledWeight,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """[num_tokens, in] to [num_tokens, out], in x's type or out_dtype.

    Args:
        tile: instead of that of `widened_tile` or `scaled_tile`.
    """
    if isinstance(packed, ScaledWeight):
        rounded = round_rows(x, packed.codes.dtype, packed.block[1], packed.input_scale)
        return scaled_linear(rounded, packed, out_dtype or x.dtype, tile)
    return widened_linear(x, packed, out_dtype or x.dtype, tile)


def scaled_linear(
    x: Rounded, packed: ScaledWeight, out_dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The product of rounded activations: [num_tokens, out]."""
    num_rows, num_in = x.codes.shape
    num_out = packed.codes.shape[0]
    out = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.codes.device)
    if num_rows == 0:
        return out
    arch = current_arch()
    tile = tile or scaled_tile(num_rows, packed.block[0] > 0, arch)
    block_in = max(32, min(tile.block_in, triton.next_power_of_2(num_in)))
    if packed.block[1]:
        block_in = min(block_in, packed.block[1])
    tile = _fit(tile._replace(block_in=block_in), 1, arch)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    out_blocks = triton.cdiv(num_out, tile.block_out)
    splits = _splits(tile, row_tiles * out_blocks, num_in, tile.block_in, num_rows, arch)
    _scaled[(out_blocks * row_tiles, splits)](
        x.codes,
        x.scales,
        packed.codes,
        packed.scales,
        packed.bias if packed.bias is not None else out,
        out,
        _partial(out, splits),
        packed.counters,
        num_rows,
        row_tiles,
        num_out,
        num_in,
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        SPLITS=splits,
        STAGES=tile.stages,
        SCALE_ROWS=packed.block[0],
        SCALE_COLUMNS=packed.block[1],
        HAS_BIAS=packed.bias is not None,
        EVEN=num_in % tile.block_in == 0,
        IS_INT8=packed.codes.dtype == torch.int8,
        num_warps=tile.num_warps,
    )
    return out


def widened_linear(
    x: Tensor, packed: WidenedWeight, out_dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The product of activations as they are: [num_tokens, out]."""
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    assert x.stride(1) == 1
    codes, num_out = packed.codes, packed.num_out
    num_rows = x.shape[0]
    out = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    arch = current_arch()
    tile = tile or widened_tile(num_rows, arch)
    num_chunks = codes.codes.shape[-3]
    unroll = max(
        u for u in (1, 2, 4) if u == 1 or (num_chunks % u == 0 and u * codes.chunk <= tile.block_in)
    )
    tile = _fit(tile._replace(block_in=unroll * codes.chunk), x.element_size(), arch,
                codes.codes.element_size() / PLANES[codes.kind])  # fmt: skip
    row_tiles = triton.cdiv(num_rows, tile.rows)
    out_blocks = triton.cdiv(num_out, tile.block_out)
    columns = unroll * codes.chunk
    splits = _splits(
        tile, row_tiles * out_blocks, num_chunks * codes.chunk, columns, num_rows, arch
    )
    _widened[(out_blocks * row_tiles, splits)](
        x,
        codes.codes,
        codes.scales,
        packed.bias if packed.bias is not None else out,
        out,
        _partial(out, splits),
        packed.counters,
        num_rows,
        row_tiles,
        num_out,
        codes.num_in,
        num_chunks,
        x.stride(0),
        codes.factor,
        KIND=codes.kind,
        PLANES=PLANES[codes.kind],
        WIDTH=codes.width,
        GROUP=codes.group,
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        UNROLL=unroll,
        SPLITS=splits,
        STAGES=tile.stages,
        HAS_BIAS=packed.bias is not None,
        EVEN=codes.num_in % codes.chunk == 0,
        SCALE=TRITON_TYPES[codes.scale_type],
        PTX=arch.name.startswith("sm_"),
        num_warps=tile.num_warps,
    )
    return out


def widened_tile(num_rows: int, arch: Arch) -> Tile:
    """By what fits: weights stream past few rows; many rows repay the widening."""
    if num_rows <= FEW_ROWS:
        rows = max(16, triton.next_power_of_2(num_rows))
        return Tile(rows, 64, 256, 4, 4 if rows <= 32 else 3)
    if arch.name == "sm_100":  # Triton 3.6 compiles 128 x 128 to a trap
        return Tile(64, 128, 256, 4, 3)
    return Tile(128, 128, 128, 8, 3)


def scaled_tile(num_rows: int, is_blocked: bool, arch: Arch) -> Tile:
    """As `widened_tile`, for products of codes."""
    if num_rows <= FEW_ROWS:
        rows = max(16, triton.next_power_of_2(num_rows))
        return Tile(rows, 64, 256, 4, 4)
    if is_blocked and arch.name.startswith("gfx"):  # two sums in registers
        return Tile(64, 128, 128, 8, 2)
    return Tile(128, 128, 128, 8, 4)


def _splits(
    tile: Tile, num_programs: int, num_in: int, step: int, num_rows: int, arch: Arch
) -> int:
    """How many programs share a block's columns; a power of two, so that few are compiled."""
    if num_rows > FEW_ROWS:
        return 1
    if tile.splits is not None:
        return tile.splits
    wanted = PROGRAMS_PER_CORE * arch.num_cores // num_programs
    most = num_in // max(MIN_SPLIT_COLUMNS, step)
    return 1 << max(0, min(wanted, most).bit_length() - 1)


def _partial(out: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return out
    return torch.empty(splits * out.numel(), dtype=torch.float32, device=out.device)


def _fit(tile: Tile, itemsize: int, arch: Arch, weight_itemsize: float | None = None) -> Tile:
    """Fewer stages, and smaller blocks for float32, where shared memory is short."""
    if itemsize == 4:
        tile = tile._replace(rows=min(tile.rows, 32), block_out=min(tile.block_out, 64))

    def stage_bytes(t: Tile) -> float:
        return t.block_in * (t.rows * itemsize + t.block_out * (weight_itemsize or itemsize))

    while stage_bytes(tile) > arch.shared_bytes and tile.rows > 16:
        tile = tile._replace(rows=tile.rows // 2)
    return tile._replace(
        stages=max(1, min(tile.stages, int(arch.shared_bytes // stage_bytes(tile))))
    )
