"""The gated delta net: a kernel for one token a row; for more of them, see `delta_net_chunks`.

Runs on: gpu.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..api import BatchMeta, DeltaNetSpec, LayerState
from .delta_net_chunks import chunk_rows
from .delta_net_layout import NORM_EPS, Shape, gates, key_column, value_column


@triton.jit
def _window(
    x_ptr, conv_ptr, kv_len, channel, column, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """What a token's convolution sees of DIM channels: [BLOCK_D, BLOCK_W], the oldest first."""
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    known = d < tl.where(kv_len > 1, DIM, 0)
    old_ptrs = conv_ptr + (channel + d)[:, None] * (WIDTH - 1) + w[None, :]
    old = tl.load(old_ptrs, mask=known[:, None] & (w < WIDTH - 1)[None, :], other=0.0)
    x = tl.load(x_ptr + column + d, mask=d < DIM, other=0.0)
    return tl.where(w[None, :] == WIDTH - 1, x[:, None], old)


@triton.jit
def _convolve_window(
    window, weight_ptr, channel, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """silu of the convolution: [BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    weight_ptrs = weight_ptr + (channel + d)[:, None] * WIDTH + w[None, :]
    weight = tl.load(weight_ptrs, mask=(d < DIM)[:, None] & (w < WIDTH)[None, :], other=0.0)
    y = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 1)
    return y * tl.sigmoid(y)


@triton.jit
def _keep_window(
    window, conv_ptr, channel, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Make the window, but for its oldest inputs, the channels' state."""
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    ptrs = conv_ptr + (channel + d)[:, None] * (WIDTH - 1) + w[None, :] - 1
    is_kept = (w >= 1) & (w < WIDTH)
    tl.store(ptrs, window, mask=(d < DIM)[:, None] & is_kept[None, :])


@triton.jit
def _decode_delta(
    qkvz_ptr,
    ba_ptr,
    weight_ptr,
    conv_ptr,
    state_ptr,
    out_ptr,
    decay_ptr,
    bias_ptr,
    norm_ptr,
    kv_lens_ptr,
    slots_ptr,
    eps,
    stride_x,
    stride_ba,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """All of one token of a row, for a key head and its value heads.

    A state is read, changed and written once. With S that before the token and a its decay,
    S^T k and S^T q give all else: the token adds k u^T, where u = b (v - a S^T k), and its output
    is a S^T q + (k q) u.
    """
    key_head = tl.program_id(0)
    row = tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + row)
    if kv_len == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = row.to(tl.int64)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    x_ptr = qkvz_ptr + token * stride_x
    inputs_ptr = conv_ptr + slot * (CHANNELS * (WIDTH - 1))
    q_channel = key_head * KEY_DIM
    k_channel = (KEY_HEADS + key_head) * KEY_DIM
    q_inputs = _window(
        x_ptr, inputs_ptr, kv_len, q_channel,
        key_column(key_head, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED),
        WIDTH, KEY_DIM, BLOCK_K, BLOCK_W,
    )  # fmt: skip
    k_inputs = _window(
        x_ptr, inputs_ptr, kv_len, k_channel,
        key_column(key_head, 1, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED),
        WIDTH, KEY_DIM, BLOCK_K, BLOCK_W,
    )  # fmt: skip
    q = _convolve_window(q_inputs, weight_ptr, q_channel, WIDTH, KEY_DIM, BLOCK_K, BLOCK_W)
    k = _convolve_window(k_inputs, weight_ptr, k_channel, WIDTH, KEY_DIM, BLOCK_K, BLOCK_W)
    q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * KEY_DIM**-0.5
    k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
    kq = tl.sum(k * q, 0)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    inside = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
    known = inside & (i < tl.where(kv_len > 1, KEY_DIM, 0))[:, None]
    norm = tl.load(norm_ptr + j, mask=j < VALUE_DIM, other=0.0).to(tl.float32)
    for n in range(GROUP):
        head = key_head * GROUP + n
        state_ptrs = state_ptr + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
        state_ptrs += i[:, None] * VALUE_DIM + j[None, :]
        state = tl.load(state_ptrs, mask=known, other=0.0)
        channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        inputs = _window(
            x_ptr, inputs_ptr, kv_len, channel,
            value_column(head, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED),
            WIDTH, VALUE_DIM, BLOCK_V, BLOCK_W,
        )  # fmt: skip
        v = _convolve_window(inputs, weight_ptr, channel, WIDTH, VALUE_DIM, BLOCK_V, BLOCK_W)
        beta, log_decay = gates(
            ba_ptr + token * stride_ba, kv_len > 0, head, decay_ptr, bias_ptr,
            KEY_HEADS, VALUE_HEADS, INTERLEAVED,
        )  # fmt: skip
        decay = tl.exp(log_decay)
        added = beta * (v - decay * tl.sum(state * k[:, None], 0))
        y = decay * tl.sum(state * q[:, None], 0) + kq * added
        tl.store(state_ptrs, decay * state + k[:, None] * added[None, :], mask=inside)
        column = value_column(head, 1, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, INTERLEAVED)
        z = tl.load(x_ptr + column + j, mask=j < VALUE_DIM, other=0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 0) / VALUE_DIM + eps) * norm * (z * tl.sigmoid(z))
        out_ptrs = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM + j
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=j < VALUE_DIM)
        # Every warp has read the inputs for itself, before one overwrites them.
        tl.debug_barrier()
        _keep_window(inputs, inputs_ptr, channel, WIDTH, VALUE_DIM, BLOCK_V, BLOCK_W)
    _keep_window(q_inputs, inputs_ptr, q_channel, WIDTH, KEY_DIM, BLOCK_K, BLOCK_W)
    _keep_window(k_inputs, inputs_ptr, k_channel, WIDTH, KEY_DIM, BLOCK_K, BLOCK_W)


def delta_net(
    qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
) -> Tensor:
    """See `Ops.delta_net`. The launches depend on the batch's counts alone."""
    assert state.conv.is_contiguous() and state.recurrent.is_contiguous()
    assert qkvz.stride(1) == 1 and ba.stride(1) == 1
    shape = Shape(
        spec.num_key_heads,
        spec.num_value_heads,
        spec.key_dim,
        spec.value_dim,
        spec.interleaved,
    )
    out = qkvz.new_empty(len(qkvz), spec.num_value_heads * spec.value_dim)
    if meta.num_decode_rows:
        block_k, block_v = (triton.next_power_of_2(n) for n in (spec.key_dim, spec.value_dim))
        _decode_delta[(spec.num_key_heads, meta.num_decode_rows)](
            qkvz,
            ba,
            spec.conv,
            state.conv,
            state.recurrent,
            out,
            spec.decay,
            spec.dt_bias,
            spec.norm,
            meta.kv_lens,
            meta.slots,
            spec.eps,
            qkvz.stride(0),
            ba.stride(0),
            **shape._asdict(),
            WIDTH=spec.conv.shape[1],
            BLOCK_W=triton.next_power_of_2(spec.conv.shape[1]),
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            # 128 numbers a thread: few warps, since each loads the vectors for itself, and room
            # for two programs a core.
            num_warps=max(1, min(4, block_k * block_v // 4096)),
        )
    if meta.num_decode_rows < meta.num_rows:
        chunk_rows(qkvz, ba, out, meta, state, spec, shape)
    return out
