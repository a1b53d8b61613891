"""Gemma 3, the text model: five layers with a window, then one that sees all.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, rope, windows_by_layer
from . import gemma2


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Gemma 2 with q and k norms in place of attention's softcap, and two rotary embeddings."""
    pattern = hf.integer("sliding_window_pattern", 6)
    sliding = [layer for layer in range(config.num_layers) if (layer + 1) % pattern]
    return replace(
        gemma2.refine(config, hf),
        attention_softcap=None,
        rope=rope(hf, config.head_dim, "full_attention"),
        local_rope=rope(_local(hf), config.head_dim),
        windows=windows_by_layer(hf, config.num_layers, sliding),
        qk_norm="head",
    )


def _local(hf: Fields) -> Fields:
    """Rope fields of the layers with a window: a base frequency of their own, never scaled."""
    given = hf.table("rope_parameters").get("sliding_attention") or {}
    theta = hf.number("rope_local_base_freq", 10_000.0)
    return Fields({"rope_parameters": {"rope_theta": theta, **given}})


IGNORED = (  # what sees, in older and newer checkpoints
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)
RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "gemma3",
    refine,
    "sandwich norms, norms of q and k, 5 of 6 layers with a window and a rope of their own",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    real_model="Gemma 3 270M",
    ignored=IGNORED,
    renamed=RENAMED,
)
