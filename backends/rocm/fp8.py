"""gfx942's 8-bit float, e4m3fnuz, out of everybody's e4m3fn.

A byte means exactly half in fnuz of what it means in fn, for all finite codes, but for 0x80: -0 in
fn, NaN in fnuz. So codes stay, -0 becomes 0, and scales are doubled. fn's NaNs (0x7f, 0xff) would
be +-240: a checkpoint that holds them is refused.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..api import BackendError, QuantizedWeight

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def to_fnuz(codes: Tensor) -> Tensor:
    """Codes e4m3fn to e4m3fnuz of half the value, in new memory.

    Raises:
        BackendError: a code is NaN.
    """
    raw = codes.view(torch.uint8)
    if bool((raw & 0x7F == 0x7F).any()):
        raise BackendError("an fp8 weight holds NaN")
    return raw.masked_fill(raw == 0x80, 0).view(FNUZ)


def weight_to_fnuz(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of kind "fp8" with codes e4m3fnuz and the same values; others as they are.

    The activations' fixed scale is doubled, too: they are divided by it and rounded to codes.
    """
    if weight.kind != "fp8" or weight.codes.dtype != FN:
        return weight
    return replace(
        weight,
        codes=to_fnuz(weight.codes),
        scales=None if weight.scales is None else weight.scales * 2,
        input_scale=None if weight.input_scale is None else weight.input_scale * 2,
    )
