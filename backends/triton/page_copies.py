"""Copies of KV pages between the pools of all layers and page records, one after the other.

A record holds a page over all layers. It may be in device memory, or in host memory that is
registered with the device, which a kernel reads over the bus.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

WORD_BYTES = 8
BLOCK_WORDS = 2048
# Enough to fill the bus, few enough to leave the device to the step that runs beside it.
HOST_PROGRAMS = 48
DEVICE_PROGRAMS = 1024


# One binary each way: the first copy of an odd size is not to wait for a compiler.
@triton.jit(
    do_not_specialize=["records", "record_bytes", "num_pages", "num_items", "pieces"],
    do_not_specialize_on_alignment=["parts", "pages", "rows"],
)
def _copy_pages(
    parts,  # int64 [num_parts, 3]: address of a pool, bytes a page, offset in a record
    pages,
    rows,
    records,
    record_bytes,
    num_pages,
    num_items,
    pieces,
    TO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        piece = item % pieces
        i = item // pieces % num_pages
        part = parts + item // pieces // num_pages * 3
        page_bytes = tl.load(part + 1)
        pool = tl.load(part) + tl.load(pages + i).to(tl.int64) * page_bytes
        record = records + tl.load(rows + i).to(tl.int64) * record_bytes + tl.load(part + 2)
        pool = tl.multiple_of(pool, 16).to(tl.pointer_type(tl.int64))
        record = tl.multiple_of(record, 16).to(tl.pointer_type(tl.int64))
        words = piece * BLOCK + tl.arange(0, BLOCK)
        mask = words < page_bytes // 8
        if TO_POOL:
            tl.store(pool + words, tl.load(record + words, mask=mask), mask=mask)
        else:
            tl.store(record + words, tl.load(pool + words, mask=mask), mask=mask)


def copy_pages(
    parts: Tensor,
    max_page_bytes: int,
    pages: Tensor,
    records: int,
    record_bytes: int,
    rows: Tensor,
    *,
    to_pool: bool,
    is_host: bool,
) -> None:
    """See `Ops.copy_pages`; on the current stream."""
    pieces = triton.cdiv(max_page_bytes, BLOCK_WORDS * WORD_BYTES)
    num_items = parts.shape[0] * pages.shape[0] * pieces
    programs = min(num_items, HOST_PROGRAMS if is_host else DEVICE_PROGRAMS)
    _copy_pages[(programs,)](
        parts,
        pages,
        rows,
        records,
        record_bytes,
        pages.shape[0],
        num_items,
        pieces,
        TO_POOL=to_pool,
        BLOCK=BLOCK_WORDS,
        num_warps=8,
    )
