"""Qwen 2 and 2.5, and of their VL the language model: biases, windows on the upper layers.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, windows_by_layer


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Only q, k and v have biases."""
    return replace(config, qkv_bias=True, windows=upper_windows(hf, config.num_layers))


def upper_windows(hf: Fields, num_layers: int) -> tuple[int | None, ...]:
    """A window from layer max_window_layers on, if use_sliding_window is set."""
    if not hf.flag("use_sliding_window") or hf.get("sliding_window") is None:
        return (None,) * num_layers
    first = hf.get("max_window_layers")
    first = 28 if first is None else int(first)
    return windows_by_layer(hf, num_layers, range(first, num_layers))


DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096}
IGNORED = ("visual.", "model.visual.")
RENAMED = {"model.language_model.": "model."}
FAMILY = Family(
    "qwen2",
    ("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    "qwen2",
    refine,
    "biases of q, k and v, windows on upper layers; images are not read",
    DEFAULTS,
    ignored=IGNORED,
    renamed=RENAMED,
)
