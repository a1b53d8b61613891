"""Ministral: Mistral with a window on the layers that layer_types names.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, windows_by_layer
from .mistral import DEFAULTS


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Without layer_types all layers have a window, or none where sliding_window is null."""
    sliding = () if hf.get("sliding_window") is None else range(config.num_layers)
    return replace(config, windows=windows_by_layer(hf, config.num_layers, sliding))


FAMILY = Family(
    "ministral",
    ("MinistralForCausalLM",),
    None,
    refine,
    "windows on some layers",
    DEFAULTS,
)
