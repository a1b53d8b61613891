"""What follows attention in a layer: one MLP, or a mixture of experts.

Runs on: gpu.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.api import ExpertWeights
from .linear import Linear
from .parameters import Parameters

if TYPE_CHECKING:
    from .config import ModelConfig, MoEConfig


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
        x = self.gate_up(x)
        if self.is_gated:
            x = ops.silu_and_mul(x) if is_silu else ops.gelu_and_mul(x)
        else:
            x = F.silu(x) if is_silu else F.gelu(x, approximate="tanh")
        return self.down(x)


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
        logits = self._router(x, torch.float32)
        ids, weights = self._ops.route(logits, self._moe.router, None)
        return self._ops.experts(x, ids, weights, self.packed)
