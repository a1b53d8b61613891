"""lm-eval's requests over HTTP, answered by a real model: its sums are those of transformers."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from stoker.engine import AsyncEngine
from stoker.http.app import make_app
from stoker.http.connection import listen, make_runner
from stoker.http.settings import ServerConfig

DATA = Path(__file__).parents[1] / "data" / "smollm2_loglikelihoods_fp32.json"


def loglikelihoods(answer: dict, context_lens: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval 0.4.13 reads an answer of /v1/completions."""
    found = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lens, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
        found.append((sum(values), is_greedy))
    return found


async def ask(payloads: list[dict]) -> list[dict]:
    config = ServerConfig(model="smollm2-135m", dtype="float32", port=0)
    async with await AsyncEngine.start(config) as engine:
        runner = make_runner(make_app(engine, config))
        await runner.setup()
        sock = listen(config)
        await web.SockSite(runner, sock).start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
        answers = []
        async with aiohttp.ClientSession() as session:
            for payload in payloads:
                async with session.post(url, json=payload) as response:
                    assert response.status == 200, await response.text()
                    answers.append(await response.json())
        await runner.cleanup()
    return answers


def test_loglikelihoods_with_echo(smollm2):
    items = json.loads(DATA.read_text())["items"]
    prompts = [item["context_ids"] + item["continuation_ids"] for item in items]
    lengths = [len(item["context_ids"]) for item in items]
    base = {
        "model": "smollm2-135m",
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    # The first of them once more, out of the cache: it must not lose log-probabilities.
    payloads = [{**base, "prompt": prompts}, {**base, "prompt": prompts[:2]}]
    whole, again = asyncio.run(ask(payloads))
    found = loglikelihoods(whole, lengths) + loglikelihoods(again, lengths[:2])
    for item, (loglikelihood, is_greedy) in zip(items + items[:2], found, strict=True):
        assert loglikelihood == pytest.approx(item["loglikelihood"], abs=1e-3)
        assert is_greedy == item["is_greedy"], item["continuation"]
