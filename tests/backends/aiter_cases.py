"""AITER beyond the contract's checks; run by `test_aiter.py`, with the package emulated."""

import importlib
from dataclasses import replace

import aiter_emulated
import aiter_package
import pytest
import tiny_model
import torch
from proofs import prove

from stoker.backends import registry, rocm
from stoker.backends.api import (
    AttentionSpec,
    ExpertWeights,
    LayerCache,
    MLASpec,
    QuantizedExperts,
    QuantizedWeight,
)
from stoker.backends.contract.cases import ORACLE, AttentionCase, build_attention, oracle_inputs
from stoker.backends.quantized import dequantize
from stoker.backends.rocm import fp8, package, warm

OPS = rocm.AiterOps()
assert OPS.probe(aiter_emulated.RUNTIME) is None
CALLED = aiter_emulated.CALLED


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_backend_chooses_aiter_and_says_why_not_the_others(monkeypatch):
    backend = registry.assemble(rocm, aiter_emulated.RUNTIME, {})
    chosen = {op: choice.provider for op, choice in backend.choices.items()}
    for op in ("attend", "rms_norm", "add_rms_norm", "silu_and_mul", "route", "experts"):
        assert chosen[op] == "aiter", op
    assert chosen["linear"] == "hipblaslt" and chosen["write_qkv"] == "triton"
    assert chosen["sample"] == "triton"
    forced = registry.assemble(rocm, aiter_emulated.RUNTIME, {"attend": "aiter-paged"})
    forced.settle([AttentionSpec(8, 2, 64, 0.125)], torch.bfloat16, 16)
    assert forced.choices["attend"].provider == "aiter-paged"
    with pytest.raises(registry.BackendError, match="page-size 16 or 32"):
        forced.settle([AttentionSpec(8, 2, 64, 0.125)], torch.bfloat16, 64)
    registry.assemble(rocm, aiter_emulated.RUNTIME, {"write_qkv": "aiter-rope"})


def test_a_warm_start_calls_what_would_be_compiled(monkeypatch):
    monkeypatch.setattr(warm, "ROWS", 1)
    monkeypatch.setattr(warm, "Q_LENS", (1, 5))
    CALLED.clear()
    spec = AttentionSpec(4, 2, 64, 0.125)
    for step in OPS.warm_steps([spec], torch.bfloat16, 16, torch.device("cpu")):
        step()
    assert CALLED >= {"rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add", "silu_and_mul",
                      "gelu_tanh_and_mul", "unified_attention"}  # fmt: skip


def test_an_fp8_cache():
    inputs = build_attention(AttentionCase("", [(1, 40), (5, 21)], 16, 4, 2, 64), torch.bfloat16)
    spec = replace(inputs.spec, kv_dtype=fp8.FNUZ, k_scale=0.5, v_scale=0.25)
    cache = LayerCache(*(x.nan_to_num(1.0).to(fp8.FNUZ) for x in inputs.cache))
    oracle = oracle_inputs(inputs)
    seen = LayerCache(cache.k.double() * 0.5, cache.v.double() * 0.25)
    want = ORACLE.attend(oracle.q, oracle.meta, seen, oracle.spec)
    got = OPS.attend(inputs.q, inputs.meta, cache, spec)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [[(1, 40), (1, 1), (1, 0)], [(1, 40), (5, 21), (17, 17)]])
def test_latent_attention(rows):
    """DeepSeek's sizes with 16 heads, as on one of eight GPUs."""
    inputs = build_attention(AttentionCase("", rows, 16, 16, 1, 576), torch.bfloat16)
    spec = MLASpec(16, 512, 64, 128, 128, 192**-0.5)
    cache = LayerCache(inputs.cache.k.nan_to_num(1.0), inputs.cache.v[..., :0])
    oracle, sizes = oracle_inputs(inputs), [512, 64]
    known = LayerCache(cache.k.double(), cache.v.double())
    want = ORACLE.mla_attend(*oracle.q.split(sizes, 2), oracle.meta, known, spec)
    CALLED.clear()
    for _ in range(2):  # another layer: the same lists
        got = OPS.mla_attend(*inputs.q.split(sizes, 2), inputs.meta, cache, spec)
        real = inputs.real_tokens
        torch.testing.assert_close(got.double()[real], want[real], rtol=2e-2, atol=2e-2)
    assert ("mla_prefill_fwd" in CALLED) == (inputs.meta.num_decode_rows < len(rows))
    assert "mla_decode_fwd" in CALLED
    prove("rocm", "mla_attend", "aiter", "emulated")


@pytest.mark.parametrize("kind", ["bf16", "blocks", "rows"])
def test_experts(kind):
    num_experts, top_k, hidden, inner = 4, 2, 256, 128
    gate_up = randn(num_experts, 2 * inner, hidden) / 16
    down = randn(num_experts, hidden, inner, seed=1) / 11
    x = randn(9, hidden, seed=2).bfloat16()
    values, ids = randn(9, num_experts, seed=3).softmax(-1).topk(top_k)
    CALLED.clear()
    if kind == "bf16":
        weights = ExpertWeights(gate_up.bfloat16(), down.bfloat16())
        packed = OPS.pack_experts(weights)
        got = OPS.experts(x, ids.int(), values, packed)
        known = ExpertWeights(weights.gate_up.double(), weights.down.double())
    else:
        made = [quantized(w, kind) for w in (gate_up, down)]
        packed = OPS.pack_quantized_experts(QuantizedExperts(*made))
        got = OPS.quantized_experts(x, ids.int(), values, packed)
        known = ExpertWeights(*(dequantize(w, torch.float64) for w in made))
    assert "fused_moe" in CALLED
    want = ORACLE.experts(x.double(), ids, values.double(), known)
    torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
    if kind != "bf16":
        for op in ("pack_quantized_experts", "quantized_experts"):
            prove("rocm", op, "aiter", "emulated")


def quantized(weight, kind):
    """fp8 e4m3fn, as a checkpoint holds it, by blocks of 128 x 128 or by rows."""
    block = (128, 128) if kind == "blocks" else (1, weight.shape[-1])
    tiles = weight.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    scales = tiles.abs().amax((-3, -1)) / 448
    codes = tiles / scales[..., :, None, :, None]
    codes = codes.flatten(-4, -3).flatten(-2, -1).to(torch.float8_e4m3fn)
    activations = "group" if kind == "blocks" else "token"
    return QuantizedWeight("fp8", codes, tuple(weight.shape), scales, None, block, activations)


@pytest.mark.parametrize("kind", ["blocks", "rows", "int8"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_quantized_linears(kind, has_bias):
    weight = randn(256, 384) / 20
    bias = randn(256, seed=5).bfloat16() if has_bias else None
    if kind == "int8":
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        made = QuantizedWeight("int8", codes, (256, 384), scales, None, (1, 384), "token")
    else:
        made = quantized(weight, kind)
    CALLED.clear()
    packed = OPS.pack_quantized(made, bias)
    x = randn(7, 384, seed=1).bfloat16()
    got = OPS.quantized_linear(x, packed)
    wanted = {"blocks": "gemm_a8w8_blockscale", "rows": "gemm_a8w8_bpreshuffle"}
    assert CALLED >= {wanted.get(kind, "gemm_a8w8"), "dynamic_per_token_scaled_quant"}
    want = x.double() @ dequantize(made, torch.float64).T
    want = want if bias is None else want + bias.double()
    # Activations are rounded to 8 bits, too: at most 2^-4 of each product, at random.
    torch.testing.assert_close(got.double(), want, rtol=4e-2, atol=0.2)
    wide = OPS.quantized_linear(x, packed, torch.float32)
    assert wide.dtype == torch.float32
    for op in ("pack_quantized", "quantized_linear"):
        prove("rocm", op, "aiter", "emulated")


def test_aiter_and_we_agree_on_fp8():
    dtypes = importlib.import_module("aiter.utility.dtypes")
    assert dtypes.fp8 == fp8.FNUZ == rocm.facts("gfx942").fp8


# ---- negative controls: each kind of check can fail


def test_a_dropped_keyword_is_refused():
    x = randn(4, 64).bfloat16()
    with pytest.raises((TypeError, RuntimeError), match="epsilon"):
        package.rmsnorm2d_fwd.function(input=x, weight=x[0].contiguous())
    with pytest.raises(TypeError, match="kv_indices"):
        package.mla_decode_fwd.function(q=x, kv_buffer=x, o=x, qo_indptr=x, kv_indptr=x)


def test_a_renamed_argument_is_refused():
    x = randn(4, 64).bfloat16()
    with pytest.raises((TypeError, RuntimeError), match="eps"):
        package.rmsnorm2d_fwd.function(input=x, weight=x[0].contiguous(), eps=1e-6)


def test_wrong_numbers_are_seen(monkeypatch):
    def silu_and_mul(out, input):  # noqa: A002 - AITER's
        out.zero_()

    monkeypatch.setitem(aiter_emulated.NATIVE, "silu_and_mul", silu_and_mul)
    x = randn(4, 64).bfloat16()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(OPS.silu_and_mul(x), ORACLE.silu_and_mul(x))


def test_a_version_with_another_signature_is_a_reason(monkeypatch):
    other = package.Function("rmsnorm2d_fwd", "aiter.ops.rmsnorm", "input weight eps")
    reason = package.reason_against([other])
    assert "rmsnorm2d_fwd and eps" in reason and "\n" not in reason
    gone = package.Function("rmsnorm3d_fwd", "aiter.ops.rmsnorm", "input")
    assert "has no rmsnorm3d_fwd" in package.reason_against([gone])
    assert aiter_package.VERSION in reason or "unknown version" in reason


# ---- a model


def test_a_tiny_model_says_the_same_as_on_the_cpu():
    backend = registry.assemble(rocm, aiter_emulated.RUNTIME, {"linear": "torch"})
    CALLED.clear()
    assert tiny_model.says_the_same(backend.ops)
    assert "unified_attention" in CALLED
