"""What the contract does not reach of latent attention: run by `test_triton_interpreted.py`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import ORACLE, AttentionCase, build_attention, make_rope, oracle_inputs

from stoker.backends.api import LayerCache, MLASpec
from stoker.backends.cpu import CpuRuntime
from stoker.backends.cpu.torch_ops import TorchOps
from stoker.backends.triton import TritonOps, mla
from stoker.backends.triton.arch import Arch
from stoker.backends.triton.flash import Tile
from stoker.engine.core.plan import StepPlan
from stoker.engine.models.latent import LatentAttention
from stoker.engine.models.parameters import Parameters
from stoker.engine.models.registry import parse_config
from stoker.engine.runtime.graphs import StepGraphs
from stoker.engine.runtime.inputs import GraphShape, Inputs
from stoker.engine.runtime.sampler import SlotTable


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


TINY = dict(architectures=["DeepseekV2ForCausalLM"], hidden_size=32, intermediate_size=32)
TINY |= dict(num_hidden_layers=1, num_attention_heads=4, vocab_size=100, num_experts_per_tok=1)
TINY |= dict(first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16)
TINY |= dict(qk_rope_head_dim=16, v_head_dim=16, max_position_embeddings=512)


def block(ops) -> LatentAttention:
    """A layer's attention with the same random weights each time."""
    parameters = Parameters(ops, torch.device("cpu"), torch.float32)
    made = LatentAttention("a", parse_config(TINY), make_rope(16, True), parameters)
    gen = torch.Generator().manual_seed(0)
    shapes = parameters.shapes.items()
    parameters.load((name, torch.randn(shape, generator=gen) / 4) for name, shape in shapes)
    return made


class Recorder:
    """Captures a step by keeping the function, which then finds its inputs where they were."""

    def capture(self, function):
        function()
        return function


def step_plan(q_lens, kv_lens, num_decode_rows) -> StepPlan:
    """Rows of the slots 1, 2, ..., each with 12 pages of its own."""
    q_lens, kv_lens = np.array(q_lens, np.int32), np.array(kv_lens, np.int32)
    slots = np.arange(1, len(q_lens) + 1, dtype=np.int32)
    return StepPlan(
        step=0,
        slots=slots,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decode_rows=num_decode_rows,
        tokens=np.arange(q_lens.sum(), dtype=np.int32) * 3,
        samples=np.ones(len(slots), bool),
        prompt_logprobs=-np.ones(len(slots), np.int32),
        page_slots=slots.repeat(12),
        page_indices=np.tile(np.arange(12, dtype=np.int32), len(slots)),
        page_ids=np.arange(12 * len(slots), dtype=np.int32)[::-1].copy(),
    )


def test_captured_steps_serve_any_lengths():
    """Decode rows, and chunks with decode rows among them: padded, absorbed, of unknown lengths."""
    gen = torch.Generator().manual_seed(1)
    ours = block(SimpleNamespace(**{
        name: getattr(provider, name)
        for provider in (TorchOps(), TritonOps()) for name in dir(provider) if name[0] != "_"
    }))  # fmt: skip
    pool = torch.randn(64, 16, 1, 48, generator=gen)
    cache = LayerCache(pool, pool[..., :0])
    states = torch.randn(100, 16 + 48, generator=gen)

    def forward(step):
        inputs.apply(step)
        return ours(states[step.tokens], step.meta, cache)

    inputs = Inputs(CpuRuntime(), num_slots=6, max_pages=16, page_size=16, max_step_tokens=32)
    table = SlotTable(6, 100)
    graphs = StepGraphs(Recorder(), inputs, table, forward, 4, 32)
    for plan, expected in (
        (step_plan([1, 1, 1], [150, 1, 33], 3), GraphShape(4)),
        (step_plan([1, 9, 5], [77, 160, 5], 1), GraphShape(0, 8, 32)),
        (step_plan([1, 1, 30], [20, 191, 31], 2), GraphShape(0, 8, 32)),
    ):
        kept = pool.clone()
        plain = inputs.stage(plan, table)
        want = block(TorchOps())(states[plain.tokens], plain.meta, LayerCache(kept, kept[..., :0]))
        shape = graphs.shape_for(plan)
        assert shape == expected
        inputs.restage(plan, table, shape)
        got = graphs.replay(shape)[: len(want)]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool, kept, rtol=1e-5, atol=1e-5)
