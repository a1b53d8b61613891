"""Random loads: every choice gives what it gives alone, and no page is lost.

Shrinking takes minutes, so it is off: a failure shows the whole load.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stoker.engine.api.messages import Abort, Flush
from stoker.engine.core import arriving, eviction, policy, shared_prefix
from stoker.engine.core.fairness import FairShares

TRUNK_LEN = 40


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    """Contexts are short here: 8 common tokens are told to the device, and waited for."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", 8)
    monkeypatch.setattr(arriving, "MIN_AWAITED", 8)


def machine(core):
    class Load(RuleBasedStateMachine):
        @initialize(
            overlap=st.booleans(),
            page_size=st.sampled_from([1, 4, 16]),
            pool_tokens=st.sampled_from([48, 64, 128, 512]),
            max_running=st.sampled_from([1, 2, 8]),
            max_step_tokens=st.sampled_from([1, 5, 32]),
            use_radix=st.sampled_from([True, True, True, False]),
            conservativeness=st.sampled_from([0.1, 1.0, 3.0]),
            policy_name=st.sampled_from(sorted(policy.POLICIES)),
            eviction_name=st.sampled_from([*sorted(eviction.POLICIES), "tlru"]),
            preemption_gap=st.sampled_from([None, 1, 2]),
            is_fair=st.booleans(),
        )
        def begin(self, pool_tokens, page_size, policy_name, eviction_name, is_fair, **config):
            self.pool_tokens = pool_tokens
            rules = {**eviction.POLICIES, "tlru": eviction.tlru(8, 4, page_size)}
            self.engine = core.Engine(
                page_size=page_size,
                num_pages=pool_tokens // page_size + 1,
                policy=policy.POLICIES[policy_name],
                eviction=rules[eviction_name],
                shares=FairShares({"a": 2.0}) if is_fair else None,
                **config,
            )

        @rule(
            shared=st.integers(0, TRUNK_LEN),
            own=st.lists(st.integers(0, core.VOCAB - 1), min_size=1, max_size=8),
            max_tokens=st.integers(0, 40),
            min_tokens=st.sampled_from([0, 0, 3]),
            n=st.sampled_from([1, 1, 1, 2, 4]),
            stop=st.sets(st.integers(0, core.VOCAB - 1), max_size=2),
            namespace=st.integers(0, 1),
            prompt_logprobs=st.sampled_from([None, None, 2]),
            grammar=st.sampled_from([None, 0]),
            priority=st.integers(-1, 2),
            client=st.sampled_from("ab"),
            pin=st.integers(0, 1),
        )
        def add(self, shared, own, max_tokens, **params):
            self.send([i % core.VOCAB for i in range(shared)] + own, max_tokens, params)

        @precondition(lambda self: self.engine.outputs)
        @rule(data=st.data(), own=st.integers(0, core.VOCAB - 1), namespace=st.integers(0, 1))
        def follow_up(self, data, own, namespace):
            turn = self.engine.turn(data.draw(st.sampled_from(sorted(self.engine.outputs))))
            self.send([*turn, own], 5, {"namespace": namespace})

        def send(self, prompt, max_tokens, params):
            room = min(self.pool_tokens + 1, 128) - len(prompt)
            if room < max_tokens:
                max_tokens = max(room, 1)  # where there is no room at all it is refused
            self.engine.add(prompt, max_tokens=max_tokens, **params)

        @precondition(lambda self: self.engine.adds)
        @rule(data=st.data(), choice=st.sampled_from([None, 0, 1]))
        def abort(self, data, choice):
            request_id = data.draw(st.sampled_from(sorted(self.engine.adds)))
            self.engine.scheduler.handle(Abort(request_id, choice))
            self.engine.scheduler.check()

        @rule()
        def flush(self):
            self.engine.scheduler.handle(Flush(0))
            self.engine.scheduler.check()

        @rule(n=st.integers(1, 8))
        def step(self, n):
            for _ in range(n):
                self.engine.step()

        def teardown(self):
            if hasattr(self, "engine"):
                self.engine.run(8000)
                self.engine.assert_outputs()
                self.engine.assert_drained()

    return Load


def test_any_load(core):
    run_state_machine_as_test(
        machine(core),
        settings=settings(
            max_examples=50,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["alternating", "overlap"])
def test_random_loads(core, overlap):
    retractions = evicted = shared = 0
    for seed in range(30):
        engine = core.run_random(seed, overlap=overlap)
        stats = engine.scheduler.stats()
        shared += sum(len(plan.shared_groups) for plan in engine.plans)
        retractions += stats.retractions
        evicted += stats.evicted_pages
    assert (
        retractions > 0 and evicted > 0 and shared > 0
    )  # the loads are heavy enough to mean something
