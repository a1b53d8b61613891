"""SmolLM3: Llama with every fourth layer without a rotary embedding.

Runs on: any (pure).
"""

from dataclasses import replace

from ...api.errors import StartError
from ..config import ModelConfig
from ..hf_config import Family, Fields, windows_by_layer


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """no_rope_layers has a 1 for each layer that does rotate."""
    num_layers, rotates = config.num_layers, hf.get("no_rope_layers")
    if rotates is None:
        interval = hf.integer("no_rope_layer_interval", 4)
        rotates = [(layer + 1) % interval for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise StartError(f"model config: no_rope_layers {rotates!r:.80} is not supported")
    bias = hf.flag("attention_bias")
    has_window = hf.flag("use_sliding_window") and hf.get("sliding_window") is not None
    sliding = [layer for layer in range(num_layers) if has_window and not rotates[layer]]
    return replace(
        config,
        rotates=tuple(bool(r) for r in rotates),
        windows=windows_by_layer(hf, num_layers, sliding),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag("mlp_bias"),
    )


FAMILY = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    "smollm3",
    refine,
    "layers without rotary embedding",
    {"num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0}
    | {"tie_word_embeddings": True},
)
