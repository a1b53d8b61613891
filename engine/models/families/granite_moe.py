"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite's multipliers, a shared expert or none.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ..config import ModelConfig, MoEConfig, SharedExpert
from ..hf_config import Family, Fields
from . import granite


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """All experts' projections are in one tensor, gate before up."""
    size = hf.count("shared_intermediate_size")
    into, out = "input_linear", "output_linear"
    return replace(
        granite.refine(config, hf),
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts", 8),
            intermediate_size=config.intermediate_size,
            router=RouterSpec(hf.integer("num_experts_per_tok", 2)),
            layers=(True,) * config.num_layers,
            block="block_sparse_moe",
            gate="router.layer",
            projections=(),
            stacked=(f"{into}.weight", f"{out}.weight"),
            shared=SharedExpert("shared_mlp", size, (into, out)) if size else None,
        ),
    )


FAMILY = Family(
    "granite_moe",
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    "granitemoe",
    refine,
    "Granite's multipliers, experts in all layers, a shared one where asked for",
)
