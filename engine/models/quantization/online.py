"""--quantization: weights of checkpoints that are not quantized, rounded when they are loaded.

No calibration, so nothing is needed but the weights. int4 costs quality; see
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
        """Of some ranges from a group's smallest value to its largest, and narrower ones, that
        with the smallest square error.
        """
        size = next((g for g in GROUP_SIZES if num_in % g == 0), num_in)
        groups = tensors["weight"].float().view(num_out, -1, size)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)  # so that zero is a level, nearly
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
        codes = ((groups - offsets) / scales).round_().clamp_(0, 15)
        return QuantizedWeight(
            "uint4",
            pack_nibbles(codes.view(num_out, num_in)),
            (num_out, num_in),
            scales[..., 0],
            offsets[..., 0],
            (1, size),
        )
