"""Qwen 3 with experts (30B-A3B, 235B-A22B).

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ..config import Family, Fields, ModelConfig, MoEConfig


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Experts in every layer, or in every decoder_sparse_step-th, but for mlp_only_layers."""
    bias, step = hf.flag("attention_bias"), hf.integer("decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or ()
    window = hf.integer("sliding_window") if hf.flag("use_sliding_window") else None
    moe = MoEConfig(
        num_experts=hf.integer("num_experts", hf.get("num_local_experts")),
        intermediate_size=hf.integer("moe_intermediate_size", 768),
        router=RouterSpec(
            hf.integer("num_experts_per_tok", 8), renormalize=hf.flag("norm_topk_prob")
        ),
        layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)
        ),
    )
    return replace(
        config,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=(window,) * config.num_layers,
        moe=moe,
    )


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    None,
    refine,
    "experts in all or some layers, norms of q and k",
    {"max_position_embeddings": 32_768, "sliding_window": 4096, "num_local_experts": 128},
)
