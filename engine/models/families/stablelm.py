"""StableLM: layer norms, a quarter of each head rotates; blocks may be parallel.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import PRE_NORMS, LayerNorms, ModelConfig
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """StableLM 2 12B has parallel blocks and norms of q and k."""
    parallel = hf.flag("use_parallel_residual")
    return replace(
        config,
        norm="layer",
        norm_bias=True,
        norm_eps=hf.number("layer_norm_eps", 1e-5),
        layer_norms=LayerNorms(before_mlp=None) if parallel else PRE_NORMS,
        parallel=parallel,
        qk_norm="each_head" if hf.flag("qk_layernorm") else None,
        qk_norm_names=("q_layernorm.norms.{head}", "k_layernorm.norms.{head}"),
        qkv_bias=hf.flag("use_qkv_bias"),
    )


FAMILY = Family(
    "stablelm",
    ("StableLmForCausalLM",),
    "stablelm",
    refine,
    "layer norms, partial rotary; parallel blocks and norms of q and k where asked for",
    {"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
    partial_rotary=True,
)
