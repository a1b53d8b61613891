"""The block table's rows as one list of pages, as other libraries' attention wants it.

Runs on: gpu.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..api import BatchMeta

BLOCK = 256


@triton.jit(do_not_specialize=["first_row", "stride_table"])
def _gather_pages(
    slots_ptr,
    kv_lens_ptr,
    indptr_ptr,
    table_ptr,
    out_ptr,
    first_row,
    stride_table,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + first_row + row).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + first_row + row)
    num_pages = tl.maximum((kv_len + PAGE_SIZE - 1) // PAGE_SIZE, 1)
    begin = tl.load(indptr_ptr + row)
    for start in range(0, num_pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < num_pages
        page = tl.load(table_ptr + slot * stride_table + i, mask=live, other=0)
        # A padding row, which has no context, gets some page that exists.
        tl.store(out_ptr + begin + i, tl.where(kv_len > 0, page, 0), mask=live)


def gather_pages(meta: BatchMeta, first_row: int, indptr: Tensor, out: Tensor) -> None:
    """Write the pages of the rows from first_row on, one row after the other.

    Args:
        indptr: int32 [rows + 1] where each row's pages begin; at least one page a row.
        out: int32, at least indptr[-1].
    """
    _gather_pages[(indptr.shape[0] - 1,)](
        meta.slots,
        meta.kv_lens,
        indptr,
        meta.block_table,
        out,
        first_row,
        meta.block_table.stride(0),
        PAGE_SIZE=meta.page_size,
        BLOCK=BLOCK,
        num_warps=2,
    )
