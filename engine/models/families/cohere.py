"""Cohere Command R and R+: attention and MLP in parallel, layer norms, pairs rotate.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import LayerNorms, ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Both halves of a block have the same input; R+ norms q and k."""
    bias = hf.flag("attention_bias")
    return replace(
        config,
        rope=replace(config.rope, interleaved=True),
        norm="layer",
        norm_eps=hf.number("layer_norm_eps", 1e-5),
        layer_norms=LayerNorms(before_mlp=None),
        parallel=True,
        qk_norm="each_head" if hf.flag("use_qk_norm") else None,
        logit_scale=hf.number("logit_scale", 0.0625),
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILY = Family(
    "cohere",
    ("CohereForCausalLM",),
    "command-r",
    refine,
    "attention and MLP in parallel, layer norms, rotary in pairs, scaled logits",
    {"max_position_embeddings": 8192, "rope_theta": 500_000.0, "tie_word_embeddings": True},
)
