"""Quantized products: run by `test_triton_interpreted.py`, with the interpreter."""

from dataclasses import replace

import pytest
import torch

from stoker.backends import gguf_blocks
from stoker.backends import quantized as oracle
from stoker.backends.api import BackendError, QuantizedWeight
from stoker.backends.triton import codes, quantized
from stoker.backends.triton.quantized import Tile

BF16 = torch.bfloat16
# kind, block (0 for all), activations, has offsets
SCHEMES = {
    "fp8 a16": ("fp8", (0, 0), None, False),
    "fp8 blocks a16": ("fp8", (32, 64), None, False),
    "int8 a16": ("int8", (1, 0), None, False),
    "int8 g16": ("int8", (1, 16), None, True),
    "uint4 g32": ("uint4", (1, 32), None, True),
    "uint4 g128": ("uint4", (1, 128), None, True),
    "uint4 channel": ("uint4", (1, 0), None, True),
    "uint4 g32, zero points": ("uint4", (1, 32), None, True),
    "uint4 g32, symmetric": ("uint4", (1, 32), None, False),
    "mxfp4": ("mxfp4", (1, 32), None, False),
    "fp8": ("fp8", (1, 0), "token", False),
    "fp8 tensor": ("fp8", (0, 0), "tensor", False),
    "fp8 blocks": ("fp8", (32, 64), "group", False),
    "int8": ("int8", (1, 0), "token", False),
}


def make(name, num_out, num_in, num_experts=0, seed=0):
    """A weight of random codes, each of which occurs; its values are about 1 / sqrt(num_in)."""
    kind, block, activations, has_offsets = SCHEMES[name]
    gen = torch.Generator().manual_seed(seed)
    block = block[0] or num_out, block[1] or num_in
    lead = (num_experts,) if num_experts else ()
    groups = (*lead, -(-num_out // block[0]), -(-num_in // block[1]))
    size = (*lead, num_out, num_in)
    scales = torch.rand(groups, generator=gen) + 0.5
    if kind in ("uint4", "mxfp4"):
        four_bits = torch.randint(0, 16, size, generator=gen)
        raw, spread = oracle.pack_nibbles(four_bits), 4.6 if kind == "uint4" else 2.9
    elif kind == "int8":
        raw, spread = torch.randint(-127, 128, size, generator=gen).to(torch.int8), 73.0
    else:
        raw = (torch.randn(size, generator=gen) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        spread = 100.0
    scales /= spread * num_in**0.5
    if kind == "mxfp4":
        scales = torch.exp2(
            torch.log2(scales).round() + torch.randint(-3, 4, groups, generator=gen)
        )
    levels, has_zeros = torch.rand(groups, generator=gen) * 15, "zero points" in name
    if has_zeros:
        scales, levels = scales.half().float(), levels.round()
    offsets = -scales * levels if has_offsets else None
    fixed = torch.tensor([0.01]) if activations == "tensor" else None
    return QuantizedWeight(
        kind, raw, size, scales, offsets, block, activations, fixed, has_zero_points=has_zeros
    )


def error(got, want):
    """Relative, of all outputs together."""
    return float((got.double() - want).norm() / want.norm())


def random(*shape, dtype=BF16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows, dtype", [(1, BF16), (3, torch.float32), (65, BF16)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name, num_rows, dtype):
    """Sizes that no block divides; float32 results, so that only the weights are rounded."""
    weight = make(name, 70, 320)
    x = random(num_rows, 328, dtype=dtype)[:, :320]
    bias = random(70, dtype=dtype)
    packed = quantized.pack_quantized(weight, bias)
    kept = weight
    if num_rows == 1 and packed.group == 0:  # is not rounded
        kept = replace(weight, activations=None)
    want = oracle.linear(x.double(), kept, bias.double(), None)
    got = quantized.quantized_linear(x, packed, torch.float32)
    assert error(got, want) < (3e-3 if dtype == BF16 else 6e-4)
    assert quantized.quantized_linear(x, packed).dtype == dtype


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme[2] is None])
def test_a_weight_is_expanded_for_many_rows(name, monkeypatch):
    weight = make(name, 70, 320)
    packed = quantized.pack_quantized(weight, bias := random(70))
    got, want = quantized.expand(packed, BF16), oracle.dequantize(weight)
    assert got.shape == (70, 320) and error(got, want) < 6e-3
    monkeypatch.setattr(quantized, "EXPANDED_ROWS", 9)
    monkeypatch.setattr(quantized, "widened_linear", lambda *_: pytest.fail("few rows"))
    x = random(9, 328)[:, :320]
    known = oracle.linear(x.double(), weight, bias.double(), None)
    assert error(quantized.quantized_linear(x, packed), known) < 6e-3


def test_zero_points_are_subtracted_exactly():
    weight = make("uint4 g32, zero points", 48, 256)
    packed = quantized.pack_quantized(weight, None)
    assert packed.widened.kind == "uint4 zeros"
    want = oracle.dequantize(weight)
    for dtype, places in ((torch.float32, 23), (torch.float16, 10), (BF16, 7)):
        got = quantized.quantized_linear(torch.eye(256, dtype=dtype), packed, torch.float32)
        # No more than the roundings of the scale and of the product, near zero as elsewhere.
        torch.testing.assert_close(got.T, want, rtol=1.01 * 2.0**-places, atol=0)
        assert bool((got.T == 0).any())


@pytest.mark.parametrize("name", ["uint4 g32", "mxfp4", "int8 g16", "fp8", "fp8 blocks", "int8"])
def test_programs_that_share_the_columns(name):
    """The last one adds up; the counters serve the next launch."""
    weight = make(name, 64, 1024)
    packed, x = quantized.pack_quantized(weight, None), random(5, 1024)
    want = oracle.linear(x.double(), weight, None, None)
    for splits in (1, 2, 3):
        tile = Tile(16, 32, 128, 4, 3, splits)
        if packed.scaled is None:
            got = quantized.widened_linear(x, packed, torch.float32, tile)
        else:
            rounded = quantized.round_rows(x, packed.scaled.dtype, packed.group, None)
            got = quantized.scaled_linear(rounded, packed, torch.float32, tile)
        assert error(got, want) < 3e-3
        assert not packed.counters.any()


def test_the_order_of_the_inputs():
    weight = make("uint4 g32", 48, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    weight = replace(weight, order=order)
    x = random(4, 256)
    got = quantized.quantized_linear(x, quantized.pack_quantized(weight, None), torch.float32)
    assert error(got, oracle.linear(x.double(), weight, None, None)) < 3e-3


def test_scales_of_any_size():
    """Far below float16's; mxfp4 from the smallest to the largest; a group without any."""
    weight = make("uint4 g32", 16, 256)
    weight.scales.mul_(2.0**-30)
    weight.offsets.mul_(2.0**-30)
    x = random(2, 256, dtype=torch.float32)
    got = quantized.quantized_linear(x, quantized.pack_quantized(weight, None))
    assert error(got, oracle.linear(x.double(), weight, None, None)) < 5e-3
    weight = make("mxfp4", 16, 256)
    for exponents in (torch.arange(-100, 28), torch.arange(-126, 2)):
        weight.scales.copy_(torch.exp2(exponents.float()).view(16, 8))
        x = torch.zeros(8, 256)
        x[torch.arange(8), torch.arange(8) * 32 + 1] = 1.0  # a column of each group
        got = quantized.quantized_linear(x, quantized.pack_quantized(weight, None))
        assert torch.equal(got, oracle.dequantize(weight)[:, 1::32].T)
    weight = make("uint4 g32", 16, 64)
    weight.scales[:, 1] = 0.0
    got = quantized.quantized_linear(torch.eye(64), quantized.pack_quantized(weight, None))
    torch.testing.assert_close(got.T, oracle.dequantize(weight), rtol=2e-3, atol=1e-4)


def test_words_hold_every_code_in_every_plane():
    four_bits = torch.arange(16).repeat(1, 16).view(1, 4, 4, 16).transpose(0, 1).reshape(1, 256)
    for name in ("uint4 g32", "mxfp4"):
        weight = make(name, 1, 256)
        weight = QuantizedWeight(weight.kind, oracle.pack_nibbles(four_bits), (1, 256),
                                 torch.ones(1, 8), None, (1, 32))  # fmt: skip
        got = quantized.quantized_linear(torch.eye(256), quantized.pack_quantized(weight, None))
        assert torch.equal(got.T, oracle.dequantize(weight))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("group", [0, 32])
def test_activations_are_rounded_as_the_contract_says(group, kind):
    x = random(5, 200) * torch.tensor([[1e-3], [0.0], [1.0], [100.0], [1.0]])
    x[4, 7] = float("nan")
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    got = quantized.round_rows(x, dtype, group, None)
    weight = QuantizedWeight(kind, got.codes, (1, 200), block=(1, group or 200),
                             activations="group" if group else "token")  # fmt: skip
    want = oracle.round_activations(x[:4].float(), weight)
    scales = got.scales[:, :4].T.repeat_interleave(group or 200, 1)[:, :200]
    torch.testing.assert_close(got.codes[:4].float() * scales, want, rtol=1e-6, atol=0)
    assert got.scales[0, 4].isnan() and got.scales[1:, 4].isfinite().all()


def test_a_broken_token_breaks_no_other():
    for name in ("uint4 g32", "fp8", "int8"):
        packed = quantized.pack_quantized(make(name, 64, 256), None)
        x = random(20, 256)
        whole = quantized.quantized_linear(x, packed)
        x[2, 5] = float("nan")
        broken = quantized.quantized_linear(x, packed)
        assert broken[2].isnan().all()
        others = [0, 1, *range(3, 20)]
        assert torch.equal(broken[others], whole[others])


@pytest.mark.parametrize("gguf_type", gguf_blocks.BLOCK_TYPES)
def test_gguf_blocks_are_regrouped(gguf_type):
    block_type = gguf_blocks.BLOCK_TYPES[gguf_type]
    gen = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (24, 2, block_type.num_bytes), generator=gen, dtype=torch.uint8)
    for at in (208,) if gguf_type == "Q6_K" else (0, 2):  # where a factor of all may be
        blocks[..., at : at + 2] = torch.tensor([0.01]).half().view(torch.uint8)
    shape = (24, 2 * block_type.size)
    weight = QuantizedWeight("gguf", blocks.flatten(1), shape, gguf_type=gguf_type)
    x = random(3, shape[1], dtype=torch.float32)
    got = quantized.quantized_linear(x, quantized.pack_quantized(weight, None))
    want = x.double() @ gguf_blocks.dequantize(weight.codes, gguf_type).double().T
    assert error(got, want) < 1e-3


def test_what_has_no_kernel_says_so():
    for kind, block, reason in (
        ("int3", (1, 32), "kind 'int3'"),
        ("uint4", (1, 24), "groups of 24 columns"),
    ):
        weight = QuantizedWeight(kind, torch.zeros(8, 48, dtype=torch.uint8), (8, 96),
                                 torch.ones(8, 4), None, block)  # fmt: skip
        with pytest.raises(BackendError, match=reason):
            quantized.pack_quantized(weight, None)


def test_fp8_as_bytes_where_the_compiler_does_not_know_it(monkeypatch):
    monkeypatch.setattr(codes, "NO_FP8", ("interpreter",))
    monkeypatch.setattr(quantized, "NO_FP8", ("interpreter",))
    every = torch.arange(256, dtype=torch.uint8)
    every[127], every[255] = 0, 0  # NaN
    weight = QuantizedWeight("fp8", every.view(1, 256).view(torch.float8_e4m3fn), (1, 256),
                             torch.full((1, 1), 0.5), None, (1, 256), "token")  # fmt: skip
    packed = quantized.pack_quantized(weight, None)
    assert packed.widened.kind == "fp8 bits"
    got = quantized.quantized_linear(torch.eye(256), packed)
    assert torch.equal(got.T, oracle.dequantize(weight))


def test_rows_that_do_not_end_with_a_block_have_only_rounded_activations():
    packed = quantized.pack_quantized(make("fp8", 32, 200), None)
    assert packed.widened is None and packed.scaled.shape == (32, 200)
    x = random(2, 200)
    want = oracle.linear(x.double(), make("fp8", 32, 200), None, None)
    assert error(quantized.quantized_linear(x, packed, torch.float32), want) < 3e-3
    packed = quantized.pack_quantized(make("fp8 a16", 32, 200), None)
    want = oracle.linear(x.double(), make("fp8 a16", 32, 200), None, None)
    assert error(quantized.quantized_linear(x, packed, torch.float32), want) < 3e-3
