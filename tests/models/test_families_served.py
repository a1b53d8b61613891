"""The families in the whole engine: pages, chunks, the prefix cache, the processor's kernels."""

import pytest
import torch

from stoker.engine import Engine, SamplingParams

PROMPTS = [list(range(3, 60)), [*range(3, 50), 9, 9], [7]]
LONG = {"long_factor": [2.0] * 4 + [5.0] * 4, "short_factor": [1.0] * 8}
FAMILIES = {
    "Gemma2": dict(head_dim=24, sliding_window=8, attn_logit_softcapping=2.0),
    "Phi3": dict(
        rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 16, **LONG},
        original_max_position_embeddings=16,
    ),
    "Olmo3": dict(sliding_window=8),
    "Granite": dict(residual_multiplier=0.4, attention_multiplier=0.3),
    "SmolLM3": dict(no_rope_layer_interval=2),
    "Glm4": dict(head_dim=24),
    "Cohere2": dict(logit_scale=0.7, sliding_window=8, num_hidden_layers=4),
    "Starcoder2": {},
    "DeepseekV3": dict(
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
    ),
    "StableLm": dict(use_parallel_residual=True, qk_layernorm=True),
    "Qwen2Moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
    | dict(shared_expert_intermediate_size=40),
    "GptOss": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=32, sliding_window=8),
    "Glm4Moe": dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
    | dict(use_qk_norm=True),
    "Ministral3": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.7}
        | {"original_max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path, make_hf_model, save_model):
    hf = make_hf_model(family, FAMILIES[family])
    save_model(hf, tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with Engine(model=str(tmp_path), dtype="float32", chunked_prefill_size=32) as engine:
        first, again = (engine.generate(PROMPTS, params) for _ in range(2))
    assert again[0].num_cached >= 48
    for prompt, one, other in zip(PROMPTS, first, again, strict=True):
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + one.token_ids]), use_cache=False).logits[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == one.token_ids
        assert other.token_ids == one.token_ids


def test_latents_come_back_from_host_memory(tmp_path, make_hf_model, save_model):
    """Pools whose values are empty, through records of the host cache."""
    save_model(make_hf_model("DeepseekV3", FAMILIES["DeepseekV3"]), tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    others = [[i, *range(3, 100)] for i in range(3)]
    options = dict(dtype="float32", page_size=16, kv_tokens=160, host_cache_ratio=4.0)
    with Engine(model=str(tmp_path), **options) as engine:
        (first,) = engine.generate(PROMPTS[:1], params)
        for other in others:  # each takes most of the pool, so nothing of the first stays there
            engine.generate([other], params)
        (again,) = engine.generate(PROMPTS[:1], params)
    assert again.num_cached >= 48 and again.token_ids == first.token_ids
