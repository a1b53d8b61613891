"""The sampler's order and history, against plain loops over one row at a time."""

import numpy as np
import pytest
import torch

from stoker.backends import registry
from stoker.backends.api import SamplingRows
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.plan import Admission
from stoker.engine.runtime.sampler import Sampler, mask_logits

VOCAB = 50


@pytest.fixture(scope="module")
def ops():
    return registry.select("cpu").ops


def admission(slot, params, tokens, prompt_len, stops=(), seed=0):
    return Admission(slot, params, np.array(tokens, np.int32), prompt_len, tuple(stops), seed)


def rows_of(sampler, slots, kv_lens):
    t = sampler.table
    pick = lambda values: torch.from_numpy(values[slots])  # noqa: E731
    return SamplingRows(
        temperature=pick(t.temperature),
        top_k=pick(t.top_k),
        top_p=pick(t.top_p),
        min_p=pick(t.min_p),
        seeds=pick(t.seeds),
        positions=torch.from_numpy(kv_lens),
        all_greedy=bool((t.temperature[slots] == 0).all()),
        has_top_k=bool((t.top_k[slots] < t.vocab_size).any()),
        has_top_p=bool((t.top_p[slots] < 1).any()),
        has_min_p=bool((t.min_p[slots] > 0).any()),
    )


def draw(sampler, logits, slots, kv_lens):
    slots, kv_lens = np.array(slots, np.int32), np.array(kv_lens, np.int32)
    rows = rows_of(sampler, slots, kv_lens)
    last = torch.full((len(sampler.table.seeds),), -1)
    at = torch.from_numpy(slots).long()
    sampled = sampler.sample(logits.clone(), slots, kv_lens, rows, at, last)
    drawn = sampled.tokens
    assert last[at].tolist() == torch.where(drawn < 0, ~drawn, drawn).tolist()
    return sampled


def expected_greedy(logits, params, prompt, output, stops):
    """C1's order, written out for one row."""
    logits = logits.double().clone()
    for token in range(VOCAB):
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(output) < params.min_tokens:
        logits[list(stops)] = -torch.inf
    for token in set(prompt) | set(output):
        value = logits[token]
        rp = params.repetition_penalty
        logits[token] = value * rp if value < 0 else value / rp
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return int(logits.argmax())


def test_penalties_bias_and_min_tokens_follow_the_order(ops):
    generator = torch.Generator().manual_seed(1)
    every = [
        SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingParams(temperature=0, repetition_penalty=1.8, min_tokens=9),
        SamplingParams(temperature=0, logit_bias={3: 4.0, 7: -100.0}, repetition_penalty=0.6),
        SamplingParams(temperature=0),
    ]
    sampler = Sampler(ops, 8, VOCAB, torch.device("cpu"))
    prompts = [[1, 2, 3], [4, 4, 5, 6], [7], [8, 9]]
    outputs = [[], [10, 11], [], [12]]
    stops = (0, 13, 20)
    for slot, (params, prompt, output) in enumerate(zip(every, prompts, outputs, strict=True), 1):
        sampler.admit(admission(slot, params, prompt + output, len(prompt), stops))
    for _ in range(12):
        logits = torch.randn(4, VOCAB, generator=generator) * 2
        kv_lens = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
        got = draw(sampler, logits, [1, 2, 3, 4], kv_lens).tokens.tolist()
        want = [
            expected_greedy(logits[i], every[i], prompts[i], outputs[i], stops) for i in range(4)
        ]
        assert got == want
        for output, token in zip(outputs, got, strict=True):
            output.append(token)


def test_a_reused_slot_forgets_its_last_request(ops):
    sampler = Sampler(ops, 4, VOCAB, torch.device("cpu"))
    heavy = SamplingParams(temperature=0, frequency_penalty=2, logit_bias={5: 100}, min_tokens=3)
    sampler.admit(admission(1, heavy, [1, 1, 1], 1, [2]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 1.0
    assert draw(sampler, logits, [1], [3]).tokens.tolist() == [5]
    sampler.admit(admission(1, SamplingParams(temperature=0), [9], 1))
    assert draw(sampler, logits, [1], [1]).tokens.tolist() == [2]


def test_a_seeded_draw_does_not_depend_on_the_batch(ops):
    sampler = Sampler(ops, 20, VOCAB, torch.device("cpu"))
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(3))
    for slot in range(1, 17):
        params = SamplingParams(temperature=0.5 + slot / 20, top_k=slot % 5 * 7, top_p=0.95)
        sampler.admit(admission(slot, params, [1], 1, seed=1000 + slot))
    slots = list(range(1, 17))
    together = draw(sampler, logits, slots, [7] * 16).tokens.tolist()
    alone = [
        draw(sampler, logits[i : i + 1], [slot], [7]).tokens.item() for i, slot in enumerate(slots)
    ]
    assert together == alone
    later = draw(sampler, logits, slots, [8] * 16).tokens.tolist()
    assert later != together  # another position, another number


def test_draws_follow_the_distribution(ops):
    sampler = Sampler(ops, 3000, VOCAB, torch.device("cpu"))
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[4, 9, 30]] = torch.tensor([0.5, 0.3, 0.2]).log()
    for slot in range(1, 3000):
        sampler.admit(admission(slot, SamplingParams(), [1], 1, seed=slot * 7919))
    slots = list(range(1, 3000))
    tokens = draw(sampler, logits.repeat(2999, 1), slots, [5] * 2999).tokens
    shares = [float((tokens == t).float().mean()) for t in (4, 9, 30)]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)  # four standard deviations


def test_logprobs_are_of_the_models_own_distribution(ops):
    sampler = Sampler(ops, 4, VOCAB, torch.device("cpu"))
    biased = SamplingParams(temperature=0, logit_bias={3: 50.0}, logprobs=4)
    sampler.admit(admission(1, SamplingParams(temperature=0), [1], 1))
    sampler.admit(admission(2, biased, [1], 1))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    own = torch.log_softmax(logits[1], -1)
    sampled = draw(sampler, logits, [1, 2], [1, 1])
    assert sampled.logprob_rows.tolist() == [1]
    assert sampled.tokens.tolist() == [int(logits[0].argmax()), 3]
    torch.testing.assert_close(sampled.logprobs.chosen, own[3:4])
    values, ids = own.topk(4)
    assert sampled.logprobs.top_ids[0].tolist() == ids.tolist()
    torch.testing.assert_close(sampled.logprobs.top_values[0], values)


def test_a_row_of_nan_is_reported_alone(ops):
    sampler = Sampler(ops, 4, VOCAB, torch.device("cpu"))
    for slot in (1, 2):
        sampler.admit(admission(slot, SamplingParams(temperature=0), [1], 1))
    logits = torch.zeros(2, VOCAB)
    logits[0, 7] = torch.nan
    logits[1, 8] = 1.0
    sampled = draw(sampler, logits, [1, 2], [1, 1])
    assert (sampled.tokens >= 0).tolist() == [False, True]
    assert sampled.tokens[1] == 8


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 3]])
@pytest.mark.parametrize("vocab", [64, 70])
def test_masks_forbid_by_bits(rows, vocab):
    draw = np.random.default_rng(0)
    allowed = draw.random((len(rows), vocab)) < 0.5
    bits = np.zeros((len(rows), 96), bool)
    bits[:, :vocab] = allowed
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(4, vocab)
    expected = logits.clone()
    for row, each in zip(rows, allowed, strict=True):
        expected[row, ~torch.from_numpy(each)] = -torch.inf
    mask_logits(logits, np.array(rows), masks)
    assert torch.equal(logits, expected)
