"""The checks of each op: inputs, a call, and the comparison with the oracle's float64.

A check takes a `Target` and returns the largest error as a share of what is allowed, or raises
AssertionError. A new op gets a function here and a line in `checks()`; the tests and `stoker
check-backend` then run it for every provider that has the op.

Runs on: gpu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import DenseRows, LayerCache, MLASpec, Rope, RouterSpec
from ..reference import uniform
from . import delta_net as delta_net_cases
from .cases import (
    ORACLE,
    TOLERANCE,
    AttentionCase,
    attention_cases,
    latent_cases,
    make_rope,
    moved,
    oracle_inputs,
    random_experts,
    sampling_rows,
    tree_cases,
)
from .fused import fused_checks
from .quantized import quantized_checks
from .target import Check, Target, compare, randn, same, up

# ----------------------------------------------------------------------------------- the checks


def linear(t: Target, dtype: torch.dtype, num_out: int, num_in: int, has_bias: bool) -> float:
    weight = randn(num_out, num_in, dtype=dtype, device=t.device) / num_in**0.5
    bias = randn(num_out, seed=1, dtype=dtype, device=t.device) if has_bias else None
    packed, worst = t.op("pack_linear")(weight.clone(), bias), 0.0
    for num_tokens in (1, 2, 3, 8, 13, 33, 130):
        x = randn(num_tokens, num_in, seed=num_tokens, dtype=dtype, device=t.device)
        want = ORACLE.linear(up(x), (up(weight), up(bias)))
        wide = t.op("linear")(x, packed, torch.float32)
        assert wide.dtype == torch.float32
        worst = max(worst, compare(t.op("linear")(x, packed), want, dtype))
        worst = max(worst, compare(wide.to(dtype), want, dtype))
    return worst


def norm_linear(t: Target, dtype: torch.dtype, num_out: int, num_in: int, has_bias: bool) -> float:
    weight = randn(num_out, num_in, dtype=dtype, device=t.device) / num_in**0.5
    bias = randn(num_out, seed=1, dtype=dtype, device=t.device) if has_bias else None
    packed, known = t.op("pack_linear")(weight.clone(), bias), (up(weight), up(bias))
    errors: list[float] = []
    for num_tokens in (1, 3, 8, 33):
        # A norm in float32 is Gemma's 1 + weight.
        norm_dtype = torch.float32 if num_tokens == 3 else dtype
        norm = randn(num_in, seed=2, dtype=norm_dtype, device=t.device) / 4 + 1
        x = randn(num_tokens, num_in, seed=num_tokens, dtype=dtype, device=t.device)
        before = x.clone()
        errors += _around(t, x, norm, packed, known, dtype, ("silu", "gelu_tanh"))
        residual = randn(num_tokens, num_out, seed=3, dtype=dtype, device=t.device)
        want = up(residual) + ORACLE.linear(up(x), known)
        assert t.op("linear_add")(x, packed, residual) is None
        errors.append(compare(residual, want, dtype, scale=2))
        same(x, before, "x")
    return max(errors)


def norm_linear_of_float32(t: Target, dtype: torch.dtype) -> float:
    weight = randn(98, 64, dtype=dtype, device=t.device) / 8
    norm = randn(64, seed=2, dtype=dtype, device=t.device) / 4 + 1
    packed, known = t.op("pack_linear")(weight.clone(), None), (up(weight), None)
    errors: list[float] = []
    for num_tokens in (1, 33):
        x = randn(num_tokens, 64, seed=num_tokens, device=t.device) * 300
        errors += _around(t, x, norm, packed, known, dtype, ("silu",))
        residual = randn(num_tokens, 98, seed=3, device=t.device) * 300
        x = (x / 300).to(dtype)
        want = residual + t.op("linear")(x, packed, torch.float32)
        t.op("linear_add")(x, packed, residual)
        same(residual, want, "the residual")
    return max(errors)


def _around(
    t: Target,
    x: Tensor,
    norm: Tensor,
    packed: Any,
    known: Any,
    dtype: torch.dtype,
    activations: Sequence[str],
) -> Iterator[float]:
    want = ORACLE.norm_linear(up(x), up(norm), 1e-5, known)
    yield compare(t.op("norm_linear")(x, norm, 1e-5, packed), want, dtype, scale=2)
    logits = t.op("norm_linear")(x, norm, 1e-5, packed, torch.float32)
    assert logits.dtype == torch.float32
    yield compare(logits.to(dtype), want, dtype, scale=2)
    for activation in activations:
        got = t.op("norm_gated_linear")(x, norm, 1e-5, packed, activation)
        want = ORACLE.norm_gated_linear(up(x), up(norm), 1e-5, known, activation)
        yield compare(got, want, dtype, scale=4)


def rms_norm(t: Target, dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    x = randn(*shape[:-1], shape[-1] + 8, dtype=dtype, device=t.device)[..., : shape[-1]]
    weight = randn(shape[-1], seed=1, dtype=dtype, device=t.device)
    got = t.op("rms_norm")(x, weight, 1e-6)
    return compare(got, ORACLE.rms_norm(up(x), up(weight), 1e-6), dtype)


def add_rms_norm(
    t: Target,
    dtype: torch.dtype,
    shape: tuple[int, int],
    residual_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
) -> float:
    x = randn(*shape, dtype=dtype, device=t.device)
    residual = randn(*shape, seed=1, dtype=residual_dtype or dtype, device=t.device)
    weight = randn(shape[-1], seed=2, dtype=norm_dtype or dtype, device=t.device)
    want_residual = (x + residual).clone()
    want = ORACLE.rms_norm(up(want_residual), up(weight), 1e-5)
    got = t.op("add_rms_norm")(x, residual, weight, 1e-5)
    same(residual, want_residual, "the residual")
    return compare(got, want, x.dtype)


def gated_activation(t: Target, op: str, dtype: torch.dtype, shape: tuple[int, int]) -> float:
    x = randn(*shape, dtype=dtype, device=t.device) * 3
    x[0, :4] = torch.tensor([60.0, -60.0, 1.0, -1.0])
    return compare(t.op(op)(x), getattr(ORACLE, op)(up(x)), dtype, scale=4)


def write_qkv(
    t: Target, dtype: torch.dtype, rotary_dim: int, interleaved: bool, has_norms: bool
) -> float:
    case = next(c for c in attention_cases() if c.name == "mixed-page16")
    inputs = t.attention(case, dtype)
    inputs.meta.out_slots[::3] = -1
    q_norm, k_norm = (
        randn(case.head_dim, seed=s, dtype=dtype, device=t.device) if has_norms else None
        for s in (5, 6)
    )
    oracle = oracle_inputs(inputs)
    rope = make_rope(rotary_dim, interleaved) if rotary_dim else None
    want_q = ORACLE.write_qkv(
        oracle.qkv, oracle.meta, oracle.cache, oracle.spec, rope, up(q_norm), up(k_norm), 1e-6
    )
    if rope is not None:
        rope = Rope(rope.cos_sin.to(t.device), rotary_dim, interleaved)
    cache = t.kept(inputs.cache)
    got_q = t.op("write_qkv")(
        inputs.qkv, inputs.meta, cache, inputs.spec, rope, q_norm, k_norm, 1e-6
    )
    worst = compare(got_q, want_q, dtype, scale=4)
    for got, want in zip(t.nhd(cache), oracle.cache, strict=True):
        worst = max(worst, compare(got, want, dtype, scale=4))
        untouched = torch.ones(got.shape[0] * got.shape[1], dtype=torch.bool)
        untouched[oracle.meta.out_slots[oracle.meta.out_slots >= 0]] = False
        kept, known = (
            x.flatten(0, 1)[untouched].nan_to_num(9.0) for x in (got.cpu(), want.to(dtype))
        )
        same(kept, known, "a slot that nobody writes to")
    return worst


def attend(t: Target, dtype: torch.dtype, case: AttentionCase) -> float:
    inputs = t.attention(case, dtype)
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, oracle.cache, oracle.spec)
    got = t.op("attend")(inputs.q, inputs.meta, t.kept(inputs.cache), inputs.spec)
    real = inputs.real_tokens
    return compare(got.cpu()[real], want[real], dtype)


def _latent(case: AttentionCase, rope_dim: int) -> MLASpec:
    """The spec of a case with one KV head, whose head_dim is rank + rope_dim."""
    rank = case.head_dim - rope_dim
    return MLASpec(case.num_heads, rank, rope_dim, rank, rank, case.head_dim**-0.5)


def mla_write(t: Target, dtype: torch.dtype, rank: int, interleaved: bool) -> float:
    """Latents normed, both rotary parts rotated; slots that nobody writes to stay as they are."""
    case = AttentionCase("", [(1, 17), (1, 0), (5, 9)], 16, 20, 1, rank + 16)
    inputs, spec = t.attention(case, dtype), _latent(case, 16)
    oracle = oracle_inputs(inputs)
    num_tokens, rope = inputs.meta.num_tokens, make_rope(16, interleaved)
    on_device = Rope(rope.cos_sin.to(t.device), 16, interleaved)
    # Both are parts of wider tensors.
    latent = randn(num_tokens, 8 + rank + 16, dtype=dtype, device=t.device)[:, 8:]
    q = randn(num_tokens, 20, 40, seed=1, dtype=dtype, device=t.device)
    norm = randn(rank, seed=2, dtype=dtype, device=t.device)
    q_want, kept = up(q).clone(), q[..., :24].clone()
    ORACLE.mla_write(
        up(latent), q_want[..., 24:], oracle.meta, oracle.cache, spec, rope, up(norm), 1e-6
    )
    t.op("mla_write")(latent, q[..., 24:], inputs.meta, inputs.cache, spec, on_device, norm, 1e-6)
    real = inputs.real_tokens
    assert torch.equal(q[..., :24], kept)
    worst = compare(q[..., 24:].cpu()[real].to(dtype), q_want[..., 24:][real], dtype, scale=2)
    slots = inputs.owned.nonzero()[:, 0]
    got, want = (c.k.cpu().flatten(0, 2)[slots] for c in (inputs.cache, oracle.cache))
    return max(worst, compare(got, want, dtype, scale=2))


def mla_attend(t: Target, dtype: torch.dtype, case: AttentionCase, rope_dim: int) -> float:
    """Latent attention, absorbed."""
    inputs, spec = t.attention(case, dtype), _latent(case, rope_dim)
    oracle, parts = oracle_inputs(inputs), [spec.rank, spec.rope_dim]
    q_latent, q_rope = oracle.q.split(parts, 2)
    want = ORACLE.mla_attend(q_latent, q_rope, oracle.meta, oracle.cache, spec)
    cache = LayerCache(inputs.cache.k, inputs.cache.v[..., :0])
    got = t.op("mla_attend")(*inputs.q.split(parts, 2), inputs.meta, cache, spec)
    real = inputs.real_tokens
    return compare(got.cpu()[real], want[real], dtype)


def delta_net(t: Target, dtype: torch.dtype, case: delta_net_cases.DeltaNetCase) -> float:
    """Outputs and states; those of other requests stay as they are."""
    inputs = delta_net_cases.build_delta_net(case, dtype, t.device)
    oracle = delta_net_cases.in_float64(inputs)
    want = ORACLE.delta_net(oracle.qkvz, oracle.ba, oracle.meta, oracle.state, oracle.spec)
    before = [x.clone() for x in (inputs.qkvz, inputs.ba)]
    got = t.op("delta_net")(inputs.qkvz, inputs.ba, inputs.meta, inputs.state, inputs.spec)
    same(inputs.qkvz, before[0], "qkvz")
    same(inputs.ba, before[1], "ba")
    # The convolution's state is copies of inputs; slot 0 is nobody's.
    same(inputs.state.conv[1:], oracle.state.conv[1:].to(dtype), "the convolution's state")
    others = torch.ones(len(inputs.state.conv), dtype=torch.bool)
    others[inputs.meta.slots.cpu().long()] = others[0] = False
    recurrent = inputs.state.recurrent.cpu()
    same(recurrent[others], oracle.state.recurrent.float().cpu()[others], "another's state")
    real = inputs.real_tokens
    return max(
        compare(got.cpu()[real], want.cpu()[real], dtype, scale=2),
        compare(recurrent[1:].to(dtype), oracle.state.recurrent.cpu()[1:], dtype),
    )


def mla_attend_dense(
    t: Target, dtype: torch.dtype, dims: tuple[int, int, int], rows: Sequence[tuple[int, int, int]]
) -> float:
    """Latent attention over keys that were projected up.

    Args:
        dims: of a head's own part of the key, the rotary part, and the value.
        rows: new tokens, keys, and how far the first of the one is behind the first of the other.
    """
    nope, rope_dim, value = dims
    q_lens, kv_lens, offsets = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    qo, bounds = (F.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (q_lens, kv_lens))
    spec = MLASpec(3, 24, rope_dim, nope, value, (nope + rope_dim) ** -0.5)
    q = randn(int(qo[-1]), 3, 8 + nope + rope_dim, dtype=dtype, device=t.device)[..., 8:]
    kv = randn(int(bounds[-1]), 3, nope + value, seed=1, dtype=dtype, device=t.device)
    k_rope = randn(len(kv), 24 + rope_dim, seed=2, dtype=dtype, device=t.device)[:, 24:]
    dense = DenseRows(qo, bounds, offsets)
    want, lse_want = ORACLE.mla_attend_dense(up(q), up(kv), up(k_rope), dense, spec)
    dense = DenseRows(*(x.to(t.device) for x in dense))
    got, lse = t.op("mla_attend_dense")(q, kv, k_rope, dense, spec)
    assert lse.dtype == torch.float32
    return max(compare(got, want, dtype), compare(lse.to(dtype), lse_want.double(), dtype))


def greedy(t: Target) -> float:
    """Of equals the lowest id is taken."""
    logits = randn(5, 3001, device=t.device)
    logits[0, [7, 2900]] = 9.0
    logits[1, [3000]] = 9.0
    logits[2] = 1.0
    logits[3, [0, 1]] = 9.0
    logits[4] = -math.inf
    logits[4, 1234] = -5.0
    rows = sampling_rows([(0, 0, 1, 0)] * 5, 3001, t.device)
    tokens, is_finite = t.op("sample")(logits, rows)
    assert tokens.dtype == torch.int32 and is_finite.dtype == torch.bool
    assert tokens.tolist() == [7, 3000, 0, 0, 1234], tokens.tolist()
    assert is_finite.all()
    return 0.0


PARAMS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 300, 0.5, 0.0),
    (2.0, 0, 0.9, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.3, 0, 1.0, 0.2),
    (1.5, 40, 0.8, 0.05),
    (1e-4, 0, 1.0, 0.0),
]


def _filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The filtered probabilities of one row, by sorting and counting."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True, stable=True).tolist()
    values = p.tolist()
    keep = [i for i in order if values[i] >= values[order[(top_k or len(order)) - 1]]]
    mass, total, last = 0.0, sum(values[i] for i in keep), 0.0
    for i in keep:
        if mass >= top_p * total * (1 - 1e-12) and mass > 0:
            break
        mass, last = mass + values[i], values[i]
    floor = max(last, min_p * values[order[0]])
    return torch.where(p >= floor, p, 0.0)


def sample_by_the_rules(t: Target, vocab: int) -> float:
    for seed in range(3):
        logits = randn(len(PARAMS), vocab, seed=seed) * (1 + seed)
        params = [(temp, min(k, vocab), p, m) for temp, k, p, m in PARAMS]
        rows = sampling_rows(params, vocab, t.device, seed)
        tokens = t.op("sample")(logits.clone().to(t.device), rows)[0].tolist()
        u = uniform(rows.seeds, rows.positions).double().tolist()
        for row, param in enumerate(params):
            token = tokens[row]
            if param[0] == 0:
                assert token == int(logits[row].argmax())
                continue
            p = _filtered(logits[row], *param)
            cumulative = p.cumsum(0) / p.sum()
            # float32 sums may move an edge a little; a provider must not leave the kept set.
            assert p[token] > 0, f"row {row}: {token} is filtered out"
            below = float(cumulative[token - 1]) if token else 0.0
            assert below - 1e-5 <= u[row] <= float(cumulative[token]) + 1e-5, f"row {row}: {token}"
    return 0.0


def sample_alone(t: Target) -> float:
    """A row's token does not depend on the batch."""
    vocab = 5000
    logits = randn(len(PARAMS), vocab, device=t.device)
    rows = sampling_rows(PARAMS, vocab, t.device)
    together = t.op("sample")(logits.clone(), rows)[0].tolist()
    for row, param in enumerate(PARAMS):
        one = sampling_rows([param], vocab, t.device)
        one.seeds, one.positions = rows.seeds[row : row + 1], rows.positions[row : row + 1]
        assert t.op("sample")(logits[row : row + 1].clone(), one)[0].tolist() == [together[row]]
    return 0.0


def sample_distribution(t: Target) -> float:
    n, p = 4096, torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    logits = p.log().to(t.device).expand(n, 5).contiguous()
    rows = sampling_rows([(1.0, 0, 1.0, 0.0)] * n, 5, t.device)
    rows.seeds = torch.arange(n, device=t.device) // 64  # neighbouring seeds and positions
    rows.positions = (torch.arange(n, device=t.device) % 64).int()
    counts = torch.bincount(t.op("sample")(logits, rows)[0].long().cpu(), minlength=5) / n
    assert counts[1] == 0
    share = float((counts - p).abs().max()) / (4 * (0.25 / n) ** 0.5)
    assert share < 1, f"off by {share:.3g} times what is allowed"
    return share


def sample_broken(t: Target) -> float:
    """Broken logits give some token, and are told of."""
    logits = randn(6, 100, device=t.device)
    logits[0, 5] = math.nan
    logits[1] = -math.inf
    logits[2] = math.nan
    logits[4, 99] = math.inf
    logits[5, :99] = -math.inf
    for param in ((1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 9, 0.9, 0.1)):
        rows = sampling_rows([param] * 6, 100, t.device)
        tokens, is_finite = t.op("sample")(logits.clone(), rows)
        together = tokens.tolist()
        assert all(0 <= token < 100 for token in together)
        assert is_finite.tolist() == [False, False, False, True, False, True]
        alone = sampling_rows([param], 100, t.device)
        alone.seeds, alone.positions = rows.seeds[3:4], rows.positions[3:4]
        assert t.op("sample")(logits[3:4].clone(), alone)[0].tolist() == together[3:4]
    return 0.0


ROUTERS = {
    "softmax": (RouterSpec(8, renormalize=False), 128, False),
    "mixtral": (RouterSpec(2), 8, False),
    "one_of_six": (RouterSpec(1, renormalize=False, scale=2.0), 6, False),
    "sigmoid": (RouterSpec(6, "sigmoid", scale=2.5), 72, True),
    "shared": (RouterSpec(6, "sigmoid", scale=2.5, num_shared=2), 64, True),
    "shared_gate": (RouterSpec(4, num_shared=1, has_shared_gate=True), 60, False),
    "groups": (RouterSpec(6, "softmax", 8, 3, renormalize=False, scale=16.0), 160, False),
    "groups_with_bias": (RouterSpec(8, "sigmoid", 8, 4, scale=2.5), 256, True),
}


def route(t: Target, kind: str) -> float:
    spec, num_experts, has_bias = ROUTERS[kind]
    num_logits = num_experts + spec.has_shared_gate
    logits = randn(12, num_experts + 3, device=t.device)[:, :num_logits]
    logits[1] = 0.0  # all equal: the lowest ids
    logits[2, :num_experts:2] = logits[2, 1:num_experts:2]
    bias = randn(num_experts, seed=1, device=t.device) / 10 if has_bias else None
    ids, weights = t.op("route")(logits, spec, bias)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    want_ids, want_weights = ORACLE.route(up(logits), spec, up(bias))
    same(ids.cpu(), want_ids, "the choice")
    return compare(weights, want_weights, torch.float32, scale=spec.scale)


def route_broken(t: Target) -> float:
    """Broken logits choose experts that exist."""
    for spec in (RouterSpec(4), RouterSpec(4, num_groups=4, top_groups=2)):
        logits = randn(4, 16, device=t.device)
        logits[0], logits[1, 3], logits[2], logits[3, 5] = math.nan, math.nan, -math.inf, math.inf
        ids, _ = t.op("route")(logits, spec, None)
        assert ids.min() >= 0 and ids.max() < 16
    return 0.0


EXPERTS = {  # num_experts, top_k, hidden, inner, activation, has_bias
    "qwen3": (16, 4, 64, 48, "silu", False),
    "mixtral": (4, 2, 128, 32, "silu", False),
    "gpt_oss": (6, 3, 40, 24, "swiglu_clamped", True),
    "gelu": (3, 1, 36, 20, "gelu_tanh", True),
    "aligned": (8, 2, 64, 128, "silu", False),  # as vendors' kernels want it
}


def experts(t: Target, dtype: torch.dtype, kind: str) -> float:
    num_experts, top_k, hidden, inner, activation, has_bias = EXPERTS[kind]
    weights = random_experts(num_experts, hidden, inner, activation, has_bias)
    packed = t.op("pack_experts")(moved(weights, t.device, dtype))
    known = moved(moved(weights, "cpu", dtype), "cpu", torch.float64)
    worst = 0.0
    for num_tokens in (1, 2, 40, 70):
        x = randn(num_tokens, hidden + 8, dtype=dtype, device=t.device)[:, :hidden]
        # Uneven: the last expert gets none, and of 40 tokens all have the same first one.
        scores = randn(num_tokens, num_experts, seed=num_tokens)
        scores[:, -1] = -9.0
        if num_tokens == 40:
            scores[:, 0] = 9.0
        values, ids = scores.softmax(-1).topk(top_k)
        before = x.clone()
        got = t.op("experts")(x, ids.int().to(t.device), values.to(t.device), packed)
        same(x, before, "x")
        want = ORACLE.experts(up(x), ids, values.double(), known)
        worst = max(worst, compare(got, want, dtype, scale=4))
    nothing = torch.zeros(0, top_k, dtype=torch.int32, device=t.device)
    assert t.op("experts")(x[:0], nothing, nothing.float(), packed).shape == (0, hidden)
    return worst


# ------------------------------------------------------------------------------------- the list

LINEARS = ("linear", "pack_linear")
AROUND_LINEARS = ("norm_linear", "pack_linear", "norm_gated_linear", "linear_add", "linear")
ROTATIONS = ((0, False), (64, False), (64, True), (32, False), (32, True))


def checks() -> list[Check]:
    """All of them, op by op."""
    return [check for make in MAKERS for check in make()]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _linear_checks() -> Iterator[Check]:
    for shape, has_bias, dtype in product(
        ((960, 576), (49, 64), (130, 1536), (7, 35)), (False, True), TOLERANCE
    ):
        case = f"{shape[0]}x{shape[1]}{'-bias' * has_bias}-{_named(dtype)}"
        yield Check(LINEARS, case, partial(linear, dtype=dtype, num_out=shape[0], num_in=shape[1],
                                           has_bias=has_bias))  # fmt: skip
    for shape, has_bias, dtype in product(
        ((960, 576), (98, 64), (14, 35)), (False, True), TOLERANCE
    ):
        case = f"{shape[0]}x{shape[1]}{'-bias' * has_bias}-{_named(dtype)}"
        yield Check(AROUND_LINEARS, case, partial(norm_linear, dtype=dtype, num_out=shape[0],
                                                  num_in=shape[1], has_bias=has_bias))  # fmt: skip
    for dtype in TOLERANCE:
        run = partial(norm_linear_of_float32, dtype=dtype)
        yield Check(AROUND_LINEARS, f"float32_residual-{_named(dtype)}", run, True)


def _elementwise_checks() -> Iterator[Check]:
    for dtype in TOLERANCE:
        name = _named(dtype)
        for shape in ((1, 576), (5, 2048), (6, 4, 64), (3, 35)):
            run = partial(rms_norm, dtype=dtype, shape=shape)
            yield Check(("rms_norm",), f"{'x'.join(map(str, shape))}-{name}", run)
        for rows, size in ((1, 576), (40, 2048), (3, 35)):
            run = partial(add_rms_norm, dtype=dtype, shape=(rows, size))
            yield Check(("add_rms_norm",), f"{rows}x{size}-{name}", run)
            for norm in dict.fromkeys((dtype, torch.float32)):
                run = partial(
                    add_rms_norm,
                    dtype=dtype,
                    shape=(rows, size),
                    residual_dtype=torch.float32,
                    norm_dtype=norm,
                )
                case = f"{rows}x{size}-float32_residual-{_named(norm)}_norm-{name}"
                yield Check(("add_rms_norm",), case, run, True)
        for op, (rows, size) in product(
            ("silu_and_mul", "gelu_and_mul"), ((1, 3072), (11, 128), (3, 70))
        ):
            run = partial(gated_activation, op=op, dtype=dtype, shape=(rows, size))
            yield Check((op,), f"{rows}x{size}-{name}", run)


def _attention_checks() -> Iterator[Check]:
    for (rotary_dim, interleaved), has_norms, dtype in product(ROTATIONS, (False, True), TOLERANCE):
        case = f"rotary{rotary_dim}{'-interleaved' * interleaved}{'-norms' * has_norms}"
        yield Check(
            ("write_qkv",),
            f"{case}-{_named(dtype)}",
            partial(
                write_qkv,
                dtype=dtype,
                rotary_dim=rotary_dim,
                interleaved=interleaved,
                has_norms=has_norms,
            ),
        )
    for attention, dtype in product((*attention_cases(), *tree_cases()), TOLERANCE):
        run = partial(attend, dtype=dtype, case=attention)
        yield Check(("attend",), f"{attention.name}-{_named(dtype)}", run)


def _delta_net_checks() -> Iterator[Check]:
    for case, dtype in product(delta_net_cases.CASES, TOLERANCE):
        run = partial(delta_net, dtype=dtype, case=case)
        yield Check(("delta_net",), f"{case.name}-{_named(dtype)}", run)


def _latent_checks() -> Iterator[Check]:
    for rank, interleaved, dtype in product((64, 40), (True, False), TOLERANCE):
        run = partial(mla_write, dtype=dtype, rank=rank, interleaved=interleaved)
        case = f"rank{rank}{'-interleaved' * interleaved}-{_named(dtype)}"
        yield Check(("mla_write",), case, run)
    for (attention, rope_dim), dtype in product(latent_cases(), TOLERANCE):
        run = partial(mla_attend, dtype=dtype, case=attention, rope_dim=rope_dim)
        yield Check(("mla_attend",), f"{attention.name}-{_named(dtype)}", run)
    rows = ((5, 5, 0), (1, 40, 39), (0, 0, 0), (70, 100, 30), (3, 0, 0), (9, 30, 20), (40, 20, -15))
    for dims, dtype in product(((128, 64, 128), (192, 64, 256), (40, 12, 24)), TOLERANCE):
        run = partial(mla_attend_dense, dtype=dtype, dims=dims, rows=rows)
        yield Check(("mla_attend_dense",), f"dim{dims[0]}-{_named(dtype)}", run)


def _sampling_checks() -> Iterator[Check]:
    yield Check(("sample",), "greedy", greedy)
    for vocab in (17, 1000, 49152):
        yield Check(("sample",), f"rules-{vocab}", partial(sample_by_the_rules, vocab=vocab))
    yield Check(("sample",), "alone", sample_alone)
    yield Check(("sample",), "distribution", sample_distribution)
    yield Check(("sample",), "broken", sample_broken)


def _expert_checks() -> Iterator[Check]:
    for kind in ROUTERS:
        yield Check(("route",), kind, partial(route, kind=kind))
    yield Check(("route",), "broken", route_broken)
    for kind, dtype in product(EXPERTS, TOLERANCE):
        run = partial(experts, dtype=dtype, kind=kind)
        yield Check(("experts", "pack_experts"), f"{kind}-{_named(dtype)}", run)


MAKERS = (
    _linear_checks,
    _elementwise_checks,
    _attention_checks,
    _latent_checks,
    _delta_net_checks,
    _sampling_checks,
    _expert_checks,
    quantized_checks,
    fused_checks,
)
