"""Quantized linears on the CPU, by torch's packed kernels where they fit.

int8 weights with inputs rounded token by token: oneDNN's int8 product, exact. int8 and uint4
weights with inputs as they are, in bfloat16: `_weight_int8pack_mm` and
`_weight_int4pack_mm_for_cpu`; the latter reads scales and zeros in bfloat16, so a weight is off by
up to 0.4% of its group's range. In other types those two are ten times slower than floats. The rest
(fp8, mxfp4, groups that those do not take, other types) is dequantized when it is packed, which the
log says: it multiplies as fast as floats, and takes as much memory.

Runs on: gpu.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized import dequantize, round_activations, unpack_nibbles
from .probe import attempt

if TYPE_CHECKING:
    from ..api import QuantizedWeight

logger = logging.getLogger(__name__)

INT4_GROUPS = (32, 64, 128, 256)
INT4_ROWS = 16  # outputs must be a multiple of
ZERO = 128  # oneDNN is fast with unsigned inputs only: signed ones take 300 times as long
NO_CODES = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """int8 times int8, with a scale for each row of the weight and each token."""

    weight: Tensor  # in oneDNN's order
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [num_tokens, out]."""
        x = x.float()
        scale = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).mul_(1 / 127)
        scale.masked_fill_(scale == 0, 1.0)
        codes = (x / scale).round_().add_(ZERO).to(torch.uint8)
        out = torch.ops.onednn.qlinear_pointwise.default(
            codes,
            1.0,
            ZERO,
            self.weight,
            self.scales,
            self.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out *= scale
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class WeightOnlyLinear:
    """An input of floats times a weight of 8 or 4 bits.

    Attributes:
        multiply: (x, scales) to [num_tokens, rows].
        scales: float32; of 4 bits with zeros; converted once for each type of input.
        rows: outputs, of which the kernel may have had more.
        order: which input each column belongs to, or None.
    """

    multiply: Callable[[Tensor, Tensor], Tensor]
    scales: Tensor
    rows: int
    order: Tensor | None
    bias: Tensor | None
    _by_dtype: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, out] in x's type."""
        scales = self._by_dtype.get(x.dtype)
        if scales is None:
            scales = self._by_dtype[x.dtype] = self.scales.to(x.dtype)
        x = x.contiguous() if self.order is None else x.index_select(1, self.order)
        out = self.multiply(x, scales)[:, : self.rows]
        return out if self.bias is None else out + self.bias.to(out.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedLinear:
    """A plain weight, with inputs rounded as the quantized one wants them.

    Attributes:
        packed: what `linear` takes, in `dtype`.
        form: the weight without its codes.
    """

    packed: Any
    dtype: torch.dtype
    form: QuantizedWeight


def pack(
    weight: QuantizedWeight,
    bias: Tensor | None,
    pack_linear: Callable[[Tensor, Tensor | None], Any],
) -> Int8Linear | WeightOnlyLinear | DequantizedLinear:
    """The fastest of the three that serves the weight as it is."""
    num_out, num_in = weight.shape
    has_kernels = weight.dtype in (None, torch.bfloat16)
    by_row = weight.block[1] >= num_in and weight.scales is not None
    if weight.kind == "int8" and by_row and weight.offsets is None and weight.order is None:
        scales = _each_row(weight)
        if weight.activations == "token" and can_multiply_int8():
            reordered = torch.ops.onednn.qlinear_prepack.default(weight.codes.contiguous(), None)
            zeros = torch.zeros(num_out, dtype=torch.int64)
            return Int8Linear(reordered, scales, zeros, None if bias is None else bias.float())
        if weight.activations is None and has_kernels:
            codes = weight.codes.contiguous()
            return WeightOnlyLinear(
                lambda x, s: torch.ops.aten._weight_int8pack_mm.default(x, codes, s),
                scales,
                num_out,
                None,
                bias,
            )
    rows, group = weight.block
    if weight.kind == "uint4" and rows == 1 and group in INT4_GROUPS and num_in % group == 0:
        if has_kernels:
            return _int4(weight, bias, group)
    dtype = weight.dtype or torch.float32
    _log_dequantized(weight.kind, dtype)
    values = dequantize(weight).to(dtype)
    form = replace(weight, codes=NO_CODES, scales=None, offsets=None, order=None)
    return DequantizedLinear(
        pack_linear(values, None if bias is None else bias.to(dtype)), dtype, form
    )


def _each_row(weight: QuantizedWeight) -> Tensor:
    """float32 [out], where one scale may be for several rows."""
    assert weight.scales is not None
    return weight.scales[:, 0].repeat_interleave(weight.block[0])[: weight.shape[0]].contiguous()


def _int4(weight: QuantizedWeight, bias: Tensor | None, group: int) -> WeightOnlyLinear:
    """Codes two a byte in torch's order; value = (code - 8) * scale + zero."""
    assert weight.scales is not None
    rows = weight.shape[0]
    more = -rows % INT4_ROWS
    codes = F.pad(unpack_nibbles(weight.codes), (0, 0, 0, more))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(codes.int(), 1)
    zeros = 8 * weight.scales if weight.offsets is None else weight.offsets + 8 * weight.scales
    scales = F.pad(torch.stack((weight.scales, zeros), dim=-1), (0, 0, 0, 0, 0, more))
    return WeightOnlyLinear(
        lambda x, s: torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, packed, group, s),
        scales.transpose(0, 1).contiguous(),
        rows,
        None if weight.order is None else weight.order.long(),
        bias,
    )


def linear(
    x: Tensor,
    packed: Int8Linear | WeightOnlyLinear | DequantizedLinear,
    out_dtype: torch.dtype | None,
    plain: Callable[[Tensor, Any, torch.dtype | None], Tensor],
) -> Tensor:
    """See `Ops.quantized_linear`; `plain` is `Ops.linear`."""
    wanted = x.dtype if out_dtype is None else out_dtype
    if not isinstance(packed, DequantizedLinear):
        if not len(x):
            return x.new_empty(0, _num_out(packed), dtype=wanted)
        return packed(x).to(wanted)
    if packed.form.activations is not None:
        x = round_activations(x.float(), packed.form)
    return plain(x.to(packed.dtype), packed.packed, wanted)


def _num_out(packed: Int8Linear | WeightOnlyLinear) -> int:
    return packed.rows if isinstance(packed, WeightOnlyLinear) else len(packed.scales)


@cache
def _log_dequantized(kind: str, dtype: torch.dtype) -> None:
    """Once for each kind."""
    logger.info(
        "weights of kind %s are dequantized to %s when they are loaded: no kernel multiplies them",
        kind,
        str(dtype).removeprefix("torch."),
    )


@cache
def can_multiply_int8() -> bool:
    """Whether this build of torch has oneDNN's product of int8, and gives the right one."""
    x = torch.arange(-6, 6, dtype=torch.int8).view(3, 4) * 20
    weight = torch.arange(-10, 10, dtype=torch.int8).view(5, 4) * 12

    def product() -> Tensor:
        packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
        return Int8Linear(packed, torch.ones(5), torch.zeros(5, dtype=torch.int64), None)(x)

    out, want = attempt("oneDNN product of int8", product), x.float() @ weight.float().T
    return out is not None and bool((out - want).abs().max() <= 0.01 * want.abs().max())
