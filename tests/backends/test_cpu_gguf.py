"""The CPU's products of packed GGUF weights, against float64 of the same rounded inputs."""

import ctypes

import pytest
import torch
from cases import AttentionCase, build_attention, make_rope
from gguf_cases import random_gguf
from proofs import prove

from stoker.backends import cpu
from stoker.backends.api import BackendError, LayerWeights, QuantizedWeight
from stoker.backends.cpu import build, gguf
from stoker.backends.cpu.native_ops import NativeOps
from stoker.backends.gguf_blocks import BLOCK_TYPES
from stoker.backends.quantized import dequantize, round_activations
from stoker.backends.reference import ReferenceOps

RUNTIME = cpu.runtime()
NATIVE = NativeOps()
REASON = NATIVE.probe(RUNTIME)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
types = pytest.mark.parametrize("gguf_type", gguf.TYPES)


def rounded(x):
    """x as the kernels round it: groups of 32 to int8."""
    as_int8 = QuantizedWeight("int8", x, tuple(x.shape), block=(1, 32), activations="group")
    return round_activations(x.double(), as_int8)


def check(ops, gguf_type, num_out, num_in, dtype, counts):
    torch.manual_seed(num_out)
    weight = random_gguf(gguf_type, num_out, num_in)
    bias = torch.randn(num_out).to(dtype)
    packed = ops.pack_quantized(weight, bias)
    values = dequantize(weight, torch.float64)
    for num_tokens in counts:
        x = torch.randn(num_tokens, num_in + 8).to(dtype)[:, :num_in]
        got = ops.quantized_linear(x, packed, torch.float32)
        want = rounded(x) @ values.T + bias.double()
        assert got.dtype == torch.float32 and got.shape == want.shape
        size = (x.double().square() @ values.square().T).sqrt().norm()
        # A tie may go to the other code, which moves a product by a step of one input.
        assert (got - want).norm() < 2e-3 * size
        assert torch.equal(ops.linear(x, packed), got.to(dtype))
    # What the rounding of inputs costs: it must be there, and small.
    error = (got - (x.double() @ values.T + bias.double())).norm()
    assert 1e-3 * size < error < 0.012 * size
    assert ops.linear(x[:0], packed).shape == (0, num_out)


@types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_out", [1, 37, 64])
def test_products_of_1_to_40_tokens(gguf_type, dtype, num_out):
    check(NATIVE, gguf_type, num_out, 512, dtype, (1, 2, 3, 7, 8, 9, 17, 40))


@types
@pytest.mark.slow
def test_without_vnni_and_bfloat16_instructions(gguf_type, monkeypatch, request):
    older = without_vnni(request)
    check(older, gguf_type, 37, 512, torch.bfloat16, (1, 5, 8))
    weight, x = random_gguf(gguf_type, 37, 512), torch.randn(5, 512)
    same = (ops.linear(x, ops.pack_quantized(weight, None)) for ops in (older, NATIVE))
    assert torch.equal(*same)


def without_vnni(request):
    """The kernels as an older processor gets them, compiled once for the module."""
    found = getattr(request.module, "_older", None)
    if found is None:
        patch = pytest.MonkeyPatch()
        load = build.load
        flags = ("-mno-avx512vnni", "-mno-avx512bf16")
        patch.setattr(build, "load", lambda cpu: load(cpu, flags))
        found = request.module._older = NativeOps()
        assert found.probe(RUNTIME) is None
        patch.undo()
    return found


@types
def test_integer_products_are_exact(gguf_type):
    """Inputs that are int8 already, with scales of 1, lose nothing but float32's rounding."""
    weight = random_gguf(gguf_type, 48, 512)
    x = torch.randint(-127, 128, (5, 512)).float()
    x[:, ::32] = 127.0
    got = NATIVE.quantized_linear(x, NATIVE.pack_quantized(weight, None))
    want = x.double() @ dequantize(weight, torch.float64).T
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-5 * float(want.std()))


@types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rows_of_an_embedding(gguf_type, dtype):
    weight = random_gguf(gguf_type, 70, 256)
    packed = NATIVE.pack_quantized(weight, None)
    ids = torch.tensor([69, 0, 16, 15, 16])
    got = NATIVE.quantized_rows(packed, ids, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, dequantize(weight)[ids].to(dtype), rtol=1e-6, atol=1e-7)
    prove("cpu", "quantized_rows", "native", "ran")


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads():
    weight = random_gguf("Q4_K", 200, 512)
    packed = NATIVE.pack_quantized(weight, None)
    x = torch.randn(70, 512).bfloat16()
    together = NATIVE.linear(x, packed, torch.float32)
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 22), (22, 70)):
        assert torch.equal(NATIVE.linear(x[begin:end], packed, torch.float32), together[begin:end])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(NATIVE.linear(x, packed, torch.float32), together)
    finally:
        torch.set_num_threads(before)


def test_parts_of_several_types_follow_each_other():
    weights = [
        random_gguf(name, rows, 256, seed=rows)
        for name, rows in (("Q4_K", 40), ("Q6_K", 7), ("Q8_0", 24))
    ]
    bias, x = torch.randn(71), torch.randn(9, 256)
    got = NATIVE.linear(x, NATIVE.pack_quantized_rows(weights, bias))
    alone = [
        NATIVE.linear(x, NATIVE.pack_quantized(w, b))
        for w, b in zip(weights, bias.split([40, 7, 24]), strict=True)
    ]
    assert torch.equal(got, torch.cat(alone, dim=1))
    prove("cpu", "pack_quantized_rows", "native", "ran")


def test_numbers_that_are_not_finite_stay_so_and_harm_no_other_row():
    packed = NATIVE.pack_quantized(random_gguf("Q4_1", 32, 64), None)
    x = torch.randn(4, 64)
    want = NATIVE.linear(x, packed)
    for broken in (torch.nan, torch.inf, -torch.inf):
        given = x.clone()
        given[1, 40] = broken
        got = NATIVE.linear(given, packed)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
    x[2] = 0.0
    x[3] = 1e-42
    got = NATIVE.linear(x, packed)
    assert (got[2] == 0).all() and got[3].abs().max() < 1e-35


def test_panels_are_as_large_as_the_rows_of_the_file():
    for name, block in BLOCK_TYPES.items():
        packed = NATIVE.pack_quantized(random_gguf(name, 64, 512), None)
        in_file = 64 * 512 // block.size * block.num_bytes
        assert in_file <= packed.panels[0].numel() <= 1.03 * in_file


def test_other_types_are_refused_and_the_structure_is_the_kernels():
    with pytest.raises(BackendError, match="IQ2_XXS"):
        NATIVE.pack_quantized(
            QuantizedWeight("gguf", torch.zeros(2, 66), (2, 256), gguf_type="IQ2_XXS"), None
        )
    header = build.SOURCE.with_name("gguf.h").read_text()
    assert f"sizeof(Part) == {ctypes.sizeof(gguf.Part)}" in header
    assert f"enum class Type : int32_t {{ {', '.join(gguf.TYPES)} }}" in header


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gguf_type", ["Q4_1", "Q8_0"])
def test_a_fused_layer_gives_the_bits_of_its_ops(gguf_type, dtype):
    """Two packed linears, one of them of two types with a bias, beside two of floats."""
    case = AttentionCase("", [(1, 40), (1, 0), (30, 50)], 16, 4, 2, 32, 20)
    results = []
    for layer in (NATIVE.decoder_layer, lambda *args: ReferenceOps.decoder_layer(NATIVE, *args)):
        torch.manual_seed(0)
        inputs = build_attention(case, dtype)
        inputs.cache = NATIVE.from_nhd(inputs.cache)
        parts = [random_gguf(gguf_type, 200, 96), random_gguf("Q5_0", 56, 96)]
        weights = LayerWeights(
            spec=inputs.spec,
            rope=make_rope(32),
            eps=1e-6,
            activation="silu",
            input_norm=torch.randn(96).to(dtype),
            qkv=NATIVE.pack_quantized_rows(parts, torch.randn(256).to(dtype)),
            q_norm=None,
            k_norm=None,
            out=NATIVE.pack_linear((torch.randn(96, 128) / 11).to(dtype), None),
            attention_out_norm=None,
            mlp_norm=torch.randn(96).to(dtype),
            gate_up=NATIVE.pack_linear((torch.randn(320, 96) / 10).to(dtype), None),
            down=NATIVE.pack_quantized(random_gguf(gguf_type, 96, 160), None),
            mlp_out_norm=None,
        )
        residual, x = torch.randn(32, 96), torch.randn(32, 96).to(dtype)
        out = layer(x, residual, weights, inputs.meta, inputs.cache)
        real = inputs.real_tokens
        results.append((out[real], residual[real], *inputs.cache))
    for fused, plain in zip(*results, strict=True):
        assert torch.equal(fused.nan_to_num(9.0), plain.nan_to_num(9.0))
    assert results[0][0].isfinite().all()
