"""Mistral Small 3.1, Ministral 3: the language model of those that see images.

Runs on: any (pure).
"""

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config import Family, Fields
from . import mistral
from .gemma3 import IGNORED, RENAMED


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Mistral; Ministral 3 also scales queries beyond the length that it was first trained on."""
    scaling = Fields(hf.table("rope_parameters") or hf.table("rope_scaling"))
    if scaling.get("llama_4_scaling_beta") is not None:
        beta = scaling.number("llama_4_scaling_beta")
        length = scaling.integer("original_max_position_embeddings")
        config = replace(config, query_scaling=(beta, length))
    return mistral.refine(config, hf)


FAMILY = Family(
    "mistral3",
    ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
    None,
    refine,
    "queries scaled by position; images are not read",
    {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 262_144},
    ignored=IGNORED,
    renamed=RENAMED,
)
