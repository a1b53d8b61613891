"""CUDA graphs of one function at several sizes.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Graphs(Generic[T]):
    """Captures `fn(size)` for a list of sizes, in one memory pool, and replays it.

    fn must read its inputs from buffers that stay where they are, launch the same kernels each
    time and never wait for the device. What it returns (tensors in the pool) is overwritten by
    the next replay of any size.
    """

    def __init__(self, fn: Callable[[int], T], device: torch.device):
        self._fn = fn
        self._device = device
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._sizes: list[int] = []

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture each size, the largest first, so that the smaller ones fit in its memory.

        fn runs once for each size before the capture: kernels compile and libraries make their
        handles and workspaces there, on the stream that captures.
        """
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for size in sorted(set(sizes), reverse=True):
                self._fn(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    out = self._fn(size)
                self._captured[size] = graph, out
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._sizes = sorted(self._captured)

    def size_for(self, count: int) -> int | None:
        """The smallest captured size that holds count, or None."""
        return next((size for size in self._sizes if size >= count), None)

    def replay(self, size: int) -> T:
        """Launch a captured size; its outputs hold the results once the device gets there."""
        graph, out = self._captured[size]
        graph.replay()
        return out
