"""OLMoE: experts in all layers, norms over all of q and of k.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import ModelConfig, MoEConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """The weights of a token's experts stay as the softmax over all gave them."""
    if hf.get("clip_qkv") is not None:
        raise StartError("model config: clip_qkv is not supported")
    bias = hf.flag("attention_bias")
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="projection",
        moe=MoEConfig(
            num_experts=hf.integer("num_experts", 64),
            intermediate_size=config.intermediate_size,
            router=RouterSpec(
                hf.integer("num_experts_per_tok", 8), renormalize=hf.flag("norm_topk_prob")
            ),
            layers=(True,) * config.num_layers,
        ),
    )


FAMILY = Family(
    "olmoe",
    ("OlmoeForCausalLM",),
    "olmoe",
    refine,
    "experts in all layers, norms of q and k over all heads",
    {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
