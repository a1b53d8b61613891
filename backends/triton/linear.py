"""Matrix products of few rows, fused with the norm before and what follows.

Such a product is as fast as its weights are read: each program streams the weights of its output
features through a pipeline of asynchronous copies. The norm before, the gate behind and the sum
with the residual stream are part of the kernel, so nothing else runs between two products.

Runs on: gpu.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .arch import current_arch

MAX_ROWS = 8  # that choose_tile gives the kernel


class Tile(NamedTuple):
    """Weights at once, block_out x block_in; `stages` of them are in flight."""

    block_out: int
    block_in: int
    num_warps: int
    stages: int


# The fastest of 15 (one row) and 18 on an H200 for the shapes of Llama-3.1-8B; see
# benchmarks/gpu_linear.py. Against cuBLAS and separate kernels one row takes, in us: qkv 15.6
# (18.8), o 11.2 (14.8), gate and up 59.6 (66.6), down 30.1 (34.6), head 237 (254); eight rows
# qkv 18.5 (18.5), gate and up 61.4 (62.9); the others are slower than cuBLAS with its own sum.
ONE_ROW = Tile(8, 512, 2, 6)
MANY_OUTPUTS = 16_384
# For one row and up to so many outputs. A router of 128 takes 2.0 us, with 16 x 256 3.1; outputs x
# inputs 576 x 2048 3.3 (3.7), 1024 x 3072 4.3 (4.7), 3072 x 2048 6.0 (6.4), 5120 x 2048 8.5 (8.9).
ONE_ROW_TILES = {
    512: Tile(2, 1024, 4, 4),
    1024: Tile(4, 1024, 4, 4),
    5120: Tile(8, 256, 2, 6),
    MANY_OUTPUTS - 1: Tile(16, 256, 4, 6),
}
SOME_ROWS = Tile(64, 256, 4, 3)
SOME_ROWS_MAX_OUTPUTS = 65_536


def choose_tile(num_rows: int, weight: Tensor, *, has_norm: bool) -> Tile | None:
    """The tile for a product with a weight [out, in]; None where cuBLAS is at least as fast."""
    num_out = weight.shape[0]
    if num_rows > MAX_ROWS or num_rows == 0 or weight.element_size() != 2:
        return None
    if num_rows == 1:
        return next((t for most, t in ONE_ROW_TILES.items() if num_out <= most), ONE_ROW)
    num_programs = num_out // SOME_ROWS.block_out
    fills_half = 2 * num_programs >= current_arch().num_cores
    return SOME_ROWS if has_norm and fills_half and num_out < SOME_ROWS_MAX_OUTPUTS else None


@triton.jit
def _load(ptrs, live, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=live, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    scales_ptr,
    out_ptr,
    eps,
    num_rows,
    num_out,
    num_in,
    stride_x,
    stride_out,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """out = f(norm(x) weight^T + bias), or out += that where ADD; BLOCK_OUT outputs a program.

    The norm's scale of a row is one factor, so it is applied to the result: the sum of squares is
    taken of the same blocks of x that are multiplied. Where GATE, the weights' second half are the
    up projections, and num_out counts the first half. ROWS is 1, or 16 for matrix instructions.
    """
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    m = tl.arange(0, ROWS)
    weight_row = tl.minimum(n, num_out - 1).to(tl.int64)  # rows beyond the last repeat it
    weight_ptrs = weight_ptr + weight_row[:, None] * num_in + k[None, :]
    up_ptrs = weight_ptr + (weight_row + num_out)[:, None] * num_in + k[None, :]

    if ROWS == 1:
        acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        squares = tl.zeros([BLOCK_IN], tl.float32)
    else:
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        squares = tl.zeros([ROWS, BLOCK_IN], tl.float32)
    acc_up = acc
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        column = start + k
        live = column < num_in
        w = _load(weight_ptrs + start, live[None, :], EVEN)
        if GATE != "":
            up = _load(up_ptrs + start, live[None, :], EVEN)
        if ROWS == 1:
            x = _load(x_ptr + column, live, EVEN).to(tl.float32)
            if HAS_NORM:
                squares += x * x
                x *= _load(norm_ptr + column, live, EVEN).to(tl.float32)
            acc += w.to(tl.float32) * x[None, :]
            if GATE != "":
                acc_up += up.to(tl.float32) * x[None, :]
        else:
            live_x = (m[:, None] < num_rows) & live[None, :]
            x = tl.load(x_ptr + m[:, None] * stride_x + column[None, :], mask=live_x, other=0.0)
            if HAS_NORM:
                wide = x.to(tl.float32)
                squares += wide * wide
                scale = _load(norm_ptr + column, live, EVEN).to(tl.float32)
                x = (wide * scale[None, :]).to(w.dtype)
            acc = tl.dot(w, x.T, acc)
            if GATE != "":
                acc_up = tl.dot(up, x.T, acc_up)

    live_n = n < num_out
    if ROWS == 1:
        y = tl.sum(acc, 1)
        z = tl.sum(acc_up, 1)
        out_ptrs = out_ptr + n
        live_out = live_n
        mean_square = tl.sum(squares, 0) / num_in
    else:
        y = acc
        z = acc_up
        out_ptrs = out_ptr + m[None, :] * stride_out + n[:, None]
        live_out = live_n[:, None] & (m[None, :] < num_rows)
        mean_square = tl.sum(squares, 1)[None, :] / num_in
    if HAS_NORM:
        inverse = tl.rsqrt(mean_square + eps)
        y *= inverse
        z *= inverse
    if HAS_SCALES:  # of the weight's rows
        y *= tl.load(scales_ptr + n, mask=live_n, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)
        y += bias if ROWS == 1 else bias[:, None]
        if GATE != "":
            bias = tl.load(bias_ptr + num_out + n, mask=live_n, other=0.0).to(tl.float32)
            z += bias if ROWS == 1 else bias[:, None]
    if GATE == "silu":
        y = y * tl.sigmoid(y) * z
    elif GATE == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = 1.5957691216057308 * (y + 0.044715 * y * y * y)  # 2 sqrt(2 / pi)
        y = y * tl.sigmoid(inner) * z
    if ADD:
        y += tl.load(out_ptrs, mask=live_out, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live_out)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
    add: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """out = f(norm(x) weight^T + bias), or out += that where `add`; returns out.

    Args:
        x: [rows, in], at most 16 rows, of the weight's type.
        weight: [out, in]; [2 * out, in] where gated, the gate's half first.
        out: [rows, out], of any floating type.
        norm: [in] the weight of an RMS norm of x.
        gate: "silu" or "gelu_tanh" of the first half, times the second.
        scales: float32 [out], of the rows of a weight of 8-bit codes; one row, without a gate.
    """
    assert scales is None or (len(x) == 1 and not gate)
    num_rows, num_in = x.shape
    num_out = out.shape[1]
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous()
    assert weight.shape == (num_out * (2 if gate else 1), num_in) and num_rows <= 16
    stage_bytes = tile.block_out * tile.block_in * weight.element_size() * (2 if gate else 1)
    _linear[(triton.cdiv(num_out, tile.block_out),)](
        x,
        weight,
        bias if bias is not None else weight,
        norm if norm is not None else weight,
        scales if scales is not None else weight,
        out,
        eps,
        num_rows,
        num_out,
        num_in,
        x.stride(0),
        out.stride(0),
        ROWS=1 if num_rows == 1 else 16,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=max(1, min(tile.stages, current_arch().shared_bytes // stage_bytes)),
        HAS_NORM=norm is not None,
        GATE=gate,
        ADD=add,
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        EVEN=num_in % tile.block_in == 0,
        num_warps=tile.num_warps,
    )
    return out
