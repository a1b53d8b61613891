"""OLMo 2: norms behind attention and MLP only, and over all of q and of k.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import LayerNorms, ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """The residual stream itself goes into attention and MLP."""
    bias = hf.flag("attention_bias")
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="projection",
        layer_norms=LayerNorms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    )


DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILY = Family(
    "olmo2",
    ("Olmo2ForCausalLM",),
    "olmo2",
    refine,
    "norms behind attention and MLP only, norms of q and k over all heads",
    DEFAULTS,
)
