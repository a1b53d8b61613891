"""A linear layer out of the tensors that a checkpoint has of it.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...backends.api import BackendError, QuantizedWeight
from ..api.errors import StartError
from .parameters import Parameters
from .quantization.scheme import concatenate


class Linear:
    """A packed weight, fused out of parts that lie row after row, quantized or not.

    Args:
        parts: name to output features, in order.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, bias: bool, parameters: Parameters
    ):
        # Parts that the checkpoint quantizes, and those that it does not, cannot be fused.
        self._pieces: list[PlainLinear | QuantizedLinear] = [
            (PlainLinear if is_plain else QuantizedLinear)(
                dict(of_a_kind), in_features, bias, parameters
            )
            for is_plain, of_a_kind in groupby(
                parts.items(), key=lambda part: parameters.scheme(part[0]) is None
            )
        ]

    @property
    def packed(self) -> Any:
        """What `Ops.linear` takes, once all parts are loaded; None where that takes no such."""
        return self._pieces[0].packed if len(self._pieces) == 1 else None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[num_tokens, in] to [num_tokens, out], in x's type or out_dtype."""
        return _joined([piece(x, out_dtype) for piece in self._pieces])


class PlainLinear:
    """One packed weight of floats; arguments as of `Linear`.

    Attributes:
        packed: what `Ops.linear` takes, once all parts are loaded.
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
        """See `Linear`."""
        return self._parameters.ops.linear(x, self.packed, out_dtype)


class QuantizedLinear:
    """One packed weight, or one a part where they cannot be fused; arguments as of `Linear`."""

    def __init__(
        self, parts: Mapping[str, int], in_features: int, bias: bool, parameters: Parameters
    ):
        self._parameters = parameters
        self._names = tuple(parts)
        self._weights: dict[str, QuantizedWeight] = {}  # until all parts are there
        self._biases: dict[str, Tensor] = {}
        self._has_bias = bias
        self._packed: list[Any] = []
        for name, size in parts.items():
            done = partial(self._put, name)
            parameters.expect_quantized(name, size, in_features, done)
            if bias:  # in place of a scheme's, where there is none but zeros
                parameters.expect(f"{name}.bias", (size,), partial(self._put_bias, name))

    def _put(self, name: str, weight: QuantizedWeight) -> None:
        self._weights[name] = weight
        self._finish()

    def _put_bias(self, name: str, tensor: Tensor) -> None:
        device, dtype = self._parameters.device, self._parameters.dtype
        self._biases[name] = tensor.to(device, dtype, copy=True)
        self._finish()

    def _finish(self) -> None:
        if len(self._weights) + len(self._biases) < len(self._names) * (1 + self._has_bias):
            return
        weights = [self._weights[name] for name in self._names]
        biases = [self._biases.get(name) for name in self._names]
        self._weights, self._biases = {}, {}  # the packed form is all that stays
        fused = concatenate(weights)
        joins = getattr(self._parameters.ops, "pack_quantized_rows", None)
        whole = torch.cat([b for b in biases if b is not None]) if self._has_bias else None
        try:
            if fused is None and joins is not None and all(w.kind == "gguf" for w in weights):
                self._packed = [joins(weights, whole)]
                return
            if fused is not None:
                weights, biases = [fused], [whole]
            self._packed = [
                self._parameters.ops.pack_quantized(weight, bias)
                for weight, bias in zip(weights, biases, strict=True)
            ]
        except BackendError as error:
            raise StartError(f"{self._names[0]}: {error}") from None

    @property
    def packed(self) -> Any:
        """See `Linear`."""
        is_one = len(self._packed) == 1 and getattr(self._packed[0], "is_linear", False)
        return self._packed[0] if is_one else None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear`; x may be a residual, which is float32."""
        ops, x = self._parameters.ops, x.to(self._parameters.dtype)
        return _joined([ops.quantized_linear(x, packed, out_dtype) for packed in self._packed])


def _joined(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
