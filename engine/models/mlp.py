"""What follows attention in a layer: one MLP, or a mixture of experts.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import Experts
from .linear import Linear
from .parameters import Parameters
from .quantized_experts import QuantizedExperts

if TYPE_CHECKING:
    from .config import ModelConfig, MoEConfig, SharedExpert
    from .norms import RMSNorm


class MLP:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    Args:
        shared: sizes and names, where they are not the model's.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        parameters: Parameters,
        shared: SharedExpert | None = None,
    ):
        hidden, bias = config.hidden_size, config.mlp_bias
        of = shared or config
        inner = of.intermediate_size
        *into, out = config.mlp_names if shared is None else shared.projections
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


class Router:
    """Logits in float32, and the experts that follow from them.

    The weight is float32, too, where the model's type would round it: what the choice of experts
    hangs on is never rounded, and costs no more where the checkpoint did not need it.

    Args:
        parts: name to rows, the experts' first; a shared expert's gate is one row more.
    """

    def __init__(
        self,
        parts: dict[str, int],
        hidden: int,
        moe: MoEConfig,
        correction_bias: str | None,
        parameters: Parameters,
    ):
        self._moe, self._ops, self._parameters = moe, parameters.ops, parameters
        self._dtype, self._packed = parameters.dtype, None
        self._correction: Tensor | None = None
        self._parts: dict[str, Tensor | None] = {}
        for name, rows in parts.items():
            self._expect(f"{name}.weight", (rows, hidden))
            if moe.gate_bias:
                self._expect(f"{name}.bias", (rows,))
        if correction_bias is not None:
            num = moe.num_experts
            self._correction = parameters.keep(correction_bias, (num,), other=(1, num))

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        self._parts[name] = None
        self._parameters.expect(name, shape, partial(self._put, name))

    def _put(self, name: str, tensor: Tensor) -> None:
        self._parts[name] = tensor.to(self._parameters.device, copy=True)
        tensors = [t for t in self._parts.values() if t is not None]
        if len(tensors) < len(self._parts):
            return
        others = [t for t in tensors if t.dtype != self._dtype]
        if any(not torch.equal(t.to(self._dtype).to(t.dtype), t) for t in others):
            self._dtype = torch.float32
        weights = [t.to(self._dtype) for t in tensors if t.dim() == 2]
        biases = [t.to(self._dtype) for t in tensors if t.dim() == 1]
        self._packed = self._ops.pack_linear(
            torch.cat(weights), torch.cat(biases) if biases else None
        )
        self._parts.clear()  # the packed form is all that stays

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts of x [num_tokens, hidden], see `Ops.route`.

        Returns:
            Expert ids and weights, [num_tokens, top_k] each, and the logits of what else is gated,
            float32 [num_tokens, 0 or 1].
        """
        return self._choose(self._ops.linear(x.to(self._dtype), self._packed, torch.float32))

    @property
    def takes_residual(self) -> bool:
        """Whether `of_norm` can serve: the weight is of the model's type."""
        return self._dtype == self._parameters.dtype

    def of_norm(self, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """The same of a norm of the residual [num_tokens, hidden]."""
        return self._choose(norm.linear(residual, self._packed, torch.float32))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num = self._moe.num_experts + self._moe.router.has_shared_gate
        ids, weights = self._ops.route(logits[:, :num], self._moe.router, self._correction)
        return ids, weights, logits[:, num:]


class MixtureOfExperts:
    """The weighted sum of the gated MLPs that the router chooses for each token.

    A shared expert, where there is one, is added for every token: as so many experts more, that
    every token has, where it can be cut into such.
    """

    def __init__(self, layer: str, config: ModelConfig, moe: MoEConfig, parameters: Parameters):
        name, shared = f"{layer}.{moe.block}", moe.shared
        first = f"experts.0.{moe.projections[0]}" if moe.projections else "experts"
        is_plain = parameters.scheme(f"{name}.{first}") is None
        shared_name = "" if shared is None else f"{layer}.{shared.name}"
        if (
            shared is not None
            and is_plain
            and parameters.scheme(f"{shared_name}.{shared.projections[0]}") is None
            and len(shared.projections) == 3
            and shared.intermediate_size % moe.intermediate_size == 0
            and moe.activation is None
            and not config.mlp_bias
        ):
            num_shared = shared.intermediate_size // moe.intermediate_size
            router = replace(
                moe.router, num_shared=num_shared, has_shared_gate=shared.gate is not None
            )
            moe = replace(moe, router=router)
            self.experts: Experts | QuantizedExperts = Experts(
                name, config, moe, parameters, [f"{shared_name}.{n}" for n in shared.projections]
            )
            shared = None
        else:
            kind = Experts if is_plain else QuantizedExperts
            self.experts = kind(name, config, moe, parameters)
        parts = {f"{name}.{moe.gate}": moe.num_experts}
        if moe.shared is not None and moe.shared.gate is not None:
            parts[f"{layer}.{moe.shared.gate}"] = 1
        correction = None if moe.correction_bias is None else f"{name}.{moe.correction_bias}"
        self._router = Router(parts, config.hidden_size, moe, correction, parameters)
        self._shared: MLP | None = None
        self._ops = parameters.ops
        if shared is not None:
            self._shared = MLP(shared_name, config, parameters, shared)

    @property
    def can_add(self) -> bool:
        """Whether `add` can serve; known once all is loaded."""
        return (
            self._shared is None
            and self._router.takes_residual
            and self.experts.packed is not None
            and getattr(self._ops, "norm_experts_add", None) is not None
        )

    def add(self, residual: Tensor, norm: RMSNorm) -> None:
        """Add the experts of the norm to the residual [num_tokens, hidden], in place."""
        ids, weights, _ = self._router.of_norm(residual, norm)
        packed = self.experts.packed
        self._ops.norm_experts_add(residual, norm.weight, norm.eps, ids, weights, packed)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]."""
        ids, weights, gate = self._router(x)
        out = self.experts(x, ids, weights)
        if self._shared is None:
            return out
        shared = self._shared(x)
        return out.add_(shared * gate.sigmoid().to(x.dtype) if gate.shape[1] else shared)
