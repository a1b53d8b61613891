"""The oracle itself, against formulas written another way."""

import pytest
import torch
import torch.nn.functional as F
from cases import ORACLE, AttentionCase, build_attention, make_rope

from stoker.backends import reference
from stoker.backends.api import DenseRows, MLASpec
from stoker.backends.reference import uniform

U64 = 2**64 - 1


def splitmix64(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


@pytest.mark.parametrize("num_logits", [1, 3 * 50 * 7])
def test_dense_latent_attention_in_blocks_of_tokens(num_logits, monkeypatch):
    q_lens, kv_lens = torch.tensor([0, 30, 40]), torch.tensor([0, 50, 53])
    rows = DenseRows(q_lens.int(), kv_lens.int(), torch.tensor([20, -3], dtype=torch.int32))
    spec = MLASpec(3, 32, 16, 24, 20, 0.2)
    gen = torch.Generator().manual_seed(0)
    shapes = (40, 3, 40), (53, 3, 44), (53, 16)
    tensors = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    want = ORACLE.mla_attend_dense(*tensors, rows, spec)
    monkeypatch.setattr(reference, "DENSE_LOGITS", num_logits)
    for got, expected in zip(ORACLE.mla_attend_dense(*tensors, rows, spec), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert want[1].isinf().sum() == 3 * 3  # three tokens before the first key


def test_uniform_is_splitmix64():
    # The published generator seeded with 0 begins with this number.
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    positions = [0, 1, 7, 4095, 2**31 - 1, 3]
    want = [
        (splitmix64((splitmix64(s & U64) + (p + 1) * 0x9E3779B97F4A7C15) & U64) >> 40) / 2**24
        for s, p in zip(seeds, positions, strict=True)
    ]
    got = uniform(torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32))
    assert got.tolist() == want
    assert uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1)).item() == 0xE220A8 / 2**24


@pytest.mark.parametrize("window", [None, 5])
def test_attend_is_scaled_dot_product_attention(window):
    case = AttentionCase("", [(1, 20), (4, 9), (17, 17)], 4, 6, 2, 32, window)
    x = build_attention(case, torch.float64)
    got = ORACLE.attend(x.q, x.meta, x.cache, x.spec)
    for row, (q_len, kv_len) in enumerate(case.rows):
        begin = int(x.meta.qo_indptr[row])
        pages = x.meta.block_table[x.meta.slots[row]][: -(-kv_len // 4)].long()
        k, v = (pool[pages].flatten(0, 1)[:kv_len].transpose(0, 1) for pool in x.cache)
        k, v = (t.repeat_interleave(3, dim=0) for t in (k, v))
        mask = torch.ones(kv_len, kv_len, dtype=torch.bool).tril()
        if window:
            mask &= torch.ones(kv_len, kv_len, dtype=torch.bool).triu(1 - window)
        q = x.q[begin : begin + q_len].transpose(0, 1)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[-q_len:])
        torch.testing.assert_close(
            got[begin : begin + q_len], want.transpose(0, 1).flatten(1), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved):
    case = AttentionCase("", [(9, 30)], 4, 3, 1, 16)
    x = build_attention(case, torch.float64)
    rope = make_rope(8, interleaved)
    before = x.q.clone()
    q = ORACLE.write_qkv(x.qkv, x.meta, x.cache, x.spec, rope, None, None, 1e-6)
    pairs = (
        (lambda t: (t[..., 0:8:2], t[..., 1:8:2]))
        if interleaved
        else (lambda t: (t[..., :4], t[..., 4:8]))
    )
    cos, sin = rope.cos_sin.double()[x.meta.positions].chunk(2, dim=-1)
    turned = torch.complex(*pairs(before)) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(torch.complex(*pairs(q)), turned, rtol=0, atol=1e-12)
    assert torch.equal(q[..., 8:], before[..., 8:])


def test_norms_and_activations_are_torchs():
    x = torch.randn(5, 64, dtype=torch.float64)
    weight = torch.randn(64, dtype=torch.float64)
    torch.testing.assert_close(
        ORACLE.rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5), rtol=0, atol=1e-12
    )
    gate, up = x[:, :32], x[:, 32:]
    torch.testing.assert_close(ORACLE.silu_and_mul(x), gate * gate.sigmoid() * up)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(ORACLE.gelu_and_mul(x), gate * (1 + tanh) / 2 * up)
