"""Faults inside the engine, in this process: memory, decoding, a thread that is stuck."""

import asyncio
import logging
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.engine import AsyncEngine, Engine, EngineConfig, SamplingParams
from stoker.engine import gpu_thread as gpu
from stoker.engine.api.errors import EngineError, Overloaded
from stoker.engine.api.grammar import GrammarSpec
from stoker.engine.runtime.runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def start(folder, **options) -> AsyncEngine:
    options = {"dtype": "float32", "backend": "cpu", "check": True, "threads": 1} | options
    return await AsyncEngine.start(EngineConfig(model=str(folder), **options))


async def tokens_of(engine, prompt, params=GREEDY) -> list[int]:
    return [t async for out in engine.generate(prompt, params) for t in out.token_ids]


async def assert_clean(engine) -> None:
    """Every page is back."""
    assert engine.num_streams == 0
    assert await engine.flush_cache() == 0
    await asyncio.sleep(0.05)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)


@pytest.fixture(params=[False, True], ids=["alternating", "overlap"])
def overlap(request, monkeypatch):
    """The CPU's steps with one in flight, as on a GPU."""
    if request.param:
        init = gpu.GPUThread.__init__
        monkeypatch.setattr(
            gpu.GPUThread, "__init__", lambda self, *a, **k: init(self, *a, **k | {"overlap": True})
        )
    return request.param


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError(),
)


async def test_steps_that_do_not_fit_the_memory(tiny_model, monkeypatch, overlap, caplog):
    """Launches fail by size and by chance, before or after their kernels; the tokens are right."""
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(n)] for n in (3, 150, 40, 70, 9, 33)]
    penalised = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.2
    )
    constrained = replace(GREEDY, grammar=GrammarSpec("regex", "(ab|cd|efg){9,}", param="regex"))
    params = [GREEDY, constrained, penalised, GREEDY, penalised, constrained]
    async with await start(tiny_model) as engine:
        expected = [await tokens_of(engine, *pair) for pair in zip(prompts, params, strict=True)]
    launch = ModelRunner.launch
    failures = 0

    def fail(self, plan, *rest):
        nonlocal failures
        if plan.num_tokens > draw.choice([10, 20, 60, 1000, 1000, 1000]):
            if draw.random() < 0.5:
                launch(self, plan, *rest)
            failures += 1
            raise draw.choice(ERRORS)
        return launch(self, plan, *rest)

    monkeypatch.setattr(ModelRunner, "launch", fail)
    async with await start(tiny_model, disable_radix_cache=True) as engine:
        for _ in range(2):
            jobs = (tokens_of(engine, *pair) for pair in zip(prompts, params, strict=True))
            assert await asyncio.gather(*jobs) == expected
        assert engine.stats.undone_steps == failures > 4
        await assert_clean(engine)
    assert "no device memory for a step of" in caplog.text


async def test_a_request_for_which_there_is_never_memory(tiny_model, monkeypatch, overlap):
    launch = ModelRunner.launch

    def fail(self, plan, *rest):
        if plan.kv_lens.max() > 100:
            raise ERRORS[0]
        return launch(self, plan, *rest)

    async with await start(tiny_model) as engine:
        expected = await tokens_of(engine, [1, 2, 3])
        monkeypatch.setattr(ModelRunner, "launch", fail)
        big = asyncio.create_task(tokens_of(engine, [7] * 150))
        assert await tokens_of(engine, [1, 2, 3]) == expected
        with pytest.raises(EngineError, match=r"no memory for one token after 100 of this request"):
            await big
        assert engine.is_healthy
        await assert_clean(engine)


async def test_another_error_is_not_taken_for_a_lack_of_memory(tiny_model, monkeypatch):
    async with await start(tiny_model) as engine:

        def fail(self, plan, *rest):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(ModelRunner, "launch", fail)
        with pytest.raises(EngineError, match="failed while it worked on this"):
            await tokens_of(engine, [1])
        assert not engine.is_healthy and engine.stats.undone_steps == 0


class Broken:
    """A detokenizer that fails after some tokens."""

    stopped = None
    num_tokens = 0

    def __init__(self):
        self.calls = 0

    def feed(self, token_ids):
        self.calls += 1
        if self.calls == 7:
            raise ValueError("bad vocabulary")
        return ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("num_tokens", [2, 200], ids=["at the close", "while it serves"])
async def test_a_full_disk_ends_the_step_log_alone(tiny_model, caplog, capfd, num_tokens):
    params = replace(GREEDY, max_tokens=num_tokens)
    engine = await start(tiny_model, step_log="/dev/full")
    for _ in range(2):
        assert len(await tokens_of(engine, "x", params)) == num_tokens
    await assert_clean(engine)
    ends = "--step-log /dev/full ends here: No space left on device"
    assert (ends in caplog.messages) == (num_tokens == 200)  # the file has a buffer
    await engine.close()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [ends]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_text_that_cannot_be_decoded_fails_alone(tiny_model, caplog):
    async with await start(tiny_model) as engine:
        expected = await tokens_of(engine, [1, 2, 3])
        others = [asyncio.create_task(tokens_of(engine, [1, 2, 3])) for _ in range(5)]
        bad = engine.submit([9, 9], GREEDY)
        bad._detokenizers[0] = Broken()
        assert await asyncio.gather(*others) == [expected] * 5
        with pytest.raises(EngineError, match="could not be decoded"):
            async for _ in bad:
                pass
        assert "bad vocabulary" in caplog.text
        await assert_clean(engine)


async def test_a_stuck_thread_is_given_up(tiny_model, monkeypatch, capfd, caplog):
    released = threading.Event()
    launch = ModelRunner.launch

    def hang(self, plan, *rest):
        released.wait(20)
        return launch(self, plan, *rest)

    caplog.set_level(logging.CRITICAL)
    engine = await start(tiny_model, watchdog_s=1)
    died = asyncio.Event()
    engine.on_fatal = lambda error: died.set()
    await asyncio.sleep(1.6)  # an idle thread is well
    assert engine.is_healthy
    monkeypatch.setattr(ModelRunner, "launch", hang)
    began = engine.loop.time()
    with pytest.raises(EngineError):
        await tokens_of(engine, [1, 2])
    assert died.is_set() and not engine.is_healthy
    assert 0.7 < engine.loop.time() - began < 3
    assert "in hang" in capfd.readouterr().err
    assert "stuck for 1 s" in caplog.text
    with pytest.raises(EngineError):
        await tokens_of(engine, [1, 2])
    await engine.close()  # does not wait for the stuck thread
    assert engine.loop.time() - began < 5
    released.set()
    engine._thread.join(5)
    assert not engine._thread.is_alive()


async def test_a_request_waits_only_so_long(tiny_model):
    async with await start(tiny_model, max_running_requests=1, queue_timeout=0.2) as engine:
        first = asyncio.create_task(tokens_of(engine, [1], LONG))
        await asyncio.sleep(0)
        refused = 0
        while not first.done():  # it is refused while the first still runs, or served after it
            try:
                assert len(await tokens_of(engine, [2])) == 24
            except Overloaded as error:
                assert error.reason == "queue_timeout" and "0.2 s" in error.message
                refused += 1
        assert len(await first) == 400
        assert refused >= 1
        await assert_clean(engine)


async def test_queue_limits_hold_between_steps(tiny_model):
    """A burst is refused by what it sent itself, before the GPU thread has seen any of it."""
    limits = {"max_running_requests": 2, "max_queued_requests": 5, "max_queued_tokens": 40}
    async with await start(tiny_model, **limits) as engine:
        for length, expected in ((1, 2 + 5), (20, 2 + 2), (41, 2 + 1)):
            streams, reasons = [], set()
            for _ in range(50):
                try:
                    streams.append(engine.submit([3] * length, GREEDY))
                except Overloaded as error:
                    reasons.add(error.reason)
            assert (len(streams), reasons) == (expected, {"queue_full"})
            for stream in streams:
                assert sum([len(out.token_ids) async for out in stream]) == 24
            for _ in range(100):
                if engine.stats.num_running == engine.stats.num_waiting == 0:
                    break
                await asyncio.sleep(0.01)
        await assert_clean(engine)


def test_a_batch_of_plain_code_waits_for_the_queue(tiny_model):
    """Who calls Engine.generate has no use for a 503."""
    config = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        backend="cpu",
        threads=1,
        max_running_requests=2,
        max_queued_requests=4,
        max_queued_tokens=30,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=2)
    with Engine(config) as engine:
        done = engine.generate([[i] * 12 for i in range(20)], params)
    assert [len(c.token_ids) for c in done] == [4] * 40


async def test_outputs_that_nobody_reads_are_merged(tiny_model):
    async with await start(tiny_model) as engine:
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        expected = await tokens_of(engine, [5, 6], params)
        stream = engine.submit([5, 6], params)
        while engine.stats.generated_tokens < 300:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        outputs = [out async for out in stream]
        assert [t for out in outputs for t in out.token_ids] == expected
        assert [len(out.token_ids) for out in outputs] == [1, 1, 1, 64, 64, 19]
        assert outputs[-1].finish_reason == "length" and outputs[-1].num_output == 150


async def test_whoever_leaves_a_flush_harms_nobody(tiny_model):
    async with await start(tiny_model) as engine:
        flush = asyncio.create_task(engine.flush_cache())
        job = asyncio.create_task(tokens_of(engine, [1, 2, 3]))
        await asyncio.sleep(0)
        flush.cancel()
        assert len(await job) == 24
        assert await engine.flush_cache() == 0


def test_a_loop_that_ends_without_closing_the_engine(tiny_model):
    """The GPU thread does not outlive it, and does not complain."""
    threads = []

    async def leave():
        engine = await start(tiny_model)
        threads.append(engine._thread)
        engine.submit([1], LONG)

    complaints = []
    hook, threading.excepthook = threading.excepthook, complaints.append
    try:
        asyncio.run(leave())
        threads[0].join(10)
    finally:
        threading.excepthook = hook
    assert not threads[0].is_alive()
    assert complaints == []
