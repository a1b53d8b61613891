"""Captured steps on a device that captures by remembering the function: a replay calls it again.

What it reads must therefore lie where it lay at the capture, and what it does must not depend on
the plan of the capture.
"""

import numpy as np
import pytest
import torch

from stoker.backends import registry
from stoker.engine.core.plan import StepPlan
from stoker.engine.runtime import inputs as staging
from stoker.engine.runtime.graphs import StepGraphs
from stoker.engine.runtime.inputs import GraphShape, Inputs
from stoker.engine.runtime.sampler import SlotTable

PAGE = 4
MAX_ROWS = 20


class RecordingRuntime:
    def capture(self, function):
        function()
        return function


def forward(step):
    """Per row: its token, its context, how much of it is shared, with how many rows, tiles used."""
    tokens, meta = step.tokens, step.meta
    columns = [tokens[: meta.num_rows], meta.kv_lens]
    zeros = torch.zeros(meta.num_rows, dtype=torch.int64)
    if meta.shared is None:
        return torch.stack([*columns, zeros, zeros, zeros - 1], 1)
    rows, lens, row_lens = meta.shared.tile_rows, meta.shared.tile_lens, meta.shared.row_lens
    mates = zeros.clone()
    for tile, length in zip(rows, lens, strict=True):
        members = tile[tile >= 0].long()
        assert (length > 0) == bool(len(members))
        assert (row_lens[members] == length).all()
        mates[members] = len(members)
    return torch.stack([*columns, row_lens, mates, zeros + (lens > 0).sum()], 1)


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(staging, "MIN_SAVED_TOKENS", 16)
    runtime = registry.select("cpu").runtime
    inputs = Inputs(runtime, num_slots=32, max_pages=8, page_size=PAGE, max_step_tokens=64)
    table = SlotTable(32, 100)
    return inputs, table, StepGraphs(RecordingRuntime(), inputs, table, forward, MAX_ROWS, 64)


def plan_of(q_lens, kv_lens, groups=()):
    """Rows of the slots 1, 2, ... whose new tokens are 50 + slot."""
    slots = np.arange(1, len(q_lens) + 1, dtype=np.int32)
    none = np.empty(0, np.int32)
    return StepPlan(
        step=0,
        slots=slots,
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        num_decode_rows=q_lens.count(1),
        tokens=np.repeat(50 + slots, q_lens),
        samples=np.ones(len(slots), bool),
        prompt_logprobs=np.full(len(slots), -1, np.int32),
        page_slots=none,
        page_indices=none,
        page_ids=none,
        shared_groups=[(np.array(rows, np.int32), length) for rows, length in groups],
    )


def decode_plan(num_rows, groups=()):
    return plan_of([1] * num_rows, [17 + slot % 3 for slot in range(1, num_rows + 1)], groups)


def run(graphs, plan):
    inputs, table, steps = graphs
    shape = steps.shape_for(plan)
    inputs.restage(plan, table, shape)
    return shape, steps.replay(shape).tolist()


def test_plans_choose_their_graphs(graphs):
    shape_for = graphs[2].shape_for
    assert shape_for(decode_plan(3)) == GraphShape(4)
    assert shape_for(decode_plan(17)) == GraphShape(20)
    assert shape_for(decode_plan(21)) is None
    assert shape_for(decode_plan(3, [([0, 2], 12)])) == GraphShape(4)  # saves too little
    assert shape_for(decode_plan(3, [([0, 1, 2], 8)])) == GraphShape(8, is_shared=True)
    assert shape_for(decode_plan(9, [([0, 2], 16)])) == GraphShape(16, is_shared=True)
    assert shape_for(decode_plan(17, [([0, 2], 16)])) == GraphShape(20, is_shared=True)
    assert shape_for(decode_plan(21, [([0, 2], 16)])) is None
    longer = plan_of([1, 2], [5, 2])
    assert shape_for(longer) == GraphShape(0, 8, 32)
    longer.samples[0] = False
    assert shape_for(longer) == GraphShape(0, 8, 32)
    mixed = plan_of([1] * 12 + [8], [17] * 12 + [8])
    assert shape_for(mixed) == GraphShape(0, 64, 64)
    mixed.shared_groups = [(np.arange(12, dtype=np.int32), 16)]
    assert shape_for(mixed) == GraphShape(20, 64, 64, is_shared=True)


def test_shared_prefixes_beside_chunks(graphs):
    shape, rows = run(graphs, plan_of([1] * 12 + [8], [17] * 12 + [24], [([1, 4, 11], 16)]))
    assert shape == GraphShape(20, 64, 64, is_shared=True)
    assert [row[1] for row in rows] == [17] * 12 + [0] * 8 + [24] + [0] * 63
    assert [i for i, row in enumerate(rows) if row[2:4] == [16, 3]] == [1, 4, 11]


def test_a_replay_sees_its_own_plan_s_shared_prefixes(graphs):
    shape, rows = run(graphs, decode_plan(10, [([1, 4], 12), ([0, 2, 3], 16)]))
    assert shape == GraphShape(16, is_shared=True)
    for row in range(16):
        token, kv_len, length, mates, tiles = rows[row]
        want = {0: (16, 3), 1: (12, 2), 2: (16, 3), 3: (16, 3), 4: (12, 2)}.get(row, (0, 0))
        assert (length, mates, tiles) == (*want, 2)
        slot = row + 1
        assert (token, kv_len) == ((50 + slot, 17 + slot % 3) if row < 10 else (0, 0))
    _, rows = run(graphs, decode_plan(16, [(range(2, 16), 8)]))  # nothing stays of the step before
    assert [row[2:] for row in rows] == [[0, 0, 1]] * 2 + [[8, 14, 1]] * 14
    shape, rows = run(graphs, decode_plan(10))
    assert shape == GraphShape(16) and {row[4] for row in rows} == {-1}


def test_more_groups_than_tiles(graphs):
    pairs = [([2 * i, 2 * i + 1], 16 - 4 * (i > 5)) for i in range(8)]
    _, rows = run(graphs, decode_plan(16, pairs))
    assert {row[4] for row in rows} == {5}  # one for 16 rows, and the spare ones
    assert [row[2] for row in rows] == [16] * 10 + [0] * 6


def windowed(step):
    """Per token: its KV slot in either pool; and the rows of either table, once updated."""
    own, view = step.meta, step.meta.windowed
    assert view.max_kv_len == own.max_kv_len and view.shared is own.shared
    assert view.plans is not own.plans and not view.plans
    view.plans["derived"] = True  # must be derived in each capture
    return torch.stack([own.out_slots, view.out_slots], 1)


def test_a_replay_sees_the_window_pages_of_its_own_plan():
    runtime = registry.select("cpu").runtime
    inputs = Inputs(
        runtime, num_slots=32, max_pages=8, page_size=PAGE, max_step_tokens=64, num_window_pages=50
    )
    table = SlotTable(32, 100)
    steps = StepGraphs(RecordingRuntime(), inputs, table, windowed, MAX_ROWS, 64)
    plan = plan_of([1, 1, 6], [5, 8, 6])
    plan.page_slots = np.array([1, 1, 2, 2, 3, 3], np.int32)
    plan.page_indices = np.array([0, 1, 0, 1, 0, 1], np.int32)
    plan.page_ids = np.array([9, 8, 7, 6, 5, 4], np.int32)
    plan.window_page_ids = np.array([0, 40, 41, 42, 43, 44], np.int32)
    shape = steps.shape_for(plan)
    inputs.restage(plan, table, shape)
    steps.replay(shape)
    slots = steps.replay(shape).tolist()
    expected = [[8 * 4, 40 * 4], [6 * 4 + 3, 42 * 4 + 3]]
    expected += [[page * 4 + i, page_w * 4 + i] for page, page_w in ((5, 43),) for i in range(4)]
    expected += [[4 * 4, 44 * 4], [4 * 4 + 1, 44 * 4 + 1]]
    assert slots[: len(expected)] == expected
    assert all(slot == [-1, -1] for slot in slots[len(expected) :])
    assert inputs.block_tables[0][1:4, :2].tolist() == [[9, 8], [7, 6], [5, 4]]
    assert inputs.block_tables[1][1:4, :2].tolist() == [[0, 40], [41, 42], [43, 44]]
