"""What vendors' attention kernels want instead of a block table, derived from a BatchMeta.

A row's context lies in pages block_table[slot, 0 .. ceil(kv_len / page_size)). Libraries ask for it
as a table with a line for each row, or as lists of pages or of tokens (slots of the KV pool), one
row after the other, with an indptr. All of it is computed on the device without waiting for it, so
a captured step derives it anew in each replay; `capacity` is then a bound that the lists keep to.
Padding rows, of length 0, have no entries.

Runs on: gpu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api import BatchMeta

ROW_TABLES = "row_tables"  # in BatchMeta.plans


def row_tables(meta: BatchMeta) -> Tensor:
    """int32 [rows, max_pages]: the block table's rows in the order of the batch.

    Made once a step, for all layers.
    """
    if ROW_TABLES not in meta.plans:
        meta.plans[ROW_TABLES] = meta.block_table.index_select(0, meta.slots)
    return meta.plans[ROW_TABLES]


def page_indptr(kv_lens: Tensor, page_size: int) -> Tensor:
    """int32 [rows + 1]: where each row's pages begin among all; page_size 1 gives tokens."""
    counts = (kv_lens + (page_size - 1)) // page_size
    indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    return indptr


def last_page_lens(kv_lens: Tensor, page_size: int) -> Tensor:
    """int32 [rows]: tokens in each row's last page, 1 to page_size; 0 for a padding row."""
    return torch.where(kv_lens > 0, (kv_lens - 1) % page_size + 1, 0)


def page_list(meta: BatchMeta, capacity: int) -> Tensor:
    """int32 [capacity]: the pages of all rows; 0 behind the last."""
    row, page, is_used = _places(meta, page_indptr(meta.kv_lens, meta.page_size), capacity)
    return torch.where(is_used, meta.block_table[meta.slots[row], page], 0)


def token_list(meta: BatchMeta, capacity: int) -> Tensor:
    """int32 [capacity]: the KV slots of all rows' tokens; 0 behind the last."""
    row, token, is_used = _places(meta, page_indptr(meta.kv_lens, 1), capacity)
    page = meta.block_table[meta.slots[row], token // meta.page_size]
    slot = torch.where(is_used, page, 0) * meta.page_size + token % meta.page_size
    return torch.where(is_used, slot, 0)


def num_tokens(meta: BatchMeta) -> int:
    """A capacity for `token_list`: the tokens of all contexts, as many as they may become."""
    if is_captured(meta):
        return meta.num_rows * meta.max_kv_len
    return int(meta.kv_lens_cpu.sum())


def max_q_len(meta: BatchMeta) -> int:
    """New tokens of a row, as many as there may be."""
    if meta.num_decode_rows == meta.num_rows:
        return 1
    if is_captured(meta):
        return meta.num_tokens - meta.num_decode_rows
    return int((meta.qo_indptr_cpu[1:] - meta.qo_indptr_cpu[:-1]).max())


def is_captured(meta: BatchMeta) -> bool:
    """Whether the host's lengths are of a captured step, whose replays have others."""
    return meta.max_kv_len > meta.kv_lens_cpu.max()


def _places(meta: BatchMeta, indptr: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each place in a list: its row, its number within the row, whether it is used."""
    at = torch.arange(capacity, dtype=torch.int32, device=indptr.device)
    row = torch.searchsorted(indptr[1:], at, right=True, out_int32=True)
    row = row.clamp(max=meta.num_rows - 1)
    is_used = at < indptr[-1]
    return row, torch.where(is_used, at - indptr[row], 0), is_used
