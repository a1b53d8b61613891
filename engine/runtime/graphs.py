"""Steps as captured graphs: one launch instead of hundreds.

Decode steps are captured for a few batch sizes, for fewer once more with shared prefixes; steps
with chunks of prompts for a few token counts, alone and beside a few batch sizes (these with
shared prefixes, for there a pass over none is not felt). A smaller step is padded.
Inputs lie at fixed addresses (see inputs.py), so a replay needs nothing but the staged copy
before it.

Runs on: gpu.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from ...backends.api import BatchMeta, DeviceRuntime
from ..core.plan import StepPlan
from .inputs import GraphShape, Inputs, StepInputs, saves_by_sharing
from .sampler import SlotTable

Outputs = TypeVar("Outputs")

SHARED_SIZES = (8, 16, 32, 64, 128, 256, 512)  # rows

# Launching a step of chunks kernel by kernel takes the host some 25 ms, as long as the device
# needs for a thousand tokens. Longer steps hide it.
FEW_ROWS, FEW_TOKENS = 8, (32, 64, 128, 192, 256, 384, 512)
CHUNK_ROWS = 64
CHUNK_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
BESIDE_ROWS = (64, 256)  # decode rows beside chunks
FEW_CONTEXT = 2048  # a captured kernel splits its keys for the longest context that it may see


def batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8 to 32 by 8, to 64 by 16, to 256 by 32, beyond by 128, and the largest."""
    sizes = {1, 2, 4, *range(8, 33, 8), 48, 64, *range(96, 257, 32), *range(384, max_rows + 1, 128)}
    return sorted({s for s in sizes if s < max_rows} | {max_rows})


class StepGraphs(Generic[Outputs]):
    """The captured steps of one model.

    Args:
        run: the whole step, from staged inputs to its outputs; it must do the same work each time.
        max_rows: largest decode batch to capture.
        max_tokens: largest short prefill step to capture.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        inputs: Inputs,
        table: SlotTable,
        run: Callable[[StepInputs], Outputs],
        max_rows: int,
        max_tokens: int,
    ):
        self._sizes = batch_sizes(max_rows)
        self._shared_sizes = sorted({min(n, max_rows) for n in SHARED_SIZES})
        beside = sorted({min(n, max_rows) for n in BESIDE_ROWS})
        chunks = [n for n in CHUNK_TOKENS if n <= max_tokens]
        # By what a step needs at least, so that the first that fits is the smallest.
        self._chunk_shapes = sorted(
            [GraphShape(0, FEW_ROWS, n) for n in FEW_TOKENS if n <= max_tokens]
            + [GraphShape(0, CHUNK_ROWS, n) for n in chunks]
            + [GraphShape(rows, CHUNK_ROWS, n, is_shared=True) for rows in beside for n in chunks],
            key=lambda shape: (shape.tokens, shape.rows),
        )
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._outputs: dict[GraphShape, Outputs] = {}
        self._metas: dict[GraphShape, BatchMeta] = {}
        shapes = [GraphShape(size) for size in self._sizes]
        shapes += [GraphShape(size, is_shared=True) for size in self._shared_sizes]
        shapes += self._chunk_shapes
        plan = chunk_plan(1, inputs)
        inputs.reserve(shapes, plan)
        # The largest first: the others fit in its memory.
        for shape in sorted(shapes, key=lambda s: -s.tokens):
            step = inputs.stage(plan, table, shape)
            meta = self._metas[shape] = step.meta
            # How long a context a captured kernel must be able to read.
            meta.max_kv_len = inputs.max_context
            if shape.chunk_rows == FEW_ROWS:
                meta.max_kv_len = min(meta.max_kv_len, FEW_CONTEXT)
            if meta.windowed is not None:
                meta.windowed.max_kv_len = meta.max_kv_len

            def capture(shape: GraphShape = shape, step: StepInputs = step) -> None:
                step.meta.plans.clear()  # what providers derive is derived in each replay
                if step.meta.windowed is not None:
                    step.meta.windowed.plans.clear()
                self._outputs[shape] = run(step)

            self._replays[shape] = runtime.capture(capture)

    def shape_for(self, plan: StepPlan) -> GraphShape | None:
        """The graph that a plan fits; None where it fits none."""
        rows, tokens = plan.num_rows, plan.num_tokens
        if plan.score_tokens:
            return None
        is_shared = saves_by_sharing(plan)
        if plan.num_decode_rows == rows and plan.samples.all():
            sizes = self._shared_sizes if is_shared else self._sizes
            at = bisect_left(sizes, rows)
            return GraphShape(sizes[at], is_shared=is_shared) if at < len(sizes) else None
        is_long = plan.kv_lens.max() > FEW_CONTEXT
        decodes = plan.num_decode_rows
        for shape in self._chunk_shapes:
            if is_shared and not shape.is_shared:
                continue
            beside = decodes if shape.decode_rows else 0
            if shape.chunk_rows == FEW_ROWS and is_long:
                continue
            if (
                shape.decode_rows >= beside
                and shape.chunk_rows >= rows - beside
                and shape.chunk_tokens >= tokens - beside
            ):
                return shape
        return None

    def meta(self, shape: GraphShape) -> BatchMeta:
        """The captured batch; its host arrays are those of the capture."""
        return self._metas[shape]

    def replay(self, shape: GraphShape) -> Outputs:
        """Run a captured step; its outputs, of shape.rows rows, stay until the next replay."""
        self._replays[shape]()
        return self._outputs[shape]


def chunk_plan(num_tokens: int, inputs: Inputs, context: int = 0) -> StepPlan:
    """One row of slot 0: tokens after a context, in the pages 0, 1, ... of unused pools."""
    one = np.ones(1, np.int32)
    pages = np.arange(-(-(context + num_tokens) // inputs.page_size), dtype=np.int32)
    window = inputs.num_window_pages  # which may be fewer, so that some are used again
    return StepPlan(
        step=0,
        slots=np.zeros(1, np.int32),
        q_lens=one * num_tokens,
        kv_lens=one * (context + num_tokens),
        num_decode_rows=int(num_tokens == 1),
        tokens=np.zeros(num_tokens, np.int32),
        samples=np.ones(1, bool),
        prompt_logprobs=-one,
        page_slots=np.zeros_like(pages),
        page_indices=pages,
        page_ids=pages,
        window_page_ids=pages % window if window else pages[:0],
    )
