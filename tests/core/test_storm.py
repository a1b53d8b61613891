"""Everything at once: random events through the core with `check` after each.

Requests of all kinds come and are aborted, wait too long, lack finite logits; steps end in time or
find no memory; pages travel between the tiers late, out of order, or not at all, or requests have
recurrent states whose snapshots come and go, or windows whose pages do; under every queue policy
and every rule of eviction. Each story ends with all answers as they are without any of this.

STOKER_STORM_EVENTS sets how many events (100000 take a minute or two).
"""

import hashlib
import importlib.util
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.engine.api.messages import Abort, Flush
from stoker.engine.core import arriving, shared_prefix
from stoker.engine.core.eviction import POLICIES as EVICTION
from stoker.engine.core.eviction import tlru
from stoker.engine.core.fairness import FairShares
from stoker.engine.core.policy import POLICIES

EVENTS = int(os.environ.get("STOKER_STORM_EVENTS", "10000"))
EVENTS_PER_STORY = 500

PATH = Path(__file__).parents[1] / "tiers/conftest.py"
spec = importlib.util.spec_from_file_location("storm_tiers", PATH)
tiers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiers)


class Storm:
    """An engine whose steps may find no memory, and that keeps a digest of all it does."""

    def __init__(self, *, queue_policy, num_bad_steps, **kw):
        super().__init__(**kw)
        self.scheduler.waiting.policy = POLICIES[queue_policy]
        self.num_bad_steps = num_bad_steps
        self.digest = hashlib.blake2b(digest_size=16)

    def step(self) -> None:
        self.now += self.rng.random()
        plan = self.scheduler.plan(self.now)
        self._check()
        self.obey()
        if plan is not None:
            for part in (plan.slots, plan.kv_lens, plan.tokens, plan.page_ids):
                self.digest.update(part.tobytes())
            if self.num_bad_steps and self.rng.random() < 0.1:
                self.num_bad_steps -= 1
                if self.rng.random() < 0.5:  # a part of it has run
                    self.device.launch(plan)
                self.scheduler.undo(1 << 20)
                self.num_events += 1
                self._check()
                plan = None
            else:
                self.plans.append(plan)
                self.results.append(self.launch(plan))
        if self.results and (plan is None or not self.overlap or len(self.results) > 1):
            self.take(self.scheduler.commit(self.results.popleft(), self.now))
            self.num_events += 1
            self._check()
        self.take(self.scheduler.drain_facts())
        for _ in range(len(self.outstanding)):
            if self.rng.random() >= self.lateness:
                self.end_one()

    def take(self, facts) -> None:
        self.digest.update(repr(facts).encode())
        super().take(fact for fact in facts if not isinstance(fact, tiers.core.CacheEvent))


class TieredStorm(Storm, tiers.TieredEngine):
    """With tiers below the device."""


class UntieredStorm(Storm, tiers.core.Engine):
    """Without tiers: with recurrent states, or with windows."""

    outstanding = ()

    def __init__(self, *, seed, **kw):
        self.rng, self.num_events = random.Random(seed), 0
        super().__init__(**kw)

    def obey(self) -> None:
        """There is nobody to give orders."""


def engine_of(rng: random.Random) -> Storm:
    page_size = rng.choice([1, 1, 4, 8, 16])
    pool_tokens = rng.choice([48, 64, 96, 128])
    draw = rng.random()
    if draw < 0.3:
        kind = UntieredStorm
        below = tiers.core.random_windows(rng, page_size)
        below["use_radix"] = rng.random() < 0.9
    elif draw < 0.6:
        kind = UntieredStorm
        below = tiers.core.random_snapshots(rng)
        below["use_radix"] = rng.random() < 0.9
    else:
        kind = TieredStorm
        below = {
            "policy": rng.choice(["write-through", "write-through-selective", "write-back"]),
            "num_slots": rng.choice([2, 16, 200]),
            "lateness": rng.choice([0.0, 0.3, 0.9]),
            "failures": rng.choice([0.0, 0.1, 0.5]),
            "prefetch_s": rng.choice([1.0, 5.0, 50.0]),
            "max_load_pages": rng.choice([1, 4, 64]),
            "max_saving": rng.choice([1, 8, 64]),
        }
    return kind(
        seed=rng.randrange(10**6),
        overlap=rng.random() < 0.6,
        page_size=page_size,
        num_pages=pool_tokens // page_size + 1,
        max_running=rng.choice([1, 4, 8]),
        max_step_tokens=rng.choice([2, 8, 32]),
        conservativeness=rng.choice([0.1, 0.1, 1.0]),
        queue_policy=rng.choice(sorted(POLICIES)),
        eviction=rng.choice([*EVICTION.values(), tlru(8, 4, page_size)]),
        preemption_gap=rng.choice([None, None, 1, 3]),
        shares=FairShares({"a": 2.0}) if rng.random() < 0.4 else None,
        queue_timeout_s=rng.choice([None, None, 4.0, 20.0]),
        tells_cache=rng.random() < 0.3,
        num_bad_steps=rng.choice([0, 0, 3, 50]),
        **below,
    )


def story(seed: int, num_events: int = EVENTS_PER_STORY) -> Storm:
    """Random events until there were so many, then until all is served."""
    rng = random.Random(seed)
    engine = engine_of(rng)
    scheduler, page_size = engine.scheduler, engine.scheduler.page_size
    vocab = tiers.core.VOCAB
    room = min(scheduler.pool.capacity * page_size + 1, 128)
    trunks = [[rng.randrange(vocab) for _ in range(60)] for _ in range(3)]
    while engine.num_events < num_events:
        action = rng.random()
        if action < 0.15:
            prompt = rng.choice(trunks)[: rng.randrange(rng.choice([6, 61]))]
            prompt = prompt + [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
            prompt = prompt[: room - 1]
            add = engine.add(
                prompt,
                max_tokens=min(rng.choice([0, 1, 20, 40, 60]), room - len(prompt)),
                n=rng.choice([1, 1, 1, 3]),
                stop=rng.sample(range(vocab), rng.choice([0, 0, 2])),
                min_tokens=rng.choice([0, 0, 3]),
                namespace=rng.choice([0, 0, 1]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                grammar=rng.choice([None, 0]),
                priority=rng.choice([0, 0, 3, -1]),
                client=rng.choice("abc"),
                pin=rng.choice([0, 0, 0, 1]),
            )
            if rng.random() < 0.03:
                engine.device.nan_seeds.add(add.seed)
        elif action < 0.2 and engine.adds:
            latest = list(engine.adds)[-20:]
            scheduler.handle(Abort(rng.choice(latest), rng.choice([None, 0, 1])))
        elif action < 0.205:
            scheduler.handle(Flush(0))
        else:
            engine.step()
            continue
        engine.num_events += 1
        engine._check()
    engine.run(20_000)
    engine.assert_outputs()
    engine.assert_drained()
    return engine


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    """Contexts are short here: 8 common tokens are told to the device, and waited for."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", 8)
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)


@pytest.mark.timeout(1200)
def test_storm():
    began = time.monotonic()
    num_events = seed = 0
    names = ("retractions", "preemptions", "evicted_pages", "undone_steps", "cached_tokens")
    totals = dict.fromkeys((*names, "restores", "saves", "windows"), 0)
    reasons: set[str] = set()
    while num_events < EVENTS:
        engine = story(seed)
        num_events += engine.num_events
        stats = engine.scheduler.stats()
        for name in names:
            totals[name] += getattr(stats, name)
        for plan in engine.plans:
            totals["restores"] += plan.state_restores.shape[1]
            totals["saves"] += plan.state_saves.shape[1]
            totals["windows"] += np.count_nonzero(plan.window_page_ids)
        reasons |= {" ".join(str(reason).split()[:4]) for reason in engine.reasons.values()}
        seed += 1
    print(f"\n{num_events} events in {seed} stories, {time.monotonic() - began:.1f} s: {totals}")
    assert all(totals.values()), "a path that no story took"
    ends = {"stop", "length", "the model gave no", "the request waited longer"}
    assert ends <= reasons, "an end that no story had"


def test_the_same_seed_gives_the_same_story():
    digests = [[story(seed).digest.hexdigest() for seed in range(3)] for _ in range(2)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
