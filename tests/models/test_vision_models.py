"""The language models of vision-language models: text alone gives transformers' logits."""

import pytest
import torch
import transformers
from safetensors.torch import save_file

from stoker.engine.runtime import model_files, weights

TOKENS = list(range(3, 40))
TEXT = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
TEXT |= dict(initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=0)
QWEN = dict(image_token_id=290, video_token_id=291, vision_start_token_id=292)
QWEN |= dict(vision_end_token_id=293)
QWEN2_VISION = dict(depth=1, num_heads=2, embed_dim=16, patch_size=4)
QWEN3_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4)
QWEN3_VISION |= dict(out_hidden_size=64, num_position_embeddings=16, deepstack_visual_indexes=[0])


def mrope(*section, **fields):
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **fields}


def yarn(**fields):
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    scaled |= {"original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    return scaled | {"llama_4_scaling_beta": 0.7}


QWEN3 = dict(head_dim=16, rope_parameters=mrope(4, 2, 2, mrope_interleaved=True))
MOE = QWEN3 | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
PIXTRAL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
PIXTRAL |= dict(head_dim=8, image_size=8, patch_size=4, model_type="pixtral")
MISTRAL3 = dict(image_token_index=290, tie_word_embeddings=False)
DEEPSEEK = dict(model_type="deepseek_v3", num_key_value_heads=4, first_k_dense_replace=1)
DEEPSEEK |= dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=12, n_group=2)
DEEPSEEK |= dict(qk_rope_head_dim=8, n_routed_experts=8, moe_intermediate_size=48, topk_group=1)
DEEPSEEK |= dict(num_experts_per_tok=2)
MODELS = {  # class, fields of the outer config, of the language model's, of the vision tower's
    "qwen2 vl": ("Qwen2VL", QWEN, dict(rope_parameters=mrope(2, 3, 3)), QWEN2_VISION),
    "qwen2.5 vl, tied": (
        "Qwen2_5_VL",
        QWEN | dict(tie_word_embeddings=True),
        dict(rope_parameters=mrope(2, 3, 3), tie_word_embeddings=True),
        dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4)
        | dict(out_hidden_size=64, fullatt_block_indexes=[0]),
    ),
    "qwen3 vl": ("Qwen3VL", QWEN, QWEN3, QWEN3_VISION),
    "qwen3 vl moe": ("Qwen3VLMoe", QWEN, MOE, QWEN3_VISION),
    "kimi k2.5": (
        "Kimi_K25",
        dict(tie_word_embeddings=False, image_token_id=290, video_token_id=291)
        | dict(projection_hidden_size=16),
        DEEPSEEK,
        dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=16)
        | dict(patch_size=4, pos_emb_height=4, pos_emb_width=4),
    ),
    "mistral small 3.1": (
        "Mistral3",
        MISTRAL3,
        dict(model_type="mistral", head_dim=24, sliding_window=None),
        PIXTRAL,
    ),
    "ministral 3": (
        "Mistral3",
        MISTRAL3,
        dict(model_type="ministral3", head_dim=24, rope_parameters=yarn()),
        PIXTRAL,
    ),
}


def make(name, outer, text, vision):
    """A random model, with norms and biases that matter."""
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(text_config=TEXT | text, vision_config=vision, **outer)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 or "norm" in key:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("layout", ["saved", "other"])
@pytest.mark.parametrize("case", MODELS)
def test_text_alone(case, layout, tmp_path, loop, float32_model):
    hf = make(*MODELS[case])
    hf.save_pretrained(tmp_path)
    if layout == "other" or case == "kimi k2.5":
        tensors = {}
        for name, tensor in hf.state_dict().items():
            if layout == "saved":  # as published; transformers saves other names
                name = name.replace("model.language_model.", "language_model.model.")
                name = name.replace("lm_head.", "language_model.lm_head.")
            elif case == "qwen3 vl moe" and "experts" in name:
                tensor = tensor.transpose(1, 2)  # as in the published ones
            if name != "lm_head.weight" or not hf.config.tie_word_embeddings:
                tensors[name] = tensor.contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
    if case == "kimi k2.5":
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace("Kimi_K25For", "KimiK25For"))
    files = model_files.resolve(str(tmp_path))
    model = float32_model(files.config)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    (ours,) = loop(model, 1, len(TOKENS)).step([(0, TOKENS)])
    with torch.inference_mode():
        theirs = hf(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
