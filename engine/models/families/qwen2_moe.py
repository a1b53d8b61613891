"""Qwen 1.5 and 2 with experts (A2.7B, 57B-A14B): Qwen 2 with a gated shared expert beside them.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ..config import ModelConfig, MoEConfig, SharedExpert
from ..hf_config import Family, Fields, windows_by_layer


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Windows, where asked for, are on every second layer below max_window_layers."""
    windows, first = config.windows, hf.count("max_window_layers", 28)
    if hf.flag("use_sliding_window"):
        windows = windows_by_layer(hf, config.num_layers, range(0, first, 2))
    return replace(
        config,
        qkv_bias=hf.flag("qkv_bias", True),
        windows=windows,
        moe=experts_beside_shared(config, hf),
    )


def experts_beside_shared(config: ModelConfig, hf: Fields) -> MoEConfig:
    """Experts, and a gated one that every token has."""
    shared = SharedExpert(
        "mlp.shared_expert",
        hf.integer("shared_expert_intermediate_size"),
        gate="mlp.shared_expert_gate",
    )
    return replace(experts(config, hf), shared=shared)


def experts(config: ModelConfig, hf: Fields) -> MoEConfig:
    """Experts in every layer, or in every decoder_sparse_step-th, but for mlp_only_layers."""
    step, dense = hf.integer("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return MoEConfig(
        num_experts=hf.integer("num_experts", hf.get("num_local_experts")),
        intermediate_size=hf.integer("moe_intermediate_size"),
        router=RouterSpec(hf.integer("num_experts_per_tok"), renormalize=hf.flag("norm_topk_prob")),
        layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)
        ),
    )


FAMILY = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    "qwen2moe",
    refine,
    "experts beside a gated shared one in all or some layers, biases of q, k and v",
    {"max_position_embeddings": 32_768, "sliding_window": 4096, "num_local_experts": 60}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632},
)
