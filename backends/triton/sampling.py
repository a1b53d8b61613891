"""Sampling without a sort: one program a row, thresholds found by counting.

A row's filters keep what is at least a threshold. The threshold is found in the logits: a pass
counts (or weighs) what lies above each of several pivots, which narrows the interval that holds
it; once few candidates are left in the interval they are gathered, and bisected exactly.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import SamplingRows

BLOCK = 4096  # columns read at once
PIVOT_BLOCK = 1024
NUM_PIVOTS = 16
MAX_CANDIDATES = 2048
NUM_WARPS = 16
# exp(-104) is 0 in float32: what lies further below the maximum (in units of the temperature)
# has no probability.
RANGE = tl.constexpr(104.0)


@triton.jit
def _mix64(x):
    """splitmix64's finalizer (Steele et al. 2014) on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """The contract's random number: 24 bits, a float32 in [0, 1)."""
    start = _mix64(seed.to(tl.uint64, bitcast=True))
    step = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (_mix64(start + step) >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _weights(x, top, inverse_temperature):
    """exp((x - top) / temperature), 0 for NaN."""
    w = tl.exp((x - top) * inverse_temperature)
    return tl.where(w == w, w, 0.0)


@triton.jit
def _ordered(x):
    """An int32 that compares as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """The inverse of _ordered."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_from(
    logits_ptr, floor, top, inverse_temperature, vocab, sums_ptr, STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of the weights of logits >= floor, and their number; each block's sum to sums_ptr
    where STORE.
    """
    total = 0.0
    count = 0.0
    c = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits_ptr + start + c, mask=start + c < vocab, other=float("-inf"))
        w = tl.where(x >= floor, _weights(x, top, inverse_temperature), 0.0)
        mass = tl.sum(w, 0)
        count += tl.sum((x >= floor).to(tl.float32), 0)
        if STORE:
            tl.store(sums_ptr + start // BLOCK, mass)
        total += mass
    return total, count


@triton.jit
def _below_kth(maxima, low, top, k):
    """A logit that at least k are above, near the k-th largest; or low.

    Args:
        maxima: largest logits of disjoint sets: the k-th largest of these is not above that of all.
    """
    keys = _ordered(maxima).to(tl.int64)
    key_low = _ordered(low).to(tl.int64)
    key_high = _ordered(top).to(tl.int64)
    while key_high - key_low > 1:  # no maximum is above key_high: less than k
        middle = (key_low + key_high) >> 1
        is_less = tl.sum((keys > middle).to(tl.int32), 0) < k
        key_high = tl.where(is_less, middle, key_high)
        key_low = tl.where(is_less, key_low, middle)
    return _float_of(key_low.to(tl.int32))


@triton.jit
def _threshold(
    logits_ptr, candidates_ptr, low, high, inside, top, inverse_temperature, wanted, vocab,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOT_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The smallest logit above low whose strictly larger ones are (or weigh) less than `wanted`.

    Returns low where even all of those above it are less. `inside` is how many lie in (low, high],
    or more; none lies above high.
    """
    p = tl.arange(0, PIVOTS)
    c = tl.arange(0, PIVOT_BLOCK)
    above_high = 0.0  # what lies above high: less than wanted
    count_high = 0.0
    passes = 0
    # 16 passes reach two neighbouring floats: 4, and 32 bits at 4 bits a pass, and a reserve.
    while (inside > MAX_CANDIDATES) & (passes < 16):
        # At first the pivots lie denser towards the top, where the likely ones are; then evenly;
        # and evenly among all floats where that does not separate what are nearly ties.
        fraction = (PIVOTS - p).to(tl.float32) / PIVOTS
        if passes == 0:
            fraction = fraction * fraction * fraction
        pivots = tl.where(p == 0, low, high - (high - low) * fraction)
        if passes >= 4:
            key = _ordered(low).to(tl.int64)
            key += (_ordered(high).to(tl.int64) - key) * p // PIVOTS
            pivots = _float_of(key.to(tl.int32))
        counts = tl.zeros([PIVOTS, PIVOT_BLOCK], tl.float32)
        masses = tl.zeros([PIVOTS, PIVOT_BLOCK], tl.float32)
        for start in range(0, vocab, PIVOT_BLOCK):
            x = tl.load(logits_ptr + start + c, mask=start + c < vocab, other=float("-inf"))
            is_above = x[None, :] > pivots[:, None]
            counts += is_above.to(tl.float32)
            if BY_MASS:
                w = _weights(x, top, inverse_temperature)
                masses += tl.where(is_above, w[None, :], 0.0)
        count = tl.sum(counts, 1)
        if BY_MASS:
            above = tl.sum(masses, 1)
        else:
            above = count
        # above falls with the pivot: the first that has less than wanted is the new upper end.
        short = above < wanted
        first = tl.min(tl.where(short, p, PIVOTS), 0)
        before = tl.maximum(first - 1, 0)
        count_low = tl.sum(tl.where(p == before, count, 0.0), 0)
        new_low = tl.sum(tl.where(p == before, pivots, 0.0), 0)
        if first < PIVOTS:  # else it lies between the last pivot and high
            high = tl.sum(tl.where(p == first, pivots, 0.0), 0)
            above_high = tl.sum(tl.where(p == first, above, 0.0), 0)
            count_high = tl.sum(tl.where(p == first, count, 0.0), 0)
        inside = count_low - count_high
        low = new_low
        if first == 0:  # all that lies above low is less than wanted
            high = low
            inside = 0.0
        if _ordered(high).to(tl.int64) - _ordered(low) <= 1:
            passes = 16
        passes += 1

    threshold = high
    if (inside > 0) & (inside <= MAX_CANDIDATES):
        gathered = 0
        columns = tl.arange(0, BLOCK)
        tl.debug_barrier()
        for start in range(0, vocab, BLOCK):
            live = start + columns < vocab
            x = tl.load(logits_ptr + start + columns, mask=live, other=float("-inf"))
            chosen = (x > low) & (x <= high)
            at = gathered + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(candidates_ptr + at, x, mask=chosen)
            gathered += tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()
        i = tl.arange(0, MAX_CANDIDATES)
        x = tl.load(candidates_ptr + i, mask=i < gathered, other=float("-inf"))
        if BY_MASS:
            w = tl.where(i < gathered, _weights(x, top, inverse_temperature), 0.0)
        else:
            w = (i < gathered).to(tl.float32)
        key = _ordered(x).to(tl.int64)
        key_low = _ordered(low).to(tl.int64)
        key_high = _ordered(high).to(tl.int64)
        while key_high - key_low > 1:  # low has at least wanted above it, high has less
            middle = (key_low + key_high) >> 1
            is_less = above_high + tl.sum(tl.where(key > middle, w, 0.0), 0) < wanted
            key_high = tl.where(is_less, middle, key_high)
            key_low = tl.where(is_less, key_low, middle)
        reached = tl.where((key <= key_high) & (i < gathered), x, float("-inf"))
        threshold = tl.maximum(tl.max(reached, 0), low)
    return threshold


@triton.jit
def _sample(
    logits_ptr,
    tokens_ptr,
    is_finite_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    candidates_ptr,
    sums_ptr,
    vocab,
    stride_logits,
    num_blocks,
    ALL_GREEDY: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOT_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    c = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    is_nan = tl.zeros([BLOCK], tl.int1)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits_ptr + start + c, mask=start + c < vocab, other=float("-inf"))
        is_nan = is_nan | (x != x)
        at = tl.where(x > best, start + c, at)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, at, vocab), 0)
    token = tl.where(token < vocab, token, 0)
    is_top_finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(is_finite_ptr + row, is_top_finite & (tl.max(is_nan.to(tl.int32), 0) == 0))
    if not ALL_GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & is_top_finite:
            inverse = 1.0 / temperature
            floor = top - RANGE * temperature
            candidates_ptr += row * MAX_CANDIDATES
            if HAS_TOP_K:
                top_k = tl.load(top_k_ptr + row)
                if top_k < vocab:
                    low = _below_kth(best, floor, top, top_k)
                    _, inside = _mass_from(
                        logits_ptr, low, top, inverse, vocab, sums_ptr, False, BLOCK
                    )
                    floor = _threshold(
                        logits_ptr, candidates_ptr, low, top, inside, top, inverse,
                        top_k.to(tl.float32), vocab,
                        False, BLOCK, PIVOT_BLOCK, PIVOTS, MAX_CANDIDATES,
                    )  # fmt: skip
            if HAS_TOP_P:
                top_p = tl.load(top_p_ptr + row)
                if top_p < 1:
                    mass, inside = _mass_from(
                        logits_ptr, floor, top, inverse, vocab, sums_ptr, False, BLOCK
                    )
                    # The float below, so that floor itself is found where top_p keeps it.
                    low = _float_of(_ordered(floor) - 1)
                    found = _threshold(
                        logits_ptr, candidates_ptr, low, top, inside, top, inverse, top_p * mass,
                        vocab, True, BLOCK, PIVOT_BLOCK, PIVOTS, MAX_CANDIDATES,
                    )  # fmt: skip
                    floor = tl.maximum(floor, found)
            if HAS_MIN_P:
                min_p = tl.load(min_p_ptr + row)
                if min_p > 0:
                    floor = tl.maximum(floor, top + tl.log(min_p) * temperature)
            sums_ptr += row * num_blocks
            total, _ = _mass_from(logits_ptr, floor, top, inverse, vocab, sums_ptr, True, BLOCK)
            tl.debug_barrier()
            target = total * _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            s = tl.arange(0, BLOCK_SUMS)
            sums = tl.load(sums_ptr + s, mask=s < num_blocks, other=0.0)
            ends = tl.cumsum(sums, 0)
            last = tl.max(tl.where(sums > 0, s, 0), 0)
            block = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), last)
            begin = tl.sum(tl.where(s < block, sums, 0.0), 0)
            columns = block * BLOCK + c
            x = tl.load(logits_ptr + columns, mask=columns < vocab, other=float("-inf"))
            w = tl.where(x >= floor, _weights(x, top, inverse), 0.0)
            passed = (begin + tl.cumsum(w, 0) > target) & (w > 0)
            drawn = tl.min(tl.where(passed, columns, vocab), 0)
            rightmost = tl.max(tl.where(w > 0, columns, 0), 0)  # where rounding left none
            token = tl.where(drawn < vocab, drawn, rightmost)
    tl.store(tokens_ptr + row, token)


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Tokens by the rules of `ReferenceOps.sample`, and whether each row is sound; logits stay."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    num_blocks = triton.cdiv(vocab, BLOCK)
    has_search = not rows.all_greedy and (rows.has_top_k or rows.has_top_p)
    candidates = logits.new_empty(num_rows, MAX_CANDIDATES) if has_search else logits
    sums = logits if rows.all_greedy else logits.new_empty(num_rows, num_blocks)
    _sample[(num_rows,)](
        logits,
        tokens,
        is_finite,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.positions,
        candidates,
        sums,
        vocab,
        logits.stride(0),
        num_blocks,
        ALL_GREEDY=rows.all_greedy,
        HAS_TOP_K=rows.has_top_k,
        HAS_TOP_P=rows.has_top_p,
        HAS_MIN_P=rows.has_min_p,
        BLOCK=BLOCK,
        PIVOT_BLOCK=PIVOT_BLOCK,
        PIVOTS=NUM_PIVOTS,
        MAX_CANDIDATES=MAX_CANDIDATES,
        BLOCK_SUMS=triton.next_power_of_2(num_blocks),
        num_warps=NUM_WARPS,
    )
    return tokens, is_finite
