"""Checks of quantized weights of every form that checkpoints have.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from ..api import QuantizedExperts, QuantizedWeight
from ..quantized import E2M1, pack_nibbles
from .cases import ORACLE, TOLERANCE
from .target import Check, Target, compare, randn, same


@dataclass(frozen=True)
class QuantizedCase:
    """A form of QuantizedWeight; block sizes of 0 are the whole weight's."""

    name: str
    kind: Literal["fp8", "int8", "uint4", "mxfp4"]
    block: tuple[int, int]
    activations: Literal["tensor", "token", "group"] | None = None
    has_input_scale: bool = False
    has_offsets: bool = False
    has_order: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether a provider has nothing to round: neither activations, nor offsets to 16 bits."""
        return self.activations is None and (self.kind == "uint4" or not self.has_offsets)


CASES = [
    QuantizedCase("fp8-tensor", "fp8", (0, 0)),
    QuantizedCase("fp8-tensor-token", "fp8", (0, 0), "token"),
    QuantizedCase("fp8-tensor-static", "fp8", (0, 0), "tensor", has_input_scale=True),
    QuantizedCase("fp8-channel", "fp8", (1, 0)),
    QuantizedCase("fp8-channel-token", "fp8", (1, 0), "token"),
    QuantizedCase("fp8-channel-static", "fp8", (1, 0), "tensor", has_input_scale=True),
    QuantizedCase("fp8-block", "fp8", (128, 128)),
    QuantizedCase("fp8-block-group", "fp8", (128, 128), "group"),
    QuantizedCase("int8-channel", "int8", (1, 0)),
    QuantizedCase("int8-channel-token", "int8", (1, 0), "token"),
    QuantizedCase("int8-tensor-static", "int8", (0, 0), "tensor", has_input_scale=True),
    QuantizedCase("int8-group", "int8", (1, 32)),
    QuantizedCase("int8-group-offsets", "int8", (1, 128), has_offsets=True),
    QuantizedCase("int8-group-order", "int8", (1, 64), has_order=True),
    QuantizedCase("uint4-channel", "uint4", (1, 0), has_offsets=True),
    QuantizedCase("uint4-group32", "uint4", (1, 32), has_offsets=True),
    QuantizedCase("uint4-group128", "uint4", (1, 128), has_offsets=True),
    QuantizedCase("uint4-group-order", "uint4", (1, 64), has_offsets=True, has_order=True),
    QuantizedCase("mxfp4", "mxfp4", (1, 32)),
]


def random_quantized(
    case: QuantizedCase, num_out: int, num_in: int, num_experts: int = 0, seed: int = 0
) -> QuantizedWeight:
    """Values of a variance near 1 / num_in, with scales that differ up to four times."""
    gen = torch.Generator().manual_seed(seed)
    front = (num_experts,) if num_experts else ()
    rows, columns = case.block[0] or num_out, case.block[1] or num_in
    grid = (*front, -(-num_out // rows), -(-num_in // columns))
    scales = (torch.rand(grid, generator=gen) * 1.5 + 0.5) / num_in**0.5
    shape = (*front, num_out, num_in)
    match case.kind:
        case "fp8":
            codes = torch.randn(shape, generator=gen).mul(64).to(torch.float8_e4m3fn)
            scales /= 64
        case "int8":
            codes = torch.randn(shape, generator=gen).mul(40).round().clamp(-128, 127)
            codes, scales = codes.to(torch.int8), scales / 40
        case "uint4":
            codes = pack_nibbles(torch.randint(16, shape, generator=gen))
            scales = (scales / 4.6).half().float()  # as checkpoints have them
        case "mxfp4":  # its scales are powers of two
            codes = pack_nibbles(torch.randint(16, shape, generator=gen))
            scales = (scales / torch.tensor(E2M1).std()).log2().round().exp2()
    offsets = None
    if case.kind == "uint4":
        offsets = -scales * torch.randint(6, 10, grid, generator=gen)
    elif case.has_offsets:
        offsets = -scales * torch.randint(-20, 20, grid, generator=gen)
    order = None
    if case.has_order:
        orders = [torch.randperm(num_in, generator=gen) for _ in range(num_experts or 1)]
        order = (torch.stack(orders) if num_experts else orders[0]).int()
    return QuantizedWeight(
        case.kind,
        codes,
        shape,
        scales,
        offsets,
        (rows, columns),
        case.activations,
        torch.tensor([0.01 if case.kind == "fp8" else 0.03]) if case.has_input_scale else None,
        order,
        has_zero_points=case.kind == "uint4",
    )


def on_device(weight: QuantizedWeight, device) -> QuantizedWeight:
    """The same weight there, in tensors of its own."""
    of = {f.name: getattr(weight, f.name) for f in fields(weight)}
    moved: dict[str, Any] = {
        k: x.to(device, copy=True) for k, x in of.items() if isinstance(x, Tensor)
    }
    return replace(weight, **moved)


def random_quantized_experts(
    case: QuantizedCase, num_experts: int, hidden: int, inner: int, activation: str, has_bias: bool
) -> QuantizedExperts:
    """Both linears in the same form; biases are float64."""
    gen = torch.Generator().manual_seed(num_experts)

    def bias(size: int) -> Tensor | None:
        if not has_bias:
            return None
        return torch.randn(num_experts, size, generator=gen, dtype=torch.float64)

    return QuantizedExperts(
        random_quantized(case, 2 * inner, hidden, num_experts),
        random_quantized(case, hidden, inner, num_experts, seed=1),
        activation,
        bias(2 * inner),
        bias(hidden),
    )


# By norm, where a provider has something to round. Of activations that lie within float32's
# rounding of a tie, which of 16 bits some do, a kernel may take the other code: 3% of one token, of
# many tokens together less.
INEXACT = {torch.float32: 3e-3, torch.float16: 3e-3, torch.bfloat16: 6e-3}
TIES = 0.03
# Twice: the second time of sums that differ in the fourth digit, which is another code or two.
ROUNDED = {torch.float32: 0.015, torch.float16: 0.015, torch.bfloat16: 0.025}


def quantized_linear(
    t: Target, dtype: torch.dtype, case: QuantizedCase, num_out: int, num_in: int
) -> float:
    """Raises BackendError where the provider does not serve this form."""
    weight = random_quantized(case, num_out, num_in)
    bias = randn(num_out, seed=1, dtype=dtype) if num_out == 98 else None
    there = None if bias is None else bias.to(t.device)
    packed = t.op("pack_quantized")(on_device(weight, t.device), there)
    known, worst = (weight, None if bias is None else bias.double()), 0.0
    for num_tokens in (1, 3, 17, 70):
        x = randn(num_tokens, num_in + 8, seed=num_tokens, dtype=dtype)[:, :num_in]
        wants = [
            ORACLE.quantized_linear(x.double(), (w, known[1]))
            for w in (weight, replace(weight, activations=None))
        ]
        given = x.to(t.device)
        wide = t.op("quantized_linear")(given, packed, torch.float32)
        assert wide.dtype == torch.float32
        for got in (t.op("quantized_linear")(given, packed), wide.to(dtype)):
            check = partial(compare, got, dtype=dtype)
            if not case.is_exact:
                ties = TIES / num_tokens**0.5 if case.activations is not None else 0.0
                check = partial(_by_norm, got, dtype, INEXACT[dtype] + ties)
            worst = max(worst, _nearest(wants, check))
    assert t.op("quantized_linear")(given[:0], packed).shape == (0, num_out)
    return worst


def quantized_experts(
    t: Target, dtype: torch.dtype, case: QuantizedCase, activation: str, has_bias: bool
) -> float:
    """Raises BackendError where the provider does not serve this form."""
    num_experts, top_k, hidden, inner = 6, 2, 128, 64
    weights = random_quantized_experts(case, num_experts, hidden, inner, activation, has_bias)

    def with_biases(device: str | torch.device, kind: torch.dtype) -> QuantizedExperts:
        biases = [
            None if b is None else b.to(dtype).to(device, kind)
            for b in (weights.gate_up_bias, weights.down_bias)
        ]
        parts = on_device(weights.gate_up, device), on_device(weights.down, device)
        return QuantizedExperts(*parts, activation, *biases)

    packed = t.op("pack_quantized_experts")(with_biases(t.device, dtype))
    known, worst = with_biases("cpu", torch.float64), 0.0
    for num_tokens in (1, 2, 40):
        x = randn(num_tokens, hidden + 8, dtype=dtype, seed=num_tokens)[:, :hidden]
        # Uneven: the last expert gets none, and of 40 tokens all have the same first one.
        scores = randn(num_tokens, num_experts, seed=num_tokens)
        scores[:, -1] = -9.0
        if num_tokens == 40:
            scores[:, 0] = 9.0
        values, ids = scores.softmax(-1).topk(top_k)
        given, chosen = x.to(t.device), ids.int().to(t.device)
        got = t.op("quantized_experts")(given, chosen, values.to(t.device), packed)
        wants = [
            ORACLE.quantized_experts(x.double(), ids, values.double(), experts)
            for experts in (known, _unrounded(known))
        ]
        same(given.cpu(), x, "x")
        check = partial(compare, got, dtype=dtype, scale=4)
        if case.activations is not None:
            # The inputs of `down` differ by their own rounding, so that some get another code.
            check = partial(_by_norm, got, dtype, ROUNDED[dtype])
        elif not case.is_exact:
            check = partial(_by_norm, got, dtype, INEXACT[dtype])
        worst = max(worst, _nearest(wants, check))
    nothing = torch.zeros(0, top_k, dtype=torch.int32, device=t.device)
    empty = t.op("quantized_experts")(given[:0], nothing, nothing.float(), packed)
    assert empty.shape == (0, hidden)
    return worst


def _by_norm(got: Tensor, dtype: torch.dtype, allowed: float, want: Tensor) -> float:
    assert got.dtype == dtype
    share = float((got.double().cpu() - want).norm() / (allowed * want.norm()))
    assert share < 1, f"off by {share:.3g} times what is allowed"
    return share


def _unrounded(experts: QuantizedExperts) -> QuantizedExperts:
    return replace(
        experts,
        gate_up=replace(experts.gate_up, activations=None),
        down=replace(experts.down, activations=None),
    )


def _nearest(wants: list[Tensor], check: Callable[[Tensor], float]) -> float:
    """The first of these with which a result agrees: few activations may stay unrounded."""
    said = []
    for want in wants:
        try:
            return check(want)
        except AssertionError as error:
            said.append(str(error))
    raise AssertionError(" and ".join(dict.fromkeys(said)))


def quantized_checks() -> Iterator[Check]:
    """Every form, in every type."""
    for case, dtype in product(CASES, TOLERANCE):
        name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
        for num_out, num_in in ((192, 256), (98, 320)):
            run = partial(quantized_linear, dtype=dtype, case=case, num_out=num_out, num_in=num_in)
            yield Check(("quantized_linear", "pack_quantized"), f"{num_out}x{num_in}-{name}", run)
        for activation, has_bias in (("silu", False), ("swiglu_clamped", True)):
            run_experts = partial(
                quantized_experts, dtype=dtype, case=case, activation=activation, has_bias=has_bias
            )
            ops = ("quantized_experts", "pack_quantized_experts")
            yield Check(ops, f"{activation}-{name}", run_experts)
