"""Checkpoints of compressed-tensors, as LLM Compressor writes them.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.quantized import unpack_nibbles
from ..parameters import Expected
from .mxfp4 import power_of_two
from .scheme import grouped, scalar


@dataclass(frozen=True, slots=True)
class PlainCodes:
    """Formats float-quantized, int-quantized and naive-quantized: `weight` has the codes' type.

    Attributes:
        block: (rows, columns) that share a scale; 0 is all of them.
        activations: see `QuantizedWeight`.
    """

    kind: Literal["fp8", "int8"]
    block: tuple[int, int]
    is_symmetric: bool = True
    activations: Literal["tensor", "token", "group"] | None = None

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """A scale has two dimensions, but that of a tensor."""
        rows, columns = self.block[0] or num_out, self.block[1] or num_in
        shape: tuple[int, ...] = (-(-num_out // rows), -(-num_in // columns))
        if self.block == (0, 0):
            shape = (1,)
        dtype = torch.float8_e4m3fn if self.kind == "fp8" else torch.int8
        tensors = {"weight": Expected((num_out, num_in), dtype), "weight_scale": Expected(shape)}
        zeros = Expected(shape, dtype, must_be_zero=self.is_symmetric)
        tensors["weight_zero_point"] = zeros
        if self.activations == "tensor":
            tensors["input_scale"] = Expected((1,))
            tensors["input_zero_point"] = Expected((1,), dtype, must_be_zero=True)
        return tensors

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """value = (code - zero) * scale."""
        rows, columns = self.block[0] or num_out, self.block[1] or num_in
        scales = tensors["weight_scale"].float().reshape(-(-num_out // rows), -1)
        offsets, is_static = None, self.activations == "tensor"
        if not self.is_symmetric:
            offsets = -tensors["weight_zero_point"].float() * scales
        return QuantizedWeight(
            self.kind,
            tensors["weight"],
            (num_out, num_in),
            scales,
            offsets,
            (rows, columns),
            self.activations,
            scalar(tensors["input_scale"])[0] if is_static else None,
        )


@dataclass(frozen=True, slots=True)
class PackedInts:
    """Format pack-quantized: codes of 4 or 8 bits in int32 words along the inputs.

    Attributes:
        group_size: inputs that share a scale; 0 for all.
        has_order: `weight_g_idx` is the group of each input.
    """

    bits: int
    group_size: int
    is_symmetric: bool = True
    has_order: bool = False

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Zeros are packed along the outputs."""
        if num_in * self.bits % 32:
            raise ValueError(f"{32 // self.bits} codes make a word, which do not divide the inputs")
        groups = -(-num_in // (self.group_size or num_in))
        tensors = {
            "weight_packed": Expected((num_out, num_in * self.bits // 32), torch.int32),
            "weight_scale": Expected((num_out, groups)),
            "weight_shape": Expected((2,), torch.int64, is_optional=True),
        }
        if not self.is_symmetric:
            words = -(-num_out * self.bits // 32)
            tensors["weight_zero_point"] = Expected((words, groups), torch.int32)
        if self.has_order:
            tensors["weight_g_idx"] = Expected((num_in,), torch.int32)
        return tensors

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The words' lowest bits are the first code, as in our bytes."""
        zeros = None
        if not self.is_symmetric:
            zeros = tensors["weight_zero_point"].t().contiguous().view(torch.uint8)
            zeros = unpack_nibbles(zeros) if self.bits == 4 else zeros
            zeros = zeros.t()[:num_out]
        codes = tensors["weight_packed"].view(torch.uint8)
        size, scales = self.group_size or None, tensors["weight_scale"]
        return grouped(codes, self.bits, size, scales, zeros, tensors.get("weight_g_idx"))


@dataclass(frozen=True, slots=True)
class PackedMxfp4:
    """Format mxfp4-pack-quantized: two e2m1 codes a byte, a power of two for 32 inputs."""

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Scales are exponents."""
        if num_in % 32:
            raise ValueError("groups of 32 do not divide the inputs")
        return {
            "weight_packed": Expected((num_out, num_in // 2), torch.uint8),
            "weight_scale": Expected((num_out, num_in // 32), torch.uint8),
        }

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The first code is the lower half."""
        scales, shape = power_of_two(tensors["weight_scale"]), (num_out, num_in)
        return QuantizedWeight("mxfp4", tensors["weight_packed"], shape, scales, block=(1, 32))
