"""Starcoder2: layer norms and linears with biases, an MLP without a gate.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, one_window


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """One window for all layers, none where sliding_window is null."""
    bias = hf.flag("use_bias", True)
    return replace(
        config,
        windows=one_window(hf, config.num_layers),
        norm="layer",
        norm_bias=True,
        norm_eps=hf.number("norm_epsilon", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        mlp_names=("c_fc", "c_proj"),
    )


FAMILY = Family(
    "starcoder2",
    ("Starcoder2ForCausalLM",),
    "starcoder2",
    refine,
    "layer norms and linears with biases, an MLP without a gate, a window on all layers",
    {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    | {"max_position_embeddings": 4096},
)
