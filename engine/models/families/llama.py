"""Llama 2 and 3, and the many models of that shape (SmolLM2, TinyLlama, Yi, ...).

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Biases, where a model has them."""
    bias = hf.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=hf.flag("mlp_bias"))


FAMILY = Family(
    "llama",
    ("LlamaForCausalLM",),
    "llama",
    refine,
    "biases where asked for",
    real_model="SmolLM2 135M",
)
