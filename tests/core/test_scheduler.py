import itertools

import numpy as np
import pytest

from stoker.engine.api.errors import EngineError, RequestError
from stoker.engine.api.messages import Abort, Flush, Flushed, Refused, Shutdown, Tokens
from stoker.engine.core.plan import FROM_DEVICE, StepResult
from stoker.engine.core.policy import Policy
from stoker.engine.core.request import derive_seed


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def overlap(request):
    return request.param


def prompt(n, first=1):
    return [first + i % 40 for i in range(n)]


@pytest.fixture(scope="module")
def expected_output(core):
    return core.expected_output


def tokens_of(engine, request_id=1, choice=0):
    return engine.outputs.get((request_id, choice), [])


# ---- one request ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("use_radix", [True, False])
def test_one_request_gives_what_the_model_says(make_engine, overlap, page_size, use_radix):
    engine = make_engine(overlap=overlap, page_size=page_size, use_radix=use_radix)
    engine.add(prompt(50), max_tokens=10)
    engine.run()
    assert len(tokens_of(engine)) == 10 and engine.reasons[1, 0] == "length"
    engine.assert_outputs()
    engine.assert_drained()
    cached = engine.scheduler.stats().num_cached_pages
    assert cached == ((50 + 9) // page_size if use_radix else 0)


def test_the_prompt_is_cut_into_chunks_of_the_budget(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_step_tokens=16)
    engine.add(prompt(40), max_tokens=1)
    engine.run()
    assert [p.q_lens.tolist() for p in engine.plans] == [[16], [16], [8]]
    assert [p.samples.tolist() for p in engine.plans] == [[False], [False], [True]]
    assert [p.kv_lens.tolist() for p in engine.plans] == [[16], [32], [40]]
    assert [p.num_decode_rows for p in engine.plans] == [0, 0, 0]


def test_a_chunk_of_one_token_joins_the_decode_rows(make_engine):
    engine = make_engine(overlap=False, max_step_tokens=9)
    engine.add(prompt(5), max_tokens=5)
    engine.step()
    engine.add(prompt(30, 2), max_tokens=1)
    engine.add(prompt(1, 7), max_tokens=1)
    engine.run()
    engine.assert_outputs()
    # Decode, then 8 of the second prompt; at the end both short rows come before no chunk.
    assert engine.plans[1].q_lens.tolist() == [1, 8] and engine.plans[1].num_decode_rows == 1


def test_the_step_after_the_last_token_is_not_planned(make_engine):
    engine = make_engine(overlap=True)
    engine.add(prompt(4), max_tokens=3)
    engine.run()
    assert len(engine.plans) == 3  # the prompt and two decodes: the last token's KV is not computed


def test_overlap_feeds_the_token_from_the_device(make_engine):
    engine = make_engine(overlap=True)
    engine.add(prompt(4), max_tokens=3)
    engine.run()
    assert [p.tokens.tolist() for p in engine.plans[1:]] == [[FROM_DEVICE], [FROM_DEVICE]]


def test_without_overlap_the_tokens_are_known(make_engine):
    engine = make_engine(overlap=False)
    engine.add(prompt(4), max_tokens=3)
    engine.run()
    assert [p.tokens.tolist() for p in engine.plans[1:]] == [[t] for t in tokens_of(engine)[:2]]


def test_a_stop_token_ends_and_its_extra_step_is_dropped(make_engine, overlap):
    probe = make_engine(overlap=overlap)
    probe.add(prompt(6), max_tokens=12, seed=5)
    probe.run()
    output = tokens_of(probe)
    stop = next(token for token in output[3:] if token not in output[:3])
    engine = make_engine(overlap=overlap)
    engine.add(prompt(6), max_tokens=12, seed=5, stop=[stop])
    engine.run()
    end = output.index(stop) + 1
    assert tokens_of(engine) == output[:end]
    assert engine.facts[-1].finish_reason == "stop" and engine.facts[-1].stop_token_id == stop
    assert len(engine.plans) == end + overlap
    engine.assert_drained()


def test_min_tokens_outlives_a_stop_token(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(6), max_tokens=12, stop=range(50), min_tokens=4)
    engine.run()
    assert len(tokens_of(engine)) == 4 and engine.reasons[1, 0] == "stop"


def test_no_tokens_wanted(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(10), max_tokens=0, prompt_logprobs=2)
    engine.run()
    (fact,) = engine.facts
    assert fact.token_ids == () and fact.finish_reason == "length"
    assert len(fact.prompt_logprobs) == 10 and fact.prompt_logprobs[0] is None
    assert not engine.plans[0].samples.any()


def test_running_streams_come_first(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_step_tokens=8, num_pages=128)
    engine.add(prompt(4), max_tokens=20)
    engine.step()
    engine.add(prompt(60, 5), max_tokens=2)
    engine.run()
    mixed = [p for p in engine.plans if p.num_rows == 2]
    assert len(mixed) >= 8 and all(p.q_lens[0] == 1 for p in mixed)
    assert mixed[0].q_lens.tolist() == [1, 7]
    engine.assert_outputs()


def test_more_streams_than_the_budget_still_end(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_step_tokens=3, num_pages=200)
    for i in range(8):
        engine.add(prompt(3, i), max_tokens=6)
    engine.run()
    engine.assert_outputs()
    assert len(engine.reasons) == 8


# ---- admission -----------------------------------------------------------------------------


def test_admissions_tell_the_runner_all_it_needs(make_engine):
    engine = make_engine(overlap=False)
    add = engine.add(prompt(6), max_tokens=3, stop=[49, 48], seed=77)
    engine.step()
    (admission,) = engine.plans[0].admitted
    assert admission.tokens.tolist() == list(add.prompt) and admission.tokens.dtype == np.int32
    assert (admission.slot, admission.prompt_len, admission.seed) == (1, 6, 77)
    assert admission.stop_token_ids == (48, 49) and admission.params is add.params


def test_a_cached_prefix_comes_with_the_admission(make_engine, overlap):
    engine = make_engine(overlap=overlap, page_size=4)
    engine.add(prompt(18), max_tokens=1)
    engine.run()
    engine.add([*prompt(18), 45, 46], max_tokens=1)
    engine.run()
    plan = engine.plans[-1]
    assert plan.q_lens.tolist() == [4] and plan.kv_lens.tolist() == [20]
    assert plan.page_indices.tolist() == [0, 1, 2, 3, 4]
    assert engine.facts[-1].num_cached == 16
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (38, 16)
    engine.assert_outputs()


def test_a_wholly_cached_prompt_computes_its_last_token(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    for _ in range(2):
        engine.add(prompt(18), max_tokens=2)
        engine.run()
    assert engine.facts[-1].num_cached == 17
    engine.assert_outputs()


def test_head_of_line_waits_and_nobody_overtakes(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=41, max_step_tokens=64)
    engine.add(prompt(20), max_tokens=10)
    engine.add(prompt(30, 3), max_tokens=5)  # does not fit beside the first
    engine.add(prompt(2, 9), max_tokens=1)  # would
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 2, 32)
    engine.run()
    order = [a.prompt_len for plan in engine.plans for a in plan.admitted]
    assert order == [20, 30, 2]
    engine.assert_outputs()


def test_slots_limit_what_runs(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_running=2)
    for i in range(5):
        engine.add(prompt(3, i), max_tokens=4)
    engine.run()
    assert max(p.num_rows for p in engine.plans) == 2
    assert {int(s) for p in engine.plans for s in p.slots} == {1, 2}
    engine.assert_outputs()


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_equal_tokens_in_two_namespaces_never_share_a_page(make_engine, overlap, page_size):
    """While they run, in the cache, and for those that come later."""
    engine = make_engine(
        overlap=overlap,
        page_size=page_size,
        num_pages=6000 // page_size,
        max_step_tokens=2000,
        max_model_len=1000,
    )
    most = [0, 0]

    def look():
        held = [set(), set()]
        for request in engine.scheduler.slots.owners():
            namespace = request.add.params.top_k
            held[namespace] |= set(engine.scheduler.slots.pages(request.slot).tolist())
        for node in engine.scheduler.tree.nodes():
            top = node
            while top.parent is not None:
                top = top.parent
            held[int(top.key[0].removeprefix("ns"))] |= set(node.pages.tolist())
        assert not held[0] & held[1]
        most[:] = map(max, most, map(len, held))

    for _ in range(3):
        for namespace in (0, 1):
            engine.add(prompt(300), max_tokens=5, namespace=namespace)
        while engine.scheduler.has_work:
            engine.step()
            look()
    assert min(most) >= 300 // page_size
    assert [f.num_cached for f in engine.facts if f.finish_reason][2:] == [
        299 // page_size * page_size
    ] * 4
    engine.assert_outputs()
    engine.assert_drained()


def test_namespaces_do_not_share(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    for namespace in (1, 2, 1):
        engine.add(prompt(12), max_tokens=3, namespace=namespace)
        engine.run()
    assert [f.num_cached for f in engine.facts if f.finish_reason] == [0, 0, 11]
    engine.assert_outputs()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "is_served"),
    [(63, 1, True), (63, 0, True), (64, 1, False), (64, 0, False), (0, 1, False)],
)
def test_a_prompt_that_can_never_fit_is_refused_at_once(
    make_engine, prompt_len, max_tokens, is_served
):
    engine = make_engine(overlap=False, num_pages=64)
    engine.add(prompt(prompt_len), max_tokens=max_tokens)
    facts = engine.scheduler.drain_facts()
    if is_served:
        assert facts == []
        engine.run()
        assert engine.reasons[1, 0] == "length"
        return
    (refused,) = facts
    assert isinstance(refused, Refused) and isinstance(refused.error, RequestError)
    assert refused.choice is None
    assert refused.error.code == "context_length_exceeded" and refused.error.param == "prompt"
    assert str(prompt_len) in refused.error.message and "63" in refused.error.message
    assert not engine.scheduler.has_work


def test_a_prompt_longer_than_the_context_is_refused(make_engine):
    engine = make_engine(overlap=False, num_pages=300)
    engine.add(prompt(128), max_tokens=1)
    (refused,) = engine.scheduler.drain_facts()
    assert "128" in refused.error.message


def test_max_tokens_is_clamped_to_the_pool(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=31)
    engine.add(prompt(20), max_tokens=100)
    engine.run()
    assert len(tokens_of(engine)) == 11 and engine.reasons[1, 0] == "length"


def test_the_reserve_shrinks_while_decoding_and_is_reset_when_idle(make_engine):
    engine = make_engine(overlap=False, num_pages=128)
    scheduler = engine.scheduler
    assert scheduler._reserve.ratio == pytest.approx(0.7)
    engine.add(prompt(4), max_tokens=61)
    engine.run()
    assert scheduler._reserve.ratio == pytest.approx(0.7 - 60 * (0.7 - 0.098) / 600)
    assert scheduler.plan(0.0) is None
    assert scheduler._reserve.ratio == pytest.approx(0.7)


def test_a_conservative_engine_admits_less(make_engine):
    def num_at_once(conservativeness):
        engine = make_engine(
            overlap=False, num_pages=100, max_step_tokens=100, conservativeness=conservativeness
        )
        for i in range(6):
            engine.add(prompt(5, i), max_tokens=40)
        engine.step()
        return engine.scheduler.stats().num_running

    # Beside k others each wants 5 + 40 * ratio + 1 tokens of the 99 - k * (5 + 40 * ratio) left.
    assert [num_at_once(c) for c in (0.1, 0.5, 1.0)] == [6, 5, 2]


# ---- the tree ------------------------------------------------------------------------------


def test_a_prompt_is_shared_as_soon_as_it_is_computed(make_engine, overlap):
    engine = make_engine(overlap=overlap, page_size=4)
    engine.add(prompt(20), max_tokens=30)
    engine.step()
    engine.step()
    engine.add(prompt(20), max_tokens=3)
    engine.run()
    assert next(f for f in engine.facts if f.request_id == 2).num_cached == 16
    engine.assert_outputs()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_second_turn_reuses_the_first(make_engine, overlap, page_size, max_tokens):
    engine = make_engine(overlap=overlap, page_size=page_size)
    engine.add(prompt(11), max_tokens=max_tokens)
    engine.run()
    turn = engine.turn((1, 0))
    engine.add([*turn, 5, 6], max_tokens=3)
    engine.run()
    # The KV of the first turn's last token was never computed.
    assert engine.facts[-1].num_cached == (len(turn) - 1) // page_size * page_size
    engine.assert_outputs()


def test_duplicates_are_freed_and_the_trees_pages_adopted(make_engine, overlap):
    engine = make_engine(overlap=overlap, page_size=4, max_step_tokens=64)
    engine.add(prompt(20), max_tokens=20)
    engine.add(prompt(20), max_tokens=20)  # both compute it: neither is cached yet
    for _ in range(4):
        engine.step()
    stats = engine.scheduler.stats()
    assert stats.num_cached_pages == 5
    assert stats.num_pages - stats.num_free_pages - stats.num_cached_pages == 2  # a tail each
    table = engine.device.table
    assert table[1, :5].tolist() == table[2, :5].tolist()
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()


def test_eviction_makes_room(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=33, page_size=1)
    for i in range(6):
        engine.add(prompt(20, i), max_tokens=4)
        engine.run()
    assert engine.scheduler.stats().evicted_pages >= 4 * 20
    engine.assert_outputs()
    engine.assert_drained()


def test_a_pinned_prompt_outlives_others_and_is_flushed_like_them(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=61)
    engine.add(prompt(20, 1), max_tokens=0, pin=1)
    engine.run()
    for i in range(2, 8):
        engine.add(prompt(20, 5 * i), max_tokens=4)
        engine.run()
    engine.add(prompt(20, 1), max_tokens=1)
    engine.run()
    assert engine.facts[-1].num_cached == 19 and engine.scheduler.stats().evicted_pages > 60
    engine.scheduler.handle(Flush(1))
    assert engine.scheduler.drain_facts() == [Flushed(1, 0)]
    assert engine.scheduler.stats().num_tree_nodes == 0


def test_a_pool_that_is_pinned_full_still_serves(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=41)
    engine.add(prompt(40, 1), max_tokens=0, pin=9)
    engine.run()
    assert engine.scheduler.stats().num_free_pages == 0
    engine.add(prompt(30, 7), max_tokens=5)
    engine.run()
    engine.assert_outputs()


def test_flush_empties_what_nobody_uses(make_engine, overlap):
    engine = make_engine(overlap=overlap, page_size=4)
    engine.add(prompt(16, 3), max_tokens=1)
    engine.run()
    engine.add(prompt(16), max_tokens=8)
    engine.step()
    engine.step()
    engine.scheduler.handle(Flush(9))
    assert engine.scheduler.drain_facts() == [Flushed(9, 16)]
    assert engine.scheduler.stats().num_cached_pages == 4
    engine.run()
    engine.scheduler.handle(Flush(10))
    assert engine.scheduler.has_work
    assert engine.scheduler.drain_facts() == [Flushed(10, 0)]
    assert engine.scheduler.stats().num_free_pages == engine.scheduler.pool.capacity
    engine.assert_outputs()


@pytest.mark.parametrize("page_size", [1, 4, 12, 100])
def test_shared_prefixes_are_told(make_engine, page_size):
    engine = make_engine(
        overlap=False, num_pages=4000, max_model_len=600, max_step_tokens=4000, page_size=page_size
    )
    trunk, other = prompt(300), prompt(280, 9)
    engine.add(trunk, max_tokens=2)
    engine.add(other, max_tokens=2)
    engine.run()
    engine.add([*trunk, 41, 42, 43, 44, 45], max_tokens=9)
    engine.add([*other, 41], max_tokens=9)
    engine.add([*trunk, 44, 42, 43, 44, 45], max_tokens=9)
    engine.add([*trunk, 41, 42, 43, 44, 46], max_tokens=9)
    engine.add(prompt(300, 20), max_tokens=9)
    engine.step()
    engine.step()
    ((rows, length),) = engine.plans[-1].shared_groups
    assert rows.tolist() == [0, 2, 3] and length == 300
    groups = engine.plans[-1].shared_groups
    engine.step()
    assert engine.plans[-1].shared_groups is groups  # nothing moved: not computed again
    plan = engine.plans[-1]
    table = engine.device.table[plan.slots[rows], : length // page_size]
    assert (table == table[0]).all()
    engine.scheduler.handle(Abort(3))
    engine.step()
    ((rows, length),) = engine.plans[-1].shared_groups
    assert rows.tolist() == [1, 2] and length == 300
    engine.run()
    engine.assert_outputs()


# ---- retraction ----------------------------------------------------------------------------


def crowd(make_engine, overlap, **kw):
    """Three requests in a pool that cannot hold them all to their ends."""
    engine = make_engine(overlap=overlap, **{"num_pages": 50, "conservativeness": 0.1} | kw)
    for i in range(3):
        engine.add(prompt(8, 10 * i), max_tokens=30)
    return engine


@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_requests_lose_nothing(make_engine, overlap, page_size):
    engine = crowd(make_engine, overlap, page_size=page_size, num_pages=48 // page_size + 1)
    engine.run()
    assert engine.scheduler.stats().retractions > 0
    assert all(len(tokens_of(engine, i)) == 30 for i in (1, 2, 3))
    engine.assert_outputs()
    engine.assert_drained()


def test_the_fewest_output_tokens_are_retracted_and_come_back_first(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=50, conservativeness=0.1, max_step_tokens=64)
    engine.add(prompt(8), max_tokens=40)
    engine.step()
    engine.add(prompt(6, 10), max_tokens=30)
    engine.add(prompt(7, 20), max_tokens=30)  # as few tokens as the second, but a longer prompt
    engine.add(prompt(8, 30), max_tokens=30)  # waits behind
    while not engine.scheduler.stats().retractions:
        engine.step()
    waiting = list(engine.scheduler.waiting)
    assert [r.request_id for r in waiting][:2] in ([3, 4], [4])
    first = waiting[0].request_id
    engine.run()
    readmitted = [a.prompt_len for plan in engine.plans for a in plan.admitted]
    assert readmitted.index({3: 7, 4: 8}[first]) < len(readmitted) - 1
    engine.assert_outputs()


def test_a_retracted_prefix_is_found_again(make_engine, overlap):
    engine = crowd(make_engine, overlap, num_pages=60)
    engine.run()
    resumed = [a for p in engine.plans for a in p.admitted if len(a.tokens) > a.prompt_len]
    assert resumed
    computed = sum(engine.device.computed.values())
    everything = 3 * (8 + 29)
    again = sum(len(a.tokens) for a in resumed)
    assert computed < everything + again  # part of it came from the tree
    engine.assert_outputs()


def test_retraction_raises_the_reserve(make_engine):
    engine = crowd(make_engine, False)
    before = engine.scheduler._reserve.ratio
    while not engine.scheduler.stats().retractions:
        engine.step()
    running = engine.scheduler.slots.owners()
    assert engine.scheduler._reserve.ratio > before
    assert len(running) == 2


def test_a_token_in_flight_survives_retraction(make_engine):
    engine = crowd(make_engine, True)
    while not engine.scheduler.stats().retractions:
        engine.step()
    engine.run()
    engine.assert_outputs()


@pytest.mark.parametrize("max_tokens", range(8, 20))
def test_the_last_token_in_flight_ends_a_retracted_request(make_engine, overlap, max_tokens):
    engine = make_engine(overlap=overlap, num_pages=40, conservativeness=0.1, max_step_tokens=64)
    engine.add(prompt(8), max_tokens=25)
    engine.add(prompt(9, 20), max_tokens=max_tokens)
    engine.add(prompt(9, 30), max_tokens=max_tokens)
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()


def test_alone_and_without_room_a_request_fails_alone(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=41)
    engine.add(prompt(10), max_tokens=20)
    engine.step()
    stolen = engine.scheduler.pool.take(25)  # the arrival check makes this impossible otherwise
    engine.check = False
    engine.run()
    error = engine.reasons[1, 0]
    assert isinstance(error, EngineError) and "40 tokens" in str(error)
    assert not engine.scheduler.has_work
    engine.scheduler.pool.release(stolen)
    engine.assert_drained()


def test_chunks_that_block_each_other_are_retracted(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=41, max_step_tokens=8)
    engine.add(prompt(30), max_tokens=2)
    engine.add(prompt(8, 20), max_tokens=1)
    engine.step()
    stolen = engine.scheduler.pool.take(engine.scheduler.pool.num_free - 6)
    engine.check = False
    for _ in range(4):
        engine.step()
    engine.scheduler.pool.release(stolen)
    engine.run()
    engine.assert_drained()


# ---- n > 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_choices_share_one_prompt(make_engine, overlap, page_size, max_tokens):
    engine = make_engine(overlap=overlap, page_size=page_size, num_pages=200)
    engine.add(prompt(30), max_tokens=max_tokens, n=4)
    engine.add(prompt(5, 9), max_tokens=2)
    engine.run()
    engine.assert_outputs()
    assert len(engine.reasons) == 5
    reused = (30 - 1) // page_size * page_size
    seeds = [derive_seed(1001, choice) for choice in range(4)]
    computed = [engine.device.computed[seed] for seed in seeds]
    decodes = max(0, max_tokens - 1)
    assert computed == [30 + decodes, *[30 - reused + decodes] * 3]
    if max_tokens:
        assert len({tuple(tokens_of(engine, 1, c)) for c in range(4)}) > 1
    engine.assert_drained()


def test_without_a_cache_each_choice_computes_the_prompt(make_engine, overlap):
    engine = make_engine(overlap=overlap, use_radix=False, num_pages=200)
    engine.add(prompt(20), max_tokens=1, n=3)
    engine.run()
    assert list(engine.device.computed.values()) == [20] * 3
    engine.assert_outputs()


@pytest.mark.parametrize("num_steps", range(6))
def test_siblings_go_on_when_the_first_choice_is_aborted(make_engine, overlap, num_steps):
    engine = make_engine(overlap=overlap, max_step_tokens=8)
    engine.add(prompt(20), max_tokens=4, n=3)
    for _ in range(num_steps):
        engine.step()
    engine.scheduler.handle(Abort(1, 0))
    engine.scheduler.check()
    engine.run()
    assert {choice for _, choice in engine.reasons} >= {1, 2}
    engine.assert_outputs()
    engine.assert_drained()


def test_a_waiting_sibling_can_be_aborted(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_step_tokens=8)
    engine.add(prompt(20), max_tokens=4, n=3)
    engine.step()
    engine.scheduler.handle(Abort(1, 1))
    engine.scheduler.check()
    assert engine.scheduler.stats().num_waiting == 1
    engine.run()
    assert set(engine.reasons) == {(1, 0), (1, 2)}
    engine.assert_outputs()


def test_seeds_of_choices_differ_and_fit_64_bits():
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = [derive_seed(seed, choice) for choice in range(128)]
        assert seeds[0] == seed and len(set(seeds)) == 128
        assert all(-(2**63) <= s < 2**63 for s in seeds)
    # First outputs of SplitMix64 from seed 1234567, as published with the generator.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_seed(1234567, c) % 2**64 for c in (1, 2, 3)] == published


# ---- grammars ------------------------------------------------------------------------------


def test_constrained_rows_sit_out_while_their_token_is_in_flight(make_engine):
    engine = make_engine(overlap=True)
    engine.add(prompt(4), max_tokens=9)
    engine.add(prompt(4, 10), max_tokens=4, grammar=0)
    engine.run()
    rows = [(plan.num_rows, plan.masked.tolist()) for plan in engine.plans]
    assert rows == [(2, [1]), (1, [])] + [(2, [1]), (1, [])] * 3 + [(1, [])]
    engine.assert_outputs()


def test_constrained_rows_alone_alternate(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(4), max_tokens=6, grammar=0)
    engine.run()
    assert [plan.num_rows for plan in engine.plans] == [1] * 6
    assert all(plan.masked.tolist() == [0] for plan in engine.plans)
    engine.assert_outputs()


def test_without_overlap_constrained_rows_join_every_step(make_engine):
    engine = make_engine(overlap=False)
    engine.add(prompt(4), max_tokens=6)
    engine.add(prompt(4, 10), max_tokens=6, grammar=0)
    engine.run()
    assert [plan.masked.tolist() for plan in engine.plans] == [[1]] * 6


def test_a_chunk_that_does_not_sample_is_not_masked(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_step_tokens=4)
    engine.add(prompt(10), max_tokens=2, grammar=0)
    engine.run()
    assert [plan.masked.tolist() for plan in engine.plans] == [[], [], [0], [0]]


# ---- log-probabilities ---------------------------------------------------------------------


def test_logprobs_of_the_output(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(5), max_tokens=4, logprobs=2)
    engine.add(prompt(5, 9), max_tokens=4)
    engine.run()
    for fact in engine.facts:
        if fact.request_id == 2:
            assert fact.logprobs is None
            continue
        (token,), (entry,) = fact.token_ids, fact.logprobs
        assert entry.logprob == -token
        assert entry.top_token_ids == (token, token + 1)
        assert entry.top_logprobs == (-token, -token - 1)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("max_step_tokens", [4, 5, 64])
def test_logprobs_of_the_prompt(make_engine, overlap, max_tokens, max_step_tokens):
    engine = make_engine(overlap=overlap, max_step_tokens=max_step_tokens)
    tokens = prompt(21, 3)
    engine.add(tokens, max_tokens=1)
    engine.run()  # cached, and not used by the next
    engine.add(tokens, max_tokens=max_tokens, prompt_logprobs=3, n=2)
    engine.run()
    facts = [f for f in engine.facts if f.request_id == 2]
    first = next(f for f in facts if f.choice == 0)
    assert first.num_cached == 0 and first.prompt_logprobs[0] is None
    assert [e.logprob for e in first.prompt_logprobs[1:]] == [-t for t in tokens[1:]]
    assert all(len(e.top_token_ids) == 3 for e in first.prompt_logprobs[1:])
    assert [f for f in facts if f.prompt_logprobs is not None] == [first]
    assert all(f.num_cached == 20 for f in facts if f.choice == 1)
    engine.assert_outputs()


def test_prompt_logprobs_survive_retraction(make_engine, overlap):
    engine = make_engine(overlap=overlap, num_pages=50, conservativeness=0.1, max_step_tokens=6)
    engine.add(prompt(6), max_tokens=38)
    engine.add(prompt(6, 30), max_tokens=30)
    for _ in range(8):
        engine.step()
    tokens = prompt(20, 12)
    engine.add(tokens, max_tokens=8, prompt_logprobs=1)
    engine.run()
    assert engine.scheduler.stats().retractions > 0
    with_prompt = [f for f in engine.facts if f.prompt_logprobs is not None]
    (fact,) = with_prompt
    assert [e.logprob for e in fact.prompt_logprobs[1:]] == [-t for t in tokens[1:]]
    engine.assert_outputs()


# ---- ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(9))
def test_abort_in_every_state(make_engine, overlap, num_steps):
    engine = make_engine(overlap=overlap, max_step_tokens=8, page_size=4)
    engine.add(prompt(20), max_tokens=10)
    engine.add(prompt(20, 9), max_tokens=10)
    for _ in range(num_steps):
        engine.step()
    before = list(engine.facts)
    engine.scheduler.handle(Abort(1))
    engine.scheduler.check()
    engine.run()
    assert all(f.request_id == 2 for f in engine.facts[len(before) :])
    assert set(engine.reasons) == {(2, 0)}
    engine.assert_outputs()
    engine.assert_drained()


def test_an_aborted_prefix_stays_cached(make_engine):
    engine = make_engine(overlap=False, max_step_tokens=8)
    engine.add(prompt(20), max_tokens=10)
    engine.step()
    engine.step()
    engine.scheduler.handle(Abort(1))
    engine.add(prompt(20), max_tokens=1)
    engine.run()
    assert engine.facts[-1].num_cached == 16


def test_a_slot_is_reused_while_its_old_row_is_in_flight(make_engine):
    engine = make_engine(overlap=True, max_running=1)
    engine.add(prompt(6), max_tokens=10)
    engine.step()
    engine.step()
    engine.scheduler.handle(Abort(1))
    engine.add(prompt(7, 20), max_tokens=5)
    engine.step()  # the new request is launched, then the old row's result comes
    assert engine.plans[-1].admitted[0].prompt_len == 7
    engine.run()
    engine.assert_outputs()


def test_abort_of_an_unknown_or_finished_request_does_nothing(make_engine):
    engine = make_engine(overlap=False)
    engine.add(prompt(3), max_tokens=1)
    engine.run()
    engine.scheduler.handle(Abort(1))
    engine.scheduler.handle(Abort(99))
    assert not engine.scheduler.has_work


def test_abort_while_retracted(make_engine, overlap):
    engine = crowd(make_engine, overlap)
    while not engine.scheduler.stats().retractions:
        engine.step()
    victim = next(iter(engine.scheduler.waiting)).request_id
    engine.scheduler.handle(Abort(victim))
    engine.scheduler.check()
    engine.run()
    assert victim not in {request_id for request_id, _ in engine.reasons}
    engine.assert_outputs()
    engine.assert_drained()


def test_a_row_without_finite_logits_fails_alone(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(12), max_tokens=8)
    engine.add(prompt(12, 20), max_tokens=8)
    engine.step()
    engine.step()
    engine.device.nan_seeds.add(1001)
    engine.run()
    refused = [f for f in engine.facts if isinstance(f, Refused)]
    assert [(f.request_id, f.choice) for f in refused] == [(1, 0)]
    assert isinstance(refused[0].error, EngineError)
    assert engine.reasons[2, 0] == "length"
    engine.assert_outputs()
    engine.assert_drained()


def test_what_a_failed_step_wrote_is_not_cached(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.device.nan_seeds.add(1001)
    engine.add(prompt(12), max_tokens=8)
    engine.run()
    assert engine.scheduler.stats().num_cached_pages == 0


# ---- the contract --------------------------------------------------------------------------


def test_a_third_step_is_not_planned(make_engine):
    engine = make_engine(overlap=True)
    engine.add(prompt(3), max_tokens=9)
    engine.scheduler.plan(0.0)
    engine.scheduler.plan(1.0)
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        engine.scheduler.plan(2.0)


def test_results_come_in_order(make_engine):
    engine = make_engine(overlap=True)
    engine.add(prompt(3), max_tokens=9)
    plan = engine.scheduler.plan(0.0)
    result = StepResult(plan.step + 1, np.zeros(1, np.int32), np.ones(1, np.bool_))
    with pytest.raises(RuntimeError, match="the result of step 2 came for step 1"):
        engine.scheduler.commit(result, 0.0)


def test_shutdown_is_not_for_the_scheduler(make_engine):
    with pytest.raises(TypeError, match="Shutdown"):
        make_engine(overlap=False).scheduler.handle(Shutdown())


def test_counters(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add(prompt(10), max_tokens=5)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (5, 10, 5)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages == 63
    assert (stats.num_running, stats.num_waiting, stats.batch_tokens) == (0, 0, 1)


def test_another_policy_is_a_function(make_engine):
    engine = make_engine(
        overlap=False,
        max_running=1,
        policy=Policy(rank=lambda request: request.prompt_len),
    )
    for n in (9, 3, 6):
        engine.add(prompt(n), max_tokens=1)
    engine.run()
    assert [p.admitted[0].prompt_len for p in engine.plans] == [3, 6, 9]


def test_both_modes_give_the_same_tokens_and_the_same_cache(make_engine):
    facts, cached = [], []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, num_pages=200, page_size=4)
        for i, n in itertools.product(range(3), (4, 17, 30)):
            engine.add(prompt(n, i), max_tokens=6, stop=[11, 12])
        engine.run()
        facts.append({(f.request_id, f.token_ids) for f in engine.facts if isinstance(f, Tokens)})
        cached.append(engine.scheduler.stats().num_cached_pages)
    assert facts[0] == facts[1] and cached[0] == cached[1]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda s: s.pool.take(1), r"not in exactly one place: {\d+: \[\]}"),
        (lambda s: s.pool._stack.__setitem__(0, 0), r"not in exactly one place: {0: \['free'\]"),
        (lambda s: s.slots.free.pop(), "slots are"),
        (lambda s: s.tree.lock(next(s.tree.nodes())), "1 locks, requests hold 0"),
        (lambda s: setattr(s.tree, "num_evictable", 3), "evictable pages, counted 3"),
        (lambda s: setattr(s.waiting, "num_tokens", 4), "0 tokens wait, counted 4"),
    ],
)
def test_check_names_what_is_wrong(core, break_it, message):
    engine = core.Engine(overlap=False)
    engine.add(prompt(5), max_tokens=2)
    engine.run()
    engine.scheduler.check()
    break_it(engine.scheduler)
    with pytest.raises(AssertionError, match=message):
        engine.scheduler.check()
