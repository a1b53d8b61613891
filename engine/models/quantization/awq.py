"""AWQ checkpoints (Lin et al. 2023), as AutoAWQ writes them for its "gemm" kernel.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.quantized import pack_nibbles, unpack_nibbles
from ..parameters import Expected
from .scheme import grouped

# Of eight outputs, which one each nibble of a word holds, the lowest first; and the inverse.
HELD = (0, 2, 4, 6, 1, 3, 5, 7)
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """Codes of 4 bits, int32 words along the outputs; value = (code - zero) * scale.

    Attributes:
        group_size: inputs that share a scale; None for all.
    """

    group_size: int | None

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Inputs come first."""
        if num_out % 8:
            raise ValueError("8 codes make a word, which do not divide the weight")
        groups = -(-num_in // (self.group_size or num_in))
        return {
            "qweight": Expected((num_in, num_out // 8), torch.int32),
            "qzeros": Expected((groups, num_out // 8), torch.int32),
            "scales": Expected((groups, num_out)),
        }

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """Transposed, with the outputs of each word put in order."""
        codes = pack_nibbles(_in_order(tensors["qweight"]).t())
        zeros = _in_order(tensors["qzeros"]).t()
        return grouped(codes, 4, self.group_size, tensors["scales"].t(), zeros)


def _in_order(words: Tensor) -> Tensor:
    """int32 [n, out / 8] to uint8 codes [n, out]."""
    nibbles = unpack_nibbles(words.contiguous().view(torch.uint8)).unflatten(1, (-1, 8))
    return nibbles[..., torch.tensor(PLACE, device=words.device)].flatten(1)
