"""Matrix products of few rows, fused with the norm before and what follows.

A product of one to sixteen rows is as fast as its weights are read, once, in their own order.
Three things keep the memory busy: each program streams its tiles through a pipeline of
asynchronous copies that does not drain between tiles; the norm before, the gate behind and the sum
with the residual stream are part of the kernel; and where the GPU can launch a kernel while the
one before it drains (programmatic dependent launch, sm_90), a program asks for its first weights
before it waits for its input.

Runs on: gpu.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .arch import current_arch

MAX_ROWS = 16


class Tile(NamedTuple):
    """Weights at once: block_out x block_in; `stages` of them in flight.

    Attributes:
        kind: how a tile is multiplied: "fma" (one row), "dot", or "dot_t" (weights first).
        programs_per_core: 0 launches a program for each tile.
        prefetch: columns of a program's first tile that are asked for ahead of the wait.
    """

    block_out: int
    block_in: int
    num_warps: int
    stages: int
    kind: str = "dot"
    programs_per_core: int = 0
    prefetch: int = 0


@triton.jit
def _prefetch(ptr, stride, size, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Bring the first `size` bytes of ROWS rows, `stride` bytes apart, into the L2 cache."""
    PER_ROW: tl.constexpr = THREADS // ROWS
    t = tl.arange(0, THREADS)
    at = ptr.to(tl.int64) + (t // PER_ROW) * stride + (t % PER_ROW) * (size // PER_ROW)
    sizes = t * 0 + size // PER_ROW
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tile_of(weight_ptr, first, num_out, num_in, column, BLOCK_OUT: tl.constexpr,
             EVEN: tl.constexpr, STREAM: tl.constexpr):  # fmt: skip
    """Weights [BLOCK_OUT, BLOCK_IN] from row `first` on; rows beyond the last repeat it."""
    n = tl.minimum(first + tl.arange(0, BLOCK_OUT), num_out - 1)
    ptrs = weight_ptr + n.to(tl.int64)[:, None] * num_in + column[None, :]
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY)
    return tl.load(ptrs, mask=column[None, :] < num_in, other=0.0, eviction_policy=POLICY)


@triton.jit
def _spread(bias, KIND: tl.constexpr):
    """A bias of output features in the shape of the sums."""
    bias = bias.to(tl.float32)
    if KIND == "fma":
        return bias
    if KIND == "dot":
        return bias[None, :]
    return bias[:, None]


@triton.jit(do_not_specialize=["num_rows", "prefetch"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    eps,
    num_rows,
    num_out,
    num_in,
    stride_x,
    stride_out,
    prefetch,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    STREAM: tl.constexpr,
    THREADS: tl.constexpr,
):
    """out = f(norm(x) weight^T + bias), or out += that where ADD.

    The norm's scale of a row is one factor, so it is applied to the result: the sum of squares is
    taken of the same blocks of x that are multiplied. Where GATE, the weights' second half are the
    up projections, and num_out counts the first half.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    num_tiles = tl.cdiv(num_out, BLOCK_OUT)
    steps = tl.cdiv(num_in, BLOCK_IN)
    k = tl.arange(0, BLOCK_IN)
    m = tl.arange(0, ROWS)
    up_ptr = weight_ptr + num_out.to(tl.int64) * num_in
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if (prefetch > 0) & ((first + 1) * BLOCK_OUT <= num_out):
            begin = (first * BLOCK_OUT).to(tl.int64) * num_in
            _prefetch(weight_ptr + begin, num_in * 2, prefetch * 2, BLOCK_OUT, THREADS)
            if GATE != "":
                _prefetch(up_ptr + begin, num_in * 2, prefetch * 2, BLOCK_OUT, THREADS)
        tl.extra.cuda.gdc_wait()

    if KIND == "fma":
        acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        squares = tl.zeros([BLOCK_IN], tl.float32)
    elif KIND == "dot":
        acc = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
        squares = tl.zeros([ROWS, BLOCK_IN], tl.float32)
    else:
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        squares = tl.zeros([ROWS, BLOCK_IN], tl.float32)
    acc_up = acc
    for step in tl.range(0, tl.cdiv(num_tiles - first, programs) * steps, num_stages=STAGES):
        tile = first + step // steps * programs
        column = step % steps * BLOCK_IN + k
        row = tile * BLOCK_OUT
        w = _tile_of(weight_ptr, row, num_out, num_in, column, BLOCK_OUT, EVEN, STREAM)
        if GATE != "":
            up = _tile_of(up_ptr, row, num_out, num_in, column, BLOCK_OUT, EVEN, STREAM)
        if KIND == "fma":
            if EVEN:
                x = tl.load(x_ptr + column).to(tl.float32)
            else:
                x = tl.load(x_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                if EVEN:
                    x *= tl.load(norm_ptr + column).to(tl.float32)
                else:
                    x *= tl.load(norm_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * x[None, :]
            if GATE != "":
                acc_up += up.to(tl.float32) * x[None, :]
        else:
            live = m[:, None] < num_rows
            if not EVEN:
                live = live & (column < num_in)[None, :]
            x = tl.load(x_ptr + m[:, None] * stride_x + column[None, :], mask=live, other=0.0)
            if NORM:
                wide = x.to(tl.float32)
                squares += wide * wide
                if EVEN:
                    scale = tl.load(norm_ptr + column)
                else:
                    scale = tl.load(norm_ptr + column, mask=column < num_in, other=0.0)
                x = (wide * scale.to(tl.float32)[None, :]).to(w.dtype)
            if KIND == "dot":
                acc = tl.dot(x, w.T, acc)
                if GATE != "":
                    acc_up = tl.dot(x, up.T, acc_up)
            else:
                acc = tl.dot(w, x.T, acc)
                if GATE != "":
                    acc_up = tl.dot(up, x.T, acc_up)

        if step % steps == steps - 1:
            n = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            if KIND == "fma":
                y = tl.sum(acc, 1)
                z = tl.sum(acc_up, 1) if GATE != "" else y
                out_ptrs = out_ptr + n
                live_out = n < num_out
                if NORM:
                    inverse = tl.rsqrt(tl.sum(squares, 0) / num_in + eps)
            elif KIND == "dot":
                y, z = acc, acc_up
                out_ptrs = out_ptr + m[:, None] * stride_out + n[None, :]
                live_out = (m[:, None] < num_rows) & (n < num_out)[None, :]
                if NORM:
                    inverse = tl.rsqrt(tl.sum(squares, 1) / num_in + eps)[:, None]
            else:
                y, z = acc, acc_up
                out_ptrs = out_ptr + m[None, :] * stride_out + n[:, None]
                live_out = (m[None, :] < num_rows) & (n < num_out)[:, None]
                if NORM:
                    inverse = tl.rsqrt(tl.sum(squares, 1) / num_in + eps)[None, :]
            if NORM:
                y *= inverse
                if GATE != "":
                    z *= inverse
            if HAS_BIAS:
                y += _spread(tl.load(bias_ptr + n, mask=n < num_out, other=0.0), KIND)
                if GATE != "":
                    z += _spread(tl.load(bias_ptr + num_out + n, mask=n < num_out, other=0.0), KIND)
            if GATE == "silu":
                y = y * tl.sigmoid(y) * z
            elif GATE == "gelu":  # (1 + tanh z) / 2 = sigmoid(2 z)
                inner = 1.5957691216057308 * (y + 0.044715 * y * y * y)  # 2 sqrt(2 / pi)
                y = y * tl.sigmoid(inner) * z
            if ADD:
                y += tl.load(out_ptrs, mask=live_out, other=0.0).to(tl.float32)
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live_out)
            acc = tl.zeros_like(acc)
            acc_up = acc
            squares = tl.zeros_like(squares)


def launch(
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
    pdl: bool = False,
    stream: bool = False,
) -> None:
    """out [rows, n] = or += f(norm(x) weight^T + bias), rows at most MAX_ROWS."""
    rows, num_in = x.shape
    num_out = out.shape[1]
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous()
    assert weight.shape == (num_out * (2 if gate else 1), num_in) and rows <= MAX_ROWS
    num_tiles = triton.cdiv(num_out, tile.block_out)
    grid = num_tiles
    if tile.programs_per_core:
        grid = min(grid, tile.programs_per_core * current_arch().num_cores)
    threads = tile.num_warps * 32
    prefetch = min(tile.prefetch, num_in)
    _linear[(grid,)](
        x,
        weight,
        bias if bias is not None else weight,
        norm if norm is not None else weight,
        out,
        eps,
        rows,
        num_out,
        num_in,
        x.stride(0),
        out.stride(0),
        prefetch,
        ROWS=1 if tile.kind == "fma" else 16,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        KIND=tile.kind,
        NORM=norm is not None,
        GATE=gate,
        ADD=add,
        HAS_BIAS=bias is not None,
        EVEN=num_in % tile.block_in == 0,
        PDL=pdl,
        STREAM=stream,
        THREADS=threads,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
