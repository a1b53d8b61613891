"""Quantized weights in plain torch: their values, how activations are rounded, the products.

The oracle of the quantized kernels, and what a device without them would serve.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from . import gguf_blocks
from .api import BackendError

if TYPE_CHECKING:
    from torch import Tensor

    from .api import QuantizedWeight

KINDS = ("fp8", "int8", "uint4", "mxfp4", "gguf")
# e2m1 by code (OCP Microscaling Formats 1.0, table 5): a sign, two exponent bits, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LARGEST = {"fp8": 448.0, "int8": 127.0}  # code of an activation's largest magnitude


def check(weight: QuantizedWeight) -> None:
    """Raise BackendError where the weight's kind or GGUF type is not known."""
    if weight.kind not in KINDS:
        raise BackendError(f"weights of kind {weight.kind!r} are not multiplied here")
    if weight.kind == "gguf" and weight.gguf_type not in gguf_blocks.BLOCK_TYPES:
        raise BackendError(f"weights of GGUF's {weight.gguf_type} are not multiplied here")


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight's values [out, in] or [num_experts, out, in], columns in the inputs' order.

    Raises:
        BackendError: the kind is not known.
    """
    check(weight)
    if weight.kind == "gguf":
        return gguf_blocks.dequantize(weight.codes, weight.gguf_type, dtype)
    values = _codes(weight, dtype)
    if weight.scales is not None:
        values *= _spread(weight.scales, weight).to(dtype)
    if weight.offsets is not None:
        values += _spread(weight.offsets, weight).to(dtype)
    if weight.order is None:
        return values
    order = weight.order.long().unsqueeze(-2).expand_as(values)
    return torch.empty_like(values).scatter_(-1, order, values)


def _codes(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """What the codes stand for before scales, in a new tensor of the weight's shape."""
    match weight.kind:
        case "fp8" | "int8":
            return weight.codes.to(dtype, copy=True)
        case "uint4":
            return unpack_nibbles(weight.codes).to(dtype)
        case "mxfp4":
            table = torch.tensor(E2M1, dtype=dtype, device=weight.codes.device)
            return table[unpack_nibbles(weight.codes).int()]
    raise AssertionError(weight.kind)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n / 2], the lower half first, to uint8 [..., n] of 0 to 15."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `unpack_nibbles`."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def _spread(scales: Tensor, weight: QuantizedWeight) -> Tensor:
    """One value for each code, out of one for each block; the last blocks may be cut off."""
    num_out, num_in = weight.shape[-2:]
    for dim, size in ((-2, num_out), (-1, num_in)):
        block = weight.block[dim]
        if scales.shape[dim] == 1:
            continue  # broadcasts
        scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scales


def round_activations(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [num_tokens, in] as the weight wants it rounded: code * scale, in x's type.

    A measured scale is the largest magnitude / 448 (fp8) or 127 (int8). Scales and x / scale are
    float32 whatever x's type, so that codes do not depend on it.
    """
    if weight.activations is None:
        return x
    num_in, groups = x.shape[1], x.float()[:, None]
    if weight.activations == "group":  # the last of a token is filled up with zeros
        size = weight.block[1]
        groups = F.pad(x.float(), (0, -num_in % size)).unflatten(1, (-1, size))
    if weight.activations == "tensor":
        assert weight.input_scale is not None
        scales = weight.input_scale
    else:
        # By a tensor: a GPU multiplies by a number's reciprocal, which rounds otherwise.
        scales = groups.abs().amax(-1, keepdim=True)
        scales = scales / torch.full_like(scales, LARGEST[weight.kind])
        scales = scales.masked_fill(scales == 0, 1.0)
    codes = round_to_codes(groups / scales, weight.kind)
    return (codes.to(x.dtype) * scales.to(x.dtype)).flatten(1)[:, :num_in]


def round_to_codes(x: Tensor, kind: str) -> Tensor:
    """Codes of values that are divided by their scales; to the nearest, of two to the even one."""
    if kind == "fp8":
        return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return x.round().clamp(-127, 127).to(torch.int8)


def linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """See `Ops.quantized_linear`; computed in float32, or float64 where x is."""
    high = torch.promote_types(x.dtype, torch.float32)
    out = round_activations(x.to(high), weight) @ dequantize(weight, high).T
    if bias is not None:
        out += bias
    return out.to(x.dtype if out_dtype is None else out_dtype)


def of_expert(weight: QuantizedWeight, expert: int) -> QuantizedWeight:
    """One expert's weight [out, in]."""
    return replace(
        weight,
        codes=weight.codes[expert],
        shape=weight.shape[1:],
        scales=None if weight.scales is None else weight.scales[expert],
        offsets=None if weight.offsets is None else weight.offsets[expert],
        order=None if weight.order is None else weight.order[expert],
    )
