"""Fields of config.json, or of GGUF metadata, to a `ModelConfig`; no code named there runs.

Runs on: any (pure).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api.errors import StartError
from .config import ModelConfig, RopeConfig


class Fields:
    """A config's fields with the family's defaults; every read checks the type."""

    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self._fields = {**(defaults or {}), **fields}

    def get(self, key: str) -> Any:
        """The raw value; None where it is absent or null."""
        return self._fields.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StartError(f"model config: {key} must be a positive integer, not {value!r:.80}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer that may be 0."""
        value = self._read(key, default)
        return 0 if value == 0 and value is not False else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._read(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise StartError(f"model config: {key} must be a positive number, not {value!r:.80}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A positive number; None where it is absent or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._read(key, default)
        if not isinstance(value, bool):
            raise StartError(f"model config: {key} must be true or false, not {value!r:.80}")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object; empty where it is absent."""
        value = self._read(key, {})
        if not isinstance(value, Mapping):
            raise StartError(f"model config: {key} must be an object, not {value!r:.80}")
        return dict(value)

    def _read(self, key: str, default: Any) -> Any:
        value = self._fields.get(key)
        if value is None:
            value = default
        if value is None:
            raise StartError(f"model config: {key} is missing")
        return value


@dataclass(frozen=True, slots=True)
class Family:
    """What one family of models differs in.

    Attributes:
        features: what is special in it, in a few words, for `stoker models`.
        architectures: names in `architectures` of config.json.
        gguf: name in `general.architecture`, None where another family's name is used.
        defaults: values of fields that config.json may leave out (those of transformers).
        refine: changes the common config into the family's.
        ignored: prefixes of tensors that are left unread (a vision tower).
        renamed: prefixes of tensor names and what they become.
        partial_rotary: the field partial_rotary_factor is honoured, else refused.
        real_model: published weights that a test compares with transformers, too.
    """

    name: str
    architectures: tuple[str, ...]
    gguf: str | None
    refine: Callable[[ModelConfig, Fields], ModelConfig]
    features: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    real_model: str | None = None


ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def common(family: Family, architecture: str, hf: Fields) -> ModelConfig:
    """The fields that all families share, from the fields of a config.json.

    Raises:
        StartError: a field is missing, has another type, or asks for what no block does.
    """
    num_heads, hidden_size = hf.integer("num_attention_heads"), hf.integer("hidden_size")
    num_kv_heads = hf.integer("num_key_value_heads", num_heads)
    head_dim = hf.integer("head_dim", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise StartError(
            f"model config: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise StartError(f"model config: head_dim {head_dim} is odd, so it cannot rotate")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise StartError(
            f"model config: activation {activation!r} is not supported; "
            f"there are {', '.join(ACTIVATIONS)}"
        )
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise StartError(f"model config: dtype {dtype!r:.80} is not supported")
    num_layers = hf.integer("num_hidden_layers")
    return ModelConfig(
        family=family.name,
        architecture=architecture,
        dtype=dtype,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.integer("max_position_embeddings", 2048),
        norm_eps=hf.number("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        rope=rope(hf, head_dim, partial=family.partial_rotary),
        windows=(None,) * num_layers,
        activation=ACTIVATIONS[activation],
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
    )


def rope(
    hf: Fields, head_dim: int, layer_type: str | None = None, partial: bool = False
) -> RopeConfig:
    """Rotary embedding from rope_parameters, or from rope_theta and rope_scaling (older files).

    Args:
        layer_type: which entry, where rope_parameters has one for each type of layer.
        partial: partial_rotary_factor of the head's dimensions rotate, where it is given.
    """
    given = hf.table("rope_parameters")
    if layer_type is not None and isinstance(given.get(layer_type), Mapping):
        given = given[layer_type]
    fields = Fields(given or hf.table("rope_scaling"))
    max_positions = hf.integer("max_position_embeddings", 2048)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = fields.number("rope_theta", hf.number("rope_theta", 10_000.0))
    share = fields.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    if share != 1 and not partial:
        raise StartError("model config: partial_rotary_factor is not supported")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise StartError(f"model config: {rotary_dim} of {head_dim} dimensions cannot rotate")
    original = hf.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings", max_positions),
    )
    match kind:
        case "default" | "mrope":  # of text, all of mrope's three positions are equal
            return RopeConfig(rotary_dim, theta)
        case "linear":
            return RopeConfig(rotary_dim, theta, "linear", fields.number("factor"))
        case "llama3":
            return RopeConfig(
                rotary_dim,
                theta,
                "llama3",
                fields.number("factor"),
                original,
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
            )
        case "yarn":
            factor = fields.number("factor", max_positions / original)
            return RopeConfig(
                rotary_dim,
                theta,
                "yarn",
                factor,
                original,
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                truncate=fields.flag("truncate", True),
                attention_factor=_yarn_attention_factor(fields, factor),
            )
        case "dynamic":
            return RopeConfig(rotary_dim, theta, "dynamic", fields.number("factor"), max_positions)
        case "longrope" | "su":  # su is its older name
            factor = fields.number("factor", max_positions / original)
            by_length = 1.0
            if factor > 1:  # Ding et al. 2024
                by_length = math.sqrt(1 + math.log(factor) / math.log(original))
            return RopeConfig(
                rotary_dim,
                theta,
                "longrope",
                factor,
                original,
                attention_factor=fields.number("attention_factor", by_length),
                factors=_factors(fields, "long_factor", rotary_dim),
                short_factors=_factors(fields, "short_factor", rotary_dim),
            )
        case "factors":
            factors = _factors(fields, "factors", rotary_dim)
            return RopeConfig(rotary_dim, theta, "factors", factors=factors)
    raise StartError(
        f"model config: rope type {kind!r:.80} is not supported; "
        "there are default, linear, llama3, yarn, longrope, dynamic"
    )


def _factors(fields: Fields, key: str, rotary_dim: int) -> tuple[float, ...]:
    values = fields.get(key)
    if not isinstance(values, list | tuple) or len(values) != rotary_dim // 2:
        raise StartError(
            f"model config: {key} must be a list of {rotary_dim // 2} numbers, not {values!r:.80}"
        )
    numbers = Fields({f"{key}[{i}]": value for i, value in enumerate(values)})
    return tuple(numbers.number(f"{key}[{i}]") for i in range(len(values)))


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """Given, or by the factor, or a quotient of two such (DeepSeek)."""
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        mscale, all_dim = fields.number("mscale"), fields.number("mscale_all_dim")
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1 (Peng et al. 2023, eq. 22, with a weight of 1)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def one_window(hf: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The same window for all layers, none where sliding_window is null."""
    window = None if hf.get("sliding_window") is None else hf.integer("sliding_window")
    return (window,) * num_layers


def windows_by_layer(hf: Fields, num_layers: int, default: Collection[int]) -> tuple:
    """Per layer the sliding window or None, by `layer_types`, or for the `default` layers."""
    kinds = {"sliding_attention": True, "full_attention": False}
    by_default = tuple(layer in default for layer in range(num_layers))
    sliding = layer_kinds(hf, "layer_types", kinds, by_default)
    return tuple(hf.integer("sliding_window") if s else None for s in sliding)


def layer_kinds(
    hf: Fields, key: str, kinds: Mapping[str, bool], default: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Per layer whether it is of a kind, by a field that names each layer's, or `default`.

    Raises:
        StartError: the field names another kind, or those of another number of layers.
    """
    given = hf.get(key)
    if given is None:
        return default
    if len(given) != len(default) or not all(kind in kinds for kind in given):
        raise StartError(f"model config: {key} {given!r:.80} are not supported")
    return tuple(kinds[kind] for kind in given)
