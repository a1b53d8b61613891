"""Qwen 3, dense, and the language model of Qwen3-VL: RMS norms over each head of q and k.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields
from .qwen2 import DEFAULTS, IGNORED, RENAMED, upper_windows


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Norms on q and k in place of Qwen 2's biases."""
    bias = hf.flag("attention_bias")
    return replace(
        config,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=upper_windows(hf, config.num_layers),
    )


FAMILY = Family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    "qwen3",
    refine,
    "norms of q and k, windows on upper layers; images are not read",
    {"head_dim": 128, **DEFAULTS},
    ignored=IGNORED,
    renamed=RENAMED,
)
