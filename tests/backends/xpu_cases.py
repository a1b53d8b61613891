"""vllm-xpu-kernels beyond the contract's checks, emulated; run by `test_xpu.py`."""

import importlib
from dataclasses import replace

import pytest
import tiny_model
import torch
import xpu_emulated
import xpu_package

from stoker.backends import registry, xpu
from stoker.backends.api import AttentionSpec, ExpertWeights, LayerCache
from stoker.backends.contract.cases import ORACLE, AttentionCase, build_attention, oracle_inputs
from stoker.backends.xpu import ops, package

OPS = xpu.XpuKernelOps()
assert OPS.probe(xpu_emulated.RUNTIME) is None
CALLED = xpu_emulated.CALLED


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attends(case, fp8=None, **changed):
    """The error of attend, which must have been the package's."""
    inputs = build_attention(case, torch.bfloat16)
    cache = LayerCache(*(x.nan_to_num(1e4) for x in inputs.cache))
    known = LayerCache(*(x.double() for x in cache))
    spec = inputs.spec
    if fp8 is not None:
        cache = LayerCache(*(x.clamp(-400, 400).to(fp8) for x in cache))
        spec = replace(spec, kv_dtype=fp8, k_scale=0.5, v_scale=0.25)
        known = LayerCache(cache.k.double() * 0.5, cache.v.double() * 0.25)
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, known, oracle.spec)
    meta = replace(inputs.meta, **changed)
    CALLED.clear()
    for _ in range(2):  # another layer: the same tables
        got = OPS.attend(inputs.q, meta, cache, spec)
    assert {"varlen_fwd"} == CALLED
    real = inputs.real_tokens
    torch.testing.assert_close(got.double()[real], want[real], rtol=2e-2, atol=2e-2)


def test_the_backend_chooses_the_package_and_says_why_not_the_others():
    backend = registry.assemble(xpu, xpu_emulated.RUNTIME, {})
    chosen = {op: choice.provider for op, choice in backend.choices.items()}
    for op in ("attend", "rms_norm", "add_rms_norm", "silu_and_mul", "route", "experts"):
        assert chosen[op] == "vllm-xpu", op
    assert chosen["linear"] == "onednn"
    assert chosen["write_qkv"] == "vllm-xpu-rope", "where Triton has no device"
    assert chosen["sample"] == "torch"
    forced = registry.assemble(xpu, xpu_emulated.RUNTIME, {"attend": "sdpa"})
    forced.settle([AttentionSpec(8, 2, 64, 0.125)], torch.bfloat16, 16)
    assert forced.choices["attend"].provider == "sdpa"


def test_what_is_not_the_package_s_is_plain_torch_where_triton_is_not_there():
    CALLED.clear()
    x = randn(4, 64)
    torch.testing.assert_close(OPS.rms_norm(x, x[0], 1e-6), ORACLE.rms_norm(x, x[0], 1e-6))
    assert not CALLED


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache(fp8):
    attends(AttentionCase("", [(1, 40), (5, 21)], 16, 4, 2, 64), fp8=fp8)


def test_rows_of_one_length_take_its_path_for_drafts():
    """It decodes each of their tokens as a row."""
    attends(AttentionCase("", [(4, 40), (4, 21), (4, 4)], 64, 8, 2, 128, window=9))


def test_a_captured_step_s_bound_is_no_length():
    """A replay may have fewer new tokens than the tensors."""
    case = AttentionCase("", [(3, 21)], 16, 4, 2, 64)
    inputs = build_attention(case, torch.bfloat16)
    cache = LayerCache(*(x.nan_to_num(1.0) for x in inputs.cache))
    want = OPS.attend(inputs.q, inputs.meta, cache, inputs.spec)
    padded = torch.cat((inputs.q, inputs.q.new_zeros(5, 4, 64)))
    meta = replace(inputs.meta, num_tokens=8, max_kv_len=64, plans={})
    got = OPS.attend(padded, meta, cache, inputs.spec)
    torch.testing.assert_close(got[:3], want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("top_k", [2, 3])
def test_experts(top_k):
    """The second number is one that the package has no kernel for."""
    weights = ExpertWeights(
        randn(6, 64, 48).bfloat16() / 7, randn(6, 48, 32, seed=1).bfloat16() / 6
    )
    x, (values, ids) = randn(9, 48, seed=2).bfloat16(), randn(9, 6, seed=3).softmax(-1).topk(top_k)
    packed = OPS.pack_experts(weights)
    known = ExpertWeights(weights.gate_up.double(), weights.down.double())
    want = ORACLE.experts(x.double(), ids, values.double(), known)
    for _ in range(2):
        CALLED.clear()
        got = OPS.experts(x, ids.int(), values, packed)
        torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
        assert ("cutlass_grouped_gemm_interface" in CALLED) == (top_k == 2)


def test_limits_are_those_of_the_libraries():
    """576 is of latent attention, and 512 of no model that we know."""
    facts = xpu_package.facts()
    assert facts["top_ks"] == list(ops.TOP_KS)
    assert set(facts["head_dims"]) - {512, 576} == set(ops.HEAD_DIMS)


# ---- negative controls: each kind of check can fail


def rotary(**changed):
    x = randn(4, 64).bfloat16()
    given = dict(positions=torch.arange(4), query=x, key=x.clone(), head_size=64,
                 cos_sin_cache=x, is_neox=True)  # fmt: skip
    given.update(changed)
    package.rotary_embedding(**{name: x for name, x in given.items() if x is not ...})


def test_a_dropped_keyword_is_refused():
    rotary()
    with pytest.raises((TypeError, RuntimeError), match="head_size"):
        rotary(head_size=...)
    with pytest.raises((TypeError, AssertionError), match="max_seqlen_k"):
        x = randn(4, 2, 64)
        package.flash_attn_varlen_func(q=x, k=x, v=x, max_seqlen_q=1, cu_seqlens_q=x, causal=True)


def test_a_renamed_keyword_is_refused():
    with pytest.raises((TypeError, RuntimeError), match="is_neox"):
        rotary(is_neox=..., neox=True)


def test_a_wrong_type_is_refused():
    with pytest.raises((TypeError, RuntimeError), match="head_size"):
        rotary(head_size="64")
    with pytest.raises(AssertionError):
        rotary(positions=torch.arange(4, dtype=torch.int32))


def test_wrong_numbers_are_seen():
    case = AttentionCase("", [(1, 40), (5, 21)], 16, 4, 2, 64)
    with pytest.raises(AssertionError):
        attends(case, kv_lens=torch.tensor([39, 21], dtype=torch.int32))


def test_a_version_with_another_schema_is_a_reason():
    other = package.Callable("rms_norm", "_C", "result input weight eps")
    reason = package.reason_against([other])
    assert (
        reason == f"vllm-xpu-kernels {xpu_package.VERSION} is not one that is known: rms_norm, eps"
    )
    gone = package.Callable("rms_norm_3d", "_C", "result")
    assert "rms_norm_3d" in package.reason_against([gone])
    short = package.Callable("flash_attn_varlen_func", package.flash_attn_varlen_func.place, "q k")
    assert "flash_attn_varlen_func" in package.reason_against([short])


def test_libraries_for_another_torch_are_a_reason(monkeypatch):
    real = importlib.import_module

    def broken(name, *args):
        if name == "vllm_xpu_kernels._moe_C":
            raise ImportError("undefined symbol: _ZN3c10\nand more")
        return real(name, *args)

    monkeypatch.setattr(package.importlib, "import_module", broken)
    reason = package.reason_against()
    assert "cannot be imported beside torch" in reason and reason.endswith("symbol: _ZN3c10")


def test_a_tiny_model_says_the_same_as_on_the_cpu():
    backend = registry.assemble(xpu, xpu_emulated.RUNTIME, {"linear": "torch"})
    CALLED.clear()
    assert tiny_model.says_the_same(backend.ops)
    assert CALLED >= {"varlen_fwd", "rotary_embedding", "reshape_and_cache_flash"}
