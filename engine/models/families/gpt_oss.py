"""gpt-oss (20b, 120b): sinks, a window on every other layer, experts with a clamped SwiGLU.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import ModelConfig, MoEConfig
from ..hf_config import Family, Fields, windows_by_layer


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """A softmax over the chosen experts' logits is what renormalizing one over all gives."""
    if (hf.number("swiglu_alpha", 1.702), hf.number("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise StartError("model config: swiglu_alpha and swiglu_limit must be 1.702 and 7")
    bias = hf.flag("attention_bias", True)
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        windows=windows_by_layer(hf, config.num_layers, range(0, config.num_layers, 2)),
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts", 128),
            intermediate_size=config.intermediate_size,
            router=RouterSpec(hf.integer("num_experts_per_tok", 4)),
            layers=(True,) * config.num_layers,
            gate="router",
            gate_bias=True,
            projections=(),
            transposed=True,
            interleaved=True,
            bias=True,
            activation="swiglu_clamped",
        ),
    )


YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 4096}
FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    "gpt-oss",
    refine,
    "sinks, a window on every other layer, clamped SwiGLU, biases everywhere",
    {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131_072, "rope_theta": 150_000.0, "rope_scaling": YARN},
)
