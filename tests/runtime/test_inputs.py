"""Staging: the device's view of a plan, against a loop over its tokens."""

import numpy as np
import pytest
import torch

from stoker.backends import registry
from stoker.engine.core.plan import FROM_DEVICE, StepPlan
from stoker.engine.runtime import inputs as staging
from stoker.engine.runtime.graphs import chunk_plan
from stoker.engine.runtime.inputs import GraphShape, Inputs, tile_shared_groups
from stoker.engine.runtime.sampler import SlotTable

PAGE = 4


def make_plan(rows, updates=(), score=None):
    """rows: (slot, context before, new token ids)."""
    i32 = lambda values: np.array(list(values), np.int32)  # noqa: E731
    decode = sum(len(r[2]) == 1 for r in rows)
    return StepPlan(
        step=1,
        slots=i32(r[0] for r in rows),
        q_lens=i32(len(r[2]) for r in rows),
        kv_lens=i32(r[1] + len(r[2]) for r in rows),
        num_decode_rows=decode,
        tokens=i32(t for r in rows for t in r[2]),
        samples=np.array([r[3] if len(r) > 3 else True for r in rows]),
        prompt_logprobs=np.full(len(rows), -1, np.int32),
        page_slots=i32(u[0] for u in updates),
        page_indices=i32(u[1] for u in updates),
        page_ids=i32(u[2] for u in updates),
        score_tokens=score or {},
    )


def new_inputs():
    return Inputs(
        registry.select("cpu").runtime, num_slots=5, max_pages=8, page_size=PAGE, max_step_tokens=64
    )


@pytest.fixture
def inputs():
    return new_inputs()


def test_positions_and_slots(inputs):
    pages = {(1, 0): 7, (1, 1): 3, (2, 0): 9, (3, 0): 2, (3, 1): 5}
    rows = [(1, 5, [11]), (2, 2, [FROM_DEVICE]), (3, 1, [20, 21, 22, 23, 24], False)]
    inputs.last_tokens[2] = 42
    plan = make_plan(rows, [(s, i, p) for (s, i), p in pages.items()])
    step = inputs.stage(plan, SlotTable(5, 100))
    want = [
        (token, position, pages[slot, position // PAGE] * PAGE + position % PAGE)
        for slot, before, new, *_ in rows
        for position, token in enumerate(new, before)
    ]
    want[1] = (42, *want[1][1:])
    assert step.tokens.tolist() == [w[0] for w in want]
    assert step.meta.positions.tolist() == [w[1] for w in want]
    assert step.meta.out_slots.tolist() == [w[2] for w in want]
    assert step.meta.qo_indptr.tolist() == [0, 1, 2, 7]
    assert step.meta.logit_tokens.tolist() == [0, 1]  # the third row does not sample
    assert step.meta.kv_lens.tolist() == [6, 3, 6]
    assert inputs.block_tables[0][3, :2].tolist() == [2, 5]


def test_a_device_token_at_the_end_of_a_longer_row(inputs):
    inputs.last_tokens[4] = 77
    plan = make_plan([(1, 3, [5]), (4, 0, [6, FROM_DEVICE])], [(1, 0, 1), (4, 0, 2)])
    assert inputs.stage(plan, SlotTable(5, 100)).tokens.tolist() == [5, 6, 77]


def test_scored_rows_follow_the_sampled_ones(inputs):
    plan = make_plan(
        [(1, 0, [5]), (2, 0, [6, 7, 8])],
        [(1, 0, 1), (2, 0, 2)],
        score={1: np.array([7, 8, -1], np.int32)},
    )
    assert inputs.stage(plan, SlotTable(5, 100)).meta.logit_tokens.tolist() == [0, 3, 1, 2, 3]


def test_padding_of_a_decode_graph_writes_nowhere(inputs):
    plan = make_plan([(1, 2, [FROM_DEVICE])], [(1, 0, 1)])
    step = inputs.stage(plan, SlotTable(5, 100), GraphShape(4))
    meta = step.meta
    assert meta.num_rows == meta.num_decode_rows == meta.num_tokens == 4
    assert step.tokens.tolist() == [-1, 0, 0, 0]  # minus the slot: the graph fills it in
    assert meta.out_slots.tolist() == [PAGE + 2, -1, -1, -1]
    assert meta.kv_lens.tolist() == [3, 0, 0, 0]
    assert meta.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert meta.slots.tolist() == [1, 0, 0, 0]
    assert step.sample_slots.tolist() == [1, 0, 0, 0]
    inputs.last_tokens[1] = 66
    inputs.apply(step)
    assert step.tokens.tolist() == [66, 0, 0, 0]


def test_padding_of_a_short_prefill_graph(inputs):
    plan = make_plan([(2, 1, [9]), (1, 2, [5, 6, 7])], [(1, 0, 1), (1, 1, 3), (2, 0, 4)])
    step = inputs.stage(plan, SlotTable(5, 100), GraphShape(0, 3, 8))
    meta = step.meta
    assert (meta.num_rows, meta.num_decode_rows, meta.num_tokens) == (3, 0, 8)
    assert step.tokens.tolist() == [9, 5, 6, 7, 0, 0, 0, 0]
    assert meta.qo_indptr.tolist() == [0, 1, 4, 4]
    assert meta.kv_lens.tolist() == [2, 5, 0]
    assert meta.out_slots.tolist() == [17, 6, 7, 12, -1, -1, -1, -1]
    assert meta.logit_tokens.tolist() == [0, 3, 0]
    assert step.sample_slots.tolist() == [2, 1, 0]


def test_many_block_table_entries_grow_the_buffers(inputs):
    big = Inputs(
        registry.select("cpu").runtime, num_slots=3, max_pages=4000, page_size=1, max_step_tokens=4
    )
    plan = make_plan([(1, 3999, [5])], [(1, i, i + 1) for i in range(4000)])
    step = big.stage(plan, SlotTable(3, 100))
    assert step.meta.out_slots.tolist() == [4000]
    assert torch.equal(big.block_tables[0][1], torch.arange(1, 4001, dtype=torch.int32))


def test_shared_prefixes_are_staged_where_they_save_enough(inputs, monkeypatch):
    rows = [(slot, 9, [slot]) for slot in (1, 2, 3, 4)]
    plan = make_plan(rows, [(slot, i, i) for slot in (1, 2, 3, 4) for i in range(3)])
    plan.shared_groups = [(np.array([1, 3], np.int32), 8)]
    assert inputs.stage(plan, SlotTable(5, 100)).meta.shared is None
    monkeypatch.setattr(staging, "MIN_SAVED_TOKENS", 8)
    shared = inputs.stage(plan, SlotTable(5, 100)).meta.shared
    assert shared.tile_rows.tolist() == [[1, 3] + [-1] * 14] + [[-1] * 16] * 4
    assert shared.tile_lens.tolist() == [8, 0, 0, 0, 0]
    assert shared.row_lens.tolist() == [0, 8, 0, 8]


def test_groups_whose_tiles_do_not_fit_are_left_out():
    def tile(groups, num_tiles):
        arrays = np.empty((num_tiles, 4), int), np.empty(num_tiles, int), np.empty(10, int)
        tile_shared_groups([(np.array(rows), n) for rows, n in groups], *arrays)
        return [a.tolist() for a in arrays]

    groups = [([7, 8], 32), (range(5), 64)]
    rows, lens, row_lens = tile(groups, 3)
    assert rows == [[0, 1, 2, 3], [4, -1, -1, -1], [7, 8, -1, -1]]
    assert lens == [64, 64, 32]
    assert row_lens == [64] * 5 + [0, 0, 32, 32, 0]
    rows, lens, row_lens = tile(groups, 2)  # what saves most comes first
    assert rows == [[0, 1, 2, 3], [4, -1, -1, -1]] and lens == [64, 64]
    assert row_lens == [64] * 5 + [0] * 5
    rows, lens, row_lens = tile(groups, 1)
    assert rows == [[7, 8, -1, -1]] and lens == [32]
    assert row_lens == [0] * 7 + [32, 32, 0]


def test_padding_between_decode_rows_and_chunks(inputs):
    plan = make_plan(
        [(2, 1, [9]), (1, 2, [5, 6, 7]), (3, 0, [8, 4])],
        [(1, 0, 1), (1, 1, 3), (2, 0, 4), (3, 0, 5)],
    )
    step = inputs.stage(plan, SlotTable(5, 100), GraphShape(3, 3, 7))
    meta = step.meta
    assert (meta.num_rows, meta.num_decode_rows, meta.num_tokens) == (6, 3, 10)
    assert step.tokens.tolist() == [9, 0, 0, 5, 6, 7, 8, 4, 0, 0]
    assert meta.qo_indptr.tolist() == [0, 1, 2, 3, 6, 8, 8]
    assert meta.kv_lens.tolist() == [2, 0, 0, 5, 2, 0]
    assert meta.slots.tolist() == [2, 0, 0, 1, 3, 0]
    assert meta.out_slots.tolist() == [17, -1, -1, 6, 7, 12, 20, 21, -1, -1]
    assert meta.positions.tolist() == [1, 0, 0, 2, 3, 4, 0, 1, 0, 0]
    assert meta.logit_tokens.tolist() == [0, 5, 7, 0, 0, 0]
    assert meta.kv_lens_cpu.tolist() == meta.kv_lens.tolist()
    assert meta.qo_indptr_cpu.tolist() == meta.qo_indptr.tolist()
    assert step.sample_slots.tolist() == [2, 1, 3, 0, 0, 0]


def test_what_stays_from_step_to_step_is_what_would_be_written(inputs):
    """Steps of the same slots, of other shapes, with chunks between: each as if staged alone."""
    table = SlotTable(5, 100)
    table.seeds[:], table.top_k[:], table.temperature[:] = range(5), range(10, 15), 0.5
    rng = np.random.default_rng(2)
    few, others, all_four = (np.array(x, np.int32) for x in ([2, 4], [1, 3], [3, 1, 2, 4]))
    two, four, shared = GraphShape(2), GraphShape(4), GraphShape(4, is_shared=True)
    chunk = GraphShape(0, 2, 8)
    inputs.reserve([four, shared, chunk], chunk_plan(1, inputs))
    steps = [(few, two), (few, two), (others, two), (few, two), (few, four), (all_four, four)]
    steps += [(few, two), (few, four)]  # the padding is of the shape
    steps += [(few, four), (few, four), (None, chunk), (few, four), (few, shared), (few, four)]
    for i, (slots, shape) in enumerate(steps * 2):
        inputs._turn = i % 2 if i < len(steps) else 0  # both buffers, then one alone
        if slots is None:
            plan = make_plan([(1, 2, [5, 6, 7]), (3, 0, [8, 9])])
        else:
            contexts = rng.integers(1, 20, len(slots)).tolist()
            rows = [(s, c, [FROM_DEVICE]) for s, c in zip(slots, contexts, strict=True)]
            plan = make_plan(rows, [(int(slots[0]), 1, int(rng.integers(1, 9)))])
            plan.slots = slots
        sample_rows = inputs.restage(plan, table, shape)
        assert sample_rows.tolist() == [0, 1, 2, 3][: plan.num_rows]
        alone = new_inputs()
        alone.reserve([four, shared, chunk], plan)
        for mine, theirs in zip(alone.block_tables, inputs.block_tables, strict=True):
            mine.copy_(theirs)
        alone.restage(plan, table, shape)
        got = inputs._captured[shape].arrays[inputs._turn]
        want = alone._captured[shape].arrays[0]
        for name in want:
            assert got[name].tolist() == want[name].tolist(), (shape, name)
