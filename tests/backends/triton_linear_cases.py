"""Products of few rows: run by `test_triton_interpreted.py`, with the interpreter."""

import pytest
import torch
from cases import ORACLE, TOLERANCE

from stoker.backends.cuda import CublasOps
from stoker.backends.triton import linear
from stoker.backends.triton.linear import Tile

EPS = 1e-5
TILES = {1: Tile(8, 64, 4, 3), 3: Tile(16, 64, 4, 3), 8: Tile(16, 32, 4, 3)}
KINDS = {
    "plain": {},
    "norm": {"norm": True},
    "add": {"add": True},
    "silu": {"gate": "silu", "norm": True},
    "gelu": {"gate": "gelu_tanh", "norm": True},
    "all": {"gate": "silu", "norm": True, "add": True},
}


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", TILES)
@pytest.mark.parametrize("num_out, num_in", [(48, 128), (61, 200)])
def test_every_fusion(num_out, num_in, num_rows, kind, has_bias, dtype):
    torch.manual_seed(num_out + num_rows)
    fusion = dict(KINDS[kind])
    gate = fusion.get("gate", "")
    x = random(num_rows, num_in + 8, dtype=dtype)[:, :num_in]
    weight = random(num_out * (2 if gate else 1), num_in, dtype=dtype) / num_in**0.5
    bias = random(len(weight), dtype=dtype) if has_bias else None
    out = random(num_rows, num_out, dtype=torch.float32 if kind == "norm" else dtype)
    norm = None
    if fusion.pop("norm", False):
        norm = random(num_in, dtype=torch.float32 if kind == "gelu" else dtype)

    want = x.double() if norm is None else ORACLE.rms_norm(x.double(), norm.double(), EPS)
    want = ORACLE.linear(want, (weight.double(), None if bias is None else bias.double()))
    if gate:
        want = (ORACLE.silu_and_mul if gate == "silu" else ORACLE.gelu_and_mul)(want)
    if "add" in fusion:
        want += out.double()
    tile = TILES[num_rows]
    got = linear.linear(x, weight, bias, out, tile, norm=norm, eps=EPS, **fusion)
    assert got is out
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_the_ops_of_few_rows(num_rows, has_bias, monkeypatch):
    """CublasOps by its kernel, as far as that goes."""
    monkeypatch.setattr(linear, "SOME_ROWS", TILES[3])
    ops = CublasOps()
    weight = random(256, 100) / 10
    norm, x = random(100), random(num_rows, 100)
    bias = random(256) if has_bias else None
    packed = ops.pack_linear(weight, bias)
    known = (weight.double(), None if bias is None else bias.double())

    def near(got, want):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=4e-2)

    want = ORACLE.norm_linear(x.double(), norm.double(), EPS, known)
    near(ops.norm_linear(x, norm, EPS, packed), want)
    logits = ops.norm_linear(x, norm, EPS, packed, torch.float32)
    assert logits.dtype == torch.float32
    near(logits, want)
    for activation in ("silu", "gelu_tanh"):
        want = ORACLE.norm_gated_linear(x.double(), norm.double(), EPS, known, activation)
        near(ops.norm_gated_linear(x, norm, EPS, packed, activation), want)
    residual = random(num_rows, 256)
    want = residual.double() + ORACLE.linear(x.double(), known)
    ops.linear_add(x, packed, residual)
    near(residual, want)
    near(ops.linear(x, packed), ORACLE.linear(x.double(), known))


def test_which_products_the_kernel_takes():
    def tile(num_rows, num_out, has_norm=True, dtype=torch.bfloat16):
        weight = torch.empty(num_out, 4096, dtype=dtype, device="meta")
        return linear.choose_tile(num_rows, weight, has_norm=has_norm)

    assert tile(1, 6144) == tile(1, 6144, has_norm=False) == linear.Tile(16, 256, 4, 6)
    assert tile(1, 28672) == tile(1, 128_256) == tile(1, linear.MANY_OUTPUTS) == linear.ONE_ROW
    assert tile(1, 128) == tile(1, 512) == linear.Tile(2, 1024, 4, 4) != tile(1, 513)
    assert tile(2, 6144) == tile(8, 28672) == linear.SOME_ROWS
    assert tile(8, 4096, has_norm=False) is None
    assert tile(8, 128_256) is None
    assert tile(2, 64) is None  # one program
    assert tile(9, 6144) is tile(0, 6144) is tile(1, 6144, dtype=torch.float32) is None
