"""`Stream.forward` brings what iterating brings: to a callback, without a switch of tasks."""

import asyncio
from collections import defaultdict

import pytest
from fake_engine import FakeEngine

from stoker.engine.api.errors import EngineError
from stoker.engine.api.sampling_params import SamplingParams
from stoker.engine.text.answer import AnswerFormat
from stoker.engine.text.formats import REASONING_FORMATS

PROMPT = [65, 66, 67]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def by_choice(outputs):
    """What each choice brought, however it was cut."""
    choices = defaultdict(lambda: ["", (), (), ()])
    for out in outputs:
        choice = choices[out.choice]
        choice[0] += out.text
        choice[1] += out.token_ids
        choice[2] += out.logprobs or ()
        choice[3] += out.deltas
        choice[4:] = out.finish_reason, out.stop_reason, out.num_output, out.num_reasoning
    return dict(choices)


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (LONG, None),
        (SamplingParams(max_tokens=60, n=3, seed=5, ignore_eos=True, logprobs=2), None),
        (SamplingParams(temperature=0, max_tokens=60, stop=("the sea",)), None),
        (SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1), None),
        (SamplingParams(temperature=0), AnswerFormat(REASONING_FORMATS["deepseek-r1"], True)),
    ],
    ids=["length", "choices", "stop string", "prompt only", "reasoning"],
)
async def test_the_same_as_iterating(params, answer):
    engine = FakeEngine()
    iterated = [out async for out in engine.submit(PROMPT, params, answer=answer)]
    forwarded = []
    await engine.submit(PROMPT, params, answer=answer).forward(forwarded.append)
    assert by_choice(forwarded) == by_choice(iterated)
    assert all(choice[4] for choice in by_choice(forwarded).values())
    assert engine.num_streams == 0
    await engine.close()


async def test_what_came_before_is_forwarded_too():
    engine = FakeEngine()
    stream = engine.submit(PROMPT, LONG)
    outputs = [await anext(stream)]
    while len(stream._outputs) < 3:
        await asyncio.sleep(0)
    await stream.forward(outputs.append)
    assert sum(len(out.token_ids) for out in outputs) == 100
    await stream.forward(outputs.append)  # it has ended: nothing more comes
    assert outputs[-1].num_output == 100
    await engine.close()


async def test_of_a_loop_that_is_behind_outputs_are_merged():
    engine = FakeEngine()
    engine.paused.clear()
    stream = engine.submit(PROMPT, LONG)
    outputs = []
    job = asyncio.create_task(stream.forward(outputs.append))
    await asyncio.sleep(0.01)
    for _ in range(100):
        engine.gpu.step()
    assert outputs == []
    await job
    assert [len(out.token_ids) for out in outputs] == [1, 1, 1, 64, 33]
    await engine.close()


async def test_an_error_of_the_taker_ends_it():
    engine = FakeEngine()
    streams = [engine.submit(PROMPT, LONG) for _ in range(2)]
    taken = [], []

    def take(output):
        taken[0].append(output)
        if len(taken[0]) == 3:
            raise ConnectionResetError("gone")

    other = asyncio.create_task(streams[1].forward(taken[1].append))
    with pytest.raises(ConnectionResetError, match="gone"):
        await streams[0].forward(take)
    streams[0].abort()
    await other
    assert len(taken[0]) == 3
    assert sum(len(out.token_ids) for out in taken[1]) == 100  # the neighbour lost nothing
    assert len(engine.gpu.aborts) == 1
    await engine.close()


async def test_an_error_of_the_engine_comes_after_the_outputs():
    engine = FakeEngine()
    engine.paused.clear()
    stream = engine.submit(PROMPT, LONG)
    outputs = []
    job = asyncio.create_task(stream.forward(outputs.append))
    await asyncio.sleep(0.01)
    engine.gpu.step()
    stream._fail(EngineError("lost"))
    with pytest.raises(EngineError, match="lost"):
        await job
    assert [len(out.token_ids) for out in outputs] == [1]
    await engine.close()


async def test_cancelling_aborts_and_nothing_comes_later():
    engine = FakeEngine()
    engine.paused.clear()
    stream = engine.submit(PROMPT, LONG)
    outputs = []
    job = asyncio.create_task(stream.forward(outputs.append))
    await asyncio.sleep(0.01)
    job.cancel()
    await asyncio.sleep(0)
    engine.gpu.step()
    with pytest.raises(asyncio.CancelledError):
        await job
    await asyncio.sleep(0.01)
    assert outputs == []
    assert len(engine.gpu.aborts) == 1
    assert engine.num_streams == 0
    await engine.close()
