"""llama.cpp's names and conventions in terms of Hugging Face's: metadata keys, tensors, layouts.

Runs on: any (pure).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from .registry import family_of_gguf

if TYPE_CHECKING:
    from torch import Tensor

    from .config import ModelConfig

KEYS = {  # after the architecture's prefix
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as divisors of the frequencies


def hf_fields(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    vocab_size: int,
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    """The fields that a config.json of the same model has (dtype is left to the caller).

    Args:
        tensors: names of all tensors.
        rope_factors: values of the tensor ROPE_FACTORS, if there is one.
    """
    architecture = str(metadata.get("general.architecture"))
    family = family_of_gguf(architecture)
    fields = {
        name: metadata[f"{architecture}.{key}"]
        for key, name in KEYS.items()
        if f"{architecture}.{key}" in metadata
    }
    fields["architectures"] = [family.architectures[0]]
    fields["vocab_size"] = vocab_size
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    fields["rope_scaling"] = _rope_scaling(architecture, metadata, fields, rope_factors)
    if family.name == "gemma3":
        # Only the 27B model, with 62 layers, does not scale by the size of a head.
        if fields.get("num_hidden_layers") == 62:
            per_head = fields["hidden_size"] // fields["num_attention_heads"]
            fields["query_pre_attn_scalar"] = per_head
        else:
            fields["query_pre_attn_scalar"] = fields.get("head_dim", 256)
    return fields


def _rope_scaling(
    architecture: str,
    metadata: Mapping[str, Any],
    fields: Mapping[str, Any],
    factors: list[float] | None,
) -> dict[str, Any]:
    if factors is not None:
        return {"rope_type": "factors", "factors": factors}
    rope = f"{architecture}.rope."
    scaling: dict[str, Any] = {}
    dimensions, head_dim = metadata.get(rope + "dimension_count"), fields.get("head_dim")
    if dimensions and head_dim and dimensions != head_dim:
        scaling["partial_rotary_factor"] = dimensions / head_dim
    kind = metadata.get(rope + "scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling |= {"rope_type": kind, "factor": metadata.get(rope + "scaling.factor")}
        original = metadata.get(rope + "scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        scaling["rope_type"] = kind
    return scaling


def hf_name(name: str, family: str) -> str | None:
    """The Hugging Face name of a tensor, None if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in TENSORS:
        return f"{TENSORS[stem]}.{kind}"
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        layer_tensors = GEMMA_TENSORS if family == "gemma3" else LAYER_TENSORS
        if match[2] in layer_tensors:
            return f"model.layers.{match[1]}.{layer_tensors[match[2]]}.{kind}"
    return None


def undo(name: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What brings a tensor (by its Hugging Face name) back to Hugging Face's layout.

    llama.cpp rotates neighbouring pairs in models of the architecture llama, so their q and k
    rows are stored in that order; and it stores Gemma's norm weights with the 1 added.
    """
    if config.family == "llama" and ".q_proj." in name:
        return lambda tensor: _halves(tensor, config.num_heads)
    if config.family == "llama" and ".k_proj." in name:
        return lambda tensor: _halves(tensor, config.num_kv_heads)
    if config.family == "gemma3" and "norm." in name:
        return lambda tensor: tensor - 1
    return lambda tensor: tensor


def _halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs to two halves: [heads * head_dim, ...]."""
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
