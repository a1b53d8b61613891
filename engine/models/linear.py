"""A linear layer out of the tensors that a checkpoint has of it.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .parameters import Parameters


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

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[num_tokens, in] to [num_tokens, out], in x's type or out_dtype."""
        return self._parameters.ops.linear(x, self.packed, out_dtype)
