"""Runs one plan: inputs, forward pass, sampling. `launch` returns before the device is done.

Runs on: gpu.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...backends.api import BatchMeta, DeviceRuntime, LayerCache, LayerState, Ops
from ..core.budget import StepCost, calibration_chunks, pairs_of
from ..core.plan import Logprobs, StepPlan, StepResult
from .grammar.masks import Constraint, Masks
from .graphs import StepGraphs, chunk_plan
from .inputs import Inputs, StepInputs
from .kv_copies import KVCopies
from .sampler import NO_ROWS, DeviceLogprobs, Sampled, Sampler, top_logprobs

SCORED_ROWS = 512  # logits of so many prompt positions are in memory at once


class Model(Protocol):
    """What the runner needs of a model."""

    vocab_size: int

    def forward(self, tokens: Tensor, meta: BatchMeta, caches: Iterable[Any]) -> Tensor:
        """int64 [num_tokens] to hidden states [num_tokens, hidden].

        A layer's LayerCache, or LayerState, is taken from the iterator just before it runs.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, vocab]."""


class _Turn:
    """What a step needs beside its inputs and keeps until it was waited for; used in turns."""

    def __init__(self, num_rows: int, is_async: bool):
        self.tokens = torch.empty(num_rows, dtype=torch.int32, pin_memory=is_async)
        if is_async:
            self.began = torch.Event(enable_timing=True)
            self.ended = torch.Event(enable_timing=True, blocking=True)


class InFlight:
    """A launched step. `wait` gives its result; it blocks without the GIL.

    Attributes:
        device_s: how long the device worked on it, known after `wait`.
    """

    def __init__(
        self,
        plan: StepPlan,
        sample_rows: np.ndarray,
        sampled: Sampled | None,
        prompt_logprobs: dict[int, DeviceLogprobs],
        turn: _Turn,
        device_s: float | None = None,
        constraints: Sequence[Constraint] = (),
    ):
        self.device_s = device_s or 0.0
        self._plan = plan
        self._sample_rows = sample_rows
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._turn = turn
        self._constraints = constraints  # of the plan's masked rows
        self._is_async = device_s is None
        if sampled is not None:
            host = turn.tokens[: len(sample_rows)]
            host.copy_(sampled.tokens, non_blocking=self._is_async)
        if self._is_async:
            turn.ended.record()

    def wait(self) -> StepResult:
        """The step's result, once the device is done with it."""
        turn = self._turn
        if self._is_async:
            turn.ended.synchronize()
            self.device_s = turn.began.elapsed_time(turn.ended) / 1e3
        plan, rows = self._plan, self._sample_rows
        logprobs = None
        if self._sampled is None:
            tokens = np.full(plan.num_rows, -1, np.int32)
            is_finite = np.ones(plan.num_rows, bool)
        else:
            drawn = turn.tokens.numpy()[: len(rows)]
            is_finite = drawn >= 0
            tokens = np.where(is_finite, drawn, ~drawn)
            if len(rows) < plan.num_rows:
                tokens = _spread(tokens, rows, plan.num_rows, -1)
                is_finite = _spread(is_finite, rows, plan.num_rows, True)
            for row, constraint in zip(plan.masked, self._constraints, strict=True):
                constraint.accept((int(tokens[row]),))
            if self._sampled.logprobs is not None:
                at = rows[self._sampled.logprob_rows]
                logprobs = _spread_logprobs(self._sampled.logprobs, at, plan.num_rows)
        scored = {row: _to_numpy(lp) for row, lp in self._prompt_logprobs.items()}
        return StepResult(plan.step, tokens, is_finite, self.device_s, logprobs, scored)


class ModelRunner:
    """Owns the device side of serving: model, KV pool, states, inputs, sampler."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        runtime: DeviceRuntime,
        caches: Sequence[LayerCache | LayerState],
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        max_step_tokens: int,
        num_window_pages: int = 0,
    ):
        self._graphs: StepGraphs[tuple[Tensor, Tensor, StepInputs]] | None = None
        self._turns = itertools.cycle([_Turn(num_slots, runtime.is_async) for _ in range(3)])
        self._replan = getattr(ops, "replan", None)
        self.runtime = runtime
        self.model = model
        self.caches = caches
        self.pools = [cache for cache in caches if isinstance(cache, LayerCache)]
        self._states = [tensor for c in caches if isinstance(c, LayerState) for tensor in c]
        self.copies: KVCopies | None = None  # to and from the cache tiers, where there are any
        self.sampler = Sampler(ops, num_slots, model.vocab_size, runtime.device)
        self.masks = Masks(num_slots, model.vocab_size)
        self.inputs = Inputs(
            runtime,
            num_slots=num_slots,
            max_pages=max_pages,
            page_size=page_size,
            max_step_tokens=max_step_tokens,
            num_window_pages=num_window_pages,
        )

    @torch.inference_mode()
    def measure(self, num_tokens: int) -> int:
        """Bytes of working memory that a step of one chunk takes beside weights and KV pool.

        It runs such a step, which also compiles and loads the kernels that it needs.
        """
        device = self.runtime.device
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        self.launch(chunk_plan(num_tokens, self.inputs)).wait()
        return torch.accelerator.max_memory_allocated(device) - before

    def calibrate(self, num_tokens: int, cost: StepCost) -> None:
        """Tell `cost` how long chunks of several sizes and contexts take, up to num_tokens.

        It writes to the pool's first pages, which nobody owns yet.
        """
        for n, context in calibration_chunks(num_tokens):
            for _ in range(2):  # the first loads what it needs
                step = self.launch(chunk_plan(n, self.inputs, context))
                step.wait()
            cost.observe(n, pairs_of(n, context), step.device_s)

    @torch.inference_mode()
    def capture(self, max_rows: int, max_tokens: int) -> None:
        """Capture decode steps of up to max_rows requests, and short prefill steps, as graphs."""
        self._graphs = StepGraphs(
            self.runtime, self.inputs, self.sampler.table, self.run, max_rows, max_tokens
        )

    @torch.inference_mode()
    def walk(self, num_tokens: int) -> None:
        """Launch what a step of one chunk does, on a device that need not be there."""
        self.run(self.inputs.stage(chunk_plan(num_tokens, self.inputs), self.sampler.table))

    def run(self, step: StepInputs) -> tuple[Tensor, Tensor, StepInputs]:
        """A step that is to be captured: its logits, and the tokens as the sampler draws them."""
        self.inputs.apply(step)
        hidden = self.model.forward(step.tokens, step.meta, self.caches)
        if step.meta.num_decode_rows < step.meta.num_rows:
            hidden = hidden[step.meta.logit_tokens]
        logits = self.model.logits(hidden)
        last = self.inputs.last_tokens
        return logits, self.sampler.draw(logits, step.sampling, step.sample_slots, last), step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Queue a step on the device. The step before the last must have been waited for."""
        for admission in plan.admitted:
            self.sampler.admit(admission)
            self.masks.admit(admission)
        constraints = self.masks.begin(plan.slots[plan.masked].tolist())
        turn, began_s = next(self._turns), time.perf_counter()
        if self.runtime.is_async:
            turn.began.record()
        graphs, sampler, last = self._graphs, self.sampler, self.inputs.last_tokens
        shape = graphs.shape_for(plan) if graphs is not None else None
        caches: Iterable[Any] = self.caches
        self._copy_states(plan.state_restores)
        if self.copies is not None and self.copies.is_loading:
            if shape is not None and plan.num_decode_rows:  # streams run: the loads are small
                self.copies.wait_for_loads()
            else:  # a graph would have to wait for all layers, too
                shape, caches = None, self.copies.layers()
        sampled, scored = None, {}
        if graphs is not None and shape is not None:
            rows = self.inputs.restage(plan, sampler.table, shape)
            if self._replan is not None:
                self._replan(graphs.meta(shape), plan.kv_lens)
            logits, drawn, step = graphs.replay(shape)
        else:
            step = self.inputs.stage(plan, sampler.table)
            rows = step.sample_rows
            hidden = self.model.forward(step.tokens, step.meta, caches)
            hidden = hidden[step.meta.logit_tokens]
            logits, drawn = self.model.logits(hidden[: len(rows)]), None
            scored = self._score(plan, hidden[len(rows) :])
        if len(rows):
            slots, kv_lens = plan.slots, plan.kv_lens
            if len(rows) < plan.num_rows:
                slots, kv_lens = slots[rows], kv_lens[rows]
            if drawn is not None and not constraints and sampler.is_plain(slots, kv_lens):
                sampled = Sampled(drawn[: len(rows)], NO_ROWS, None)
            else:  # what a graph drew is drawn again, from what the requests make of the logits
                sampled = sampler.sample(
                    logits,
                    slots,
                    kv_lens,
                    step.sampling,
                    step.sample_slots,
                    last,
                    np.searchsorted(rows, plan.masked),
                    self.masks.take() if constraints else None,
                )
                sampled.tokens = sampled.tokens[: len(rows)]
        self._copy_states(plan.state_saves)
        device_s = None if self.runtime.is_async else time.perf_counter() - began_s
        return InFlight(plan, rows, sampled, scored, turn, device_s, constraints)

    def _copy_states(self, rows: np.ndarray) -> None:
        """Copy rows of all states; int32 [2, n], from and to."""
        if rows.size:
            device = self.runtime.device
            sources, targets = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
            for state in self._states:
                state[targets] = state[sources]

    def _score(self, plan: StepPlan, hidden: Tensor) -> dict[int, DeviceLogprobs]:
        """Log-probabilities of prompt tokens, for the rows that want them."""
        scored: dict[int, DeviceLogprobs] = {}
        start = 0
        for row, tokens in plan.score_tokens.items():
            wanted = torch.from_numpy(tokens.astype(np.int64)).clamp_(min=0).to(hidden.device)
            parts = []
            for at in range(0, len(tokens), SCORED_ROWS):
                stop = min(at + SCORED_ROWS, len(tokens))
                own = torch.log_softmax(self.model.logits(hidden[start + at : start + stop]), -1)
                parts.append(top_logprobs(own, wanted[at:stop], int(plan.prompt_logprobs[row])))
            scored[row] = DeviceLogprobs(
                torch.cat([p.chosen for p in parts]),
                torch.cat([p.top_ids for p in parts]),
                torch.cat([p.top_values for p in parts]),
            )
            start += len(tokens)
        return scored


def _to_numpy(lp: DeviceLogprobs) -> Logprobs:
    return Logprobs(lp.chosen.cpu().numpy(), lp.top_ids.cpu().numpy(), lp.top_values.cpu().numpy())


def _spread(values: np.ndarray, at: np.ndarray, num_rows: int, others: int) -> np.ndarray:
    """Put the entries of some rows at their places among all rows."""
    out = np.full((num_rows, *values.shape[1:]), others, values.dtype)
    out[at] = values
    return out


def _spread_logprobs(lp: DeviceLogprobs, at: np.ndarray, num_rows: int) -> Logprobs:
    some = _to_numpy(lp)
    parts = (some.chosen, some.top_ids, some.top_values)
    return Logprobs(*(_spread(part, at, num_rows, 0) for part in parts))
