"""Each op of each provider that can run here, against the float64 oracle."""

import math

import pytest
import torch
from cases import (
    ORACLE,
    TOLERANCE,
    attention_cases,
    build_attention,
    make_rope,
    moved,
    oracle_inputs,
    random_experts,
    sampling_rows,
    tree_cases,
)
from targets import targets

from stoker.backends.api import RouterSpec
from stoker.backends.reference import uniform

pytestmark = pytest.mark.parametrize("target", targets())
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype)


def close(got, want, dtype, scale=1.0):
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(
        got.double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
    )


def up(x):
    return None if x is None else x.cpu().double()


@dtypes
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("num_out, num_in", [(960, 576), (49, 64), (130, 1536), (7, 35)])
def test_linear(target, dtype, num_out, num_in, has_bias):
    pack, linear = target.require("pack_linear"), target.require("linear")
    weight = randn(num_out, num_in, dtype=dtype, device=target.device) / num_in**0.5
    bias = randn(num_out, seed=1, dtype=dtype, device=target.device) if has_bias else None
    packed = pack(weight.clone(), bias)
    for num_tokens in (1, 2, 3, 8, 13, 33, 130):
        x = randn(num_tokens, num_in, seed=num_tokens, dtype=dtype, device=target.device)
        want = ORACLE.linear(up(x), (up(weight), up(bias)))
        close(linear(x, packed), want, dtype)
        close(linear(x, packed, torch.float32).to(dtype), want, dtype)
        assert linear(x, packed, torch.float32).dtype == torch.float32


@dtypes
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("num_out, num_in", [(960, 576), (98, 64), (14, 35)])
def test_linears_with_what_surrounds_them(target, dtype, num_out, num_in, has_bias):
    pack, norm_linear = target.require("pack_linear"), target.require("norm_linear")
    weight = randn(num_out, num_in, dtype=dtype, device=target.device) / num_in**0.5
    bias = randn(num_out, seed=1, dtype=dtype, device=target.device) if has_bias else None
    packed, known = pack(weight.clone(), bias), (up(weight), up(bias))
    for num_tokens in (1, 3, 8, 33):
        # A norm in float32 is Gemma's 1 + weight.
        norm_dtype = torch.float32 if num_tokens == 3 else dtype
        norm = randn(num_in, seed=2, dtype=norm_dtype, device=target.device) / 4 + 1
        x = randn(num_tokens, num_in, seed=num_tokens, dtype=dtype, device=target.device)
        kept = x.clone()
        want = ORACLE.norm_linear(up(x), up(norm), 1e-5, known)
        close(norm_linear(x, norm, 1e-5, packed), want, dtype, scale=2)
        logits = norm_linear(x, norm, 1e-5, packed, torch.float32)
        assert logits.dtype == torch.float32
        close(logits.to(dtype), want, dtype, scale=2)
        for activation in ("silu", "gelu_tanh"):
            got = target.require("norm_gated_linear")(x, norm, 1e-5, packed, activation)
            want = ORACLE.norm_gated_linear(up(x), up(norm), 1e-5, known, activation)
            close(got, want, dtype, scale=4)
        residual = randn(num_tokens, num_out, seed=3, dtype=dtype, device=target.device)
        want = up(residual) + ORACLE.linear(up(x), known)
        assert target.require("linear_add")(x, packed, residual) is None
        close(residual, want, dtype, scale=2)
        assert torch.equal(x, kept)


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (5, 2048), (6, 4, 64), (3, 35)], ids=str)
def test_rms_norm(target, dtype, shape):
    rms_norm = target.require("rms_norm")
    x = randn(*shape[:-1], shape[-1] + 8, dtype=dtype, device=target.device)[..., : shape[-1]]
    weight = randn(shape[-1], seed=1, dtype=dtype, device=target.device)
    close(rms_norm(x, weight, 1e-6), ORACLE.rms_norm(up(x), up(weight), 1e-6), dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (9, 2048), (3, 35)], ids=str)
def test_add_rms_norm_adds_in_place(target, dtype, shape):
    add_rms_norm = target.require("add_rms_norm")
    x = randn(*shape, dtype=dtype, device=target.device)
    residual = randn(*shape, seed=1, dtype=dtype, device=target.device)
    weight = randn(shape[-1], seed=2, dtype=dtype, device=target.device)
    _check_add_rms_norm(add_rms_norm, x, residual, weight)


@dtypes
@pytest.mark.parametrize("norm_dtype", [None, torch.float32], ids=["", "norm_f32"])
@pytest.mark.parametrize("shape", [(1, 576), (40, 2048), (3, 35)], ids=str)
def test_add_rms_norm_to_a_float32_residual(target, dtype, shape, norm_dtype):
    if not target.has_float32_residual:
        pytest.skip(f"{target.provider.name} keeps the residual in the model's type")
    x = randn(*shape, dtype=dtype, device=target.device)
    residual = randn(*shape, seed=1, device=target.device)
    weight = randn(shape[-1], seed=2, dtype=norm_dtype or dtype, device=target.device)
    _check_add_rms_norm(target.require("add_rms_norm"), x, residual, weight)


def _check_add_rms_norm(add_rms_norm, x, residual, weight):
    want_residual = (x + residual).clone()
    want = ORACLE.rms_norm(up(want_residual), up(weight), 1e-5)
    close(add_rms_norm(x, residual, weight, 1e-5), want, x.dtype)
    assert torch.equal(residual, want_residual)


@dtypes
def test_linears_around_a_float32_residual(target, dtype):
    if not target.has_float32_residual:
        pytest.skip(f"{target.provider.name} keeps the residual in the model's type")
    weight = randn(98, 64, dtype=dtype, device=target.device) / 8
    norm = randn(64, seed=2, dtype=dtype, device=target.device) / 4 + 1
    packed, known = target.require("pack_linear")(weight.clone(), None), (up(weight), None)
    for num_tokens in (1, 33):
        x = randn(num_tokens, 64, seed=num_tokens, device=target.device) * 300
        want = ORACLE.norm_linear(up(x), up(norm), 1e-5, known)
        norm_linear = target.require("norm_linear")
        close(norm_linear(x, norm, 1e-5, packed), want, dtype, scale=2)
        logits = norm_linear(x, norm, 1e-5, packed, torch.float32)
        assert logits.dtype == torch.float32
        close(logits.to(dtype), want, dtype, scale=2)
        got = target.require("norm_gated_linear")(x, norm, 1e-5, packed, "silu")
        want = ORACLE.norm_gated_linear(up(x), up(norm), 1e-5, known, "silu")
        close(got, want, dtype, scale=4)
        residual = randn(num_tokens, 98, seed=3, device=target.device) * 300
        x = (x / 300).to(dtype)
        added = target.require("linear")(x, packed, torch.float32)
        want = residual + added
        target.require("linear_add")(x, packed, residual)
        assert torch.equal(residual, want)


@dtypes
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("shape", [(1, 3072), (11, 128), (3, 70)], ids=str)
def test_gated_activation(target, dtype, op, shape):
    x = randn(*shape, dtype=dtype, device=target.device) * 3
    x[0, :4] = torch.tensor([60.0, -60.0, 1.0, -1.0])
    close(target.require(op)(x), getattr(ORACLE, op)(up(x)), dtype, scale=4)


@dtypes
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    "rotary_dim, interleaved", [(0, False), (64, False), (64, True), (32, False), (32, True)]
)
def test_write_qkv(target, dtype, rotary_dim, interleaved, norms):
    write_qkv = target.require("write_qkv")
    case = next(c for c in attention_cases() if c.name == "mixed-page16")
    inputs = build_attention(case, dtype, target.device)
    inputs.meta.out_slots[::3] = -1
    q_norm, k_norm = (
        (randn(case.head_dim, seed=s, dtype=dtype, device=target.device) if norms else None)
        for s in (5, 6)
    )
    oracle = oracle_inputs(inputs)
    rope = make_rope(rotary_dim, interleaved) if rotary_dim else None
    want_q = ORACLE.write_qkv(
        oracle.qkv, oracle.meta, oracle.cache, oracle.spec, rope, up(q_norm), up(k_norm), 1e-6
    )
    if rope is not None:
        rope = rope.__class__(rope.cos_sin.to(target.device), rotary_dim, interleaved)
    cache = target.kept(inputs.cache)
    got_q = write_qkv(inputs.qkv, inputs.meta, cache, inputs.spec, rope, q_norm, k_norm, 1e-6)
    close(got_q, want_q, dtype, scale=4)
    for got, want in zip(target.nhd(cache), oracle.cache, strict=True):
        torch.testing.assert_close(
            got.double().cpu(),
            want,
            rtol=TOLERANCE[dtype],
            atol=4 * TOLERANCE[dtype],
            equal_nan=True,
        )
        untouched = torch.ones(got.shape[0] * got.shape[1], dtype=torch.bool)
        untouched[oracle.meta.out_slots[oracle.meta.out_slots >= 0]] = False
        flat_got, flat_want = got.cpu().flatten(0, 1), want.to(dtype).flatten(0, 1)
        assert torch.equal(
            flat_got[untouched].nan_to_num(9.0), flat_want[untouched].nan_to_num(9.0)
        )


@dtypes
@pytest.mark.parametrize("case", attention_cases(), ids=lambda c: c.name)
def test_attend(target, dtype, case):
    _check_attend(target, dtype, case)


@dtypes
@pytest.mark.parametrize("case", tree_cases(), ids=lambda c: c.name)
def test_attend_tree(target, dtype, case):
    _check_attend(target, dtype, case)


def _check_attend(target, dtype, case):
    attend = target.require("attend")
    inputs = build_attention(case, dtype, target.device)
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, oracle.cache, oracle.spec)
    got = attend(inputs.q, inputs.meta, target.kept(inputs.cache), inputs.spec)
    real = inputs.real_tokens
    close(got.cpu()[real], want[real], dtype)


def test_greedy_takes_the_lowest_of_equals(target):
    sample = target.require("sample")
    logits = randn(5, 3001, device=target.device)
    logits[0, [7, 2900]] = 9.0
    logits[1, [3000]] = 9.0
    logits[2] = 1.0
    logits[3, [0, 1]] = 9.0
    logits[4] = -math.inf
    logits[4, 1234] = -5.0
    rows = sampling_rows([(0, 0, 1, 0)] * 5, 3001, target.device)
    tokens, is_finite = sample(logits, rows)
    assert tokens.dtype == torch.int32 and is_finite.dtype == torch.bool
    assert tokens.tolist() == [7, 3000, 0, 0, 1234]
    assert is_finite.all()


PARAMS = [
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


def kept(logits, temperature, top_k, top_p, min_p):
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


@pytest.mark.parametrize("vocab", [17, 1000, 49152])
def test_sample_follows_the_rules(target, vocab):
    sample = target.require("sample")
    for seed in range(3):
        logits = randn(len(PARAMS), vocab, seed=seed) * (1 + seed)
        params = [(t, min(k, vocab), p, m) for t, k, p, m in PARAMS]
        rows = sampling_rows(params, vocab, target.device, seed)
        tokens = sample(logits.clone().to(target.device), rows)[0].tolist()
        u = uniform(rows.seeds, rows.positions).double().tolist()
        for row, (temperature, top_k, top_p, min_p) in enumerate(params):
            if temperature == 0:
                assert tokens[row] == int(logits[row].argmax())
                continue
            p = kept(logits[row], temperature, top_k, top_p, min_p)
            cumulative = p.cumsum(0) / p.sum()
            token = tokens[row]
            # float32 sums may move an edge a little; a provider must not leave the kept set.
            assert p[token] > 0, (row, token)
            below = float(cumulative[token - 1]) if token else 0.0
            assert below - 1e-5 <= u[row] <= float(cumulative[token]) + 1e-5, (row, token)


def test_sample_does_not_depend_on_the_batch(target):
    sample = target.require("sample")
    vocab = 5000
    logits = randn(len(PARAMS), vocab, device=target.device)
    rows = sampling_rows(PARAMS, vocab, target.device)
    together = sample(logits.clone(), rows)[0].tolist()
    for row, param in enumerate(PARAMS):
        one = sampling_rows([param], vocab, target.device)
        one.seeds, one.positions = rows.seeds[row : row + 1], rows.positions[row : row + 1]
        assert sample(logits[row : row + 1].clone(), one)[0].tolist() == [together[row]]


def test_sample_draws_the_distribution(target):
    sample = target.require("sample")
    n, p = 4096, torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    logits = p.log().to(target.device).expand(n, 5).contiguous()
    rows = sampling_rows([(1.0, 0, 1.0, 0.0)] * n, 5, target.device)
    rows.seeds = torch.arange(n, device=target.device) // 64  # neighbouring seeds and positions
    rows.positions = (torch.arange(n, device=target.device) % 64).int()
    counts = torch.bincount(sample(logits, rows)[0].long().cpu(), minlength=5) / n
    assert (counts - p).abs().max() < 4 * (0.25 / n) ** 0.5
    assert counts[1] == 0


def test_sample_survives_broken_logits_and_tells(target):
    sample = target.require("sample")
    logits = randn(6, 100, device=target.device)
    logits[0, 5] = math.nan
    logits[1] = -math.inf
    logits[2] = math.nan
    logits[4, 99] = math.inf
    logits[5, :99] = -math.inf
    for params in ([(1.0, 0, 1.0, 0.0)] * 6, [(0.0, 0, 1.0, 0.0)] * 6, [(1.0, 9, 0.9, 0.1)] * 6):
        rows = sampling_rows(params, 100, target.device)
        tokens, is_finite = sample(logits.clone(), rows)
        together = tokens.tolist()
        assert all(0 <= token < 100 for token in together)
        assert is_finite.tolist() == [False, False, False, True, False, True]
        alone = sampling_rows(params[3:4], 100, target.device)
        alone.seeds, alone.positions = rows.seeds[3:4], rows.positions[3:4]
        assert sample(logits[3:4].clone(), alone)[0].tolist() == together[3:4]


ROUTERS = {
    "softmax": (RouterSpec(8, renormalize=False), 128, False),
    "mixtral": (RouterSpec(2), 8, False),
    "one of six": (RouterSpec(1, renormalize=False, scale=2.0), 6, False),
    "sigmoid": (RouterSpec(6, "sigmoid", scale=2.5), 72, True),
    "groups": (RouterSpec(6, "softmax", 8, 3, renormalize=False, scale=16.0), 160, False),
    "groups with bias": (RouterSpec(8, "sigmoid", 8, 4, scale=2.5), 256, True),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_route(target, kind):
    route = target.require("route")
    spec, num_experts, has_bias = ROUTERS[kind]
    logits = randn(12, num_experts + 3, device=target.device)[:, :num_experts]
    logits[1] = 0.0  # all equal: the lowest ids
    logits[2, ::2] = logits[2, 1::2]
    bias = randn(num_experts, seed=1, device=target.device) / 10 if has_bias else None
    ids, weights = route(logits, spec, bias)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    want_ids, want_weights = ORACLE.route(up(logits), spec, up(bias))
    assert torch.equal(ids.cpu(), want_ids)
    close(weights, want_weights, torch.float32, scale=spec.scale)


def test_broken_logits_choose_experts_that_exist(target):
    route = target.require("route")
    for groups in ({}, {"num_groups": 4, "top_groups": 2}):
        logits = randn(4, 16, device=target.device)
        logits[0], logits[1, 3], logits[2], logits[3, 5] = math.nan, math.nan, -math.inf, math.inf
        ids, _ = route(logits, RouterSpec(4, **groups), None)
        assert ids.min() >= 0 and ids.max() < 16


EXPERTS = {  # num_experts, top_k, hidden, inner, activation, has_bias
    "like qwen3": (16, 4, 64, 48, "silu", False),
    "like mixtral": (4, 2, 128, 32, "silu", False),
    "like gpt-oss": (6, 3, 40, 24, "swiglu_clamped", True),
    "gelu": (3, 1, 36, 20, "gelu_tanh", True),
}


@dtypes
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts(target, kind, dtype):
    pack, experts = target.require("pack_experts"), target.require("experts")
    num_experts, top_k, hidden, inner, activation, has_bias = EXPERTS[kind]
    weights = random_experts(num_experts, hidden, inner, activation, has_bias)
    packed = pack(moved(weights, target.device, dtype))
    known = moved(moved(weights, "cpu", dtype), "cpu", torch.float64)
    for num_tokens in (1, 2, 40, 70):
        x = randn(num_tokens, hidden + 8, dtype=dtype, device=target.device)[:, :hidden]
        # Uneven: the last expert gets none, and of 40 tokens all have the same first one.
        scores = randn(num_tokens, num_experts, seed=num_tokens)
        scores[:, -1] = -9.0
        if num_tokens == 40:
            scores[:, 0] = 9.0
        values, ids = scores.softmax(-1).topk(top_k)
        given = ids.int().to(target.device), values.to(target.device)
        kept = x.clone()
        got = experts(x, *given, packed)
        assert torch.equal(x, kept)
        want = ORACLE.experts(up(x), ids, values.double(), known)
        close(got, want, dtype, scale=4)
    empty = x[:0]
    nothing = torch.zeros(0, top_k, dtype=torch.int32, device=target.device)
    assert experts(empty, nothing, nothing.float(), packed).shape == (0, hidden)
