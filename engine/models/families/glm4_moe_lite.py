"""GLM-4.7-Flash: DeepSeek V3's blocks, with a kind for each layer.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields, layer_kinds
from . import deepseek_v3


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """mlp_layer_types says which layers have experts, else first_k_dense_replace."""
    config = deepseek_v3.refine(config, hf)
    assert config.moe is not None
    kinds = {"sparse": True, "dense": False}
    layers = layer_kinds(hf, "mlp_layer_types", kinds, config.moe.layers)
    return replace(config, moe=replace(config.moe, layers=layers))


FAMILY = Family(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM",),
    None,
    refine,
    "latent attention, experts beside shared ones, chosen by sigmoids and a bias",
    {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64}
    | {"n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 202_752, "num_nextn_predict_layers": 1},
)
