"""Greedy tokens of two real models, in float32, equal those of transformers."""

import pytest
import torch

from stoker.engine.runtime import gguf_weights


@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_greedy_tokens_of_a_gguf_file_equal_those_of_transformers(
    name, request, loop, float32_model
):
    files = request.getfixturevalue(name)
    items = request.getfixturevalue(f"{name}_greedy")
    model = float32_model(files.config)
    model.load(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
    prompts = [item["prompt_ids"] for item in items]
    expected = [item["output_ids"] for item in items]
    num_new = [len(tokens) for tokens in expected]
    longest = max(len(p) + n for p, n in zip(prompts, num_new, strict=True))
    outputs = loop(model, len(prompts), longest, page_size=16).greedy(prompts, num_new, chunk=37)
    assert outputs == expected


def test_gemma_answers_as_transformers_does_here(gemma3_270m, gemma3_270m_greedy):
    """transformers' own Gemma 3, in float32 with the file's weights, gives the recorded tokens."""
    transformers = pytest.importorskip("transformers")
    c = gemma3_270m.config
    assert c.local_rope is not None
    window = next(w for w in c.windows if w is not None)
    config = transformers.Gemma3TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.norm_eps,
        query_pre_attn_scalar=round(c.attention_scale**-2),
        sliding_window=window,
        layer_types=["sliding_attention" if w else "full_attention" for w in c.windows],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": c.rope.theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope.theta},
        },
        tie_word_embeddings=True,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    tensors = dict(gguf_weights.from_gguf(gemma3_270m.gguf, c, torch.float32))
    result = model.load_state_dict(tensors, strict=False)
    assert result.missing_keys in ([], ["lm_head.weight"]) and not result.unexpected_keys
    model.tie_weights()
    for item in gemma3_270m_greedy[:6]:
        prompt, output = item["prompt_ids"], item["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output
