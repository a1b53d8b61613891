"""GGUF's blocks in plain torch: bit for bit those of the gguf package, and regrouped."""

import gguf
import pytest
import torch
from gguf_cases import random_gguf

from stoker.backends.api import BackendError, QuantizedWeight
from stoker.backends.gguf_blocks import BLOCK_TYPES, regrouped
from stoker.backends.quantized import check, dequantize

types = pytest.mark.parametrize("gguf_type", BLOCK_TYPES)


@types
def test_values_are_those_of_the_gguf_package(gguf_type):
    weight = random_gguf(gguf_type, 7, 768)
    kind = gguf.GGMLQuantizationType[gguf_type]
    block = BLOCK_TYPES[gguf_type]
    assert (block.size, block.num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    want = torch.from_numpy(gguf.quants.dequantize(weight.codes.numpy(), kind))
    assert want.std() > 0.01
    assert torch.equal(dequantize(weight), want)
    assert torch.equal(dequantize(weight, torch.bfloat16), want.bfloat16())
    assert torch.equal(dequantize(weight, torch.float64), want.double())


@types
def test_regrouped_weights_have_the_same_values(gguf_type):
    weight = random_gguf(gguf_type, 6, 512)
    other = regrouped(weight)
    assert other.kind == ("uint4" if BLOCK_TYPES[gguf_type].bits == 4 else "int8")
    assert other.scales.dtype == torch.float32 and other.scales.is_contiguous()
    assert other.scales.shape == (6, 512 // other.block[1])
    assert other.codes.is_contiguous()
    torch.testing.assert_close(dequantize(other), dequantize(weight), rtol=0, atol=0)


@types
def test_regrouped_experts(gguf_type):
    one = random_gguf(gguf_type, 4, 256)
    both = QuantizedWeight("gguf", torch.stack((one.codes, one.codes.flip(0))), (2, 4, 256),
                           gguf_type=gguf_type)  # fmt: skip
    want = torch.stack((dequantize(one), dequantize(one).flip(0)))
    assert torch.equal(dequantize(both), want)
    assert torch.equal(dequantize(regrouped(both)), want)


def test_an_unknown_type_is_refused():
    with pytest.raises(BackendError, match="GGUF's IQ2_XXS"):
        check(QuantizedWeight("gguf", torch.zeros(2, 66), (2, 256), gguf_type="IQ2_XXS"))
