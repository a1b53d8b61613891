"""Random quantized weights of every form that checkpoints have, and what they stand for."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from stoker.backends.api import QuantizedExperts, QuantizedWeight
from stoker.backends.quantized import E2M1, pack_nibbles


@dataclass(frozen=True)
class QuantizedCase:
    """A form of QuantizedWeight; block sizes of 0 are the whole weight's."""

    name: str
    kind: str
    block: tuple[int, int]
    activations: str | None = None
    has_input_scale: bool = False
    has_offsets: bool = False
    has_order: bool = False


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
            scales /= 4.6
        case "mxfp4":  # its scales are powers of two
            codes = pack_nibbles(torch.randint(16, shape, generator=gen))
            scales = scales.log2().round().exp2() / torch.tensor(E2M1).std()
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
    )


def on_device(weight: QuantizedWeight, device) -> QuantizedWeight:
    """The same weight there, in tensors of its own."""
    of = {f.name: getattr(weight, f.name) for f in fields(weight)}
    moved = {k: x.to(device, copy=True) for k, x in of.items() if isinstance(x, Tensor)}
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
