"""GLM-4: half of each head rotates, in pairs; from GLM-4-0414 on with sandwich norms.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import PRE_NORMS, LayerNorms, ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """GLM-4-9B (GlmForCausalLM) still has the norms of Llama."""
    sandwich = LayerNorms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    return replace(
        config,
        rope=replace(config.rope, interleaved=True),
        qkv_bias=hf.flag("attention_bias"),
        mlp_names=("gate_up_proj", "down_proj"),
        layer_norms=sandwich if config.architecture == "Glm4ForCausalLM" else PRE_NORMS,
    )


FAMILY = Family(
    "glm4",
    ("Glm4ForCausalLM", "GlmForCausalLM"),
    "glm4",
    refine,
    "partial rotary in pairs, sandwich norms, fused gate and up",
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    partial_rotary=True,
)
