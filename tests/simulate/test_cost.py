"""Cost models: fits that recover known laws, rooflines, step logs, the shapes of steps."""

import json

import numpy as np
import pytest

from stoker.engine.api.errors import StartError
from stoker.engine.core.plan import StepPlan
from stoker.engine.core.shape import StepShape
from stoker.engine.simulate_cost import fit, nonnegative_least_squares
from stoker.engine.simulate_roofline import (
    CARDS,
    SHAPES,
    Card,
    ModelShape,
    RooflineCost,
    find_card,
)
from stoker.engine.step_log import StepLog, StepSample, read_step_log


def plan(q_lens, kv_lens, num_decode_rows, samples, shared_groups=()) -> StepPlan:
    empty = np.empty(0, np.int32)
    rows = len(q_lens)
    return StepPlan(
        step=1,
        slots=np.arange(1, rows + 1, dtype=np.int32),
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        num_decode_rows=num_decode_rows,
        tokens=np.zeros(sum(q_lens), np.int32),
        samples=np.array(samples, bool),
        prompt_logprobs=np.full(rows, -1, np.int32),
        page_slots=empty,
        page_indices=empty,
        page_ids=empty,
        shared_groups=list(shared_groups),
    )


def test_the_shape_of_a_step():
    """Two decode rows of 10 and 12 tokens share 8; chunks of 3 and 2 come after 4 and 0."""
    groups = [(np.array([0, 1], np.int32), 8)]
    shape = StepShape.of(plan([1, 1, 3, 2], [10, 12, 7, 2], 2, [1, 1, 0, 1], groups))
    assert shape == StepShape(
        tokens=7,
        decode_rows=2,
        logit_rows=3,
        decode_context=14,
        repeated_context=8,
        chunk_context=9,
        chunk_pairs=(5 + 6 + 7) + (1 + 2),
    )
    assert StepShape.chunk(3, 4) == StepShape.of(plan([3], [7], 0, [1]))
    assert StepShape.decode(2, 9) == StepShape.of(plan([1, 1], [10, 10], 2, [1, 1]))


# ---- fits --------------------------------------------------------------------------------------


def test_least_squares_without_negative_coefficients():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a = rng.normal(size=(40, 6)) * rng.choice([1e-3, 1.0, 1e4], 6)
        x = nonnegative_least_squares(a, a @ np.array([1.0, 0, 2, 3, 0, 5]))
        assert x == pytest.approx([1, 0, 2, 3, 0, 5], abs=1e-6)
        b = rng.normal(size=40)
        x = nonnegative_least_squares(a, b)
        gradient = a.T @ (a @ x - b) / np.linalg.norm(a, axis=0)
        assert (x >= 0).all() and (gradient > -1e-8).all()  # Karush, Kuhn and Tucker's conditions
        assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-8
    assert nonnegative_least_squares(np.ones((3, 1)), -np.ones(3)) == [0]
    assert nonnegative_least_squares(np.zeros((3, 1)), np.ones(3)) == [0]


def device_law(shape: StepShape) -> float:
    """A roofline with its knee at 128 tokens, and attention."""
    products = 0.004 + 3e-5 * max(shape.tokens - 128, 0)
    return products + 3e-8 * shape.decode_context + 1e-9 * shape.chunk_pairs


def sizes(seed: int, n: int) -> list[StepShape]:
    rng = np.random.default_rng(seed)
    shapes = [StepShape.decode(*map(int, rng.integers(1, 400, 2))) for _ in range(n)]
    return shapes + [StepShape.chunk(*map(int, rng.integers(1, 2000, 2))) for _ in range(n)]


def test_a_fit_recovers_a_law_and_predicts_other_sizes():
    samples = [StepSample(s, device_law(s), 1e-4 + 2e-6 * s.tokens) for s in sizes(0, 100)]
    cost = fit(samples, is_async=True)
    assert cost.error < 1e-6 and cost.num_outliers == 0 and cost.is_async
    for shape in sizes(1, 50):
        assert cost.device_s(shape) == pytest.approx(device_law(shape), rel=1e-3)
        assert cost.host_s(shape) == pytest.approx(1e-4 + 2e-6 * shape.tokens, rel=1e-3)


def test_noise_does_not_bias_the_sum_and_outliers_are_left_out():
    rng = np.random.default_rng(3)
    shapes = sizes(2, 1500)
    noise = rng.gamma(4, 0.25, len(shapes))  # mean 1, standard deviation a half
    samples = [StepSample(s, device_law(s) * e, 1e-4) for s, e in zip(shapes, noise, strict=True)]
    cost = fit(samples, is_async=False)
    total = sum(map(device_law, shapes))
    assert sum(map(cost.device_s, shapes)) == pytest.approx(total, rel=0.03)
    compiled = [StepSample(s, 5.0, 1e-4) for s in shapes[:7]]
    again = fit([*samples, *compiled], is_async=False)
    assert again.num_outliers - cost.num_outliers == 7
    assert sum(map(again.device_s, shapes)) == pytest.approx(total, rel=0.03)


def test_a_fit_needs_steps():
    sample = StepSample(StepShape.decode(1, 1), 0.1, 0.1)
    with pytest.raises(StartError, match="has 19 steps, a fit needs 20"):
        fit([sample] * 19, is_async=False)


# ---- step logs ---------------------------------------------------------------------------------


def test_a_step_log_comes_back(tmp_path):
    file = tmp_path / "steps.jsonl"
    log = StepLog(file, {"model": "m"}, is_async=False)
    first, second = plan([1], [5], 1, [1]), plan([3], [3], 0, [0])
    log.planned(first)
    log.planned(second)
    log.done(0.5, 1.0)
    log.done(0.25, 1.5)
    log.close()
    engine, samples = read_step_log(file)
    assert engine == {"model": "m", "is_async": False}
    assert samples == [
        StepSample(StepShape.of(first), 0.5, 1.0),
        StepSample(StepShape.of(second), 0.25, 0.5),
    ]


def test_wrong_step_logs_name_the_line(tmp_path):
    file = tmp_path / "steps.jsonl"
    header = json.dumps({"steps_format": 1, "is_async": False})
    for text, words in {
        "": "it is empty",
        "{": "line 1: no step log",
        '{"a": 1}': "line 1: no step log: no field 'steps_format'",
        '{"steps_format": 99}': "line 1: no step log: not this version's format",
        "[]": "line 1: no step log",
        header + '\n{"tokens": 1}': "line 2: no step log: no field 'decode_rows'",
    }.items():
        file.write_text(text)
        with pytest.raises(StartError, match=words):
            read_step_log(file)
    with pytest.raises(StartError, match="No such file"):
        read_step_log(tmp_path / "none")
    with pytest.raises(StartError, match=r"--step-log .*none"):
        StepLog(tmp_path / "none" / "x", {}, is_async=False)


# ---- rooflines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("qwen3-0.6b", 0.60),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("smollm2-135m", 0.1345),
    ],
)
def test_shapes_have_the_published_number_of_weights(name, billions):
    assert ModelShape.load(name).num_weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_shape_has_such_a_test():
    assert len(SHAPES) == 7


def test_experts_are_read_when_a_token_chooses_them():
    shape = ModelShape.load("qwen3-30b-a3b")
    one = shape.weights_read(1) - shape.layer_weights
    assert one == pytest.approx(8 * shape.expert_weights)
    two = shape.weights_read(2) - shape.layer_weights
    assert two == pytest.approx((8 + 8 * 120 / 128) * shape.expert_weights)
    many = shape.weights_read(10_000) - shape.layer_weights
    assert many == pytest.approx(128 * shape.expert_weights)


def test_a_shape_out_of_a_config(tmp_path):
    config = SHAPES["llama-3.1-8b"] | {"sliding_window": 1024}
    config["layer_types"] = ["sliding_attention"] * 24 + ["full_attention"] * 8
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    shape = ModelShape.load(str(tmp_path))
    assert shape == ModelShape.load(str(tmp_path / "config.json"))
    assert shape.name == tmp_path.name
    assert shape.context_share(1024) == 1
    assert shape.context_share(4096) == 0.25 + 0.75 * 0.25
    mla = {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "tie_word_embeddings": False,
    }
    lite = ModelShape.from_config("deepseek-v2-lite", mla)
    assert lite.num_weights / 1e9 == pytest.approx(15.7, rel=0.01)  # as published
    assert lite.kv_per_token == 27 * (512 + 64)


def test_wrong_shapes_and_cards_say_what_there_is(tmp_path):
    with pytest.raises(StartError, match=r"no shape 'gpt-9': want .* llama-3.1-8b"):
        ModelShape.load("gpt-9")
    with pytest.raises(StartError, match=r"no card 'H9'; there are .*H200"):
        find_card("H9")
    file = tmp_path / "config.json"
    for text, words in {"{": "config.json", "[]": "want an object", "{}": "hidden_size"}.items():
        file.write_text(text)
        with pytest.raises(StartError, match=words):
            ModelShape.load(str(file))
    with pytest.raises(StartError, match="141 GB of weights leaves no room"):
        RooflineCost(find_card("h200"), ModelShape.load("llama-3.1-70b")).kv_tokens(0.9)


def test_a_roofline_is_bound_by_memory_and_then_by_arithmetic():
    """A made-up card with round numbers, without what comes to the products."""
    card, shape = Card("x", 100e12, 1e12, 1e12), ModelShape.load("llama-3.1-8b")
    cost = RooflineCost(card, shape, streams=False)
    weights = shape.layer_weights + shape.head_weights
    one = cost.device_s(StepShape.decode(1, 0))
    assert one == pytest.approx(2 * weights / (1e12 * 0.82) + 32 * 10e-6, rel=0.01)
    many = cost.device_s(StepShape.chunk(8192, 0))
    products = 2 * shape.layer_weights * 8192 / (100e12 * 0.67)
    attention = 4 * 4096 * 32 * (8192 * 8193 / 2) / (100e12 * 0.52)
    assert many == pytest.approx(products + attention, rel=0.03)
    short, long = (cost.device_s(StepShape.decode(100, n)) for n in (0, 10_000))
    kv_bytes = 100 * 10_000 * shape.kv_per_token * 2
    assert long - short == pytest.approx(kv_bytes / (1e12 * 0.885))
    shared = StepShape(100, 100, 100, 10_000 + 100, 99 * 10_000, 0, 0.0)
    assert cost.device_s(shared) < long / 3  # read once, computed 100 times
    few, many = (cost.host_s(StepShape.chunk(n, 0)) for n in (2048, 2049))
    assert (few, many) == (0.35e-3, pytest.approx(0.35e-3 + 32 * 0.8e-3))  # no graph is so long
    room = cost.kv_tokens(0.9) * shape.kv_per_token * 2 + shape.num_weights * 2
    assert room == pytest.approx(0.9 * 1e12 - 3 * 2**30, rel=1e-5)


def test_every_card_is_found_by_its_name():
    assert len(CARDS) == 9
    assert all(find_card(card.name) is card for card in CARDS.values())
