"""Whole answers and streams of chat and completions: fields, usage, log-probabilities."""

import json
import math
import random
import time

import pytest
from fake_engine import ANSWER
from hypothesis import given, settings
from hypothesis import strategies as st
from served import CHAT, TEXT, Served, chat, joined, text, user

from stoker.engine.async_engine import Output
from stoker.engine.text.chat_template import ChatTemplate
from stoker.http.sse import BEHIND_BYTES, EventStream

NUM_BYTES = len(ANSWER.encode())


async def test_chat_answer():
    async with Served() as s:
        reply = await s.ok(CHAT, chat("hi", max_tokens=1000))
        assert reply["object"] == "chat.completion"
        assert reply["id"].startswith("chatcmpl-")
        assert abs(reply["created"] - time.time()) < 5
        assert reply["model"] == "fake/model"
        assert reply["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        num_prompt = len("<user>hi</user><assistant>") + 1  # and the begin token
        assert reply["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": NUM_BYTES + 1,
            "total_tokens": num_prompt + NUM_BYTES + 1,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


async def test_completion_answer():
    async with Served(served_model_name=("a/b", "c")) as s:
        reply = await s.ok(TEXT, text("hi", max_tokens=5, model="c", return_token_ids=True))
        assert reply["object"] == "text_completion"
        assert reply["id"].startswith("cmpl-")
        assert reply["model"] == "c"
        assert reply["choices"] == [
            {
                "index": 0,
                "text": ANSWER[:5],
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": s.engine.sequence[:5],
                "prompt_token_ids": s.engine.tokenizer.encode("hi"),
            }
        ]


async def test_nulls_are_absent_and_unknown_fields_ignored():
    async with Served() as s:
        names = (
            "frequency_penalty logit_bias logprobs top_logprobs max_completion_tokens n "
            "presence_penalty response_format seed stop stream stream_options top_p tools "
            "tool_choice user metadata suffix guided_json chat_template"
        ).split()
        plain = await s.ok(CHAT, chat())
        nulls = await s.ok(CHAT, chat(**dict.fromkeys(names), x_vendor={"a": 1}, store=False))
        assert nulls["choices"] == plain["choices"]
        reply = await s.ok(TEXT, text(max_tokens=None))
        assert reply["usage"]["completion_tokens"] == 16


async def test_content_parts_and_roles():
    async with Served() as s:
        plain = await s.ok(CHAT, chat("ab"))
        part = {"type": "text", "text": "ab"}
        parts = await s.ok(CHAT, chat(messages=[{"role": "user", "content": [part]}]))
        assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        await s.ok(CHAT, chat(messages=[{"role": "user", "content": []}]))
        two = await s.ok(CHAT, chat(messages=[{"role": "user", "content": [part, part]}]))
        assert two["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 3
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history = [
            *user("a"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ]
        await s.ok(CHAT, chat(messages=history))


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}", "<a><>"),
        ("{% for m in messages %}{{ m.content | trim }};{% endfor %}", "a;;"),
        ("{% for m in messages %}{% if m.content is none %}-{% endif %}{% endfor %}", "-"),
        (
            "{% for m in messages %}{% set c = m['content'] %}"
            "{% if c is not none %}{{ c }}{% endif %}{% endfor %}",
            "a",
        ),
        ("{% for m in messages %}{% if 'content' not in m %}-{% endif %}{% endfor %}", "-"),
        ("{% for m in messages %}{% if m.content is defined %}+{% endif %}{% endfor %}", "+"),
    ],
)
async def test_an_assistant_message_without_content(source, want):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with Served() as s:
        s.engine.chat_template = ChatTemplate(source, {})
        for content in ({}, {"content": None}):
            history = [*user("a"), {"role": "assistant", "tool_calls": [call], **content}]
            await s.ok(CHAT, chat(messages=history))
            assert s.engine.tokenizer.decode(s.engine.gpu.adds[-1].prompt) == want


async def test_a_template_that_fails_says_why():
    async with Served() as s:
        s.engine.chat_template = ChatTemplate("{{ messages[0].odd.field }}", {})
        reply = await s.post(CHAT, chat())
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "no attribute 'odd'" in reply.error["message"]
        assert "/" not in reply.error["message"]
        s.engine.chat_template = ChatTemplate("{{ raise_exception('Turns must alternate') }}", {})
        reply = await s.post(CHAT, chat(stream=True))
        assert (reply.status, reply.error["message"]) == (400, "Turns must alternate")


async def test_template_options():
    async with Served() as s:
        base = (await s.ok(CHAT, chat()))["usage"]["prompt_tokens"]

        async def extra(**fields):
            return (await s.ok(CHAT, chat(**fields)))["usage"]["prompt_tokens"] - base

        assert await extra(add_generation_prompt=False) == -len("<assistant>")
        assert await extra(chat_template_kwargs={"thinking": True}) == len("think")
        open_end = [*user("hi"), {"role": "assistant", "content": "I say: "}]
        want = len("<assistant>I say: ") - len("<assistant>")
        assert await extra(messages=open_end, continue_final_message=True) == want
        tool = {"type": "function", "function": {"name": "f"}}
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
            assert await extra(tools=[tool], **choice) > 20


async def test_stop_strings():
    async with Served() as s:
        for stop in ("sea", ["zzz", "sea"]):
            reply = await s.ok(TEXT, text(stop=stop, max_tokens=100))
            [choice] = reply["choices"]
            assert choice["text"] == "Rivers run to the "
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "sea")
            assert reply["usage"]["completion_tokens"] == len("Rivers run to the sea")
            events = await s.events(TEXT, text(stop=stop, max_tokens=100))
            assert joined(events) == choice["text"]
        reply = await s.ok(TEXT, text(stop="sea", max_tokens=100, include_stop_str_in_output=True))
        assert reply["choices"][0]["text"] == "Rivers run to the sea"
        space = s.engine.tokenizer.encode(" ", False)[0]
        reply = await s.ok(TEXT, text(stop_token_ids=[space], max_tokens=100))
        assert reply["choices"][0]["text"] == "Rivers"
        assert reply["choices"][0]["stop_reason"] == space


async def test_lengths():
    async with Served() as s:
        reply = await s.ok(CHAT, chat(max_tokens=9, max_completion_tokens=3))
        assert reply["usage"]["completion_tokens"] == 3
        reply = await s.ok(TEXT, text(max_tokens=200, ignore_eos=True))
        assert reply["usage"]["completion_tokens"] == 200
        reply = await s.ok(TEXT, text(max_tokens=200, min_tokens=NUM_BYTES + 5))
        assert reply["usage"]["completion_tokens"] == 2 * (NUM_BYTES + 1)


async def test_sampling_fields_reach_the_engine():
    async with Served() as s:
        s.engine.default_sampling = {"temperature": 0.6, "top_k": 40}
        await s.ok(CHAT, {"messages": user("x"), "max_tokens": 1})
        fields = {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "seed": 7,
            "n": 2,
            "ignore_eos": True,
            "min_tokens": 1,
            "skip_special_tokens": False,
        }
        body = {"messages": user("x"), "max_tokens": 2, "priority": 3, "cache_salt": "s"}
        await s.ok(CHAT, {**body, **fields, "logit_bias": {"5": 1.5}, "stop": "q"})
        plain, full = s.engine.gpu.adds
        assert (plain.params.temperature, plain.params.top_k) == (0.6, 40)
        assert plain.namespace == ()
        for name, value in fields.items():
            assert getattr(full.params, name) == value
        assert full.params.logit_bias == {5: 1.5}
        assert full.params.stop == ("q",)
        assert (full.priority, full.namespace, full.seed) == (3, ("salt", "s"), 7)
        await s.ok(CHAT, {"messages": user("x"), "max_tokens": 1, "top_p": 0})
        assert s.engine.gpu.adds[-1].params.is_greedy


async def test_many_choices():
    async with Served() as s:
        body = chat(n=3, temperature=1.0, seed=5, max_tokens=20)
        reply = await s.ok(CHAT, body)
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert len(set(texts)) == 3
        one = await s.ok(CHAT, chat())
        assert reply["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        num_output = reply["usage"]["completion_tokens"]
        assert num_output > 20
        events = await s.events(CHAT, body | {"stream_options": {"include_usage": True}})
        assert [joined(events, i) for i in range(3)] == texts
        assert events[-1]["usage"]["completion_tokens"] == num_output
        finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert sorted(finished) == [0, 1, 2]
        greedy = await s.ok(CHAT, chat(n=2))
        assert greedy["choices"][0]["message"] == greedy["choices"][1]["message"]


async def test_many_prompts():
    async with Served() as s:
        prompts = ["one", "three", "five5"]
        body = text(prompts, n=2, max_tokens=4, echo=True)
        reply = await s.ok(TEXT, body)
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))
        assert [c["text"] for c in reply["choices"]] == [
            prompt + ANSWER[:4] for prompt in prompts for _ in range(2)
        ]
        assert reply["usage"]["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)
        assert reply["usage"]["completion_tokens"] == 6 * 4
        events = await s.events(TEXT, body | {"stream_options": {"include_usage": True}})
        for i in range(6):
            assert joined(events, i) == reply["choices"][i]["text"]
        assert events[-1]["usage"] == {
            **reply["usage"],
            "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        ids = await s.ok(TEXT, text([[65, 66], [67]], echo=True, max_tokens=1))
        want = [s.engine.tokenizer.decode([65, 66]) + "R", s.engine.tokenizer.decode([67]) + "R"]
        assert [choice["text"] for choice in ids["choices"]] == want


async def test_one_bad_prompt_starts_none():
    async with Served(max_model_len=32) as s:
        reply = await s.post(TEXT, text([[1], [2], [3] * 40]))
        assert reply.status == 400
        await s.until_idle()


async def test_best_of_ranks_by_mean_logprob(monkeypatch):
    async with Served() as s:
        logprob = s.engine.gpu._logprob

        def better_with_choice(token, k):
            entry = logprob(token, k)
            return type(entry)(-1.0 if token % 2 else -0.1, (), ())

        monkeypatch.setattr(s.engine.gpu, "_logprob", better_with_choice)
        body = text(n=2, best_of=8, temperature=1.0, seed=3, max_tokens=6, return_token_ids=True)
        reply = await s.ok(TEXT, body)
        scores = [
            sum(-1.0 if token % 2 else -0.1 for token in choice["token_ids"]) / 6
            for choice in reply["choices"]
        ]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert scores == sorted(scores, reverse=True)
        assert reply["choices"][0]["logprobs"] is None
        assert s.engine.gpu.adds[0].params.n == 8
        assert reply["usage"]["completion_tokens"] == 8 * 6


async def test_cached_tokens_and_salts():
    async with Served() as s:

        def cached(reply):
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = await s.ok(CHAT, chat("a long question", n=2))
        again = await s.ok(CHAT, chat("a long question", n=2))
        assert cached(first) == 0
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        assert cached(await s.ok(CHAT, chat("a long question", cache_salt="x"))) == 0
        events = await s.events(
            CHAT, chat("a long question", stream_options={"include_usage": True})
        )
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached(again)
        reply = await s.post("/flush_cache")
        assert (reply.status, reply.json) == (200, {"success": True, "kept_tokens": 0})
        assert cached(await s.ok(CHAT, chat("a long question"))) == 0


async def test_models():
    async with Served(served_model_name=("org/big-model", "alias")) as s:
        reply = (await s.get("/v1/models")).json
        assert reply["object"] == "list"
        assert [card["id"] for card in reply["data"]] == ["org/big-model", "alias"]
        for card in reply["data"]:
            assert (await s.get("/v1/models/" + card["id"])).json == card
            assert card["object"] == "model"
            assert card["max_model_len"] == 4096
            assert isinstance(card["created"], int)


# --- streams ---


async def test_chat_chunks():
    async with Served() as s:
        events = await s.events(CHAT, chat(max_tokens=3))
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
        assert events[0]["object"] == "chat.completion.chunk"
        assert all("usage" not in event for event in events)
        choices = [event["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"] for c in choices[1:]] == [{"content": c} for c in "Riv"] + [{}]
        assert [c["finish_reason"] for c in choices] == [None] * 4 + ["length"]
        assert all(c["logprobs"] is None for c in choices)


async def test_completion_chunks():
    async with Served() as s:
        events = await s.events(TEXT, text(max_tokens=3))
        choices = [event["choices"][0] for event in events]
        assert [c["text"] for c in choices] == ["R", "i", "v"]
        assert [c["finish_reason"] for c in choices] == [None, None, "length"]
        events = await s.events(TEXT, text("αβ", max_tokens=1, echo=True))
        assert [e["choices"][0]["text"] for e in events] == ["αβ", "R"]


async def test_stream_equals_answer():
    async with Served() as s:
        for n in (1, 5, 29, 30, 31, 32, 60):
            whole = await s.ok(TEXT, text(max_tokens=n))
            events = await s.events(TEXT, text(max_tokens=n))
            assert joined(events) == whole["choices"][0]["text"]
            whole = await s.ok(CHAT, chat(max_tokens=n))
            events = await s.events(CHAT, chat(max_tokens=n))
            assert joined(events) == whole["choices"][0]["message"]["content"]
            assert all("\ufffd" not in json.dumps(event) for event in events[:-1])


async def test_usage_in_every_chunk():
    async with Served() as s:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await s.events(TEXT, text(max_tokens=4, stream_options=options))
        assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4, 4]
        assert {e["usage"]["prompt_tokens"] for e in events} == {3}
        assert events[-1]["choices"] == []
        whole = await s.ok(TEXT, text(max_tokens=4))
        last = events[-1]["usage"]
        assert last["total_tokens"] == whole["usage"]["total_tokens"]


async def test_token_ids_in_a_stream():
    async with Served() as s:
        for path, body in ((CHAT, chat(max_tokens=50)), (TEXT, text(max_tokens=50))):
            events = await s.events(path, body | {"return_token_ids": True})
            choices = [event["choices"][0] for event in events]
            ids = [token for choice in choices for token in choice.get("token_ids") or ()]
            assert ids == s.engine.sequence[: len(ids)]
            assert len(ids) == min(50, len(s.engine.sequence))
            assert choices[0]["prompt_token_ids"] == list(s.engine.gpu.adds[-1].prompt)


# --- log-probabilities ---


async def test_chat_logprobs():
    async with Served() as s:
        body = chat(max_tokens=100, logprobs=True, top_logprobs=3)
        reply = await s.ok(CHAT, body)
        content = reply["choices"][0]["logprobs"]["content"]
        assert len(content) == reply["usage"]["completion_tokens"]
        raw = bytes(byte for entry in content[:-1] for byte in entry["bytes"])
        assert raw.decode() == ANSWER  # bytes of split characters are exact
        for entry in content:
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -0.1
            assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -1.1, -9999.0]
            assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
        assert content[-1]["token"] == "<eos>"
        events = await s.events(CHAT, body)
        streamed = [
            entry
            for event in events
            for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content
        bare = await s.ok(CHAT, chat(max_tokens=2, logprobs=True))
        assert all(e["top_logprobs"] == [] for e in bare["choices"][0]["logprobs"]["content"])


async def test_legacy_logprobs():
    async with Served() as s:
        body = text("né", max_tokens=100, logprobs=2, echo=True)
        reply = await s.ok(TEXT, body)
        [choice] = reply["choices"]
        logprobs = choice["logprobs"]
        num_tokens = reply["usage"]["total_tokens"]
        assert {len(values) for values in logprobs.values()} == {num_tokens}
        assert logprobs["tokens"][:4] == ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["text_offset"][:5] == [0, 0, 1, 1, 2]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        for value, top in list(
            zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        )[1:]:
            assert value == max(top.values())  # as lm-eval asks whether a token was greedy
            assert len(top) == 2
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<")):
                assert choice["text"][offset] == token
        events = await s.events(TEXT, body)
        parts = [event["choices"][0]["logprobs"] for event in events]
        for name, values in logprobs.items():
            assert [value for part in parts if part for value in part[name]] == values


async def test_scoring_only():
    async with Served() as s:
        reply = await s.ok(
            TEXT, text([[65, 66, 67], [68, 69]], max_tokens=0, echo=True, logprobs=1)
        )
        assert reply["usage"]["completion_tokens"] == 0
        assert reply["usage"]["prompt_tokens"] == 5
        for choice, n in zip(reply["choices"], (3, 2), strict=True):
            assert len(choice["logprobs"]["tokens"]) == n
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert all(math.isfinite(v) for v in choice["logprobs"]["token_logprobs"][1:])
        assert reply["choices"][0]["text"] == s.engine.tokenizer.decode([65, 66, 67])


# --- any cut of the output into chunks is the same answer ---

cuts = st.lists(st.integers(0, 5), min_size=1, max_size=30)


async def test_every_choice_echoes_the_prompts_logprobs():
    async with Served() as s:
        body = text(["né", "ab"], n=3, temperature=1, seed=1, max_tokens=2, echo=True, logprobs=1)
        whole = (await s.ok(TEXT, body))["choices"]
        events = await s.events(TEXT, body)
        for choice in whole:
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"] == [None] + [-0.1] * (len(logprobs["tokens"]) - 1)
            parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
            assert joined(events, choice["index"]) == choice["text"]
            for name, values in logprobs.items():
                streamed = [p["logprobs"][name] for p in parts if p["logprobs"]]
                assert [value for part in streamed for value in part] == values


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), cuts)
def test_merging_loses_nothing(answer, sizes):
    outputs, at, count = [], 0, 0
    for size in [*sizes, len(answer)]:
        piece, at = answer[at : at + size], at + size
        ids = tuple(range(count, count + len(piece)))
        count += len(ids)
        outputs.append(Output(0, piece, ids, None, None, None, 3, count))
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merged.merged(output)
    assert merged.text == answer
    assert merged.token_ids == tuple(range(len(answer)))
    assert merged.num_output == len(answer)
    assert merged.num_cached == 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_is_behind_gets_the_same_text(path, monkeypatch):
    """Whatever the socket's state at each token, the chunks add up to the whole answer."""
    draw = random.Random(1)
    monkeypatch.setattr(
        EventStream, "unsent_bytes", lambda self: draw.choice([0, BEHIND_BYTES + 1])
    )
    async with Served() as s:
        for fields in ({}, {"n": 3, "temperature": 1.0, "seed": 2}, {"logprobs": 2}):
            if path == CHAT and "logprobs" in fields:
                fields = {"logprobs": True, "top_logprobs": 2}
            body = chat(max_tokens=90, ignore_eos=True, **fields)
            if path == TEXT:
                body = text(max_tokens=90, ignore_eos=True, **fields)
            whole = await s.ok(path, body)
            events = await s.events(path, body)
            assert len(events) < 90 * body.get("n", 1)
            for i, choice in enumerate(whole["choices"]):
                want = choice["message"]["content"] if path == CHAT else choice["text"]
                assert joined(events, i) == want
            finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
            assert sorted(finished) == list(range(body.get("n", 1)))
            if "logprobs" in fields:
                parts = [e["choices"][0]["logprobs"] for e in events if e["choices"]]
                count = sum(len(p["content" if path == CHAT else "tokens"]) for p in parts if p)
                assert count == 90
