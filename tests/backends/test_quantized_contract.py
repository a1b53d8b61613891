"""The quantized ops of each provider that can run here, against the float64 oracle."""

import math

import pytest
import torch
from cases import ORACLE, TOLERANCE
from quantized_cases import CASES, on_device, random_quantized, random_quantized_experts
from targets import targets

from stoker.backends.api import BackendError, QuantizedExperts, QuantizedWeight
from stoker.backends.quantized import (
    E2M1,
    dequantize,
    pack_nibbles,
    round_activations,
    unpack_nibbles,
)

on_every_provider = pytest.mark.parametrize("target", targets())
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

# Where x / scale lies within float32's rounding of a tie, a kernel may take the other code.
TIES = 5e-3
ROUNDED = {torch.float32: 5e-3, torch.float16: 0.015, torch.bfloat16: 0.025}


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype)


def close(got, want, dtype, weight, scale=1.0):
    tolerance = TOLERANCE[dtype]
    if weight.activations is not None:
        tolerance = max(tolerance, TIES)
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance * scale)


def packed_by(target, name, *arguments):
    """What the provider packs, or a skip where it says that it does not serve this kind."""
    pack = target.require(name)
    try:
        return pack(*arguments)
    except BackendError as error:
        pytest.skip(str(error))


@on_every_provider
@dtypes
@cases
@pytest.mark.parametrize("num_out, num_in", [(192, 256), (98, 320)])
def test_quantized_linear(target, dtype, case, num_out, num_in):
    weight = random_quantized(case, num_out, num_in)
    bias = randn(num_out, seed=1, dtype=dtype) if num_out == 98 else None
    there = None if bias is None else bias.to(target.device)
    packed = packed_by(target, "pack_quantized", on_device(weight, target.device), there)
    known = weight, None if bias is None else bias.double()
    linear = target.require("quantized_linear")
    for num_tokens in (1, 3, 17, 70):
        x = randn(num_tokens, num_in + 8, seed=num_tokens, dtype=dtype)[:, :num_in]
        want = ORACLE.quantized_linear(x.double(), known)
        given = x.to(target.device)
        close(linear(given, packed), want, dtype, weight)
        logits = linear(given, packed, torch.float32)
        assert logits.dtype == torch.float32
        close(logits.to(dtype), want, dtype, weight)
    assert linear(given[:0], packed).shape == (0, num_out)


@on_every_provider
@dtypes
@cases
@pytest.mark.parametrize("activation, has_bias", [("silu", False), ("swiglu_clamped", True)])
def test_quantized_experts(target, dtype, case, activation, has_bias):
    num_experts, top_k, hidden, inner = 6, 2, 128, 64
    weights = random_quantized_experts(case, num_experts, hidden, inner, activation, has_bias)
    biases = {}
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(weights, name)
        biases[name] = None if bias is None else bias.to(dtype)
    there = QuantizedExperts(
        on_device(weights.gate_up, target.device),
        on_device(weights.down, target.device),
        activation,
        **{k: None if b is None else b.to(target.device) for k, b in biases.items()},
    )
    known = QuantizedExperts(
        weights.gate_up,
        weights.down,
        activation,
        **{k: None if b is None else b.double() for k, b in biases.items()},
    )
    packed = packed_by(target, "pack_quantized_experts", there)
    experts = target.require("quantized_experts")
    for num_tokens in (1, 2, 40):
        x = randn(num_tokens, hidden + 8, dtype=dtype, seed=num_tokens)[:, :hidden]
        # Uneven: the last expert gets none, and of 40 tokens all have the same first one.
        scores = randn(num_tokens, num_experts, seed=num_tokens)
        scores[:, -1] = -9.0
        if num_tokens == 40:
            scores[:, 0] = 9.0
        values, ids = scores.softmax(-1).topk(top_k)
        given = x.to(target.device)
        got = experts(given, ids.int().to(target.device), values.to(target.device), packed)
        want = ORACLE.quantized_experts(x.double(), ids, values.double(), known)
        if case.activations is None:
            close(got, want, dtype, weights.down, scale=4)
        else:
            # The inputs of `down` differ by their own rounding, so that some get another code;
            # fp8 without any rounding of inputs would be off by about 0.03.
            assert got.dtype == dtype
            assert (got.double().cpu() - want).norm() < ROUNDED[dtype] * want.norm()
        assert torch.equal(given.cpu(), x)
    nothing = torch.zeros(0, top_k, dtype=torch.int32, device=target.device)
    assert experts(given[:0], nothing, nothing.float(), packed).shape == (0, hidden)


@cases
def test_values_code_by_code(case):
    num_out, num_in = 6, 256 + 64
    weight = random_quantized(case, num_out, num_in, num_experts=2)
    codes = weight.codes
    if case.kind in ("uint4", "mxfp4"):
        codes = torch.stack((codes % 16, codes // 16), -1).view(weight.shape)
    want = torch.zeros(weight.shape, dtype=torch.float64)
    for expert in range(2):
        for row in range(num_out):
            for column in range(num_in):
                at = expert, row // weight.block[0], column // weight.block[1]
                code = codes[expert, row, column].item()
                value = (E2M1[code] if case.kind == "mxfp4" else code) * weight.scales[at].item()
                if weight.offsets is not None:
                    value += weight.offsets[at].item()
                place = column if weight.order is None else int(weight.order[expert, column])
                want[expert, row, place] = value
    assert torch.equal(dequantize(weight, torch.float64), want)
    assert dequantize(weight).dtype == torch.float32
    torch.testing.assert_close(dequantize(weight).double(), want, rtol=1e-6, atol=1e-7)


def test_nibbles_have_the_lower_half_first():
    codes = torch.arange(16, dtype=torch.uint8)
    assert pack_nibbles(codes)[:2].tolist() == [0x10, 0x32]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def activations(kind, activations, x, block=(1, 1), input_scale=None):
    codes = torch.zeros(1, x.shape[1])
    scale = None if input_scale is None else torch.tensor([input_scale])
    weight = QuantizedWeight(kind, codes, (1, x.shape[1]), None, None, block, activations, scale)
    return round_activations(x, weight)


def test_activations_are_rounded_to_the_nearest_code():
    x = torch.tensor([[127.0, 1.4, -0.6, 2.5], [63.5, 0.3, -63.5, 0.2], [0.0, 0.0, 0.0, 0.0]])
    assert activations("int8", None, x) is x
    by_token = activations("int8", "token", x)
    assert by_token.tolist() == [[127, 1, -1, 2], [63.5, 0.5, -63.5, 0], [0, 0, 0, 0]]
    fixed = activations("int8", "tensor", x, input_scale=0.25)
    assert fixed.tolist() == [[31.75, 1.5, -0.5, 2.5], [31.75, 0.25, -31.75, 0.25], [0, 0, 0, 0]]
    x = torch.tensor([[448.0, 17.0, 2**-11, -19.1, 5.0]])  # steps: 32, 2, 2**-9, 2, 0.5
    assert activations("fp8", "token", x).tolist() == [[448, 16, 0, -20, 5]]
    by_group = activations("fp8", "group", x / 448 * 3, block=(128, 4))
    assert by_group[0, 4] == x[0, 4] / 448 * 3  # alone in its group, so it is its scale * 448
    torch.testing.assert_close(by_group[0, :4], torch.tensor([448, 16, 0, -20]) / 448 * 3)
    assert activations("fp8", "tensor", x, input_scale=0.01).max() == pytest.approx(4.48)
    assert math.isnan(activations("fp8", "token", torch.tensor([[math.nan, 1.0]]))[0, 0])
    assert activations("fp8", "token", x[:0]).shape == (0, 5)
