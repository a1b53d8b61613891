"""Phi 3, 3.5 and 4: Llama with q, k and v, and gate and up, in one tensor each.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, one_window


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """One window for all layers, none where sliding_window is null."""
    return replace(
        config,
        windows=one_window(hf, config.num_layers),
        fused_qkv=True,
        mlp_names=("gate_up_proj", "down_proj"),
    )


FAMILY = Family(
    "phi3",
    ("Phi3ForCausalLM",),
    "phi3",
    refine,
    "fused projections, longrope, partial rotary, a window on all layers",
    {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    partial_rotary=True,
)
