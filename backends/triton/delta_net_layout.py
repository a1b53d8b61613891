"""Where the gated delta net's projections keep what belongs to a head, and the gates they give.

Runs on: gpu.
"""

from typing import NamedTuple

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-6)  # of the norms of q and k


class Shape(NamedTuple):
    """What the kernels know of a layer when they are compiled."""

    KEY_HEADS: int
    VALUE_HEADS: int
    KEY_DIM: int
    VALUE_DIM: int
    INTERLEAVED: bool


@triton.jit
def key_column(
    head, part: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Where a key head's q (part 0) or k (part 1) begins in a row of qkvz."""
    if INTERLEAVED:
        GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
        return head * (2 * KEY_DIM + 2 * GROUP * VALUE_DIM) + part * KEY_DIM
    return (part * KEY_HEADS + head) * KEY_DIM


@triton.jit
def value_column(
    head, part: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Where a value head's v (part 0) or z (part 1) begins in a row of qkvz."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    if INTERLEAVED:
        begin = head // GROUP * (2 * KEY_DIM + 2 * GROUP * VALUE_DIM) + 2 * KEY_DIM
        return begin + (part * GROUP + head % GROUP) * VALUE_DIM
    return 2 * KEY_HEADS * KEY_DIM + (part * VALUE_HEADS + head) * VALUE_DIM


@triton.jit
def gates(ba_ptrs, live, head, decay_ptr, bias_ptr, KEY_HEADS: tl.constexpr,
           VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """beta and the logarithm of the decay of tokens whose rows of ba are given; 0 of dead ones."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    b_column = head
    a_column = VALUE_HEADS + head
    if INTERLEAVED:
        b_column = head // GROUP * (2 * GROUP) + head % GROUP
        a_column = b_column + GROUP
    b = tl.load(ba_ptrs + b_column, mask=live, other=0.0).to(tl.float32)
    a = tl.load(ba_ptrs + a_column, mask=live, other=0.0).to(tl.float32)
    a += tl.load(bias_ptr + head)
    # softplus; for small e the rounding of 1 + e would add up over a context.
    e = tl.exp(tl.minimum(a, 20.0))
    softplus = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.3333333)), tl.log(1.0 + e))
    softplus = tl.where(a > 20.0, a, softplus)
    log_decay = tl.load(decay_ptr + head) * softplus
    return tl.where(live, tl.sigmoid(b), 0.0), tl.where(live, log_decay, 0.0)
