"""Mixtures of experts: the choice of experts, and the products of tokens with those chosen.

A pair is a token and one of its experts; pairs are numbered token by token. Two ways:

* One or two tokens: each pair streams its expert's weights through a pipeline of asynchronous
  copies, two kernels in all. The second sums a token's experts along with the inner dimension.
* More: a kernel (for very many pairs two) sorts the pairs by expert, so that tiles of pairs of one
  expert are matrix products, and a last one sums each token's parts in the order of its experts.
  Grids depend on sizes alone: nothing waits for the host, and all of it can be captured.

Gate and up projections are interleaved row by row when packed, so that both of a pair lie in one
thread's registers when the first product ends. Tiles come from a table that
benchmarks/tune_moe.py measures, `moe_tiles.json` beside this file, else from `default_tiles`.

Runs on: gpu.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..api import ExpertWeights, RouterSpec
from .arch import current_arch
from .fused import rms_norm

TABLE = Path(__file__).with_name("moe_tiles.json")
HAS_DESCRIPTORS = ("sm_90", "sm_100", "interpreter")
CHUNKS = (256, 2048)  # pairs that are counted at once; more of them take a kernel of their own
MATCH_ELEMENTS = 8192  # of a block of (pairs x experts) that are compared
SUM_BLOCK = 1024  # columns a program of the last sum


class Tile(NamedTuple):
    """A block of a product: rows (pairs) x block_out, block_in at a time.

    Attributes:
        rows: 1 for the kernels that do not sort.
        stages: blocks of the weights that are in flight.
        swapped: the weights are the left operand of the matrix instruction, whose left side has
            at least 64 rows on Hopper.
        described: weights come by tensor descriptor (TMA), where the GPU has them.
    """

    rows: int
    block_out: int
    block_in: int
    num_warps: int
    stages: int
    swapped: bool = False
    described: bool = False


class Tiles(NamedTuple):
    """Those of the two products; both have as many rows."""

    gate_up: Tile
    down: Tile


class PackedExperts(NamedTuple):
    """Weights as the kernels read them.

    Attributes:
        gate_up: [num_experts, 2 * inner, hidden], rows gate, up, gate, up, ...
        down: [num_experts, hidden, inner].
        gate_up_bias, down_bias: [num_experts, 2 * inner], as gate_up; [num_experts, hidden].
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str


def default_tiles(num_pairs: int, num_experts: int, top_k: int) -> Tiles:
    """Tiles for sizes that the table does not have.

    By what fits, not by measurement: several programs a multiprocessor while weights are streamed,
    so that one's start and end hide behind the others; large products beyond.
    """
    if num_pairs == top_k or (num_pairs == 2 * top_k and 4 * num_pairs <= num_experts):
        return Tiles(Tile(1, 16, 256, 4, 4), Tile(1, 8, 256, 2, 6))
    per_expert = num_pairs / num_experts
    if per_expert <= 16:
        few = Tile(16, 64, 128, 4, 4, swapped=True)
        return Tiles(few, few)
    if per_expert <= 48:
        some = Tile(32, 128, 128, 4, 3, swapped=True)
        return Tiles(some, some)
    if per_expert <= 96:
        return Tiles(Tile(64, 256, 64, 4, 3), Tile(64, 128, 64, 4, 4))
    return Tiles(Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 3))


def table_key(num_experts: int, inner: int, hidden: int, dtype: torch.dtype) -> str:
    """A shape's name in the table."""
    return f"{num_experts} x {inner} x {hidden} {str(dtype).removeprefix('torch.')}"


@functools.lru_cache(4096)
def choose_tiles(
    num_pairs: int, top_k: int, num_experts: int, inner: int, hidden: int, dtype: torch.dtype
) -> Tiles:
    """The measured tiles of the next larger number of pairs in the table, or default ones."""
    by_shape: Mapping[str, Any] = _table().get(current_arch().name, {})
    measured = by_shape.get(table_key(num_experts, inner, hidden, dtype))
    if not measured:
        return default_tiles(num_pairs, num_experts, top_k)
    limits = sorted(int(limit) for limit in measured)
    limit = next((n for n in limits if n >= num_pairs), limits[-1])
    gate_up, down = measured[str(limit)]
    return Tiles(Tile(*gate_up), Tile(*down))


@functools.cache
def _table() -> Mapping[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


# --------------------------------------------------------------------------------------- route


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    stride_logits,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token: the expert of the best score, lowest id first, TOP_K times over.

    NaN counts as -inf; once nothing larger is left, expert 0 is chosen again.
    """
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    e = g[:, None] * SIZE + s[None, :]
    live = (g < NUM_GROUPS)[:, None] & (s < SIZE)[None, :]
    none = float("-inf")
    x = tl.load(logits_ptr + token * stride_logits + e, mask=live, other=none).to(tl.float32)
    if IS_SOFTMAX:
        x = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = x / tl.sum(tl.sum(x, 1), 0)
    else:
        scores = tl.sigmoid(x)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + e, mask=live, other=0.0)
    choice = tl.where(live & (choice == choice), choice, none)
    if NUM_GROUPS > 1:
        group_score = tl.max(choice, 1)
        if HAS_BIAS:  # the best two
            best = tl.min(tl.where(choice == group_score[:, None], e, NUM_EXPERTS), 1)
            group_score += tl.max(tl.where(e == best[:, None], none, choice), 1)
        is_chosen = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            left = tl.where(is_chosen | (g >= NUM_GROUPS), none, group_score)
            top = tl.max(left, 0)
            group = tl.min(tl.where((left == top) & (is_chosen == 0), g, NUM_GROUPS), 0)
            is_chosen = is_chosen | (g == group)
        choice = tl.where(is_chosen[:, None], choice, none)

    WIDTH: tl.constexpr = TOP_K + NUM_SHARED
    j = tl.arange(0, triton.next_power_of_2(WIDTH))
    ids = NUM_EXPERTS + j - TOP_K
    weights = j.to(tl.float32) * 0.0
    for rank in tl.static_range(TOP_K):
        top = tl.max(tl.max(choice, 1), 0)
        expert = tl.min(tl.min(tl.where(choice == top, e, NUM_EXPERTS), 1), 0)
        is_it = e == expert
        weight = tl.sum(tl.sum(tl.where(is_it & live, scores, 0.0), 1), 0)
        ids = tl.where(j == rank, expert, ids)
        weights = tl.where(j == rank, weight, weights)
        choice = tl.where(is_it, none, choice)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, 0), 1e-20)
    of_shared = 1.0
    if HAS_SHARED_GATE:
        gate = tl.load(logits_ptr + token * stride_logits + NUM_EXPERTS).to(tl.float32)
        of_shared = tl.sigmoid(gate)
    weights = tl.where(j < TOP_K, weights * scale, of_shared)
    tl.store(ids_ptr + token * WIDTH + j, ids, mask=j < WIDTH)
    tl.store(weights_ptr + token * WIDTH + j, weights, mask=j < WIDTH)


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Expert ids int32 and weights float32, [num_tokens, top_k + num_shared] each."""
    num_tokens, num_experts = logits.shape
    num_experts -= spec.has_shared_gate
    assert logits.stride(1) == 1 and num_experts % spec.num_groups == 0
    shape = num_tokens, spec.top_k + spec.num_shared
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            bias if bias is not None else logits,
            ids,
            weights,
            spec.scale,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=spec.top_k,
            NUM_GROUPS=spec.num_groups,
            TOP_GROUPS=spec.top_groups,
            NUM_SHARED=spec.num_shared,
            HAS_SHARED_GATE=spec.has_shared_gate,
            BLOCK_G=triton.next_power_of_2(spec.num_groups),
            BLOCK_S=triton.next_power_of_2(num_experts // spec.num_groups),
            IS_SOFTMAX=spec.scoring == "softmax",
            HAS_BIAS=bias is not None,
            RENORMALIZE=spec.renormalize,
            num_warps=1,
        )
    return ids, weights


# ------------------------------------------------------------------------------- parts of both


@triton.jit
def _load_weights(
    weight, first_row, rows, start, k, num_in, DESCRIBED: tl.constexpr, EVEN: tl.constexpr
):
    """A block [BLOCK_OUT, BLOCK_IN] of all experts' rows, [num_experts * num_out, num_in].

    The only place where weights are read: those stored in fewer bits are to be widened here.
    """
    if DESCRIBED:
        w = weight.load([first_row, start])
    elif EVEN:
        w = tl.load(weight + rows[:, None] * num_in + (start + k)[None, :])
    else:
        ptrs = weight + rows[:, None] * num_in + (start + k)[None, :]
        w = tl.load(ptrs, mask=(start + k < num_in)[None, :], other=0.0)
    return w


@triton.jit
def activate(y, ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """[ROWS, 2 * WIDTH] of gate, up, gate, up, ... to [ROWS, WIDTH]."""
    gate, up = tl.split(tl.reshape(y, [ROWS, WIDTH, 2]))
    if ACTIVATION == "silu":
        out = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        out = gate * tl.sigmoid(inner) * up
    else:  # swiglu_clamped; NaN stays NaN
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL)
        out = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return out


# ----------------------------------------------------------------------------------- few pairs


@triton.jit
def _pair_gate_up(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    ids_ptr,
    out_ptr,
    num_out,
    num_in,
    stride_x,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK_OUT rows of gate and up for one pair; out is [num_pairs, inner].

    With a norm of x, its scale of a row is one factor, which is applied to the result.
    """
    pair = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_OUT
    n = first + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    rows = expert * num_out + tl.minimum(n, num_out - 1)
    x_ptr += (pair // TOP_K).to(tl.int64) * stride_x
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        w = _load_weights(weight_ptr, 0, rows, start, k, num_in, False, EVEN)
        column = start + k
        if EVEN:
            x = tl.load(x_ptr + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            if EVEN:
                x *= tl.load(norm_ptr + column).to(tl.float32)
            else:
                x *= tl.load(norm_ptr + column, mask=column < num_in, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / num_in + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    y = tl.reshape(activate(y, 1, BLOCK_OUT // 2, ACTIVATION), [BLOCK_OUT // 2])
    c = first // 2 + tl.arange(0, BLOCK_OUT // 2)
    inner = num_out // 2
    tl.store(out_ptr + pair * inner + c, y.to(out_ptr.dtype.element_ty), mask=c < inner)


@triton.jit
def _pair_down(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    scales_ptr,
    out_ptr,
    num_out,
    num_in,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK_OUT outputs of one token: one loop over its experts' inner dimensions.

    x is [num_tokens * TOP_K, num_in]. The result is added to what is there where ADD.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_IN)
    j = tl.arange(0, triton.next_power_of_2(TOP_K))
    ids = tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=0)
    scales = tl.load(scales_ptr + token * TOP_K + j, mask=j < TOP_K, other=0.0)
    x_ptr += token * TOP_K * num_in
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    blocks = tl.cdiv(num_in, BLOCK_IN)
    for i in tl.range(0, TOP_K * blocks, num_stages=STAGES):
        rank = i // blocks
        start = i % blocks * BLOCK_IN
        column = start + k
        expert = tl.sum(tl.where(j == rank, ids, 0), 0).to(tl.int64)
        scale = tl.sum(tl.where(j == rank, scales, 0.0), 0)
        rows = expert * num_out + row
        w = _load_weights(weight_ptr, 0, rows, start, k, num_in, False, EVEN)
        if EVEN:
            x = tl.load(x_ptr + rank * num_in + column)
        else:
            x = tl.load(x_ptr + rank * num_in + column, mask=column < num_in, other=0.0)
        acc += w.to(tl.float32) * (x.to(tl.float32) * scale)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + ids.to(tl.int64)[:, None] * num_out + row[None, :]
        bias = tl.load(bias_ptrs, mask=(j < TOP_K)[:, None], other=0.0)
        y += tl.sum(bias.to(tl.float32) * scales[:, None], 0)
    out_ptrs = out_ptr + token * num_out + n
    if ADD:
        y += tl.load(out_ptrs, mask=n < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=n < num_out)


# ---------------------------------------------------------------------------------- many pairs


@triton.jit(do_not_specialize=["num_pairs"])
def _count(ids_ptr, counts_ptr, num_pairs, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs of a chunk each expert has: counts [num_chunks, BLOCK_E]."""
    chunk = tl.program_id(0)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    live = p < num_pairs
    count = tl.histogram(tl.load(ids_ptr + p, mask=live, other=0), BLOCK_E, mask=live)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), count)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_tiles", "tile_rows"])
def _place(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_chunks,
    num_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Put BLOCK_P pairs where they belong in order of their experts, and describe some tiles.

    Every program counts anew what comes before its own pairs: that is less than waiting would be.

    tiles [3, num_tiles]: a tile's expert (NUM_EXPERTS or more for an unused one), its first place
    in the order, and the place after its expert's last.
    """
    first = tl.program_id(0) * BLOCK_P
    chunk = first // CHUNK
    e = tl.arange(0, BLOCK_E)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=0)
    before = tl.histogram(ids, BLOCK_E, mask=p < first)
    if SINGLE:
        total = tl.histogram(ids, BLOCK_E, mask=p < num_pairs)
    else:
        total = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            counts_ptrs = counts_ptr + c[:, None] * BLOCK_E + e[None, :]
            counts = tl.load(counts_ptrs, mask=(c < num_chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), 0)
    end = tl.cumsum(total, 0)
    begin = end - total

    num_own_tiles = (total + tile_rows - 1) // tile_rows
    tile_end = tl.cumsum(num_own_tiles, 0)
    origin = begin - (tile_end - num_own_tiles) * tile_rows  # plus tile * tile_rows: its place
    step = tl.num_programs(0) * BLOCK_T
    for start in range(tl.program_id(0) * BLOCK_T, num_tiles, step):
        t = start + tl.arange(0, BLOCK_T)
        expert = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
        is_own = e[None, :] == expert[:, None]
        place = tl.sum(tl.where(is_own, origin[None, :], 0), 1) + t * tile_rows
        live = t < num_tiles
        tl.store(tiles_ptr + t, expert, mask=live)
        tl.store(tiles_ptr + num_tiles + t, place, mask=live)
        of_end = tl.sum(tl.where(is_own, end[None, :], 0), 1)
        tl.store(tiles_ptr + 2 * num_tiles + t, of_end, mask=live)

    i = tl.arange(0, BLOCK_P)
    live = first + i < num_pairs
    own = tl.load(ids_ptr + first + i, mask=live, other=-1)
    rank = tl.sum(((own[:, None] == own[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    is_own = own[:, None] == e[None, :]
    place = tl.sum(tl.where(is_own, (begin + before)[None, :], 0), 1) + rank
    tl.store(order_ptr + place, first + i, mask=live)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped(
    x_ptr,
    weight,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    scales_ptr,
    out_ptr,
    num_tiles,
    num_out,
    num_in,
    stride_x,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A block of one tile's product.

    The first product gathers tokens and writes [num_pairs, inner] in sorted order; the second
    reads that, multiplies by the pairs' weights and scatters [num_pairs, hidden] by pair.
    """
    blocks = tl.cdiv(num_out, BLOCK_OUT)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_OUT
    expert = tl.load(tiles_ptr + tile)
    if expert >= NUM_EXPERTS:
        return
    place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    live = place < tl.load(tiles_ptr + 2 * num_tiles + tile)
    pair = tl.load(order_ptr + place, mask=live, other=0)
    # Rows beyond the last multiply something and are not stored.
    source = pair // TOP_K if IS_GATE_UP else tl.where(live, place, 0)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_x
    n = first + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    first_row = expert * num_out + first
    rows = expert.to(tl.int64) * num_out + tl.minimum(n, num_out - 1)
    if SWAPPED:
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in tl.range(0, num_in, BLOCK_IN, num_stages=STAGES):
        w = _load_weights(weight, first_row, rows, start, k, num_in, DESCRIBED, EVEN)
        column = start + k
        if EVEN:
            x = tl.load(x_ptrs + column[None, :])
        else:
            x = tl.load(x_ptrs + column[None, :], mask=(column < num_in)[None, :], other=0.0)
        if SWAPPED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    y = acc.T if SWAPPED else acc
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    if IS_GATE_UP:
        y = activate(y, ROWS, BLOCK_OUT // 2, ACTIVATION)
        c = first // 2 + tl.arange(0, BLOCK_OUT // 2)
        width = num_out // 2
        out_ptrs = out_ptr + place.to(tl.int64)[:, None] * width + c[None, :]
    else:
        y *= tl.load(scales_ptr + pair, mask=live, other=0.0)[:, None]
        c = n
        width = num_out
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < width)[None, :])


@triton.jit
def _sum_parts(
    parts_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < size
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        part = tl.load(parts_ptr + (token * TOP_K + rank) * size + c, mask=live, other=0.0)
        total += part.to(tl.float32)
    if ADD:
        total += tl.load(out_ptr + token * size + c, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + c, total.to(out_ptr.dtype.element_ty), mask=live)


# --------------------------------------------------------------------------------------- hosts


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Gate and up rows take turns."""

    def interleaved(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return torch.stack((gate, up), dim=2).flatten(1, 2)

    w = weights
    return PackedExperts(
        interleaved(w.gate_up),
        w.down.contiguous(),
        None if w.gate_up_bias is None else interleaved(w.gate_up_bias),
        None if w.down_bias is None else w.down_bias.contiguous(),
        w.activation,
    )


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    tiles: Tiles | None = None,
) -> Tensor:
    """The weighted sum of each token's experts: [num_tokens, hidden].

    Args:
        tiles: instead of those of `choose_tiles`.
    """
    assert x.stride(1) == 1 and topk_ids.is_contiguous() and topk_weights.is_contiguous()
    out = x.new_empty(len(x), packed.down.shape[1])
    if len(x) == 0:
        return out
    if tiles is None:
        tiles = _tiles_for(topk_ids, packed)
    if tiles.gate_up.rows == 1:
        _one_by_one(x, topk_ids, topk_weights, packed, tiles, out)
    else:
        _sorted(x, topk_ids, topk_weights, packed, tiles, out)
    return out


def norm_experts_add(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
) -> None:
    """residual += experts(rms_norm(residual)), in place, [num_tokens, hidden]."""
    assert residual.is_contiguous()
    if len(residual) == 0:
        return
    tiles = _tiles_for(topk_ids, packed)
    if tiles.gate_up.rows == 1:
        norm = norm_weight, eps
        _one_by_one(residual, topk_ids, topk_weights, packed, tiles, residual, norm, add=True)
    else:
        x = rms_norm(residual, norm_weight, eps)
        _sorted(x, topk_ids, topk_weights, packed, tiles, residual, add=True)


def _tiles_for(ids: Tensor, packed: PackedExperts) -> Tiles:
    num_experts, hidden, inner = packed.down.shape
    shape = (num_experts, inner, hidden)
    return choose_tiles(ids.numel(), ids.shape[1], *shape, packed.down.dtype)


def _one_by_one(
    x: Tensor,
    ids: Tensor,
    scales: Tensor,
    packed: PackedExperts,
    t: Tiles,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
    *,
    add: bool = False,
) -> None:
    num_tokens, top_k = ids.shape
    hidden, inner = packed.down.shape[1:]
    y = x.new_empty(num_tokens * top_k, inner)
    norm_weight, eps = norm or (x, 0.0)
    bias, tile = packed.gate_up_bias, fit(t.gate_up, x, hidden)
    _pair_gate_up[(triton.cdiv(2 * inner, tile.block_out), num_tokens * top_k)](
        x,
        packed.gate_up,
        bias if bias is not None else x,
        norm_weight,
        ids,
        y,
        2 * inner,
        hidden,
        x.stride(0),
        eps,
        TOP_K=top_k,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        ACTIVATION=packed.activation,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        EVEN=hidden % tile.block_in == 0,
        num_warps=tile.num_warps,
    )
    bias, tile = packed.down_bias, fit(t.down, x, inner)
    _pair_down[(triton.cdiv(hidden, tile.block_out), num_tokens)](
        y,
        packed.down,
        bias if bias is not None else x,
        ids,
        scales,
        out,
        hidden,
        inner,
        TOP_K=top_k,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        ADD=add,
        EVEN=inner % tile.block_in == 0,
        num_warps=tile.num_warps,
    )


def _sorted(
    x: Tensor,
    ids: Tensor,
    scales: Tensor,
    packed: PackedExperts,
    t: Tiles,
    out: Tensor,
    *,
    add: bool = False,
) -> None:
    top_k = ids.shape[1]
    num_experts, hidden, inner = packed.down.shape
    order, tiles = sort_pairs(ids, num_experts, t.gate_up.rows)
    num_pairs, num_tiles = order.shape[0], tiles.shape[1]
    y = x.new_empty(num_pairs, inner)
    parts = x.new_empty(num_pairs, hidden)
    for source, weight, bias, target, tile in (
        (x, packed.gate_up, packed.gate_up_bias, y, t.gate_up),
        (y, packed.down, packed.down_bias, parts, t.down),
    ):
        num_out, num_in = weight.shape[1:]
        tile = fit(tile, x, num_in)
        operand: Tensor | TensorDescriptor = weight
        if tile.described:
            rows = weight.view(-1, num_in)
            operand = TensorDescriptor.from_tensor(rows, [tile.block_out, tile.block_in])
        _grouped[(triton.cdiv(num_out, tile.block_out) * num_tiles,)](
            source,
            operand,
            bias if bias is not None else x,
            order,
            tiles,
            scales,
            target,
            num_tiles,
            num_out,
            num_in,
            source.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            IS_GATE_UP=source is x,
            ROWS=tile.rows,
            BLOCK_OUT=tile.block_out,
            BLOCK_IN=tile.block_in,
            STAGES=tile.stages,
            SWAPPED=tile.swapped,
            DESCRIBED=tile.described,
            ACTIVATION=packed.activation,
            HAS_BIAS=bias is not None,
            EVEN=num_in % tile.block_in == 0,
            num_warps=tile.num_warps,
        )
    sum_parts(parts, out, add=add)


def sum_parts(parts: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out [num_tokens, hidden] = the sums of each token's parts [num_pairs, hidden], or += them."""
    num_tokens, size = out.shape
    block = min(SUM_BLOCK, triton.next_power_of_2(size))
    _sum_parts[(num_tokens, triton.cdiv(size, block))](
        parts, out, size, TOP_K=len(parts) // num_tokens, BLOCK=block, ADD=add, num_warps=4
    )
    return out


def sort_pairs(ids: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in order of their experts, those of one expert in their own order, and tiles of them.

    Args:
        ids: int32 [num_tokens, top_k].

    Returns:
        order int32 [num_pairs] and tiles int32 [3, num_tiles], see `_place`; as many tiles as the
        worst distribution of the pairs needs.
    """
    num_pairs = ids.numel()
    num_tiles = (num_pairs + min(num_pairs, num_experts) * (tile_rows - 1)) // tile_rows
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=ids.device)
    block_e = triton.next_power_of_2(num_experts)
    chunk = next((n for n in CHUNKS if n >= num_pairs), CHUNKS[-1])
    is_single = num_pairs <= chunk
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = order
    if not is_single:
        counts = torch.empty(num_chunks, block_e, dtype=torch.int32, device=ids.device)
        _count[(num_chunks,)](ids, counts, num_pairs, BLOCK_E=block_e, CHUNK=chunk, num_warps=4)
    block_p = max(16, min(64, MATCH_ELEMENTS // block_e))
    _place[(triton.cdiv(num_pairs, block_p),)](
        ids,
        counts,
        order,
        tiles,
        num_pairs,
        num_chunks,
        num_tiles,
        tile_rows,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        BLOCK_P=block_p,
        BLOCK_C=16,
        BLOCK_T=min(32, block_p),
        CHUNK=chunk,
        SINGLE=is_single,
        num_warps=4,
    )
    return order, tiles


def fit(tile: Tile, x: Tensor, num_in: int) -> Tile:
    """A tile that suits x's type and the GPU's shared memory, for products over num_in."""
    arch = current_arch()
    block_in = min(tile.block_in, max(16, triton.next_power_of_2(num_in)))
    if x.element_size() == 4:
        block_in = max(16, block_in // 2)
    num_rows = tile.block_out + (tile.rows if tile.rows > 1 else 0)
    while block_in > 16 and num_rows * block_in * x.element_size() > arch.shared_bytes:
        block_in //= 2
    stage_bytes = num_rows * block_in * x.element_size()
    described = tile.described and arch.name in HAS_DESCRIPTORS
    return tile._replace(
        block_in=block_in,
        stages=max(1, min(tile.stages, arch.shared_bytes // stage_bytes)),
        described=described and num_in * x.element_size() % 16 == 0,
    )
