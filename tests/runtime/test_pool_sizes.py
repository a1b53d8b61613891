"""How the memory that is free is divided between KV, states and their snapshots."""

from types import SimpleNamespace

import pytest
import torch

from stoker.engine.api.config import EngineConfig
from stoker.engine.api.errors import StartError
from stoker.engine.pool_sizes import pool_sizes, warn_of_idle_flags

TOKEN_BYTES = 2 * 2 * 64 * 2  # keys and values of two heads of 64, bfloat16
STATE_BYTES = 3 * 128 * 2 + 4 * 32 * 32 * 4
STATES = {0: ((3, 128), (4, 32, 32))}


def sizes_of(free, state_spec, *, window=None, **options):
    config = EngineConfig(model="m", max_running_requests=4, **options)
    sizes = pool_sizes(
        config,
        SimpleNamespace(device=torch.device("cpu"), memory=lambda: (free, free)),
        SimpleNamespace(
            kv_spec=[(2, 64, 64)],
            state_spec=state_spec,
            attention_specs=[SimpleNamespace(window=window)],
        ),
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        page_size=16,
        max_model_len=1000,
        chunk=64,
        max_step_tokens=68,
        window=window,
        working_bytes=0,
    )
    return config, sizes


def test_all_that_is_free_goes_to_tokens():
    assert sizes_of(4 * 1000 * TOKEN_BYTES, {})[1] == (1000, 0, 0)
    assert sizes_of(10**12, {})[1] == (4000, 0, 0)  # all that four requests can hold


def test_states_come_first_then_snapshots_then_tokens():
    slots = 5 * STATE_BYTES
    for num_tokens in (1000, 3000):
        budget = slots + 8 * STATE_BYTES + num_tokens * TOKEN_BYTES
        left = budget - slots
        snapshots = min(8, left // 4 // STATE_BYTES)
        tokens = (left - snapshots * STATE_BYTES) // TOKEN_BYTES
        assert sizes_of(4 * budget, STATES)[1] == (tokens, snapshots, 0)
    budget = slots + 3 * STATE_BYTES + 500 * TOKEN_BYTES
    assert sizes_of(4 * budget, STATES, state_snapshots=3)[1] == (500, 3, 0)


@pytest.mark.parametrize(
    ("state_spec", "options", "is_idle"),
    [
        (STATES, {}, False),
        (STATES, {"disable_radix_cache": True}, True),
        ({}, {}, True),
        ({}, {"kv_tokens": 512}, True),
    ],
)
def test_snapshots_that_nothing_can_use_are_not_made(caplog, state_spec, options, is_idle):
    config, sizes = sizes_of(10**9, state_spec, state_snapshots=3, **options)
    warn_of_idle_flags(config, sizes)
    assert sizes.snapshots == (0 if is_idle else 3)
    assert ("--state-snapshots does nothing" in caplog.text) == is_idle


@pytest.mark.parametrize("kv_tokens", [600, 60])
def test_a_window_pool_must_hold_more_than_one_request(caplog, kv_tokens):
    config, sizes = sizes_of(0, {}, window=32, kv_tokens=kv_tokens, window_kv_ratio=0.5)
    warn_of_idle_flags(config, sizes)
    assert sizes.window_tokens == (300 if kv_tokens == 600 else 0)
    assert ("--window-kv-ratio does nothing" in caplog.text) == (kv_tokens == 60)


def test_too_little_memory_says_what_a_token_and_a_state_take():
    with pytest.raises(StartError, match="a token takes 0 KiB; a smaller model"):
        sizes_of(4 * 255 * TOKEN_BYTES, {})
    with pytest.raises(StartError, match=r"a request's state 0\.0 MiB; .*--state-snapshots"):
        sizes_of(4 * 255 * TOKEN_BYTES, STATES)
