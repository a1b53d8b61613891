"""Experts: run by `test_triton_interpreted.py`, with the interpreter."""

import json

import pytest
import torch
from cases import ORACLE, TOLERANCE, moved, random_experts

from stoker.backends.triton import moe
from stoker.backends.triton.moe import Tile, Tiles

BF16 = torch.bfloat16


def random_pairs(num_tokens, num_experts, top_k, seed=0):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, num_experts, generator=gen)
    values, ids = scores.softmax(-1).topk(top_k)
    return ids.int(), values


@pytest.mark.parametrize("chunks", [(32,), (16, 64), moe.CHUNKS])
@pytest.mark.parametrize("tile_rows", [4, 16])
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 8, 2), (9, 5, 2), (70, 12, 3)])
def test_pairs_are_sorted_into_tiles(
    num_tokens, num_experts, top_k, tile_rows, chunks, monkeypatch
):
    monkeypatch.setattr(moe, "CHUNKS", chunks)
    monkeypatch.setattr(moe, "MATCH_ELEMENTS", 256)
    ids, _ = random_pairs(num_tokens, num_experts - 1, top_k)  # one expert has none
    if num_tokens == 9:
        ids[:] = torch.tensor([3, 1])
    order, tiles = moe.sort_pairs(ids, num_experts, tile_rows)
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
