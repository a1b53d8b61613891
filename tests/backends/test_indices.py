"""Lists of pages and tokens against loops; and that a bound on their length changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stoker.backends import indices
from stoker.backends.contract.cases import AttentionCase, build_attention

ROWS = [(1, 1), (1, 16), (1, 0), (1, 17), (0, 0), (5, 53), (4, 4)]


@pytest.fixture(params=[1, 16], ids="page{}".format)
def meta(request):
    return build_attention(AttentionCase("", ROWS, request.param), torch.float32).meta


def expected(meta):
    pages, tokens = [], []
    for slot, kv_len in zip(meta.slots.tolist(), meta.kv_lens.tolist(), strict=True):
        table = meta.block_table[slot].tolist()
        pages += table[: -(-kv_len // meta.page_size)]
        tokens += [table[t // meta.page_size] * meta.page_size + t % meta.page_size
                   for t in range(kv_len)]  # fmt: skip
    return pages, tokens


def test_lists(meta):
    pages, tokens = expected(meta)
    assert indices.page_list(meta, len(pages)).tolist() == pages
    assert indices.token_list(meta, indices.num_tokens(meta)).tolist() == tokens
    for make, known in ((indices.page_list, pages), (indices.token_list, tokens)):
        padded = make(meta, len(known) + 40)
        assert padded.dtype == torch.int32
        assert padded.tolist() == known + [0] * 40


def test_indptr_and_last_pages(meta):
    lens, page = meta.kv_lens_cpu, meta.page_size
    counts = [-(-n // page) for n in lens]
    indptr = indices.page_indptr(meta.kv_lens, page)
    assert indptr.dtype == torch.int32 and indptr.tolist() == [0, *np.cumsum(counts)]
    last = indices.last_page_lens(meta.kv_lens, page)
    assert last.dtype == torch.int32
    filled = (indptr.diff() - 1).clamp(min=0) * page + last
    assert filled.tolist() == lens.tolist()
    assert last.max() <= page


def test_tables_are_in_the_order_of_the_batch(meta):
    tables = indices.row_tables(meta)
    for row, slot in enumerate(meta.slots.tolist()):
        assert torch.equal(tables[row], meta.block_table[slot])


def test_bounds_of_a_captured_step(meta):
    assert indices.max_q_len(meta) == 5 and not indices.is_captured(meta)
    captured = replace(meta, max_kv_len=1000)
    assert indices.max_q_len(captured) == meta.num_tokens - meta.num_decode_rows
    assert indices.num_tokens(captured) == 1000 * len(ROWS)
    decode = build_attention(AttentionCase("", ROWS[:4], 16), torch.float32).meta
    assert indices.max_q_len(replace(decode, max_kv_len=1000)) == 1
