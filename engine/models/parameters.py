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
        self._instead: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def expect(self, name: str, shape: tuple[int, ...], put: Callable[[Tensor], None]) -> None:
        """Declare a tensor; `put` copies what it is given."""
        self.shapes[name] = shape
        self._put[name] = put

    def keep(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Declare a tensor that stays as it is: float32, on the device, filled when it comes."""
        kept = torch.empty(shape, device=self.device, dtype=torch.float32)

        def put(tensor: Tensor) -> None:
            kept.copy_(tensor)

        self.expect(name, shape, put)
        return kept

    def expect_instead(
        self,
        name: str,
        shape: tuple[int, ...],
        put: Callable[[Tensor], None],
        others: Iterable[str],
    ) -> None:
        """Declare a tensor that some checkpoints have in place of others that are declared."""
        self._instead[name] = shape, tuple(others)
        self._put[name] = put

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put every tensor in its place.

        Raises:
            StartError: a tensor is missing, unexpected, twice there, or has another shape.
        """
        missing = dict.fromkeys(self.shapes)
        for name, tensor in weights:
            if name in self._instead:
                shape, names = self._instead[name]
            elif name in self.shapes:
                shape, names = self.shapes[name], (name,)
            else:
                raise StartError(f"the weights hold a tensor {name!r:.200} that the model lacks")
            if not all(n in missing for n in names):
                raise StartError(f"the weights hold the tensor {name} twice")
            if tuple(tensor.shape) != shape:
                raise StartError(
                    f"the tensor {name} has the shape {list(tensor.shape)}, not {list(shape)}"
                )
            for n in names:
                del missing[n]
            self._put[name](tensor)
        if missing:
            first = next(iter(missing))
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise StartError(f"the weights lack the tensor {first}{more}")
