"""llama.cpp's names and conventions in terms of Hugging Face's: metadata keys, tensors, layouts.

Sources: llama.cpp's converters (conversion/*.py) and the tables of its gguf package.

Runs on: any (pure).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .registry import FAMILIES, family_of_gguf

if TYPE_CHECKING:
    from torch import Tensor

    from .config import ModelConfig
    from .hf_config import Family

KEYS = {  # after the architecture's prefix; what a family calls otherwise is in FAMILY_KEYS
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
DEEPSEEK_KEYS = {
    "expert_count": "n_routed_experts",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
FAMILY_KEYS = {
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "granite": GRANITE_KEYS,
    "granite_moe": GRANITE_KEYS
    | {
        "expert_count": "num_local_experts",
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    "gpt_oss": {"expert_count": "num_local_experts"},
    "deepseek_v2": DEEPSEEK_KEYS,
    "deepseek_v3": DEEPSEEK_KEYS,
    "glm4_moe": {"expert_count": "n_routed_experts"},
    "mixtral": {"expert_count": "num_local_experts"},
}
# What llama.cpp does not write, since its own code has it.
FIXED = {
    "qwen3_moe": {"norm_topk_prob": True},
}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OLMO2_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
DEEPSEEK_TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
GEMMA_TENSORS = OLMO2_TENSORS | {"ffn_norm": "pre_feedforward_layernorm"}
FAMILY_TENSORS = {  # where they differ from LAYER_TENSORS
    "gemma2": GEMMA_TENSORS,
    "gemma3": GEMMA_TENSORS,
    "olmo2": OLMO2_TENSORS,
    "olmo3": OLMO2_TENSORS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "stablelm": {
        "attn_q_norm": "self_attn.q_layernorm.norms.{i}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{i}",
    },
    "deepseek_v2": DEEPSEEK_TENSORS,
    "deepseek_v3": DEEPSEEK_TENSORS,
    "glm4_moe": {"post_attention_norm": "post_attention_layernorm"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
}
EXPERTS = ("ffn_gate", "ffn_up", "ffn_down")  # with _exps, in the order of MoEConfig.projections
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as divisors of the frequencies
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # longrope
IN_THE_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Pairs of tensors that are one in Hugging Face's files; see `join`.
JOINED = {
    "ffn_gate_exps.bias": "ffn_up_exps.bias",
    "attn_k_b.weight": "attn_v_b.weight",
}

# llama.cpp rotates neighbouring pairs in these, so that rows of q and k are stored in that order.
PAIRED = ("llama", "mixtral", "granite", "granite_moe", "smollm3")
SIGMOID = 2  # expert_gating_func
PLUS_ONE = ("gemma2", "gemma3")  # norms are stored with the 1 added


def hf_fields(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    vocab_size: int,
    rope_factors: Mapping[str, list[float]],
) -> dict[str, Any]:
    """The fields that a config.json of the same model has (dtype is left to the caller).

    Args:
        tensors: names of all tensors.
        rope_factors: values of those of IN_THE_CONFIG that there are.
    """
    architecture = str(metadata.get("general.architecture"))
    family = _family(architecture, metadata)
    keys = KEYS | FAMILY_KEYS.get(family.name, {})
    fields = {
        name: metadata[f"{architecture}.{key}"]
        for key, name in keys.items()
        if f"{architecture}.{key}" in metadata
    }
    fields |= FIXED.get(family.name, {})
    if fields.get("num_nextn_predict_layers"):  # block_count counts these layers, too
        fields["num_hidden_layers"] -= fields["num_nextn_predict_layers"]
    fields["architectures"] = [family.architectures[0]]
    fields["vocab_size"] = vocab_size
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    has_bias = "blk.0.attn_q.bias" in tensors
    fields |= dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias"), has_bias)
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    has_qk_norm = "blk.0.attn_q_norm.weight" in tensors
    fields |= dict.fromkeys(("use_qk_norm", "qk_layernorm"), has_qk_norm)
    if architecture == "deepseek2":
        _latent_fields(fields)
        if family.name == "deepseek_v2" and fields.get("n_group", 1) > 1:
            fields["topk_method"] = "group_limited_greedy"
    if fields.get("sliding_window") == 0:  # Phi 4 has none
        fields["sliding_window"] = None
    fields["rope_scaling"] = _rope_scaling(architecture, metadata, fields, rope_factors)
    if family.name in PLUS_ONE:
        # Only the 27B models, with 46 and 62 layers, do not scale by the size of a head.
        if fields.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[family.name]:
            per_head = fields["hidden_size"] // fields["num_attention_heads"]
            fields["query_pre_attn_scalar"] = per_head
        else:
            fields["query_pre_attn_scalar"] = fields.get("head_dim", 256)
    return fields


def _latent_fields(fields: dict[str, Any]) -> None:
    """What llama.cpp says of DeepSeek's models in other words, or leaves out where it is false."""
    fields["qk_nope_head_dim"] = fields.get("head_dim", 0) - fields.get("qk_rope_head_dim", 0)
    fields.setdefault("q_lora_rank", None)
    fields.setdefault("norm_topk_prob", False)
    fields["num_key_value_heads"] = fields.get("num_attention_heads")  # the latent's one there


def _family(architecture: str, metadata: Mapping[str, Any]) -> Family:
    """Some families share an architecture's name."""
    if architecture == "llama" and metadata.get("llama.expert_count"):
        return FAMILIES["mixtral"]
    if architecture == "deepseek2" and metadata.get("deepseek2.expert_gating_func") == SIGMOID:
        return FAMILIES["deepseek_v3"]
    if architecture == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
        return FAMILIES["olmo3"]
    return family_of_gguf(architecture)


def _rope_scaling(
    architecture: str,
    metadata: Mapping[str, Any],
    fields: Mapping[str, Any],
    factors: Mapping[str, list[float]],
) -> dict[str, Any]:
    rope = f"{architecture}.rope."
    scaling: dict[str, Any] = {}
    dimensions, head_dim = metadata.get(rope + "dimension_count"), fields.get("head_dim")
    if head_dim is None and fields.get("num_attention_heads"):
        head_dim = fields.get("hidden_size", 0) // fields["num_attention_heads"]
    if dimensions and head_dim and dimensions != head_dim and architecture != "deepseek2":
        scaling["partial_rotary_factor"] = dimensions / head_dim
    original = metadata.get(rope + "scaling.original_context_length")
    if ROPE_FACTORS in factors:
        return scaling | {"rope_type": "factors", "factors": factors[ROPE_FACTORS]}
    if LONG_FACTORS in factors and SHORT_FACTORS in factors:
        scaling |= {
            "rope_type": "longrope",
            "long_factor": factors[LONG_FACTORS],
            "short_factor": factors[SHORT_FACTORS],
            "original_max_position_embeddings": original,
        }
        if rope + "scaling.attn_factor" in metadata:
            scaling["attention_factor"] = metadata[rope + "scaling.attn_factor"]
        return scaling
    kind = metadata.get(rope + "scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling |= {"rope_type": kind, "factor": metadata.get(rope + "scaling.factor")}
        if original:
            scaling["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if f"{rope}scaling.yarn_{key}" in metadata:
                scaling[key] = metadata[f"{rope}scaling.yarn_{key}"]
        if architecture == "gpt-oss":
            scaling["truncate"] = False
        if f"{rope}scaling.yarn_log_multiplier" in metadata:  # of DeepSeek, whose mscales are equal
            mscale = 10 * metadata[f"{rope}scaling.yarn_log_multiplier"]
            scaling["mscale"] = scaling["mscale_all_dim"] = mscale
    elif kind != "none":
        scaling["rope_type"] = kind
    return scaling


def hf_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The Hugging Face names of a tensor; none if there is none.

    Several where it is all experts' (or heads'), whose own tensors are along its first dimension.
    """
    stem, _, kind = name.rpartition(".")
    if stem in TENSORS:
        return (f"{TENSORS[stem]}.{kind}",)
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem)
    if match is None:
        return ()
    layer, part = f"model.layers.{match[1]}", match[2]
    names = (LAYER_TENSORS | FAMILY_TENSORS.get(config.family, {})) | _expert_tensors(config)
    if part not in names:
        return ()
    ours = names[part]
    if part in ("exp_probs_b", "attn_sinks"):  # parameters, not of a module
        return (f"{layer}.{ours}",)
    if kind == "bias" and part.endswith("_exps"):
        assert config.moe is not None
        stacked = config.moe.stacked[part == "ffn_down_exps"]
        return (f"{layer}.{config.moe.block}.{stacked}_bias",)
    if "{i}" not in ours:
        return (f"{layer}.{ours}.{kind}",)
    if ".experts." in ours:
        count = 0 if config.moe is None else config.moe.num_experts
    else:
        count = config.num_heads if part == "attn_q_norm" else config.num_kv_heads
    return tuple(f"{layer}.{ours}.{kind}".replace("{i}", str(i)) for i in range(count))


def as_kept(config: ModelConfig) -> ModelConfig:
    """The config with experts' gate, up and down apart, as all GGUF files have them."""
    moe, apart = config.moe, ("gate_proj", "up_proj", "down_proj")
    if moe is None or moe.projections:
        return config
    shared = moe.shared
    if shared is not None:
        shared = replace(shared, projections=apart)
    stacked = ("experts.gate_up_proj", "experts.down_proj")
    moe = replace(
        moe,
        projections=apart,
        stacked=stacked,
        transposed=False,
        interleaved=False,
        shared=shared,
    )
    return replace(config, moe=moe)


def is_unread(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is in the config already, or of a layer that predicts further tokens."""
    match = re.match(r"blk\.(\d+)\.", name)
    is_behind = match is not None and f"model.layers.{match[1]}." in config.unread
    return name in IN_THE_CONFIG or is_behind


def _expert_tensors(config: ModelConfig) -> dict[str, str]:
    moe = config.moe
    if moe is None:
        return {}
    names = {"ffn_gate_inp": f"{moe.block}.{moe.gate}"}
    for part, projection in zip(EXPERTS, moe.projections, strict=False):
        names[f"{part}_exps"] = f"{moe.block}.experts.{{i}}.{projection}"
    if moe.shared is not None:
        for part, projection in zip(EXPERTS, moe.shared.projections, strict=False):
            names[f"{part}_shexp"] = f"{moe.shared.name}.{projection}"
        if moe.shared.gate is not None:
            names["ffn_gate_inp_shexp"] = moe.shared.gate
    if moe.correction_bias is not None:
        names["exp_probs_b"] = f"{moe.block}.{moe.correction_bias}"
    return names


def join(first: Tensor, second: Tensor) -> Tensor:
    """Both of a pair of JOINED as one: biases [num_experts, inner] of gate and up, or DeepSeek's
    up-projections of keys [heads, rank, dim] and values [heads, dim, rank].
    """
    if first.dim() == 2:
        return torch.cat((first, second), dim=1)
    return torch.cat((first.transpose(1, 2), second), dim=1).flatten(0, 1)


def undo(name: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What brings a tensor (by its Hugging Face name) back to Hugging Face's layout.

    It moves whole rows, if anything, of matrices, so that it serves rows of packed blocks, too.
    """
    if config.family in PAIRED and ".q_proj." in name:
        return lambda tensor: _halves(tensor, config.num_heads)
    if config.family in PAIRED and ".k_proj." in name:
        return lambda tensor: _halves(tensor, config.num_kv_heads)
    if config.family in PLUS_ONE and "norm." in name:
        return lambda tensor: tensor - 1
    shared = None if config.moe is None else config.moe.shared
    if shared is not None and shared.gate is not None and name.endswith(f"{shared.gate}.weight"):
        return lambda tensor: tensor.view(1, -1)
    return lambda tensor: tensor


def _halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs to two halves: [heads * head_dim, ...]."""
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
