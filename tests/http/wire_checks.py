"""Checks that hold for any server and any model, as functions of a client.

`test_wire.py` runs them against the fake engine. Against a real server:

    python tests/http/wire_checks.py --url http://127.0.0.1:8000 [--key KEY] [--only NAME]
"""

import argparse
import asyncio
import json
import sys
import time
import traceback

import aiohttp


class Client:
    """What a check needs: `post`, `get`, `events`; the model's card."""

    def __init__(self, url, key=None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self):
        self.card = (await self.get("/v1/models"))["data"][0]
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def get(self, path, status=200, parse=json.loads):
        async with self.session.get(self.url + path) as response:
            raw = await response.read()
        assert response.status == status, raw[:300]
        return parse(raw)

    async def post(self, path, body, status=200):
        async with self.session.post(self.url + path, json=body) as response:
            raw = await response.read()
        assert response.status == status, raw[:300]
        return json.loads(raw)

    async def events(self, path, body):
        body = {**body, "stream": True}
        async with self.session.post(self.url + path, json=body) as response:
            raw = await response.read()
        assert response.status == 200, raw[:300]
        lines = [event[6:] for event in raw.split(b"\n\n") if event.startswith(b"data: ")]
        assert lines.pop() == b"[DONE]"
        return [json.loads(line) for line in lines]

    async def running(self):
        page = (await self.get("/metrics", parse=bytes.decode)).splitlines()
        [value] = [line.split()[-1] for line in page if line.startswith("stoker_requests_running ")]
        return float(value)


def text(prompt="The sea is", **fields):
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}


def chat(question="Say hello.", **fields):
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}


async def check_stream_equals_answer(c):
    usage = {"stream_options": {"include_usage": True}}
    for path, body in (("/v1/completions", text()), ("/v1/chat/completions", chat())):
        whole = await c.post(path, body)
        events = await c.events(path, {**body, **usage})
        choices = [event["choices"][0] for event in events[:-1]]
        pieces = [ch["text"] if "text" in ch else ch["delta"].get("content", "") for ch in choices]
        [choice] = whole["choices"]
        assert "".join(pieces) == choice.get("text", choice.get("message", {}).get("content"))
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        assert events[-1]["choices"] == []
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [events[-1]["usage"][n] for n in counts] == [whole["usage"][n] for n in counts]


async def check_scoring(c):
    """What lm-eval asks: log-probabilities of the prompt, equal to the top one where greedy."""
    ids = (await c.post("/tokenize", {"prompt": "Paris is the capital of France."}))["tokens"]
    body = text([ids, ids[:3]], echo=True, logprobs=1, max_tokens=1, seed=1234)
    reply = await c.post("/v1/completions", body)
    for choice, tokens in zip(reply["choices"], (ids, ids[:3]), strict=True):
        part = choice["logprobs"]
        assert len(part["tokens"]) == len(tokens) + 1
        assert part["token_logprobs"][0] is None
        for value, top in zip(part["token_logprobs"][1:], part["top_logprobs"][1:], strict=True):
            assert value <= max(top.values()) <= 0
        assert part["token_logprobs"][-1] == max(part["top_logprobs"][-1].values())
    only = await c.post("/v1/completions", body | {"max_tokens": 0})
    assert only["usage"]["completion_tokens"] == 0
    for choice, full in zip(only["choices"], reply["choices"], strict=True):
        got, want = choice["logprobs"]["token_logprobs"], full["logprobs"]["token_logprobs"]
        pairs = zip(got[1:], want[1:], strict=False)
        assert all(abs(a - b) < 0.05 for a, b in pairs), (got, want)


async def check_logprob_bytes(c):
    body = chat("Write an emoji and a Chinese word.", max_tokens=24, logprobs=True, top_logprobs=2)
    reply = await c.post("/v1/chat/completions", body | {"skip_special_tokens": False})
    [choice] = reply["choices"]
    raw = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"])
    got = choice["message"]["content"]
    assert raw.decode("utf-8", "replace").startswith(got.rstrip("\ufffd"))


async def check_native_agrees(c):
    ids = (await c.post("/tokenize", {"prompt": "The sea is"}))["tokens"]
    openai = await c.post("/v1/completions", text(return_token_ids=True))
    sampling = {"temperature": 0, "max_new_tokens": 12}
    native = await c.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert native["text"] == openai["choices"][0]["text"]
    assert native["output_ids"] == openai["choices"][0]["token_ids"]
    assert openai["choices"][0]["prompt_token_ids"] == ids
    assert native["meta_info"]["prompt_tokens"] == openai["usage"]["prompt_tokens"] == len(ids)


async def check_choices_and_seeds(c):
    body = text(n=3, temperature=1.0, seed=7, max_tokens=16)
    first = await c.post("/v1/completions", body)
    again = await c.post("/v1/completions", body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) > 1
    assert first["usage"]["completion_tokens"] <= 48


async def check_prefix_cache(c):
    question = f"{time.time()} " + "the ship sailed north along the coast. " * 10
    first = (await c.post("/v1/chat/completions", chat(question)))["usage"]
    again = (await c.post("/v1/chat/completions", chat(question)))["usage"]
    salted = (await c.post("/v1/chat/completions", chat(question, cache_salt="s")))["usage"]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in (first, again, salted)]
    assert cached[1] > cached[0]
    assert cached[1] > cached[2]
    assert cached[1] < again["prompt_tokens"]


async def check_errors(c):
    limit = c.card["max_model_len"]
    for path, body, status, code in (
        ("/v1/completions", text([1] * (limit + 1)), 400, "context_length_exceeded"),
        ("/v1/completions", text([10**9]), 400, None),
        ("/v1/completions", text(temperature=3), 400, None),
        ("/v1/chat/completions", chat(model="no/such"), 404, "model_not_found"),
        ("/v1/chat/completions", {"messages": []}, 400, None),
    ):
        for stream in (False, True):
            error = (await c.post(path, {**body, "stream": stream}, status))["error"]
            assert error["code"] == code, error
            assert error["message"]


async def check_leaving_frees(c):
    async def leave():
        body = text("Tell a story.", max_tokens=2000, ignore_eos=True, stream=True)
        async with c.session.post(c.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()

    await asyncio.gather(*(leave() for _ in range(6)))
    began = time.perf_counter()
    while await c.running():
        assert time.perf_counter() - began < 5, "work goes on after its clients left"
        await asyncio.sleep(0.1)


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}


async def main(arguments):
    failed = 0
    async with Client(arguments.url, arguments.key) as client:
        for name, check in CHECKS.items():
            if arguments.only not in (None, name):
                continue
            began = time.perf_counter()
            try:
                await check(client)
                result = "ok"
            except Exception:
                result = "FAILED\n" + traceback.format_exc(limit=-2)
                failed += 1
            print(f"{name:24} {time.perf_counter() - began:6.2f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--only", choices=CHECKS)
    sys.exit(asyncio.run(main(parser.parse_args())))
