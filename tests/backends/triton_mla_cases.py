"""What the contract does not reach of latent attention: run by `test_triton_interpreted.py`."""

import numpy as np
import pytest
import torch
from cases import ORACLE, AttentionCase, build_attention, oracle_inputs

from stoker.backends.api import LayerCache, MLASpec
from stoker.backends.triton import mla
from stoker.backends.triton.arch import Arch
from stoker.backends.triton.flash import Tile


def spec_of(case: AttentionCase) -> MLASpec:
    rank = case.head_dim - 16
    return MLASpec(case.num_heads, rank, 16, rank, rank, case.head_dim**-0.5)


def attend(inputs, spec, **options):
    q_latent, q_rope = inputs.q.split([spec.rank, spec.rope_dim], 2)
    return mla.mla_attend(q_latent, q_rope, inputs.meta, inputs.cache, spec, **options)


def wanted(inputs, spec):
    known = oracle_inputs(inputs)
    q_latent, q_rope = known.q.split([spec.rank, spec.rope_dim], 2)
    return ORACLE.mla_attend(q_latent, q_rope, known.meta, known.cache, spec)


@pytest.mark.parametrize(("page_size", "tile"), [(16, None), (64, Tile(16, 32, 4, 1))])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_many_tokens_in_splits(page_size, tile, splits):
    """By pointers, and by descriptors of whole blocks but for the last."""
    case = AttentionCase("", [(1, 70), (9, 150), (3, 3), (40, 333)], page_size, 6, 1, 80)
    inputs, spec = build_attention(case, torch.bfloat16), spec_of(case)
    got = attend(inputs, spec, tile=tile, splits=splits)
    torch.testing.assert_close(got.double(), wanted(inputs, spec), rtol=2e-2, atol=2e-2)


def test_layers_share_a_plan():
    case = AttentionCase("", [(1, n) for n in (900, 5, 0, 130, 64)], 16, 4, 1, 80)
    inputs, spec = build_attention(case, torch.float32), spec_of(case)
    attend(inputs, spec)
    (plan,) = inputs.meta.plans[mla.PLAN_KEY].values()
    inputs.cache = LayerCache(inputs.cache.k.flip(3), inputs.cache.v)
    got, real = attend(inputs, spec), inputs.real_tokens
    assert inputs.meta.plans[mla.PLAN_KEY] == {(4, 64): plan}
    assert int(plan.parts[:, 1].max()) > 1
    want = wanted(inputs, spec)
    torch.testing.assert_close(got.double()[real], want[real], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("longest", [1, 300, 20_000])
def test_work_items_are_each_contexts_blocks_once(num_rows, longest):
    lens = np.random.default_rng(num_rows).integers(0, longest + 1, num_rows)
    case = AttentionCase("", [(1, 1)] * num_rows, 16, 4, 1, 32)
    meta = build_attention(case, torch.float32).meta
    meta.kv_lens = torch.from_numpy(lens.astype(np.int32))
    plan = mla.plan_decode(meta, spec_of(case), num_rows, 1, Arch("", 0, 16))
    work = plan.work.numpy()
    used = work[work[:, 0] >= 0]
    assert len(used) <= len(work) == num_rows + 32
    for row, length in enumerate(lens):
        first, count = plan.parts[row].tolist()
        items = work[first : first + count]
        assert (items[:, 0] == row).all() and (items[:, 1] == int(meta.slots[row])).all()
        starts, ends = items[:, 2].tolist(), items[:, 3].tolist()
        assert starts == [0, *ends[:-1]][:count] and [0, *ends][-1] == length
        assert all(start % mla.CHUNK_ALIGN == 0 for start in starts)
        assert (items[:, 4] == (count == 1)).all()
    assert len(used) == int(plan.parts[:, 1].sum())
    if num_rows == 1 and longest == 20_000:
        sizes = used[:, 3] - used[:, 2]
        assert len(used) > 16 and sizes.max() - sizes.min() <= sizes.max() / 2
