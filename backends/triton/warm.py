"""The attention kernels that a model can meet, as launches on tiny batches.

A kernel is compiled when it is first launched, which stalls a server for a second or two. Its
variants are few, because sizes that change from step to step are not compiled in: each is launched
once here, before the model serves.

Runs on: gpu, worker.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from ..api import (
    SHARED_TILE_ROWS,
    AttentionSpec,
    BatchMeta,
    DenseRows,
    LayerCache,
    MLASpec,
    SharedPrefixes,
)
from .attention import attend
from .decode import PLAN_ROWS
from .extend import DENSE_MIN_TOKENS, SHORT_QUERIES
from .mla import mla_attend
from .mla_dense import mla_attend_dense

CONTEXT = 256  # tokens; of every row, all in page 0


def attention_steps(
    specs: Iterable[AttentionSpec], dtype: torch.dtype, page_size: int, device: torch.device
) -> list[Callable[[], None]]:
    """What decode and extend steps launch, for layers of these kinds, each once."""

    def step(
        spec: AttentionSpec, num_rows: int, q_len: int, splits: int | None, is_shared: bool
    ) -> None:
        meta = tiny_batch(num_rows, q_len, page_size, device, is_shared)
        shape = (1, page_size, spec.num_kv_heads, spec.head_dim)
        k = torch.zeros(shape, dtype=spec.kv_dtype or dtype, device=device)
        q = torch.zeros(meta.num_tokens, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
        attend(q, meta, LayerCache(k, k), spec, splits=splits)

    steps: list[tuple[AttentionSpec, int, int, int | None, bool]] = []
    for spec in specs:
        for is_shared in (False, True) if spec.window is None else (False,):
            steps += [(spec, rows, 1, None, is_shared) for rows in (1, PLAN_ROWS[-1])]
        for q_len in (2, 2 * SHORT_QUERIES, DENSE_MIN_TOKENS):
            steps += [(spec, 1, q_len, splits, False) for splits in (1, 2)]
    return [partial(step, *arguments) for arguments in steps]


def mla_steps(
    specs: Iterable[MLASpec], dtype: torch.dtype, page_size: int, device: torch.device
) -> list[Callable[[], None]]:
    """The same for latent attention, absorbed and dense."""

    def absorbed(spec: MLASpec, num_rows: int, q_len: int, splits: int | None) -> None:
        meta = tiny_batch(num_rows, q_len, page_size, device, is_shared=False)
        width = spec.rank + spec.rope_dim
        pool = torch.zeros(1, page_size, 1, width, dtype=dtype, device=device)
        q = pool.new_zeros(meta.num_tokens, spec.num_heads, width)
        q_latent, q_rope = q.split([spec.rank, spec.rope_dim], dim=2)
        mla_attend(q_latent, q_rope, meta, LayerCache(pool, pool[..., :0]), spec, splits=splits)

    def dense(spec: MLASpec) -> None:
        meta = tiny_batch(1, CONTEXT, page_size, device, is_shared=False)
        rows = DenseRows(meta.qo_indptr, meta.qo_indptr, meta.slots)
        q = torch.zeros(
            CONTEXT, spec.num_heads, spec.nope_dim + spec.rope_dim, dtype=dtype, device=device
        )
        kv = q.new_zeros(CONTEXT, spec.num_heads, spec.nope_dim + spec.value_dim)
        keys = q.new_zeros(CONTEXT, spec.rank + spec.rope_dim)
        mla_attend_dense(q, kv, keys[:, spec.rank :], rows, spec)

    steps: list[Callable[[], None]] = []
    for spec in specs:
        steps += [partial(absorbed, spec, rows, 1, None) for rows in (1, PLAN_ROWS[-1])]
        steps += [partial(absorbed, spec, 1, 2, splits) for splits in (1, 2)]
        steps.append(partial(dense, spec))
    return steps


def tiny_batch(
    num_rows: int, q_len: int, page_size: int, device: torch.device, is_shared: bool
) -> BatchMeta:
    """Rows of q_len new tokens, all of request slot 0, of which nothing is shared."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    num_tokens = num_rows * q_len
    indptr = np.arange(0, num_tokens + 1, q_len, dtype=np.int32)
    nowhere = zeros(num_tokens).long()
    return BatchMeta(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_decode_rows=num_rows if q_len == 1 else 0,
        page_size=page_size,
        qo_indptr=torch.from_numpy(indptr).to(device),
        kv_lens=zeros(num_rows) + CONTEXT,
        slots=zeros(num_rows),
        block_table=zeros(1, -(-CONTEXT // page_size)),
        positions=nowhere,
        out_slots=nowhere,
        logit_tokens=nowhere,
        qo_indptr_cpu=indptr,
        kv_lens_cpu=np.full(num_rows, CONTEXT, np.int32),
        max_kv_len=CONTEXT,
        shared=SharedPrefixes(zeros(1, SHARED_TILE_ROWS), zeros(1), zeros(num_rows))
        if is_shared
        else None,
    )
