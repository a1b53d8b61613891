"""Qwen 3 Next (80B-A3B): gated delta nets, gated attention in every fourth layer, experts.

Runs on: any (pure).
"""

from dataclasses import replace

from ...api.errors import StartError
from ..config import DeltaNetConfig, ModelConfig, SharedExpert
from ..hf_config import Family, Fields
from .qwen2_moe import experts


def hybrid(config: ModelConfig, hf: Fields, interleaved: bool) -> ModelConfig:
    """Zero-centred norms, delta nets where layer_types says so, and attention with output gates."""
    num_layers, interval = config.num_layers, hf.integer("full_attention_interval", 4)
    known = {"linear_attention": True, "full_attention": False}
    types = hf.get("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(num_layers)
    ]
    if len(types) != num_layers or not all(t in known for t in types):
        raise StartError(f"model config: layer_types {types!r:.80} are not supported")
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
            layers=tuple(known[t] for t in types),
            interleaved=interleaved,
        ),
    )


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Experts beside a gated shared one."""
    shared = SharedExpert(
        "mlp.shared_expert",
        hf.integer("shared_expert_intermediate_size"),
        gate="mlp.shared_expert_gate",
    )
    moe = replace(experts(config, hf), shared=shared)
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
