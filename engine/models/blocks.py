"""The blocks that decoders are made of, and the decoder that a config makes of them.

A block declares its tensors by their Hugging Face names when it is made; `Decoder.load` brings
them. Ops, device and type come by argument, so several models can live in one process.

Runs on: gpu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.api import AttentionSpec, ExpertWeights, LayerWeights, Rope
from ..api.errors import StartError

if TYPE_CHECKING:
    from ...backends.api import BatchMeta, LayerCache, Ops
    from .config import ModelConfig, MoEConfig, RopeConfig


class Parameters:
    """The tensors that a model expects: name to shape, and where each goes when it comes."""

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype):
        self.ops, self.device, self.dtype = ops, device, dtype
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._put: dict[str, Callable[[Tensor], None]] = {}

    def expect(self, name: str, shape: tuple[int, ...], put: Callable[[Tensor], None]) -> None:
        """Declare a tensor; `put` copies what it is given."""
        self.shapes[name] = shape
        self._put[name] = put

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put every tensor in its place.

        Raises:
            StartError: a tensor is missing, unexpected, twice there, or has another shape.
        """
        missing = dict.fromkeys(self.shapes)
        for name, tensor in weights:
            shape = self.shapes.get(name)
            if shape is None:
                raise StartError(f"the weights hold a tensor {name!r:.200} that the model lacks")
            if name not in missing:
                raise StartError(f"the weights hold the tensor {name} twice")
            if tuple(tensor.shape) != shape:
                raise StartError(
                    f"the tensor {name} has the shape {list(tensor.shape)}, not {list(shape)}"
                )
            del missing[name]
            self._put[name](tensor)
        if missing:
            first = next(iter(missing))
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise StartError(f"the weights lack the tensor {first}{more}")


class Linear:
    """A packed weight, fused out of parts that lie row after row.

    Args:
        parts: name to output features, in order.

    Attributes:
        packed: what the ops take, once all parts are loaded.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, bias: bool, parameters: Parameters
    ):
        self._parameters = parameters
        self._shape = (sum(parts.values()), in_features)
        self._weight: Tensor | None = None  # until all parts are there
        self._bias: Tensor | None = None
        self._has_bias = bias
        self._pending: set[str] = set()
        self.packed: Any = None
        start = 0
        for name, size in parts.items():
            rows = slice(start, start + size)
            self._expect(f"{name}.weight", (size, in_features), rows)
            if bias:
                self._expect(f"{name}.bias", (size,), rows)
            start += size

    def _expect(self, name: str, shape: tuple[int, ...], rows: slice) -> None:
        self._pending.add(name)
        self._parameters.expect(name, shape, partial(self._put, name, rows))

    def _put(self, name: str, rows: slice, tensor: Tensor) -> None:
        device, dtype = self._parameters.device, self._parameters.dtype
        if self._weight is None:
            self._weight = torch.empty(self._shape, device=device, dtype=dtype)
            if self._has_bias:
                self._bias = torch.empty(self._shape[0], device=device, dtype=dtype)
        target = self._bias if name.endswith(".bias") else self._weight
        assert target is not None
        target[rows].copy_(tensor)
        self._pending.discard(name)
        if not self._pending:
            self.packed = self._parameters.ops.pack_linear(self._weight, self._bias)
            self._weight = self._bias = None  # the packed form is all that stays


class Norm:
    """The weight of an RMS norm; 1 + weight in float32 where plus_one."""

    def __init__(self, name: str, size: int, plus_one: bool, parameters: Parameters):
        self.weight: Tensor = torch.empty(0)
        self._plus_one = plus_one
        self._parameters = parameters
        parameters.expect(f"{name}.weight", (size,), self._put)

    def _put(self, tensor: Tensor) -> None:
        if self._plus_one:
            self.weight = tensor.to(self._parameters.device, torch.float32) + 1
        else:
            self.weight = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)


class Embedding:
    """Rows of a table [vocab, hidden], times a scale that is rounded to the model's type."""

    def __init__(
        self, name: str, vocab_size: int, size: int, scale: float | None, parameters: Parameters
    ):
        self.weight: Tensor = torch.empty(0)
        self._scale = None
        if scale is not None:
            self._scale = torch.tensor(scale, dtype=parameters.dtype).item()
        self._parameters = parameters
        parameters.expect(f"{name}.weight", (vocab_size, size), self._put)

    def _put(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [num_tokens] to a new tensor [num_tokens, hidden]."""
        x = F.embedding(tokens, self.weight)
        return x if self._scale is None else x.mul_(self._scale)


class Attention:
    """Grouped-query attention with rotary embedding, q and k norms, and a window."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        rope: Rope,
        parameters: Parameters,
    ):
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.spec = AttentionSpec(heads, kv_heads, dim, config.attention_scale, window)
        self.rope = rope
        self._eps = config.rms_norm_eps
        self._ops = parameters.ops
        self.qkv = Linear(
            {
                f"{name}.q_proj": heads * dim,
                f"{name}.k_proj": kv_heads * dim,
                f"{name}.v_proj": kv_heads * dim,
            },
            config.hidden_size,
            config.qkv_bias,
            parameters,
        )
        self.out = Linear(
            {f"{name}.o_proj": config.hidden_size}, heads * dim, config.o_bias, parameters
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(f"{name}.q_norm", dim, config.norm_plus_one, parameters)
            self.k_norm = Norm(f"{name}.k_norm", dim, config.norm_plus_one, parameters)

    def __call__(self, qkv: Tensor, meta: BatchMeta, cache: LayerCache) -> Tensor:
        """What lies between the two linears; new keys and values go to the cache.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        q = self._ops.write_qkv(
            qkv,
            meta,
            cache,
            self.spec,
            self.rope,
            _weight(self.q_norm),
            _weight(self.k_norm),
            self._eps,
        )
        return self._ops.attend(q, meta, cache, self.spec)


class MLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, name: str, config: ModelConfig, parameters: Parameters):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(
            {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias, parameters
        )
        self.down = Linear({f"{name}.down_proj": hidden}, inner, bias, parameters)


class MixtureOfExperts:
    """The weighted sum of the gated MLPs that the router chooses for each token.

    Attributes:
        packed: the experts as the ops take them, once all are loaded.
    """

    def __init__(self, name: str, config: ModelConfig, moe: MoEConfig, parameters: Parameters):
        hidden, inner = config.hidden_size, moe.intermediate_size
        self._ops, self._parameters = parameters.ops, parameters
        self._moe, self._activation = moe, config.activation
        self._shapes = ((moe.num_experts, 2 * inner, hidden), (moe.num_experts, hidden, inner))
        self._router = Linear({f"{name}.gate": moe.num_experts}, hidden, False, parameters)
        self._weights: tuple[Tensor, Tensor] | None = None  # gate_up and down, until all are there
        self._missing = 3 * moe.num_experts
        self.packed: Any = None
        gate, up, down = moe.projections
        for expert in range(moe.num_experts):
            for projection, which, rows, shape in (
                (gate, 0, slice(inner), (inner, hidden)),
                (up, 0, slice(inner, 2 * inner), (inner, hidden)),
                (down, 1, slice(hidden), (hidden, inner)),
            ):
                full_name = f"{name}.experts.{expert}.{projection}.weight"
                parameters.expect(full_name, shape, partial(self._put, which, expert, rows))

    def _put(self, which: int, expert: int, rows: slice, tensor: Tensor) -> None:
        if self._weights is None:
            device, dtype = self._parameters.device, self._parameters.dtype
            gate_up, down = (torch.empty(s, device=device, dtype=dtype) for s in self._shapes)
            self._weights = gate_up, down
        self._weights[which][expert, rows].copy_(tensor)
        self._missing -= 1
        if not self._missing:
            gate_up, down = self._weights
            self._weights = None  # the packed form is all that stays
            self.packed = self._ops.pack_experts(ExpertWeights(gate_up, down, self._activation))

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]."""
        logits = self._ops.linear(x, self._router.packed, torch.float32)
        ids, weights = self._ops.route(logits, self._moe.router, None)
        return self._ops.experts(x, ids, weights, self.packed)


class DecoderLayer:
    """Attention and MLP or experts, a norm before each, and in a sandwich after each as well.

    Args:
        moe: the experts that take the MLP's place, or None.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        rope: Rope,
        moe: MoEConfig | None,
        parameters: Parameters,
    ):
        self._ops, self._eps = parameters.ops, config.rms_norm_eps
        self._whole = None if moe else getattr(parameters.ops, "decoder_layer", None)
        self._weights: LayerWeights | None = None
        self.attention = Attention(f"{name}.self_attn", config, window, rope, parameters)
        self._activation = config.activation
        self._mlp: MLP | None = None
        self._experts: MixtureOfExperts | None = None
        if moe is None:
            self._mlp = MLP(f"{name}.mlp", config, parameters)
        else:
            self._experts = MixtureOfExperts(f"{name}.{moe.block}", config, moe, parameters)

        def norm(which: str) -> Norm:
            return Norm(f"{name}.{which}", config.hidden_size, config.norm_plus_one, parameters)

        self._input_norm = norm("input_layernorm")
        self._after_attention = self._after_mlp = None
        if config.sandwich_norms:
            self._after_attention = norm("post_attention_layernorm")
            self._mlp_norm = norm("pre_feedforward_layernorm")
            self._after_mlp = norm("post_feedforward_layernorm")
        else:
            self._mlp_norm = norm("post_attention_layernorm")

    def finish(self) -> None:
        """Collect the weights, once all are loaded."""
        attention, mlp = self.attention, self._mlp
        self._weights = LayerWeights(
            spec=attention.spec,
            rope=attention.rope,
            eps=self._eps,
            activation=self._activation,
            input_norm=self._input_norm.weight,
            qkv=attention.qkv.packed,
            q_norm=_weight(attention.q_norm),
            k_norm=_weight(attention.k_norm),
            out=attention.out.packed,
            attention_out_norm=_weight(self._after_attention),
            mlp_norm=self._mlp_norm.weight,
            gate_up=mlp.gate_up.packed if mlp else None,
            down=mlp.down.packed if mlp else None,
            mlp_out_norm=_weight(self._after_mlp),
        )

    def __call__(
        self, x: Tensor | None, residual: Tensor, meta: BatchMeta, cache: LayerCache
    ) -> Tensor | None:
        """Add the layer to the residual stream [num_tokens, hidden], in place.

        Args:
            x: [num_tokens, hidden] what the layer before left to be added first, or None.

        Returns:
            What is left to be added: a sum that is cheaper together with the next norm.
        """
        ops, w = self._ops, self._weights
        assert w is not None
        if self._whole is not None:
            return self._whole(x, residual, w, meta, cache)
        if self._experts is None and (w.attention_out_norm is None or w.mlp_out_norm is None):
            if x is not None:
                residual += x
            qkv = ops.norm_linear(residual, w.input_norm, w.eps, w.qkv)
            ops.linear_add(self.attention(qkv, meta, cache), w.out, residual)
            x = ops.norm_gated_linear(residual, w.mlp_norm, w.eps, w.gate_up, w.activation)
            ops.linear_add(x, w.down, residual)
            return None
        if x is None:
            x = ops.rms_norm(residual, w.input_norm, w.eps)
        else:
            x = ops.add_rms_norm(x, residual, w.input_norm, w.eps)
        x = ops.linear(self.attention(ops.linear(x, w.qkv), meta, cache), w.out)
        if w.attention_out_norm is not None:
            x = ops.rms_norm(x, w.attention_out_norm, w.eps)
        x = ops.add_rms_norm(x, residual, w.mlp_norm, w.eps)
        if self._experts is not None:
            x = self._experts(x)
        else:
            x = ops.linear(x, w.gate_up)
            x = ops.silu_and_mul(x) if w.activation == "silu" else ops.gelu_and_mul(x)
            x = ops.linear(x, w.down)
        return x if w.mlp_out_norm is None else ops.rms_norm(x, w.mlp_out_norm, w.eps)


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


class Decoder:
    """A decoder-only language model.

    Args:
        max_positions: rows of the rotary tables; the model's own context by default.

    Attributes:
        shapes: name to shape of every tensor that `load` expects.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int | None = None,
    ):
        self.config = config
        self.vocab_size = config.vocab_size
        self._ops = ops
        self._parameters = parameters = Parameters(ops, device, dtype)
        self.shapes: Mapping[str, tuple[int, ...]] = parameters.shapes
        self._embedding = Embedding(
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            config.embed_scale,
            parameters,
        )
        length = max_positions or config.max_position_embeddings
        rope = local_rope = rope_table(config.rope, length, device)
        if config.local_rope is not None:
            local_rope = rope_table(config.local_rope, length, device)
        self._layers = [
            DecoderLayer(
                f"model.layers.{layer}",
                config,
                window,
                rope if window is None else local_rope,
                config.moe if config.moe is not None and config.moe.layers[layer] else None,
                parameters,
            )
            for layer, window in enumerate(config.windows)
        ]
        self._norm = Norm("model.norm", config.hidden_size, config.norm_plus_one, parameters)
        self._head: Linear | None = None
        self._tied_head: Any = None
        if not config.tie_word_embeddings:
            self._head = Linear(
                {"lm_head": config.vocab_size}, config.hidden_size, False, parameters
            )

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """What each layer's attention does."""
        return [layer.attention.spec for layer in self._layers]

    @property
    def kv_spec(self) -> list[tuple[int, int]]:
        """(num_kv_heads, head_dim) of each layer."""
        return [(s.num_kv_heads, s.head_dim) for s in self.attention_specs]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all tensors, in any order; each is copied or packed before the next is asked for.

        Raises:
            StartError: a tensor is missing, unexpected, twice there, or has another shape.
        """
        self._parameters.load(weights)
        for layer in self._layers:
            layer.finish()
        if self._head is None:
            self._tied_head = self._ops.pack_linear(self._embedding.weight, None)

    def forward(self, tokens: Tensor, meta: BatchMeta, caches: Iterable[LayerCache]) -> Tensor:
        """Hidden states [num_tokens, hidden] of new tokens int64 [num_tokens], not yet normed.

        They are float32 where the ops want the residual stream so, else of the model's type.
        """
        residual = self._embedding(tokens)
        if self._ops.float32_residual:
            residual = residual.float()
        x = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, residual, meta, cache)
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [n, vocab] of chosen rows of the hidden states [n, hidden]."""
        head = self._tied_head if self._head is None else self._head.packed
        logits = self._ops.norm_linear(
            hidden, self._norm.weight, self.config.rms_norm_eps, head, torch.float32
        )
        softcap = self.config.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def rope_table(config: RopeConfig, length: int, device: torch.device) -> Rope:
    """Cosines and sines of the positions 0 to length - 1."""
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config).to(device))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Rope(cos_sin.mul_(config.attention_factor), config.rotary_dim)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Float32 [rotary_dim / 2] radians per position: theta^(-2i / rotary_dim), then scaled.

    Sources: linear, Chen et al. 2023; yarn, Peng et al. 2023 (section 3.2); llama3, the Llama 3.1
    release: wavelengths above original / low_freq_factor are divided by factor, those below
    original / high_freq_factor stay, those in between are interpolated.
    """
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "linear":
            return frequencies / config.factor
        case "factors":
            return frequencies / torch.tensor(config.factors)
        case "llama3":
            rotations = config.original_max_positions * frequencies / (2 * math.pi)
            low, high = config.low_freq_factor, config.high_freq_factor
            keep = ((rotations - low) / (high - low)).clamp(0, 1)
            return (1 - keep) * frequencies / config.factor + keep * frequencies
        case "yarn":
            # Dimensions that turn more than beta_fast times in the original context keep their
            # frequency, those that turn less than beta_slow times are divided by factor.
            first, last = (
                dim
                * math.log(config.original_max_positions / (beta * 2 * math.pi))
                / (2 * math.log(config.theta))
                for beta in (config.beta_fast, config.beta_slow)
            )
            if config.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            steps = torch.arange(dim // 2, dtype=torch.float32)
            divided = ((steps - first) / (last - first or 0.001)).clamp(0, 1)
            return divided * frequencies / config.factor + (1 - divided) * frequencies
    return frequencies
