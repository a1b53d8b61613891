"""`stoker simulate` from flags to JSON and PNG, and a real engine's log into a simulation."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from stoker.engine.api.config import EngineConfig
from stoker.engine.core.routing import ROUTERS
from stoker.http import cli, simulate_flags
from stoker.http.settings import ServerConfig

CARD = ["simulate", "llama-3.1-8b", "--card", "h200"]
SMALL = ["--requests=12", "--prompt-len=uniform:20:60", "--output-len=8"]


def arguments_of(*flags):
    return cli._parser().parse_args([*CARD, *flags])


def test_to_json_and_png(tmp_path, capsys):
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    flags = ["--engines=2", "--router=cache-aware", "--prefix-len=256", "--num-prefixes=2"]
    flags += ["--rate=50", "--slo-ttft-ms=1000", f"--json={out}", f"--plots={plots}", "--check"]
    assert cli.main([*CARD, *SMALL, *flags]) == 0
    text = capsys.readouterr().out
    assert "llama-3.1-8b on H200, by its roofline, 2 engines, cache-aware" in text
    assert "goodput" in text and "TTFT" in text and "times as fast" in text
    result = json.loads(out.read_text())
    summary = result["summary"]
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (12, 0, 96)
    assert summary["cached_tokens"] > 0 and summary["slo_attainment"] == 1
    assert sum(engine["stats"]["generated_tokens"] for engine in result["engines"]) == 96
    assert result["engines"][0]["over_time"]["running"][-1] == 0
    assert result["spec"]["page_size"] == 64 and result["simulation"]["speed"] > 0
    images = sorted(plots.iterdir())
    assert [image.name for image in images] == ["engine-0.png", "engine-1.png", "latency.png"]
    for image in images:
        assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert image.stat().st_size > 5000


def test_the_same_seed_gives_the_same_file(tmp_path):
    texts = []
    for seed in (1, 1, 2):
        out = tmp_path / "out.json"
        assert cli.main([*CARD, *SMALL, "--rate=20", f"--load-seed={seed}", f"--json={out}"]) == 0
        result = json.loads(out.read_text())
        del result["simulation"]  # how long it took
        texts.append(json.dumps(result))
    assert texts[0] == texts[1] != texts[2]


def test_a_trace_and_settings_of_the_scheduler(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"arrival_s": i / 100, "prompt_len": 300, "output_len": 50} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    # Booked are 0.28 of 50 tokens, so that all 6 of 350 tokens in the end are let in.
    flags = [f"--trace={trace}", f"--json={out}", "--kv-tokens=2048", "--page-size=16"]
    flags += ["--schedule-conservativeness=0.1"]
    assert cli.main([*CARD, *flags]) == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["retractions"] > 0
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (300, 1800)
    rows[3]["prompt_len"] = 5000
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main([*CARD, *flags]) == 1  # a request failed
    assert json.loads(out.read_text())["summary"]["failed"] == 1


def test_find_rate(tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--slo-tpot-ms=5", "--find-rate=0.9", "--requests=40", "--output-len=60"]
    assert cli.main([*CARD, *flags, "--prompt-len=500", "--rate=3", f"--json={out}"]) == 0
    result = json.loads(out.read_text())
    rates = {float(rate): tried["slo_attainment"] for rate, tried in result["tried"].items()}
    assert rates[result["rate"]] >= 0.9
    above = min(rate for rate in rates if rate > result["rate"])
    assert rates[above] < 0.9 and above / result["rate"] < 1.05
    assert f"{result['rate']:.3g} requests/s keep 90% good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate=1", "--concurrency=2"], "--rate is an open loop, --concurrency a closed one"),
        (["--find-rate=0.9"], "--find-rate needs --slo-ttft-ms or --slo-tpot-ms"),
        (["--find-rate=1", "--slo-tpot-ms=9", "--concurrency=1"], "no --trace, no --concurrency"),
        (["--find-rate=1", "--slo-tpot-ms=0.1", "--requests=2"], "it is missed even at"),
        (["--find-rate=1", "--slo-tpot-ms=9999", "--requests=2"], "add some"),
        (["--trace=none"], "none: No such file"),
        (["--kv-tokens=x"], "--kv-tokens: Input should be a valid integer"),
        (["--json=/none/x", "--requests=1"], "--json /none/x: No such file"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, capsys):
    assert cli.main([*CARD, *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "flags",
    [["--rate=0"], ["--requests=x"], ["--prompt-len=zipf:1"], ["--router=best"], ["--steps=x"]],
)
def test_argparse_refuses(flags, capsys):
    with pytest.raises(SystemExit):
        arguments_of(*flags)
    assert flags[0].partition("=")[0] in capsys.readouterr().err


def test_a_missing_matplotlib_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*CARD, f"--plots={tmp_path}"]) == 2
    assert "--plots needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_flags_do_not_collide_with_settings():
    own = vars(arguments_of()).keys() - simulate_flags._simulated_config().model_fields.keys()
    assert not own & ServerConfig.model_fields.keys()
    assert (
        simulate_flags._simulated_config().model_fields.keys() <= EngineConfig.model_fields.keys()
    )
    assert set(simulate_flags.ROUTERS) == set(ROUTERS)


def test_a_measured_engine_is_simulated(tmp_path, tiny_model, capsys):
    """Steps are logged, fitted and simulated; the settings of the measured run hold."""
    log, out = tmp_path / "steps.jsonl", tmp_path / "out.json"
    bench = ["bench", "offline", str(tiny_model), f"--step-log={log}", "--kv-tokens=4096"]
    bench += ["--max-running-requests=5", "--requests=16", "--prompt-len=40", "--output-len=24"]
    assert cli.main([*bench, "--spread=0.5"]) == 0
    steps = ["simulate", f"--steps={log}", f"--json={out}"]
    assert cli.main([*steps, *SMALL]) == 0
    assert "on cpu, fitted to" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["spec"] | {"page_size": 0} == {
        "kv_tokens": 4096,
        "page_size": 0,
        "max_model_len": 512,
        "is_cpu": True,
    }
    assert max(result["engines"][0]["over_time"]["running"]) == 5
    assert result["summary"]["output_tokens"] == 96
    assert cli.main([*steps, *SMALL, "--max-running-requests=2"]) == 0
    assert max(json.loads(out.read_text())["engines"][0]["over_time"]["running"]) == 2
    header, *lines = log.read_text().splitlines(keepends=True)
    values = json.loads(header)
    del values["page_size"]
    log.write_text("".join([json.dumps(values) + "\n", *lines]))
    assert cli.main(steps) == 2
    assert "'page_size' is missing" in capsys.readouterr().err


def test_the_documentation_is_true():
    """Its commands parse, its Python runs, its trace fields and cards exist."""
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    commands = re.findall(r"^    stoker (simulate (?:.*\\\n)*.*)", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        cli._parser().parse_args(shlex.split(command.replace("\\\n", " ")))
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed: list[float] = []
    exec(block, {"print": printed.append})
    assert 0 < printed[0] <= 20
