"""Qwen 3.5, the language model: Qwen 3 Next's layers with dense MLPs.

Runs on: any (pure).
"""

from ..config import ModelConfig
from ..hf_config import Family, Fields
from .qwen2 import RENAMED
from .qwen3_next import DEFAULTS, hybrid


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """The delta net's projections are tensors of their own."""
    return hybrid(config, hf, interleaved=False)


IGNORED = ("mtp.", "model.visual.")
FAMILY = Family(
    "qwen3_5",
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    None,
    refine,
    "gated delta nets, gated attention in every fourth layer; images are not read",
    {**DEFAULTS, "num_key_value_heads": 4},
    ignored=IGNORED,
    renamed=RENAMED,
    partial_rotary=True,
)
