"""SGLang's /generate, the tokenizer routes, and the metrics page."""

import json
import re

from fake_engine import ANSWER
from prometheus_client.parser import text_string_to_metric_families
from served import CHAT, TEXT, Served, chat, text


async def test_generate():
    async with Served() as s:
        body = {"text": "hi", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
        reply = await s.ok("/generate", body)
        assert reply["text"] == ANSWER[:6]
        assert reply["output_ids"] == s.engine.sequence[:6]
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 6)
        assert meta["cached_tokens"] == 0
        ids = s.engine.tokenizer.encode("hi")
        same = await s.ok("/generate", {**body, "text": None, "input_ids": ids})
        assert same["text"] == reply["text"]
        assert same["meta_info"]["cached_tokens"] == 2
        default = await s.ok("/generate", {"text": "hi", "sampling_params": {"ignore_eos": True}})
        assert default["meta_info"]["completion_tokens"] == 128


async def test_generate_stops():
    async with Served() as s:
        sampling = {"temperature": 0, "stop": ["run"]}
        reply = await s.ok("/generate", {"text": "hi", "sampling_params": sampling})
        assert reply["text"] == "Rivers "
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "run"}
        sampling["no_stop_trim"] = True
        reply = await s.ok("/generate", {"text": "hi", "sampling_params": sampling})
        assert reply["text"] == "Rivers run"


async def test_generate_batch():
    async with Served() as s:
        sampling = {"temperature": 0, "max_new_tokens": 3}
        for field, prompts in (("text", ["a", "b"]), ("input_ids", [[65], [66]])):
            reply = await s.ok("/generate", {field: prompts, "sampling_params": sampling})
            assert [one["text"] for one in reply] == ["Riv", "Riv"]
        one = await s.ok("/generate", {"text": ["a"], "sampling_params": sampling})
        assert isinstance(one, list)


async def test_generate_logprobs():
    async with Served() as s:
        body = {
            "text": "hi",
            "sampling_params": {"temperature": 0, "max_new_tokens": 2},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        meta = (await s.ok("/generate", body))["meta_info"]
        ids = s.engine.sequence[:2]
        assert meta["output_token_logprobs"] == [[-0.1, token, None] for token in ids]
        assert meta["output_top_logprobs"][0] == [[-0.1, ids[0], None], [-1.1, ids[0] + 1, None]]
        assert "input_token_logprobs" not in meta
        meta = (await s.ok("/generate", body | {"logprob_start_len": 0}))["meta_info"]
        prompt = s.engine.tokenizer.encode("hi")
        assert [row[1] for row in meta["input_token_logprobs"]] == prompt
        assert meta["input_token_logprobs"][0][0] is None
        assert meta["input_top_logprobs"][0] is None
        meta = (await s.ok("/generate", body | {"logprob_start_len": 2}))["meta_info"]
        assert [row[1] for row in meta["input_token_logprobs"]] == prompt[2:]


async def test_generate_logprobs_of_several_choices():
    async with Served() as s:
        sampling = {"temperature": 1, "max_new_tokens": 2, "n": 3}
        body = {"text": "hi", "sampling_params": sampling, "return_logprob": True}
        body["logprob_start_len"] = 0
        prompt = s.engine.tokenizer.encode("hi")
        whole, events = await s.ok("/generate", body), await s.events("/generate", body)
        assert len(whole) == 3 and {event["index"] for event in events} == {0, 1, 2}
        for reply in whole + events:
            assert [row[1] for row in reply["meta_info"]["input_token_logprobs"]] == prompt


async def test_generate_ignores_no_field():
    async with Served() as s:

        async def generate(status=200, sampling=None, **fields):
            sampling = {"temperature": 0, "max_tokens": 2} | (sampling or {})
            body = {"text": "hello", "sampling_params": sampling, **fields}
            reply = await s.post("/generate", body)
            assert reply.status == status, reply.raw
            return reply.json if status == 200 else reply.error["param"]

        meta = (await generate(sampling={"truncate_prompt_tokens": 3}))["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 2)
        assert (await generate(request_id="me"))["meta_info"]["id"] == "me"
        await generate(sampling={"max_new_tokens": 2, "sampling_seed": 4})
        assert s.engine.gpu.adds[-1].params.seed == 4
        await generate(priority=3)
        assert s.engine.gpu.adds[-1].priority == 3
        for name, value in {
            "max_tokens": 3,
            "model": "x",
            "priority": 1,
            "request_id": "x",
            "rid": "x",
            "stream": True,
        }.items():
            sampling = {"max_new_tokens": 2, name: value}
            assert await generate(400, sampling) == f"sampling_params.{name}"
        for name, value in {
            "temperature": 0,
            "max_new_tokens": 3,
            "stop": "x",
            "logprobs": 1,
        }.items():
            assert await generate(400, **{name: value}) == name
        await generate(sampling={"max_new_tokens": 9, "min_new_tokens": 4, "max_tokens": None})
        assert s.engine.gpu.adds[-1].params.min_tokens == 4
        assert await generate(400, {"min_new_tokens": 4, "min_tokens": 3}) == (
            "sampling_params.min_tokens"
        )
        for name in ("lora_path", "image_data", "return_hidden_states"):
            assert await generate(400, **{name: "x"}) == name
        assert await generate(404, model="other") == "model"


async def test_generate_tells_choices_apart():
    async with Served() as s:
        sampling = {"temperature": 1, "max_new_tokens": 2, "n": 2, "sampling_seed": 1}
        body = {"text": ["a", "b"], "rid": "r", "sampling_params": sampling}
        events = await s.events("/generate", body)
        assert 4 <= len(events) <= 8  # outputs that nobody has read yet are merged
        assert {(e["index"], e["meta_info"]["id"]) for e in events} == {
            (i, f"r_{i}") for i in range(4)
        }
        assert [e["meta_info"]["id"] for e in await s.ok("/generate", body)] == [
            f"r_{i}" for i in range(4)
        ]


async def test_generate_stream_is_cumulative():
    async with Served() as s:
        sampling = {"temperature": 0, "max_new_tokens": 5}
        events = await s.events("/generate", {"text": "hi", "sampling_params": sampling})
        assert [event["text"] for event in events] == [ANSWER[:i] for i in range(1, 6)]
        finishes = [event["meta_info"]["finish_reason"] for event in events]
        assert finishes[:-1] == [None] * 4
        assert finishes[-1]["type"] == "length"


async def test_tokenize_and_back():
    async with Served() as s:
        words = "naïve 漢字 😀 test"
        body = {"prompt": words, "add_special_tokens": False, "return_token_strs": True}
        reply = await s.ok("/tokenize", body)
        assert reply["tokens"] == s.engine.tokenizer.encode(words, False)
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert reply["max_model_len"] == 4096
        assert (await s.ok("/detokenize", {"tokens": reply["tokens"]}))["prompt"] == words
        with_begin = await s.ok("/tokenize", {"prompt": words})
        assert with_begin["count"] == reply["count"] + 1
        chatted = await s.ok("/tokenize", {"messages": chat("hello")["messages"]})
        answered = await s.ok(CHAT, chat("hello"))
        assert chatted["count"] == answered["usage"]["prompt_tokens"]
        assert (await s.ok("/tokenize", {"prompt": ""}))["count"] == 1
        for wrong in (-1, 999):
            error = (await s.post("/detokenize", {"tokens": [65, wrong, 10**6]})).error
            assert f"id {wrong} " in error["message"]
            assert f" {s.engine.vocab_size}" in error["message"]


async def test_metrics_page():
    async with Served(served_model_name=("m1",)) as s:
        await s.ok(CHAT, chat(max_tokens=9))
        await s.events(TEXT, text(max_tokens=100))
        await s.post(CHAT, {})
        s.server.metrics.tick()
        reply = await s.get("/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain")
        page = reply.raw.decode()
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        num_tokens = 9 + len(s.engine.sequence)
        assert samples["stoker_generated_tokens_total",] == num_tokens
        assert samples["vllm:generation_tokens_total", "m1"] == num_tokens
        assert samples["stoker_choices_finished_total", "stop"] == 1
        assert samples["stoker_choices_finished_total", "length"] == 1
        assert samples["vllm:request_success_total", "length", "m1"] == 1
        assert samples["stoker_ttft_seconds_count",] == 2
        assert samples["vllm:time_to_first_token_seconds_count", "m1"] == 2
        assert samples["stoker_itl_seconds_count",] == num_tokens - 2
        assert samples["stoker_itl_seconds_bucket", "+Inf"] == num_tokens - 2
        assert samples["stoker_e2e_seconds_count",] == 2
        assert samples["stoker_request_output_tokens_sum",] == num_tokens
        assert samples["stoker_requests_running",] == 0
        assert samples["vllm:num_requests_running", "m1"] == 0
        assert samples["stoker_loop_cpu_seconds_total",] > 0
        assert samples["stoker_loop_seconds_per_token",] > 0
        names = ("python_seconds_per_step", "gil_wait_seconds_per_step", "device_idle_share")
        assert {f"stoker_{name}" for name in names} <= {name for name, *_ in samples}
        for name in re.findall(r"^([\w:]+)[ {]", page, re.M):
            assert name.startswith(("stoker_", "vllm:"))


async def test_no_client_makes_a_new_time_series():
    async with Served() as s:

        async def series():
            return (await s.get("/metrics")).raw.count(b"\n")

        await s.ok(CHAT, chat())
        before = await series()
        for i in range(20):
            name = f"odd-{i}"
            await s.ok(CHAT, chat(user=name, cache_salt=name, request_id=name), headers={})
            await s.post(CHAT, chat(model=name))
            await s.get(f"/{name}")
        assert await series() == before


async def test_the_root_says_where_to_go():
    async with Served(api_key=("k",)) as s:
        links = (await s.get("/")).json
        assert links.pop("server") == "stoker"
        for name, path in links.items():
            key = {"Authorization": "Bearer k"}
            status = (await s.get(path, headers=key)).status
            assert status == (404 if name == "api" else 200)


async def test_server_info_and_version():
    async with Served() as s:
        info = (await s.get("/server_info")).json
        assert info["stats"]["num_running"] == 0
        assert info["config"]["model"] == "fake"
        assert json.dumps(info)
        assert (await s.get("/version")).json == {"version": info["version"]}
