"""Models with recurrent layers in the whole engine: chunks, snapshots, retractions, choices."""

import json
from functools import cache

import pytest
import torch
import transformers

from stoker.engine import Engine, EngineConfig, SamplingParams, StartError
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import parse_config
from stoker.engine.runtime import model_files, weights

NUM_NEW = 32
NEXT = dict(
    num_hidden_layers=4,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    max_position_embeddings=512,
    rms_norm_eps=1e-3,
)
generator = torch.Generator().manual_seed(3)
LONG = torch.randint(3, 290, (330,), generator=generator).tolist()
# One begins as another does, and goes its own way inside a chunk; others are short.
PROMPTS = [LONG[:301], [*LONG[:203], *LONG[40:70]], LONG[5:7], LONG[100:229], [7]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, make_hf_model, save_model):
    """A folder with a tiny Qwen3-Next, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("qwen3_next")
    hf = make_hf_model("Qwen3Next", NEXT)
    save_model(hf, folder)
    return folder, hf


@cache
def hf_logprobs(hf, prompt, output):
    """Of each output token all log-probabilities, by transformers."""
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + output]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def check(hf, prompt, done):
    """Each token is transformers' choice after those before it, by the same logits."""
    assert len(done.token_ids) == NUM_NEW
    theirs, tokens = hf_logprobs(hf, tuple(prompt), tuple(done.token_ids)).max(-1)
    assert tokens.tolist() == done.token_ids
    ours = torch.tensor([entry.logprob for entry in done.logprobs])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


SMALL = dict(dtype="float32", check=True, max_running_requests=8, kv_tokens=4096, threads=1)
WAYS = {
    "whole": {},
    "in odd chunks": dict(chunked_prefill_size=37, page_size=4),
    "without overlap": dict(disable_overlap=True, page_size=1),
    "retracted": dict(kv_tokens=640, schedule_conservativeness=0.1, page_size=16),
    "without snapshots": dict(state_snapshots=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_and_logits_are_those_of_transformers(way, hybrid):
    folder, hf = hybrid
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0)
    with Engine(model=str(folder), **(SMALL | WAYS[way])) as engine:
        first = engine.generate(PROMPTS, params)
        for prompt, done in zip(PROMPTS, first, strict=True):
            check(hf, prompt, done)
        again = engine.generate(PROMPTS, params)
        for one, other in zip(first, again, strict=True):
            assert other.token_ids == one.token_ids
        turn = [*PROMPTS[0], *first[0].token_ids, 5, 6]
        (second,) = engine.generate([turn], params)
        check(hf, turn, second)
        if way == "retracted":
            assert engine.engine.stats.retractions > 0
        elif way == "without snapshots":
            assert again[0].num_cached == second.num_cached == 0
        else:  # from where the prompt's state was kept
            assert 128 <= again[0].num_cached <= 300
            assert again[0].num_cached <= second.num_cached < 333


def test_choices_of_one_prompt_go_on_from_one_state(hybrid):
    folder, hf = hybrid
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0, n=2)
    drawn = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, seed=1, n=3)
    with Engine(model=str(folder), **SMALL) as engine:
        for done in engine.generate([PROMPTS[0]], params):
            check(hf, PROMPTS[0], done)
        first = engine.generate([PROMPTS[3]], drawn)
        again = engine.generate([PROMPTS[3]], drawn)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 3


def test_a_host_cache_is_refused(hybrid):
    with pytest.raises(StartError, match="not this model's recurrent states"):
        Engine(EngineConfig(model=str(hybrid[0]), backend="cpu", host_cache_gib=0.1))


def test_a_state_is_as_large_as_the_config_says(float32_model):
    fields = json.loads(transformers.Qwen3NextConfig().to_json_string())
    config = parse_config(fields | {"architectures": ["Qwen3NextForCausalLM"]})
    spec = config.delta_net
    assert (spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim) == (
        16,
        32,
        128,
        128,
    )
    assert spec.layers == (True, True, True, False) * 12
    small = {"num_hidden_layers": 8, "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 9}
    config = parse_config(
        fields | small | {"architectures": ["Qwen3NextForCausalLM"], "layer_types": None}
    )
    model = Decoder(config, None, torch.device("meta"), torch.bfloat16)
    assert list(model.state_spec) == [0, 1, 2, 4, 5, 6]
    assert model.state_spec[0] == ((8192, 3), (32, 128, 128))
    assert model.kv_spec == [(2, 256, 256)] * 2


def test_tensors_that_predict_further_tokens_and_see_are_left_unread(hybrid, tmp_path):
    """A Qwen3.5 with vision, as it is published: its language model lies under another name."""
    text = {k: v for k, v in NEXT.items() if "expert" not in k and "moe" not in k}
    text |= dict(vocab_size=300, hidden_size=64, intermediate_size=96)
    text |= dict(num_attention_heads=4, num_key_value_heads=2)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
    torch.manual_seed(0)
    hf = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    ).eval()
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    hf.save_pretrained(tmp_path)
    files = model_files.resolve(str(tmp_path))
    folder, _ = hybrid
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    names = [name for name, _ in weights.from_safetensors(list(files.weights), files.config)]
    assert names and all(not name.startswith("model.visual") for name in names)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Engine(model=str(tmp_path), **SMALL) as engine:
        (done,) = engine.generate([LONG[:20]], params)
    with torch.inference_mode():
        logits = hf(torch.tensor([LONG[:20] + done.token_ids]), use_cache=False).logits[0]
    assert logits.argmax(-1)[19:-1].tolist() == done.token_ids
