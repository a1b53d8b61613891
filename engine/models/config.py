"""What a model is, read from config.json or GGUF metadata as plain data; no code named there runs.

Runs on: any (pure).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...backends.api import RouterSpec
from ..api.errors import StartError

if TYPE_CHECKING:
    from .quantization.config import QuantConfig
    from .quantization.gguf import GgufConfig

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; the formulas are in `rope.inverse_frequencies`.

    Attributes:
        rotary_dim: how many leading dimensions of a head rotate.
        factors: [rotary_dim / 2] divisors of the frequencies, where kind is "factors" (GGUF), or
            "longrope" and the served context is longer than the original.
        short_factors: those where it is not.
        attention_factor: multiplies cosines and sines (yarn, longrope).
        interleaved: neighbouring pairs rotate, not two halves.
    """

    rotary_dim: int
    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every token goes through, beside the experts.

    Attributes:
        name: what precedes its projections in a layer's names.
        projections: as in `ModelConfig.mlp_names`.
        gate: name of a linear in the layer whose sigmoid weighs the output; None does not.
    """

    name: str
    intermediate_size: int
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts in place of the MLP.

    Attributes:
        intermediate_size: of one expert.
        layers: per layer whether it has experts.
        block: what precedes the names below in those of a layer's tensors.
        gate: name of the router.
        gate_bias: the router has a bias.
        correction_bias: name of the bias [num_experts] for the choice of experts alone, or None.
        projections: names of an expert's gate, up and down projections, behind `experts.0` and so
            on; none where checkpoints have the tensors of all experts in one only.
        stacked: names of those: gate and up [num_experts, 2 * inner, hidden], the gate's rows
            first, and down [num_experts, hidden, inner].
        transposed: stacked ones are [num_experts, hidden, 2 * inner] and [num_experts, inner,
            hidden] instead; or, unless interleaved, as their shapes say.
        interleaved: gate and up take turns in stacked ones.
        bias: the projections have biases, all experts' in one tensor, `stacked` with "_bias".
        activation: of the experts, see `ExpertWeights`; None for the model's.
    """

    num_experts: int
    intermediate_size: int
    router: RouterSpec
    layers: tuple[bool, ...]
    block: str = "mlp"
    gate: str = "gate"
    gate_bias: bool = False
    correction_bias: str | None = None
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    activation: str | None = None
    shared: SharedExpert | None = None

    def __post_init__(self) -> None:
        router, num = self.router, self.num_experts
        if num % router.num_groups or router.top_groups > router.num_groups:
            raise StartError(
                f"model config: {router.top_groups} of {router.num_groups} groups of {num} experts"
            )
        eligible = num // router.num_groups * router.top_groups
        if router.top_k > eligible:
            raise StartError(f"model config: {router.top_k} experts a token of {eligible}")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
        q_rank: of the queries' latent; None where they are projected at once.
        kv_rank: of the latent that is cached.
        nope_dim, rope_dim: of a head's query and key, the parts that do not rotate and do; the
            latter is one for all heads' keys, and cached.
        value_dim: of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated delta nets in place of attention (Yang et al. 2024).

    Attributes:
        num_key_heads, num_value_heads: each of the former serves some of the latter.
        key_dim, value_dim: of a head.
        kernel_size: of the convolution of q, k and v.
        layers: per layer whether it is one.
        interleaved: q, k, v and z are in one tensor, a key head's next to each other, and b and a
            in another (Qwen 3 Next); else all q, k and v in one, z, b and a in one each.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    layers: tuple[bool, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise StartError(
                f"model config: {self.num_value_heads} value heads are no multiple of "
                f"{self.num_key_heads} key heads"
            )


class LayerNorms(NamedTuple):
    """Names of a layer's norms; None where there is no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = LayerNorms()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder as the blocks build it.

    Attributes:
        dtype: the type that the weights were saved in, "bfloat16", "float16" or "float32".
        windows: per layer the sliding window in tokens, None where a layer sees all.
        rope: of the layers that see all, and of the others too unless local_rope is set.
        rotates: per layer whether it has a rotary embedding; empty for all.
        attention_scale: multiplies q k^T.
        attention_softcap: attention logits become softcap * tanh(logits / softcap).
        query_scaling: (beta, length): queries at position p are multiplied by
            1 + beta ln(1 + floor(p / length)).
        has_sinks: heads have sinks, see `AttentionSpec`.
        gated_mlp: down(activation(gate(x)) * up(x)), else down(activation(up(x))).
        mlp_names: of the projections in; gate and up may lie in one tensor; and of the one out.
        fused_qkv: q, k and v lie in one tensor, qkv_proj.
        norm: "rms" or "layer" for the norms of the residual stream.
        norm_bias: layer norms add a bias.
        norm_plus_one: RMS norms multiply by 1 + weight, in float32 (Gemma).
        layer_norms: where a layer's norms are.
        parallel: attention and MLP have the same input, and both are added to it.
        qk_norm: RMS norms of q and k over each head ("head") or over all heads at once
            ("projection"), or layer norms with a weight for each head ("each_head").
        output_gate: what attention gives is multiplied by the sigmoid of a gate, which q_proj has
            behind each head's query.
        qk_norm_names: of those norms; "{head}" where each head has a tensor of its own.
        embed_scale: multiplies embeddings.
        round_embed_scale: it is rounded to the model's type first (Gemma).
        logit_scale: multiplies logits.
        logit_softcap: logits become softcap * tanh(logits / softcap).
        moe: None where every layer has one MLP.
        latent: latent attention in place of grouped queries; then head_dim is that of a query, and
            `rope` is of its part that rotates.
        delta_net: gated delta nets in some layers.
        unread: prefixes of tensors that are left unread: layers that predict further tokens.
        quantization: how linears are kept; None where all are floats.
    """

    family: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    attention_scale: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    local_rope: RopeConfig | None = None
    rotates: tuple[bool, ...] = ()
    attention_softcap: float | None = None
    query_scaling: tuple[float, int] | None = None
    has_sinks: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    fused_qkv: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_plus_one: bool = False
    layer_norms: LayerNorms = PRE_NORMS
    parallel: bool = False
    qk_norm: Literal["head", "each_head", "projection"] | None = None
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    output_gate: bool = False
    embed_scale: float | None = None
    round_embed_scale: bool = False
    logit_scale: float | None = None
    logit_softcap: float | None = None
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    delta_net: DeltaNetConfig | None = None
    unread: tuple[str, ...] = ()
    quantization: QuantConfig | GgufConfig | None = None

    @property
    def longest_context(self) -> int:
        """Tokens, of which dynamic scaling allows more than the model was made for."""
        if self.rope.kind != "dynamic":
            return self.max_position_embeddings
        return int(self.max_position_embeddings * self.rope.factor)


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
    types = hf.get("layer_types")
    if types is None:
        sliding = [layer in default for layer in range(num_layers)]
    else:
        known = {"sliding_attention": True, "full_attention": False}
        if len(types) != num_layers or not all(t in known for t in types):
            raise StartError(f"model config: layer_types {types!r:.80} are not supported")
        sliding = [known[t] for t in types]
    return tuple(hf.integer("sliding_window") if s else None for s in sliding)
