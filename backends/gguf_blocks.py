"""The quantized blocks of GGUF files in plain torch: their values, and the same ones regrouped.

A block of 32 values, or of 256 (the types with a K), is a value = code * scale + offset, with a
scale and an offset for each group of 32 or 16 codes. Layouts: ggml-common.h and ggml-quants.c of
ggml, whose names the fields below have.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .api import QuantizedWeight


class Groups(NamedTuple):
    """A block's parts: codes uint8 or int8 [..., groups, group]; scales and offsets [..., groups].

    Scales and offsets are float32; offsets are None for zero.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of block.

    Attributes:
        size: values in a block.
        num_bytes: of a block.
        group: values that share a scale.
        bits: of a code.
        read: bytes of blocks [..., num_bytes] to their groups.
    """

    size: int
    num_bytes: int
    group: int
    bits: int
    read: Callable[[Tensor], Groups]


def _halves(blocks: Tensor, at: int) -> Tensor:
    """A float16 at a place of each block: float32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2, n] codes: the lower halves, then the upper ones."""
    return torch.stack((qs & 15, qs >> 4), dim=-2)


def _bits(qh: Tensor, width: int, num: int) -> Tensor:
    """[..., n] bytes to [..., num, n]: the lowest `width` bits, the next ones, and so on."""
    shifts = torch.arange(num, device=qh.device, dtype=torch.uint8)[:, None] * width
    return qh[..., None, :] >> shifts & (1 << width) - 1


def _fifth_bits(qh: Tensor) -> Tensor:
    """4 bytes to the 32 bits that they hold, the lowest first, as [..., 1, 32]."""
    return _bits(qh, 1, 8).transpose(-1, -2).flatten(-2)[..., None, :]


def _q4_0(blocks: Tensor) -> Groups:
    d = _halves(blocks, 0)
    return Groups(_nibbles(blocks[..., 2:]).flatten(-2)[..., None, :], d, -8 * d)


def _q4_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 4:]).flatten(-2)[..., None, :]
    return Groups(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 6:]).flatten(-2)[..., None, :] | _fifth_bits(blocks[..., 2:6]) << 4
    return Groups(codes.view(torch.int8) - 16, _halves(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 8:]).flatten(-2)[..., None, :] | _fifth_bits(blocks[..., 4:8]) << 4
    return Groups(codes.view(torch.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    codes = blocks[..., 2:].contiguous().view(torch.int8)[..., None, :]
    return Groups(codes, _halves(blocks, 0), None)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets [..., 8] of Q4_K and Q5_K: 6 bits each, times d and -dmin."""
    d, dmin, packed = _halves(blocks, 0), _halves(blocks, 2), blocks[..., 4:16]
    low, middle, high = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    mins = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return d * scales, -dmin * mins


def _q4_k(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)
    return Groups(codes, *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)
    codes = codes | _bits(blocks[..., 16:48], 1, 8) << 4
    return Groups(codes.view(torch.int8), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [..., half, nibble, 64]
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2, 4)  # [..., half, quarter, 32]
    codes = low.flatten(-2) | high.flatten(-2) << 4
    codes = codes.flatten(-2).unflatten(-1, (16, 16)).view(torch.int8) - 32
    return Groups(codes, _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8), None)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 32, 4, _q4_0),
    "Q4_1": BlockType(32, 20, 32, 4, _q4_1),
    "Q5_0": BlockType(32, 22, 32, 5, _q5_0),
    "Q5_1": BlockType(32, 24, 32, 5, _q5_1),
    "Q8_0": BlockType(32, 34, 32, 8, _q8_0),
    "Q4_K": BlockType(256, 144, 32, 4, _q4_k),
    "Q5_K": BlockType(256, 176, 32, 5, _q5_k),
    "Q6_K": BlockType(256, 210, 16, 6, _q6_k),
}


def dequantize(codes: Tensor, gguf_type: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Raw rows uint8 [..., row_bytes] to their values [..., row], in float32 rounded to dtype.

    The values are ggml's, bit for bit: all products are exact, and a sum is rounded once.
    """
    groups = _read(codes, gguf_type)
    values = groups.codes * groups.scales[..., None]
    if groups.offsets is not None:
        values += groups.offsets[..., None]
    return values.flatten(-3).to(dtype)


def regrouped(weight: QuantizedWeight) -> QuantizedWeight:
    """The same values, exactly, as kind "uint4" (4 bits) or "int8" (more), for kernels of those.

    Scales and offsets are float32, one for each row and 32 columns (16 for Q6_K).
    """
    block_type = BLOCK_TYPES[weight.gguf_type]
    groups = _read(weight.codes, weight.gguf_type)
    codes = groups.codes.flatten(-3)
    is_4_bits = block_type.bits == 4
    return replace(
        weight,
        kind="uint4" if is_4_bits else "int8",
        codes=codes[..., 0::2] | codes[..., 1::2] << 4 if is_4_bits else codes,
        scales=groups.scales.flatten(-2),
        offsets=None if groups.offsets is None else groups.offsets.flatten(-2).contiguous(),
        block=(1, block_type.group),
        gguf_type="",
        has_zero_points=weight.gguf_type == "Q4_0",  # 8
    )


def _read(codes: Tensor, gguf_type: str) -> Groups:
    block_type = BLOCK_TYPES[gguf_type]
    return block_type.read(codes.unflatten(-1, (-1, block_type.num_bytes)))
