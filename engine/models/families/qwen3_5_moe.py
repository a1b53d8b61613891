"""Qwen 3.5 with experts (35B-A3B), the language model.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields
from .qwen2 import RENAMED
from .qwen2_moe import experts_beside_shared
from .qwen3_5 import IGNORED
from .qwen3_next import DEFAULTS, MOE_DEFAULTS, hybrid


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Qwen 3 Next's experts, and Qwen 3.5's tensors."""
    moe = experts_beside_shared(config, hf)
    return replace(hybrid(config, hf, interleaved=False), moe=moe)


FAMILY = Family(
    "qwen3_5_moe",
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    None,
    refine,
    "gated delta nets, gated attention in every fourth layer, experts beside a gated shared one; "
    "images are not read",
    {**DEFAULTS, **MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8}
    | {"intermediate_size": 1},  # of MLPs, which there are not
    ignored=IGNORED,
    renamed=RENAMED,
    partial_rotary=True,
)
