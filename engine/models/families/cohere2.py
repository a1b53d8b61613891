"""Cohere Command R7B and A: Command R with windows on three layers of four; only those rotate.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, windows_by_layer
from . import cohere


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """The layers that see all have no rotary embedding."""
    pattern = hf.integer("sliding_window_pattern", 4)
    sliding = [layer for layer in range(config.num_layers) if (layer + 1) % pattern]
    windows = windows_by_layer(hf, config.num_layers, sliding)
    rotates = tuple(window is not None for window in windows)
    return replace(cohere.refine(config, hf), windows=windows, rotates=rotates)


FAMILY = Family(
    "cohere2",
    ("Cohere2ForCausalLM",),
    "cohere2",
    refine,
    "Command R's blocks, three layers of four with a window, the fourth without rotary embedding",
    {"max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True},
)
