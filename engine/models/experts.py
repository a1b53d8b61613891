"""The experts of a layer, out of the tensors that a checkpoint has of them.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.api import ExpertWeights
from .parameters import Expected, Parameters

if TYPE_CHECKING:
    from .config import ModelConfig, MoEConfig


def projections(
    names: Sequence[str], hidden: int, inner: int
) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """The gate, up and down projections of a gated MLP, if it has names for them.

    Yields:
        The name, the weight that it is in ("gate_up" or "down"), 1 for the second half of that,
        else 0, and the shape [out, in].
    """
    for name, which, half in zip(names, ("gate_up", "gate_up", "down"), (0, 1, 0), strict=False):
        yield name, which, half, (hidden, inner) if which == "down" else (inner, hidden)


def expect_stacked(
    parameters: Parameters,
    moe: MoEConfig,
    name: str,
    which: str,
    shape: tuple[int, ...],
    put: Callable[[Tensor], None],
    single: Sequence[str],
) -> None:
    """Declare all experts' weights as one tensor, which may take the place of `single` ones.

    Args:
        which: "gate_up" or "down".
        shape: (num_experts, out, in), as `put` gets it, with the gate's rows first.
    """
    num, num_out, num_in = shape
    transposed = (num, num_in, num_out)

    def put_in_order(tensor: Tensor) -> None:
        if moe.transposed and tensor.shape == transposed:
            tensor = tensor.transpose(1, 2)
        put(gate_first(moe, which, tensor))

    if single:
        parameters.expect_instead(name, shape, put_in_order, single)
    elif moe.transposed:
        other = None if moe.interleaved else shape
        parameters.expect(name, Expected(transposed, other=other), put_in_order)
    else:
        parameters.expect(name, shape, put_in_order)


def gate_first(moe: MoEConfig, which: str, rows: Tensor) -> Tensor:
    """Weights or biases [num_experts, out, ...] of "gate_up" or "down", the gate's rows first."""
    if which == "down" or not moe.interleaved:
        return rows
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


class Experts:
    """Gated MLPs, all of a layer's in one packed weight.

    Args:
        shared: names of the gate, up and down projections of an MLP that is as large as
            moe.router.num_shared experts, and becomes those, behind the others.

    Attributes:
        packed: what the ops take, once all are loaded.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        parameters: Parameters,
        shared: Sequence[str] = (),
    ):
        self._parameters, self._moe = parameters, moe
        self._activation = moe.activation or config.activation
        self.packed: Any = None
        num, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
        self._shapes: dict[str, tuple[int, ...]] = {  # of one expert
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "gate_up_bias": (2 * inner,),
            "down_bias": (hidden,),
        }
        self._weights: dict[str, Tensor] = {}  # until all are there
        self._missing = num * (6 if moe.bias else 3) + len(shared)  # gate, up, down of each
        single: dict[str, list[str]] = {"gate_up": [], "down": []}
        for projection, which, half, shape in projections(moe.projections, hidden, inner):
            rows = slice(half * inner, half * inner + shape[0])
            for expert in range(num):
                full_name = f"{name}.experts.{expert}.{projection}.weight"
                single[which].append(full_name)
                parameters.expect(full_name, shape, partial(self._put, which, expert, rows))
        for full_name, which, half, shape in projections(
            shared, hidden, moe.router.num_shared * inner
        ):
            put = partial(self._put_shared, which, half * inner)
            parameters.expect(f"{full_name}.weight", shape, put)
        for which, stacked in zip(("gate_up", "down"), moe.stacked, strict=True):
            full_name, whole = f"{name}.{stacked}", (num, *self._shapes[which])
            put = partial(self._put_stacked, which)
            expect_stacked(parameters, moe, full_name, which, whole, put, single[which])
            if moe.bias:
                put = partial(self._put_biases, which)
                parameters.expect(f"{full_name}_bias", whole[:2], put)

    def _put(self, which: str, expert: int, rows: slice, tensor: Tensor) -> None:
        self._target(which)[expert, rows].copy_(tensor)
        self._loaded(1)

    def _put_shared(self, which: str, first: int, tensor: Tensor) -> None:
        num, inner = self._moe.router.num_shared, self._moe.intermediate_size
        target = self._target(which)[-num:]
        if which == "down":
            target.copy_(tensor.unflatten(1, (num, inner)).transpose(0, 1))
        else:
            target[:, first : first + inner].copy_(tensor.unflatten(0, (num, inner)))
        self._loaded(1)

    def _put_stacked(self, which: str, tensor: Tensor) -> None:
        num = self._moe.num_experts
        self._target(which)[:num].copy_(tensor)
        self._loaded(num * (2 if which.startswith("gate_up") else 1))

    def _put_biases(self, which: str, tensor: Tensor) -> None:
        self._put_stacked(f"{which}_bias", gate_first(self._moe, which, tensor))

    def _target(self, which: str) -> Tensor:
        if which not in self._weights:
            device, dtype = self._parameters.device, self._parameters.dtype
            num = self._moe.num_experts + self._moe.router.num_shared
            shape = (num, *self._shapes[which])
            self._weights[which] = torch.empty(shape, device=device, dtype=dtype)
        return self._weights[which]

    def _loaded(self, count: int) -> None:
        self._missing -= count
        if not self._missing:
            weights = ExpertWeights(activation=self._activation, **self._weights)
            self._weights = {}  # the packed form is all that stays
            self.packed = self._parameters.ops.pack_experts(weights)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, see `Ops.experts`."""
        return self._parameters.ops.experts(x, ids, weights, self.packed)
