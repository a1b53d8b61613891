"""ERNIE 4.5, dense and with experts: neighbouring pairs rotate.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import ModelConfig, MoEConfig, SharedExpert
from ..hf_config import Family, Fields


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """One field for all biases, with experts that of the head, too."""
    bias, has_experts = hf.flag("use_bias"), config.architecture == "Ernie4_5_MoeForCausalLM"
    if bias and has_experts:
        raise StartError("model config: use_bias is not supported with experts")
    return replace(
        config,
        rope=replace(config.rope, interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        moe=experts(config, hf) if has_experts else None,
    )


def experts(config: ModelConfig, hf: Fields) -> MoEConfig:
    """Experts beside shared ones, on every moe_layer_interval-th layer of a range."""
    size, num_shared = hf.integer("moe_intermediate_size"), hf.count("moe_num_shared_experts")
    first, last = hf.count("moe_layer_start_index", 1), hf.get("moe_layer_end_index")
    end = config.num_layers if last in (None, -1) else hf.count("moe_layer_end_index") + 1
    step = hf.integer("moe_layer_interval", 1)
    return MoEConfig(
        num_experts=hf.integer("moe_num_experts"),
        intermediate_size=size,
        router=RouterSpec(hf.integer("moe_k")),
        layers=tuple(
            first <= layer < end and (layer + 1) % step == 0 for layer in range(config.num_layers)
        ),
        correction_bias="moe_statics.e_score_correction_bias",
        shared=SharedExpert("mlp.shared_experts", num_shared * size) if num_shared else None,
    )


FAMILY = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    None,
    refine,
    "rotary in pairs; experts beside shared ones, by a softmax and a bias",
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_theta": 500_000.0}
    | {"tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6}
    | {"moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
    ignored=("model.mtp_",),
)
