"""A deterministic device for the scheduler's tests, and a loop that drives both."""

import random
from array import array
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.engine.api.messages import Abort, Add, CacheEvent, Flush, Refused, Tokens  # noqa: F401 (for other files)
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.core.plan import FROM_DEVICE, Logprobs, StepResult
from stoker.engine.core.request import derive_seed
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.windows import pages_of_window

VOCAB = 50
ADD_FIELDS = (
    "client",
    "grammar",
    "pin",
    "priority",
)  # of Engine.add, beside the sampling parameters
MASK = 2**64 - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers."""
    h = 0x243F6A8885A308D3
    for value in values:
        h = ((h ^ (value & MASK)) * 0x9E3779B97F4A7C15) & MASK
        h ^= h >> 29
    return h


def sample(prefix_sum: int, seed: int, position: int) -> int:
    return mix(prefix_sum, seed, position) % VOCAB


def kv_of(tokens, namespace: int = 0) -> list[int]:
    """The KV of each position: a hash of namespace and all tokens up to it."""
    out, h = [], namespace
    for token in tokens:
        h = mix(h, token)
        out.append(h)
    return out


def expected_output(add: Add, choice: int, max_tokens: int | None = None) -> tuple[list[int], str]:
    """What a choice gives when it is alone in the world: tokens and finish reason."""
    tokens, output = list(add.prompt), []
    seed = derive_seed(add.seed, choice)
    kv = kv_of(tokens, add.params.top_k)
    total, h = sum(kv) & MASK, kv[-1]
    limit = add.max_tokens if max_tokens is None else max_tokens
    while len(output) < limit:
        token = sample(total, seed, len(tokens))
        tokens.append(token)
        output.append(token)
        h = mix(h, token)
        total = (total + h) & MASK
        if token in add.stop_token_ids and len(output) >= add.params.min_tokens:
            return output, "stop"
    return output, "length"


class Device:
    """Runs plans at launch, in order, as one stream would; results are handed out later.

    With states (num_snapshots) a row goes on from its slot's hash instead of its context's last
    one, and must find the same. With windows there is a second pool of KV, whose table may hold
    pages that are gone: a row reads of it what its new tokens see.

    A KV slot holds the hash of the tokens up to its position. A row reads the KV of its whole
    context through the device's block table, so a wrong page, a stale table or a page that was
    given away too early changes the sampled token.
    """

    def __init__(
        self,
        num_pages,
        page_size,
        max_running,
        max_model_len,
        num_snapshots=None,
        window=None,
        num_window_pages=0,
    ):
        self.page_size = page_size
        self.window = window
        self.window_kv = np.zeros((num_window_pages, page_size), np.uint64)
        self.window_table = np.zeros((max_running + 1, -(-max_model_len // page_size)), np.int32)
        self.states = None
        if num_snapshots is not None:
            self.states = np.full(max_running + 1 + num_snapshots, 0xBAD, np.uint64)
        self.kv = np.zeros((num_pages, page_size), np.uint64)
        self.table = np.zeros((max_running + 1, -(-max_model_len // page_size)), np.int32)
        self.last_token = np.full(max_running + 1, -7, np.int64)
        self.admissions = {}
        self.nan_seeds = set()  # requests whose logits are not finite
        self.computed = {}  # seed to the number of tokens computed for it

    def launch(self, plan) -> StepResult:
        rows = plan.num_rows
        assert rows and len(set(plan.slots.tolist())) == rows and 0 not in plan.slots
        assert (plan.q_lens[: plan.num_decode_rows] == 1).all()
        assert (plan.q_lens[plan.num_decode_rows :] > 1).all()
        assert plan.q_lens.sum() == plan.num_tokens
        for a in (plan.slots, plan.q_lens, plan.kv_lens, plan.tokens, plan.prompt_logprobs):
            assert a.dtype == np.int32
        assert plan.samples.dtype == np.bool_
        for admission in plan.admitted:
            self.admissions[admission.slot] = admission
            self.table[admission.slot] = 0
        assert (plan.page_ids > 0).all()
        self.table[plan.page_slots, plan.page_indices] = plan.page_ids
        if self.window is None:
            assert not len(plan.window_page_ids)
        else:
            assert len(plan.window_page_ids) == len(plan.page_ids)
            self.window_table[plan.page_slots, plan.page_indices] = plan.window_page_ids
        for members, length in plan.shared_groups:
            assert len(members) > 1 and members.max() < plan.num_decode_rows
            shared = self.table[plan.slots[members], : length // self.page_size]
            assert shared.size and (shared == shared[0]).all() and length % self.page_size == 0
            assert length < plan.kv_lens[members].min()
        self._copy_states(plan.state_restores, plan.state_saves, is_save=False)
        tokens = np.full(rows, -1, np.int32)
        finite = np.ones(rows, np.bool_)
        scores = {}
        masked = [
            row
            for row, slot in enumerate(plan.slots.tolist())
            if plan.samples[row] and self.admissions[slot].grammar is not None
        ]
        assert plan.masked.tolist() == masked and plan.masked.dtype == np.int32
        start = 0
        for row, slot in enumerate(plan.slots.tolist()):
            q_len, kv_len = int(plan.q_lens[row]), int(plan.kv_lens[row])
            new = plan.tokens[start : start + q_len].tolist()
            start += q_len
            admission = self.admissions[slot]
            self.computed[admission.seed] = self.computed.get(admission.seed, 0) + q_len
            first = kv_len - q_len
            assert row not in masked or FROM_DEVICE not in new, "its mask cannot be known yet"
            h = int(self._kv(slot, first)[-1]) if first else admission.params.top_k
            if first and self.states is not None:
                h = int(self.states[slot])
            if self.window is not None:
                seen = max(first - self.window + 1, 0)
                own = self._kv(slot, first, self.window_table, self.window_kv)[seen:]
                if not np.array_equal(own, self._kv(slot, first)[seen:]):
                    h = 0xBAD  # unlike what it gives alone
            for position, token in enumerate(new, first):
                if token == FROM_DEVICE:
                    token = int(self.last_token[slot])
                elif position < len(admission.tokens):
                    assert token == admission.tokens[position]
                h = mix(h, token)
                page = self.table[slot, position // self.page_size]
                assert page > 0, "writes to the reserved page"
                self.kv[page, position % self.page_size] = h
                if self.window is not None:
                    page = self.window_table[slot, position // self.page_size]
                    assert page > 0, "writes to the reserved window page"
                    self.window_kv[page, position % self.page_size] = h
            if self.states is not None:
                self.states[slot] = h
            if plan.samples[row]:
                total = int(self._kv(slot, kv_len).sum(dtype=np.uint64))
                tokens[row] = self.last_token[slot] = sample(total, admission.seed, kv_len)
            if admission.seed in self.nan_seeds:
                finite[row] = False
            if plan.prompt_logprobs[row] >= 0:
                scores[row] = logprobs_of(plan.score_tokens[row], int(plan.prompt_logprobs[row]))
        self._copy_states(plan.state_restores, plan.state_saves, is_save=True)
        logprobs = logprobs_of(tokens, 5)
        return StepResult(plan.step, tokens, finite, 0.0, logprobs, scores)

    def _copy_states(self, restores, saves, *, is_save: bool) -> None:
        for copies in (restores, saves):
            assert copies.dtype == np.int32 and len(copies) == 2
        sources, targets = saves if is_save else restores
        assert len(set(targets.tolist())) == len(targets)
        if len(targets):
            slots, snapshots = (sources, targets) if is_save else (targets, sources)
            assert 0 < slots.min() and slots.max() < len(self.table) <= snapshots.min()
            self.states[targets] = self.states[sources]

    def _kv(self, slot: int, n: int, table=None, kv=None) -> np.ndarray:
        table, kv = (self.table, self.kv) if table is None else (table, kv)
        pages = table[slot, : -(-n // self.page_size)]
        return kv[pages].reshape(-1)[:n]


def logprobs_of(tokens: np.ndarray, k: int) -> Logprobs:
    """Made-up log-probabilities that tell which token they belong to."""
    tops = np.stack([tokens + i for i in range(k)], 1) if k else np.zeros((len(tokens), 0), int)
    return Logprobs(-tokens.astype(np.float32), tops, -tops.astype(np.float32))


class Engine:
    """Scheduler and device in one loop, with or without a step in flight."""

    def __init__(
        self, *, overlap: bool, num_pages=64, page_size=1, max_running=8, check=True, **kw
    ):
        kw = {"max_step_tokens": 32, "max_model_len": 128, "num_snapshots": None} | kw
        self.scheduler = Scheduler(
            num_pages=num_pages, page_size=page_size, max_running=max_running, **kw
        )
        self.device = Device(
            num_pages,
            page_size,
            max_running,
            kw["max_model_len"],
            kw["num_snapshots"],
            kw.get("window"),
            kw.get("num_window_pages", 0),
        )
        self.max_step_tokens = kw["max_step_tokens"]
        self.overlap = overlap
        self.check = check
        self.results = deque()
        self.adds = {}
        self.facts = []
        self.outputs = {}  # (request_id, choice) to its tokens
        self.reasons = {}
        self.plans = []
        self.now = 0.0

    def add(self, prompt, *, max_tokens=8, request_id=None, stop=(), seed=None, n=1, **kw) -> Add:
        namespace = kw.pop("namespace", 0)
        own = {name: kw.pop(name) for name in ADD_FIELDS if name in kw}
        request_id = len(self.adds) + 1 if request_id is None else request_id
        add = Add(
            request_id=request_id,
            prompt=array("i", prompt),
            # The device knows a namespace as top_k, as an adapter would be known by its index.
            params=SamplingParams(n=n, top_k=namespace, **kw),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop),
            seed=1000 + request_id if seed is None else seed,
            arrival_s=self.now,
            namespace=(f"ns{namespace}",),
            **own,
        )
        self.adds[request_id] = add
        self.scheduler.handle(add)
        return add

    def turn(self, key: tuple[int, int]) -> list[int]:
        """Prompt and output of a choice, as the next turn of a conversation begins."""
        return list(self.adds[key[0]].prompt) + self.outputs[key]

    def step(self) -> None:
        """One turn of the GPU thread's loop."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert plan.num_tokens <= self.max_step_tokens
            self.plans.append(plan)
            self.results.append(self.launch(plan))
        else:
            waits = len(self.scheduler.slots.order) or self.scheduler.waiting
            assert self.results or not waits, "nothing planned, nothing in flight, work left"
        self._check()
        if self.results and (plan is None or not self.overlap or len(self.results) > 1):
            self.take(self.scheduler.commit(self.results.popleft(), self.now))
            self._check()
        self.take(self.scheduler.drain_facts())

    def launch(self, plan) -> StepResult:
        result = self.device.launch(plan)
        slots = self.scheduler.slots
        for slot in plan.slots.tolist():
            n = slots.num_pages(slot)
            assert np.array_equal(self.device.table[slot, :n], slots.table[slot, :n])
            assert np.array_equal(self.device.window_table[slot, :n], slots.window_table[slot, :n])
        return result

    def _check(self) -> None:
        if self.check:
            self.scheduler.check()

    def take(self, facts) -> None:
        for fact in facts:
            self.facts.append(fact)
            if isinstance(fact, Tokens):
                key = fact.request_id, fact.choice
                assert key not in self.reasons, "a fact after the last"
                self.outputs.setdefault(key, []).extend(fact.token_ids)
                if fact.finish_reason is not None:
                    self.reasons[key] = fact.finish_reason
            elif isinstance(fact, Refused):
                self.reasons[fact.request_id, fact.choice] = fact.error

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def serve(self, prompt, **options) -> int:
        """Run a request to its end; how many tokens of its prompt were cached."""
        request_id = self.add(prompt, **options).request_id
        self.run()
        self.assert_outputs()
        self.assert_drained()
        facts = [fact for fact in self.facts if getattr(fact, "request_id", 0) == request_id]
        return facts[-1].num_cached

    def assert_outputs(self) -> None:
        """Each choice gave what it gives alone; one without an end, the beginning of that."""
        for request_id, add in self.adds.items():
            for choice in range(add.params.n):
                key = request_id, choice
                output = self.outputs.get(key, [])
                reason = self.reasons.get(key)
                tokens, expected_reason = expected_output(add, choice)
                if isinstance(reason, str):
                    assert output == tokens, key
                    assert reason == expected_reason, key
                else:
                    assert output == tokens[: len(output)], key

    def assert_cache_is_true(self) -> None:
        """Every page of the tree holds the KV of its tokens, every snapshot the last of them."""
        for node in self.scheduler.tree.nodes():
            path, top = [], node
            while top.parent is not None:
                path.append(top.tokens)
                top = top.parent
            if path:
                namespace = int(top.key[0].removeprefix("ns"))
                expected = kv_of(np.concatenate(path[::-1]).tolist(), namespace)
                held = self.device.kv[node.pages].reshape(-1).tolist()
                assert held == expected[len(expected) - len(held) :], "a cached page is not true"
                if self.device.window is not None:
                    there = np.flatnonzero(node.resume)
                    own = self.device.window_kv[node.resume[there]]
                    assert np.array_equal(own, self.device.kv[node.pages[there]])
                elif node.resume is not None:
                    assert self.device.states[node.resume] == expected[-1], "a wrong snapshot"

    def assert_drained(self) -> None:
        """No page leaked: all are free or cached and unlocked."""
        scheduler = self.scheduler
        scheduler.check()
        assert scheduler.tree.num_protected == 0
        assert scheduler.pool.num_free + scheduler.tree.num_evictable == scheduler.pool.capacity
        self.assert_cache_is_true()
        assert not scheduler._requests and not scheduler._siblings and not scheduler.slots.dirty


class FairnessWatch:
    """Follows an engine's plans: who was admitted when, and whether in a fair order."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.num_plans = 0
        self.first_admitted = []  # request ids in order
        self.waits_again = set()  # admitted before, then retracted

    def look(self) -> None:
        """To be called after each step."""
        scheduler = self.engine.scheduler
        by_seed = {derive_seed(add.seed, 0): i for i, add in self.engine.adds.items()}
        running = {r.request_id for r in scheduler.slots.owners()}
        for plan in self.engine.plans[self.num_plans :]:
            # A request may be retracted and others admitted in later plans only.
            for admission in plan.admitted:
                request_id = by_seed[admission.seed]
                if request_id in self.first_admitted:
                    self.waits_again.discard(request_id)
                    continue
                assert not self.waits_again, f"{request_id} overtook {self.waits_again}"
                self.first_admitted.append(request_id)
        self.num_plans = len(self.engine.plans)
        ended = {request_id for request_id, _ in self.engine.reasons}
        self.waits_again |= set(self.first_admitted) - running
        self.waits_again -= ended
        assert self.first_admitted == sorted(self.first_admitted), "not first come, first served"


def random_engine(seed: int, **kw) -> Engine:
    """An engine under a random load that is small enough to run out of everything."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 4, 16])
    pool_tokens = rng.choice([48, 64, 96, 320])
    engine = Engine(
        **{
            "overlap": rng.random() < 0.6,
            "page_size": page_size,
            "num_pages": pool_tokens // page_size + 1,
            "max_running": rng.choice([1, 3, 8]),
            "max_step_tokens": rng.choice([2, 8, 32]),
            "conservativeness": rng.choice([0.1, 1.0]),
            "use_radix": rng.random() < 0.85,
        }
        | kw
    )
    trunk = [rng.randrange(VOCAB) for _ in range(48)]
    for _ in range(rng.randrange(5, 25)):
        action = rng.random()
        if action < 0.75:
            n = rng.randrange(1, 48)
            shared = trunk[: rng.choice([0, n // 2, n])]
            tokens = shared + [rng.randrange(VOCAB) for _ in range(n - len(shared))]
            namespace = rng.choice([0, 0, 1])
            ended = sorted(key for key in engine.outputs if key in engine.reasons)
            if ended and rng.random() < 0.6:  # a second turn
                key = rng.choice(ended)
                namespace = engine.adds[key[0]].params.top_k
                tokens = engine.turn(key) + tokens[-2:]
                tokens = tokens[: min(pool_tokens, 128)]
                n = len(tokens)
            room = min(pool_tokens + 1, 128) - n
            engine.add(
                tokens,
                max_tokens=min(rng.choice([0, 1, 5, 20, 40]), room),
                n=rng.choice([1, 1, 1, 3]),
                stop=rng.sample(range(VOCAB), rng.choice([0, 0, 2])),
                namespace=namespace,
                prompt_logprobs=rng.choice([None, None, None, 1]),
                grammar=rng.choice([None, 0]),
                priority=rng.choice([0, 0, 3, -1]),
                client=rng.choice("ab"),
                pin=rng.choice([0, 0, 0, 1]),
            )
        elif action < 0.9 and engine.adds:
            choice = rng.choice([None, None, 0, 1])
            engine.scheduler.handle(Abort(rng.choice(list(engine.adds)), choice))
        elif action < 0.93:
            engine.scheduler.handle(Flush(0))
        for _ in range(rng.choice([0, 1, 2, 5, 20])):
            engine.step()
    return engine


def run_random(seed: int, **kw) -> Engine:
    """A random load to its end, with everything checked."""
    engine = random_engine(seed, **kw)
    engine.run(5000)
    engine.assert_outputs()
    engine.assert_drained()
    return engine


def random_snapshots(rng: random.Random) -> dict[str, int]:
    """Options of an engine with recurrent states."""
    return {"num_snapshots": rng.choice([0, 1, 2, 5, 30]), "save_every": rng.choice([1, 4, 16])}


def random_windows(rng: random.Random, page_size: int) -> dict[str, int]:
    """Options of an engine whose layers with a window have a pool of their own."""
    window = rng.choice([1, 2, 5, 16, 30])
    num_pages = 1 + pages_of_window(window, page_size) + rng.choice([0, 1, 3, 10, 40])
    return {"window": window, "num_window_pages": num_pages}


def assert_caught(fault, load, num_loads: int, *others: type[Exception]) -> None:
    """One of the first loads fails, with such an error as `check` raises, or with one of others."""
    for seed in range(num_loads):
        try:
            load(seed)
        except (AssertionError, RuntimeError, ValueError, *others):
            return
    raise AssertionError(f"{fault.__name__} went unnoticed in {num_loads} loads")


@pytest.fixture(scope="session")
def core():
    """This file, which other test files cannot import."""
    return SimpleNamespace(
        Engine=Engine,
        FairnessWatch=FairnessWatch,
        Scheduler=Scheduler,
        VOCAB=VOCAB,
        assert_caught=assert_caught,
        expected_output=expected_output,
        random_engine=random_engine,
        random_snapshots=random_snapshots,
        random_windows=random_windows,
        run_random=run_random,
    )


@pytest.fixture
def make_engine():
    """Makes engines; after the test each is checked once more."""
    engines = []

    def make(**kw) -> Engine:
        engines.append(Engine(**kw))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.check()


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def engine_of(request, make_engine):
    """Makes engines with the OPTIONS of the test's file, but for those that are given."""

    def make(**options) -> Engine:
        return make_engine(overlap=request.param, **request.module.OPTIONS | options)

    return make
