"""The runner keeps recurrent states: a model whose tokens are a hash of all tokens before them."""

from array import array
from collections import deque

import pytest
import torch

from stoker.backends import registry
from stoker.backends.api import LayerCache, LayerState
from stoker.engine.api.messages import Add, Tokens
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.runtime import kv_buffers
from stoker.engine.runtime.runner import ModelRunner

VOCAB, PRIME, PAGE_SIZE, MAX_RUNNING, NUM_SNAPSHOTS, MAX_LEN = 61, 997, 4, 4, 24, 128


class HashModel:
    """Two layers: a state, and KV that it does not use. All in whole numbers, exact in float32."""

    vocab_size = VOCAB

    def __init__(self):
        self.kv_spec = [(1, 8, 8)]
        self.state_spec = {0: ((1, 2), (1, 1, 1))}  # the last two tokens; the hash

    def forward(self, tokens, meta, caches):
        state, pool = caches
        assert isinstance(state, LayerState) and isinstance(pool, LayerCache)
        hidden = torch.empty(len(tokens), 3)
        ends = meta.qo_indptr.tolist()
        for row, slot in enumerate(meta.slots.tolist()):
            new = tokens[ends[row] : ends[row + 1]].tolist()
            context = int(meta.kv_lens[row]) - len(new)
            h, last = state.recurrent[slot].item(), state.conv[slot, 0].tolist()
            if context == 0:
                h, last = 0.0, [0.0, 0.0]
            for i, token in enumerate(new, ends[row]):
                h, last = (h * 31 + token + 1) % PRIME, [last[1], float(token)]
                hidden[i] = torch.tensor([h, *last])
            state.recurrent[slot] = h
            state.conv[slot, 0] = torch.tensor(last)
        return hidden

    def logits(self, hidden):
        tokens = (hidden @ torch.tensor([1.0, 5.0, 7.0])).long() % VOCAB
        return torch.nn.functional.one_hot(tokens, VOCAB).float()


def alone(prompt, max_tokens):
    """What a prompt gives without an engine."""
    tokens, h = list(prompt), 0
    for token in prompt:
        h = (h * 31 + token + 1) % PRIME
    for _ in range(max_tokens):
        before = tokens[-2] if len(tokens) > 1 else 0
        tokens.append((h + 5 * before + 7 * tokens[-1]) % VOCAB)
        h = (h * 31 + tokens[-1] + 1) % PRIME
    return tokens[len(prompt) :]


class Served:
    """Scheduler and runner on the CPU, with or without a step in flight."""

    def __init__(self, *, overlap: bool, kv_tokens: int = 1000, **options):
        backend = registry.select("cpu")
        model, num_pages = HashModel(), 1 + kv_tokens // PAGE_SIZE
        self.overlap = overlap
        num_rows = MAX_RUNNING + 1 + NUM_SNAPSHOTS
        device, dtype = backend.runtime.device, torch.float32
        pools = kv_buffers.allocate(model.kv_spec, num_pages, PAGE_SIZE, dtype, device)
        max_step_tokens = options.setdefault("max_step_tokens", 16)
        self.runner = ModelRunner(
            model,
            backend.ops,
            backend.runtime,
            kv_buffers.with_states(pools, model.state_spec, num_rows, dtype, device),
            num_slots=MAX_RUNNING + 1,
            max_pages=MAX_LEN // PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_step_tokens=max_step_tokens,
        )
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_running=MAX_RUNNING,
            max_model_len=MAX_LEN,
            num_snapshots=NUM_SNAPSHOTS,
            save_every=8,
            **options,
        )
        self.num_added = 0

    def serve(self, prompts, max_tokens):
        """The outputs of prompts that come together."""
        first = self.num_added
        for prompt in prompts:
            params = SamplingParams(temperature=0.0)
            self.scheduler.handle(
                Add(self.num_added, array("i", prompt), params, max_tokens, frozenset(), 0, 0.0)
            )
            self.num_added += 1
        outputs = {first + i: [] for i in range(len(prompts))}
        in_flight = deque()
        while self.scheduler.has_work:
            plan = self.scheduler.plan(0.0)
            if plan is not None:
                in_flight.append(self.runner.launch(plan))
            if in_flight and (plan is None or not self.overlap or len(in_flight) > 1):
                facts = self.scheduler.commit(in_flight.popleft().wait(), 0.0)
                self.scheduler.check()
                for fact in facts:
                    assert isinstance(fact, Tokens)
                    outputs[fact.request_id] += fact.token_ids
        return list(outputs.values())


PROMPTS = [[(i * j * 7 + i) % VOCAB for j in range(37)] for i in range(1, 7)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"max_step_tokens": 5}, {"kv_tokens": 120}, {"use_radix": False}], ids=str
)
def test_tokens_are_those_of_a_prompt_alone(overlap, options):
    served = Served(overlap=overlap, **options)
    expected = [alone(prompt, 30) for prompt in PROMPTS]
    assert served.serve(PROMPTS, 30) == expected
    # A second time, then as conversations that go on, so from snapshots.
    assert served.serve(PROMPTS, 30) == expected
    turns = [[*p, *out, 5, 6] for p, out in zip(PROMPTS, expected, strict=True)]
    assert served.serve(turns, 20) == [alone(turn, 20) for turn in turns]
    stats = served.scheduler.stats()
    if "kv_tokens" in options:
        assert stats.retractions > 0  # and nothing stays cached for long
    else:
        assert stats.cached_tokens == (6 * (36 + 60) if options.get("use_radix", True) else 0)


def test_with_states_puts_them_between_the_pools():
    pools = kv_buffers.allocate([(1, 8, 8), (2, 8, 8)], 3, 4, torch.float32, torch.device("cpu"))
    spec = {0: ((2, 3), (4, 5, 6)), 2: ((2, 3), (4, 5, 6)), 3: ((1, 1), (1, 1, 1))}
    caches = kv_buffers.with_states(pools, spec, 7, torch.bfloat16, torch.device("cpu"))
    assert [isinstance(cache, LayerState) for cache in caches] == [True, False, True, True, False]
    assert caches[1] is pools[0] and caches[4] is pools[1]
    assert caches[0].conv.shape == (7, 2, 3) and caches[0].conv.dtype == torch.bfloat16
    assert caches[0].recurrent.shape == (7, 4, 5, 6) and caches[0].recurrent.dtype == torch.float32
    assert kv_buffers.bytes_per_state(spec, torch.bfloat16) == 2 * (12 + 480) + 2 + 4
