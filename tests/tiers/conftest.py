"""The scheduler's test device, with host memory and a store below it that answer late and badly."""

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.engine.core.copy_orders import (
    DAMAGED,
    MISSING,
    Copied,
    Fetch,
    Find,
    Load,
    Put,
    Save,
)
from stoker.engine.core.tiers import Tiers

ROOT = Path(__file__).parents[2]


def load(path: str):
    """Another test folder's module."""
    spec = importlib.util.spec_from_file_location("tiers_" + Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


core = load("tests/core/conftest.py")
model = load("tests/runtime/conftest.py").tiny_model


class TieredEngine(core.Engine):
    """An engine with tiers. Orders are carried out as a device and a store's threads would.

    Saves and loads move data when they are taken, in order, as on a stream; all others when they
    end, which is at a random time and in random order. What must not be touched meanwhile is
    compared at the end.

    Args:
        lateness: chance that an outstanding order does not end in a step.
        failures: chance that a store has lost or damaged a page, or does not take it.
        store: key to content; outlives the engine, as a disk does.
    """

    def __init__(self, *, seed=0, num_slots=24, lateness=0.5, failures=0.1, store=None, **kw):
        self.tier_options = {
            name: kw.pop(name)
            for name in ("policy", "write_hits", "prefetch_s", "max_load_pages", "max_saving")
            if name in kw
        }
        page_size = kw.get("page_size", 1)
        fingerprint = kw.pop("fingerprint", b"model")
        self.tiers = Tiers(
            num_pages=kw.get("num_pages", 64),
            page_size=page_size,
            num_slots=num_slots,
            fingerprint=fingerprint,
            stores=("disk",),
            min_prefetch_tokens=1,
            **self.tier_options,
        )
        super().__init__(tiers=self.tiers, **kw)
        self.rng = random.Random(seed)
        self.lateness, self.failures = lateness, failures
        self.host = np.zeros((num_slots, page_size), np.uint64)
        self.store = {} if store is None else store
        self.truth = {}  # key to content
        self.outstanding = []  # orders, with what must not have changed when they end
        self.num_events = 0

    def step(self) -> None:
        """Like Engine.step, with the orders of a turn carried out before its launch."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.obey()
        if plan is not None:
            assert plan.num_tokens <= self.max_step_tokens
            self.plans.append(plan)
            self.results.append(self.device.launch(plan))
        self._check()
        if self.results and (plan is None or not self.overlap or len(self.results) > 1):
            self.take(self.scheduler.commit(self.results.popleft(), self.now))
            self._check()
        self.take(self.scheduler.drain_facts())
        for _ in range(len(self.outstanding)):
            if self.rng.random() >= self.lateness:
                self.end_one()
        self.num_events += 1

    def obey(self) -> None:
        kv = self.device.kv
        for order in self.tiers.take_orders():
            guard = None
            match order:
                case Save(pages=pages, slots=slots):
                    self.host[slots] = kv[pages]
                    guard = kv[pages].copy()
                    _, entries = self.tiers._in_flight[order.order_id]
                    for entry, content in zip(entries, guard, strict=True):
                        known = self.truth.setdefault(entry.key, content.tolist())
                        assert known == content.tolist(), "one key, two contents"
                case Load(slots=slots, pages=pages):
                    kv[pages] = self.host[slots]
                    guard = kv[pages].copy()
                case Fetch(slots=slots):
                    self.host[list(slots)] = 0xBAD  # half read
            self.outstanding.append((order, guard))

    def end_one(self) -> None:
        order, guard = self.outstanding.pop(self.rng.randrange(len(self.outstanding)))
        results = ()
        match order:
            case Save(slots=slots) | Load(slots=slots):
                assert np.array_equal(self.host[slots], guard), "a slot was used before its time"
            case Find(keys=keys):
                n = next((i for i, key in enumerate(keys) if key not in self.store), len(keys))
                if self.rng.random() < self.failures:
                    n = self.rng.randrange(len(keys) + 1)  # it is wrong, or gone since
                results = (n,)
            case Fetch(keys=keys, slots=slots):
                results = tuple(self._read(*pair) for pair in zip(keys, slots, strict=True))
            case Put(keys=keys, slots=slots):
                results = tuple(self._write(*pair) for pair in zip(keys, slots, strict=True))
        self.scheduler.handle(Copied(order.order_id, results))
        self.num_events += 1
        self._check()

    def _read(self, key: bytes, slot: int) -> int:
        if key not in self.store or self.rng.random() < self.failures:
            return self.rng.choice([MISSING, DAMAGED])
        self.host[slot] = self.store[key]
        return 0

    def _write(self, key: bytes, slot: int) -> int:
        assert self.host[slot].tolist() == self.truth[key], "a wrong page goes to the store"
        if self.rng.random() < self.failures:
            return 0
        self.store[key] = self.host[slot].copy()
        return 1

    def run(self, max_steps: int = 4000) -> None:
        """Until nothing is left to do, in the tiers neither."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.outstanding and not self.tiers.is_busy:
                assert not self.scheduler.waiting
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def cached(self) -> dict[str, int]:
        """Tokens by the tier that they came from."""
        return dict(self.tiers.stats().cached_tokens)


@pytest.fixture
def tiered():
    return SimpleNamespace(
        Engine=TieredEngine, random_engine=random_engine, VOCAB=core.VOCAB, ROOT=ROOT, load=load
    )


def random_engine(seed: int, *, num_actions: int = 30, **kw) -> TieredEngine:
    """A random load on an engine that is small enough to run out of everything."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 4, 8])
    pool_tokens = rng.choice([48, 64, 96])
    engine = TieredEngine(
        **{
            "seed": seed,
            "overlap": rng.random() < 0.6,
            "page_size": page_size,
            "num_pages": pool_tokens // page_size + 1,
            "num_slots": rng.choice([2, 16, 200]),
            "max_running": rng.choice([1, 3, 8]),
            "max_step_tokens": rng.choice([2, 8, 32]),
            "conservativeness": rng.choice([0.1, 1.0]),
            "policy": rng.choice(["write-through", "write-through-selective", "write-back"]),
            "lateness": rng.choice([0.0, 0.3, 0.9]),
            "failures": rng.choice([0.0, 0.1, 0.5]),
            "prefetch_s": rng.choice([1.0, 5.0, 50.0]),
            "max_load_pages": rng.choice([1, 4, 64]),
            "max_saving": rng.choice([1, 8, 64]),
        }
        | kw
    )
    trunk = [rng.randrange(core.VOCAB) for _ in range(40)]
    for _ in range(num_actions):
        action = rng.random()
        if action < 0.75:
            n = rng.randrange(1, 40)
            shared = trunk[: rng.choice([0, n // 2, n, n])]
            tokens = shared + [rng.randrange(core.VOCAB) for _ in range(n - len(shared))]
            namespace = rng.choice([0, 0, 1])
            ended = sorted(key for key in engine.outputs if key in engine.reasons)
            if ended and rng.random() < 0.5:  # a second turn
                key = rng.choice(ended)
                namespace = engine.adds[key[0]].params.top_k
                tokens = (engine.turn(key) + tokens[-2:])[:pool_tokens]
            engine.add(
                tokens,
                max_tokens=min(rng.choice([0, 1, 5, 20]), min(pool_tokens + 1, 128) - len(tokens)),
                n=rng.choice([1, 1, 1, 3]),
                namespace=namespace,
                prompt_logprobs=rng.choice([None, None, None, None, 1]),
            )
        elif action < 0.93 and engine.adds:
            engine.scheduler.handle(
                core.Abort(rng.choice(list(engine.adds)), rng.choice([None, 0]))
            )
        elif action < 0.95:
            engine.scheduler.handle(core.Flush(0))
        engine.num_events += 1
        for _ in range(rng.choice([0, 1, 2, 5, 20])):
            engine.step()
    return engine
