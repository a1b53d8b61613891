"""The API's description is true: schemathesis plays it through, and every answer fits it."""

import json
import os
import re

import pytest
import schemathesis
from background import Background
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from served import CHAT, TEXT, Served, chat, text

from stoker.engine.api.sampling_params import LIMITS
from stoker.http.openapi import document
from stoker.http.routes import TABLE

EXAMPLES = int(os.environ.get("STOKER_SCHEMATHESIS_EXAMPLES", "8"))
schemathesis.checks.load_all_checks()
CHECKS = [
    schemathesis.checks.not_a_server_error,
    *map(
        schemathesis.checks.CHECKS.get_one,
        ("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    ),
]
OPERATIONS = [
    operation.ok()
    for operation in schemathesis.openapi.from_dict(document(TABLE)).get_all_operations()
]


@pytest.fixture(scope="module")
def server():
    with Background(max_model_len=64, max_body_bytes=1 << 20) as background:
        yield background


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_500_and_no_undocumented_status(operation, mode, server):
    if mode == GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
        pytest.skip("it takes nothing that could be wrong")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def play(case):
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=10)

    play()


def validator(path: str, status: int = 200, method: str = "post") -> Draft202012Validator:
    described = document(TABLE)
    response = described["paths"][path][method]["responses"][str(status)]
    fitting = response["content"]["application/json"]["schema"]
    return Draft202012Validator({**fitting, "components": described["components"]})


async def test_answers_fit_their_description():
    async with Served() as s:
        for path, body in (
            (CHAT, chat(logprobs=True, top_logprobs=2, n=2)),
            (TEXT, text(logprobs=2, echo=True)),
            ("/generate", {"text": "x"}),
            ("/generate", {"text": ["x", "y"]}),
            ("/tokenize", {"prompt": "x", "return_token_strs": True}),
            ("/detokenize", {"tokens": [65]}),
        ):
            validator(path).validate(await s.ok(path, body))
        for path in ("/v1/models", "/server_info", "/health", "/ready", "/version"):
            validator(path, method="get").validate((await s.get(path)).json)
        bad = await s.post(CHAT, chat(temperature=9))
        validator(CHAT, 400).validate(bad.json)
        with pytest.raises(Exception, match="error"):
            validator(CHAT, 400).validate({"message": "flat"})


async def test_the_document():
    async with Served() as s:
        described = (await s.get("/openapi.json")).json
        assert described == document(TABLE)
    assert set(described["paths"]) == {route.template for route in TABLE}
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    for name in ("temperature", "top_p", "presence_penalty", "seed"):
        assert (fields[name]["minimum"], fields[name]["maximum"]) == LIMITS[name]
        assert fields[name]["description"]
    assert "4 times the context" in fields["truncate_prompt_tokens"]["description"]
    assert described["components"]["schemas"]["CompletionRequest"]["required"] == ["prompt"]
    assert "security" not in described["paths"]["/health"]["get"]
    assert described["paths"]["/flush_cache"]["post"]["security"]
    assert "403" in described["paths"]["/flush_cache"]["post"]["responses"]
    refs = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))
    assert set(refs) <= set(described["components"]["schemas"])


async def test_the_page_needs_nothing_from_outside():
    async with Served() as s:
        reply = await s.get("/docs")
    page = reply.raw.decode()
    assert reply.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert not re.search(r"https?://|<script|@import|src=", page)
    for route in TABLE:
        assert route.template in page
    assert page.count("top_p") >= 2
