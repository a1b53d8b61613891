"""The experts of a layer, quantized, out of the tensors that a checkpoint has of them.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import api
from ..api.errors import StartError
from .experts import expect_stacked, gate_first, projections
from .parameters import Expected, Parameters
from .quantization.mxfp4 import Mxfp4
from .quantization.online import EightBits, FourBits
from .quantization.scheme import by_row, equal

if TYPE_CHECKING:
    from .config import ModelConfig, MoEConfig


class QuantizedExperts:
    """As `Experts`, of quantized weights."""

    packed = None  # nothing that `Ops.experts` takes

    def __init__(self, name: str, config: ModelConfig, moe: MoEConfig, parameters: Parameters):
        self._name, self._parameters, self._moe = name, parameters, moe
        self._activation = moe.activation or config.activation
        num, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
        self._stacks = {
            "gate_up": Stack(name, num, 2 * inner, hidden),
            "down": Stack(name, num, hidden, inner),
        }
        self._biases: dict[str, Tensor] = {}
        self._packed: Any = None
        single: dict[str, list[str]] = {"gate_up": [], "down": []}
        for projection, which, half, shape in projections(moe.projections, hidden, inner):
            for expert in range(num):
                part = f"{name}.experts.{expert}.{projection}"
                put = partial(self._put, which, expert, half * inner)
                parameters.expect_quantized(part, *shape, put)
                single[which].append(f"{part}.weight")
        for which, stacked in zip(("gate_up", "down"), moe.stacked, strict=True):
            self._expect_stacked(which, f"{name}.{stacked}", single[which])

    def _expect_stacked(self, which: str, name: str, single: list[str]) -> None:
        """Tensors of all experts at once, where checkpoints of this scheme have such."""
        parameters, moe, stack = self._parameters, self._moe, self._stacks[which]
        num, num_out, num_in = stack.shape
        scheme = parameters.scheme(f"{self._name}.experts")
        if moe.bias:
            put = partial(self._put_bias, which)
            parameters.expect(f"{name}_bias", (num, num_out), put)
        if isinstance(scheme, Mxfp4):
            tensors: dict[str, Tensor] = {}
            for suffix, one in scheme.create(num_out, num_in).items():
                every = Expected((num, *one.shape), one.dtype)
                put = partial(self._put_blocks, which, scheme, tensors, suffix)
                parameters.expect(f"{name}_{suffix}", every, put)
        elif isinstance(scheme, EightBits | FourBits):
            put = partial(self._put_floats, which, scheme)
            expect_stacked(parameters, moe, name, which, stack.shape, put, single)
        elif not single:
            raise StartError(f"experts in one tensor ({name}) are read as MXFP4 only")

    def _put(self, which: str, expert: int, row: int, weight: api.QuantizedWeight) -> None:
        self._stacks[which].put(expert, row, weight)
        self._finish()

    def _put_blocks(
        self, which: str, scheme: Mxfp4, tensors: dict[str, Tensor], suffix: str, tensor: Tensor
    ) -> None:
        tensor = gate_first(self._moe, which, tensor)
        tensors[suffix] = tensor.to(self._parameters.device, copy=True)
        if len(tensors) == 2:
            self._stacks[which].whole = scheme.load(tensors, *self._stacks[which].shape[1:])
            tensors.clear()
            self._finish()

    def _put_floats(self, which: str, scheme: EightBits | FourBits, tensor: Tensor) -> None:
        for expert, one in enumerate(tensor):
            weight = one.to(self._parameters.device).contiguous()
            self._put(which, expert, 0, scheme.load({"weight": weight}, *weight.shape))

    def _put_bias(self, which: str, tensor: Tensor) -> None:
        device, dtype = self._parameters.device, self._parameters.dtype
        bias = gate_first(self._moe, which, tensor).to(device, dtype, copy=True)
        self._biases[f"{which}_bias"] = bias
        self._finish()

    def _finish(self) -> None:
        gate_up, down = (stack.whole for stack in self._stacks.values())
        if gate_up is None or down is None or len(self._biases) < 2 * self._moe.bias:
            return
        self._stacks = {}  # the packed form is all that stays
        gate_up, down = (replace(w, dtype=self._parameters.dtype) for w in (gate_up, down))
        weights = api.QuantizedExperts(gate_up, down, self._activation, **self._biases)
        try:
            self._packed = self._parameters.ops.pack_quantized_experts(weights)
        except api.BackendError as error:
            raise StartError(f"{self._name}: {error}") from None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, see `Ops.experts`."""
        x = x.to(self._parameters.dtype)
        return self._parameters.ops.quantized_experts(x, ids, weights, self._packed)


class Stack:
    """One weight of all experts, filled part by part; all parts must be of one form.

    Attributes:
        shape: (num_experts, out, in).
        whole: the weight, once all rows are there.
    """

    def __init__(self, name: str, num_experts: int, num_out: int, num_in: int):
        self._name = name
        self.shape = (num_experts, num_out, num_in)
        self.whole: api.QuantizedWeight | None = None
        self._missing = num_experts * num_out  # rows
        self._form: tuple[object, ...] = ()  # of the first part
        self._codes = self._scales = torch.empty(0)
        self._offsets: Tensor | None = None
        self._input_scale: Tensor | None = None
        self._orders: dict[int, Tensor | None] = {}

    def put(self, expert: int, row: int, part: api.QuantizedWeight) -> None:
        """One expert's rows, from this one on.

        Raises:
            StartError: they are not of the form of those before.
        """
        part = by_row(part)  # scales of whole tensors differ from part to part
        codes, block = part.codes, part.block[0]
        scales = part.codes[:, :0] if part.scales is None else part.scales  # GGUF has them in codes
        num, num_out, _ = self.shape
        kind = part.kind, part.gguf_type, part.has_zero_points
        form = (*kind, part.block, part.activations, codes.shape[1], scales.shape[1])
        if not self._form:
            self._form = form
            self._codes = codes.new_empty(num, num_out, codes.shape[1])
            self._scales = scales.new_zeros(num, -(-num_out // block), scales.shape[1])
        if form != self._form or row % block:
            raise StartError(f"{self._name}: experts of one layer must be quantized alike")
        self._codes[expert, row : row + len(codes)] = codes
        blocks = slice(row // block, row // block + len(scales))
        self._scales[expert, blocks] = scales
        if part.offsets is not None:
            if self._offsets is None:
                self._offsets = torch.zeros_like(self._scales)
            self._offsets[expert, blocks] = part.offsets
        order = self._orders.setdefault(expert, part.order)
        if not equal(order, part.order):
            raise StartError(f"{self._name}: gate and up have their inputs in different orders")
        if part.input_scale is not None:  # one for all: the largest cuts nothing off
            before = part.input_scale if self._input_scale is None else self._input_scale
            self._input_scale = torch.maximum(before, part.input_scale)
        self._missing -= len(codes)
        if not self._missing:
            self.whole = self._finished(part)

    def _finished(self, part: api.QuantizedWeight) -> api.QuantizedWeight:
        orders = None
        if any(order is not None for order in self._orders.values()):
            inputs = torch.arange(self.shape[2], dtype=torch.int32, device=self._codes.device)
            of_each = [self._orders[expert] for expert in range(self.shape[0])]
            orders = torch.stack([inputs if order is None else order for order in of_each])
        return api.QuantizedWeight(
            part.kind,
            self._codes,
            self.shape,
            None if part.scales is None else self._scales,
            self._offsets,
            part.block,
            part.activations,
            self._input_scale,
            orders,
            part.gguf_type,
            has_zero_points=part.has_zero_points,
        )
