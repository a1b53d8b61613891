"""Qwen 3 with experts (30B-A3B, 235B-A22B), and the language model of its VL.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields
from .qwen2 import IGNORED, RENAMED
from .qwen2_moe import experts


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Norms on q and k; a window for all layers, where asked for.

    Of the VL all experts' tensors lie in one, columns first.
    """
    bias = hf.flag("attention_bias")
    window = hf.integer("sliding_window") if hf.flag("use_sliding_window") else None
    moe = experts(config, hf)
    if config.architecture == "Qwen3VLMoeForConditionalGeneration":
        router = replace(moe.router, renormalize=True)
        moe = replace(moe, router=router, projections=(), transposed=True)
    return replace(
        config,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=(window,) * config.num_layers,
        moe=moe,
    )


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3moe",
    refine,
    "experts in all or some layers, norms of q and k; images are not read",
    {"max_position_embeddings": 32_768, "sliding_window": 4096, "num_local_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ignored=IGNORED,
    renamed=RENAMED,
)
