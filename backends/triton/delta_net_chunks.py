"""The gated delta net of rows of several new tokens: whole chunks of them as matrix products.

Within a chunk of a head (Yang et al. 2024, "Gated Delta Networks", section 3.3), with G the running
sum of the logarithms of the decay, K, Q, V the chunk's rows, S the state before it, and

    A[t, i] = b_t exp(G_t - G_i) k_t k_i   for i < t,   T = (I + A)^-1 diag(b),
    P[t, i] = exp(G_t - G_i) q_t k_i       for i <= t,

what each token adds is U = T (V - exp(G) K S), its output exp(G) Q S + P U, and the state after the
chunk exp(G_last) S + (exp(G_last - G) K)^T U. A and P of all chunks are made side by side, then T;
only the last three lines go from chunk to chunk. The convolution comes before, as a kernel of its
own, and the gated norm after.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import BatchMeta, DeltaNetSpec, LayerState
from .arch import current_arch
from .delta_net_layout import NORM_EPS, Shape, gates, key_column, value_column
from .row_tiles import find_tile, num_tiles

CHUNK = tl.constexpr(64)  # tokens
PART = tl.constexpr(16)  # tokens; triangles of this size are solved row by row
CONVOLVED = 16  # tokens of a tile of the convolution
VALUE_BLOCK = 32  # columns of the state a program carries along its row
SCAN_STAGES = {"sm_80": 2, "sm_90": 2, "sm_100": 2}  # chunks in flight; elsewhere 1


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _convolve(
    qkvz_ptr,
    weight_ptr,
    conv_ptr,
    out_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    slots_ptr,
    first_row,
    num_rows,
    stride_x,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """silu of the convolution, for a tile of tokens and a head of q, k or v, in order of channels.

    q and k are normed, q is scaled. The state is read here and written by the kernels after.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row, row_begin, q_len, token0 = find_tile(qo_indptr_ptr, first_row, num_rows, tile, BLOCK_T)
    kv_len = tl.load(kv_lens_ptr + row)
    if token0 >= q_len or kv_len == 0:
        return
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    # Selected, not branched for: so the compiler still knows what the columns are multiples of.
    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    column = tl.where(
        head < KEY_HEADS,
        key_column(head, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED),
        key_column(head - KEY_HEADS, 1, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED),
    )
    value_begin = value_column(
        value_head, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED
    )
    column = tl.where(is_value, value_begin, column)
    value_channel = 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
    channel = tl.where(is_value, value_channel, head * KEY_DIM)
    t = token0 + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = d < tl.where(is_value, VALUE_DIM, KEY_DIM)
    state_ptrs = conv_ptr + (tl.load(slots_ptr + row).to(tl.int64) * CHANNELS + channel + d) * (
        WIDTH - 1
    )
    num_kept = tl.where(kv_len > q_len, WIDTH - 1, 0)  # inputs before these
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for j in tl.static_range(WIDTH):
        at = t - (WIDTH - 1 - j)
        x_ptrs = qkvz_ptr + (row_begin + at).to(tl.int64)[:, None] * stride_x + column + d[None, :]
        live = (at >= 0) & (at < q_len)
        x = tl.load(x_ptrs, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if j < WIDTH - 1:
            before = (at < 0) & (at >= -num_kept)
            old = tl.load(
                state_ptrs[None, :] + (WIDTH - 1 + at)[:, None],
                mask=before[:, None] & inside[None, :],
                other=0.0,
            )
            x += old.to(tl.float32)
        weight = tl.load(weight_ptr + (channel + d) * WIDTH + j, mask=inside, other=0.0)
        acc += x * weight.to(tl.float32)[None, :]
    y = acc * tl.sigmoid(acc)
    if head < 2 * KEY_HEADS:
        y *= tl.rsqrt(tl.sum(y * y, 1) + NORM_EPS)[:, None]
        if head < KEY_HEADS:
            y *= KEY_DIM**-0.5
    out_ptrs = out_ptr + (row_begin + t).to(tl.int64)[:, None] * CHANNELS + channel + d[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=(t < q_len)[:, None] & inside[None, :])


@triton.jit
def _keep_inputs(
    qkvz_ptr, conv_ptr, row_begin, q_len, kv_len, slot, channel, column, stride_x,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Make DIM channels of the convolution's state the last inputs of the row."""
    d = tl.arange(0, BLOCK_D)
    state_ptrs = conv_ptr + (slot * CHANNELS + channel + d) * (WIDTH - 1)
    for j in tl.static_range(WIDTH - 1):  # an input moves to the left, so none is lost
        at = q_len - (WIDTH - 1) + j
        x_ptrs = qkvz_ptr + (row_begin + at).to(tl.int64) * stride_x + column + d
        x = tl.load(x_ptrs, mask=d < tl.where(at >= 0, DIM, 0), other=0.0)
        is_old = (at < 0) & (kv_len > q_len)
        old_ptrs = state_ptrs + (WIDTH - 1 + at)
        old = tl.load(old_ptrs, mask=d < tl.where(is_old, DIM, 0), other=0.0)
        kept = x.to(conv_ptr.dtype.element_ty) + old  # one of which is 0
        tl.store(state_ptrs + j, kept, mask=d < DIM)


@triton.jit
def _keep_head_inputs(
    qkvz_ptr, conv_ptr, row_begin, q_len, kv_len, slot, head, stride_x,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Those of a value head's v, and of its key head's q and k where it is the first of them."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    column = value_column(head, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED)
    channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    _keep_inputs(qkvz_ptr, conv_ptr, row_begin, q_len, kv_len, slot, channel, column, stride_x,
                 CHANNELS, WIDTH, VALUE_DIM, BLOCK_V)  # fmt: skip
    if head % GROUP == 0:
        key_head = head // GROUP
        for part in tl.static_range(2):
            column = key_column(
                key_head, part, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED
            )
            channel = (part * KEY_HEADS + key_head) * KEY_DIM
            _keep_inputs(qkvz_ptr, conv_ptr, row_begin, q_len, kv_len, slot, channel, column,
                         stride_x, CHANNELS, WIDTH, KEY_DIM, BLOCK_K)  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _within_chunks(
    qkv_ptr,
    ba_ptr,
    a_ptr,
    p_ptr,
    beta_ptr,
    g_ptr,
    decay_ptr,
    bias_ptr,
    qo_indptr_ptr,
    first_row,
    num_rows,
    stride_ba,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A, P, beta and G of a chunk and value head, by token: [num_tokens, VALUE_HEADS, CHUNK]."""
    head = tl.program_id(0)
    _, row_begin, q_len, token0 = find_tile(
        qo_indptr_ptr, first_row, num_rows, tl.program_id(1), CHUNK
    )
    if token0 >= q_len:
        return
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    t = tl.arange(0, CHUNK)
    live = token0 + t < q_len
    token = (row_begin + token0 + t).to(tl.int64)
    beta, log_decay = gates(
        ba_ptr + token * stride_ba, live, head, decay_ptr, bias_ptr,
        KEY_HEADS, VALUE_HEADS, INTERLEAVED,
    )  # fmt: skip
    g = tl.cumsum(log_decay, 0)
    i = tl.arange(0, BLOCK_K)
    mask = live[:, None] & (i < KEY_DIM)[None, :]
    q_ptrs = qkv_ptr + token[:, None] * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    q_ptrs += i[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    k = tl.load(q_ptrs + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
    keys = tl.trans(k)
    # Above the diagonal the exponent would be positive, and might be infinite.
    ratio = tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))
    a = tl.dot(k, keys, input_precision=PRECISION) * ratio * beta[:, None]
    p = tl.dot(q, keys, input_precision=PRECISION) * ratio
    own = (token - first_row) * VALUE_HEADS + head  # the rows before have one token each
    at = own[:, None] * CHUNK + t[None, :]
    a = tl.where(t[:, None] > t[None, :], a, 0.0)
    p = tl.where(t[:, None] >= t[None, :], p, 0.0)
    tl.store(a_ptr + at, a, mask=live[:, None])
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(beta_ptr + own, beta, mask=live)
    tl.store(g_ptr + own, g, mask=live)


@triton.jit
def _inverses(a_ptr, token0, num_live, head, VALUE_HEADS: tl.constexpr):
    """(I + A)^-1 of the PARTs on A's diagonal, [4, PART, PART], by substitution, row after row."""
    part = tl.arange(0, 4)[:, None, None] * PART
    i = tl.arange(0, PART)[None, :, None]
    j = tl.arange(0, PART)[None, None, :]
    # Transposed, so that a row of A comes as a column of this.
    at = (token0 + part + j) * (VALUE_HEADS * CHUNK) + head * CHUNK + part + i
    a = tl.load(a_ptr + at, mask=(part + j < num_live) & (i >= 0), other=0.0)
    inverse = tl.where((i == j) & (part >= 0), 1.0, 0.0)
    for n in range(1, PART):
        row = tl.sum(tl.where(j == n, a, 0.0), 2)
        row = tl.sum(row[:, :, None] * inverse, 1)
        inverse -= tl.where(i == n, row[:, None, :], 0.0)
    return inverse


@triton.jit
def _of_diagonal(inverses, n: tl.constexpr):
    """The n-th of them."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == n, inverses, 0.0), 0)


@triton.jit
def _part(a_ptr, token0, num_live, head, VALUE_HEADS: tl.constexpr, i: tl.constexpr,
          j: tl.constexpr):  # fmt: skip
    """PART i of A's rows, PART j of its columns."""
    r = tl.arange(0, PART)
    t = i * PART + r
    at = (token0 + t)[:, None] * (VALUE_HEADS * CHUNK) + head * CHUNK + j * PART + r[None, :]
    return tl.load(a_ptr + at, mask=(t < num_live)[:, None], other=0.0)


@triton.jit
def _mm(x, y, PRECISION: tl.constexpr):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _put_part(t_ptr, x, beta_ptr, token0, num_live, head, VALUE_HEADS: tl.constexpr,
              i: tl.constexpr, j: tl.constexpr):  # fmt: skip
    """PART i, j of T: x times its columns' betas."""
    r = tl.arange(0, PART)
    t = i * PART + r
    column = j * PART + r
    beta_ptrs = beta_ptr + (token0 + column) * VALUE_HEADS + head
    x *= tl.load(beta_ptrs, mask=column < num_live, other=0.0)[None, :]
    at = (token0 + t)[:, None] * (VALUE_HEADS * CHUNK) + head * CHUNK + column[None, :]
    tl.store(t_ptr + at, x.to(t_ptr.dtype.element_ty), mask=(t < num_live)[:, None])


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _invert(
    a_ptr,
    beta_ptr,
    t_ptr,
    qo_indptr_ptr,
    first_row,
    num_rows,
    VALUE_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """T of a chunk and value head: triangles of PART tokens, then what lies below them."""
    head = tl.program_id(0)
    _, row_begin, q_len, chunk0 = find_tile(
        qo_indptr_ptr, first_row, num_rows, tl.program_id(1), CHUNK
    )
    n = q_len - chunk0
    if n <= 0:
        return
    at = (row_begin + chunk0 - first_row).to(tl.int64)
    V: tl.constexpr = VALUE_HEADS
    P: tl.constexpr = PRECISION
    inverses = _inverses(a_ptr, at, n, head, V)
    t00 = _of_diagonal(inverses, 0)
    t11 = _of_diagonal(inverses, 1)
    t22 = _of_diagonal(inverses, 2)
    t33 = _of_diagonal(inverses, 3)
    a10 = _part(a_ptr, at, n, head, V, 1, 0)
    a21 = _part(a_ptr, at, n, head, V, 2, 1)
    a32 = _part(a_ptr, at, n, head, V, 3, 2)
    t10 = -_mm(t11, _mm(a10, t00, P), P)
    t21 = -_mm(t22, _mm(a21, t11, P), P)
    t32 = -_mm(t33, _mm(a32, t22, P), P)
    a20 = _part(a_ptr, at, n, head, V, 2, 0)
    a31 = _part(a_ptr, at, n, head, V, 3, 1)
    t20 = -_mm(t22, _mm(a20, t00, P) + _mm(a21, t10, P), P)
    t31 = -_mm(t33, _mm(a31, t11, P) + _mm(a32, t21, P), P)
    a30 = _part(a_ptr, at, n, head, V, 3, 0)
    t30 = -_mm(t33, _mm(a30, t00, P) + _mm(a31, t10, P) + _mm(a32, t20, P), P)
    nothing = tl.zeros([PART, PART], tl.float32)
    _put_part(t_ptr, t00, beta_ptr, at, n, head, V, 0, 0)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 0, 1)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 0, 2)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 0, 3)
    _put_part(t_ptr, t10, beta_ptr, at, n, head, V, 1, 0)
    _put_part(t_ptr, t11, beta_ptr, at, n, head, V, 1, 1)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 1, 2)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 1, 3)
    _put_part(t_ptr, t20, beta_ptr, at, n, head, V, 2, 0)
    _put_part(t_ptr, t21, beta_ptr, at, n, head, V, 2, 1)
    _put_part(t_ptr, t22, beta_ptr, at, n, head, V, 2, 2)
    _put_part(t_ptr, nothing, beta_ptr, at, n, head, V, 2, 3)
    _put_part(t_ptr, t30, beta_ptr, at, n, head, V, 3, 0)
    _put_part(t_ptr, t31, beta_ptr, at, n, head, V, 3, 1)
    _put_part(t_ptr, t32, beta_ptr, at, n, head, V, 3, 2)
    _put_part(t_ptr, t33, beta_ptr, at, n, head, V, 3, 3)


@triton.jit(do_not_specialize=["first_row"])
def _scan_chunks(
    qkvz_ptr,
    qkv_ptr,
    t_ptr,
    p_ptr,
    g_ptr,
    conv_ptr,
    state_ptr,
    out_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    slots_ptr,
    first_row,
    stride_x,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """A row's chunks, one after the other, for BLOCK_V columns of a value head's state."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = first_row + tl.program_id(2)
    row_begin = tl.load(qo_indptr_ptr + row)
    q_len = tl.load(qo_indptr_ptr + row + 1) - row_begin
    kv_len = tl.load(kv_lens_ptr + row)
    if q_len == 0 or kv_len == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = block * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, CHUNK)
    inside = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
    state_ptrs = state_ptr + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_ptrs += i[:, None] * VALUE_DIM + j[None, :]
    known = inside & (i < tl.where(kv_len > q_len, KEY_DIM, 0))[:, None]
    state = tl.load(state_ptrs, mask=known, other=0.0)

    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    kind = qkv_ptr.dtype.element_ty
    for token0 in range(0, q_len, CHUNK):
        token = (row_begin + token0 + t).to(tl.int64)
        live = token0 + t < q_len
        own = (token - first_row) * VALUE_HEADS + head  # the rows before have one token each
        rows = qkv_ptr + token[:, None] * CHANNELS
        key_mask = live[:, None] & (i < KEY_DIM)[None, :]
        k_ptrs = rows + (KEY_HEADS + key_head) * KEY_DIM + i[None, :]
        value_mask = live[:, None] & (j < VALUE_DIM)[None, :]
        v_ptrs = rows + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
        square = own[:, None] * CHUNK + t[None, :]
        k = tl.load(k_ptrs, mask=key_mask, other=0.0)
        v = tl.load(v_ptrs, mask=value_mask, other=0.0)
        g = tl.load(g_ptr + own, mask=live, other=0.0)
        solved = tl.load(t_ptr + square, mask=live[:, None], other=0.0)
        last = tl.minimum(token0 + CHUNK, q_len) - 1
        g_last = tl.load(g_ptr + (row_begin + last - first_row).to(tl.int64) * VALUE_HEADS + head)
        decay = tl.exp(g)[:, None]
        old = state.to(kind)
        rest = v - decay * tl.dot(k, old, input_precision=PRECISION)
        added = tl.dot(solved, rest.to(kind), input_precision=PRECISION)

        q = tl.load(k_ptrs - KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
        p = tl.load(p_ptr + square, mask=live[:, None], other=0.0)
        y = decay * tl.dot(q, old, input_precision=PRECISION)
        y = tl.dot(p, added.to(kind), y, input_precision=PRECISION)
        out_ptrs = (
            out_ptr + own[:, None] * VALUE_DIM + j[None, :] + first_row * (VALUE_HEADS * VALUE_DIM)
        )
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=value_mask)
        # Dead tokens have added nothing.
        kept = (added * tl.exp(g_last - g)[:, None]).to(kind)
        state *= tl.exp(g_last)
        state = tl.dot(tl.trans(k), kept, state, input_precision=PRECISION)
    tl.store(state_ptrs, state, mask=inside)
    if block == 0:
        _keep_head_inputs(
            qkvz_ptr, conv_ptr, row_begin, q_len, kv_len, slot, head, stride_x, KEY_HEADS,
            VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED, WIDTH, BLOCK_K, BLOCK_VALUE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_token", "num_rows"])
def _norm_heads(
    out_ptr,
    qkvz_ptr,
    norm_ptr,
    first_token,
    num_rows,
    eps,
    stride_x,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """rms_norm(out) * weight * silu(z), in place; a row is a head of a token."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_V)
    mask = (r < num_rows)[:, None] & (j < VALUE_DIM)[None, :]
    token = (first_token + r // VALUE_HEADS).to(tl.int64)
    head = r % VALUE_HEADS
    column = value_column(head, 1, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED)
    z_ptrs = qkvz_ptr + (token * stride_x + column)[:, None] + j[None, :]
    out_ptrs = out_ptr + ((token * VALUE_HEADS + head) * VALUE_DIM)[:, None] + j[None, :]
    y = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + j, mask=j < VALUE_DIM, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None]
    y *= norm[None, :] * (z * tl.sigmoid(z))
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def chunk_rows(
    qkvz: Tensor,
    ba: Tensor,
    out: Tensor,
    meta: BatchMeta,
    state: LayerState,
    spec: DeltaNetSpec,
    shape: Shape,
) -> None:
    """The rows after the decode rows, in chunks."""
    first_row, heads = meta.num_decode_rows, spec.num_value_heads
    num_tokens, num_rows, device = len(qkvz) - first_row, meta.num_rows - first_row, qkvz.device
    tiles = num_tiles(num_tokens, num_rows, CHUNK.value)
    block_k = max(16, triton.next_power_of_2(spec.key_dim))
    block_v = triton.next_power_of_2(spec.value_dim)
    # Three products of tf32 are as exact as one of float32, on NVIDIA's tensor cores.
    precision = "tf32x3" if current_arch().name.startswith("sm_") else "ieee"
    channels, width = spec.conv.shape
    qkv = torch.empty(len(qkvz), channels, dtype=qkvz.dtype, device=device)
    _convolve[(2 * spec.num_key_heads + heads, num_tiles(num_tokens, num_rows, CONVOLVED))](
        qkvz,
        spec.conv,
        state.conv,
        qkv,
        meta.qo_indptr,
        meta.kv_lens,
        meta.slots,
        first_row,
        meta.num_rows,
        qkvz.stride(0),
        **shape._asdict(),
        WIDTH=width,
        BLOCK_T=CONVOLVED,
        BLOCK_D=triton.next_power_of_2(max(spec.key_dim, spec.value_dim)),
        num_warps=8,
    )
    square = (num_tokens, heads, CHUNK.value)
    a = torch.empty(square, dtype=torch.float32, device=device)
    t, p = (torch.empty(square, dtype=qkvz.dtype, device=device) for _ in range(2))
    beta, g = (torch.empty(num_tokens, heads, dtype=torch.float32, device=device) for _ in range(2))
    _within_chunks[(heads, tiles)](
        qkv,
        ba,
        a,
        p,
        beta,
        g,
        spec.decay,
        spec.dt_bias,
        meta.qo_indptr,
        first_row,
        meta.num_rows,
        ba.stride(0),
        **shape._asdict(),
        PRECISION=precision,
        BLOCK_K=block_k,
        num_warps=4,
    )
    _invert[(heads, tiles)](
        a,
        beta,
        t,
        meta.qo_indptr,
        first_row,
        meta.num_rows,
        VALUE_HEADS=heads,
        PRECISION=precision,
        num_warps=2,
    )
    columns = min(VALUE_BLOCK, max(16, block_v))
    _scan_chunks[(triton.cdiv(spec.value_dim, columns), heads, num_rows)](
        qkvz,
        qkv,
        t,
        p,
        g,
        state.conv,
        state.recurrent,
        out,
        meta.qo_indptr,
        meta.kv_lens,
        meta.slots,
        first_row,
        qkvz.stride(0),
        **shape._asdict(),
        WIDTH=width,
        PRECISION=precision,
        BLOCK_K=block_k,
        BLOCK_V=columns,
        BLOCK_VALUE=block_v,
        num_warps=4,
        num_stages=SCAN_STAGES.get(current_arch().name, 1),
    )
    rows = max(1, 1024 // block_v)
    _norm_heads[(triton.cdiv(num_tokens * heads, rows),)](
        out,
        qkvz,
        spec.norm,
        first_row,
        num_tokens * heads,
        spec.eps,
        qkvz.stride(0),
        **shape._asdict(),
        BLOCK_R=rows,
        BLOCK_V=block_v,
        num_warps=4,
    )
