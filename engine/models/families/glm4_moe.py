"""GLM-4.5, 4.6 and 4.7: half of each head rotates, experts beside shared ones.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields
from .deepseek_v3 import further_layers, sigmoid_experts


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """DeepSeek V3's experts behind grouped-query attention; the larger ones norm q and k."""
    return replace(
        config,
        qkv_bias=hf.flag("attention_bias"),
        qk_norm="head" if hf.flag("use_qk_norm") else None,
        moe=sigmoid_experts(config, hf),
        unread=further_layers(config, hf),
    )


FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    "glm4moe",
    refine,
    "experts beside shared ones, by sigmoids and a bias; partial rotary, norms of q and k",
    {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    | {"partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "n_routed_experts": 128}
    | {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    partial_rotary=True,
)
