"""--quantization: weights of checkpoints that are not quantized, rounded when they are loaded.

No calibration, so nothing is needed but the weights. What it costs in quality:
benchmarks/quantization_quality.py.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.quantized import LARGEST, pack_nibbles, round_to_codes
from ..parameters import Expected

GROUP_SIZES = (128, 64, 32)  # of int4: the first that divides the inputs
SHRINKS = tuple(1 - step / 20 for step in range(10))  # of a group's range, which are tried


@dataclass(frozen=True, slots=True)
class EightBits:
    """A scale for each row, symmetric; the input is rounded to the same type, token by token."""

    kind: Literal["fp8", "int8"]

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """The plain weight."""
        return {"weight": Expected((num_out, num_in))}

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The largest magnitude of a row becomes the largest code."""
        weight = tensors["weight"].float()
        scales = weight.abs().amax(1, keepdim=True) / LARGEST[self.kind]
        scales = scales.masked_fill(scales == 0, 1.0)
        codes = round_to_codes(weight / scales, self.kind)
        shape = (num_out, num_in)
        return QuantizedWeight(self.kind, codes, shape, scales, None, (1, num_in), "token")


@dataclass(frozen=True, slots=True)
class FourBits:
    """16 levels for each group of neighbours in a row; the input is not rounded."""

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """The plain weight."""
        if num_in % 2:
            raise ValueError("two codes make a byte, so the inputs must be even")
        return {"weight": Expected((num_out, num_in))}

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """Groups of 128 where they divide the inputs, else of 64, of 32, or one."""
        size = next((g for g in GROUP_SIZES if num_in % g == 0), num_in)
        groups = tensors["weight"].float().view(num_out, -1, size)
        scales, offsets = _best_range(groups)
        codes = ((groups - offsets) / scales).round_().clamp_(0, 15)
        return QuantizedWeight(
            "uint4",
            pack_nibbles(codes.view(num_out, num_in)),
            (num_out, num_in),
            scales[..., 0],
            offsets[..., 0],
            (1, size),
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """GGUF's blocks of 32, which the CPU's own kernels multiply: Q8_0 for int8, Q4_1 for int4.

    They round inputs 32 at a time, not a token at a time, which outliers spoil far less.
    """

    bits: Literal[4, 8]

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """The plain weight."""
        return {"weight": Expected((num_out, num_in))}

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """Scales are float16; a weight that blocks do not divide gets scales for whole rows."""
        if num_in % 32:
            scheme = EightBits("int8") if self.bits == 8 else FourBits()
            return scheme.load(tensors, num_out, num_in)
        groups = tensors["weight"].float().view(num_out, -1, 32)
        if self.bits == 8:
            scales = (groups.abs().amax(-1, keepdim=True) / LARGEST["int8"]).half()
            codes = round_to_codes(groups / scales.float().masked_fill(scales == 0, 1.0), "int8")
            parts = [scales.view(torch.uint8), codes.view(torch.uint8)]
        else:
            scales, offsets = (x.half() for x in _best_range(groups))
            divisors = scales.float().masked_fill(scales == 0, 1.0)
            codes = ((groups - offsets.float()) / divisors).round_().clamp_(0, 15)
            low, high = codes.to(torch.uint8).chunk(2, dim=-1)  # the first 16 in the lower halves
            parts = [scales.view(torch.uint8), offsets.view(torch.uint8), low | high << 4]
        rows = torch.cat(parts, dim=-1).flatten(1)
        kind = "Q8_0" if self.bits == 8 else "Q4_1"
        return QuantizedWeight("gguf", rows, (num_out, num_in), gguf_type=kind)


def _best_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets [..., 1] of 16 levels for groups [..., size].

    Of some ranges from a group's smallest value to its largest, and narrower ones, that with the
    smallest square error.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scales, offsets = torch.ones_like(low), torch.zeros_like(low)
    for shrink in SHRINKS:
        scale = (high - low) * (shrink / 15)
        scale = scale.masked_fill(scale == 0, 1.0)
        offset = low * shrink
        codes = ((groups - offset) / scale).round_().clamp_(0, 15)
        error = (codes * scale + offset - groups).square_().sum(-1, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
        offsets = torch.where(is_better, offset, offsets)
    return scales, offsets
