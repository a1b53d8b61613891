"""The simulator on cases that can be computed by hand, and what must hold in all."""

import math

import numpy as np
import pytest

from stoker.engine.core.routing import CacheAware, LeastLoaded, RoundRobin
from stoker.engine.simulate_load import Lengths, LoadRequest, SyntheticLoad


def request(arrival_s=0.0, prompt_len=10, output_len=4, **more) -> LoadRequest:
    more = {"max_tokens": output_len} | more
    return LoadRequest(arrival_s, prompt_len, output_len, **more)


def times(record) -> list[float]:
    return [round(t, 9) for t in record.tokens_s]


def law(text: str) -> Lengths:
    return Lengths.parse(text)


# ---- by hand -----------------------------------------------------------------------------------


def test_one_request_takes_a_step_a_token(run):
    [record] = run([request(arrival_s=2.5)]).records
    assert times(record) == [3.5, 4.5, 5.5, 6.5]
    assert (record.ttft_s, record.tpot_s) == (1.0, 1.0)


def test_host_time_comes_before_a_device_that_is_not_async(run):
    result = run([request()], run.cost(base=1.0, host=0.25))
    assert times(result.records[0]) == [1.25, 2.5, 3.75, 5.0]
    assert result.device_s == [4.0]


def test_host_time_hides_behind_an_async_device(run):
    """A step is launched while the one before runs; the slower of the two sets the pace."""
    result = run([request()], run.cost(base=1.0, host=0.25, is_async=True))
    assert times(result.records[0]) == [1.0, 2.0, 3.0, 4.0]
    result = run([request()], run.cost(base=0.1, host=0.25, is_async=True))
    # Each is committed after the next one's launch, the last one at once.
    assert times(result.records[0]) == [0.5, 0.75, 1.0, 1.0]


def test_prompts_are_cut_into_chunks_that_decodes_ride_along_with(run):
    """16 tokens a step and 0.1 s a token: 40 tokens of prompt in steps of 16, 16 and 8.

    The second request comes while the first of one token a step runs; its 20 tokens take two
    steps beside one decode token each.
    """
    config = {"chunked_prefill_size": 15, "max_running_requests": 1}
    [record] = run([request(prompt_len=40, output_len=2)], run.cost(0.0, 0.1), **config).records
    assert times(record) == [4.0, 4.1]

    config = {"chunked_prefill_size": 14, "max_running_requests": 2}
    first, second = run(
        [request(prompt_len=1, output_len=9), request(0.05, prompt_len=20, output_len=1)],
        run.cost(0.0, 0.1),
        **config,
    ).records
    assert times(first)[:4] == [0.1, 1.7, 2.3, 2.4]
    assert times(second) == [2.3]


def test_a_shared_prefix_is_computed_once(run):
    """A second asker of 8 shared and 2 own tokens computes the 2."""
    shared = [request(prefix_ids=(7,), block_size=8), request(5.0, prefix_ids=(7,), block_size=8)]
    result = run(shared, run.cost(0.0, 0.1))
    assert [record.num_cached for record in result.records] == [0, 8]
    assert result.records[0].ttft_s == pytest.approx(1.0)
    assert result.records[1].ttft_s == pytest.approx(0.2)
    assert result.summary()["hit_rate"] == 8 / 20
    without = run(shared, run.cost(0.0, 0.1), disable_radix_cache=True)
    assert without.records[1].ttft_s == pytest.approx(1.0)


def test_a_known_answer_is_found_by_the_next_turn(run):
    first = request(prompt=(1, 2, 3), prompt_len=3, output=(4, 5, 6), output_len=3)
    turn = (1, 2, 3, 4, 5, 6, 7)
    second = request(9.0, prompt=turn, prompt_len=7, output_len=1)
    # The last token of an answer is never computed, so 5 of the 6 are in the cache.
    assert run([first, second]).records[1].num_cached == 5


def test_a_closed_loop_sends_when_one_ends(run):
    records = run([request(output_len=3) for _ in range(5)], concurrency=2).records
    assert [record.sent_s for record in records] == [0, 0, 3, 3, 6]
    assert [record.ttft_s for record in records] == [1.0] * 5


def test_requests_pass_through_http_one_by_one(run, monkeypatch):
    from stoker.engine import simulate as module

    monkeypatch.setattr(module, "REQUEST_LOOP_S", 0.5)
    config = module.EngineConfig()
    spec = module.EngineSpec(1000, 1, 100, is_cpu=True)
    requests = [request(output_len=1), request(output_len=1)]
    result = module.simulate(requests, config, spec, run.cost(), request_s=2.0)
    assert [times(record) for record in result.records] == [[3.0], [4.0]]


def test_goodput_counts_those_within_the_objective(run):
    """Two at a time and 4 steps each: TTFT 1, 1, 5, 5, 9 s."""
    load = [request() for _ in range(5)]
    result = run(load, max_running_requests=2)
    assert [record.ttft_s for record in result.records] == [1, 1, 5, 5, 9]
    summary = result.summary(slo_ttft_ms=5000, slo_tpot_ms=1000)
    assert summary["slo_attainment"] == 4 / 5
    assert summary["goodput_requests_per_s"] == 4 / 12
    assert result.summary(slo_tpot_ms=999)["slo_attainment"] == 0
    assert "slo_attainment" not in result.summary()
    assert summary["ttft_ms"] == {"mean": 4200, "p50": 5000, "p90": 9000, "p99": 9000, "max": 9000}
    assert (summary["seconds"], summary["output_tokens_per_s"]) == (12, 20 / 12)
    series = result.over_time(0)
    assert series["running"][0] == 2 and series["waiting"][0] == 3
    assert len(result.over_time(0, 4)["time_s"]) == 4


# ---- memory ------------------------------------------------------------------------------------


def test_a_full_pool_retracts_and_all_still_end(run):
    """4 requests of 10 + 60 tokens in a pool of 150: the bet on short answers loses."""
    load = [request(output_len=60) for _ in range(4)]
    tight = run(load, kv_tokens=150, schedule_conservativeness=0.1)
    assert tight.stats[0].retractions > 0
    assert [len(record.tokens_s) for record in tight.records] == [60] * 4
    cautious = run(load, kv_tokens=150, schedule_conservativeness=2.0)
    assert cautious.stats[0].retractions == 0
    assert run(load, kv_tokens=1000).stats[0].retractions == 0
    pages = np.array(tight.series[0])[:, 3:5].sum(1)
    assert pages.max() <= 150 and pages.max() > 140


def test_answers_that_stop_before_their_limit(run):
    """What clients ask for is booked, what they get is counted."""
    load = [request(output_len=5, max_tokens=60) for _ in range(4)]
    result = run(load, kv_tokens=150, schedule_conservativeness=1.0)
    assert [len(record.tokens_s) for record in result.records] == [5] * 4
    booked = max(result.over_time(0)["running"])
    short = run([request(output_len=5) for _ in range(4)], kv_tokens=150)
    assert booked < 4 == max(short.over_time(0)["running"])


def test_a_request_that_can_never_fit_is_refused_and_the_others_served(run):
    result = run([request(), request(prompt_len=500), request()], kv_tokens=100)
    assert [record.error is None for record in result.records] == [True, False, True]
    summary = result.summary()
    assert summary["failed"] == 1 and "500 tokens" in summary["first_error"]
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (8, 20)


# ---- everywhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["alternating", "overlap"])
@pytest.mark.parametrize("concurrency", [None, 7])
def test_every_token_is_counted_and_the_story_repeats(run, is_async, concurrency):
    load = SyntheticLoad(
        60, law("uniform:1:80"), law("lognormal:12:0.7"), 3.0, 0.5, 32, 3, max_tokens=40
    )
    options = {"kv_tokens": 600, "concurrency": concurrency, "num_engines": 2}
    options |= {"schedule_conservativeness": 0.3, "page_size": 4}
    cost = run.cost(0.1, 0.01, host=0.02, is_async=is_async)
    requests = load.requests(5)
    assert load.requests(5) == requests != load.requests(6)
    first, second = (run(requests, cost, router=CacheAware(2), **options) for _ in range(2))
    for record in first.records:
        assert record.error is None
        assert len(record.tokens_s) == record.request.output_len
        assert list(record.tokens_s) == sorted(record.tokens_s)
        assert record.tokens_s[0] > record.sent_s
    assert {record.engine for record in first.records} == {0, 1}
    summary = first.summary(slo_ttft_ms=1000)
    assert summary["output_tokens"] == sum(r.output_len for r in requests)
    assert summary["prompt_tokens"] == sum(r.prompt_len for r in requests)
    assert sum(stats.generated_tokens for stats in first.stats) == summary["output_tokens"]
    assert 0 < summary["cached_tokens"] < summary["prompt_tokens"]
    assert summary == second.summary(slo_ttft_ms=1000)
    assert [times(r) for r in first.records] == [times(r) for r in second.records]
    for rows in first.series:
        assert rows[-1, 1] == 0 and rows[-1, 2] == 0  # nobody runs, nobody waits


# ---- loads -------------------------------------------------------------------------------------


def test_lengths_follow_their_laws():
    rng = np.random.default_rng(0)
    n = 20_000
    assert set(law("7").draw(rng, n)) == {7} == set(law("constant:7").draw(rng, n))
    uniform = law("uniform:10:20").draw(rng, n)
    assert (uniform.min(), uniform.max()) == (10, 20) and abs(uniform.mean() - 15) < 0.1
    normal = law("normal:100:10").draw(rng, n)
    assert abs(normal.mean() - 100) < 0.5 and abs(normal.std() - 10) < 0.5
    assert law("normal:1:100").draw(rng, n).min() == 1
    lognormal = np.log(law("lognormal:1000:0.5").draw(rng, n))
    assert abs(lognormal.mean() - math.log(1000)) < 0.02 and abs(lognormal.std() - 0.5) < 0.02
    assert abs(law("exponential:300").draw(rng, n).mean() - 300) < 10


@pytest.mark.parametrize(
    "text", ["", "x", "uniform:3", "zipf:1", "7:8", "normal:1:-2", "-1", "nan"]
)
def test_wrong_laws_say_what_is_wanted(text):
    with pytest.raises(ValueError, match=r"want a number, uniform:LOW:HIGH.*; got"):
        law(text)


def test_arrivals_follow_their_law():
    def gaps(burstiness: float) -> np.ndarray:
        load = SyntheticLoad(20_000, law("1"), law("1"), 4.0, burstiness).requests(1)
        return np.diff([r.arrival_s for r in load])

    poisson, bursts, clock = gaps(1.0), gaps(0.25), gaps(math.inf)
    assert abs(poisson.mean() - 0.25) < 0.01 and abs(poisson.std() / poisson.mean() - 1) < 0.03
    assert abs(bursts.mean() - 0.25) < 0.02  # variation of a gamma law: 1 / sqrt(shape)
    assert abs(bursts.std() / bursts.mean() - 2) < 0.1
    assert np.allclose(clock, 0.25)


def test_prompts_share_what_their_prefixes_say():
    a, b = request(prompt_len=20, prefix_ids=(1, 2)), request(prompt_len=20, prefix_ids=(1, 3))
    a, b = (LoadRequest(0, 20, 1, 1, r.prefix_ids, block_size=8) for r in (a, b))
    first, second, again = a.prompt_tokens(0), b.prompt_tokens(1), a.prompt_tokens(2)
    assert (first[:8] == second[:8]).all() and first[8] != second[8]
    assert (first[:16] == again[:16]).all() and first[16] != again[16]
    assert len(set(first.tolist())) == 20
    long = LoadRequest(0, 5, 1, 1, (1, 2), block_size=8)  # the last block is not full
    assert long.prompt_tokens(3).tolist() == first[:5].tolist()


# ---- routers -----------------------------------------------------------------------------------


def pick(router, loads, prompt=(1, 2, 3), now=0.0):
    return router.pick(np.array(prompt, np.int32), (), loads, now)


def test_round_robin_takes_turns():
    router = RoundRobin(3)
    assert [pick(router, [9, 0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded():
    router = LeastLoaded(3)
    assert [pick(router, loads) for loads in ([1, 0, 2], [1, 1, 1], [5, 4, 3])] == [1, 0, 2]


def test_cache_aware_goes_where_the_prefix_is_unless_that_engine_is_drowning():
    router = CacheAware(3, page_size=2)
    ours, others = list(range(100, 120)), list(range(200, 220))
    assert pick(router, [0, 0, 0], ours) == 0
    assert pick(router, [1, 0, 0], others) == 1
    assert pick(router, [5, 0, 0], ours) == 0  # cached there
    assert pick(router, [5, 1, 0], [*ours[:4], *range(300, 316)]) == 2  # 20% are not enough
    assert pick(router, [40, 30, 20], ours) == 0  # uneven, but not by 32
    assert pick(router, [90, 30, 20], ours) == 2  # too uneven
    assert pick(router, [4, 3, 2], ours) == 2  # now two have it: the less loaded
    tiny = CacheAware(2, page_size=2, max_tokens=20)
    assert [pick(tiny, [0, 0], p, now) for now, p in enumerate((ours, others))] == [0, 0]
    assert pick(tiny, [1, 0], ours, 2.0) == 1  # forgotten


def test_a_fleet_keeps_families_of_prompts_together(run):
    """Two families of 8 prompts over 2 engines: in turn both engines compute both prefixes."""
    load = [
        request(i * 20.0, prompt_len=100, output_len=1, prefix_ids=(i % 4 // 2,), block_size=96)
        for i in range(16)
    ]
    cost = run.cost(0.0, 0.1)
    hits = {}
    for router in (RoundRobin(2), CacheAware(2, page_size=1)):
        result = run(load, cost, num_engines=2, router=router)
        hits[type(router)] = result.summary()["cached_tokens"]
    assert hits == {RoundRobin: 12 * 96, CacheAware: 14 * 96}


def test_loads_are_those_of_the_moment(run):
    """Two at once go to two engines; one that comes after the first's end goes there."""
    load = [request(output_len=2), request(output_len=9), request(3.0)]
    result = run(load, num_engines=2, router=LeastLoaded(2))
    assert [record.engine for record in result.records] == [0, 1, 0]


# ---- the scheduler's own settings ----------------------------------------------------------------


def test_a_queue_timeout_refuses_who_waited_too_long(run):
    """One at a time, 4 s each: the third would begin at 8 s."""
    load = [request() for _ in range(3)]
    result = run(load, max_running_requests=1, queue_timeout=5.0)
    assert [record.error is None for record in result.records] == [True, True, False]
    assert result.summary(slo_ttft_ms=9000)["slo_attainment"] == 2 / 3


def test_the_queue_policy_decides_who_is_next(run):
    load = [request(), *(request(0.1, prompt_len=n, output_len=1) for n in (30, 20, 10))]
    order = {}
    for policy in ("fcfs", "shortest-prefill-first"):
        records = run(load, max_running_requests=1, schedule_policy=policy).records
        order[policy] = sorted(range(1, 4), key=lambda i: records[i].tokens_s[0])
    assert order == {"fcfs": [1, 2, 3], "shortest-prefill-first": [3, 2, 1]}


def test_a_scheduler_that_never_goes_on_is_an_error(run, monkeypatch):
    from stoker.engine import simulate as module

    monkeypatch.setattr(module, "MAX_POLLS", 10)
    monkeypatch.setattr(module.Scheduler, "plan", lambda self, now: None)
    with pytest.raises(RuntimeError, match=r"the scheduler is stuck: .*num_waiting=1"):
        run([request()])
