"""The experts of a layer, out of the tensors that a checkpoint has of them.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.api import ExpertWeights
from .parameters import Expected, Parameters

if TYPE_CHECKING:
    from .config import ModelConfig, MoEConfig


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
        parts = zip(moe.projections, ("gate_up", "gate_up", "down"), (0, inner, 0), strict=False)
        for projection, which, first in parts:
            shape = (hidden, inner) if which == "down" else (inner, hidden)
            rows = slice(first, first + shape[0])
            for expert in range(num):
                full_name = f"{name}.experts.{expert}.{projection}.weight"
                single[which].append(full_name)
                parameters.expect(full_name, shape, partial(self._put, which, expert, rows))
        parts = zip(shared, ("gate_up", "gate_up", "down"), (0, inner, 0), strict=False)
        size = moe.router.num_shared * inner
        for full_name, which, first in parts:
            shape = (hidden, size) if which == "down" else (size, hidden)
            put = partial(self._put_shared, which, first)
            parameters.expect(f"{full_name}.weight", shape, put)
        for which, stacked in zip(("gate_up", "down"), moe.stacked, strict=True):
            full_name = f"{name}.{stacked}"
            num_out, num_in = self._shapes[which]
            put = partial(self._put_stacked, which)
            if single[which]:
                parameters.expect_instead(full_name, (num, num_out, num_in), put, single[which])
            elif moe.transposed:
                other = None if moe.interleaved else (num, num_out, num_in)
                parameters.expect(full_name, Expected((num, num_in, num_out), other=other), put)
            else:
                parameters.expect(full_name, (num, num_out, num_in), put)
            if moe.bias:
                put = partial(self._put_stacked, f"{which}_bias")
                parameters.expect(f"{full_name}_bias", (num, num_out), put)

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
        num, shape = self._moe.num_experts, self._shapes[which]
        target = self._target(which)[:num]
        if self._moe.transposed and tensor.shape == (num, *reversed(shape)):
            tensor = tensor.transpose(1, -1)  # of a bias, nothing
        if self._moe.interleaved and which.startswith("gate_up"):
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)
        target.copy_(tensor)
        self._loaded(self._moe.num_experts * (2 if which.startswith("gate_up") else 1))

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
