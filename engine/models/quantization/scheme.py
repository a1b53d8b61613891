"""What a quantization scheme is, and what several of them share.

A scheme *creates* the list of tensors that a checkpoint has of one linear, and *loads* a
`QuantizedWeight` out of them, to which the ops apply an input. `Linear` and `Experts` do the rest:
they collect, fuse and pack.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....backends.api import QuantizedWeight
from ....backends.quantized import pack_nibbles, unpack_nibbles
from ..parameters import Expected


class Scheme(Protocol):
    """One way to keep a weight [out, in]."""

    def create(self, num_out: int, num_in: int) -> dict[str, Expected]:
        """The tensors of a linear, by what follows its name and a dot.

        Raises:
            ValueError: a weight of this shape cannot be kept so.
        """

    def load(self, tensors: Mapping[str, Tensor], num_out: int, num_in: int) -> QuantizedWeight:
        """The weight out of those tensors, which are on the device.

        Raises:
            ValueError: their values make no sense together.
        """


def scalar(scale: Tensor) -> Tensor:
    """A scale of a whole tensor, saved as [] or [1], as float32 [1, 1]."""
    return scale.float().reshape(1, 1)


def grouped(
    codes: Tensor,
    bits: int,
    group_size: int | None,
    scales: Tensor,
    zeros: Tensor | None,
    group_of: Tensor | None = None,
) -> QuantizedWeight:
    """A weight of unsigned codes whose value is (code - zero) * scale.

    Args:
        codes: uint8, [out, in] of 8 bits, or [out, in / 2] with the first of two in the lower half.
        group_size: inputs that share a scale, None for all.
        scales: [out, groups].
        zeros: [out, groups], None for the middle of the codes' range.
        group_of: [in] the group that each input's column belongs to, None for groups of neighbours.

    Raises:
        ValueError: the groups differ in size.
    """
    shape, order = (len(codes), codes.shape[1] * 8 // bits), None
    size = group_size or shape[1]
    if group_of is not None:
        order = _order(group_of, size)
    if order is not None:
        codes = unpack_nibbles(codes) if bits == 4 else codes
        codes = codes[:, order.long()]
        codes = pack_nibbles(codes) if bits == 4 else codes
    scales, middle = scales.float().contiguous(), 1 << bits - 1
    zeros = torch.full_like(scales, middle) if zeros is None else zeros.float()
    if bits == 4:
        offsets = (-zeros * scales).contiguous()
        return QuantizedWeight(
            "uint4",
            codes.contiguous(),
            shape,
            scales,
            offsets,
            (1, size),
            order=order,
            has_zero_points=True,
        )
    # Signed codes are the unsigned ones less 128.
    codes, offsets = (codes ^ 0x80).view(torch.int8).contiguous(), (middle - zeros) * scales
    is_symmetric = not offsets.is_meta and not bool(offsets.any())
    kept = None if is_symmetric else offsets.contiguous()
    return QuantizedWeight("int8", codes, shape, scales, kept, (1, size), order=order)


def _order(group_of: Tensor, size: int) -> Tensor | None:
    """int32 [in] inputs sorted by their groups, None where they are."""
    if group_of.is_meta:
        return None
    groups = torch.arange(len(group_of), device=group_of.device, dtype=torch.int32) // size
    if torch.equal(group_of, groups):
        return None
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], groups):
        raise ValueError(f"g_idx has other groups than of {size} inputs each")
    return order.int()


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the rows of several, None where their forms do not allow that.

    A scale for a whole tensor becomes one for each row, which changes no value.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(
        w.kind != first.kind
        or w.gguf_type != first.gguf_type
        or w.activations != first.activations
        or not equal(w.input_scale, first.input_scale)
        or not equal(w.order, first.order)
        or w.shape[:-2] != first.shape[:-2]
        for w in weights
    ):
        return None
    if any(w.block == w.shape[-2:] for w in weights):
        weights = [by_row(w) for w in weights]
    rows, _ = block = weights[0].block
    if any(w.block != block for w in weights) or any(w.shape[-2] % rows for w in weights[:-1]):
        return None
    has_offsets = any(w.offsets is not None for w in weights)
    num_out = sum(w.shape[-2] for w in weights)
    return replace(
        weights[0],
        codes=_cat([w.codes for w in weights]),
        shape=(*first.shape[:-2], num_out, first.shape[-1]),
        scales=None if first.scales is None else _cat([w.scales for w in weights]),
        offsets=_cat([_offsets(w) for w in weights]) if has_offsets else None,
        has_zero_points=all(w.has_zero_points for w in weights),
    )


def by_row(weight: QuantizedWeight) -> QuantizedWeight:
    """The same with one scale a row, where the whole weight has one."""
    rows = weight.shape[-2]
    if weight.block != weight.shape[-2:]:
        return weight

    def spread(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(rows, dim=-2)

    return replace(
        weight,
        scales=spread(weight.scales),
        offsets=spread(weight.offsets),
        block=(1, weight.block[1]),
    )


def _offsets(weight: QuantizedWeight) -> Tensor:
    assert weight.scales is not None
    return torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets


def _cat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([t for t in tensors if t is not None], dim=-2)


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they hold the same, or are both None."""
    if a is None or b is None:
        return a is b
    return a.is_meta or torch.equal(a, b)
