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
is never cached.

Runs on: any (pure).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

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
    TokenLogprob,
    Tokens,
)
from .budget import StepBudget, StepCost
from .pages import PagePool
from .plan import FROM_DEVICE, Admission, Logprobs, StepPlan, StepResult
from .policy import Policy, fcfs
from .radix import Node, RadixTree
from .request import Request

# Admission reserves (tokens still to generate, at most MAX_RESERVED) * ratio for each request. The
# ratio falls while decoding goes well, since most requests stop early; constants as in SGLang.
MAX_RESERVED = 4096
START_RATIO = 0.7
FLOOR_SHARE = 0.14
DECAY_STEPS = 600
STEPS_AFTER_RETRACTION = 20

FULL_BACKLOG = 32768  # waiting tokens, uncached as it seems, at which steps are stretched most
COST_STEPS = 16  # of pure decode steps one in so many is learnt from; of all others, each

MIN_SHARED = 256  # tokens that decode rows must share to be told to the runner

EXPIRY_INTERVAL_S = 0.1  # how often the queue is searched for requests that waited too long
STEPS_UNTIL_LARGER = 64  # after a step that ran out of memory, until twice as much is tried


@dataclass(slots=True)
class _Step:
    """A launched step, as far as its commit needs it; arrays are [rows]."""

    step: int
    slots: np.ndarray
    serials: np.ndarray
    requests: list[Request]
    q_lens: np.ndarray
    kv_lens: np.ndarray
    samples: np.ndarray
    num_tokens: int
    num_pairs: float
    score_starts: dict[int, int]  # row to the position of its first new token
    told: set[int]  # slots of which the runner learns something, beside the rows'


class Scheduler:
    """The state machine. Time is an argument; it has no thread, no clock and no device.

    Args:
        num_pages: pages of the KV pool, the reserved page 0 included.
        page_size: tokens a page.
        max_running: requests that are computed at once (slots 1 to max_running).
        max_step_tokens: new tokens a step; running streams come first, chunks fill the rest.
        max_model_len: longest prompt plus output, in tokens.
        use_radix: whether prefixes are cached.
        conservativeness: above 1 admits fewer requests, so that fewer are retracted.
        policy: the order in which waiting requests are tried.
        max_step_s: while streams run, chunks are cut so that a step takes no longer than this.
        backlog_stretch: how many times max_step_s a step may take when many requests wait: then
            they lose more by short chunks than the running streams gain.
        prefill_decode_interval: while streams run, so many steps without chunks after each with.
        cost: predicts a step's time; learns from the steps that it is told of.
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
        policy: Policy = fcfs,
        max_step_s: float | None = None,
        backlog_stretch: float = 1.0,
        prefill_decode_interval: int = 0,
        cost: StepCost | None = None,
        queue_timeout_s: float | None = None,
    ):
        self.page_size = page_size
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.use_radix = use_radix
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self.max_step_s = max_step_s
        self.backlog_stretch = backlog_stretch
        self.prefill_decode_interval = prefill_decode_interval
        self.cost = cost or StepCost()
        self.queue_timeout_s = queue_timeout_s
        self._policy = policy
        self._max_ratio = min(START_RATIO * conservativeness, 1.0)
        self._min_ratio = self._max_ratio * FLOOR_SHARE
        self._ratio = self._max_ratio
        self._now = 0.0

        self._requests: dict[int, list[Request]] = {}  # unfinished choices by request id
        self._waiting: deque[Request] = deque()
        self._siblings: dict[int, list[Request]] = {}  # choices that wait for choice 0's prompt
        self._in_flight: deque[_Step] = deque()
        self._facts: list[Fact] = []

        # By slot. The block table is the host's mirror of the device's; `zeros` touches no memory
        # before it is used.
        n = max_running + 1
        self._owners: list[Request | None] = [None] * n
        self._free_slots = list(range(max_running, 0, -1))
        # Running slots in order of admission; intp, by which numpy indexes fastest.
        self._order = np.empty(0, np.intp)
        self._table = np.zeros((n, -(-max_model_len // page_size)), np.int32)
        self._serial = np.zeros(n, np.int64)  # of the admission; 0 for nobody
        self._committed = np.zeros(n, np.int32)
        self._computed = np.zeros(n, np.int32)
        self._length = np.zeros(n, np.int32)
        self._pending = np.zeros(n, np.int32)
        self._capacity = np.zeros(n, np.int32)  # tokens that its pages hold
        self._last_token = np.zeros(n, np.int32)
        self._limit = np.zeros(n, np.int32)  # length at which it ends
        self._compute_limit = np.zeros(n, np.int32)  # the last token's KV is not needed
        self._generates = np.zeros(n, np.bool_)  # False where only the prompt is computed
        self._is_constrained = np.zeros(n, np.bool_)
        self._num_constrained = 0
        self._dirty: dict[int, int] = {}  # slot to the first table index the device must learn
        self._untold: set[int] = set()  # slots of which the runner must learn all again

        # What a step may hold for now: less than max_step_tokens after one ran out of memory.
        self._step_tokens = max_step_tokens
        self._steps_until_larger = 0
        self._next_expiry_s = math.inf  # before it nobody has waited too long

        # The groups of the last step, and what they were computed from.
        self._shared_groups: list[tuple[np.ndarray, int]] = []
        self._shared_of: tuple[int, np.ndarray] = (-1, self._order)
        self._num_moves = 0  # times that a request's node changed

        self._mean_new_tokens = 0.0  # that a request has to compute, a moving mean
        self._num_admissions = 0
        self._num_received = 0
        self._num_undone = 0
        self._num_waiting_tokens = 0
        self._num_steps = 0
        self._last_chunk_step = -(2**31)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._retractions = 0
        self._batch_tokens = 0

    # ---- messages ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a plan, a commit or a drain of facts is due."""
        return bool(len(self._order) or self._waiting or self._in_flight or self._facts)

    def handle(self, message: Message) -> None:
        """Take a message in. What it gives to tell comes with the next commit or drain_facts."""
        match message:
            case Add():
                self._num_received += 1
                self._add(message)
            case Abort(request_id, choice):
                for request in list(self._requests.get(request_id, ())):
                    if choice is None or request.choice == choice:
                        self._end(request, "abort")
            case Flush(reply_id):
                self.pool.release(self.tree.flush())
                num_kept = self.tree.num_protected * self.page_size
                self._facts.append(Flushed(reply_id, num_kept))
            case _:
                raise TypeError(f"not for the scheduler: {message!r}")

    def drain_facts(self) -> list[Fact]:
        """What there is to tell now, without a step."""
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
        self._enqueue([first])
        if rest and self.use_radix:
            self._siblings[add.request_id] = rest
        else:
            self._enqueue(rest)

    def _enqueue(self, requests: list[Request], *, front: bool = False) -> None:
        if front:
            self._waiting.extendleft(reversed(requests))
        else:
            self._waiting.extend(requests)
        if self.queue_timeout_s is not None:
            for request in requests:
                due = request.add.arrival_s + self.queue_timeout_s
                self._next_expiry_s = min(self._next_expiry_s, due)
        self._num_waiting_tokens += sum(len(request.tokens) for request in requests)

    def _dequeue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting_tokens -= len(request.tokens)

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, to be launched at once; None when nothing can be computed.

        None with no step in flight means that nothing is left to do. At most one step may be in
        flight: RuntimeError otherwise. The returned plan counts as launched.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("two steps are in flight: commit the older one first")
        self._now = now
        if now >= self._next_expiry_s:
            self._expire()
        if not len(self._order) and not self._waiting:
            self._ratio = self._max_ratio
            return None
        if self._untold and self._in_flight:
            return None  # what the runner must learn again holds every token so far
        retractions = self._retractions
        while True:
            decode, new_pages = self._plan_decode()
            budget = self._budget(decode)
            chunks = self._plan_chunks(budget)
            if len(decode) or chunks or self._in_flight or not len(self._order):
                break
            self._make_way()
        admitted: list[Admission] = []
        if self._retractions == retractions:
            admitted = self._admit(budget, chunks)
            if len(decode):
                decay = (self._max_ratio - self._min_ratio) / DECAY_STEPS
                self._ratio = max(self._min_ratio, self._ratio - decay)
        if not len(decode) and not chunks:
            return None
        return self._launch(decode, chunks, admitted, new_pages)

    def _plan_decode(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Slots with one token to compute, and the block-table entries they need for it."""
        while True:
            order = self._order
            is_due = self._num_missing(order) == 1
            if self._num_constrained:  # a mask needs all tokens before its own
                is_due &= ~self._is_constrained[order] | (self._pending[order] == 0)
            decode = order[is_due][: self._step_tokens]
            short = decode[self._computed[decode] >= self._capacity[decode]]
            if len(short) <= self._num_available:
                break
            self._make_way()
        indices = self._capacity[short] // self.page_size
        pages = self._take(len(short))
        self._table[short, indices] = pages
        self._capacity[short] += self.page_size
        return decode, (short.astype(np.int32), indices, pages)

    def _budget(self, decode: np.ndarray) -> StepBudget:
        """What chunks may take of this step, beside the running streams' tokens."""
        num_tokens = self._step_tokens - len(decode)
        if not len(decode):
            return StepBudget(num_tokens, None, 0.0)
        if self._num_steps - self._last_chunk_step < self.prefill_decode_interval:
            num_tokens = 0
        if self.max_step_s is None or not self.cost.is_known:
            return StepBudget(num_tokens, None, 0.0)
        num_pairs = float(self._computed[decode].sum()) + len(decode)
        taken = self.cost.seconds(len(decode), num_pairs)
        backlog = min(len(self._waiting) * self._mean_new_tokens / FULL_BACKLOG, 1.0)
        limit = self.max_step_s * (1 + (self.backlog_stretch - 1) * backlog)
        return StepBudget(num_tokens, self.cost, limit - taken)

    def _plan_chunks(self, budget: StepBudget) -> list[tuple[int, int]]:
        """(slot, q_len) of running requests with more than a token to compute, oldest first."""
        chunks: list[tuple[int, int]] = []
        order = self._order
        missing = self._num_missing(order)
        behind = missing > 1
        for slot, num_missing in zip(order[behind].tolist(), missing[behind].tolist(), strict=True):
            context = int(self._computed[slot])
            q_len = self._grow(slot, budget.chunk(num_missing, context))
            if q_len == 0:
                break
            budget.spend(q_len, context)
            chunks.append((slot, q_len))
        return chunks

    def _num_missing(self, slots: np.ndarray) -> np.ndarray:
        """Tokens to compute, the pending one included."""
        target = np.minimum(self._length[slots], self._compute_limit[slots])
        return target - self._computed[slots]

    @property
    def _num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable

    def _take(self, n: int) -> np.ndarray:
        if n > self.pool.num_free:
            self.pool.release(self.tree.evict(n - self.pool.num_free))
        return self.pool.take(n)

    def _grow(self, slot: int, q_len: int) -> int:
        """Find pages for the next q_len tokens; returns how many of them have room."""
        computed = int(self._computed[slot])
        first = int(self._capacity[slot]) // self.page_size
        n = min(-(-(computed + q_len) // self.page_size) - first, self._num_available)
        if n > 0:
            self._table[slot, first : first + n] = self._take(n)
            self._capacity[slot] += n * self.page_size
            self._touch_table(slot, first)
        return min(q_len, int(self._capacity[slot]) - computed)

    def _touch_table(self, slot: int, index: int) -> None:
        self._dirty[slot] = min(index, self._dirty.get(slot, index))

    def _make_way(self) -> None:
        """Retract the running request that loses least; one that is alone fails."""
        running = [self._owner(slot) for slot in self._order.tolist()]
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
                int(self._length[r.slot]) - r.prompt_len,
                -r.prompt_len,
                -int(self._serial[r.slot]),
            ),
        )
        self._release(victim, keep_prefix=True)
        # A token of it that is still in flight is appended at commit, in the queue.
        self._enqueue([victim], front=True)
        self._retractions += 1
        survivors = [request for request in running if request is not victim]
        num_output = sum(int(self._length[r.slot]) - r.prompt_len for r in survivors)
        num_wanted = sum(request.max_tokens for request in survivors)
        expected = num_output + STEPS_AFTER_RETRACTION * len(survivors)
        self._ratio = min(1.0, expected / (num_wanted + 1))

    def _admit(self, budget: StepBudget, chunks: list[tuple[int, int]]) -> list[Admission]:
        """Admit waiting requests up to the first that does not fit; appends their chunks."""
        admitted: list[Request] = []
        for request in self._policy(self._waiting):
            if budget.is_spent or not self._free_slots or not self._try_admit(request):
                break
            admitted.append(request)
            slot = request.slot
            context = int(self._computed[slot])
            num_missing = int(self._num_missing(self._order[-1:])[0])
            if q_len := self._grow(slot, budget.chunk(num_missing, context)):
                budget.spend(q_len, context)
                chunks.append((slot, q_len))
        for request in admitted:
            self._dequeue(request)
        return [_admission(request) for request in admitted]

    def _try_admit(self, request: Request) -> bool:
        """Give a slot to a request if the pool can bear it."""
        length = len(request.tokens)
        limit = request.limit
        # One token must be left to compute, for its logits; prompt logprobs need all of them.
        is_matchable = self.use_radix and request.prompt_logprobs is None
        tokens = request.known_tokens(0, length - 1 if is_matchable else 0)
        node, pages, num_matched = self.tree.match(tokens, request.add.namespace, self._now)
        self.tree.lock(node)  # first, for the match itself shrinks what can be evicted
        if len(self._order):  # a request alone fits: _add saw to it
            order = self._order
            future = np.minimum(self._limit[order] - self._length[order], MAX_RESERVED).sum()
            owed = np.maximum(self._length[order] - self._capacity[order], 0).sum()
            free = self._num_available * self.page_size - owed - future * self._ratio
            wanted = length - num_matched + min(limit - length, MAX_RESERVED) * self._ratio
            if wanted + self.page_size > free:
                self.tree.unlock(node)
                return False
        slot = self._free_slots.pop()
        self._owners[slot] = request
        self._order = np.append(self._order, slot)
        self._num_admissions += 1
        self._serial[slot] = self._num_admissions
        self._table[slot, : len(pages)] = pages
        self._touch_table(slot, 0)
        self._committed[slot] = self._computed[slot] = self._capacity[slot] = num_matched
        self._length[slot] = length
        self._pending[slot] = 0
        self._last_token[slot] = request.tokens[-1]
        self._limit[slot] = limit
        self._compute_limit[slot] = max(request.prompt_len, limit - 1)
        self._generates[slot] = request.max_tokens > 0
        self._is_constrained[slot] = request.is_constrained
        self._num_constrained += request.is_constrained
        request.slot = slot
        self._settle(request, node, num_matched)
        request.is_published = False
        self._mean_new_tokens += 0.1 * (length - num_matched - self._mean_new_tokens)
        if request.num_cached < 0:
            request.num_cached = num_matched
            self._prompt_tokens += request.prompt_len
            self._cached_tokens += num_matched
        return True

    def _launch(
        self,
        decode: np.ndarray,
        chunks: list[tuple[int, int]],
        admitted: list[Admission],
        new_pages: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> StepPlan:
        """Write the plan down and count it as computed."""
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # stable: those of one token join the decodes
        slots = np.concatenate([decode, np.array([slot for slot, _ in chunks], np.intp)])
        q_lens = np.ones(len(slots), np.int32)
        prompt_logprobs = np.full(len(slots), -1, np.int32)
        tokens = [np.where(self._pending[decode] > 0, FROM_DEVICE, self._last_token[decode])]
        score_tokens: dict[int, np.ndarray] = {}
        score_starts: dict[int, int] = {}
        for row, (slot, q_len) in enumerate(chunks, len(decode)):
            request = self._owner(slot)
            start = int(self._computed[slot])
            q_lens[row] = q_len
            tokens.append(request.known_tokens(start, start + q_len))
            k = request.add.params.prompt_logprobs
            if k is not None and request.prompt_logprobs and start < request.prompt_len - 1:
                following = request.known_tokens(
                    start + 1, min(start + 1 + q_len, request.prompt_len)
                )
                score_tokens[row] = np.full(q_len, -1, np.int32)
                score_tokens[row][: len(following)] = following
                score_starts[row] = start
                prompt_logprobs[row] = k

        kv_lens = self._computed[slots] + q_lens
        samples = (kv_lens == self._length[slots]) & self._generates[slots]
        self._computed[slots] = kv_lens
        self._length[slots] += samples
        self._pending[slots] += samples

        told = {admission.slot for admission in admitted}
        if self._untold:
            again = self._untold.intersection(slots.tolist()) - told
            admitted = admitted + [_admission(self._owner(slot)) for slot in sorted(again)]
            self._dirty |= dict.fromkeys(again, 0)
            self._untold -= again | told
        told |= self._dirty.keys()
        entries: list[tuple[np.ndarray, ...]] = [new_pages]
        for slot, first in self._dirty.items():
            indices = np.arange(first, self._capacity[slot] // self.page_size, dtype=np.int32)
            entries.append((np.full_like(indices, slot), indices, self._table[slot, indices]))
        self._dirty.clear()
        page_slots, page_indices, page_ids = (
            np.concatenate(part) for part in zip(*entries, strict=True)
        )

        num_pairs = float((q_lens * (kv_lens - (q_lens - 1) / 2)).sum())
        self._num_steps += 1
        if chunks:
            self._last_chunk_step = self._num_steps
        plan = StepPlan(
            step=self._num_steps,
            slots=slots.astype(np.int32),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode_rows=len(decode) + sum(q_len == 1 for _, q_len in chunks),
            tokens=np.concatenate(tokens, dtype=np.int32),
            samples=samples,
            prompt_logprobs=prompt_logprobs,
            page_slots=page_slots,
            page_indices=page_indices,
            page_ids=page_ids,
            score_tokens=score_tokens,
            admitted=admitted,
            shared_groups=self._share(decode),
        )
        if self._num_constrained:
            masked = np.flatnonzero(samples & self._is_constrained[slots])
            plan.masked = masked.astype(np.int32)
        self._batch_tokens = plan.num_tokens
        requests = [self._owner(slot) for slot in slots.tolist()]
        self._in_flight.append(
            _Step(
                plan.step,
                slots,
                self._serial[slots],
                requests,
                q_lens,
                kv_lens,
                samples,
                plan.num_tokens,
                num_pairs,
                score_starts,
                told,
            )
        )
        return plan

    def undo(self, free_bytes: int) -> None:
        """The device had no memory for the newest step: nothing of it counts.

        It may have been launched in part, so all that the runner knows of its requests is told
        again with their next rows. Steps are smaller for a while: running requests that find no
        place pause. A step of one token cannot be smaller: its request fails.

        Args:
            free_bytes: of the device, for the error's text.
        """
        step = self._in_flight.pop()
        self._computed[step.slots] -= step.q_lens
        self._length[step.slots] -= step.samples
        self._pending[step.slots] -= step.samples
        self._untold |= step.told | set(step.slots.tolist())
        self._num_undone += 1
        self._step_tokens = max(1, step.num_tokens // 2)
        self._steps_until_larger = STEPS_UNTIL_LARGER
        if step.num_tokens == 1:
            message = (
                f"the device has no memory for one token after {step.kv_lens[0] - 1} of this "
                f"request, with {free_bytes >> 20} MiB free"
            )
            self._refuse(step.requests[0], EngineError(message))

    def _grow_steps(self) -> None:
        """Let steps be larger again, some time after one ran out of memory."""
        self._steps_until_larger -= 1
        if not self._steps_until_larger:
            self._step_tokens = min(2 * self._step_tokens, self.max_step_tokens)
            if self._step_tokens < self.max_step_tokens:
                self._steps_until_larger = STEPS_UNTIL_LARGER

    def _expire(self) -> None:
        """Refuse the requests that have waited too long for their first turn."""
        assert self.queue_timeout_s is not None
        limit, oldest = self.queue_timeout_s, math.inf
        late: list[int] = []
        for request in self._waiting:
            if request.num_cached < 0:  # never admitted
                if self._now - request.add.arrival_s >= limit:
                    late.append(request.request_id)
                else:
                    oldest = min(oldest, request.add.arrival_s)
        for request_id in late:
            for request in list(self._requests.get(request_id, ())):  # its siblings wait too
                if request.num_cached < 0:
                    self._refuse(request, Overloaded(f"the request waited longer than {limit:g} s"))
        self._next_expiry_s = max(oldest + limit, self._now + EXPIRY_INTERVAL_S)

    def _share(self, decode: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """Decode rows that begin with the same MIN_SHARED or more cached tokens, by group."""
        moves, slots = self._shared_of
        if moves == self._num_moves and np.array_equal(slots, decode):
            return self._shared_groups
        # A page in two tables means that all before it is shared too, so one column groups the
        # rows, and a bisection over columns finds how far a group goes.
        column = -(-MIN_SHARED // self.page_size) - 1
        rows = np.flatnonzero(self._capacity[decode] > column * self.page_size)
        pages = self._table[decode[rows], column] if len(rows) else rows
        _, group_of, sizes = np.unique(pages, return_inverse=True, return_counts=True)
        self._shared_groups = []
        for group in np.flatnonzero(sizes > 1).tolist():
            members = rows[group_of == group]
            num_pages = self._num_common_pages(decode[members], column + 1)
            self._shared_groups.append((members.astype(np.int32), num_pages * self.page_size))
        self._shared_of = self._num_moves, decode
        return self._shared_groups

    def _num_common_pages(self, slots: np.ndarray, known: int) -> int:
        """With how many equal pages the tables of slots begin; `known` of them are."""

        def differs(index: int) -> bool:
            pages = self._table[slots, index]
            return bool((pages != pages[0]).any())

        end = int(self._capacity[slots].min()) // self.page_size
        return bisect_left(range(end), True, lo=known, key=differs)

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Fact]:
        """Account for the oldest step in flight; returns what to tell, in order."""
        step = self._in_flight.popleft()
        if result.step != step.step:
            raise RuntimeError(f"the result of step {result.step} came for step {step.step}")
        self._now = now
        if self._steps_until_larger:
            self._grow_steps()
        if result.seconds and (step.num_tokens > len(step.slots) or step.step % COST_STEPS == 0):
            self.cost.observe(step.num_tokens, step.num_pairs, result.seconds)
        # Slots that still belong to whom they belonged at launch. The others' requests have ended,
        # or were retracted and wait: those still get their token.
        is_live = self._serial[step.slots] == step.serials
        self._committed[step.slots[is_live]] = step.kv_lens[is_live]
        is_new = is_live & step.samples
        slots = step.slots[is_new]
        self._pending[slots] -= 1
        self._last_token[slots] = result.tokens[is_new]

        facts = self._facts
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
            token_ids: tuple[int, ...] = (token,)
            reason = request.append(token)
            if row in result.forced and reason is None:
                reason, token_ids = self._force(request, token, result.forced[row])
            num_generated += len(token_ids)
            logprobs = prompt_logprobs = None
            if request.wants_logprobs:
                logprobs, prompt_logprobs = _logprobs_of(request, result, row)
            facts.append(
                Tokens(
                    request.request_id,
                    request.choice,
                    token_ids,
                    logprobs,
                    reason,
                    token_ids[-1] if reason == "stop" else None,
                    request.num_cached,
                    prompt_logprobs,
                )
            )
            if not request.slot:
                self._num_waiting_tokens += len(token_ids)
            if reason is not None:
                self._end(request, reason)
        self._generated_tokens += num_generated
        return self.drain_facts()

    def _force(
        self, request: Request, token: int, forced: tuple[int, ...]
    ) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Append what a grammar forces behind a token, up to the request's end."""
        reason: FinishReason | None = None
        token_ids = [token]
        for each in forced:
            token_ids.append(each)
            reason = request.append(each)
            if reason is not None:
                break
        if slot := request.slot:
            self._length[slot] = len(request.tokens)
            self._last_token[slot] = token_ids[-1]
        return reason, tuple(token_ids)

    def _commit_prompt(self, request: Request, step: _Step, row: int, result: StepResult) -> None:
        """What a row gives besides a token while its request's prompt is not published."""
        start = step.score_starts.get(row)
        if start is not None and request.prompt_logprobs is not None:
            k = request.add.params.prompt_logprobs or 0
            scores = result.prompt_logprobs[row]
            end = min(int(step.kv_lens[row]), request.prompt_len - 1)
            request.prompt_logprobs[start + 1 : end + 1] = [
                _token_logprob(scores, i, k) for i in range(end - start)
            ]
        if step.kv_lens[row] < request.prompt_len:
            return
        if request.slot:
            self._publish(request)
        if not request.max_tokens:
            prompt_logprobs = _take_prompt_logprobs(request)
            self._facts.append(
                Tokens(
                    request.request_id,
                    request.choice,
                    (),
                    finish_reason="length",
                    num_cached=request.num_cached,
                    prompt_logprobs=prompt_logprobs,
                )
            )
            self._end(request, "length")

    def _publish(self, request: Request) -> None:
        """Put a computed prompt into the tree, go over to the tree's pages, let siblings in."""
        request.is_published = True
        end = request.prompt_len // self.page_size * self.page_size
        if self.use_radix and end > request.num_shared:
            slot = request.slot
            node, canonical, num_present = self.tree.insert(
                request.known_tokens(0, end), self._table[slot], request.add.namespace, self._now
            )
            first, last = request.num_shared // self.page_size, num_present // self.page_size
            if last > first:
                self.pool.release(self._table[slot, first:last])
                self._table[slot, first:last] = canonical[first:last]
                self._touch_table(slot, first)
            self.tree.lock(node)
            self._unlock(request)
            self._settle(request, node, end)
        self._enqueue(self._siblings.pop(request.request_id, []), front=True)

    # ---- ends --------------------------------------------------------------------------------

    def _refuse(self, request: Request, error: StokerError) -> None:
        """End one choice with an error. Nothing of it since its last publish is cached."""
        self._facts.append(Refused(request.request_id, error, request.choice))
        self._end(request, "error", keep_prefix=False)

    def _end(self, request: Request, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """End a request in whatever state it is."""
        request.finish_reason = reason
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
                self._dequeue(request)
            if siblings:  # it was to compute the prompt: the next one does
                self._enqueue([siblings.pop(0)], front=True)
        if not siblings:
            self._siblings.pop(request_id, None)

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        """Take slot and pages from a running request; its committed prefix stays cached."""
        slot = request.slot
        size = self.page_size
        shared = request.num_shared
        pages = self._table[slot, : self._capacity[slot] // size]
        end = int(self._committed[slot]) // size * size
        if keep_prefix and self.use_radix and end > shared:
            _, _, num_present = self.tree.insert(
                request.known_tokens(0, end), pages, request.add.namespace, self._now
            )
            self.pool.release(pages[shared // size : num_present // size])
            self.pool.release(pages[end // size :])
        else:
            self.pool.release(pages[shared // size :])
        self._unlock(request)
        self._settle(request, None, 0)
        request.is_published = False
        request.slot = 0
        self._num_constrained -= request.is_constrained
        self._owners[slot] = None
        self._serial[slot] = 0
        self._dirty.pop(slot, None)
        self._untold.discard(slot)
        self._order = self._order[self._order != slot]
        self._free_slots.append(slot)

    def _settle(self, request: Request, node: Node | None, num_shared: int) -> None:
        request.node = node
        request.num_shared = num_shared
        self._num_moves += 1

    def _unlock(self, request: Request) -> None:
        assert request.node is not None
        self.tree.unlock(request.node)

    def _owner(self, slot: int) -> Request:
        request = self._owners[slot]
        assert request is not None
        return request

    # ---- figures and checks ------------------------------------------------------------------

    def stats(self) -> Stats:
        """Figures of now, and counters since the start."""
        return Stats(
            num_running=len(self._order),
            num_waiting=len(self._waiting) + sum(map(len, self._siblings.values())),
            num_waiting_tokens=self._num_waiting_tokens,
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
            evicted_pages=self.tree.num_evicted,
            batch_tokens=self._batch_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError when pages, locks, slots or counts do not agree."""
        size = self.page_size
        self.tree.check()
        placed = [("free", self.pool.free_pages())]
        placed += [("tree", node.pages) for node in self.tree.nodes()]
        num_locks: dict[int, int] = {}
        for slot in self._order.tolist():
            request = self._owner(slot)
            name = f"request {request.request_id}.{request.choice}"
            assert request.slot == slot, f"{name}: in slot {slot}, thinks {request.slot}"
            shared = request.num_shared // size
            pages = self._table[slot, : self._capacity[slot] // size]
            placed.append((name, pages[shared:]))
            path: list[np.ndarray] = []
            walk = request.node
            while walk is not None:
                path.append(walk.pages)
                num_locks[id(walk)] = num_locks.get(id(walk), 0) + 1
                walk = walk.parent
            assert np.array_equal(pages[:shared], np.concatenate(path[::-1])), (
                f"{name}: its first {shared} pages are not the tree's"
            )
            counts = [int(a[slot]) for a in (self._committed, self._computed, self._length)]
            assert counts == sorted(counts), f"{name}: committed, computed, length are {counts}"
            assert self._computed[slot] <= self._capacity[slot], f"{name}: no pages for its tokens"
            assert self._length[slot] - self._pending[slot] == len(request.tokens), (
                f"{name}: {len(request.tokens)} tokens, counted {self._length[slot]} with "
                f"{self._pending[slot]} pending"
            )
        for node in self.tree.nodes():
            held = num_locks.get(id(node), 0)
            assert node.lock_count == held, f"{node}: {node.lock_count} locks, requests hold {held}"
        num_owners = np.bincount(
            np.concatenate([pages for _, pages in placed]), minlength=self.pool.num_pages
        )
        num_owners[0] += 1  # reserved
        wrong = {
            page: [owner for owner, pages in placed if page in pages]
            for page in np.flatnonzero(num_owners != 1)[:10].tolist()
        }
        assert not wrong, f"pages that are not in exactly one place: {wrong}"
        slots = sorted(self._free_slots + self._order.tolist())
        assert slots == list(range(1, self.max_running + 1)), f"slots are {slots}"
        assert all(request.slot == 0 for request in self._waiting), "a waiting request has a slot"
        waiting = sum(len(request.tokens) for request in self._waiting)
        assert waiting == self._num_waiting_tokens, (
            f"{waiting} tokens wait, counted {self._num_waiting_tokens}"
        )
        siblings = sum(map(len, self._siblings.values()))
        alive = sum(map(len, self._requests.values()))
        assert alive == len(self._order) + len(self._waiting) + siblings, (
            f"{alive} requests, of which {len(self._order)} run, {len(self._waiting)} wait and "
            f"{siblings} are siblings"
        )


def _admission(request: Request) -> Admission:
    return Admission(
        slot=request.slot,
        params=request.add.params,
        tokens=request.known_tokens(0, len(request.tokens)),
        prompt_len=request.prompt_len,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        seed=request.seed,
        grammar=request.add.grammar,
    )


def _token_logprob(logprobs: Logprobs, i: int, k: int) -> TokenLogprob:
    return TokenLogprob(
        float(logprobs.chosen[i]),
        tuple(logprobs.top_ids[i, :k].tolist()),
        tuple(logprobs.top_values[i, :k].tolist()),
    )


def _logprobs_of(
    request: Request, result: StepResult, row: int
) -> tuple[tuple[TokenLogprob, ...] | None, tuple[TokenLogprob | None, ...] | None]:
    """The new token's log-probabilities, and the prompt's where they were not sent yet."""
    k = request.add.params.logprobs
    if k is None:
        return None, _take_prompt_logprobs(request)
    assert result.logprobs is not None
    return (_token_logprob(result.logprobs, row, k),), _take_prompt_logprobs(request)


def _take_prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...] | None:
    logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return None if logprobs is None else tuple(logprobs)
