"""Tiles of the rows that have several new tokens, in grids that depend on sizes alone.

Rows are those of a batch after its decode rows, from first_row on. Row r's tiles of so many tokens
begin at number (qo_indptr[r] - qo_indptr[first_row]) // tokens + r - first_row: increasing in r and
never short of room, at the price of one idle tile a row at most.

Runs on: gpu.
"""

import triton
import triton.language as tl


def num_tiles(num_tokens: int, num_rows: int, tokens: int) -> int:
    """How many tiles num_rows rows may have, with num_tokens new tokens together."""
    return num_tokens // tokens + num_rows


@triton.jit
def find_tile(qo_indptr_ptr, first_row, num_rows, tile, TOKENS: tl.constexpr):
    """A tile's row, where that begins, its length, and the tile's first token in it.

    num_rows counts the rows before first_row too. The token of an idle tile is not below the
    length.
    """
    origin = tl.load(qo_indptr_ptr + first_row)
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(qo_indptr_ptr + middle) - origin) // TOKENS + middle - first_row
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    begin = tl.load(qo_indptr_ptr + low)
    q_len = tl.load(qo_indptr_ptr + low + 1) - begin
    return low, begin, q_len, (tile - (begin - origin) // TOKENS - (low - first_row)) * TOKENS
