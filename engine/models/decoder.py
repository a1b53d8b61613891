"""The decoder that a config makes out of the blocks beside this file.

A block declares its tensors by their Hugging Face names when it is made; `Decoder.load` brings
them. Ops, device and type come by argument, so several models can live in one process.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.api import AttentionSpec, LayerWeights, MLASpec, Rope
from .attention import Attention
from .delta_net import DeltaNet
from .latent import LatentAttention
from .linear import Linear
from .mlp import MLP, MixtureOfExperts
from .norms import NORMS, LayerNorm, RMSNorm, weight_of
from .parameters import Parameters
from .quantization.gguf import GgufConfig
from .rope import rope_table

if TYPE_CHECKING:
    from ...backends.api import BatchMeta, Ops, QuantizedWeight
    from .config import DeltaNetConfig, ModelConfig, MoEConfig


class Embedding:
    """Rows of a table [vocab, hidden], times a scale.

    Attributes:
        weight: the table, or
        packed: the same where a GGUF file's rows stay packed, as `Ops.linear` takes it.
    """

    def __init__(self, name: str, config: ModelConfig, parameters: Parameters):
        self.weight: Tensor = torch.empty(0)
        self._scale = config.embed_scale
        if self._scale is not None and config.round_embed_scale:
            self._scale = torch.tensor(self._scale, dtype=parameters.dtype).item()
        self._parameters = parameters
        self.packed: Any = None
        shape, quantization = (config.vocab_size, config.hidden_size), parameters.quantization
        if isinstance(quantization, GgufConfig) and quantization.scheme(name) is not None:
            parameters.expect_quantized(name, *shape, self._put_packed)
        else:
            parameters.expect(f"{name}.weight", shape, self._put)

    def _put_packed(self, weight: QuantizedWeight) -> None:
        self.packed = self._parameters.ops.pack_quantized(weight, None)

    def _put(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [num_tokens] to a new tensor [num_tokens, hidden]."""
        if self.packed is None:
            x = F.embedding(tokens, self.weight)
        else:
            x = self._parameters.ops.quantized_rows(self.packed, tokens, self._parameters.dtype)
        return x if self._scale is None else x.mul_(self._scale)


class DecoderLayer:
    """Attention and MLP or experts, with norms where the config has them.

    Args:
        moe: the experts that take the MLP's place, or None.
        delta_net: the recurrence that takes attention's place, or None.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        rope: Rope | None,
        moe: MoEConfig | None,
        delta_net: DeltaNetConfig | None,
        parameters: Parameters,
    ):
        self.window = window
        self._ops, self._dtype, self._config = parameters.ops, parameters.dtype, config
        self.attention: Attention | LatentAttention | DeltaNet
        if delta_net is not None:
            self.attention = DeltaNet(f"{name}.linear_attn", config, delta_net, parameters)
        elif config.latent is None:
            self.attention = Attention(f"{name}.self_attn", config, window, rope, parameters)
        else:
            assert rope is not None
            self.attention = LatentAttention(f"{name}.self_attn", config, rope, parameters)
        self._mlp: MLP | MixtureOfExperts
        if moe is None:
            self._mlp = MLP(f"{name}.mlp", config, parameters)
        else:
            self._mlp = MixtureOfExperts(name, config, moe, parameters)
        kind, size = NORMS[config.norm], config.hidden_size
        self._norms = tuple(
            None if norm is None else kind(f"{name}.{norm}", size, config, parameters)
            for norm in config.layer_norms
        )
        self._parallel = config.parallel
        self._weights: LayerWeights | None = None  # of a layer that the fused ops cover
        self._whole: Any = None
        self._adds_experts = False

    def finish(self) -> None:
        """Collect the weights, once all are loaded."""
        attention, mlp = self.attention, self._mlp
        if isinstance(attention, DeltaNet):
            attention.finish()
        before, after, before_mlp, after_mlp = self._norms
        if not (
            isinstance(before, RMSNorm)
            and isinstance(before_mlp, RMSNorm)
            and _are_plain(attention.qkv, attention.out)
        ):
            return
        if isinstance(mlp, MixtureOfExperts):
            self._adds_experts = mlp.can_add and after is None and after_mlp is None
        elif (
            isinstance(attention, Attention)
            and attention.is_plain
            and mlp.is_gated
            and _are_plain(mlp.gate_up, mlp.down)
        ):
            assert not isinstance(after, LayerNorm) and not isinstance(after_mlp, LayerNorm)
            self._weights = LayerWeights(
                spec=attention.spec,
                rope=attention.rope,
                eps=self._config.norm_eps,
                activation=self._config.activation,
                input_norm=before.weight,
                qkv=attention.qkv.packed,
                q_norm=weight_of(attention.q_norm),
                k_norm=weight_of(attention.k_norm),
                out=attention.out.packed,
                attention_out_norm=weight_of(after),
                mlp_norm=before_mlp.weight,
                gate_up=mlp.gate_up.packed,
                down=mlp.down.packed,
                mlp_out_norm=weight_of(after_mlp),
            )
            self._whole = getattr(self._ops, "decoder_layer", None)

    def __call__(
        self, x: Tensor | None, residual: Tensor, meta: BatchMeta, cache: Any
    ) -> Tensor | None:
        """Add the layer to the residual stream [num_tokens, hidden], in place.

        Args:
            x: [num_tokens, hidden] what the layer before left to be added first, or None.
            cache: its LayerCache, or its LayerState.

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
        if self._adds_experts:
            assert isinstance(before, RMSNorm) and isinstance(before_mlp, RMSNorm)
            assert isinstance(self._mlp, MixtureOfExperts)
            if x is not None:
                residual += x
            qkv = before.linear(residual, self.attention.qkv.packed, self._dtype)
            ops.linear_add(self.attention(qkv, meta, cache), self.attention.out.packed, residual)
            self._mlp.add(residual, before_mlp)
            return None
        x = normed = self._add_norm(before, x, residual)
        qkv = self.attention.qkv(x)
        x = self.attention.out(self.attention(qkv, meta, cache))
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


def _are_plain(*linears: Linear) -> bool:
    """Whether none is quantized."""
    return all(linear.packed is not None for linear in linears)


class Decoder:
    """A decoder-only language model.

    Args:
        max_positions: rows of the rotary tables; the model's own context by default.
        kv_dtype: an fp8 type of keys and values; None for the model's own.

    Attributes:
        shapes: name to shape of every tensor that `load` expects.
        dtypes: of those that are not of the model's type: codes of quantized weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        self.config = config
        self.vocab_size = config.vocab_size
        self._ops = ops
        self._parameters = parameters = Parameters(
            ops, device, dtype, config.quantization, kv_dtype
        )
        self.shapes: Mapping[str, tuple[int, ...]] = parameters.shapes
        self.dtypes: Mapping[str, torch.dtype] = parameters.dtypes
        self._embedding = Embedding("model.embed_tokens", config, parameters)
        length = max_positions or config.max_position_embeddings
        rope = local_rope = rope_table(config.rope, length, device)
        if config.local_rope is not None:
            local_rope = rope_table(config.local_rope, length, device)
        delta_net = config.delta_net
        rotates = config.rotates or (True,) * config.num_layers
        self._layers = [
            DecoderLayer(
                f"model.layers.{layer}",
                config,
                window,
                (rope if window is None else local_rope) if rotates[layer] else None,
                config.moe if config.moe is not None and config.moe.layers[layer] else None,
                delta_net if delta_net is not None and delta_net.layers[layer] else None,
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
    def attention_specs(self) -> list[AttentionSpec | MLASpec]:
        """What the attention of each layer that has it does."""
        return [a.spec for a in self._mixers if not isinstance(a, DeltaNet)]

    @property
    def kv_spec(self) -> list[tuple[int, int, int]]:
        """(num_kv_heads, key_dim, value_dim) of each layer with attention."""
        return [a.kv_shape for a in self._mixers if not isinstance(a, DeltaNet)]

    @property
    def state_spec(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Layers with a LayerState instead: number to the shapes of conv and recurrent, a row."""
        return {i: a.state_shapes for i, a in enumerate(self._mixers) if isinstance(a, DeltaNet)}

    @property
    def _mixers(self) -> list[Attention | LatentAttention | DeltaNet]:
        return [layer.attention for layer in self._layers]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all tensors, in any order; each is copied or packed before the next is asked for.

        Raises:
            StartError: a tensor is missing, unexpected, twice there, or has another shape.
        """
        self._parameters.load(weights)
        for layer in self._layers:
            layer.finish()
        if self._head is None:
            self._tied_head = self._embedding.packed
            if self._tied_head is None:
                self._tied_head = self._ops.pack_linear(self._embedding.weight, None)

    def forward(self, tokens: Tensor, meta: BatchMeta, caches: Iterable[Any]) -> Tensor:
        """Hidden states [num_tokens, hidden] of new tokens int64 [num_tokens], not yet normed.

        Each layer has a LayerCache or a LayerState.

        They are float32 where the ops want the residual stream so, else of the model's type.
        """
        residual = self._embedding(tokens)
        if self._ops.float32_residual:
            residual = residual.float()
        x = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, residual, meta.of(layer.window), cache)
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [n, vocab] of chosen rows of the hidden states [n, hidden]."""
        if self._head is not None and self._head.packed is None:
            logits = self._head(self._norm(hidden), torch.float32)
        else:
            head = self._tied_head if self._head is None else self._head.packed
            logits = self._norm.linear(hidden, head, torch.float32)
        if self.config.logit_scale is not None:
            logits *= self.config.logit_scale
        softcap = self.config.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
