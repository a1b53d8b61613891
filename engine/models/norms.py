"""Norms of the residual stream and of heads.

Runs on: gpu.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .parameters import Parameters

if TYPE_CHECKING:
    from .config import ModelConfig


class RMSNorm:
    """x / rms(x) * weight; times 1 + weight in float32 where plus_one."""

    def __init__(self, name: str, size: int, config: ModelConfig, parameters: Parameters):
        self.weight: Tensor = torch.empty(0)
        self.eps, self._plus_one = config.norm_eps, config.norm_plus_one
        self._ops, self._parameters = parameters.ops, parameters
        parameters.expect(f"{name}.weight", (size,), self._put)

    def _put(self, tensor: Tensor) -> None:
        if self._plus_one:
            self.weight = tensor.to(self._parameters.device, torch.float32) + 1
        else:
            self.weight = tensor.to(self._parameters.device, self._parameters.dtype, copy=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension of [num_tokens, size]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """residual += x, in place, then its norm, in x's type."""
        if x is None:
            return self(residual)
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def linear(self, residual: Tensor, packed: Any, out_dtype: torch.dtype) -> Tensor:
        """A linear of the norm."""
        return self._ops.norm_linear(residual, self.weight, self.eps, packed, out_dtype)


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


def weight_of(norm: RMSNorm | None) -> Tensor | None:
    """Its weight, None of no norm."""
    return None if norm is None else norm.weight
