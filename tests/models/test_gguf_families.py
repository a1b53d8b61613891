"""GGUF files of every family that has them: the logits of transformers, float and quantized."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML
from gguf_files import convert, write

from stoker.backends import registry
from stoker.engine.api.errors import StartError
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.quantization.gguf import GgufConfig
from stoker.engine.models.registry import FAMILIES
from stoker.engine.runtime import gguf_weights, model_files

GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA2 = dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=8, tie_word_embeddings=True)
GEMMA2 |= dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
OLMO3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3)
GRANITE |= dict(logits_scaling=1.5, rms_norm_eps=0.1)
MOE = dict(num_experts_per_tok=2)
QWEN2_MOE = MOE | dict(num_experts=8, moe_intermediate_size=64, shared_expert_intermediate_size=32)
GRANITE_MOE = MOE | GRANITE | dict(num_local_experts=6)
GPT_OSS = MOE | dict(head_dim=32, num_local_experts=6, sliding_window=8)
GPT_OSS |= {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    | {"truncate": False, "original_max_position_embeddings": 32}
}
MLA = MOE | dict(n_routed_experts=8, moe_intermediate_size=64, first_k_dense_replace=1)
MLA |= dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32, n_group=1)
MLA |= dict(qk_rope_head_dim=8, num_key_value_heads=4, topk_group=1)
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
DEEPSEEK_YARN |= dict(original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7)
GLM_MOE = MOE | dict(n_routed_experts=8, moe_intermediate_size=64, first_k_dense_replace=1)
GLM_MOE |= dict(n_group=4, topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=False)


def longrope(original: int, **fields) -> dict:
    factors = {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0] * 4 + [5.0] * 4,
    }
    given = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **fields}
    given["original_max_position_embeddings"] = original
    return {"rope_parameters": given, "original_max_position_embeddings": original}


CASES = {  # transformers' family, llama.cpp's architecture, fields of a small config
    "llama": ("Llama", "llama", {}),
    "mixtral": ("Mixtral", "llama", MOE | dict(num_local_experts=4, sliding_window=None)),
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen3": ("Qwen3", "qwen3", dict(head_dim=32)),
    "gemma2": ("Gemma2", "gemma2", GEMMA2),
    "gemma3": (
        "Gemma3",
        "gemma3",
        dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=8, tie_word_embeddings=True)
        | dict(num_hidden_layers=7, rope_parameters=GEMMA_ROPE),
    ),
    "phi3": ("Phi3", "phi3", dict(sliding_window=None)),
    "phi3 windows": ("Phi3", "phi3", dict(sliding_window=7)),
    "phi3 longrope": ("Phi3", "phi3", longrope(24, attention_factor=1.3)),
    "phi3 partial rotary": (
        "Phi3",
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
         | {"partial_rotary_factor": 0.75}},
    ),
    "olmo2": ("Olmo2", "olmo2", {}),
    "olmo3": (
        "Olmo3",
        "olmo2",
        dict(num_hidden_layers=5, sliding_window=8, rope_parameters=OLMO3_ROPE),
    ),
    "granite": ("Granite", "granite", GRANITE),
    "smollm3": ("SmolLM3", "smollm3", dict(num_hidden_layers=5)),
    "glm4": ("Glm4", "glm4", dict(head_dim=24)),
    "glm4 without biases": ("Glm4", "glm4", dict(head_dim=24, attention_bias=False)),
    "cohere": ("Cohere", "command-r", dict(logit_scale=0.7, tie_word_embeddings=True)),
    "cohere norms of q and k": (
        "Cohere",
        "command-r",
        dict(logit_scale=0.7, tie_word_embeddings=True, use_qk_norm=True),
    ),
    "cohere2": (
        "Cohere2",
        "cohere2",
        dict(logit_scale=0.7, sliding_window=8, num_hidden_layers=5, tie_word_embeddings=True),
    ),
    "starcoder2": ("Starcoder2", "starcoder2", dict(sliding_window=None)),
    "starcoder2 without biases": ("Starcoder2", "starcoder2", dict(use_bias=False)
                                  | dict(sliding_window=None)),
    "stablelm": ("StableLm", "stablelm", dict(use_qkv_bias=True)),
    "stablelm parallel, norms of q and k": (
        "StableLm",
        "stablelm",
        dict(use_parallel_residual=True, qk_layernorm=True),
    ),
    "qwen2 moe": ("Qwen2Moe", "qwen2moe", QWEN2_MOE),
    "qwen3 moe": (
        "Qwen3Moe",
        "qwen3moe",
        MOE | dict(head_dim=32, num_experts=8, moe_intermediate_size=64, norm_topk_prob=True),
    ),
    "olmoe": ("Olmoe", "olmoe", MOE | dict(num_experts=6)),
    "granite moe": ("GraniteMoe", "granitemoe", GRANITE_MOE),
    "granite moe, shared": (
        "GraniteMoeShared",
        "granitemoe",
        GRANITE_MOE | dict(shared_intermediate_size=32),
    ),
    "gpt oss": ("GptOss", "gpt-oss", GPT_OSS),
    "deepseek v2 lite": ("DeepseekV2", "deepseek2", MLA | dict(q_lora_rank=None)),
    "deepseek v2, groups, yarn": (
        "DeepseekV2",
        "deepseek2",
        MLA
        | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | dict(rope_parameters=DEEPSEEK_YARN, routed_scaling_factor=1.5),
    ),
    "deepseek v3": (
        "DeepseekV3",
        "deepseek2",
        MLA
        | dict(n_group=4, topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True)
        | dict(rope_parameters=DEEPSEEK_YARN),
    ),
    "glm4 moe": ("Glm4Moe", "glm4moe", GLM_MOE | dict(attention_bias=True)),
    "glm4 moe, norms of q and k": (
        "Glm4Moe",
        "glm4moe",
        GLM_MOE | dict(use_qk_norm=True, head_dim=32, num_nextn_predict_layers=0),
    ),
}  # fmt: skip
TOKENS = list(range(3, 60))


def hf_logits(hf) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([TOKENS]), use_cache=False).logits[0]


def test_every_family_with_a_gguf_name_has_a_case():
    with_names = {family.gguf for family in FAMILIES.values() if family.gguf is not None}
    assert with_names == {architecture for _, architecture, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_floats(case, tmp_path, make_hf_model, loop, float32_model):
    family, architecture, fields = CASES[case]
    hf = make_hf_model(family, fields)
    files = model_files.resolve(
        str(write(tmp_path / "a.gguf", architecture, *convert(hf, architecture)))
    )
    assert f"{family}ForCausalLM" in FAMILIES[files.config.family].architectures
    model = float32_model(files.config)
    model.load(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
    (ours,) = loop(model, 1, len(TOKENS)).step([(0, TOKENS)])
    torch.testing.assert_close(ours, hf_logits(hf), rtol=0, atol=1e-4)


def quantized(tensors: dict) -> dict:
    """Matrices in types that differ from part to part, as llama.cpp's mixtures do."""
    kinds = {"attn_v": GGML.Q8_0, "ffn_down": GGML.Q5_1, "token_embd": GGML.Q8_0}
    result = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2].removesuffix("_exps").removesuffix("_shexp")
        is_float = "norm" in name or "gate_inp" in name or name.endswith(".bias")
        if tensor.ndim > 1 and not is_float and tensor.shape[-1] % 32 == 0:
            kind = kinds.get(part, GGML.Q4_1)
            tensor = gguf.quants.quantize(tensor, kind), kind
        result[name] = tensor
    return result


@pytest.mark.parametrize("case", CASES)
def test_packed(case, tmp_path, make_hf_model, loop, float32_model):
    """Weights that stay packed give what the same file's give as floats, but for the inputs'
    rounding.
    """
    ops = registry.select("cpu").ops
    if not ops.gguf_types:
        pytest.skip("no provider multiplies packed GGUF weights here")
    family, architecture, fields = CASES[case]
    metadata, tensors = convert(make_hf_model(family, fields), architecture)
    path = write(tmp_path / "a.gguf", architecture, metadata, quantized(tensors))
    files = model_files.resolve(str(path))
    config = gguf_weights.keep_packed(files.gguf, files.config, ops)
    assert isinstance(config.quantization, GgufConfig)
    num_packed = sum(t.type.name.startswith("Q") for t in files.gguf.tensors.values())
    assert num_packed > 5 and len(config.quantization.schemes) >= num_packed
    packed = Decoder(config, ops, torch.device("cpu"), torch.float32)
    packed.load(gguf_weights.from_gguf(files.gguf, config, torch.float32))
    floats = float32_model(files.config)
    floats.load(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
    got, want = (
        loop(model, 1, len(TOKENS), page_size=16).step([(0, TOKENS)])[0]
        for model in (packed, floats)
    )
    # Of each token; the median, since a router's near ties send some to other experts.
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert 1e-3 < errors.median() < 0.08
    assert got.isfinite().all()


@pytest.mark.parametrize(
    "part, shape, message",
    [
        ("blk.1.ffn_up", (97, 64), r"model\.layers\.1\.mlp\.up_proj\.weight has the shape"),
        ("blk.0.attn_k", (32, 96), r"model\.layers\.0\.self_attn\.k_proj\.weight has the shape"),
        ("token_embd", (300, 32), r"model\.embed_tokens\.weight has the shape"),
    ],
)
def test_misshapen_packed_tensors_are_named(part, shape, message, tmp_path, make_hf_model):
    ops = registry.select("cpu").ops
    if not ops.gguf_types:
        pytest.skip("no provider multiplies packed GGUF weights here")
    metadata, tensors = convert(make_hf_model("Qwen2", {}), "qwen2")
    tensors[f"{part}.weight"] = np.ones(shape, np.float32)
    path = write(tmp_path / "a.gguf", "qwen2", metadata, quantized(tensors))
    files = model_files.resolve(str(path))
    config = gguf_weights.keep_packed(files.gguf, files.config, ops)
    with pytest.raises(StartError, match=message):
        model = Decoder(config, ops, torch.device("cpu"), torch.float32)
        model.load(gguf_weights.from_gguf(files.gguf, config, torch.float32))


def test_experts_of_a_wrong_number_are_named(tmp_path, make_hf_model):
    family, architecture, fields = CASES["olmoe"]
    metadata, tensors = convert(make_hf_model(family, fields), architecture)
    tensors["blk.2.ffn_down_exps.weight"] = tensors["blk.2.ffn_down_exps.weight"][:5]
    files = model_files.resolve(str(write(tmp_path / "a.gguf", architecture, metadata, tensors)))
    with pytest.raises(StartError, match=r"blk\.2\.ffn_down_exps\.weight is of 5 parts, not 6"):
        next(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
