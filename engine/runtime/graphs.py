"""Steps as captured graphs: one launch instead of hundreds.

Decode steps are captured for a few batch sizes, for fewer once more with shared prefixes, short
prefill steps for a few token counts; a smaller step is padded. Inputs lie at fixed addresses (see
inputs.py), so a replay needs nothing but the staged copy before it.

Runs on: gpu.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ...backends.api import BatchMeta, DeviceRuntime
from ..core.plan import StepPlan
from .inputs import GraphShape, Inputs, saves_by_sharing
from .sampler import SlotTable

Forward = Callable[[Tensor, BatchMeta], Tensor]  # tokens and batch to logits [logit rows, vocab]

# Short steps are bound by the host's launches. Longer ones keep the device busy by themselves.
SHORT_ROWS = 8
SHARED_SIZES = (8, 16, 32, 64, 128, 256, 512)  # rows
SHORT_TOKENS = (32, 64, 128, 192, 256, 384, 512)


def batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 beyond, and the largest."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 1, 64)}
    return sorted({s for s in sizes if s < max_rows} | {max_rows})


class StepGraphs:
    """The captured steps of one model.

    Args:
        forward: the whole step from tokens to logits; it must do the same work each time.
        max_rows: largest decode batch to capture.
        max_tokens: largest short prefill step to capture.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        inputs: Inputs,
        table: SlotTable,
        forward: Forward,
        max_rows: int,
        max_tokens: int,
    ):
        self._sizes = batch_sizes(max_rows)
        self._shared_sizes = sorted({min(n, max_rows) for n in SHARED_SIZES})
        self._tokens = [n for n in SHORT_TOKENS if n <= max_tokens]
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._logits: dict[GraphShape, Tensor] = {}
        shapes = [GraphShape(size, size) for size in self._sizes]
        shapes += [GraphShape(size, size, is_shared=True) for size in self._shared_sizes]
        shapes += [GraphShape(SHORT_ROWS, n) for n in self._tokens]
        # The largest first: the others fit in its memory.
        for shape in sorted(shapes, key=lambda s: -s.tokens):
            step = inputs.stage(chunk_plan(1, inputs.page_size), table, shape)
            meta = step.meta
            # What a captured kernel must be able to do.
            meta.max_kv_len, meta.max_q_len = inputs.max_context, shape.tokens - shape.rows + 1

            def run(
                shape: GraphShape = shape, tokens: Tensor = step.tokens, meta: BatchMeta = meta
            ) -> None:
                meta.plans.clear()  # so that what providers derive is derived in each replay
                inputs.fill_last_tokens(tokens)
                self._logits[shape] = forward(tokens, meta)

            self._replays[shape] = runtime.capture(run)

    def shape_for(self, plan: StepPlan) -> GraphShape | None:
        """The graph that a plan fits; None where it fits none."""
        rows, tokens = plan.num_rows, plan.num_tokens
        if plan.score_tokens:
            return None
        if plan.num_decode_rows == rows and plan.samples.all():
            is_shared = saves_by_sharing(plan)
            sizes = self._shared_sizes if is_shared else self._sizes
            at = bisect_left(sizes, rows)
            return GraphShape(sizes[at], sizes[at], is_shared) if at < len(sizes) else None
        at = bisect_left(self._tokens, tokens)
        if rows > SHORT_ROWS or at == len(self._tokens):
            return None
        return GraphShape(SHORT_ROWS, self._tokens[at])

    def replay(self, shape: GraphShape) -> Tensor:
        """Run a captured step; its logits [shape.rows, vocab] stay until the next replay."""
        self._replays[shape]()
        return self._logits[shape]


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
