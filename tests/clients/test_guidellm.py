"""guidellm measures the server, and counts the tokens that were made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(url, model, route, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"A story of {i}.", "output_tokens_count": 12} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tmp_path / "report.json"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={url},model={model},request_format={route}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=4"),
            *("--data", f"kind=json_file,path={data}"),
            *("--output", f"kind=json,path={report}"),
        ],
        check=True,
        timeout=280,
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == 12
    assert metrics["prompt_token_count"]["successful"]["mean"] > 4
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
