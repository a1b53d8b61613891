"""Programs that talk to the server: openai's client, our benchmark, our terminal chat."""

import argparse
import asyncio
import builtins
import json
import os
import signal

import openai
import pytest
from fake_engine import ANSWER
from served import Served, user

from stoker.engine.api.errors import EngineError, RequestError, StartError
from stoker.http import bench, chat, cli


async def test_openai_async():
    async with Served(api_key=("k",)) as s:
        url = s.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            create = client.chat.completions.create
            reply = await create(model="fake/model", messages=user("hi"), temperature=0)
            assert reply.choices[0].message.content == ANSWER
            assert reply.usage.prompt_tokens_details.cached_tokens == 0
            assert reply._request_id
            stream = await create(
                model="fake/model",
                messages=user("hi"),
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(pieces) == ANSWER
            assert chunks[-1].usage == reply.usage.model_copy(
                update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
            )
            async with client.chat.completions.stream(
                model="fake/model", messages=user("hi"), temperature=0
            ) as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == ANSWER
            with pytest.raises(openai.NotFoundError) as missing:
                await create(model="no-such", messages=user("x"))
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model="fake/model", messages=user("x"), temperature=-3)
            assert bad.value.param == "temperature"
            assert bad.value.body["message"]
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await client.models.list()
            assert unknown.value.code == "invalid_api_key"


async def test_openai_retries_when_the_queue_is_full():
    async with Served(max_running_requests=1, max_queued_requests=1) as s:
        s.engine.paused.clear()
        async with openai.AsyncOpenAI(base_url=s.url + "/v1", api_key="x") as client:
            jobs = [
                asyncio.create_task(
                    client.completions.create(model="fake/model", prompt="x", max_tokens=1)
                )
                for _ in range(3)
            ]
            while not s.server.metrics.rejected["queue_full"]:
                await asyncio.sleep(0.01)
            s.server.metrics.finish_rate = 1000.0
            s.engine.paused.set()
            assert all(reply.choices for reply in await asyncio.gather(*jobs))


async def test_openai_sync():
    def work(url):
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            raw = client.completions.with_raw_response.create(
                model="fake/model", prompt="hi", max_tokens=3, logprobs=1, temperature=0
            )
            reply = raw.parse()
            assert reply.choices[0].text == ANSWER[:3]
            assert reply.choices[0].logprobs.tokens == list(ANSWER[:3])
            assert raw.headers["x-request-id"]
            assert [model.id for model in client.models.list()] == ["fake/model"]
            assert client.models.retrieve("fake/model").id == "fake/model"

    async with Served() as s:
        await asyncio.to_thread(work, s.url + "/v1")


# --- bench ---


def flags(*given: str) -> argparse.Namespace:
    return cli._parser().parse_args(["bench", *given])


@pytest.mark.parametrize("load", [("--rate", "500"), ("--concurrency", "4")])
async def test_bench_serve(load, tmp_path, capsys):
    async with Served() as s:
        file, plot = tmp_path / "r.json", tmp_path / "r.png"
        arguments = flags(
            *("serve", "--url", s.url, "--requests", "12", "--prompt-len", "20", *load),
            *("--output-len", "10", "--vocab", "250", "--spread", "0.5", "--prefix-len", "8"),
            *("--goodput-ttft-ms", "1e9", "--json", str(file), "--plot", str(plot)),
        )
        assert await bench.bench_serve(arguments) == 0
        result = json.loads(file.read_text())
        lengths = [n for _, n in bench.make_load(arguments)]
        assert (result["requests"], result["failed"]) == (12, 0)
        assert result["output_tokens"] == sum(lengths)
        assert result["prompt_tokens"] == sum(len(p) for p, _ in bench.make_load(arguments))
        assert result["cached_tokens"] >= 11 * 8
        assert result["goodput_requests_per_s"] == pytest.approx(result["requests_per_s"])
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert "ttft_ms" in capsys.readouterr().out


async def test_bench_counts_failures(capsys):
    async with Served(max_model_len=32) as s:
        arguments = flags("serve", "--url", s.url, "--requests", "3", "--prompt-len", "64")
        arguments.vocab = 250
        assert await bench.bench_serve(arguments) == 1
        assert "context_length_exceeded" in capsys.readouterr().out
    with pytest.raises(StartError, match="no server at"):
        await bench.bench_serve(arguments)


async def test_bench_offline(capsys, tmp_path):
    async with Served() as s:
        file = tmp_path / "r.json"
        arguments = flags("offline", "--requests", "4", "--output-len", "5", "--json", str(file))
        assert await bench.bench_offline(s.engine, arguments) == 0
        assert json.loads(file.read_text())["output_tokens"] == 20


def test_percentiles_and_goodput():
    values = list(range(1, 101))
    assert bench.percentiles(values) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert bench.percentiles([7.0])["p99"] == 7.0
    samples = [
        bench.Sample(sent_s=0.0, chunks_s=[0.1, 0.2, 0.3], num_prompt=5, num_output=3),
        bench.Sample(sent_s=0.0, chunks_s=[0.4, 0.5, 1.0], num_prompt=5, num_output=3),
        bench.Sample(sent_s=0.0, error="503"),
    ]
    result = bench.summarise(samples, ttft_ms=200, tpot_ms=150)
    assert (result["requests"], result["failed"], result["first_error"]) == (3, 1, "503")
    assert result["output_tokens_per_s"] == pytest.approx(6.0)
    assert result["goodput_requests_per_s"] == pytest.approx(1.0)
    assert result["tpot_ms"]["max"] == pytest.approx(300)
    assert result["itl_ms"]["max"] == pytest.approx(500)


def test_the_same_seed_makes_the_same_load():
    one, two = flags("serve", "--seed", "3"), flags("serve", "--seed", "4")
    assert bench.make_load(one) == bench.make_load(one) != bench.make_load(two)


# --- chat ---


def typed(monkeypatch, lines):
    """Pretend that someone types these lines."""
    rest = iter(lines)

    def read(prompt):
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


@pytest.mark.parametrize("where", ["server", "process"])
async def test_chat(where, monkeypatch, capsys):
    async with Served() as s:
        seen = []
        render = s.engine.render

        async def watched(messages, **options):
            seen.append([message["role"] for message in messages])
            return await render(messages, **options)

        monkeypatch.setattr(s.engine, "render", watched)
        options = {"temperature": 0, "max_tokens": 11}
        if where == "server":
            model = chat.RemoteModel(s.url, None, options)
        else:
            model = chat.LocalModel(s.engine, options)
        typed(monkeypatch, ["one", "two", "/reset", "three", "/system Be brief.", "four", "/what"])
        await chat.converse(model)
        assert seen == [["user"], ["user", "assistant", "user"], ["user"], ["system", "user"]]
        printed = capsys.readouterr().out
        assert printed.count(ANSWER[:11]) == 4
        assert printed.count(chat.HELP) == 2
        if where == "server":
            await model.session.close()


async def test_ctrl_c_ends_the_answer_only(monkeypatch, capsys):
    async with Served() as s:
        s.engine.step_s = 0.01
        model = chat.LocalModel(s.engine, {"temperature": 0, "ignore_eos": True})
        typed(monkeypatch, ["long", "/exit"])
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, os.kill, os.getpid(), signal.SIGINT)
        await chat.converse(model)
        assert "(stopped)" in capsys.readouterr().out
        await s.until_idle()


async def test_chat_shows_errors(monkeypatch, capsys):
    async with Served(api_key=("k",)) as s:
        with pytest.raises(StartError, match="models: give a valid API key"):
            async with chat.RemoteModel(s.url, "wrong", {}):
                pass
        model = await chat.RemoteModel(s.url, "k", {"temperature": 9}).__aenter__()
        typed(monkeypatch, ["hi"])
        await chat.converse(model)
        assert "error: temperature" in capsys.readouterr().out
        with pytest.raises(RequestError):
            [piece async for piece in model.reply(user("x"))]
    with pytest.raises(EngineError):
        [piece async for piece in model.reply(user("x"))]
    await model.session.close()
    with pytest.raises(StartError, match="Cannot connect"):
        async with chat.RemoteModel(s.url, "k", {}):
            pass
