"""Experts: run by `test_triton_interpreted.py`, with the interpreter."""

import json

import pytest
import torch
from cases import ORACLE, TOLERANCE, moved, random_experts

from stoker.backends.triton import moe, moe_sort
from stoker.backends.triton.moe import Tile, Tiles

BF16 = torch.bfloat16


def random_pairs(num_tokens, num_experts, top_k, seed=0):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, num_experts, generator=gen)
    values, ids = scores.softmax(-1).topk(top_k)
    return ids.int(), values


@pytest.mark.parametrize("chunks", [(32,), (16, 64), moe_sort.CHUNKS])
@pytest.mark.parametrize("tile_rows", [4, 16])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (9, 5, 2), (70, 12, 3)])
def test_pairs_are_sorted_into_tiles(
    num_tokens, num_experts, top_k, tile_rows, chunks, monkeypatch
):
    monkeypatch.setattr(moe_sort, "CHUNKS", chunks)
    monkeypatch.setattr(moe_sort, "MATCH_ELEMENTS", 256)
    ids, _ = random_pairs(num_tokens, num_experts - 1, top_k)  # one expert has none
    if num_tokens == 9:
        ids[:] = torch.tensor([3, 1])
    order, tiles = moe_sort.sort_pairs(ids, num_experts, tile_rows)
    by_pair = ids.flatten()
    assert order.tolist() == by_pair.argsort(stable=True).tolist()
    used = tiles[:, tiles[0] < num_experts].T.tolist()
    want = []
    for expert in range(num_experts):
        begin, end = int((by_pair < expert).sum()), int((by_pair <= expert).sum())
        want += [[expert, place, end] for place in range(begin, end, tile_rows)]
    assert used == want
    assert (tiles[0, len(want) :] >= num_experts).all()


TILES = {
    "one by one": Tile(1, 8, 32, 2, 3),
    "left": Tile(16, 32, 32, 4, 3),
    "swapped": Tile(16, 64, 32, 4, 3, swapped=True),
    "described": Tile(16, 32, 16, 4, 3, described=True),
    "described, swapped": Tile(32, 16, 32, 4, 3, swapped=True, described=True),
}


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("hidden, inner", [(64, 32), (40, 24)])
def test_every_kind_of_tile(hidden, inner, kind):
    """Most experts have a tile and some rows; blocks reach over their ends."""
    num_tokens = 3 if TILES[kind].rows == 1 else 21
    weights = random_experts(4, hidden, inner, "swiglu_clamped", True)
    ids, scales = random_pairs(num_tokens, 4, 2)
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(1)).to(BF16)
    packed = moe.pack_experts(moved(weights, "cpu", BF16))
    got = moe.experts(x, ids, scales, packed, Tiles(TILES[kind], TILES[kind]))
    known = moved(moved(weights, "cpu", BF16), "cpu", torch.float64)
    want = ORACLE.experts(x.double(), ids, scales.double(), known)
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[BF16], atol=4 * TOLERANCE[BF16])


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("hidden, inner", [(64, 32), (40, 24)])
def test_experts_of_a_norm_are_added_to_the_residual(hidden, inner, num_tokens):
    """In the kernels of one token, and beside those of many."""
    generator = torch.Generator().manual_seed(1)
    weights = random_experts(4, hidden, inner, "silu", True)
    ids, scales = random_pairs(num_tokens, 4, 2)
    residual = torch.randn(num_tokens, hidden, generator=generator).to(BF16)
    norm = torch.rand(hidden, generator=generator).to(BF16)
    want = residual.double()
    known = ORACLE.pack_experts(moved(moved(weights, "cpu", BF16), "cpu", torch.float64))
    ORACLE.norm_experts_add(want, norm.double(), 1e-2, ids, scales.double(), known)
    packed = moe.pack_experts(moved(weights, "cpu", BF16))
    moe.norm_experts_add(residual, norm, 1e-2, ids, scales, packed)
    torch.testing.assert_close(
        residual.double(), want, rtol=TOLERANCE[BF16], atol=4 * TOLERANCE[BF16]
    )


SHAPES = {  # num_experts, top_k, hidden, inner
    "gpt-oss-20b": (6, 4, 192, 192, "swiglu_clamped", True),  # 2880 is 22.5 blocks of 128
    "deepseek-v2-lite": (8, 6, 96, 88, "silu", False),  # 1408 is 5.5 blocks of 256
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_shapes_that_blocks_do_not_divide(num_tokens, shape):
    """As in these models, by the default tiles."""
    num_experts, top_k, hidden, inner, activation, has_bias = SHAPES[shape]
    weights = random_experts(num_experts, hidden, inner, activation, has_bias)
    ids, scales = random_pairs(num_tokens, num_experts, top_k)
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(1)).to(BF16)
    packed = moe.pack_experts(moved(weights, "cpu", BF16))
    known = moved(moved(weights, "cpu", BF16), "cpu", torch.float64)
    near = dict(rtol=TOLERANCE[BF16], atol=4 * TOLERANCE[BF16])
    want = ORACLE.experts(x.double(), ids, scales.double(), known)
    got = moe.experts(x, ids, scales, packed)
    torch.testing.assert_close(got.double(), want, **near)
    if num_tokens == 1:
        norm, wide = torch.full((hidden,), 0.5, dtype=BF16), x.double()
        ORACLE.norm_experts_add(wide, norm.double(), 1e-2, ids, scales.double(), known)
        moe.norm_experts_add(x, norm, 1e-2, ids, scales, packed)
        torch.testing.assert_close(x.double(), wide, **near)


def test_a_broken_token_breaks_no_other():
    weights = moved(random_experts(4, 64, 32, "silu", False), "cpu", BF16)
    packed = moe.pack_experts(weights)
    ids, scales = random_pairs(12, 4, 2)
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    whole = moe.experts(x, ids, scales, packed)
    x[3] = float("nan")
    broken = moe.experts(x, ids, scales, packed)
    assert broken[3].isnan().all()
    others = [token for token in range(12) if token != 3]
    assert torch.equal(broken[others], whole[others])


def test_tiles_come_from_the_table_where_it_has_the_shape(tmp_path, monkeypatch):
    shape = (128, 768, 2048)
    small, large = Tiles(Tile(1, 8, 64, 2, 3), Tile(1, 8, 64, 2, 3)), moe.default_tiles(999, 8, 2)
    table = {"interpreter": {moe.table_key(*shape, BF16): {"16": small, "4096": large}}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(moe, "TABLE", path)
    moe._table.cache_clear()
    moe.choose_tiles.cache_clear()
    try:
        assert moe.choose_tiles(8, 8, *shape, BF16) == small
        assert moe.choose_tiles(17, 8, *shape, BF16) == large
        assert moe.choose_tiles(9999, 8, *shape, BF16) == large
        assert moe.choose_tiles(8, 8, *shape, torch.float32) == moe.default_tiles(8, 128, 8)
    finally:
        moe._table.cache_clear()
        moe.choose_tiles.cache_clear()


def test_default_tiles():
    def rows(num_tokens, num_experts=128, top_k=8):
        return moe.default_tiles(num_tokens * top_k, num_experts, top_k).gate_up.rows

    assert [rows(n) for n in (1, 2, 3, 64, 257, 769, 8192)] == [1, 1, 16, 16, 32, 64, 128]
    assert [rows(n, 8, 2) for n in (1, 2, 64)] == [1, 16, 16]
