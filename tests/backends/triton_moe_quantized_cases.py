"""Quantized experts: run by `test_triton_interpreted.py`, with the interpreter."""

from dataclasses import replace

import pytest
import torch
from triton_moe_cases import random_pairs
from triton_quantized_cases import error, make, random

from stoker.backends.api import BackendError, QuantizedExperts
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import moe_quantized
from stoker.backends.triton.quantized import Tile

ORACLE, BF16 = ReferenceOps(), torch.bfloat16


def experts(name, num_experts=4, hidden=64, inner=32, activation="silu", has_bias=False):
    return QuantizedExperts(
        make(name, 2 * inner, hidden, num_experts),
        make(name, hidden, inner, num_experts, seed=1),
        activation,
        random(num_experts, 2 * inner, seed=2) * 3 if has_bias else None,
        random(num_experts, hidden, seed=3) if has_bias else None,
    )


def rounded(weights, activations):
    """The same, with another way to round activations."""
    gate_up, down = (replace(w, activations=activations) for w in (weights.gate_up, weights.down))
    return replace(weights, gate_up=gate_up, down=down)


@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("name, activation, has_bias", [
    ("mxfp4", "swiglu_clamped", True),
    ("uint4 g32", "silu", False),
    ("fp8 a16", "silu", False),
    ("int8 g16", "gelu_tanh", True),
    ("fp8", "silu", False),
])  # fmt: skip
def test_widened_experts(name, activation, has_bias, num_tokens):
    """One token's pairs are tiles, and its activations are not rounded; more are sorted."""
    weights = experts(name, 4, 96, 64, activation, has_bias)
    ids, scales = random_pairs(num_tokens, 4, 2)
    x = random(num_tokens, 96)
    known = rounded(weights, None) if num_tokens == 1 else weights
    want = ORACLE.quantized_experts(x.double(), ids, scales.double(), known)
    packed = moe_quantized.pack_quantized_experts(weights)
    got = moe_quantized.quantized_experts(x, ids, scales, packed)
    assert got.dtype == BF16 and error(got, want) < 8e-3


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8", "fp8 tensor"])
def test_experts_with_rounded_activations(name):
    """Blocks of scales, which gate and up rows do not share."""
    weights = experts(name, 4, 128, 64, has_bias=True)
    ids, scales = random_pairs(21, 4, 2)
    x = random(21, 128)
    if name == "fp8 tensor":
        weights.gate_up.input_scale.fill_(0.01)
        weights.down.input_scale.fill_(0.02)
    packed = moe_quantized.pack_quantized_experts(weights)
    assert packed.gate_up.widened is None and packed.down.widened is None
    want = ORACLE.quantized_experts(x.double(), ids, scales.double(), weights)
    got = moe_quantized.quantized_experts(x, ids, scales, packed, Tile(16, 32, 64, 4, 3))
    assert error(got, want) < 2e-2  # a code of the second product may fall to the other side


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8", "fp8 tensor"])
@pytest.mark.parametrize("inner", [64, 40])
def test_one_token_by_codes_of_8_bits(name, inner):
    """Its activations are not rounded; rows that no block divides; biases."""
    weights = experts(name, 4, 128, inner, has_bias=True)
    ids, scales = random_pairs(1, 4, 2)
    packed = moe_quantized.pack_quantized_experts(weights)
    for dtype in (BF16, torch.float32):
        x = random(1, 128, dtype=dtype)
        want = ORACLE.quantized_experts(x.double(), ids, scales.double(), rounded(weights, None))
        got = moe_quantized.quantized_experts(x, ids, scales, packed)
        assert got.dtype == dtype and error(got, want) < (8e-3 if dtype == BF16 else 1e-5)


def test_rows_of_experts_that_nothing_divides():
    weights = experts("fp8", 3, 40, 24)
    ids, scales = random_pairs(5, 3, 2)
    x = random(5, 40)
    packed = moe_quantized.pack_quantized_experts(weights)
    assert packed.down.widened is None
    want = ORACLE.quantized_experts(x.double(), ids, scales.double(), weights)
    assert error(moe_quantized.quantized_experts(x, ids, scales, packed), want) < 2e-2


def test_which_experts_have_no_kernel():
    weights = experts("uint4 g32")
    down = replace(weights.down, order=torch.arange(32).repeat(4, 1).int())
    with pytest.raises(BackendError, match="order"):
        moe_quantized.pack_quantized_experts(replace(weights, down=down))
