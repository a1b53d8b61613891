"""GGUF weights as the kernels of gguf.h keep them.

Runs on: gpu.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # gguf.h's Type
ROWS = 16  # of a panel


class Part(ctypes.Structure):
    """Twin of gguf.h's."""

    _fields_ = (("packed", c_void_p), ("num_out", c_int64), ("type", c_int32))


class PackedGGUF:
    """A weight out of parts of one or several types, whose rows follow each other.

    Args:
        panels: uint8, of each part.
        types, sizes: the parts' types and rows.

    Attributes:
        address: of the parts, as the kernels read them.
        is_linear: `Ops.linear` takes it, too.
    """

    is_linear = True

    def __init__(
        self,
        panels: list[Tensor],
        types: list[str],
        sizes: list[int],
        num_in: int,
        bias: Tensor | None,
    ):
        self.panels = panels
        parts = (
            Part(panel.data_ptr(), size, TYPES.index(name))
            for panel, size, name in zip(panels, sizes, types, strict=True)
        )
        self._parts = (Part * len(panels))(*parts)
        self.address = ctypes.addressof(self._parts)
        self.num_in, self.num_out = num_in, sum(sizes)
        self._bias, self._biases = bias, dict[torch.dtype, Tensor]()

    def bias_ptr(self, dtype: torch.dtype) -> int | None:
        """Address of the bias in this type."""
        if self._bias is None:
            return None
        if dtype not in self._biases:
            self._biases[dtype] = self._bias.to(dtype, copy=True)
        return self._biases[dtype].data_ptr()
