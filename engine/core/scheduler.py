"""Which tokens are computed in which step, and who owns which KV page.

    handle(message)   what the loop asks for
    plan(now)         the next step's work, or None
    commit(result)    account for a step that ended; gives what to tell the loop
    undo(free_bytes)  the newest step could not be launched

A request has its tokens and `num_computed`; each step computes some of the difference. There is no
prefill phase and no decode phase: a row with one new token is called decode, a longer one a chunk.

One step may be in flight while the next is planned. Then `computed` runs ahead of the results: a
launched step is certain, only the values of its sampled tokens are not. Three numbers a request:

    committed <= computed <= length = known tokens + pending (sampled on the device, value unknown)

All device work is one stream in order. So pages may be released at once, even when a launched step
still reads or writes them: their next owner's writes come later. The tree is stricter: only
positions below `committed` are put into it, in whole pages, and an in-flight step writes at or
above `committed`. So nobody writes to a page that the tree hands out, and what a failed step wrote
is never cached. Pages that come from the host tier are the tree's as soon as their load is ordered,
for it is queued before the next step.

Runs on: any (pure).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..api.errors import EngineError, Overloaded, RequestError, StokerError
from ..api.messages import (
    Abort,
    Add,
    Fact,
    FinishReason,
    Flush,
    Flushed,
    Message,
    Refused,
    Stats,
    TierStats,
    Tokens,
)
from .arriving import Arriving
from .budget import MIN_CHUNK, StepBudget, StepCost, StepLimits
from .check import check_ledger
from .copy_orders import Copied
from .eviction import POLICIES as EVICTION_POLICIES
from .eviction import EvictionPolicy
from .fairness import FairShares
from .launch import LaunchedStep, NewPages, launch
from .ledger import PageLedger
from .logprobs import logprobs_of_row, prompt_logprobs_of_row, take_prompt_logprobs
from .plan import NONE, StepPlan, StepResult
from .policy import MAX_SORTED, POLICIES, Policy, QueueView
from .request import Request
from .reserve import Reserve
from .shared_prefix import SharedPrefixes
from .slots import Slots
from .snapshots import SAVE_EVERY, Snapshots
from .tiers import Tiers
from .waiting import WaitingQueue
from .windows import Windows

COST_STEPS = 16  # of pure decode steps one in so many is learnt from; of all others, each

NO_TIERS = TierStats()


class Scheduler:
    """The state machine. Time is an argument; it has no thread, no clock and no device.

    Args:
        num_pages: pages of the KV pool, the reserved page 0 included.
        page_size: tokens a page.
        max_running: requests that are computed at once (slots 1 to max_running).
        max_model_len: longest prompt plus output, in tokens.
        use_radix: whether prefixes are cached.
        conservativeness: above 1 admits fewer requests, so that fewer are retracted.
        policy: the order in which waiting requests of equal priority are tried.
        eviction: which cached prefix is forgotten first.
        preemption_gap: a waiting request may take the place of running ones whose priority is at
            least so much lower; None for never.
        shares: for fairness between clients, which then goes before the policy.
        seed: of the policy that draws.
        max_step_tokens, max_step_s, backlog_stretch, prefill_decode_interval, cost: how much a
            step may hold (budget.StepLimits).
        tells_cache: whether the facts tell what enters and leaves the prefix cache.
        tiers: the cache tiers below the device, if any; needs use_radix.
        window, num_window_pages: for a model whose layers with a sliding window have a page pool of
            their own: the window in tokens, and that pool's pages, its page 0 included. Does not go
            with tiers.
        num_snapshots: for a model with recurrent states: how many of them the prefix cache holds.
            Does not go with tiers.
        save_every: tokens that lie between two of them at least.
        queue_timeout_s: a request that has waited so long for its first turn is refused.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        use_radix: bool = True,
        conservativeness: float = 1.0,
        policy: Policy = POLICIES["fcfs"],
        eviction: EvictionPolicy = EVICTION_POLICIES["lru"],
        preemption_gap: int | None = None,
        shares: FairShares | None = None,
        seed: int = 0,
        max_step_s: float | None = None,
        backlog_stretch: float = 1.0,
        prefill_decode_interval: int = 0,
        cost: StepCost | None = None,
        queue_timeout_s: float | None = None,
        tells_cache: bool = False,
        tiers: Tiers | None = None,
        window: int | None = None,
        num_window_pages: int = 0,
        num_snapshots: int | None = None,
        save_every: int = SAVE_EVERY,
    ):
        self.page_size = page_size
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.use_radix = use_radix
        self.limits = StepLimits(
            max_step_tokens,
            max_step_s=max_step_s,
            backlog_stretch=backlog_stretch,
            prefill_decode_interval=prefill_decode_interval,
            cost=cost,
        )
        self.slots = Slots(max_running, -(-max_model_len // page_size), page_size)
        self.snapshots: Snapshots | None = None
        if num_snapshots is not None:
            num_rows = num_snapshots if use_radix else 0
            self.snapshots = Snapshots(max_running + 1, num_rows, page_size, self.slots, save_every)
        self.windows: Windows | None = None
        if window is not None:
            self.windows = Windows(num_window_pages, page_size, window, self.slots)
        self.ledger = PageLedger(
            num_pages,
            page_size,
            self.slots,
            use_radix=use_radix,
            eviction=eviction,
            tells_cache=tells_cache,
            tiers=tiers,
            snapshots=self.snapshots,
            windows=self.windows,
        )
        self.pool, self.tree, self.tiers = self.ledger.pool, self.ledger.tree, tiers
        self.waiting = WaitingQueue(policy, queue_timeout_s, shares)
        self._preemption_gap = preemption_gap
        self._shares = shares
        self._seed = seed
        self._reserve = Reserve(conservativeness)
        self._shared = SharedPrefixes()
        self._arriving = Arriving(page_size)

        self._requests: dict[int, list[Request]] = {}  # unfinished choices by request id
        self._siblings: dict[int, list[Request]] = {}  # choices that wait for choice 0's prompt
        self._in_flight: deque[LaunchedStep] = deque()
        self._facts: list[Fact] = []

        self._num_received = 0
        self._num_undone = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._num_prefilled = 0
        self._preemptions = 0
        self._generated_tokens = 0
        self._retractions = 0
        self._batch_tokens = 0

    # ---- messages ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a plan, a commit or a drain of facts is due."""
        num_waiting = len(self.waiting)
        if self.tiers is not None:
            if self.tiers.has_orders:
                return True
            num_waiting -= self.tiers.num_pending
        return bool(len(self.slots.order) or num_waiting or self._in_flight or self._facts)

    def handle(self, message: Message | Copied) -> None:
        """Take a message in. What it gives to tell comes with the next commit or drain_facts."""
        match message:
            case Add():
                self._num_received += 1
                self._add(message)
            case Abort(request_id, choice):
                for request in list(self._requests.get(request_id, ())):
                    if choice is None or request.choice == choice:
                        self._end(request, "abort")
            case Copied() if self.tiers is not None:
                self.tiers.handle(message)
            case Flush(reply_id):
                self._facts.append(Flushed(reply_id, self.ledger.flush()))
            case _:
                raise TypeError(f"not for the scheduler: {message!r}")

    def drain_facts(self) -> list[Fact]:
        """What there is to tell now, without a step."""
        if self.ledger.events:
            self._facts += self.ledger.events
            self.ledger.events = []
        facts, self._facts = self._facts, []
        return facts

    def _add(self, add: Add) -> None:
        prompt_len = len(add.prompt)
        pool_tokens = self.pool.capacity * self.page_size
        # The last token needs no KV, so a full pool can still give one token.
        room = min(self.max_model_len, pool_tokens + 1) - prompt_len
        if prompt_len == 0 or prompt_len > pool_tokens or room < min(1, add.max_tokens):
            limit = min(self.max_model_len, pool_tokens)
            message = (
                f"the prompt has {prompt_len} tokens; 1 to {limit} fit "
                f"(context of {self.max_model_len}, KV pool of {pool_tokens} tokens)"
            )
            error = RequestError(message, param="prompt", code="context_length_exceeded")
            self._facts.append(Refused(add.request_id, error))
            return
        max_tokens = min(add.max_tokens, room)
        first, *rest = (Request(add, choice, max_tokens) for choice in range(add.params.n))
        self._requests[add.request_id] = [first, *rest]
        for request in (first, *rest):
            request.num_prefilled_before = self._num_prefilled
            if self._shares is not None:
                self._shares.arrive(add.client)
        if self.tiers is not None and first.prompt_logprobs is None:
            keys = self.ledger.page_keys(first)[: (prompt_len - 1) // self.page_size]
            first.prefetch = self.tiers.prefetch(keys, add.arrival_s)
        self.waiting.add([first])
        if rest and self.use_radix:
            self._siblings[add.request_id] = rest
        else:
            self.waiting.add(rest)

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, to be launched at once; None when nothing can be computed.

        None with no step in flight means that nothing is left to do. At most one step may be in
        flight: RuntimeError otherwise. The returned plan counts as launched.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("two steps are in flight: commit the older one first")
        self.ledger.now = now
        for request_id in self.waiting.expired(now):
            self._expire(request_id)
        if self.tiers is not None:
            self.tiers.expire(now)
        if not len(self.slots.order) and not self.waiting:
            self._reserve.reset()
            return None
        if self.slots.untold and self._in_flight:
            return None  # what the runner must learn again holds every token so far
        if self.slots.untold and self.snapshots is not None:
            self._retract_undone()
        retractions = self._retractions
        if self._preemption_gap is not None and self.waiting:
            self._preempt(self._preemption_gap)
            if not self._in_flight:  # no token of theirs is on its way: admissions may go on
                retractions = self._retractions
        while True:
            decode, new_pages = self._plan_decode()
            budget = self.limits.budget(self.slots.computed[decode], len(self.waiting))
            if self.tiers is not None:
                room = self.tiers.max_load_pages if len(decode) else sys.maxsize
                self.ledger.load_room = room
            chunks = self._plan_chunks(budget) if len(decode) < len(self.slots.order) else []
            if len(decode) or chunks or self._in_flight or not len(self.slots.order):
                break
            self._make_way()
        admitted: list[Request] = []
        if self._retractions == retractions:
            admitted = self._admit(budget, chunks)
            if len(decode):
                self._reserve.decay()
        if not len(decode) and not chunks:
            return None
        self._num_steps += 1
        self.limits.planned(has_chunks=bool(chunks))
        groups = self._shared.groups(self.slots, decode, self.ledger.num_moves)
        plan, launched = launch(
            self._num_steps, self.slots, decode, chunks, admitted, new_pages, groups
        )
        if self.snapshots is not None:
            self.snapshots.write(plan, launched)
        if self.tiers is not None:
            launched.has_loads, self.tiers.loads_ordered = self.tiers.loads_ordered, False
        self._in_flight.append(launched)
        self._batch_tokens = plan.num_tokens
        self._num_prefilled += plan.num_tokens - plan.num_decode_rows
        return plan

    def _plan_decode(self) -> tuple[np.ndarray, NewPages]:
        """Slots with one token to compute, and the block-table entries they need for it."""
        slots = self.slots
        while True:
            order = slots.order
            is_due = slots.num_missing(order) == 1
            if slots.num_constrained:  # a mask needs all tokens before its own
                is_due &= ~slots.is_constrained[order] | (slots.pending[order] == 0)
            decode = order if is_due.all() else order[is_due]
            if len(decode) > self.limits.num_tokens:
                decode = decode[: self.limits.num_tokens]
            short = decode[(slots.computed >= slots.capacity)[decode]]
            if len(short) <= self.ledger.num_growable:
                break
            self._make_way()
        if not len(short):
            return decode, (NONE,) * (3 if self.windows is None else 4)
        indices = slots.capacity[short] // self.page_size
        pages = self.ledger.take(len(short))
        slots.table[short, indices] = pages
        slots.capacity[short] += self.page_size
        if self.windows is None:
            return decode, (short.astype(np.int32), indices, pages)
        window_pages = slots.window_table[short, indices] = self.windows.take(len(short))
        return decode, (short.astype(np.int32), indices, pages, window_pages)

    def _plan_chunks(self, budget: StepBudget) -> list[tuple[int, int]]:
        """(slot, q_len) of running requests with more than a token to compute, oldest first."""
        chunks: list[tuple[int, int]] = []
        order = self.slots.order
        missing = self.slots.num_missing(order)
        behind = missing > 1
        for slot, num_missing in zip(order[behind].tolist(), missing[behind].tolist(), strict=True):
            if (request := self.slots.owner(slot)).is_loading:
                num_missing -= self._load(request)
                if request.is_loading:
                    continue
            if self.waiting.policy.yields and self.waiting:
                num_missing = self._leave_room(slot, num_missing, budget)
            q_len = self._take_chunk(slot, num_missing, budget)
            if q_len == 0:
                break
            chunks.append((slot, q_len))
        return chunks

    def _leave_room(self, slot: int, num_missing: int, budget: StepBudget) -> int:
        """What a prompt may compute now where those that wait with less to compute go first."""
        if not self.slots.free or len(self.waiting) > MAX_SORTED:
            return num_missing
        num_less = 0
        for request in self.waiting:
            num_left = len(request.tokens) - self.ledger.num_cached(request)
            num_less += num_left if num_left < num_missing else 0
        room = budget.chunk(num_missing, int(self.slots.computed[slot]))
        return min(num_missing, max(room - num_less, MIN_CHUNK))

    def _take_chunk(self, slot: int, num_missing: int, budget: StepBudget) -> int:
        """How many of a slot's missing tokens this step computes; finds the pages for them."""
        context = int(self.slots.computed[slot])
        q_len = budget.chunk(num_missing, context)
        if self.snapshots is not None:
            q_len = self.snapshots.chunk(self.slots.owner(slot), context, q_len, num_missing)
        q_len = self.ledger.grow(slot, q_len)
        if q_len:
            budget.spend(q_len, context)
        return q_len

    def _make_way(self) -> None:
        """Retract the running request that loses least; one that is alone fails."""
        slots = self.slots
        running = slots.owners()
        if self.windows is not None and self.windows.give_up(running):
            return
        if len(running) == 1:
            (request,) = running
            message = (
                f"the KV pool of {self.pool.capacity * self.page_size} tokens is full: "
                f"{len(request.tokens)} tokens of this request leave no room for the next"
            )
            self._refuse(request, EngineError(message))
            return
        victim = min(
            running,
            key=lambda r: (
                r.add.priority,
                int(slots.length[r.slot]) - r.prompt_len,
                -r.prompt_len,
                -int(slots.serial[r.slot]),
            ),
        )
        running.remove(victim)
        num_output = sum(int(slots.length[r.slot]) - r.prompt_len for r in running)
        self._reserve.retracted(len(running), num_output, sum(r.max_tokens for r in running))
        self._retract(victim)

    def _retract(self, request: Request) -> None:
        """Take a running request back to the front of the queue; it keeps its tokens."""
        self._release(request, keep_prefix=True)
        request.is_resumed = True
        # A token of it that is still in flight is appended at commit, in the queue.
        self.waiting.add([request], front=True)
        self._retractions += 1

    def _preempt(self, gap: int) -> None:
        """Retract requests of lower priority, the newest first, if the next one needs their place.

        Only if that is enough.
        """
        head = next(self._candidates(), None)
        if head is None:
            return
        owners = self.slots.owners()
        if min((r.add.priority for r in owners), default=0) > head.add.priority - gap:
            return
        node, _, num_matched = self.ledger.match(head)
        shortage = self._shortage(head, num_matched)
        self.tree.unlock(node)
        victims = sorted(
            (r for r in owners if r.add.priority <= head.add.priority - gap),
            key=lambda r: (r.add.priority, -int(self.slots.serial[r.slot])),
        )
        chosen: list[Request] = []
        for victim in victims:
            if shortage <= 0 and (self.slots.free or chosen):
                break
            chosen.append(victim)
            num_left = self.slots.limit[[victim.slot]] - self.slots.length[[victim.slot]]
            shortage -= self.ledger.num_freed(victim) + self._reserve.tokens(num_left)
        if shortage <= 0:
            for victim in chosen:
                self._retract(victim)
            self._preemptions += len(chosen)

    def _candidates(self) -> Iterator[Request]:
        """Waiting requests that may be admitted, the next one first."""
        policy = self.waiting.policy
        running = self.slots.owners() if policy.order is not None else []
        if self._shares is not None:
            for request in self.slots.owners():
                self._charge(request, self._shares)
        view = QueueView(
            self.tree,
            self._num_prefilled,
            self._num_steps + (self._seed << 32),
            [request for request in running if not request.is_published],
        )
        num_held = 0
        for request in self.waiting.in_order(view):
            if self.tiers is not None and self.tiers.is_pending(request.prefetch):
                continue
            if self._arriving and self._awaits_prefix(request):
                num_held += 1
                if num_held == MAX_SORTED:
                    break
                continue
            yield request

    def _charge(self, request: Request, shares: FairShares) -> None:
        """Charge a running request's client for what was computed since the last time."""
        charged, prompt_len = request.num_charged, request.prompt_len
        computed = int(self.slots.computed[request.slot])
        num_prompt = min(computed, prompt_len) - min(charged, prompt_len)
        shares.charge(request.add.client, num_prompt, computed - charged - num_prompt)
        request.num_charged = computed

    def _admit(self, budget: StepBudget, chunks: list[tuple[int, int]]) -> list[Request]:
        """Admit waiting requests up to the first that does not fit; appends their chunks."""
        admitted: list[Request] = []
        slots = self.slots
        if not self.waiting or budget.is_spent or not slots.free:
            return []
        for request in self._candidates():
            if budget.is_spent or not slots.free or not self._try_admit(request):
                break
            admitted.append(request)
            if request.is_loading:
                self._load(request)
                if request.is_loading:
                    continue
            num_missing = int(slots.num_missing(slots.order[-1:])[0])
            if q_len := self._take_chunk(request.slot, num_missing, budget):
                chunks.append((request.slot, q_len))
        for request in admitted:
            self.waiting.remove(request)
        return admitted

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether a running request computes a part of this one's prompt, which is then cached."""
        if not self.ledger.is_matchable(request):
            return False
        awaited = self._arriving.awaited(request, self.ledger.num_cached(request))
        return awaited is not None and self.ledger.stop_at(*awaited)

    def _try_admit(self, request: Request) -> bool:
        """Give a slot to a request if the pool can bear it."""
        node, pages, num_matched = self.ledger.match(request)
        if self._shortage(request, num_matched) > 0:
            self.tree.unlock(node)
            return False
        self.ledger.open(request, node, pages, num_matched)
        if self.ledger.is_matchable(request):
            self._arriving.note(request, num_matched)
        request.num_charged = num_matched
        self.limits.admitted(len(request.tokens) - num_matched)
        if request.num_cached < 0:
            request.num_cached = num_matched
            request.queue_s = max(self.ledger.now - request.add.arrival_s, 0.0)
            self._prompt_tokens += request.prompt_len
            self._cached_tokens += num_matched
        return True

    def _load(self, request: Request) -> int:
        """PageLedger.load, counted."""
        num_tokens = self.ledger.load(request)
        request.num_charged += num_tokens
        if not request.is_resumed:
            request.num_cached += num_tokens
            self._cached_tokens += num_tokens
        return num_tokens

    def _shortage(self, request: Request, num_matched: int) -> float:
        """Tokens that the pool lacks to bear this request beside the running ones, most likely."""
        slots, order = self.slots, self.slots.order
        if not len(order):
            return 0.0  # alone it fits: _add saw to it
        length = len(request.tokens)
        promised = self._reserve.tokens(slots.limit[order] - slots.length[order])
        owed = int(np.maximum(slots.length[order] - slots.capacity[order], 0).sum())
        free = self.ledger.num_available * self.page_size - owed - promised
        output = self._reserve.tokens(np.array([request.limit - length]))
        shortage = length - num_matched + output + self.page_size - free
        if self.windows is not None:
            shortage = max(shortage, self.windows.shortage(request))
        return shortage

    def undo(self, free_bytes: int) -> None:
        """The device had no memory for the newest step: nothing of it counts.

        It may have been launched in part, so all that the runner knows of its requests is told
        again with their next rows. Steps are smaller for a while: running requests that find no
        place pause. A step of one token cannot be smaller: its request fails.

        Args:
            free_bytes: of the device, for the error's text.
        """
        step = self._in_flight.pop()
        step.undo(self.slots)
        if self.snapshots is not None:
            self.snapshots.undo(step.saves)
        self._num_undone += 1
        self.limits.shrink(step.num_tokens)
        if step.num_tokens == 1:
            message = (
                f"the device has no memory for one token after {step.kv_lens[0] - 1} of this "
                f"request, with {free_bytes >> 20} MiB free"
            )
            self._refuse(step.requests[0], EngineError(message))

    def _retract_undone(self) -> None:
        """Begin again with what was in an undone step: what it did to their states stays done."""
        undone = self.slots.untold
        for request in reversed(self.slots.owners()):  # the oldest is to be first in the queue
            if request.slot in undone:
                self._retract(request)

    def _expire(self, request_id: int) -> None:
        """Refuse a request that has waited too long for its first turn."""
        message = f"the request waited longer than {self.waiting.timeout_s:g} s in the queue"
        for request in list(self._requests.get(request_id, ())):  # its siblings wait too
            if request.num_cached < 0:
                self._refuse(request, Overloaded(message, reason="queue_timeout"))

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Fact]:
        """Account for the oldest step in flight; returns what to tell, in order."""
        step = self._in_flight.popleft()
        if result.step != step.step:
            raise RuntimeError(f"the result of step {result.step} came for step {step.step}")
        self.ledger.now = now
        self.limits.committed()
        is_telling = step.num_tokens > len(step.slots) or step.step % COST_STEPS == 0
        if result.seconds and is_telling and not step.has_loads:
            self.limits.cost.observe(step.num_tokens, step.num_pairs, result.seconds)
        is_live = step.commit(self.slots, result)
        if self.windows is not None:
            self.windows.commit(step.slots[is_live])
        if self.snapshots is not None:
            self.snapshots.commit(step.saves)

        facts = self._facts
        new_fact = tuple.__new__  # as Tokens(...), in a third of the time; it wants every field
        num_generated = 0
        finite = result.is_finite.tolist()
        sampled = result.tokens.tolist()
        samples = step.samples.tolist()
        rows = zip(step.requests, sampled, samples, finite, strict=True)
        for row, (request, token, is_sampled, is_finite) in enumerate(rows):
            if request.finish_reason is not None:
                continue
            if not is_finite:
                error = EngineError("the model gave no finite value for this request")
                self._refuse(request, error)
                continue
            if not request.is_published:
                self._commit_prompt(request, step, row, result)
            if not is_sampled:
                continue
            reason: FinishReason | None = None
            tokens = request.tokens
            tokens.append(token)
            if token in request.stop_token_ids or len(tokens) >= request.limit:
                reason = request.end_at(token)
            num_generated += 1
            logprobs = prompt_logprobs = None
            if request.wants_logprobs:
                logprobs, prompt_logprobs = logprobs_of_row(request, result, row)
            facts.append(
                new_fact(
                    Tokens,
                    (
                        request.request_id,
                        request.choice,
                        (token,),
                        logprobs,
                        reason,
                        token if reason == "stop" else None,
                        request.num_cached,
                        prompt_logprobs,
                        request.queue_s,
                    ),
                )
            )
            if not request.slot:
                self.waiting.num_tokens += 1
            if reason is not None:
                self._end(request, reason)
        self._generated_tokens += num_generated
        return self.drain_facts()

    def _commit_prompt(
        self, request: Request, step: LaunchedStep, row: int, result: StepResult
    ) -> None:
        """What a row gives besides a token while its request's prompt is not published."""
        kv_len = int(step.kv_lens[row])
        if (start := step.score_starts.get(row)) is not None:
            prompt_logprobs_of_row(request, result, row, start, kv_len)
        if kv_len < request.prompt_len:
            return
        if request.slot:
            self._publish(request)
        if not request.max_tokens:
            prompt_logprobs = take_prompt_logprobs(request)
            self._facts.append(
                Tokens(
                    request.request_id,
                    request.choice,
                    (),
                    finish_reason="length",
                    num_cached=request.num_cached,
                    prompt_logprobs=prompt_logprobs,
                    queue_s=request.queue_s,
                )
            )
            self._end(request, "length")

    def _publish(self, request: Request) -> None:
        """Put a computed prompt into the tree, go over to the tree's pages, let siblings in."""
        self.ledger.publish(request)
        self._arriving.forget(request)
        self.waiting.add(self._siblings.pop(request.request_id, []), front=True)

    # ---- ends --------------------------------------------------------------------------------

    def _refuse(self, request: Request, error: StokerError) -> None:
        """End one choice with an error. Nothing of it since its last publish is cached."""
        self._facts.append(Refused(request.request_id, error, request.choice))
        self._end(request, "error", keep_prefix=False)

    def _end(self, request: Request, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """End a request in whatever state it is."""
        request.finish_reason = reason
        if self._shares is not None:
            self._shares.leave(request.add.client)
        request_id = request.request_id
        choices = self._requests[request_id]
        choices.remove(request)
        if not choices:
            del self._requests[request_id]
        siblings = self._siblings.get(request_id, [])
        if request in siblings:
            siblings.remove(request)
        else:
            if request.slot:
                self._release(request, keep_prefix=keep_prefix)
            else:
                self.waiting.remove(request)
                if self.tiers is not None:
                    self.tiers.cancel(request.prefetch)
            if siblings:  # it was to compute the prompt: the next one does
                self.waiting.add([siblings.pop(0)], front=True)
        if not siblings:
            self._siblings.pop(request_id, None)

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        """Take slot and pages from a running request; its committed prefix stays cached."""
        if self._shares is not None:
            self._charge(request, self._shares)
        self.ledger.close(request, keep_prefix=keep_prefix)
        self._arriving.forget(request)

    # ---- figures and checks ------------------------------------------------------------------

    def stats(self, **others: Any) -> Stats:
        """Figures of now, and counters since the start; those of time are the caller's."""
        return Stats(
            num_running=len(self.slots.order),
            num_waiting=len(self.waiting) + sum(map(len, self._siblings.values())),
            num_waiting_tokens=self.waiting.num_tokens,
            num_pages=self.pool.capacity,
            num_free_pages=self.pool.num_free,
            num_cached_pages=self.tree.num_evictable + self.tree.num_protected,
            received=self._num_received,
            steps=self._num_steps,
            undone_steps=self._num_undone,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            retractions=self._retractions,
            preemptions=self._preemptions,
            num_tree_nodes=self.tree.num_nodes,
            num_locked_pages=self.tree.num_protected,
            evicted_pages=self.tree.num_evicted,
            batch_tokens=self._batch_tokens,
            tiers=NO_TIERS if self.tiers is None else self.tiers.stats(),
            **others,
        )

    def check(self) -> None:
        """Raise AssertionError when pages, locks, slots or counts do not agree."""
        check_ledger(self)

    def check_queue(self) -> None:
        """Raise AssertionError when the queue's counts do not agree."""
        assert all(request.slot == 0 for request in self.waiting), "a waiting request has a slot"
        waiting = sum(len(request.tokens) for request in self.waiting)
        assert waiting == self.waiting.num_tokens, (
            f"{waiting} tokens wait, counted {self.waiting.num_tokens}"
        )
        num_running, num_waiting = len(self.slots.order), len(self.waiting)
        num_siblings = sum(map(len, self._siblings.values()))
        alive = sum(map(len, self._requests.values()))
        assert alive == num_running + num_waiting + num_siblings, (
            f"{alive} requests, of which {num_running} run, {num_waiting} wait and "
            f"{num_siblings} are siblings"
        )
