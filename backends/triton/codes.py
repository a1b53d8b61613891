"""Quantized weights as the kernels read them, and how codes become numbers in registers.

A weight-only product is as fast as its codes are read and widened. Columns are cut into chunks;
a chunk's codes lie row after row, so that a block of rows is one run of memory. A word of 16 bits
holds four codes of 4 bits, each of another *plane*: plane p of a chunk is its p-th `width` columns.
A thread of a matrix instruction wants pairs of neighbouring columns, which are then the same bits
of two neighbouring words: on NVIDIA GPUs one instruction cuts out both, and one more scales them.
Codes of 8 bits have one plane.

Runs on: gpu.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..api import BackendError, QuantizedWeight
from ..gguf_blocks import regrouped
from ..quantized import unpack_nibbles
from .arch import current_arch

KINDS = ("fp8", "int8", "uint4", "mxfp4")
PLANES = {"uint4": 4, "uint4 zeros": 4, "mxfp4": 4, "int8": 1, "fp8": 1, "fp8 bits": 1}
WIDTHS = (64, 32, 16)  # columns of a plane, the widest first
MAX_PADDING = 1.03  # of the columns, for a wider plane
TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
NO_FP8 = (
    "sm_70",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_87",
    "gfx90a",
)  # architectures whose compiler does not know float8_e4m3fn
# Where a word has the bits of e2m1 codes, by plane: the sign, and the lowest of the other three.
# Planes 0 to 2 are a shift and a mask away from bfloat16, which has its sign at 15 and these at 6.
SIGNS, LOWEST = (15, 12, 9, 14), (6, 3, 0, 0)
MAX_LOSS = 2.0**-10  # of a scale in float16, relative; it is small or huge where it loses more
LARGEST_SCALE = 128  # the largest exponent of a scale with which that fits


class Codes(NamedTuple):
    """A weight [out, in], or [num_experts, out, in], for weight-only products.

    Attributes:
        kind: of `PLANES`; "fp8 bits" is fp8 as bytes, for compilers that do not know the type;
            "uint4 zeros" has zero points for offsets, which are subtracted from codes exactly.
        codes: [..., chunks, out, width], int16 words of four codes, or int8, fp8 and uint8, of
            which it may be a view of [..., out, in].
        scales: float32 [..., groups, out]. Or int32 words, which asynchronous copies can fetch: of
            mxfp4 [..., chunks, out], a plane's exponent + 127 in each byte; of others that have
            offsets, or four bits, a scale and in the upper half an offset.
        scale_type: of a scale: float32, or of those halves, whichever of the two loses less.
        num_in: columns, without those that fill up the last chunk.
        group: columns that share a scale; 0 for all.
        factor: multiplies every result.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    scale_type: torch.dtype
    num_in: int
    group: int
    factor: float

    @property
    def width(self) -> int:
        """Columns of a plane."""
        return self.codes.shape[-1]

    @property
    def num_chunks(self) -> int:
        """Those of a row."""
        return self.codes.shape[-3]

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return PLANES[self.kind] * self.width

    @property
    def num_out(self) -> int:
        """Rows, of an expert."""
        return self.codes.shape[-2]

    @property
    def bytes_per_column(self) -> float:
        """Of a row's codes."""
        return self.codes.element_size() / PLANES[self.kind]


def pack(weight: QuantizedWeight) -> Codes:
    """Bring a weight's codes, scales and offsets into the order that the kernels want.

    Raises:
        BackendError: its kind or its groups have no kernel.
    """
    if weight.kind == "gguf":
        weight = regrouped(weight)
    if weight.kind not in KINDS or weight.scales is None:
        raise BackendError(f"no Triton kernel multiplies weights of kind {weight.kind!r}")
    kind: str = weight.kind
    num_in = weight.shape[-1]
    if kind == "fp8" and current_arch().name in NO_FP8:
        kind = "fp8 bits"
    planes = PLANES[kind]
    group = min(num_in, weight.block[1])

    def padded(width: int) -> int:
        return -(-num_in // (planes * width)) * planes * width

    widths = [w for w in WIDTHS if group == num_in or group % w == 0]
    if not widths:
        raise BackendError(f"no Triton kernel takes groups of {group} columns, but of 16 n")
    width = next((w for w in widths if padded(w) <= MAX_PADDING * num_in), widths[-1])
    extra = padded(width) - num_in
    if planes == 4:
        codes = unpack_nibbles(weight.codes)[..., :num_in]
        codes = F.pad(codes, (0, extra)).unflatten(-1, (-1, 4, width))
        codes = _words(codes, weight.kind)
    else:
        codes = weight.codes.view(torch.uint8)
        codes = (F.pad(codes, (0, extra)) if extra else codes).unflatten(-1, (-1, width))
        codes = codes if kind == "fp8 bits" else codes.view(weight.codes.dtype)
    codes = codes.transpose(-2, -3)
    if planes == 4 or extra:
        codes = codes.contiguous()
    if group == num_in:
        group += extra
    num_groups = -(-padded(width) // group)

    def spread(x: Tensor) -> Tensor:
        """[..., blocks of rows, groups] to [..., groups, out], zeros behind the last group."""
        x = x.repeat_interleave(weight.block[0], -2)[..., : weight.shape[-2], :]
        return F.pad(x, (0, num_groups - x.shape[-1])).transpose(-1, -2).contiguous()

    scales, scale_type, factor = spread(weight.scales), torch.float32, 1.0
    is_absent = scales.device.type == "meta"  # only compiled for
    if kind == "mxfp4":
        exponents = torch.frexp(scales).exponent - 1 + 127
        above = 0 if is_absent else max(0, int(exponents.max()) - LARGEST_SCALE)
        factor = 2.0**above
        exponents = (exponents - above).clamp(0, LARGEST_SCALE)
        of_plane = exponents.repeat_interleave(group // width, -2)[..., : codes.shape[-3] * 4, :]
        scales = _joined(of_plane.unflatten(-2, (-1, 4)).unbind(-2), 8)
    elif kind == "uint4" or weight.offsets is not None:
        scale_type = torch.float16
        loss = (scales.half().float() - scales).abs() > scales.abs() * MAX_LOSS
        if not is_absent and bool(loss.any()):
            scale_type = torch.bfloat16
        short = scales.to(scale_type)
        if weight.offsets is None:
            offsets = torch.zeros_like(short)
        elif kind == "uint4" and weight.has_zero_points:
            kind = "uint4 zeros"
            zeros = -spread(weight.offsets) / torch.where(scales == 0, 1.0, scales)
            offsets = zeros.round().to(scale_type)
        else:  # offset / scale, which says where zero is, stays what it is
            ratio = torch.where(scales == 0, 1.0, short.float() / scales)
            offsets = (spread(weight.offsets) * ratio).to(scale_type)
        scales = _joined([x.view(torch.int16).int() & 0xFFFF for x in (short, offsets)], 16)
    elif num_groups == 1:
        group = 0
    return Codes(kind, codes, scales, scale_type, num_in, group, factor)


def _joined(parts: Sequence[Tensor], bits: int) -> Tensor:
    """Unsigned int32 parts of so many bits, the lowest first, in one int32 word."""
    words = torch.zeros_like(parts[0], dtype=torch.int32)
    for i, part in enumerate(parts):
        words |= part << bits * i
    return words.contiguous()


def _words(planes: Tensor, kind: str) -> Tensor:
    """int16 codes [..., chunks, 4, width] to words [..., chunks, width]."""
    words = torch.zeros_like(planes[..., 0, :], dtype=torch.int32)
    for p in range(4):
        code = planes[..., p, :].int()
        if kind == "uint4":
            words |= code << 4 * p
        elif p < 3:
            words |= (code >> 3) << SIGNS[p] | (code & 7) << LOWEST[p]
        else:  # what is left: the exponent at 10 and 11, the mantissa at 13
            words |= (code >> 3) << SIGNS[p] | (code >> 1 & 3) << 10 | (code & 1) << 13
    return torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16)


# -------------------------------------------------------------------------------- in the kernels


@triton.constexpr_function
def uint4_asm(plane, is_bf16):
    """Two codes c of a pair of words to (c * scale + offset), exactly rounded but for c * scale.

    c joins the mantissa of 128 (bfloat16) or 1024 (float16), which is then subtracted.
    """
    kind, one, base, minus = (
        ("bf16x2", "0x3F803F80", "0x43004300", "0xC300C300")
        if is_bf16
        else ("f16x2", "0x3C003C00", "0x64006400", "0xE400E400")
    )
    return f"""{{
        .reg .b32 t, one, base, minus;
        mov.b32 one, {one}; mov.b32 base, {base}; mov.b32 minus, {minus};
        shr.b32 t, $1, {4 * plane};
        lop3.b32 t, t, 0x000F000F, base, 0xEA;
        fma.rn.{kind} t, t, one, minus;
        fma.rn.{kind} $0, t, $2, $3;
    }}"""


@triton.constexpr_function
def uint4_zeros_asm(plane, is_bf16):
    """Two codes c of a pair of words to (c - zero) * scale, of which the product alone is rounded.

    c joins the mantissa of 128 (bfloat16) or 1024 (float16); the third operand is the zero point
    and that, negative.
    """
    kind, one, base = (
        ("bf16x2", "0x3F803F80", "0x43004300") if is_bf16 else ("f16x2", "0x3C003C00", "0x64006400")
    )
    return f"""{{
        .reg .b32 t, one, base, zero;
        mov.b32 one, {one}; mov.b32 base, {base}; mov.b32 zero, 0x80008000;
        shr.b32 t, $1, {4 * plane};
        lop3.b32 t, t, 0x000F000F, base, 0xEA;
        fma.rn.{kind} t, t, one, $3;
        fma.rn.{kind} $0, t, $2, zero;
    }}"""


@triton.constexpr_function
def mxfp4_asm(plane):
    """Two codes of a pair of words to bfloat16, times scales that bring 2^126 along."""
    if plane < 3:
        cut = f"shl.b32 t, $1, {3 * plane}; and.b32 t, t, 0x81C081C0;"
    else:
        cut = """shl.b32 t, $1, 1; and.b32 t, t, 0x80008000;
        shr.b32 u, $1, 3; lop3.b32 t, u, 0x01800180, t, 0xEA;
        shr.b32 u, $1, 7; lop3.b32 t, u, 0x00400040, t, 0xEA;"""
    return f"""{{
        .reg .b32 t, u, zero;
        mov.b32 zero, 0x80008000;
        {cut}
        fma.rn.bf16x2 $0, t, $2, zero;
    }}"""


@triton.jit
def e2m1(words, PLANE: tl.constexpr):
    """A plane's codes as float32."""
    bits = words.to(tl.int32)
    if PLANE < 3:
        sign = bits << (3 * PLANE + 16)
        rest = bits >> (6 - 3 * PLANE)
    else:
        sign = bits << 17
        rest = (bits >> 9 & 6) | (bits >> 13 & 1)
    rest &= 7
    # From 2 on, exponent and mantissa are a float's, whose exponent counts from 126 here.
    large = ((rest << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 2, rest.to(tl.float32) * 0.5, large)
    return tl.where(sign < 0, -value, value)


@triton.jit
def halves(words, SCALE: tl.constexpr):
    """Scales and offsets out of words of both."""
    scales = words.to(tl.int16).to(SCALE, bitcast=True)
    offsets = (words >> 16).to(tl.int16).to(SCALE, bitcast=True)
    return scales, offsets


@triton.jit
def widen(
    codes,
    words,
    PLANE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """A block [rows, width] of a plane's weights as DTYPE, by its rows' words of scales.

    Where GROUP is 0, without scales. PTX: pairs at once in NVIDIA's assembly, where DTYPE has 16
    bits.
    """
    SHAPE: tl.constexpr = codes.shape
    HAS_ZEROS: tl.constexpr = KIND == "uint4 zeros"
    if (KIND == "uint4" or HAS_ZEROS) and PTX and DTYPE != tl.float32:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16
        scales, offsets = halves(words, SCALE)
        if HAS_ZEROS:
            offsets = -offsets.to(tl.float32) - (128.0 if IS_BF16 else 1024.0)
        scale = tl.broadcast_to(scales.to(DTYPE)[:, None], SHAPE)
        offset = tl.broadcast_to(offsets.to(DTYPE)[:, None], SHAPE)
        w = tl.inline_asm_elementwise(
            uint4_zeros_asm(PLANE, IS_BF16) if HAS_ZEROS else uint4_asm(PLANE, IS_BF16),
            "=r,r,r,r",
            [codes, scale, offset],
            dtype=scale.dtype,
            is_pure=True,
            pack=2,
        )
    elif KIND == "mxfp4" and PTX and DTYPE == tl.bfloat16:
        bits = (((words >> (8 * PLANE)) & 255) + 126) << 7  # 2^(exponent + 126)
        scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        w = tl.inline_asm_elementwise(
            mxfp4_asm(PLANE),
            "=r,r,r",
            [codes, tl.broadcast_to(scale[:, None], SHAPE)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        if KIND == "uint4" or HAS_ZEROS:
            wide = ((codes.to(tl.int32) >> (4 * PLANE)) & 15).to(tl.float32)
        elif KIND == "mxfp4":
            wide = e2m1(codes, PLANE)
        elif KIND == "fp8 bits":
            bits = codes.to(tl.int32)
            bits = (bits & 127) << 20 | (bits >> 7) << 31
            wide = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        else:
            wide = codes.to(tl.float32)
        if KIND == "mxfp4":
            exponents = tl.maximum((words >> (8 * PLANE)) & 255, 1)
            wide *= (exponents << 23).to(tl.float32, bitcast=True)[:, None]
        elif GROUP > 0 and SCALE == tl.float32:
            wide *= words[:, None]
        elif HAS_ZEROS:
            scales, zeros = halves(words, SCALE)
            wide = (wide - zeros.to(tl.float32)[:, None]) * scales.to(tl.float32)[:, None]
        elif GROUP > 0:
            scales, offsets = halves(words, SCALE)
            wide = wide * scales.to(tl.float32)[:, None] + offsets.to(tl.float32)[:, None]
        w = wide.to(DTYPE)
    return w


@triton.jit
def widened_sum(
    acc,
    x_ptrs,
    live_rows,
    codes_ptr,
    scales_ptr,
    row,
    first,
    last,
    num_out,
    num_in,
    stride_chunk,
    stride_row,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """acc [out, rows] plus weights times activations, over steps of UNROLL chunks each.

    x_ptrs [rows, 1]: where the activations of each row begin. row [out]: rows of the weight.
    """
    CHUNK: tl.constexpr = PLANES * WIDTH
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    k = tl.arange(0, WIDTH)
    codes_ptrs = codes_ptr + row.to(tl.int64)[:, None] * stride_row + k[None, :]
    for step in tl.range(first, last, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            chunk = step * UNROLL + u
            codes = tl.load(codes_ptrs + chunk.to(tl.int64) * stride_chunk)
            for p in tl.static_range(PLANES):
                column = chunk * CHUNK + p * WIDTH
                if KIND == "mxfp4":
                    if p == 0:
                        words = tl.load(scales_ptr + chunk * num_out + row)
                elif GROUP == 0:
                    words = row
                elif p == 0 or (p * WIDTH) % GROUP == 0 or CHUNK % GROUP != 0:
                    words = tl.load(scales_ptr + column // GROUP * num_out + row)
                live = live_rows
                if not EVEN:
                    live = live_rows & (column + k < num_in)[None, :]
                x = tl.load(x_ptrs + (column + k)[None, :], mask=live, other=0.0)
                w = widen(codes, words, p, KIND, GROUP, DTYPE, SCALE, PTX)
                acc = tl.dot(w, x.T, acc, input_precision="ieee")
    if GROUP == 0:
        acc *= tl.load(scales_ptr + row)[:, None]
    return acc


@triton.jit
def scaled_sum(
    acc,
    x_ptrs,
    x_scales_ptrs,
    live_rows,
    weight_ptr,
    scales_ptr,
    row,
    first,
    last,
    num_out,
    num_in,
    stride_x_scales,
    GROUP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """acc [out, rows] plus codes times codes, by scales of rows and tokens, over steps of BLOCK_IN.

    x_ptrs [rows, 1]: where the codes of each row begin; x_scales_ptrs [rows]: its first scale.
    GROUP: columns that share a scale, of which a step's are a part; 0 for all.
    """
    k = tl.arange(0, BLOCK_IN)
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * num_in + k[None, :]
    SUM: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    zeros = tl.zeros(acc.shape, SUM)
    total = zeros
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * BLOCK_IN
        if EVEN:
            w = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + (start + k)[None, :], mask=live_rows[:, None], other=0.0)
        else:
            live = (start + k < num_in)[None, :]
            w = tl.load(weight_ptrs + start, mask=live, other=0.0)
            x = tl.load(x_ptrs + (start + k)[None, :], mask=live_rows[:, None] & live, other=0.0)
        if GROUP > 0:
            group = start // GROUP
            scale = tl.load(scales_ptr + group * num_out + row)
            x_scale = tl.load(x_scales_ptrs + group * stride_x_scales, mask=live_rows, other=0.0)
            part = tl.dot(w, x.T, zeros, out_dtype=SUM)
            acc += part.to(tl.float32) * (scale[:, None] * x_scale[None, :])
        else:
            total = tl.dot(w, x.T, total, out_dtype=SUM)
    if GROUP == 0:
        x_scale = tl.load(x_scales_ptrs, mask=live_rows, other=0.0)
        acc += total.to(tl.float32) * (tl.load(scales_ptr + row)[:, None] * x_scale[None, :])
    return acc
