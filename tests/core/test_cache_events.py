"""The stream of cache events tells exactly what the tree holds."""

import numpy as np
import pytest

from stoker.engine.api.messages import CacheEvent, Flush
from stoker.engine.core.eviction import POLICIES
from stoker.engine.core.page_keys import extend, root_key


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def overlap(request):
    return request.param


class Follower:
    """Knows the cache from events alone."""

    def __init__(self):
        self.tokens = {}  # key to its page's tokens

    def follow(self, events, page_size):
        for event in events:
            if event.kind == "removed":
                for key in event.keys:
                    del self.tokens[key]
                continue
            keys = []
            extend(keys, event.parent, event.tokens, page_size)
            assert tuple(keys) == event.keys and len(event.tokens) == len(keys) * page_size
            assert event.parent in self.tokens or event.parent == root_key(event.namespace)
            for i, key in enumerate(keys):
                assert key not in self.tokens
                self.tokens[key] = event.tokens[i * page_size : (i + 1) * page_size].tolist()

    def num_cached(self, prompt, namespace, page_size):
        keys = []
        extend(keys, root_key(namespace), np.array(prompt, np.int32), page_size)
        return next((i for i, key in enumerate(keys) if key not in self.tokens), len(keys))


def events_of(engine):
    events = [fact for fact in engine.facts if isinstance(fact, CacheEvent)]
    engine.facts = [fact for fact in engine.facts if not isinstance(fact, CacheEvent)]
    return events


def assert_equal(follower, engine):
    held = sum(len(node.pages) for node in engine.scheduler.tree.nodes())
    assert len(follower.tokens) == held
    size = engine.scheduler.page_size
    for node in engine.scheduler.tree.nodes():
        path, top = [], node
        while top.parent is not None:
            path.append(top.tokens)
            top = top.parent
        prompt = np.concatenate([np.empty(0, np.int32), *path[::-1]])
        assert follower.num_cached(prompt, top.key, size) * size == len(prompt)


def test_what_is_computed_is_stored_and_what_is_flushed_removed(make_engine, overlap):
    engine = make_engine(overlap=overlap, page_size=4, tells_cache=True)
    engine.add(range(10), max_tokens=3)
    engine.run()
    first, second = events_of(engine)
    assert first.kind == second.kind == "stored"
    assert first.parent == root_key(("ns0",)) and first.tokens.tolist() == [*range(8)]
    assert second.parent == first.keys[-1] and len(second.keys) == 1
    engine.add([*range(8), 40, 41, 42, 43], max_tokens=1)
    engine.run()
    (third,) = events_of(engine)
    assert third.parent == first.keys[-1] and third.tokens.tolist() == [40, 41, 42, 43]
    engine.scheduler.handle(Flush(1))
    removed = [fact for fact in engine.scheduler.drain_facts() if isinstance(fact, CacheEvent)]
    assert [event.kind for event in removed] == ["removed"]
    assert {*removed[0].keys} == {*first.keys, *second.keys, *third.keys}


def test_nothing_is_told_unless_asked(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(range(10), max_tokens=3)
    engine.run()
    assert not events_of(engine)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_follower_knows_the_cache_under_any_load(core, overlap, eviction):
    num_removed = 0
    for seed in range(12):
        engine = core.random_engine(
            seed, overlap=overlap, use_radix=True, tells_cache=True, eviction=POLICIES[eviction]
        )
        engine.run(5000)
        follower = Follower()
        events = events_of(engine)
        follower.follow(events, engine.scheduler.page_size)
        assert_equal(follower, engine)
        num_removed += sum(event.kind == "removed" for event in events)
    assert num_removed > 20
