"""Qwen 3 Next (80B-A3B): gated delta nets, gated attention in every fourth layer, experts.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import DeltaNetConfig, ModelConfig
from ..hf_config import Family, Fields, layer_kinds
from .qwen2_moe import experts_beside_shared


def hybrid(config: ModelConfig, hf: Fields, interleaved: bool) -> ModelConfig:
    """Zero-centred norms, delta nets where layer_types says so, and attention with output gates."""
    interval = hf.integer("full_attention_interval", 4)
    by_interval = tuple((layer + 1) % interval != 0 for layer in range(config.num_layers))
    kinds = {"linear_attention": True, "full_attention": False}
    bias = hf.flag("attention_bias")
    return replace(
        config,
        norm_plus_one=True,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        output_gate=True,
        delta_net=DeltaNetConfig(
            num_key_heads=hf.integer("linear_num_key_heads", 16),
            num_value_heads=hf.integer("linear_num_value_heads", 32),
            key_dim=hf.integer("linear_key_head_dim", 128),
            value_dim=hf.integer("linear_value_head_dim", 128),
            kernel_size=hf.integer("linear_conv_kernel_dim", 4),
            layers=layer_kinds(hf, "layer_types", kinds, by_interval),
            interleaved=interleaved,
        ),
    )


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Experts beside a gated shared one."""
    moe = experts_beside_shared(config, hf)
    return replace(hybrid(config, hf, interleaved=True), moe=moe)


DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32_768}
DEFAULTS |= {"rms_norm_eps": 1e-6, "num_key_value_heads": 2}
MOE_DEFAULTS = {"norm_topk_prob": True, "moe_intermediate_size": 512}
MOE_DEFAULTS |= {"shared_expert_intermediate_size": 512}

FAMILY = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    None,
    refine,
    "gated delta nets, gated attention in every fourth layer, experts beside a gated shared one",
    {**DEFAULTS, **MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
    ignored=("mtp.",),
    partial_rotary=True,
)
