"""GGUF weights that stay packed: raw rows of blocks, which the ops multiply as they are.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.gguf_blocks import BLOCK_TYPES
from ..parameters import Expected


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Rows of blocks of one type, a key of `BLOCK_TYPES`."""

    gguf_type: str

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Raw rows."""
        block = BLOCK_TYPES[self.gguf_type]
        if num_in % block.size:
            raise ValueError(f"blocks of {block.size} do not divide the inputs")
        row_bytes = num_in // block.size * block.num_bytes
        return {"weight": Expected((num_out, row_bytes), torch.uint8)}

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The rows."""
        shape = (num_out, num_in)
        return QuantizedWeight("gguf", tensors["weight"], shape, gguf_type=self.gguf_type)


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """Which weights of a GGUF file stay packed; a `QuantConfig` by exact names.

    Attributes:
        schemes: by the Hugging Face name of a linear or an embedding.
    """

    schemes: Mapping[str, GgufBlocks]
    method: str = "gguf"

    def scheme(self, name: str) -> GgufBlocks | None:
        """How the weight of this name lies in the file; None is dequantized as it is read."""
        return self.schemes.get(name)
