"""Float8 weights: quant_method "fp8", with one scale a tensor, a row, or a block.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ..parameters import Expected
from .scheme import scalar


@dataclass(frozen=True, slots=True)
class Fp8:
    """`weight` float8_e4m3fn [out, in] and its scales.

    Attributes:
        block: (rows, columns) that share a scale; None where `weight_scale` is one for the
            tensor, [] or [1], or one for each row, [out, 1].
        is_static: `input_scale`, for a whole tensor, is in the checkpoint. Otherwise each token's
            scale is measured, or that of each token's block: where the config says "dynamic" for a
            whole tensor, too, since tokens must not depend on what else is in the batch.
    """

    block: tuple[int, int] | None = None
    is_static: bool = False

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """Names as vLLM and transformers write them."""
        tensors = {"weight": Expected((num_out, num_in), torch.float8_e4m3fn)}
        if self.block is not None:
            rows, columns = self.block
            shape = (-(-num_out // rows), -(-num_in // columns))
            tensors["weight_scale_inv"] = Expected(shape, alias="weight_scale")
        else:
            tensors["weight_scale"] = Expected((), alias="weight_scale_inv", other=(num_out, 1))
        if self.is_static:
            tensors["input_scale"] = Expected((), alias="activation_scale")
        return tensors

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """Codes and scales as they are."""
        codes = tensors["weight"]
        if self.block is not None:
            scales, block = tensors["weight_scale_inv"].float(), self.block
        else:
            scales, block = tensors["weight_scale"].float(), (1, num_in)
            if scales.numel() == 1:
                scales, block = scalar(scales), (num_out, num_in)
        return QuantizedWeight(
            "fp8",
            codes,
            (num_out, num_in),
            scales,
            block=block,
            activations="tensor" if self.is_static else "token" if self.block is None else "group",
            input_scale=scalar(tensors["input_scale"])[0] if self.is_static else None,
        )
