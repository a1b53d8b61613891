"""Mixtral: Mistral with experts in every layer.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ..config import ModelConfig, MoEConfig
from ..hf_config import Family, Fields, one_window


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Two experts a token by default; one window for all layers, where there is one."""
    return replace(
        config,
        windows=one_window(hf, config.num_layers),
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts", 8),
            intermediate_size=config.intermediate_size,
            router=RouterSpec(hf.integer("num_experts_per_tok", 2)),
            layers=(True,) * config.num_layers,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    )


FAMILY = Family(
    "mixtral",
    ("MixtralForCausalLM",),
    None,  # llama.cpp calls it llama
    refine,
    "experts in all layers",
    {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    | {"rope_theta": 1e6},
)
