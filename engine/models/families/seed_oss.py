"""Seed-OSS: Llama with biases of q, k and v.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Each kind of bias has a field of its own."""
    return replace(
        config,
        qkv_bias=hf.flag("attention_bias", True),
        o_bias=hf.flag("attention_out_bias"),
        mlp_bias=hf.flag("mlp_bias"),
    )


FAMILY = Family(
    "seed_oss",
    ("SeedOssForCausalLM",),
    None,
    refine,
    "biases of q, k and v",
    {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
)
