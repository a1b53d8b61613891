"""Names of architectures to families, fields of config.json to configs.

Runs on: gpu.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..api.errors import StartError
from .config import ModelConfig
from .families import (
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granite_moe,
    llama,
    minimax_m2,
    ministral,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from .hf_config import Family, Fields, common
from .quantization import config as quantization

FAMILIES = {
    m.FAMILY.name: m.FAMILY
    for m in (
        llama,
        mistral,
        ministral,
        mistral3,
        mixtral,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_moe,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        gpt_oss,
        gemma2,
        gemma3,
        phi3,
        olmo2,
        olmo3,
        olmoe,
        granite,
        granite_moe,
        smollm3,
        glm4,
        glm4_moe,
        glm4_moe_lite,
        cohere,
        cohere2,
        starcoder2,
        stablelm,
        exaone4,
        ernie4_5,
        seed_oss,
        minimax_m2,
        deepseek_v2,
        deepseek_v3,
    )
}  # in the order that errors list them
BY_ARCHITECTURE = {a: f for f in FAMILIES.values() for a in f.architectures}
BY_GGUF = {f.gguf: f for f in FAMILIES.values() if f.gguf is not None}


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A model's config from the fields of its config.json; `auto_map` and the like are ignored.

    Raises:
        StartError: the architecture is not supported, or a field makes no sense.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or not names:
        raise StartError("config.json names no architecture, so this is no model that can be run")
    architecture = str(names[0])
    family = _lookup(BY_ARCHITECTURE, architecture)
    fields = dict(hf)
    if isinstance(hf.get("text_config"), Mapping):  # a vision-language model's language model
        fields |= hf["text_config"]
        if hf.get("tie_word_embeddings") is not None:  # the head belongs to the whole
            fields["tie_word_embeddings"] = hf["tie_word_embeddings"]
    given = Fields(fields, family.defaults)
    config = common(family, architecture, given)
    if quantized := given.table("quantization_config"):
        config = replace(config, quantization=quantization.parse(Fields(quantized), family.renamed))
    return family.refine(config, given)


def family_of_gguf(architecture: str) -> Family:
    """The family of a `general.architecture`."""
    return _lookup(BY_GGUF, architecture)


def _lookup(families: Mapping[str, Family], name: str) -> Family:
    if name in families:
        return families[name]
    nearest = difflib.get_close_matches(name, families, n=1, cutoff=0.0)[0]
    raise StartError(
        f"architecture {name!r:.80} is not supported (nearest: {nearest}); "
        f"there are {', '.join(families)}"
    )
