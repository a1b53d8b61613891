"""Granite 3: Llama with multipliers of embeddings, attention, sublayers and logits.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Every sublayer's output is multiplied by m before it is added to the residual stream.

    Here the stream is divided by m instead: RMS norms do not see that, but for their eps, which
    is divided by m^2. So Granite costs no op more than Llama.
    """
    bias, m = hf.flag("attention_bias"), hf.number("residual_multiplier", 1.0)
    return replace(
        config,
        attention_scale=hf.number("attention_multiplier", 1.0),
        embed_scale=hf.number("embedding_multiplier", 1.0) / m,
        norm_eps=config.norm_eps / m**2,
        logit_scale=1 / hf.number("logits_scaling", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag("mlp_bias"),
    )


FAMILY = Family(
    "granite",
    ("GraniteForCausalLM",),
    "granite",
    refine,
    "multipliers of embeddings, attention, sublayers and logits",
)
