"""Prefixes out of a file, and the cache's events, through the whole engine."""

import asyncio
import json
import random

import numpy as np
import pytest

from stoker.engine import AsyncEngine, EngineConfig, SamplingParams, StartError
from stoker.engine.core.page_keys import extend, root_key

rng = random.Random(1)
SYSTEM = "You answer in one word, in the language of the question, and never more than that."


def config_of(folder, **options):
    options = {"kv_tokens": 512, "page_size": 4, "dtype": "float32", "check": True} | options
    return EngineConfig(model=str(folder), backend="cpu", max_running_requests=8, **options)


def file_of(tmp_path, *lines):
    file = tmp_path / "warm.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(file)


async def cached(engine, prompt, **options):
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return [out.num_cached async for out in engine.generate(prompt, params, **options)][-1]


def test_prefixes_are_cached_at_the_start_and_outlive_others(tiny_model, tmp_path):
    messages = [{"role": "system", "content": SYSTEM}]
    ids = [rng.randrange(256) for _ in range(41)]
    file = file_of(
        tmp_path,
        {"messages": messages},
        "",
        {"prompt": "Once upon a time there was a cache.", "cache_salt": "s"},
        {"prompt": ids, "pin": 0},
    )

    async def run():
        async with await AsyncEngine.start(config_of(tiny_model, warm_prefixes=file)) as engine:
            question = [*messages, {"role": "user", "content": "Why?"}]
            text = await engine.render(question, add_generation_prompt=False)
            chat = await engine.encode(text, add_special_tokens=False)
            system_len = len(f"system: {SYSTEM}\n")  # a token is a byte
            story = "Once upon a time there was a cache. It was full."
            assert await cached(engine, chat) == system_len // 4 * 4
            assert await cached(engine, story, namespace=("salt", "s")) == 32
            assert await cached(engine, story) == 0
            assert await cached(engine, [*ids, 7]) == 40
            for _ in range(8):  # 800 tokens through a pool of 512
                await cached(engine, [rng.randrange(256) for _ in range(100)])
            assert engine.stats.evicted_pages > 50
            assert await cached(engine, [*ids, 8]) == 0
            assert await cached(engine, [*chat[:-1], 9]) >= system_len // 4 * 4
            assert await cached(engine, story, namespace=("salt", "s")) >= 32

    asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x"', "line 2: want a JSON object"),
        ("[1]", "line 2: want a JSON object"),
        ({"prompt": "x", "pim": 1}, "line 2: pim: Extra inputs"),
        ({"prompt": "x", "pin": -1}, "line 2: pin: Input should be greater"),
        ({"pin": 1}, "line 2: want either prompt or messages"),
        (
            {"messages": [{"role": "frob", "content": "x"}]},
            r"line 2: messages\.0\.role: Input should be 'system'",
        ),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\.0: a user message needs content"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            r"line 2: messages\.0\.content\.str: Input should be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "line 2: this model takes",
        ),
        ({"prompt": []}, "line 2: the prompt is empty"),
        ({"prompt": [5] * 600}, "line 2: the prompt has 600 tokens"),
        ({"prompt": [99999]}, "line 2: prompt: token id 99999"),
    ],
)
def test_a_wrong_line_stops_the_start(tiny_model, tmp_path, line, words):
    file = file_of(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(StartError, match=words):
        asyncio.run(AsyncEngine.start(config_of(tiny_model, warm_prefixes=file)))


def test_a_missing_file_stops_the_start(tiny_model):
    with pytest.raises(StartError, match=r"--warm-prefixes none\.jsonl: .*No such file"):
        asyncio.run(AsyncEngine.start(config_of(tiny_model, warm_prefixes="none.jsonl")))


def test_events_tell_what_is_cached(tiny_model):
    async def run():
        options = {"cache_events": True}
        async with await AsyncEngine.start(config_of(tiny_model, **options)) as engine:
            known = {}

            async def follow():
                async for event in engine.cache_feed.follow(60):
                    if event.kind == "removed":
                        for key in event.keys:
                            del known[key]
                    else:
                        known.update(dict.fromkeys(event.keys, event.namespace))

            task = asyncio.create_task(follow())
            await asyncio.sleep(0)
            for _ in range(8):
                await cached(engine, [rng.randrange(256) for _ in range(100)])
            prompt = [rng.randrange(256) for _ in range(100)]
            await cached(engine, prompt, namespace=("salt", "x"))
            await asyncio.sleep(0.1)  # for the follower's turn, and the last step's events
            keys = []
            extend(keys, root_key(("salt", "x")), np.array(prompt, np.int32), 4)
            assert len(keys) == 25 and [known.get(key) for key in keys] == [("salt", "x")] * 25
            assert len(known) == engine.stats.num_cached_pages
            assert await engine.flush_cache() == 0
            await asyncio.sleep(0.1)
            assert not known
            await engine.close()
            await task

    asyncio.run(run())
