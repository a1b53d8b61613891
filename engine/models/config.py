"""What a model is, as plain data.

Runs on: any (pure).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

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
