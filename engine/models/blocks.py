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


class RMSNorm:
    """x / rms(x) * weight; times 1 + weight in float32 where plus_one."""

    def __init__(self, name: str, size: int, config: ModelConfig, parameters: Parameters):
        self.weight: Tensor = torch.empty(0)
        self._eps, self._plus_one = config.norm_eps, config.norm_plus_one
        self._ops, self._parameters = parameters.ops, parameters
        parameters.expect(f"{name}.weight", (size,), self._put)

    def _put(self, tensor: Tensor) -> None:
        if self._plus_one:
            self.weight = tensor.to(self._parameters.device, torch.float32) + 1
        else:
            self.weight = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension of [num_tokens, size]."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """residual += x, in place, then its norm, in x's type."""
        if x is None:
            return self(residual)
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def linear(self, residual: Tensor, packed: Any, out_dtype: torch.dtype) -> Tensor:
        """A linear of the norm."""
        return self._ops.norm_linear(residual, self.weight, self._eps, packed, out_dtype)


class LayerNorm:
    """(x - mean) / deviation * weight + bias (Ba et al. 2016), in float32, by plain torch."""

    def __init__(self, name: str, size: int, config: ModelConfig, parameters: Parameters):
        self._size, self._eps = size, config.norm_eps
        self._ops, self._parameters = parameters.ops, parameters
        self._weight: Tensor = torch.empty(0)
        self._bias: Tensor | None = None
        parameters.expect(f"{name}.weight", (size,), self._put)
        if config.norm_bias:
            parameters.expect(f"{name}.bias", (size,), self._put_bias)

    def _put(self, tensor: Tensor) -> None:
        self._weight = tensor.to(self._parameters.device, torch.float32, copy=True)

    def _put_bias(self, tensor: Tensor) -> None:
        self._bias = tensor.to(self._parameters.device, torch.float32, copy=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension of [num_tokens, size], in the model's type."""
        y = F.layer_norm(x.float(), (self._size,), self._weight, self._bias, self._eps)
        return y.to(self._parameters.dtype)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """residual += x, in place, then its norm."""
        return self(residual if x is None else residual.add_(x))

    def linear(self, residual: Tensor, packed: Any, out_dtype: torch.dtype) -> Tensor:
        """A linear of the norm."""
        return self._ops.linear(self(residual), packed, out_dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class HeadNorms:
    """A layer norm of each head with a weight of its own (Command R+, StableLM 2).

    Args:
        name: of the tensor [num_heads, head_dim]; of each head's [head_dim] where it has "{head}".
    """

    def __init__(self, name: str, num_heads: int, config: ModelConfig, parameters: Parameters):
        dim = config.head_dim
        self._eps = config.norm_eps
        self._weight = torch.empty(num_heads, dim, device=parameters.device)
        if "{head}" in name:
            for head in range(num_heads):
                row = self._weight[head]
                parameters.expect(f"{name.format(head=head)}.weight", (dim,), partial(_copy, row))
        else:
            parameters.expect(f"{name}.weight", (num_heads, dim), partial(_copy, self._weight))

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim], in x's type."""
        heads = x.float().unflatten(1, self._weight.shape)
        y = F.layer_norm(heads, self._weight.shape[1:], eps=self._eps) * self._weight
        return y.flatten(1).to(x.dtype)


def _copy(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor)


class Embedding:
    """Rows of a table [vocab, hidden], times a scale."""

    def __init__(self, name: str, config: ModelConfig, parameters: Parameters):
        self.weight: Tensor = torch.empty(0)
        self._scale = config.embed_scale
        if self._scale is not None and config.round_embed_scale:
            self._scale = torch.tensor(self._scale, dtype=parameters.dtype).item()
        self._parameters = parameters
        parameters.expect(f"{name}.weight", (config.vocab_size, config.hidden_size), self._put)

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
        rope: Rope | None,
        parameters: Parameters,
    ):
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.spec = AttentionSpec(
            heads, kv_heads, dim, config.attention_scale, window, config.attention_softcap
        )
        self.rope = rope
        self._eps = config.norm_eps
        self._ops = parameters.ops
        sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if config.fused_qkv:
            sizes = {"qkv_proj": sum(sizes.values())}
        self.qkv = Linear(
            {f"{name}.{part}": size for part, size in sizes.items()},
            config.hidden_size,
            config.qkv_bias,
            parameters,
        )
        self.out = Linear(
            {f"{name}.o_proj": config.hidden_size}, heads * dim, config.o_bias, parameters
        )
        # Norms with one weight for all heads are the op's; others come before it.
        self.q_norm = self.k_norm = None
        self._norms_before: list[tuple[slice, Callable[[Tensor], Tensor]]] = []
        q_name, k_name = (f"{name}.{norm}" for norm in config.qk_norm_names)
        if config.qk_norm == "head":
            self.q_norm = RMSNorm(q_name, dim, config, parameters)
            self.k_norm = RMSNorm(k_name, dim, config, parameters)
        elif config.qk_norm is not None:
            start = 0
            for full_name, n in ((q_name, heads), (k_name, kv_heads)):
                part = slice(start, start + n * dim)
                if config.qk_norm == "each_head":
                    norm: HeadNorms | RMSNorm = HeadNorms(full_name, n, config, parameters)
                else:
                    norm = RMSNorm(full_name, n * dim, config, parameters)
                self._norms_before.append((part, norm))
                start += n * dim

    def __call__(self, qkv: Tensor, meta: BatchMeta, cache: LayerCache) -> Tensor:
        """What lies between the two linears; new keys and values go to the cache.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        for part, norm in self._norms_before:
            qkv[:, part] = norm(qkv[:, part])
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
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, name: str, config: ModelConfig, parameters: Parameters):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        *into, out = config.mlp_names
        self.is_gated = config.gated_mlp
        size = (2 if self.is_gated else 1) * inner // len(into)
        self.gate_up = Linear({f"{name}.{n}": size for n in into}, hidden, bias, parameters)
        self.down = Linear({f"{name}.{out}": hidden}, inner, bias, parameters)
        self._ops, self._activation = parameters.ops, config.activation

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]."""
        ops, is_silu = self._ops, self._activation == "silu"
        x = ops.linear(x, self.gate_up.packed)
        if self.is_gated:
            x = ops.silu_and_mul(x) if is_silu else ops.gelu_and_mul(x)
        else:
            x = F.silu(x) if is_silu else F.gelu(x, approximate="tanh")
        return ops.linear(x, self.down.packed)


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
    """Attention and MLP or experts, with norms where the config has them.

    Args:
        moe: the experts that take the MLP's place, or None.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        rope: Rope | None,
        moe: MoEConfig | None,
        parameters: Parameters,
    ):
        self._ops, self._dtype, self._config = parameters.ops, parameters.dtype, config
        self.attention = Attention(f"{name}.self_attn", config, window, rope, parameters)
        self._mlp: MLP | MixtureOfExperts
        if moe is None:
            self._mlp = MLP(f"{name}.mlp", config, parameters)
        else:
            self._mlp = MixtureOfExperts(f"{name}.{moe.block}", config, moe, parameters)
        kind, size = NORMS[config.norm], config.hidden_size
        self._norms = tuple(
            None if norm is None else kind(f"{name}.{norm}", size, config, parameters)
            for norm in config.layer_norms
        )
        self._parallel = config.parallel
        self._weights: LayerWeights | None = None  # of a layer that the fused ops cover
        self._whole: Any = None

    def finish(self) -> None:
        """Collect the weights, once all are loaded."""
        attention, mlp = self.attention, self._mlp
        before, after, before_mlp, after_mlp = self._norms
        if (
            self._config.qk_norm in (None, "head")
            and isinstance(mlp, MLP)
            and mlp.is_gated
            and isinstance(before, RMSNorm)
            and isinstance(before_mlp, RMSNorm)
            and not isinstance(after, LayerNorm)
            and not isinstance(after_mlp, LayerNorm)
        ):
            self._weights = LayerWeights(
                spec=attention.spec,
                rope=attention.rope,
                eps=self._config.norm_eps,
                activation=self._config.activation,
                input_norm=before.weight,
                qkv=attention.qkv.packed,
                q_norm=_weight(attention.q_norm),
                k_norm=_weight(attention.k_norm),
                out=attention.out.packed,
                attention_out_norm=_weight(after),
                mlp_norm=before_mlp.weight,
                gate_up=mlp.gate_up.packed,
                down=mlp.down.packed,
                mlp_out_norm=_weight(after_mlp),
            )
            self._whole = getattr(self._ops, "decoder_layer", None)

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
        if w is not None and self._whole is not None:
            return self._whole(x, residual, w, meta, cache)
        if w is not None and w.attention_out_norm is None and w.mlp_out_norm is None:
            if x is not None:
                residual += x
            qkv = ops.norm_linear(residual, w.input_norm, w.eps, w.qkv)
            ops.linear_add(self.attention(qkv, meta, cache), w.out, residual)
            x = ops.norm_gated_linear(residual, w.mlp_norm, w.eps, w.gate_up, w.activation)
            ops.linear_add(x, w.down, residual)
            return None
        before, after, before_mlp, after_mlp = self._norms
        x = normed = self._add_norm(before, x, residual)
        qkv = ops.linear(x, self.attention.qkv.packed)
        x = ops.linear(self.attention(qkv, meta, cache), self.attention.out.packed)
        if after is not None:
            x = after(x)
        if self._parallel:
            return x.add_(self._mlp(normed))
        x = self._mlp(self._add_norm(before_mlp, x, residual))
        return x if after_mlp is None else after_mlp(x)

    def _add_norm(
        self, norm: RMSNorm | LayerNorm | None, x: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual += x, in place; then its norm, or its value in the model's type."""
        if norm is not None:
            return norm.add(x, residual)
        return (residual if x is None else residual.add_(x)).to(self._dtype)


def _weight(norm: RMSNorm | None) -> Tensor | None:
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
        self._embedding = Embedding("model.embed_tokens", config, parameters)
        length = max_positions or config.max_position_embeddings
        rope = local_rope = rope_table(config.rope, length, device)
        if config.local_rope is not None:
            local_rope = rope_table(config.local_rope, length, device)
        rotates = config.rotates or (True,) * config.num_layers
        self._layers = [
            DecoderLayer(
                f"model.layers.{layer}",
                config,
                window,
                (rope if window is None else local_rope) if rotates[layer] else None,
                config.moe if config.moe is not None and config.moe.layers[layer] else None,
                parameters,
            )
            for layer, window in enumerate(config.windows)
        ]
        self._norm = NORMS[config.norm]("model.norm", config.hidden_size, config, parameters)
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
        logits = self._norm.linear(hidden, head, torch.float32)
        if self.config.logit_scale is not None:
            logits *= self.config.logit_scale
        softcap = self.config.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def rope_table(config: RopeConfig, length: int, device: torch.device) -> Rope:
    """Cosines and sines of the positions 0 to length - 1.

    One table serves every context, so that cached keys stay valid: longrope and dynamic scale by
    the longest context that is served, not by each request's own length.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, length).to(device))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Rope(cos_sin.mul_(config.attention_factor), config.rotary_dim, config.interleaved)


def inverse_frequencies(config: RopeConfig, length: int) -> Tensor:
    """Float32 [rotary_dim / 2] radians per position: theta^(-2i / rotary_dim), then scaled.

    Args:
        length: the longest context, in tokens.

    Sources: linear, Chen et al. 2023; yarn, Peng et al. 2023 (section 3.2); llama3, the Llama 3.1
    release: wavelengths above original / low_freq_factor are divided by factor, those below
    original / high_freq_factor stay, those in between are interpolated; longrope, Ding et al.
    2024: other divisors beyond the original context; dynamic, "NTK-aware" scaling (bloc97 and
    emozilla 2023): beyond the original context theta grows, so that the slowest dimension turns
    as far as it did.
    """
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "linear":
            return frequencies / config.factor
        case "factors":
            return frequencies / torch.tensor(config.factors)
        case "longrope":
            is_long = length > config.original_max_positions
            return frequencies / torch.tensor(config.factors if is_long else config.short_factors)
        case "dynamic" if length > config.original_max_positions:
            stretch = config.factor * length / config.original_max_positions - (config.factor - 1)
            return 1.0 / (config.theta * stretch ** (dim / (dim - 2))) ** exponents
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
