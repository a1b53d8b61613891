"""Pairs of a token and one of its experts, sorted by expert, and tiles of pairs of one expert.

Grids depend on sizes alone: nothing waits for the host, and all of it can be captured.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS = (256, 2048)  # pairs that are counted at once; more of them take a kernel of their own
MATCH_ELEMENTS = 8192  # of a block of (pairs x experts) that are compared


@triton.jit(do_not_specialize=["num_pairs"])
def _count(ids_ptr, counts_ptr, num_pairs, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs of a chunk each expert has: counts [num_chunks, BLOCK_E]."""
    chunk = tl.program_id(0)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    live = p < num_pairs
    count = tl.histogram(tl.load(ids_ptr + p, mask=live, other=0), BLOCK_E, mask=live)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), count)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_tiles", "tile_rows"])
def _place(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_chunks,
    num_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Put BLOCK_P pairs where they belong in order of their experts, and describe some tiles.

    Every program counts anew what comes before its own pairs: that is less than waiting would be.

    tiles [3, num_tiles]: a tile's expert (NUM_EXPERTS or more for an unused one), its first place
    in the order, and the place after its expert's last.
    """
    first = tl.program_id(0) * BLOCK_P
    chunk = first // CHUNK
    e = tl.arange(0, BLOCK_E)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=0)
    before = tl.histogram(ids, BLOCK_E, mask=p < first)
    if SINGLE:
        total = tl.histogram(ids, BLOCK_E, mask=p < num_pairs)
    else:
        total = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            counts_ptrs = counts_ptr + c[:, None] * BLOCK_E + e[None, :]
            counts = tl.load(counts_ptrs, mask=(c < num_chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), 0)
    end = tl.cumsum(total, 0)
    begin = end - total

    num_own_tiles = (total + tile_rows - 1) // tile_rows
    tile_end = tl.cumsum(num_own_tiles, 0)
    origin = begin - (tile_end - num_own_tiles) * tile_rows  # plus tile * tile_rows: its place
    step = tl.num_programs(0) * BLOCK_T
    for start in range(tl.program_id(0) * BLOCK_T, num_tiles, step):
        t = start + tl.arange(0, BLOCK_T)
        expert = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
        is_own = e[None, :] == expert[:, None]
        place = tl.sum(tl.where(is_own, origin[None, :], 0), 1) + t * tile_rows
        live = t < num_tiles
        tl.store(tiles_ptr + t, expert, mask=live)
        tl.store(tiles_ptr + num_tiles + t, place, mask=live)
        of_end = tl.sum(tl.where(is_own, end[None, :], 0), 1)
        tl.store(tiles_ptr + 2 * num_tiles + t, of_end, mask=live)

    i = tl.arange(0, BLOCK_P)
    live = first + i < num_pairs
    own = tl.load(ids_ptr + first + i, mask=live, other=-1)
    rank = tl.sum(((own[:, None] == own[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    is_own = own[:, None] == e[None, :]
    place = tl.sum(tl.where(is_own, (begin + before)[None, :], 0), 1) + rank
    tl.store(order_ptr + place, first + i, mask=live)


def sort_pairs(ids: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in order of their experts, those of one expert in their own order, and tiles of them.

    Args:
        ids: int32 [num_tokens, top_k].

    Returns:
        order int32 [num_pairs] and tiles int32 [3, num_tiles], see `_place`; as many tiles as the
        worst distribution of the pairs needs.
    """
    num_pairs = ids.numel()
    num_tiles = (num_pairs + min(num_pairs, num_experts) * (tile_rows - 1)) // tile_rows
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=ids.device)
    block_e = triton.next_power_of_2(num_experts)
    chunk = next((n for n in CHUNKS if n >= num_pairs), CHUNKS[-1])
    is_single = num_pairs <= chunk
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = order
    if not is_single:
        counts = torch.empty(num_chunks, block_e, dtype=torch.int32, device=ids.device)
        _count[(num_chunks,)](ids, counts, num_pairs, BLOCK_E=block_e, CHUNK=chunk, num_warps=4)
    block_p = max(16, min(64, MATCH_ELEMENTS // block_e))
    _place[(triton.cdiv(num_pairs, block_p),)](
        ids,
        counts,
        order,
        tiles,
        num_pairs,
        num_chunks,
        num_tiles,
        tile_rows,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        BLOCK_P=block_p,
        BLOCK_C=16,
        BLOCK_T=min(32, block_p),
        CHUNK=chunk,
        SINGLE=is_single,
        num_warps=4,
    )
    return order, tiles
