"""OLMo 3: OLMo 2 with windows on three layers of four, whose rope is never scaled.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, rope, windows_by_layer
from . import olmo2


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Scaling, where there is any, is that of the layers that see all."""
    sliding = [layer for layer in range(config.num_layers) if (layer + 1) % 4]
    given = hf.table("rope_parameters").get("sliding_attention") or {}
    local = Fields({"rope_parameters": {"rope_theta": config.rope.theta, **given}})
    return replace(
        olmo2.refine(config, hf),
        windows=windows_by_layer(hf, config.num_layers, sliding),
        rope=rope(hf, config.head_dim, "full_attention"),
        local_rope=rope(local, config.head_dim),
    )


FAMILY = Family(
    "olmo3",
    ("Olmo3ForCausalLM",),
    None,  # llama.cpp calls it olmo2
    refine,
    "OLMo 2's norms, three layers of four with a window and a rope of their own",
    olmo2.DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096},
)
