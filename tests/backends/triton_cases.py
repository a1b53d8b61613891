"""What the contract does not reach: run by `test_triton_interpreted.py`, with the interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import ORACLE, AttentionCase, build_attention, oracle_inputs, sampling_rows

from stoker.backends.api import SHARED_TILE_ROWS, AttentionSpec, LayerCache, SharedPrefixes
from stoker.backends.cpu import CpuRuntime
from stoker.backends.reference import uniform
from stoker.backends.triton import attention, decode, extend, fused, sampling, shared
from stoker.engine.core.plan import StepPlan
from stoker.engine.runtime import inputs as staging
from stoker.engine.runtime.graphs import StepGraphs
from stoker.engine.runtime.inputs import GraphShape, Inputs, num_shared_tiles, tile_shared_groups
from stoker.engine.runtime.sampler import SlotTable


def share(meta, groups):
    """Describe groups of (rows, length) to the kernels, as the runner does."""
    num_tiles = num_shared_tiles(meta.num_rows)
    arrays = [np.empty((num_tiles, SHARED_TILE_ROWS), np.int32), np.empty(num_tiles, np.int32)]
    arrays.append(np.empty(meta.num_rows, np.int32))
    tile_shared_groups(groups, *arrays)
    meta.shared = SharedPrefixes(*map(torch.from_numpy, arrays))


def shared_batch(dtype, groups, page_size=16, window=None, has_sinks=False, num_heads=8):
    """Decode rows whose contexts begin with the same pages, group by group."""
    rows = [(1, length + extra) for _, length, extras in groups for extra in extras]
    case = AttentionCase("shared", rows, page_size, num_heads, 2, 64, window, None, has_sinks)
    inputs = build_attention(case, dtype)
    row, shared_groups = 0, []
    for name, length, extras in groups:
        members = np.arange(row, row + len(extras), dtype=np.int32)
        slots = inputs.meta.slots[members].long()
        pages = length // page_size
        inputs.meta.block_table[slots, :pages] = inputs.meta.block_table[slots[0], :pages]
        if name:
            shared_groups.append((members, length))
        row += len(extras)
    share(inputs.meta, shared_groups)
    return inputs


GROUPS = [
    ("alone", 0, [40, 3]),
    ("first", 160, [1, 17, 33]),
    ("second", 288, [3, 40, *range(1, 16)]),
]


@pytest.mark.parametrize("kind", ["float32", "bfloat16 sinks", "bfloat16 window", "wide group"])
def test_a_shared_prefix_read_once_changes_nothing(kind, monkeypatch):
    monkeypatch.setattr(decode, "MIN_CHUNK", 32)  # so that some rows have several items
    monkeypatch.setattr(decode, "CHUNK_ALIGN", 32)
    groups = [("" if name == "alone" else name, *rest) for name, *rest in GROUPS]
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    window = 30 if "window" in kind else None
    num_heads = 18 if kind == "wide group" else 8  # 9 a KV head: a tile is read in four parts
    page_size = 32 if "bfloat16" in kind else 16  # pages that hold whole blocks of keys, or parts
    inputs = shared_batch(dtype, groups, page_size, window, "sinks" in kind, num_heads)
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, oracle.cache, oracle.spec)
    for _ in range(2 if kind == "float32" else 1):  # another layer: the same plan and counters
        got = attention.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    (plan,) = inputs.meta.plans[decode.PLAN_KEY].values()
    assert (plan.shared is None) == ("window" in kind)
    if plan.shared is not None:
        rows, starts = plan.work[:, 0], plan.work[:, 2]
        assert int(starts[rows >= 5].min()) == 288
        assert int(plan.work[:, 5].max()) > 1


class Recorder:
    """Captures a step by keeping the function, which then finds its inputs where they were."""

    def capture(self, function):
        function()
        return function


def test_shared_prefixes_in_captured_steps(monkeypatch):
    """One captured step serves any groups of any rows, with padding."""
    spec = AttentionSpec(4, 2, 32, 0.2)
    gen = torch.Generator().manual_seed(0)
    cache = LayerCache(*(torch.randn(64, 16, 2, 32, generator=gen) for _ in range(2)))
    queries = torch.randn(100, 4, 32, generator=gen)

    def forward(step):
        inputs.apply(step)
        return attention.attend(queries[step.tokens], step.meta, cache, spec)

    inputs = Inputs(CpuRuntime(), num_slots=9, max_pages=24, page_size=16, max_step_tokens=8)
    table = SlotTable(9, 100)
    graphs = StepGraphs(Recorder(), inputs, table, forward, 8, 1)
    for groups in ([(1, 2, 4)], [(0, 5), (1, 2, 3)], [(0, 1, 2, 3, 4, 5)]):
        pages = np.stack([20 + 4 * row + np.arange(12) for row in range(6)]) % 64
        for i, rows in enumerate(groups):
            pages[list(rows), :8] = np.arange(8) + 8 * i
        slots = np.arange(1, 7, dtype=np.int32)
        plan = StepPlan(
            step=0,
            slots=slots,
            q_lens=np.ones(6, np.int32),
            kv_lens=np.array([150, 129, 140, 192, 161, 130], np.int32),
            num_decode_rows=6,
            tokens=slots * 7,
            samples=np.ones(6, bool),
            prompt_logprobs=-np.ones(6, np.int32),
            page_slots=slots.repeat(12),
            page_indices=np.tile(np.arange(12, dtype=np.int32), 6),
            page_ids=pages.reshape(-1).astype(np.int32),
            shared_groups=[(np.array(rows, np.int32), 128) for rows in groups],
        )
        plain = inputs.stage(plan, table)
        assert plain.meta.shared is None
        want = ORACLE.attend(
            queries[plain.tokens].double(),
            plain.meta,
            LayerCache(*(x.double() for x in cache)),
            spec,
        )
        monkeypatch.setattr(staging, "MIN_SAVED_TOKENS", 128)
        shape = graphs.shape_for(plan)
        assert shape == GraphShape(8, is_shared=True)
        inputs.restage(plan, table, shape)
        torch.testing.assert_close(graphs.replay(shape)[:6].double(), want, rtol=2e-5, atol=2e-5)
        monkeypatch.undo()


def test_a_program_s_share_of_a_tile():
    rows = {group: shared.rows_per_program(group) for group in (1, 3, 4, 5, 8, 9, 64, 71)}
    assert rows == {1: 16, 3: 16, 4: 16, 5: 8, 8: 8, 9: 4, 64: 1, 71: 1}


def test_lse_merges_two_halves_of_a_context():
    case = AttentionCase("lse", [(1, 300), (1, 33), (5, 90)], 16, 4, 2, 64, None, None, True)
    inputs = build_attention(case, torch.float32)
    lse = torch.full((7, 4), math.nan)
    attention.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec, lse=lse)
    oracle = oracle_inputs(inputs)
    k = oracle.cache.k.flatten(0, 1)
    for token, (row, seen) in enumerate([(0, 300), (1, 33), *((2, 86 + i) for i in range(5))]):
        at = torch.arange(seen)
        table = oracle.meta.block_table[oracle.meta.slots[row]]
        keys = k[table[at // 16].long() * 16 + at % 16]
        for head in range(4):
            logits = keys[:, head // 2] @ oracle.q[token, head] * oracle.spec.scale
            assert math.isclose(lse[token, head], logits.logsumexp(0), abs_tol=1e-4)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_cache(kind):
    """As the reference has it: what is written, to the bit, and what is read."""
    case = AttentionCase("fp8", [(1, 300), (1, 33), (1, 0), (20, 90)], 16, 4, 2, 64)
    inputs = build_attention(case, torch.bfloat16)
    spec = replace(inputs.spec, kv_dtype=kind, k_scale=0.03, v_scale=0.5)
    limit = torch.finfo(kind).max
    scales = (spec.k_scale, spec.v_scale)
    pools = [(p.float() / s).clamp(-limit, limit).to(kind)
             for p, s in zip(inputs.cache, scales, strict=True)]  # fmt: skip
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, LayerCache(*pools), spec)
    got = attention.attend(inputs.q, inputs.meta, LayerCache(*pools), spec)
    real = inputs.real_tokens
    torch.testing.assert_close(got.double()[real], want[real], rtol=2e-2, atol=2e-2)

    written, known = (LayerCache(*(torch.zeros_like(p) for p in pools)) for _ in "ab")
    fused.write_qkv(inputs.qkv.clone(), inputs.meta, written, spec, None, None, None, 1e-6)
    ORACLE.write_qkv(inputs.qkv.clone(), inputs.meta, known, spec, None, None, None, 1e-6)
    for new, old in zip(written, known, strict=True):
        assert torch.equal(new.view(torch.uint8), old.view(torch.uint8))
        assert new.view(torch.uint8).any()


def test_work_items_are_bounded_and_cover_each_context_once():
    lengths = [1, 5000, 0, 128, 129, 700, 0, 33]
    case = AttentionCase("plan", [(1, n) for n in lengths], 16, 2, 1, 16)
    inputs = build_attention(case, torch.float32)
    attention.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
    plan = next(iter(inputs.meta.plans[decode.PLAN_KEY].values()))
    used = int((plan.work[:, 0] >= 0).sum())
    assert (plan.work[used:, 0] == -1).all()
    assert int(plan.counters.abs().sum()) == 0
    for row, length in enumerate(lengths):
        items = plan.work[plan.work[:, 0] == row].tolist()
        assert {tuple(item[4:6]) for item in items} <= {(plan.work[:, 0].tolist().index(row)
                                                         if items else 0, len(items))}  # fmt: skip
        ends = [item[3] for item in items]
        assert [item[2] for item in items] == [0, *ends][: len(items)]
        assert (ends[-1] if items else 0) == length
    assert (plan.work[:, 0] == 1).sum() > 3


EXTENDS = {
    "dense": [(40, 300), (130, 140), (1, 5)],
    "pages": [(40, 300), (130, 140), (1, 5)],
    "split": [(5, 90), (3, 300), (7, 7)],
    "dense split": [(40, 300), (20, 40)],
}


@pytest.mark.parametrize("kind", EXTENDS)
def test_extend_by_descriptors_and_in_splits(kind, monkeypatch):
    monkeypatch.setattr(extend, "DENSE_MIN_TOKENS", 1 if kind.startswith("dense") else 10**9)
    page_size = 64 if kind == "pages" else 16
    case = AttentionCase(kind, [(1, 33), (1, 20), *EXTENDS[kind]], page_size, 4, 2, 64, None, None,
                         "split" in kind)  # fmt: skip
    inputs = build_attention(case, torch.bfloat16)
    oracle = oracle_inputs(inputs)
    want = ORACLE.attend(oracle.q, oracle.meta, oracle.cache, oracle.spec)
    for _ in range(2):
        got = attention.attend(
            inputs.q, inputs.meta, inputs.cache, inputs.spec, splits=3 if "split" in kind else 1
        )
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    plans = inputs.meta.plans[extend.PLAN_KEY] if kind != "pages" else {}
    assert any(isinstance(plan, extend.DenseCopy) for plan in plans.values()) == (
        kind.startswith("dense")
    )


def test_splits_fill_the_cores_in_few_waves():
    assert extend.num_splits(64, 132, 28_000) == 2
    assert extend.num_splits(128, 132, 28_000) == 1
    assert extend.num_splits(8, 132, 28_000) == 16
    assert extend.num_splits(8, 132, 1_000) == 1


draw = sampling._uniform


@triton.jit
def fill(out_ptr, seeds_ptr, positions_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, draw(tl.load(seeds_ptr + i), tl.load(positions_ptr + i)))


def test_the_sampler_draws_the_contract_s_random_number():
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345, 7, 7])
    positions = torch.tensor([0, 1, 2, 3, 4, 2**31 - 1, 0, 1], dtype=torch.int32)
    out = torch.empty(8)
    fill[(1,)](out, seeds, positions, 8)
    assert torch.equal(out, uniform(seeds, positions))


def test_thresholds_where_many_candidates_are_equal():
    """More ties than MAX_CANDIDATES, and a vocabulary that one pass of pivots cannot narrow."""
    logits = torch.zeros(5, 6000)
    logits[0, 7] = 1.0  # top-k 5: all the ties stay
    logits[1, :3000] = 1.0  # top-k 3000: the second half goes
    logits[2, :3000] = 1e-6  # nearly ties
    logits[3] = torch.linspace(-1, 1, 6000)
    logits[4, [7, 7 + sampling.BLOCK]] = torch.tensor([5.0, 4.9])  # two that one lane reads
    params = [
        (1.0, 5, 1.0, 0.0),
        (1.0, 3000, 1.0, 0.0),
        (1.0, 2999, 1.0, 0.0),
        (1.0, 2500, 0.5, 0.0),
        (1.0, 2, 1.0, 0.0),
    ]
    for seed in range(6):
        rows = sampling_rows(params, 6000, seed=seed)
        got, want = sampling.sample(logits, rows), ORACLE.sample(logits, rows)
        assert got[0].tolist() == want[0].tolist()
