"""GPTQ checkpoints (Frantar et al. 2022), as AutoGPTQ and GPTQModel write them.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.quantized import unpack_nibbles
from ..parameters import Expected
from .scheme import grouped


@dataclass(frozen=True, slots=True)
class Gptq:
    """Codes of 4 or 8 bits, int32 words along the inputs; value = (code - zero) * scale.

    Attributes:
        group_size: inputs that share a scale; None for all.
        zero_shift: what is added to the saved zeros: 1 for checkpoint_format "gptq", 0 for v2.
        has_order: `g_idx` is the group of each input (desc_act); else neighbours make a group.
    """

    bits: int
    group_size: int | None
    zero_shift: int
    has_order: bool

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Inputs come first."""
        per_word = 32 // self.bits
        if num_in % per_word or num_out % per_word:
            raise ValueError(f"{per_word} codes make a word, which do not divide the weight")
        groups = -(-num_in // (self.group_size or num_in))
        return {
            "qweight": Expected((num_in // per_word, num_out), torch.int32),
            "qzeros": Expected((groups, num_out // per_word), torch.int32),
            "scales": Expected((groups, num_out)),
            "g_idx": Expected((num_in,), torch.int32, is_optional=not self.has_order),
            "bias": Expected((num_out,), must_be_zero=True),
        }

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The words' lowest bits are the first code, as in our bytes."""
        codes = tensors["qweight"].t().contiguous().view(torch.uint8)
        zeros = tensors["qzeros"].contiguous().view(torch.uint8)
        zeros = unpack_nibbles(zeros) if self.bits == 4 else zeros
        zeros = (zeros.t().int() + self.zero_shift) & (1 << self.bits) - 1
        group_of = tensors["g_idx"] if self.has_order else None
        if not self.has_order and "g_idx" in tensors:
            neighbours = torch.arange(num_in, device=codes.device) // (self.group_size or num_in)
            if not torch.equal(tensors["g_idx"].to(neighbours), neighbours):
                raise ValueError("g_idx is no order of neighbours, but desc_act is false")
        return grouped(codes, self.bits, self.group_size, tensors["scales"].t(), zeros, group_of)
