"""MiniMax M2: experts by sigmoids and a bias in all layers, norms over all of q and of k.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import ModelConfig, MoEConfig
from ..hf_config import Family, Fields
from .deepseek_v3 import further_layers


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Published configs say how much of a head rotates by rotary_dim."""
    rotary_dim = hf.integer("rotary_dim", config.rope.rotary_dim)
    if rotary_dim % 2 or rotary_dim > config.head_dim:
        raise StartError(f"model config: rotary_dim {rotary_dim} of {config.head_dim}")
    return replace(
        config,
        rope=replace(config.rope, rotary_dim=rotary_dim),
        qk_norm="projection",
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts", 256),
            intermediate_size=config.intermediate_size,
            router=RouterSpec(hf.integer("num_experts_per_tok", 8), "sigmoid"),
            layers=(True,) * config.num_layers,
            block="block_sparse_moe",
            correction_bias="e_score_correction_bias",
            projections=("w1", "w3", "w2"),
        ),
        unread=further_layers(config, hf, "num_mtp_modules"),
    )


FAMILY = Family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM",),
    None,
    refine,
    "experts in all layers, by sigmoids and a bias; partial rotary, norms of q and k",
    {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608}
    | {"rope_theta": 5e6},
    partial_rotary=True,
)
