"""The tensors that a model expects, and where each goes when it comes.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..api.errors import StartError

if TYPE_CHECKING:
    from ...backends.api import Ops


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
