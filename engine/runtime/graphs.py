"""Decode steps as captured graphs: one launch instead of hundreds.

A graph is captured for each of a few batch sizes; a smaller batch is padded with rows of slot 0,
which have no context and write nowhere. Inputs lie at fixed addresses (see inputs.py), so a replay
needs nothing but the staged copy before it.

Runs on: gpu.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from ...backends.api import BatchMeta, DeviceRuntime
from ..core.plan import StepPlan
from .inputs import Inputs
from .sampler import SlotTable

Forward = Callable[[Tensor, BatchMeta], Tensor]  # tokens and batch to logits [rows, vocab]


def batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 beyond, and the largest."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 1, 64)}
    return sorted({s for s in sizes if s < max_rows} | {max_rows})


class DecodeGraphs:
    """The captured decode steps of one model.

    Args:
        forward: the whole step from tokens to logits; it must do the same work each time.
        max_rows: largest batch to capture.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        inputs: Inputs,
        table: SlotTable,
        forward: Forward,
        max_rows: int,
    ):
        self._sizes = np.array(batch_sizes(max_rows))
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: dict[int, Tensor] = {}
        for size in reversed(self._sizes.tolist()):  # the largest first: the others fit its memory
            step = inputs.stage(chunk_plan(1, inputs.page_size), table, graph_rows=size)
            meta = step.meta
            meta.max_kv_len = inputs.max_context  # what a captured kernel must be able to read

            def run(size: int = size, tokens: Tensor = step.tokens, meta: BatchMeta = meta) -> None:
                meta.plans.clear()  # so that what providers derive is derived in each replay
                inputs.fill_last_tokens(tokens, meta)
                self._logits[size] = forward(tokens, meta)

            self._replays[size] = runtime.capture(run)

    def size_for(self, plan: StepPlan) -> int | None:
        """The graph that a plan fits, by its size; None where it fits none."""
        rows = plan.num_rows
        if plan.num_decode_rows < rows or rows > self._sizes[-1] or plan.score_tokens:
            return None
        return int(self._sizes[np.searchsorted(self._sizes, rows)])

    def replay(self, size: int) -> Tensor:
        """Run a captured step; its logits [size, vocab] stay valid until the next replay."""
        self._replays[size]()
        return self._logits[size]


def chunk_plan(num_tokens: int, page_size: int) -> StepPlan:
    """One row of slot 0 with this many tokens, in the pages 0, 1, ... of an unused pool."""
    one = np.ones(1, np.int32)
    pages = np.arange(-(-num_tokens // page_size), dtype=np.int32)
    return StepPlan(
        step=0,
        slots=np.zeros(1, np.int32),
        q_lens=one * num_tokens,
        kv_lens=one * num_tokens,
        num_decode_rows=int(num_tokens == 1),
        tokens=np.zeros(num_tokens, np.int32),
        samples=np.ones(1, bool),
        prompt_logprobs=-one,
        page_slots=np.zeros_like(pages),
        page_indices=pages,
        page_ids=pages,
    )
