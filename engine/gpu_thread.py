"""The one thread that owns the scheduler, the page ledger and the device.

    drain the inbox -> plan step n -> launch it -> wait for step n-1 and commit it -> post the facts

With a device that works on its own, step n is planned and launched while step n-1 runs. Without
one, or with --disable-overlap, a step is committed before the next is planned.

A step for which the device has no memory is undone and planned again, smaller. Any other error
ends the thread, and with it the engine.

Runs on: gpu.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from .api.messages import Fact, Message, Shutdown, Stats
from .core.copy_orders import Copied
from .core.plan import StepPlan
from .core.scheduler import Scheduler
from .runtime import kv_copies
from .runtime.runner import InFlight, ModelRunner
from .step_log import StepLog

log = logging.getLogger("stoker")

IDLE_WAIT_S = 0.5  # an idle thread looks up this often, so that its heartbeat stays fresh
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")

Post = Callable[[list[Fact], Stats], object]


class GPUThread(threading.Thread):
    """Serves messages until Shutdown.

    Args:
        load: makes scheduler and runner; runs on this thread, which owns the device's context.
        post: takes the facts of a step; called on this thread.
        on_ready: called once with None, or with the error that load raised.
        on_death: called with the error that ended the loop, if any.
        open_log: opens the log of steps, where one is wanted; called on this thread.

    Attributes:
        heartbeat_s: when it last began a step or looked at its inbox, by the monotonic clock.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Scheduler, ModelRunner]],
        post: Post,
        on_ready: Callable[[BaseException | None], object],
        on_death: Callable[[BaseException], object],
        *,
        overlap: bool | None = None,
        check: bool = False,
        open_log: Callable[[Scheduler, ModelRunner], StepLog | None] | None = None,
    ):
        super().__init__(name="stoker-gpu", daemon=True)
        self.inbox: queue.SimpleQueue[Message | Copied] = queue.SimpleQueue()
        self.heartbeat_s = time.monotonic()
        self._load = load
        self._post = post
        self._on_ready = on_ready
        self._on_death = on_death
        self._overlap = overlap
        self._check = check
        self._open_log = open_log
        self._log: StepLog | None = None

    def run(self) -> None:
        """Load, then loop."""
        try:
            scheduler, runner = self._load()
            if self._open_log is not None:
                self._log = self._open_log(scheduler, runner)
            if runner.copies is not None:
                runner.copies.start(self.inbox.put)
        except BaseException as error:  # reported to whoever starts the engine
            self._on_ready(error)
            return
        self._on_ready(None)
        try:
            self._loop(scheduler, runner)
            self._close_tiers(scheduler, runner)
        except BaseException as error:
            self._on_death(error)
        finally:
            if self._log is not None:
                self._log.close()

    def _loop(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        is_async = runner.runtime.is_async
        overlap = is_async if self._overlap is None else self._overlap
        in_flight: InFlight | None = None
        spent = _Spent()
        while True:
            self.heartbeat_s = time.monotonic()
            num_received = self._receive(
                scheduler, wait=in_flight is None and not scheduler.has_work
            )
            if num_received is None:
                return
            spent.start()
            plan = scheduler.plan(time.monotonic())
            if scheduler.tiers is not None and runner.copies is not None:
                runner.copies.submit(scheduler.tiers.take_orders())
            spent.count("plan_s")
            launched = self._launch(scheduler, runner, plan) if plan is not None else None
            spent.count("launch_s" if is_async else "wait_s")
            if not overlap:
                in_flight, launched = launched, None
            result = None
            if in_flight is not None:
                result = in_flight.wait()
                spent.count("wait_s")
                spent.seconds["device_s"] += in_flight.device_s
            in_flight = launched
            facts = scheduler.drain_facts()
            if result is not None:
                facts += scheduler.commit(result, time.monotonic())
            if self._check:
                scheduler.check()
            if facts or result is not None or num_received:  # an abort changes figures only
                masks = {"mask_s": runner.masks.fill_s, "num_masks": runner.masks.num_masks}
                self._post(facts, scheduler.stats(**spent.seconds, **masks))
            spent.count("commit_s")
            if result is not None and self._log is not None:
                self._log.done(result.seconds, spent.own_s)

    def _close_tiers(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        """Give pages that are on their way to a store some time to arrive."""
        if scheduler.tiers is not None and runner.copies is not None:
            kv_copies.drain(scheduler.tiers, runner.copies, self.inbox)
            runner.runtime.synchronize()
            runner.copies.close()

    def _launch(self, scheduler: Scheduler, runner: ModelRunner, plan: StepPlan) -> InFlight | None:
        """Launch a plan. Where the device has no memory for it, undo it: None."""
        try:
            launched = runner.launch(plan)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            if self._log is not None:
                self._log.planned(plan)
            return launched
        # Only here is the error gone, and with its traceback the tensors of the step.
        if runner.runtime.is_async:
            torch.accelerator.empty_cache()
        free_bytes, _ = runner.runtime.memory()
        scheduler.undo(free_bytes)
        log.warning(
            "no device memory for a step of %d tokens in %d rows, %d MiB are free; the next are "
            "smaller: %s",
            plan.num_tokens,
            plan.num_rows,
            free_bytes >> 20,
            reason,
        )
        return None

    def _receive(self, scheduler: Scheduler, *, wait: bool) -> int | None:
        """Hand all waiting messages to the scheduler; how many they were, None after Shutdown."""
        for count in itertools.count():
            try:
                first = wait and not count
                message = self.inbox.get(timeout=IDLE_WAIT_S) if first else self.inbox.get_nowait()
            except queue.Empty:
                return count
            if isinstance(message, Shutdown):
                return None
            scheduler.handle(message)
        return None


def _is_out_of_memory(error: Exception) -> bool:
    """Libraries that allocate for themselves, and the CPU's allocator, have no type for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(text in str(error) for text in OUT_OF_MEMORY)


class _Spent:
    """Adds up where the thread's time goes, in the fields of Stats."""

    def __init__(self) -> None:
        names = ("plan_s", "launch_s", "wait_s", "commit_s", "cpu_s", "device_s")
        self.seconds = dict.fromkeys(names, 0.0)
        self.start()

    @property
    def own_s(self) -> float:
        """The thread's own work so far."""
        return self.seconds["plan_s"] + self.seconds["launch_s"] + self.seconds["commit_s"]

    def start(self) -> None:
        """Leave out the time until now."""
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def count(self, name: str) -> None:
        """The time since the last call was spent on this."""
        wall, cpu = self._wall, self._cpu
        self.start()
        self.seconds[name] += self._wall - wall
        if name != "wait_s":
            self.seconds["cpu_s"] += self._cpu - cpu
