"""Requests that begin alike and come together compute what they share once."""

import pytest

from stoker.engine.api.messages import Abort
from stoker.engine.core import arriving

SHARED = [1 + i % 97 for i in range(640)]


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def engine_of(request, make_engine):
    return lambda **options: make_engine(
        overlap=request.param, page_size=16, num_pages=1000, max_model_len=4096, **options
    )


def computed(engine):
    return sum(plan.num_tokens for plan in engine.plans)


def test_the_others_wait_for_the_first(engine_of):
    engine = engine_of(max_step_tokens=2048)
    for i in range(5):
        engine.add([*SHARED, 200 + i], max_tokens=1)
    engine.run()
    engine.assert_outputs()
    engine.assert_drained()
    assert computed(engine) == 641 + 4  # each of the others computes its last token
    assert [plan.num_rows for plan in engine.plans] == [1, 4]


def test_what_shares_little_does_not_wait(engine_of):
    engine = engine_of(max_step_tokens=2048)
    engine.add([*SHARED, 200], max_tokens=1)
    engine.add([*SHARED[: arriving.MIN_AWAITED - 16], *[150] * 400], max_tokens=1)
    engine.add([150] * 400, max_tokens=1)
    engine.run()
    engine.assert_outputs()
    assert engine.plans[0].num_rows == 3


def test_an_aborted_first_lets_them_in(engine_of):
    engine = engine_of(max_step_tokens=320)
    engine.add([*SHARED, 200], max_tokens=1)
    engine.add([*SHARED, 201], max_tokens=1)
    engine.step()
    engine.scheduler.handle(Abort(1))
    engine.run()
    assert engine.reasons[2, 0] == "length"
    engine.assert_drained()


def test_other_namespaces_do_not_wait(engine_of):
    engine = engine_of(max_step_tokens=2048)
    engine.add([*SHARED, 200], max_tokens=1, namespace=1)
    engine.add([*SHARED, 201], max_tokens=1, namespace=2)
    engine.run()
    engine.assert_outputs()
    assert engine.plans[0].num_rows == 2
