"""Memory for weights: large regions of 2 MiB pages, which a processor reads up to twice as fast.

Runs on: gpu.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
REGION_BYTES = 64 << 20
ALIGN = 64


class Arena:
    """Hands out pieces of regions. A region is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to cache lines."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._region.numel():
            self._region = _map_region(max(num_bytes, REGION_BYTES))
            self._used = 0
        piece = self._region[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGN) * ALIGN
        return piece.view(dtype).view(tuple(shape))


def _map_region(num_bytes: int) -> Tensor:
    """Untouched memory takes nothing, so a region that stays half empty costs nothing."""
    # Private: the default, shared memory, gets no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(buffer, dtype=torch.uint8)
    start = -region.data_ptr() % HUGE_PAGE
    return region[start : start + num_bytes]
