"""Cases of the contract's checks, for any device, and the oracle's answer to each.

A case is built in float64 on the CPU from a seed, then brought to a dtype and a device; the oracle
sees what the provider sees (inputs rounded to the dtype), computed in float64.

Runs on: gpu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..api import (
    AttentionSpec,
    BatchMeta,
    ExpertWeights,
    LayerCache,
    Rope,
    SamplingRows,
)
from ..reference import ReferenceOps

ORACLE = ReferenceOps()
# Absolute, for outputs of unit size.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class AttentionCase:
    """A batch of rows (q_len, kv_len) and what the layer does; kv_len 0 is a padding row."""

    name: str
    rows: Sequence[tuple[int, int]]
    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    tree: bool = False
    seed: int = 0


@dataclass
class AttentionInputs:
    """Tensors of a case. Pages that no row owns, and page tails, hold NaN."""

    q: Tensor  # [num_tokens, num_heads, head_dim], a strided view into qkv
    qkv: Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    meta: BatchMeta
    cache: LayerCache
    spec: AttentionSpec
    owned: Tensor = field(repr=False)  # bool [num_pages * page_size], slots that some row owns

    @property
    def real_tokens(self) -> Tensor:
        """Indices of the new tokens of rows that are not padding."""
        q_lens = np.diff(self.meta.qo_indptr_cpu)
        return torch.from_numpy(np.repeat(self.meta.kv_lens_cpu > 0, q_lens).nonzero()[0])


def lens(page_size: int) -> tuple[int, ...]:
    """Context lengths around the edges of pages."""
    p = page_size
    return tuple(sorted({1, max(p - 1, 1), p, p + 1, 3 * p + 5}))


def attention_cases() -> list[AttentionCase]:
    """Decode, prefill, extend and mixtures over shapes, page sizes and layer kinds."""
    cases = []
    for page in (1, 16):
        decode = [*((1, n) for n in lens(page)), (1, 0), (1, 0)]  # padded as for a graph
        prefill = [(n, n) for n in lens(page)]
        extend = [(7, 7 + n) for n in lens(page)]
        mixed = [*decode, (0, 0), *extend, *prefill]
        cases += [
            AttentionCase(f"decode-page{page}", decode, page),
            AttentionCase(f"prefill-page{page}", prefill, page),
            AttentionCase(f"extend-page{page}", extend, page),
            AttentionCase(f"mixed-page{page}", mixed, page),
            AttentionCase(f"window-page{page}", mixed, page, window=6),
            AttentionCase(f"everything-page{page}", mixed, page, 4, 2, 64, 9, 5.0, True),
        ]
    rows = [(1, 1), (1, 53), (1, 0), (5, 21), (37, 37)]
    for heads, kv_heads in ((1, 1), (8, 2), (7, 1), (16, 2), (9, 3)):
        cases.append(
            AttentionCase(f"heads{heads}-{kv_heads}", rows, 16, heads, kv_heads, seed=heads)
        )
    for dim in (80, 128, 256):
        cases.append(AttentionCase(f"dim{dim}", rows, 16, 4, 1, dim, seed=dim))
    cases += [
        AttentionCase("softcap", rows, softcap=3.0),
        AttentionCase("sinks", rows, has_sinks=True),
        AttentionCase("window1", rows, window=1),
        AttentionCase("gpt-oss", [(1, 300), (1, 129), (20, 300)], 16, 8, 1, 64, 128, None, True),
        AttentionCase("long", [(1, 1500), (1, 700), (130, 900)], 16, 9, 3),
        AttentionCase("long-window", [(1, 1500), (130, 900)], 16, 9, 3, window=100),
        AttentionCase("page64", [(1, 200), (70, 130)], 64, 8, 2, 128),
    ]
    return cases


def latent_cases() -> list[tuple[AttentionCase, int]]:
    """Latent attention: one KV head, whose head_dim is rank and rotary part; and the latter's."""
    rows = [(1, 1), (1, 53), (1, 0), (1, 700), (5, 21), (37, 37)]
    mixed = [*((1, n) for n in lens(16)), (1, 0), (0, 0), *((7, 7 + n) for n in lens(16))]
    return [
        (AttentionCase("page1", mixed, 1, 4, 1, 80), 16),
        (AttentionCase("page16", mixed, 16, 4, 1, 80), 16),
        (AttentionCase("heads20", rows, 16, 20, 1, 52), 12),
        (AttentionCase("heads128", rows[:5], 16, 128, 1, 48), 16),
        (AttentionCase("page64", [(1, 130), (3, 90)], 64, 16, 1, 576), 64),
        (AttentionCase("tree", [(6, 30), (9, 9), (4, 70)], 16, 8, 1, 80, tree=True), 16),
    ]


def tree_cases() -> list[AttentionCase]:
    """Verification of drafts: each new token sees the context and its ancestors."""
    return [AttentionCase("tree", [(6, 30), (9, 9), (4, 70)], tree=True, num_heads=8)]


def build_attention(
    case: AttentionCase, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> AttentionInputs:
    """The tensors of a case in a dtype, on a device."""
    gen = torch.Generator().manual_seed(case.seed)
    q_lens = np.array([q for q, _ in case.rows], dtype=np.int32)
    kv_lens = np.array([n for _, n in case.rows], dtype=np.int32)
    page, num_rows, num_tokens = case.page_size, len(case.rows), int(q_lens.sum())
    pages_of = [math.ceil(n / page) for n in kv_lens]
    num_pages = sum(pages_of) + 5
    order = torch.randperm(num_pages, generator=gen).int()
    num_slots = num_rows + 3
    slots = torch.randperm(num_slots, generator=gen)[:num_rows].int()
    # Entries that nobody may read point far outside the pool.
    block_table = torch.full((num_slots, max(pages_of) + 2), 2**30, dtype=torch.int32)
    owned = torch.zeros(num_pages * page, dtype=torch.bool)
    positions, out_slots, taken = [], [], 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        ids = order[taken : taken + pages_of[row]]
        taken += pages_of[row]
        block_table[slots[row], : pages_of[row]] = ids
        at = torch.arange(kv_len)
        of_row = ids[at // page].long() * page + at % page
        owned[of_row] = True
        if kv_len == 0:
            at, of_row = torch.zeros(q_len, dtype=torch.int64), torch.full((q_len,), -1)
        positions.append(at[len(at) - q_len :])
        out_slots.append(of_row[len(at) - q_len :])
    shape = (num_pages * page, case.num_kv_heads, case.head_dim)
    k, v = (torch.randn(shape, generator=gen, dtype=torch.float64) for _ in range(2))
    k[~owned], v[~owned] = math.nan, math.nan
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = torch.randn(num_tokens, width, generator=gen, dtype=torch.float64)
    tree_mask = _trees(case, gen) if case.tree else None
    sinks = torch.randn(case.num_heads, generator=gen) if case.has_sinks else None
    qo_indptr = np.concatenate(([0], q_lens.cumsum())).astype(np.int32)
    # A wider buffer than needed, so that rows of qkv are strided.
    qkv = torch.cat((qkv, torch.full((num_tokens, 32), math.nan, dtype=torch.float64)), 1)
    qkv = qkv.to(device, dtype)[:, :width]
    cache = LayerCache(*(x.view(num_pages, page, *shape[1:]).to(device, dtype) for x in (k, v)))
    meta = BatchMeta(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_decode_rows=next((i for i, q in enumerate(q_lens) if q != 1), num_rows),
        page_size=page,
        qo_indptr=torch.from_numpy(qo_indptr).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        slots=slots.to(device),
        block_table=block_table.to(device),
        positions=torch.cat(positions).to(device),
        out_slots=torch.cat(out_slots).to(device),
        logit_tokens=torch.arange(num_tokens, device=device),
        qo_indptr_cpu=qo_indptr,
        kv_lens_cpu=kv_lens,
        max_kv_len=int(kv_lens.max()),
        tree_mask=None if tree_mask is None else tree_mask.to(device),
    )
    spec = AttentionSpec(
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.head_dim**-0.5,
        case.window,
        case.softcap,
        None if sinks is None else sinks.to(device),
    )
    q = qkv.unflatten(1, (-1, case.head_dim))[:, : case.num_heads]
    return AttentionInputs(q, qkv, meta, cache, spec, owned)


def _trees(case: AttentionCase, gen: torch.Generator) -> Tensor:
    masks = []
    for q_len, kv_len in case.rows:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        tree = torch.eye(q_len, dtype=torch.bool)
        for node in range(1, q_len):
            parent = int(torch.randint(node, (1,), generator=gen))
            tree[node] |= tree[parent]
        mask[:, kv_len - q_len :] = tree
        masks.append(mask.flatten())
    return torch.cat(masks)


def oracle_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers in float64 on the CPU, all copied."""

    def up(x):
        if not isinstance(x, Tensor):
            return x
        return x.detach().cpu().clone().to(torch.float64 if x.is_floating_point() else x.dtype)

    meta = replace(
        inputs.meta, **{f.name: up(getattr(inputs.meta, f.name)) for f in fields(inputs.meta)}
    )
    spec = replace(inputs.spec, sinks=up(inputs.spec.sinks))
    cache = LayerCache(up(inputs.cache.k), up(inputs.cache.v))
    return AttentionInputs(up(inputs.q), up(inputs.qkv), meta, cache, spec, inputs.owned)


def make_rope(rotary_dim: int, interleaved: bool = False) -> Rope:
    """The plain rotary table of base 10,000, of 2,048 positions."""
    angles = torch.arange(2048)[:, None] * 10000.0 ** (
        -torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    )
    return Rope(torch.cat((angles.cos(), angles.sin()), 1).float(), rotary_dim, interleaved)


def sampling_rows(
    params: Sequence[tuple[float, int, float, float]], vocab: int, device="cpu", seed: int = 0
) -> SamplingRows:
    """Rows of (temperature, top_k, top_p, min_p); top_k 0 keeps all."""
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*params, strict=True))
    top_k = [k or vocab for k in top_k]
    n = len(params)
    gen = torch.Generator().manual_seed(seed)
    return SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
        seeds=torch.randint(-(2**62), 2**62, (n,), generator=gen).to(device),
        positions=torch.randint(0, 4096, (n,), generator=gen).int().to(device),
        all_greedy=all(t == 0 for t in temperature),
        has_top_k=any(k < vocab for k in top_k),
        has_top_p=any(p < 1 for p in top_p),
        has_min_p=any(p > 0 for p in min_p),
    )


def moved(weights: ExpertWeights, device, dtype: torch.dtype) -> ExpertWeights:
    """The same weights on a device, rounded."""
    of = {f.name: getattr(weights, f.name) for f in fields(weights)}
    tensors: dict[str, Any] = {
        n: x.to(device, dtype) for n, x in of.items() if isinstance(x, Tensor)
    }
    return replace(weights, **tensors)


def random_experts(
    num_experts: int, hidden: int, inner: int, activation: str, has_bias: bool
) -> ExpertWeights:
    """Float64 weights that keep unit variance."""
    gen = torch.Generator().manual_seed(num_experts)

    def randn(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    return ExpertWeights(
        gate_up=randn(num_experts, 2 * inner, hidden) / hidden**0.5,
        down=randn(num_experts, hidden, inner) / inner**0.5,
        activation=activation,
        gate_up_bias=randn(num_experts, 2 * inner) * 3 if has_bias else None,
        down_bias=randn(num_experts, hidden) if has_bias else None,
    )
