"""Qwen 3 with experts (30B-A3B, 235B-A22B).

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import Family, Fields, ModelConfig
from .qwen2_moe import experts


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Norms on q and k; a window for all layers, where asked for."""
    bias = hf.flag("attention_bias")
    window = hf.integer("sliding_window") if hf.flag("use_sliding_window") else None
    return replace(
        config,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=(window,) * config.num_layers,
        moe=experts(config, hf),
    )


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    None,
    refine,
    "experts in all or some layers, norms of q and k",
    {"max_position_embeddings": 32_768, "sliding_window": 4096, "num_local_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
)
