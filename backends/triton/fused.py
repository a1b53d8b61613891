"""Element-wise work around the matrix products, a kernel each: norms, gates, RoPE and KV write.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import AttentionSpec, BatchMeta, LayerCache, Rope

GATE_BLOCK = 1024  # columns a program
HEADS_PER_PROGRAM = 8  # in write_qkv


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    size,
    stride_x,
    stride_residual,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < size
    x = tl.load(x_ptr + row * stride_x + c, mask=live, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * stride_residual + c
        residual = tl.load(residual_ptrs, mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptrs, x, mask=live)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
    out = x * inverse * weight
    tl.store(out_ptr + row * size + c, out.to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of x (any leading shape)."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the norm of the (rounded) residual."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
    if residual is not None:
        assert residual.dim() == 2 and residual.stride(1) == 1
    block = triton.next_power_of_2(size)
    _rms_norm[(rows.shape[0],)](
        rows,
        residual if residual is not None else rows,
        weight,
        out,
        eps,
        size,
        rows.stride(0),
        residual.stride(0) if residual is not None else 0,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@triton.jit
def _gated(x_ptr, out_ptr, size, stride_x, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < size
    gate = tl.load(x_ptr + row * stride_x + c, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + size + c, mask=live, other=0.0).to(tl.float32)
    if GELU:  # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        out = gate * tl.sigmoid(inner) * up
    else:
        out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * size + c, out.to(out_ptr.dtype.element_ty), mask=live)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :n]) * x[:, n:] for x [num_tokens, 2 n]."""
    return _gate(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(x[:, :n], tanh form) * x[:, n:] for x [num_tokens, 2 n]."""
    return _gate(x, gelu=True)


def _gate(x: Tensor, *, gelu: bool) -> Tensor:
    assert x.stride(1) == 1
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = min(GATE_BLOCK, triton.next_power_of_2(size))
    _gated[(num_tokens, triton.cdiv(size, block))](
        x,
        out,
        size,
        x.stride(0),
        GELU=gelu,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _write_qkv(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    out_slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_scale,
    v_scale,
    stride_qkv,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """One token, HEADS heads of q, k or v: [HEADS, HEAD_DIM].

    A head is held as its pairs (first and second half, or even and odd) and the rest that does
    not rotate. FIRST_BLOCK skips the blocks of q where q stays as it is.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) + FIRST_BLOCK
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    slot = tl.load(out_slots_ptr + token)
    if (slot < 0) & (block >= Q_BLOCKS):
        return
    h = tl.arange(0, HEADS)
    if is_q:
        heads = block * HEADS + h
        live = heads < NUM_HEADS
        column = heads * HEAD_DIM
    elif is_v:
        heads = (block - Q_BLOCKS - KV_BLOCKS) * HEADS + h
        live = heads < NUM_KV_HEADS
        column = (NUM_HEADS + NUM_KV_HEADS + heads) * HEAD_DIM
    else:
        heads = (block - Q_BLOCKS) * HEADS + h
        live = heads < NUM_KV_HEADS
        column = (NUM_HEADS + heads) * HEAD_DIM

    i = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    else:
        at_a = i
        at_b = i + ROTARY // 2
    in_half = live[:, None] & (i < ROTARY // 2)[None, :]
    source = qkv_ptr + token * stride_qkv + column
    a = tl.load(source[:, None] + at_a[None, :], mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + at_b[None, :], mask=in_half, other=0.0).to(tl.float32)
    HAS_REST: tl.constexpr = HEAD_DIM > ROTARY
    at_rest = ROTARY + tl.arange(0, BLOCK_REST)
    in_rest = live[:, None] & (at_rest < HEAD_DIM)[None, :]
    if HAS_REST:
        rest = tl.load(source[:, None] + at_rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros([HEADS, BLOCK_REST], tl.float32)

    if (HAS_Q_NORM & is_q) | (HAS_K_NORM & (block >= Q_BLOCKS) & (block < Q_BLOCKS + KV_BLOCKS)):
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight_ptr = q_norm_ptr
        if not is_q:
            weight_ptr = k_norm_ptr
        half = i < ROTARY // 2
        a *= inverse * tl.load(weight_ptr + at_a, mask=half, other=0.0).to(tl.float32)[None, :]
        b *= inverse * tl.load(weight_ptr + at_b, mask=half, other=0.0).to(tl.float32)[None, :]
        if HAS_REST:
            weight = tl.load(weight_ptr + at_rest, mask=at_rest < HEAD_DIM, other=0.0)
            rest *= inverse * weight.to(tl.float32)[None, :]
    if HAS_ROPE:
        if not is_v:
            cos_sin = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY
            cos = tl.load(cos_sin + i, mask=i < ROTARY // 2, other=0.0)[None, :]
            sin = tl.load(cos_sin + ROTARY // 2 + i, mask=i < ROTARY // 2, other=0.0)[None, :]
            turned = a * cos - b * sin
            b = b * cos + a * sin
            a = turned

    if is_q:
        tl.store(source[:, None] + at_a[None, :], a.to(qkv_ptr.dtype.element_ty), mask=in_half)
        tl.store(source[:, None] + at_b[None, :], b.to(qkv_ptr.dtype.element_ty), mask=in_half)
        if HAS_REST and HAS_Q_NORM:
            tl.store(
                source[:, None] + at_rest[None, :],
                rest.to(qkv_ptr.dtype.element_ty),
                mask=in_rest,
            )
    else:
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        if is_v:
            target = v_cache_ptr + page * stride_vp + offset * stride_vt + heads * stride_vh
            scale = v_scale
        else:
            target = k_cache_ptr + page * stride_kp + offset * stride_kt + heads * stride_kh
            scale = k_scale
        if FP8_MAX > 0:
            a = tl.clamp(a / scale, -FP8_MAX, FP8_MAX)
            b = tl.clamp(b / scale, -FP8_MAX, FP8_MAX)
            rest = tl.clamp(rest / scale, -FP8_MAX, FP8_MAX)
        tl.store(target[:, None] + at_a[None, :], a.to(target.dtype.element_ty), mask=in_half)
        tl.store(target[:, None] + at_b[None, :], b.to(target.dtype.element_ty), mask=in_half)
        if HAS_REST:
            tl.store(
                target[:, None] + at_rest[None, :], rest.to(target.dtype.element_ty), mask=in_rest
            )


def write_qkv(
    qkv: Tensor,
    meta: BatchMeta,
    cache: LayerCache,
    spec: AttentionSpec,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm and rotate q and k, write k and v to meta.out_slots; all in one pass over qkv.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; q is changed in place.

    Returns:
        q [num_tokens, num_heads, head_dim], a view of qkv.
    """
    assert qkv.stride(1) == 1 and cache.k.stride(3) == 1 and cache.v.stride(3) == 1
    num_tokens = qkv.shape[0]
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(spec.num_kv_heads))
    q_blocks = triton.cdiv(spec.num_heads, heads)
    kv_blocks = triton.cdiv(spec.num_kv_heads, heads)
    # Without RoPE a head is two halves that do not turn.
    rotary = rope.rotary_dim if rope is not None else spec.head_dim // 2 * 2
    first_block = q_blocks if rope is None and q_norm is None else 0
    is_fp8 = cache.k.element_size() == 1
    _write_qkv[(num_tokens, q_blocks + 2 * kv_blocks - first_block)](
        qkv,
        cache.k,
        cache.v,
        meta.positions,
        meta.out_slots,
        rope.cos_sin if rope is not None else qkv,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        eps,
        spec.k_scale,
        spec.v_scale,
        qkv.stride(0),
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        ROTARY=rotary,
        BLOCK_HALF=triton.next_power_of_2(max(rotary // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(spec.head_dim - rotary, 1)),
        HEADS=heads,
        FIRST_BLOCK=first_block,
        PAGE_SIZE=meta.page_size,
        INTERLEAVED=rope is not None and rope.interleaved,
        HAS_ROPE=rope is not None,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        FP8_MAX=torch.finfo(cache.k.dtype).max if is_fp8 else 0.0,
        num_warps=4,
    )
    return qkv[:, : spec.num_heads * spec.head_dim].unflatten(1, (spec.num_heads, spec.head_dim))
