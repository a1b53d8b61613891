"""Products with quantized weights.

Three kinds. *Widened*: codes become the activations' type in registers, for a product in that.
*Expanded*: the same in memory, which many rows repay: the product is then cuBLAS's or hipBLASLt's.
*Scaled*: activations are rounded to the codes' type (fp8, int8) by a kernel of its own, matrix
instructions multiply codes, and scales join the sums. Weights are the left operand of the
instruction throughout, whose left side has 64 rows on Hopper while tokens may be few; where they
are, several programs share the columns of a block, and the last one to finish adds up their parts.

Runs on: gpu.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..api import QuantizedWeight
from . import linear
from .arch import Arch, current_arch
from .codes import NO_FP8, PLANES, TRITON_TYPES, Codes, pack, scaled_sum, widen, widened_sum

SPLIT_BLOCK_OUT = 16  # the smallest block of outputs: how many counters a weight needs
FEW_ROWS = 64  # up to which a tile has all of them
# From how many rows a weight of codes alone is expanded, and where its blocks fill the device: on
# an H200 256 rows of [4096, 14336] take 91 us so, widened 88 to 172, of [28672, 4096] 174 and 146.
EXPANDED_ROWS, EXPANDED_ROWS_OF_MANY = 129, 512
# One row: linear.py's tiles for bfloat16 with twice the columns, which are as many bytes.
ONE_ROW, ONE_ROW_MANY = linear.Tile(16, 512, 4, 6), linear.Tile(8, 1024, 2, 6)
MIN_SPLIT_COLUMNS = 512  # a program's, at least
PROGRAMS_PER_CORE = 3  # that fill a multiprocessor which streams weights for up to 32 rows
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


MANY_WIDENED = Tile(128, 128, 128, 8, 3)
# Many rows, scales of blocks: 2,048 tokens' experts on an H200 431 us; in blocks of 128 rows 984.
SCALED_BLOCKS = Tile(64, 128, 128, 4, 4)


class PackedQuantized(NamedTuple):
    """A weight [out, in].

    Attributes:
        widened: for products with the activations as they are, or None.
        scaled: codes [out, in] for products with rounded activations, or None.
        scales, group: of those; see `codes.Codes`.
        input_scale: float32 [1], the activations' fixed scale, or None.
        order: int32 [in], which input each column belongs to, or None.
        block_scales: float32 [out / 128, in / 128], where blocks of 128 x 128 share a scale.
        counters: int32, one for each block of outputs, 0 between launches.
    """

    widened: Codes | None
    scaled: Tensor | None
    scales: Tensor
    group: int
    input_scale: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    block_scales: Tensor | None
    counters: Tensor

    @property
    def num_out(self) -> int:
        """Rows of the weight."""
        return self.scales.shape[-1]


class Rounded(NamedTuple):
    """Activations as codes [num_tokens, in], and scales float32 [groups, num_tokens]."""

    codes: Tensor
    scales: Tensor


# ------------------------------------------------------------------------------------ activations


@triton.jit(do_not_specialize=["num_rows"])
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
        # Exact quotients: one that is off by a bit takes the other code wherever x is a tie, which
        # of 16 bits it often is.
        scale = tl.div_rn(tl.max(tl.abs(x), 1), LARGEST)
        scale = tl.where(scale == 0, 1.0, scale)
    is_broken = tl.max((x != x).to(tl.int32), 1) > 0
    y = tl.clamp(tl.div_rn(x, scale[:, None]), -LARGEST, LARGEST)
    if IS_INT8:
        y = (y + SIGNED_ROUNDING) - SIGNED_ROUNDING
    scale = tl.where(is_broken, float("nan"), scale)
    y = tl.reshape(y, [BLOCK]).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + c, y, mask=live)
    g = tl.arange(0, NUM_GROUPS)
    tl.store(scales_ptr + g.to(tl.int64) * num_rows + row, scale, mask=g * GROUP < size)


def round_rows(
    x: Tensor, dtype: torch.dtype, group: int, fixed: Tensor | None, multiple: int = 1
) -> Rounded:
    """Activations [num_tokens, in] as codes of a type, by scales of a token or of its groups.

    Args:
        group: columns that share a scale; 0 for all.
        fixed: float32 [1], the scale of all, or None to measure it.
        multiple: of how many rows the result is to have; those beyond x hold anything.
    """
    assert x.stride(1) == 1
    num_rows, size = x.shape
    num_padded = -(-num_rows // multiple) * multiple
    block = triton.next_power_of_2(size)
    codes = torch.empty(num_padded, size, dtype=dtype, device=x.device)
    num_groups = triton.cdiv(size, group) if group else 1
    scales = torch.empty(num_groups, num_padded, dtype=torch.float32, device=x.device)
    is_int8 = dtype == torch.int8
    if num_rows:
        _round_rows[(num_rows,)](
            x,
            codes,
            scales,
            fixed if fixed is not None else scales,
            num_padded,
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
    stride_chunk,
    stride_row,
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
    """A block [BLOCK_OUT, ROWS], or a split's part of it."""
    block = tl.program_id(0) // row_tiles
    n = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1)  # rows beyond the last repeat it
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_x
    steps = num_chunks // UNROLL
    per_split = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * per_split
    acc = widened_sum(
        tl.zeros([BLOCK_OUT, ROWS], tl.float32), x_ptrs, (m < num_rows)[:, None],
        codes_ptr, scales_ptr, row, first, tl.minimum(first + per_split, steps),
        num_out, num_in, stride_chunk, stride_row,
        KIND, PLANES, WIDTH, GROUP, UNROLL, STAGES, EVEN, SCALE, PTX,
    )  # fmt: skip
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
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """A block [BLOCK_OUT, ROWS], or a split's part of it."""
    block = tl.program_id(0) // row_tiles
    n = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * num_in
    steps = tl.cdiv(num_in, BLOCK_IN)
    per_split = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * per_split
    acc = scaled_sum(
        tl.zeros([BLOCK_OUT, ROWS], tl.float32), x_ptrs, x_scales_ptr + m, m < num_rows,
        weight_ptr, scales_ptr, row, first, tl.minimum(first + per_split, steps),
        num_out, num_in, num_rows, GROUP, BLOCK_IN, STAGES, EVEN, IS_INT8,
    )  # fmt: skip
    _finish(
        acc, m, n, num_rows, num_out, bias_ptr, out_ptr, partial_ptr, counters_ptr + block,
        SPLITS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _expand(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_out,
    num_in,
    stride_chunk,
    stride_row,
    factor,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """The values of a block of rows and one chunk of columns."""
    chunk = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.minimum(n, num_out - 1)
    k = tl.arange(0, WIDTH)
    at = codes_ptr + chunk.to(tl.int64) * stride_chunk + row.to(tl.int64)[:, None] * stride_row
    codes = tl.load(at + k[None, :])
    for p in tl.static_range(PLANES):
        column = (chunk * PLANES + p) * WIDTH
        if KIND == "mxfp4":
            words = tl.load(scales_ptr + chunk * num_out + row)
        elif GROUP == 0:
            words = row
        else:
            words = tl.load(scales_ptr + column // GROUP * num_out + row)
        w = widen(codes, words, p, KIND, GROUP, out_ptr.dtype.element_ty, SCALE, PTX)
        if GROUP == 0:
            w = w.to(tl.float32) * tl.load(scales_ptr + row)[:, None]
        elif KIND == "mxfp4":
            w = w.to(tl.float32) * factor
        live = (n < num_out)[:, None]
        if not EVEN:
            live = live & (column + k < num_in)[None, :]
        out = out_ptr + n.to(tl.int64)[:, None] * num_in + (column + k)[None, :]
        tl.store(out, w.to(out_ptr.dtype.element_ty), mask=live)


# ------------------------------------------------------------------------------------------ hosts


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None) -> PackedQuantized:
    """Codes for products with activations as they are, or with rounded ones.

    Raises:
        BackendError: there is no kernel for a weight of this kind.
    """
    codes, scaled = pack(weight), scaled_codes(weight)
    counters = torch.zeros(
        triton.cdiv(weight.shape[0], SPLIT_BLOCK_OUT),
        dtype=torch.int32,
        device=weight.codes.device,
    )
    return PackedQuantized(
        codes if scaled is None else None,
        scaled,
        codes.scales,
        codes.group,
        weight.input_scale,
        bias,
        weight.order,
        weight.scales if weight.block == (128, 128) else None,
        counters,
    )


def scaled_codes(weight: QuantizedWeight) -> Tensor | None:
    """The codes, where activations are to be rounded and there is a kernel for such; else None.

    Activations that are not rounded give what is closer to the model before it was quantized.
    """
    if weight.activations is None or weight.kind not in ("fp8", "int8"):
        return None
    if weight.order is not None or weight.offsets is not None:
        return None
    if weight.kind == "fp8" and current_arch().name in NO_FP8:
        return None
    group, num_in = weight.block[1], weight.shape[-1]
    if group < num_in and (weight.activations != "group" or group & (group - 1) or group < 32):
        return None
    return weight.codes.contiguous()


def quantized_linear(
    x: Tensor, packed: PackedQuantized, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[num_tokens, in] to [num_tokens, out], in x's type or out_dtype.

    One row by scales of rows stays as it is: its kernel streams weights as fast as there is.
    """
    dtype = out_dtype or x.dtype
    if len(x) == 1 and packed.scaled is not None and packed.group == 0:
        out = x.new_empty(1, packed.num_out, dtype=dtype)
        tile = ONE_ROW_MANY if packed.num_out >= linear.MANY_OUTPUTS else ONE_ROW
        return linear.linear(x, packed.scaled, packed.bias, out, tile, scales=packed.scales)
    if packed.scaled is None and dtype == x.dtype and is_worth_expanding(x, packed.num_out):
        return expanded_linear(x, packed)
    if packed.scaled is None:
        return widened_linear(x, packed, dtype)
    rounded = round_rows(x, packed.scaled.dtype, packed.group, packed.input_scale)
    return scaled_linear(rounded, packed, dtype)


def scaled_linear(
    x: Rounded, packed: PackedQuantized, out_dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The product of rounded activations: [num_tokens, out].

    Args:
        tile: instead of that of `scaled_tile`.
    """
    weight, num_out = packed.scaled, packed.num_out
    assert weight is not None
    num_rows, num_in = x.codes.shape
    out = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.codes.device)
    if num_rows == 0:
        return out
    arch = current_arch()
    tile = fit(tile or scaled_tile(num_rows, packed.group > 0, arch), num_in, packed.group, arch)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    out_blocks = triton.cdiv(num_out, tile.block_out)
    splits = _splits(tile, row_tiles * out_blocks, num_in, num_rows, arch)
    _scaled[(out_blocks * row_tiles, splits)](
        x.codes,
        x.scales,
        weight,
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
        GROUP=packed.group,
        HAS_BIAS=packed.bias is not None,
        EVEN=num_in % tile.block_in == 0,
        IS_INT8=weight.dtype == torch.int8,
        num_warps=tile.num_warps,
    )
    return out


def widened_linear(
    x: Tensor, packed: PackedQuantized, out_dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The product of activations as they are: [num_tokens, out].

    Args:
        tile: instead of that of `widened_tile`.
    """
    codes, num_out = packed.widened, packed.num_out
    assert codes is not None
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    assert x.stride(1) == 1
    num_rows = x.shape[0]
    out = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    arch = current_arch()
    tile = tile or widened_tile(num_rows, num_out, codes.kind, arch)
    tile = fit_codes(tile, codes, x.element_size(), arch)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    out_blocks = triton.cdiv(num_out, tile.block_out)
    num_in = codes.num_chunks * codes.chunk
    splits = _splits(tile, row_tiles * out_blocks, num_in, num_rows, arch)
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
        codes.num_chunks,
        x.stride(0),
        codes.codes.stride(-3),
        codes.codes.stride(-2),
        codes.factor,
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        UNROLL=tile.block_in // codes.chunk,
        SPLITS=splits,
        STAGES=tile.stages,
        HAS_BIAS=packed.bias is not None,
        **constants(codes, arch),
        num_warps=tile.num_warps,
    )
    return out


def is_worth_expanding(x: Tensor, num_out: int) -> bool:
    """Whether so many activations [num_tokens, in] repay it; float32 has no fast product."""
    has_many = _fills(MANY_WIDENED, len(x), num_out, current_arch())
    least = EXPANDED_ROWS_OF_MANY if has_many else EXPANDED_ROWS
    return x.element_size() == 2 and len(x) >= least


def expanded_linear(x: Tensor, packed: PackedQuantized) -> Tensor:
    """The product of activations as they are, in their type, by the library's kernel."""
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    return F.linear(x, expand(packed, x.dtype), packed.bias)


def expand(packed: PackedQuantized, dtype: torch.dtype) -> Tensor:
    """A weight's values [out, in], its columns in the order of its codes."""
    codes, num_out = packed.widened, packed.num_out
    assert codes is not None
    out = torch.empty(num_out, codes.num_in, dtype=dtype, device=codes.codes.device)
    block_out = 32
    _expand[(codes.num_chunks, triton.cdiv(num_out, block_out))](
        codes.codes,
        codes.scales,
        out,
        num_out,
        codes.num_in,
        codes.codes.stride(-3),
        codes.codes.stride(-2),
        codes.factor,
        BLOCK_OUT=block_out,
        **constants(codes, current_arch()),
    )
    return out


def constants(codes: Codes, arch: Arch) -> dict[str, Any]:
    """Those of `codes.widened_sum` that the weight decides."""
    return {
        "KIND": codes.kind,
        "PLANES": PLANES[codes.kind],
        "WIDTH": codes.width,
        "GROUP": codes.group,
        "EVEN": codes.num_in % codes.chunk == 0,
        "SCALE": TRITON_TYPES[codes.scale_type],
        "PTX": arch.name.startswith("sm_"),
    }


def widened_tile(num_rows: int, num_out: int, kind: str, arch: Arch) -> Tile:
    """By what fits: weights stream past few rows; many rows repay the widening."""
    if num_rows <= FEW_ROWS:
        return Tile(max(16, triton.next_power_of_2(num_rows)), 64, 256, 4, 3)
    if arch.name == "sm_100":  # Triton 3.6 compiles 128 x 128 to a trap
        return Tile(64, 128, 256, 4, 3)
    large = Tile(128, 256, 128, 8, 3)  # 256 rows of [28672, 4096] on an H200: 147 us of 178
    is_large = arch.name == "sm_90" and kind.startswith("uint4")
    return large if is_large and _fills(large, num_rows, num_out, arch) else MANY_WIDENED


def _fills(tile: Tile, num_rows: int, num_out: int, arch: Arch) -> bool:
    """Whether there is a block for every multiprocessor."""
    return triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.block_out) >= arch.num_cores


def scaled_tile(num_rows: int, is_blocked: bool, arch: Arch) -> Tile:
    """As `widened_tile`, for products of codes."""
    if num_rows <= FEW_ROWS:
        rows = max(16, triton.next_power_of_2(num_rows))
        return Tile(rows, 64, 256, 4, 4)
    if is_blocked:  # two sums in registers
        return Tile(64, 128, 128, 8, 2) if arch.name.startswith("gfx") else SCALED_BLOCKS
    return Tile(128, 128, 128, 4, 3) if arch.name == "sm_90" else Tile(128, 128, 128, 8, 4)


def _splits(tile: Tile, num_programs: int, num_in: int, num_rows: int, arch: Arch) -> int:
    """How many programs share a block's columns; a power of two, so that few are compiled."""
    if num_rows > tile.rows:
        return 1
    if tile.splits is not None:
        return tile.splits
    per_core = PROGRAMS_PER_CORE if tile.rows <= 32 else 1
    wanted = per_core * arch.num_cores // num_programs
    most = num_in // max(MIN_SPLIT_COLUMNS, tile.block_in)
    return 1 << max(0, min(wanted, most).bit_length() - 1)


def _partial(out: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return out
    return torch.empty(splits * out.numel(), dtype=torch.float32, device=out.device)


def fit(tile: Tile, num_in: int, group: int, arch: Arch) -> Tile:
    """A tile of codes times codes that suits their number, groups, and the shared memory."""
    block_in = max(32, min(tile.block_in, triton.next_power_of_2(num_in)))
    block_in = min(block_in, group) if group else block_in
    return _staged(tile._replace(block_in=block_in), block_in * (tile.rows + tile.block_out), arch)


def fit_codes(tile: Tile, codes: Codes, itemsize: int, arch: Arch) -> Tile:
    """A tile of widened codes: several chunks, where they divide the row's."""
    unroll = max(
        n
        for n in (1, 2, 4)
        if n == 1 or (codes.num_chunks % n == 0 and n * codes.chunk <= tile.block_in)
    )
    tile = tile._replace(block_in=unroll * codes.chunk)
    if itemsize == 4:  # float32 has no matrix instructions to fill
        tile = tile._replace(rows=min(tile.rows, 32), block_out=min(tile.block_out, 64))
    row_bytes = tile.rows * itemsize + tile.block_out * codes.bytes_per_column
    return _staged(tile, int(tile.block_in * row_bytes), arch)


def _staged(tile: Tile, stage_bytes: int, arch: Arch) -> Tile:
    return tile._replace(stages=max(1, min(tile.stages, arch.shared_bytes // stage_bytes)))
