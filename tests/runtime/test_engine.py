"""The whole engine on a tiny random model: the tokens depend on the prompt and the seed alone."""

import asyncio
import json
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    RequestError,
    SamplingParams,
    StartError,
)
from stoker.engine.async_engine import Overloaded

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def config_of(folder, **options):
    options = {
        "dtype": "float32",
        "backend": "cpu",
        "max_running_requests": 32,
        "check": True,
    } | options
    return EngineConfig(model=str(folder), **options)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(70)]
    alone = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 64, 130)]
    return alone + [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 5, 40)]


@pytest.fixture(scope="module")
def expected(tiny_model, prompts):
    """Each prompt alone, without any cache."""
    with Engine(config_of(tiny_model, disable_radix_cache=True)) as engine:
        return [engine.generate([p], GREEDY)[0].token_ids for p in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1},
        {"page_size": 4, "chunked_prefill_size": 7},
        {"chunked_prefill_size": 33, "kv_tokens": 400, "page_size": 1},
        {"kv_tokens": 256, "page_size": 16},
        {"max_running_requests": 2},
    ],
    ids=str,
)
def test_greedy_tokens_are_the_same_however_they_are_computed(
    tiny_model, prompts, expected, options
):
    with Engine(config_of(tiny_model, **options)) as engine:
        for _ in range(2):  # the second time out of the prefix cache
            done = engine.generate(prompts, GREEDY)
            assert [c.token_ids for c in done] == expected
        if "kv_tokens" in options:
            assert engine.engine.stats.retractions > 0
        else:
            assert sum(c.num_cached for c in done) > 0


MIXED = [  # rows that need more than the draw, beside those that need nothing else
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=6, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=20, min_tokens=9, frequency_penalty=1.0),
    SamplingParams(temperature=0.7, seed=7, logit_bias={65: 4.0}, max_tokens=20),
]


@pytest.mark.parametrize("few", [False, True])
def test_captured_steps_change_nothing(tiny_model, prompts, monkeypatch, few):
    """On a device that captures a step by remembering its function; `few`: little room in it."""
    from stoker.backends.cpu import CpuRuntime
    from stoker.backends.cpu.native_ops import NativeOps
    from stoker.engine.runtime import graphs, inputs

    sample = NativeOps.sample  # where steps are captured, a draw must leave the logits alone
    monkeypatch.setattr(NativeOps, "sample", lambda self, x, rows: sample(self, x.clone(), rows))

    def run(**options):
        with Engine(config_of(tiny_model, max_running_requests=8, **options)) as engine:
            params = [MIXED[i % len(MIXED)] for i in range(len(prompts))]
            return [(c.token_ids, c.finish_reason) for c in engine.generate(prompts, params)]

    want = run()
    captured, replays = [], []

    def capture(self, function):
        function()
        captured.append(function)
        return lambda: (replays.append(function), function())

    monkeypatch.setattr(CpuRuntime, "has_graphs", True)
    monkeypatch.setattr(CpuRuntime, "capture", capture, raising=False)
    if few:
        monkeypatch.setattr(inputs, "ENTRIES_OF_DECODE", 0)
        monkeypatch.setattr(inputs, "ENTRIES_OF_CHUNKS", -7)
        monkeypatch.setattr(graphs, "CHUNK_TOKENS", (64, 128))
    assert run() == want
    assert len(captured) > 10 and len({id(f) for f in replays}) > 2


def test_overlap_changes_nothing(tiny_model, prompts, expected, monkeypatch):
    from stoker.backends.cpu import CpuRuntime
    from stoker.engine import gpu_thread

    seen = []
    start = gpu_thread.GPUThread.__init__

    def overlapped(self, *args, **kwargs):
        seen.append(1)
        start(self, *args, **{**kwargs, "overlap": True})

    assert not CpuRuntime.is_async
    monkeypatch.setattr(gpu_thread.GPUThread, "__init__", overlapped)
    for options in ({}, {"kv_tokens": 300, "page_size": 1}):
        with Engine(config_of(tiny_model, **options)) as engine:
            assert [c.token_ids for c in engine.generate(prompts, GREEDY)] == expected
    assert len(seen) == 2


def test_a_seed_gives_the_same_samples_in_any_batch(tiny_model, prompts):
    params = SamplingParams(
        temperature=1.0, top_p=0.95, seed=5, max_tokens=12, n=3, ignore_eos=True
    )
    with Engine(config_of(tiny_model)) as engine:
        together = [c.token_ids for c in engine.generate(prompts, params)]
        alone = [c.token_ids for p in prompts for c in engine.generate([p], params)]
    assert together == alone
    assert len({tuple(t) for t in together[:3]}) == 3  # the choices of one prompt differ


def test_stop_strings_and_tokens(tiny_model):
    with Engine(config_of(tiny_model)) as engine:
        full = engine.generate("stop test", GREEDY)[0]
        assert full.finish_reason == "length" and len(full.token_ids) == 24
        # A string in the middle that no earlier text can complete.
        at = next(i for i in range(4, len(full.text)) if full.text[i : i + 3].isascii())
        stop = full.text[at : at + 3]
        at = full.text.index(stop)
        cut = engine.generate("stop test", replace(GREEDY, stop=(stop,)))
        assert (cut[0].text, cut[0].finish_reason) == (full.text[:at], "stop")
        assert cut[0].stop_reason == stop
        token = full.token_ids[10]
        first = full.token_ids.index(token)
        params = replace(GREEDY, stop_token_ids=(token,))
        ended = engine.generate("stop test", params)[0]
        assert ended.token_ids == full.token_ids[: first + 1]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
        later = replace(GREEDY, stop_token_ids=(token,), min_tokens=first + 2)
        assert len(engine.generate("stop test", later)[0].token_ids) > first + 1


def test_logprobs_of_prompt_and_output_agree(tiny_model, prompts):
    """Scoring prompt + output in one request gives the log-probabilities that the output had."""
    with Engine(config_of(tiny_model, chunked_prefill_size=11)) as engine:
        prompt = prompts[5]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
        answer = engine.generate([prompt], params)[0]
        score = SamplingParams(max_tokens=0, prompt_logprobs=3)
        scored = engine.generate([prompt + answer.token_ids], score)[0]
    assert scored.token_ids == [] and scored.prompt_logprobs[0] is None
    for given, again in zip(answer.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
        assert given.top_token_ids == again.top_token_ids
        assert given.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert given.logprob == given.top_logprobs[0]  # greedy: the chosen one is the likeliest


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([1, 10**6], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1] * 600, SamplingParams(), "prompt"),
        ([1], SamplingParams(temperature=3), "temperature"),
        ([1], SamplingParams(top_p=0), "top_p"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(n=1000), "n"),
        ([1], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
        ([1], SamplingParams(logit_bias={1.5: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop=("",)), "stop"),
        ([1], SamplingParams(stop_token_ids=(5, 258), min_tokens=2), "stop_token_ids"),
        ([1], SamplingParams(stop_token_ids=(-1,), min_tokens=2), "stop_token_ids"),
        ([1], SamplingParams(stop_token_ids=(1.5,)), "stop_token_ids"),
        ([1], SamplingParams(stop_token_ids=("5", None)), "stop_token_ids"),
    ],
)
def test_a_bad_request_names_the_field(tiny_engine, prompt, params, param):
    with pytest.raises(RequestError) as error:
        tiny_engine.generate([prompt], params)
    assert error.value.param == param
    assert tiny_engine.generate("still here", GREEDY)[0].finish_reason == "length"


@pytest.fixture(scope="module")
def tiny_engine(tiny_model):
    with Engine(config_of(tiny_model)) as engine:
        yield engine


def test_a_load_with_aborts_leaks_nothing(tiny_model):
    """64 at once, 2,000 in all, a third of them abandoned at some point, in a pool too small."""

    async def run():
        rng = random.Random(11)
        config = config_of(
            tiny_model,
            kv_tokens=250,
            page_size=1,
            max_running_requests=48,
            schedule_conservativeness=0.1,  # admits more than fit, so that some are retracted
            check=False,
        )
        async with await AsyncEngine.start(config) as engine:
            slots = asyncio.Semaphore(64)
            shared = [[rng.randrange(256) for _ in range(40)] for _ in range(4)]

            async def one(i):
                async with slots:
                    prompt = [*rng.choice(shared)[: rng.randrange(1, 40)], i % 256]
                    params = SamplingParams(
                        temperature=rng.choice([0, 1]),
                        max_tokens=rng.randrange(1, 60),
                        n=rng.choice([1, 1, 2]),
                    )
                    leave_after = rng.choice([None, None, 0, 1, 5])
                    count = 0
                    async for _ in engine.generate(prompt, params):
                        count += 1
                        if leave_after is not None and count > leave_after:
                            return "left"
                    return "done"

            ends = await asyncio.wait_for(asyncio.gather(*map(one, range(2000))), 240)
            assert ends.count("done") > 600 and ends.count("left") > 300
            for _ in range(100):
                if engine.stats.num_running == engine.stats.num_waiting == 0:
                    break
                await asyncio.sleep(0.05)
            assert engine.num_streams == 0
            assert await engine.flush_cache() == 0
            await asyncio.sleep(0.1)
            stats = engine.stats
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_pages == stats.num_pages == 250
            assert stats.retractions > 0

    asyncio.run(run())


def test_cancelling_the_task_aborts_the_request(tiny_model):
    async def run():
        async with await AsyncEngine.start(config_of(tiny_model)) as engine:

            async def consume():
                async for _ in engine.generate(
                    [1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True)
                ):
                    pass

            task = asyncio.create_task(consume())
            while engine.stats.num_running == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                if engine.stats.num_running == 0:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("the request still runs")

    asyncio.run(run())


def test_a_full_queue_and_a_draining_engine_refuse(tiny_model):
    async def run():
        config = config_of(tiny_model, max_queued_requests=2, max_running_requests=1)
        async with await AsyncEngine.start(config) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            streams = [engine.submit([1], params) for _ in range(3)]
            with pytest.raises(Overloaded):
                engine.submit([1], params)
            for stream in streams:
                stream.abort()
            last = engine.submit([1], SamplingParams(max_tokens=3, ignore_eos=True))
            drained = asyncio.create_task(engine.drain(20))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                engine.submit([1], params)
            assert len([out async for out in last]) == 3
            assert await drained

    asyncio.run(run())


def test_the_death_of_the_gpu_thread_is_told(tiny_model, monkeypatch):
    from stoker.engine.api.errors import EngineError
    from stoker.engine.runtime.runner import ModelRunner

    async def run():
        engine = await AsyncEngine.start(config_of(tiny_model))
        told = []
        engine.on_fatal = told.append
        monkeypatch.setattr(ModelRunner, "launch", lambda *_: 1 / 0)
        with pytest.raises(EngineError):
            async for _ in engine.generate([1], GREEDY):
                pass
        assert isinstance(told[0], ZeroDivisionError) and not engine.is_healthy
        with pytest.raises(EngineError):
            engine.submit([1], GREEDY)
        await engine.close()

    asyncio.run(run())


def test_no_thread_is_left(tiny_model):
    before = set(threading.enumerate())
    with Engine(config_of(tiny_model)) as engine:
        engine.generate("x", GREEDY)
        assert {t.name for t in threading.enumerate()} >= {"stoker-gpu", "stoker-loop"}
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("stoker-")]
    assert not [t for t in left if not t.name.startswith("stoker-pool")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/no/such/folder"}, "no model"),
        ({"max_model_len": 100_000}, "max-model-len"),
        ({"chat_template": "/no/such/file"}, "chat-template"),
        ({"attention_backend": "nonsense"}, "nonsense"),
    ],
)
def test_a_start_that_cannot_work_says_why(tiny_model, options, words):
    with pytest.raises(StartError, match=words):
        Engine(config_of(options.pop("model", tiny_model), **options))


@pytest.fixture
def model_copy(tiny_model, tmp_path):
    """The tiny model in a folder whose files a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_beyond_the_vocabulary_are_ignored_with_one_warning(model_copy, file, caplog):
    path = model_copy / file
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | {"eos_token_id": [257, 999_999, 258]}))
    with Engine(config_of(model_copy)) as engine:
        held_back = SamplingParams(
            temperature=0, max_tokens=8, min_tokens=2, logit_bias={257: 100.0}
        )
        answer = engine.generate("x", held_back)[0]
        assert (answer.finish_reason, len(answer.token_ids)) == ("stop", 3)  # 257 still ends it
    warnings = [r.getMessage() for r in caplog.records if "end-of-sequence" in r.getMessage()]
    assert len(warnings) == 1
    assert "[258, 999999]" in warnings[0] and " 258 tokens" in warnings[0]


@pytest.mark.parametrize("value", ["257", "x", [None], 257.0, True, -1], ids=str)
def test_ends_that_are_no_token_ids_stop_the_start(model_copy, value):
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(StartError, match=r"eos_token_id of generation_config\.json is "):
        Engine(config_of(model_copy))


def test_a_tokenizer_that_is_larger_than_the_model_is_told(tiny_model, model_copy, caplog):
    def warnings_of(num_added):
        path = model_copy / "tokenizer.json"
        spec = json.loads((tiny_model / "tokenizer.json").read_text())
        added = spec["added_tokens"]
        del added[len(added) + min(num_added, 0) :]
        added += [{**added[0], "id": 258 + i, "content": f"<more{i}>"} for i in range(num_added)]
        path.write_text(json.dumps(spec))
        caplog.clear()
        with Engine(config_of(tiny_model, tokenizer=str(path))) as engine:
            assert engine.generate("x", GREEDY)[0].finish_reason == "length"
        return [r.getMessage() for r in caplog.records if "--tokenizer" in r.getMessage()]

    assert warnings_of(-1) == warnings_of(0) == []  # a model's own may be padded
    (warning,) = warnings_of(5)
    assert "has 263 tokens, the model 258" in warning


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: Is a directory"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        (b"{% for %}", "the chat template 'default' is not valid"),
    ],
)
def test_a_wrong_chat_template_is_told_by_flag_and_file(tiny_model, tmp_path, content, words):
    path = tmp_path / "template"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(StartError, match=f"^--chat-template {path}:? {words}"):
        Engine(config_of(tiny_model, chat_template=str(path)))


@pytest.mark.parametrize(
    "name",
    [
        *("model", "tokenizer", "chat_template", "disk_cache_dir", "cache_redis_url"),
        *("warm_prefixes", "step_log"),
    ],
)
def test_an_empty_path_is_refused(name):
    with pytest.raises(StartError, match=f"^{name}: must not be empty"):
        EngineConfig.of(**{name: ""})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modell": "x"}, "^there is no setting 'modell'$"),
        ({"max_running_requests": 0}, "^max_running_requests: Input should be .*, got 0$"),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "^--schedule-policy lpm orders"),
    ],
)
def test_wrong_options_are_one_line(options, words):
    with pytest.raises(StartError, match=words):
        Engine(**options)
