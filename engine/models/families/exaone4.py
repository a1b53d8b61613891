"""EXAONE 4: norms behind attention and MLP only; layers that see all have no rotary embedding.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, windows_by_layer
from . import olmo2


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """OLMo 2's places of norms; without windows (1.2B) every layer rotates."""
    config = replace(olmo2.refine(config, hf), qk_norm="head")
    if hf.get("sliding_window") is None:
        return config
    pattern = hf.get("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) else hf.integer("sliding_window_pattern", 4)
    sliding = [layer for layer in range(config.num_layers) if (layer + 1) % period]
    windows = windows_by_layer(hf, config.num_layers, sliding)
    return replace(config, windows=windows, rotates=tuple(w is not None for w in windows))


FAMILY = Family(
    "exaone4",
    ("Exaone4ForCausalLM",),
    None,
    refine,
    "OLMo 2's norms, norms of q and k; layers with a window, others without rotary embedding",
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
)
