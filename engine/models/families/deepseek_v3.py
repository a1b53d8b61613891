"""DeepSeek V3, V3.1, R1, Kimi K2 and K2.5: V2 with sigmoid scores and a bias for the choice.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import ModelConfig, MoEConfig
from ..hf_config import Family, Fields
from .deepseek_v2 import experts, latent_attention
from .gemma3 import RENAMED


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """The last layers, which predict further tokens, are left unread."""
    return latent_attention(
        replace(config, moe=sigmoid_experts(config, hf), unread=further_layers(config, hf)), hf
    )


def sigmoid_experts(config: ModelConfig, hf: Fields) -> MoEConfig:
    """Experts by their scores' sigmoids, of the groups whose best two are largest."""
    method, scoring = hf.get("topk_method"), hf.get("scoring_func")
    if method not in (None, "noaux_tc") or scoring not in (None, "sigmoid"):
        raise StartError(
            f"model config: topk_method {method!r:.80} by {scoring!r:.80} is not supported"
        )
    router = RouterSpec(
        hf.integer("num_experts_per_tok", 8),
        "sigmoid",
        num_groups=hf.integer("n_group", 1),
        top_groups=hf.integer("topk_group", 1),
        renormalize=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
    )
    return replace(experts(config, hf, router), correction_bias="gate.e_score_correction_bias")


def further_layers(
    config: ModelConfig, hf: Fields, number: str = "num_nextn_predict_layers"
) -> tuple[str, ...]:
    """Names of the layers behind the last, of which each predicts one token more."""
    last = config.num_layers + hf.count(number)
    return tuple(f"model.layers.{layer}." for layer in range(config.num_layers, last))


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
    None,  # llama.cpp calls it deepseek2
    refine,
    "latent attention, experts beside shared ones, in groups, by sigmoids and a bias",
    {"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8}
    | {"topk_group": 4, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    | {"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5}
    | {"max_position_embeddings": 4096},
    ignored=("vision_tower.", "model.vision_tower.", "mm_projector.", "model.mm_projector."),
    renamed=RENAMED,
)
