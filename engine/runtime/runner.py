"""Runs one plan: inputs, forward pass, sampling. `launch` returns before the device is done.

Runs on: gpu.
"""

import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...backends.api import BatchMeta, DeviceRuntime, LayerCache, Ops
from ..core.budget import StepCost, calibration_chunks, pairs_of
from ..core.plan import Logprobs, StepPlan, StepResult
from .graphs import StepGraphs, chunk_plan
from .inputs import Inputs
from .sampler import DeviceLogprobs, Sampled, Sampler, top_logprobs

SCORED_ROWS = 512  # logits of so many prompt positions are in memory at once


class Model(Protocol):
    """What the runner needs of a model."""

    vocab_size: int

    def forward(self, tokens: Tensor, meta: BatchMeta, caches: list[LayerCache]) -> Tensor:
        """int64 [num_tokens] to hidden states [num_tokens, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, vocab]."""


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
        began: torch.Event | None,
        device_s: float = 0.0,
    ):
        self.device_s = device_s
        self._plan = plan
        self._sample_rows = sample_rows
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._began = began
        is_async = began is not None
        if sampled is not None:
            self._tokens = _to_host(sampled.tokens, is_async)
            self._is_finite = _to_host(sampled.is_finite, is_async)
        if is_async:
            self._ended = torch.Event(enable_timing=True, blocking=True)
            self._ended.record()

    def wait(self) -> StepResult:
        """The step's result, once the device is done with it."""
        if self._began is not None:
            self._ended.synchronize()
            self.device_s = self._began.elapsed_time(self._ended) / 1e3
        plan, rows = self._plan, self._sample_rows
        tokens = np.full(plan.num_rows, -1, np.int32)
        is_finite = np.ones(plan.num_rows, bool)
        logprobs = None
        if self._sampled is not None:
            tokens[rows] = self._tokens.numpy()
            is_finite[rows] = self._is_finite.numpy()
            if self._sampled.logprobs is not None:
                at = rows[self._sampled.logprob_rows]
                logprobs = _spread(self._sampled.logprobs, at, plan.num_rows)
        scored = {row: _to_numpy(lp) for row, lp in self._prompt_logprobs.items()}
        return StepResult(plan.step, tokens, is_finite, self.device_s, logprobs, scored)


class ModelRunner:
    """Owns the device side of serving: model, KV pool, inputs, sampler."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        runtime: DeviceRuntime,
        caches: list[LayerCache],
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        max_step_tokens: int,
    ):
        self._graphs: StepGraphs | None = None
        self.runtime = runtime
        self.model = model
        self.caches = caches
        self.sampler = Sampler(ops, num_slots, model.vocab_size, runtime.device)
        self.inputs = Inputs(
            runtime,
            num_slots=num_slots,
            max_pages=max_pages,
            page_size=page_size,
            max_step_tokens=max_step_tokens,
        )

    @torch.inference_mode()
    def measure(self, num_tokens: int) -> int:
        """Bytes of working memory that a step of one chunk takes beside weights and KV pool.

        It runs such a step, which also compiles and loads the kernels that it needs.
        """
        device = self.runtime.device
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        self.launch(chunk_plan(num_tokens, self.inputs.page_size)).wait()
        return torch.accelerator.max_memory_allocated(device) - before

    def calibrate(self, num_tokens: int, cost: StepCost) -> None:
        """Tell `cost` how long chunks of several sizes and contexts take, up to num_tokens.

        It writes to the pool's first pages, which nobody owns yet.
        """
        for n, context in calibration_chunks(num_tokens):
            for _ in range(2):  # the first loads what it needs
                step = self.launch(chunk_plan(n, self.inputs.page_size, context))
                step.wait()
            cost.observe(n, pairs_of(n, context), step.device_s)

    @torch.inference_mode()
    def capture(self, max_rows: int, max_tokens: int) -> None:
        """Capture decode steps of up to max_rows requests, and short prefill steps, as graphs."""

        def forward(tokens: Tensor, meta: BatchMeta) -> Tensor:
            hidden = self.model.forward(tokens, meta, self.caches)
            if meta.num_decode_rows < meta.num_rows:
                hidden = hidden[meta.logit_tokens]
            return self.model.logits(hidden)

        self._graphs = StepGraphs(
            self.runtime, self.inputs, self.sampler.table, forward, max_rows, max_tokens
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Queue a step on the device."""
        for admission in plan.admitted:
            self.sampler.admit(admission)
        began, began_s = None, time.perf_counter()
        if self.runtime.is_async:
            began = torch.Event(enable_timing=True)
            began.record()
        graphs = self._graphs
        shape = graphs.shape_for(plan) if graphs is not None else None
        step = self.inputs.stage(plan, self.sampler.table, shape)
        num_samples = len(step.sample_rows)
        sampled, scored = None, {}
        if graphs is not None and shape is not None:
            logits = graphs.replay(shape)[:num_samples]
        else:
            hidden = self.model.forward(step.tokens, step.meta, self.caches)
            hidden = hidden[step.meta.logit_tokens]
            logits = self.model.logits(hidden[:num_samples])
            scored = self._score(plan, hidden[num_samples:])
        if num_samples:
            slots = plan.slots[step.sample_rows]
            sampled = self.sampler.sample(
                logits, slots, plan.kv_lens[step.sample_rows], step.sampling
            )
            self.inputs.last_tokens[step.sample_slots] = sampled.tokens.long()
        return InFlight(
            plan, step.sample_rows, sampled, scored, began, time.perf_counter() - began_s
        )

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


def _to_host(values: Tensor, is_async: bool) -> Tensor:
    if not is_async:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _to_numpy(lp: DeviceLogprobs) -> Logprobs:
    return Logprobs(lp.chosen.cpu().numpy(), lp.top_ids.cpu().numpy(), lp.top_values.cpu().numpy())


def _spread(lp: DeviceLogprobs, at: np.ndarray, num_rows: int) -> Logprobs:
    """Put the entries of some rows at their places among all rows."""
    some = _to_numpy(lp)

    def place(values: np.ndarray) -> np.ndarray:
        out = np.zeros((num_rows, *values.shape[1:]), values.dtype)
        out[at] = values
        return out

    return Logprobs(place(some.chosen), place(some.top_ids), place(some.top_values))
