"""Copies of pages: run by `test_triton_interpreted.py` with the interpreter, or on a GPU."""

import pytest
import torch
from targets import targets

SIZES = (4096, 65536, 48)  # bytes a page of three pools: less than a block, several, very few
OFFSETS = (128, 128 + 4096, 128 + 4096 + 65536)
RECORD_BYTES = 256 * 280


@pytest.mark.parametrize("to_pool", [False, True], ids=["save", "load"])
@pytest.mark.parametrize("target", targets())
def test_pages_go_to_records_and_back(target, to_pool):
    copy_pages, device = target.require("copy_pages"), target.device
    pools = [torch.randint(0, 256, (9, n), dtype=torch.uint8, device=device) for n in SIZES]
    records = torch.randint(0, 256, (7, RECORD_BYTES), dtype=torch.uint8, device=device)
    pages = torch.tensor([8, 0, 3], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 6, 2], dtype=torch.int32, device=device)
    expected_pools, expected_records = [pool.clone() for pool in pools], records.clone()
    for pool, expected, offset in zip(pools, expected_pools, OFFSETS, strict=True):
        span = slice(offset, offset + pool.shape[1])
        if to_pool:
            expected[pages.long()] = records[rows.long(), span]
        else:
            expected_records[rows.long(), span] = pool[pages.long()]
    table = [[p.data_ptr(), p.shape[1], o] for p, o in zip(pools, OFFSETS, strict=True)]
    parts = torch.tensor(table, dtype=torch.int64, device=device)
    address = records.data_ptr()
    copy_pages(
        parts, max(SIZES), pages, address, RECORD_BYTES, rows, to_pool=to_pool, is_host=False
    )
    assert torch.equal(records, expected_records)
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool, expected)
