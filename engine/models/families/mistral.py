"""Mistral: Llama with a sliding window over all layers; later releases switch it off.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, one_window


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """One window for all layers, none where sliding_window is null."""
    return replace(config, windows=one_window(hf, config.num_layers))


DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
FAMILY = Family(
    "mistral",
    ("MistralForCausalLM",),
    None,  # llama.cpp calls it llama
    refine,
    "a window on all layers",
    DEFAULTS,
)
