"""The tensors that a model expects, and where each goes when it comes.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...backends.quantized import dequantize
from ..api.errors import StartError

if TYPE_CHECKING:
    from ...backends.api import Ops, QuantizedWeight
    from .quantization.config import QuantConfig
    from .quantization.gguf import GgufConfig
    from .quantization.scheme import Scheme

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)  # floats that say nothing without a scale


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor as a checkpoint has it.

    Attributes:
        shape: a number may come as [] or [1].
        dtype: None for any float that is a value by itself.
        other: another shape that it may have.
        alias: another last part of its name.
        is_optional: it may be missing, and is not needed.
        must_be_zero: it may be missing, and has no meaning here but zero.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    other: tuple[int, ...] | None = None
    alias: str | None = None
    is_optional: bool = False
    must_be_zero: bool = False

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise StartError where it is another."""
        shape = tuple(tensor.shape)
        is_number = tensor.numel() == 1 and self.shape in ((), (1,))
        if shape not in (self.shape, self.other) and not is_number:
            raise StartError(
                f"the tensor {name} has the shape {list(shape)}, not {list(self.shape)}"
            )
        if self.dtype is None:
            is_right = tensor.is_floating_point() and tensor.dtype not in CODES
        else:
            is_right = tensor.dtype is self.dtype
        if not is_right:
            wanted = "floats" if self.dtype is None else _name(self.dtype)
            raise StartError(f"the tensor {name} holds {_name(tensor.dtype)}, not {wanted}")
        if self.must_be_zero and bool(tensor.float().any()):
            raise StartError(f"the tensor {name} is not zero, which is not supported here")


class _Place(NamedTuple):
    """Where a tensor goes, and the names of the expected ones that it stands for."""

    expected: Expected
    put: Callable[[Tensor], None]
    names: tuple[str, ...]


class Parameters:
    """The tensors that a model expects.

    Attributes:
        quantization: how the checkpoint keeps its linears.
        kv_dtype: an fp8 type of keys and values; None for the model's own.
        shapes: name to shape of all that must come.
        dtypes: of those that are not the model's own floats.
    """

    def __init__(
        self,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        quantization: QuantConfig | GgufConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        self.ops, self.device, self.dtype = ops, device, dtype
        self.kv_dtype = kv_dtype
        self.quantization = quantization
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._places: dict[str, _Place] = {}

    def scheme(self, name: str) -> Scheme | None:
        """How the checkpoint keeps the weight of the linear of this name; None as it is."""
        return None if self.quantization is None else self.quantization.scheme(name)

    def expect(
        self, name: str, expected: Expected | tuple[int, ...], put: Callable[[Tensor], None]
    ) -> None:
        """Declare a tensor, by its shape where it is of floats; `put` copies what it is given."""
        if isinstance(expected, tuple):
            expected = Expected(expected)
        if expected.is_optional or expected.must_be_zero:
            self._places[name] = _Place(expected, put, ())
            return
        self.shapes[name] = expected.shape
        if expected.dtype is not None:
            self.dtypes[name] = expected.dtype
        self._places[name] = _Place(expected, put, (name,))
        if expected.alias is not None:
            alias = f"{name.rpartition('.')[0]}.{expected.alias}"
            self._places[alias] = _Place(expected, put, (name,))

    def keep(
        self, name: str, shape: tuple[int, ...], other: tuple[int, ...] | None = None
    ) -> Tensor:
        """Declare a tensor that stays as it is: float32, on the device, filled when it comes.

        Args:
            other: another shape that it may have.
        """
        kept = torch.empty(shape, device=self.device, dtype=torch.float32)

        def put(tensor: Tensor) -> None:
            kept.copy_(tensor.reshape(shape))

        self.expect(name, Expected(shape, other=other), put)
        return kept

    def expect_instead(
        self,
        name: str,
        shape: tuple[int, ...],
        put: Callable[[Tensor], None],
        others: Iterable[str],
    ) -> None:
        """Declare a tensor that some checkpoints have in place of others that are declared."""
        self._places[name] = _Place(Expected(shape), put, tuple(others))

    def expect_quantized(
        self, name: str, num_out: int, num_in: int, done: Callable[[QuantizedWeight], None]
    ) -> None:
        """Declare what the checkpoint has of a quantized linear; `done` gets its weight [out, in].

        Raises:
            StartError: a weight of this shape cannot be kept so.
        """
        scheme = self.scheme(name)
        assert scheme is not None
        try:
            created = scheme.create(num_out, num_in)
        except ValueError as error:
            raise StartError(f"{name} [{num_out}, {num_in}]: {error}") from None
        needed = {s for s, e in created.items() if not (e.is_optional or e.must_be_zero)}
        tensors: dict[str, Tensor] = {}

        def put(suffix: str, tensor: Tensor) -> None:
            tensors[suffix] = tensor.to(self.device, copy=True)
            if needed <= tensors.keys():
                try:
                    weight = scheme.load(tensors, num_out, num_in)
                except ValueError as error:
                    raise StartError(f"{name}: {error}") from None
                tensors.clear()
                done(replace(weight, dtype=self.dtype))

        for suffix, expected in created.items():
            self.expect(f"{name}.{suffix}", expected, partial(put, suffix))

    def expect_weight(
        self, name: str, num_out: int, num_in: int, put: Callable[[Tensor], None]
    ) -> None:
        """Declare a linear's weight [out, in] that is wanted as floats, however it is kept."""
        is_online = self.quantization is not None and self.quantization.method == "online"
        if is_online or self.scheme(name) is None:
            self.expect(f"{name}.weight", (num_out, num_in), put)
        else:
            self.expect_quantized(name, num_out, num_in, lambda weight: put(dequantize(weight)))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put every tensor in its place.

        Raises:
            StartError: a tensor is missing, unexpected, twice there, or has another shape or type.
        """
        missing = dict.fromkeys(self.shapes)
        for name, tensor in weights:
            if name not in self._places:
                raise StartError(f"the weights hold a tensor {name!r:.200} that the model lacks")
            expected, put, names = self._places[name]
            if not all(n in missing for n in names):
                raise StartError(f"the weights hold the tensor {name} twice")
            expected.check(name, tensor)
            for n in names:
                del missing[n]
            if not expected.must_be_zero:
                put(tensor)
        if missing:
            first = next(iter(missing))
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise StartError(f"the weights lack the tensor {first}{more}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
