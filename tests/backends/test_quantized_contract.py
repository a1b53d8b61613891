"""What quantized weights stand for, and how activations are rounded, against loops."""

import math

import pytest
import torch
from quantized_cases import CASES, random_quantized

from stoker.backends.api import QuantizedWeight
from stoker.backends.quantized import (
    E2M1,
    dequantize,
    pack_nibbles,
    round_activations,
    unpack_nibbles,
)

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


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
