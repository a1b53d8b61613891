"""Cases of the gated delta net's checks.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..api import BatchMeta, DeltaNetSpec, LayerState


@dataclass(frozen=True)
class DeltaNetCase:
    """A batch of rows (q_len, kv_len), and a layer's sizes; kv_len 0 is a padding row."""

    name: str
    rows: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (1, 2)  # of keys, of values
    dims: tuple[int, int] = (16, 32)  # of a key, of a value
    interleaved: bool = False


@dataclass
class DeltaNetInputs:
    """Tensors of a case, as `Ops.delta_net` takes them."""

    qkvz: Tensor
    ba: Tensor
    meta: BatchMeta
    state: LayerState
    spec: DeltaNetSpec

    @property
    def real_tokens(self) -> Tensor:
        """Indices of the new tokens of rows that are not padding."""
        q_lens = np.diff(self.meta.qo_indptr_cpu)
        return torch.from_numpy(np.repeat(self.meta.kv_lens_cpu > 0, q_lens).nonzero()[0])


DECODE = [(1, 1), (1, 5), (1, 0), (1, 9)]
CHUNKS = [(2, 2), (3, 50), (64, 64), (65, 100), (0, 0), (130, 131)]
CASES = [
    DeltaNetCase("decode", DECODE),
    DeltaNetCase("decode-interleaved", DECODE, (2, 4), (32, 16), True),
    DeltaNetCase("chunks", CHUNKS),
    DeltaNetCase("mixed-interleaved", [*DECODE, *CHUNKS[1:4]], (2, 2), (24, 40), True),
    DeltaNetCase("one-token-chunks", [(0, 0), (1, 1), (1, 70), (5, 9)], (1, 3)),
]


def build_delta_net(
    case: DeltaNetCase, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> DeltaNetInputs:
    """The tensors of a case in a dtype, on a device.

    Inputs are views of wider tensors, the last tokens belong to no row, and states of rows that
    begin hold large numbers. The norm's eps is so large that it does not blow up what was rounded.
    """
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    q_lens, kv_lens = (np.array(column, np.int32) for column in zip(*case.rows, strict=True))
    num_rows, num_tokens = len(q_lens), int(q_lens.sum()) + 5
    (key_heads, value_heads), (key_dim, value_dim) = case.heads, case.dims
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    width = channels + value_heads * value_dim
    num_slots = num_rows + 3
    slots = (torch.randperm(num_slots - 1, generator=gen)[:num_rows] + 1).int()
    slots[torch.from_numpy(kv_lens == 0)] = 0
    qo_indptr = np.concatenate(([0], q_lens.cumsum())).astype(np.int32)
    conv, recurrent = randn(num_slots, channels, 3), randn(num_slots, *_state(case))
    begins = slots[torch.from_numpy(q_lens == kv_lens)].long()
    conv[begins], recurrent[begins] = 1e4, 1e4
    empty = torch.empty(0, device=device)
    meta = BatchMeta(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_decode_rows=next((i for i, q in enumerate(q_lens) if q != 1), num_rows),
        page_size=1,
        qo_indptr=torch.from_numpy(qo_indptr).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        slots=slots.to(device),
        block_table=empty,
        positions=empty,
        out_slots=empty,
        logit_tokens=empty,
        qo_indptr_cpu=qo_indptr,
        kv_lens_cpu=kv_lens,
        max_kv_len=int(kv_lens.max()),
    )
    spec = DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=(randn(channels, 4) / 2).to(device, dtype),
        decay=(-2 * randn(value_heads).abs()).to(device, torch.float32),
        dt_bias=randn(value_heads).to(device, torch.float32),
        norm=(randn(value_dim) / 4 + 1).to(device, dtype),
        eps=1e-2,
        interleaved=case.interleaved,
    )
    state = LayerState(conv.to(device, dtype), recurrent.to(device, torch.float32))
    qkvz, ba = (randn(num_tokens, n + 8).to(device, dtype) for n in (width, 2 * value_heads))
    return DeltaNetInputs(qkvz[:, :width], ba[:, : 2 * value_heads], meta, state, spec)


def _state(case: DeltaNetCase) -> tuple[int, int, int]:
    return (case.heads[1], *case.dims)


def in_float64(inputs: DeltaNetInputs) -> DeltaNetInputs:
    """The same numbers in float64, all copied, on the same device."""

    def up(x: Tensor) -> Tensor:
        return x.to(torch.float64, copy=True)

    spec = inputs.spec
    names = ("conv", "decay", "dt_bias", "norm")
    tensors: dict[str, Any] = {name: up(getattr(spec, name)) for name in names}
    state = LayerState(up(inputs.state.conv), up(inputs.state.recurrent))
    return DeltaNetInputs(
        up(inputs.qkvz), up(inputs.ba), inputs.meta, state, replace(spec, **tensors)
    )
