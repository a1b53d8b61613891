"""MXFP4 experts as gpt-oss has them (OCP Microscaling Formats 1.0).

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ..parameters import Expected


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Blocks of 32 e2m1 codes, two a byte, and an exponent for each; of all experts at once."""

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Of one expert; a checkpoint has num_experts in front."""
        if num_in % 32:
            raise ValueError("blocks of 32 do not divide the inputs")
        return {
            "blocks": Expected((num_out, num_in // 32, 16), torch.uint8),
            "scales": Expected((num_out, num_in // 32), torch.uint8),
        }

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The first code is the lower half. With num_experts in front, so is the weight's shape."""
        codes = tensors["blocks"].flatten(-2)
        shape = (*codes.shape[:-1], num_in)
        scales = power_of_two(tensors["scales"])
        return QuantizedWeight("mxfp4", codes, shape, scales, block=(1, 32))


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 2^(e - 127) of E8M0 exponents, uint8; the smallest, which no weight needs, is 0."""
    return (exponents.int() << 23).view(torch.float32)
