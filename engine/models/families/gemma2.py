"""Gemma 2: softcaps, a norm on both sides of attention and MLP, every other layer with a window.

Runs on: any (pure).
"""

from dataclasses import replace

from ...api.errors import StartError
from ..config import LayerNorms, ModelConfig
from ..hf_config import Family, Fields, windows_by_layer

SANDWICH_NORMS = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Norms that multiply by 1 + weight; a softcap that is null is none."""
    if hf.get("use_bidirectional_attention"):
        raise StartError("model config: use_bidirectional_attention is not supported")
    bias = hf.flag("attention_bias")
    return replace(
        config,
        attention_scale=hf.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=hf.number_or_none("attn_logit_softcapping"),
        logit_softcap=hf.number_or_none("final_logit_softcapping"),
        windows=windows_by_layer(hf, config.num_layers, range(0, config.num_layers, 2)),
        qkv_bias=bias,
        o_bias=bias,
        norm_plus_one=True,
        layer_norms=SANDWICH_NORMS,
        embed_scale=config.hidden_size**0.5,
        round_embed_scale=True,
    )


FAMILY = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    "gemma2",
    refine,
    "softcaps of attention and logits, sandwich norms, every other layer with a window",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
