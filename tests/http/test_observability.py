"""What can be seen of the server from outside: metrics, traces, log lines, the dashboard."""

import asyncio
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from served import CHAT, TEXT, Served, chat, text

from stoker.engine.api.errors import EngineError, StartError, StokerError
from stoker.http.logs import set_up_logging
from stoker.http.metrics import FINISH_REASONS, REJECTIONS
from stoker.http.settings import ServerConfig
from stoker.http.tracing import Tracer

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


async def families(s):
    page = (await s.get("/metrics")).raw.decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(families, name, **labels):
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, found)
    return found[0]


async def test_latencies_are_those_that_were():
    async with Served() as s:
        s.engine.step_s = 0.02
        s.engine.queue_s = 0.25
        await s.ok(TEXT, text(max_tokens=11, n=2, temperature=1, ignore_eos=True))
        await s.events(CHAT, chat(max_tokens=1))
        seen = await families(s)
        for name, count, low, high in (
            ("stoker_ttft_seconds", 3, 0.06, 0.5),
            ("stoker_queue_seconds", 3, 0.7499, 0.7501),
            ("vllm:request_queue_time_seconds", 3, 0.7499, 0.7501),
            ("stoker_tpot_seconds", 2, 0.04, 0.1),
            ("stoker_itl_seconds", 20, 0.4, 1.0),
            ("stoker_e2e_seconds", 3, 0.46, 1.5),
            ("stoker_grammar_seconds", 0, 0.0, 0.0),
        ):
            assert value(seen, name + "_count") == count, name
            assert low <= value(seen, name + "_sum") <= high, name


async def test_shares_of_the_cache():
    async with Served() as s:
        for _ in range(4):
            await s.ok(TEXT, text([65] * 100))
        s.engine.gpu.publish()
        seen = await families(s)
        assert value(seen, "stoker_prefix_hit_rate") == 3 * 99 / 400
        assert value(seen, "vllm:prefix_cache_hits_total") == 3 * 99
        assert value(seen, "vllm:kv_cache_usage_perc") == 0.0


async def test_no_label_comes_from_a_client():
    """Prometheus cardinality (ecosystem 3.2): every client-chosen text, and no new series."""
    async with Served(api_key=("k",)) as s:
        key = {"Authorization": "Bearer k"}

        async def series():
            page = (await s.get("/metrics")).raw.decode()
            return {re.sub(r"\s\S+$", "", line) for line in page.splitlines() if line[0] != "#"}

        before = await series()
        for i in range(20):
            name = f"odd-{i}"
            body = chat(user=name, cache_salt=name, rid=name, model=name)
            await s.post(CHAT, body, headers=key | {"X-Request-Id": name, "User-Agent": name})
            await s.post(CHAT, chat(user=name, cache_salt=name, rid=name), headers=key)
            await s.get("/v1/models/" + name, headers=key)
            await s.request("PURGE" + str(i), "/" + name, headers=key)
        assert await series() == before
        labels = {value for line in before for value in re.findall(r'="([^"]*)"', line)}
        labels = {label for label in labels if not re.fullmatch(r"[0-9.]+|\+Inf", label)}
        phases = {"plan", "launch", "wait", "commit"}
        assert labels <= {*FINISH_REASONS, *REJECTIONS, *phases, "fake/model"}


async def test_the_dashboard_asks_for_metrics_that_exist():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    async with Served() as s:
        names = {x.name for family in (await families(s)).values() for x in family.samples}
    wanted = {name for query in queries for name in re.findall(r"\b(?:stoker|vllm)[_:]\w+", query)}
    assert len(queries) >= 12
    assert wanted <= names, wanted - names
    for name in ("ttft", "tpot", "itl", "queue", "e2e", "grammar"):
        assert any(f"stoker_{name}_seconds_bucket" in query for query in queries), name


# --- logs ---


@pytest.fixture
def log_lines(monkeypatch):
    """Set logging up as `stoker serve` does; gives what it wrote."""
    root, level = logging.getLogger(), logging.getLogger().level
    handlers = list(root.handlers)

    def start(**flags):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        set_up_logging(ServerConfig(**{"log_level": "debug", **flags}))
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_json_lines_carry_the_request(log_lines):
    lines = log_lines(log_format="json")
    async with Served(access_log=True) as s:
        s.engine.refusal = RuntimeError("broken")
        await s.post(CHAT, chat(), headers={"X-Request-Id": "r-1"})
        s.engine.refusal = None
        await s.get("/v1/models?token=hidden", headers={"X-Request-Id": "r-2"})
    records = [json.loads(line) for line in lines()]
    [failed] = [r for r in records if r["level"] == "error"]
    assert failed["request_id"] == "r-1"
    assert "RuntimeError: broken" in failed["exception"]
    [access] = [r for r in records if r["logger"] == "stoker.access" and r["request_id"] == "r-2"]
    assert (access["method"], access["path"], access["status"]) == ("GET", "/v1/models", 200)
    assert 0 <= access["seconds"] < 5
    assert "hidden" not in "".join(lines())


async def test_text_lines_carry_the_request(log_lines):
    lines = log_lines()
    async with Served(access_log=True) as s:
        s.engine.refusal = RuntimeError("broken")
        await s.post(CHAT, chat(), headers={"X-Request-Id": "r-1"})
    [failed] = [line for line in lines() if " ERROR " in line]
    assert "r-1" in failed
    [access] = [line for line in lines() if "POST /v1/chat" in line]
    assert access.count("r-1") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("x"), BrokenPipeError("a worker's"), EngineError("x"), StokerError("x")]
)
async def test_what_becomes_a_500_is_logged(log_lines, monkeypatch, error, stream):
    lines = log_lines(log_level="info")

    async def fails(*_):
        raise error

    async with Served() as s:
        monkeypatch.setattr(s.engine, "compile_grammar", fails)
        body = chat(regex="a", stream=stream)
        reply = await s.post(CHAT, body, headers={"X-Request-Id": "req-7"})
        assert reply.status == 500
    [line] = [line for line in lines() if " ERROR " in line]
    assert "req-7" in line
    assert any(line.startswith("Traceback") for line in lines())
    assert any(type(error).__name__ in line for line in lines())


async def test_a_stream_that_fails_is_logged(log_lines):
    lines = log_lines(log_level="info")
    async with Served(keep_alive_s=0.05) as s:
        s.engine.paused.clear()
        body = chat(stream=True)
        job = asyncio.create_task(s.post(CHAT, body, headers={"X-Request-Id": "req-8"}))
        await asyncio.sleep(0.2)  # until a comment has begun the answer
        for stream in list(s.engine._streams.values()):
            stream._fail(EngineError("not decoded"))
        s.engine.paused.set()
        assert (await job).status == 200
    [line] = [line for line in lines() if " ERROR " in line]
    assert "req-8" in line
    assert any("not decoded" in line for line in lines())


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_prompts_are_logged_only_where_asked(log_lines, log_prompts):
    lines = log_lines()
    async with Served(access_log=True, log_prompts=log_prompts) as s:
        await s.ok(CHAT, chat("my-private-words"), headers={"X-Request-Id": "r-1"})
        await s.post(CHAT, chat("my-private-words", temperature=9))
        await s.post(CHAT, chat("my-private-words", stop=5))
    found = [line for line in lines() if "my-private-words" in line]
    assert len(found) == log_prompts
    assert all("r-1" in line and "temperature=0" in line for line in found)


# --- traces ---


class Collector:
    """An OTLP/HTTP collector that keeps the spans."""

    async def __aenter__(self):
        self.spans = []
        app = web.Application()
        app.router.add_post("/v1/traces", self.take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def take(self, request):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()


async def test_spans():
    pytest.importorskip("opentelemetry.sdk")
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with Collector() as collector:
        async with Served(otlp_traces_endpoint=collector.url) as s:
            s.engine.step_s = 0.02
            headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
            await s.ok(TEXT, text(max_tokens=5), headers=headers)
            await s.post(TEXT, text(temperature=9))
            s.engine.paused.clear()
            job = asyncio.create_task(s.post(CHAT, chat(rid="x")))
            while not s.engine.gpu.jobs:
                await asyncio.sleep(0.01)
            await s.post("/abort_request", {"rid": "x"})
            assert (await job).status == 409
        roots = [span for span in collector.spans if span.name.startswith("POST")]
    assert [span.name for span in roots] == [f"POST {TEXT}", f"POST {TEXT}", f"POST {CHAT}"]
    good, bad, aborted = roots
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (trace_id, parent_id)
    attributes = {a.key: a.value for a in good.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.usage.input_tokens"].int_value == 3
    assert attributes["stoker.outcome"].string_value == "ok"
    inner = {x.name: x for x in collector.spans if x.parent_span_id == good.span_id}
    assert set(inner) == {"queue", "prefill", "decode"}
    decode_s = (inner["decode"].end_time_unix_nano - inner["decode"].start_time_unix_nano) / 1e9
    assert 0.08 <= decode_s < 1
    for span in inner.values():
        assert good.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= good.end_time_unix_nano
    outcomes = [{a.key: a.value for a in x.attributes} for x in (bad, aborted)]
    assert [x["stoker.outcome"].string_value for x in outcomes] == ["error", "abort"]


def test_traces_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match="needs opentelemetry-sdk"):
        Tracer("http://127.0.0.1:4318", "m")
