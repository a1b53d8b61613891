"""Which form the CPU keeps quantized weights in, and what it says of it."""

import logging
from dataclasses import replace

import pytest
import torch
from quantized_cases import CASES, random_quantized

from stoker.backends.cpu import quantized
from stoker.backends.cpu.quantized import DequantizedLinear, Int8Linear, WeightOnlyLinear
from stoker.backends.cpu.torch_ops import TorchOps
from stoker.backends.quantized import dequantize

FORMS = {
    "fp8-block-group": DequantizedLinear,
    "int8-channel-token": Int8Linear,
    "int8-channel": WeightOnlyLinear,
    "int8-tensor-static": DequantizedLinear,
    "int8-group": DequantizedLinear,
    "uint4-channel": WeightOnlyLinear,  # of 256 inputs
    "uint4-group32": WeightOnlyLinear,
    "uint4-group-order": WeightOnlyLinear,
    "mxfp4": DequantizedLinear,
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_weight(name):
    case = next(c for c in CASES if c.name == name)
    if not quantized.can_multiply_int8():
        pytest.skip("this build of torch has no int8 product of oneDNN")
    weight = replace(random_quantized(case, 64, 256), dtype=torch.bfloat16)
    packed = TorchOps().pack_quantized(weight, None)
    assert type(packed) is FORMS[name]
    if FORMS[name] is DequantizedLinear:
        assert packed.dtype == torch.bfloat16


def test_types_without_a_fast_kernel_are_dequantized_and_the_log_says_so(caplog):
    case = next(c for c in CASES if c.name == "uint4-group32")
    weight = replace(random_quantized(case, 64, 256), dtype=torch.float32)
    quantized._log_dequantized.cache_clear()
    with caplog.at_level(logging.INFO, logger="stoker.backends.cpu.quantized"):
        packed = [TorchOps().pack_quantized(weight, None) for _ in range(3)]
    assert caplog.messages == [
        "weights of kind uint4 are dequantized to float32 when they are loaded: "
        "no kernel multiplies them"
    ]
    x = torch.eye(256)
    assert torch.allclose(TorchOps().quantized_linear(x, packed[0]).T, dequantize(weight))


def test_rows_that_the_int4_kernel_does_not_take_are_filled_up():
    case = next(c for c in CASES if c.name == "uint4-group32")
    weight = replace(random_quantized(case, 17, 64), dtype=torch.bfloat16)
    bias = torch.arange(17.0).bfloat16()
    packed = TorchOps().pack_quantized(weight, bias)
    out = TorchOps().quantized_linear(torch.eye(64, dtype=torch.bfloat16), packed)
    want = dequantize(weight).T + bias
    assert out.shape == (64, 17)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-3)
