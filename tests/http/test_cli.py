"""Settings from flags, environment and files; the command; the process from start to drain."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.engine import support
from stoker.engine.api.config import EngineConfig
from stoker.engine.api.errors import StartError
from stoker.http import cli
from stoker.http.settings import ServerConfig, load_config, unknown_variables

HERE = Path(__file__).parent


def config_of(*flags: str) -> ServerConfig:
    arguments = cli._parser().parse_args(["serve", *flags])
    from stoker.http.settings import given_flags

    return load_config(given_flags(arguments), arguments.config)


# --- settings ---


def test_flags_over_environment_over_file_over_defaults(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nhost = "f"\nmodel = "from-file"\napi_key = ["a", "b"]\nseed = 9\n')
    monkeypatch.setenv("STOKER_PORT", "2")
    monkeypatch.setenv("STOKER_HOST", "e")
    config = config_of("--config", str(file), "--port", "3")
    assert (config.port, config.host, config.model) == (3, "e", "from-file")
    assert (config.api_key, config.seed, config.keep_alive_s) == (("a", "b"), 9, 15)
    yaml = tmp_path / "c.yaml"
    yaml.write_text("max_queued_requests: 7\nserved_model_name: [x, y]\n")
    config = config_of("--config", str(yaml))
    assert (config.max_queued_requests, config.served_model_name) == (7, ("x", "y"))


def test_every_field_has_a_flag_that_sets_it():
    parser = cli._parser()
    text = parser.parse_args(["serve", "m"])
    assert not vars(text).keys() & (ServerConfig.model_fields.keys() - {"model"})
    for name, field in ServerConfig.model_fields.items():
        assert field.description, name
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        value = [] if field.annotation is bool else ["7"]
        with_choices = re.findall(r"'([\w-]+)'", str(field.annotation))
        if with_choices:
            value = with_choices[-1:]
        arguments = parser.parse_args(["serve", flag, *value])
        assert name in vars(arguments), name


def test_repeated_flags_and_lists(monkeypatch):
    assert config_of("m", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    monkeypatch.setenv("STOKER_API_KEY", "x,y")
    assert config_of("m").api_key == ("x", "y")
    assert config_of("m", "--access-log").access_log is True
    monkeypatch.setenv("STOKER_ACCESS_LOG", "1")
    assert config_of("m").access_log is True
    assert config_of("m", "--no-access-log").access_log is False


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (["serve"], "info"),
        (["chat"], "warning"),
        (["generate"], "warning"),
        (["bench", "offline"], "warning"),
        (["simulate", "--card", "H200"], "warning"),
        (["warm"], "info"),
    ],
)
def test_the_log_level_of_a_command(command, default, monkeypatch, capsys):
    monkeypatch.setattr(cli, "set_up_logging", lambda config: None)

    def level(*flags):
        arguments = cli._parser().parse_args([*command, *flags])
        defaults = {} if default == "info" else {"log_level": default}
        return cli._config(arguments, **defaults).log_level

    assert level() == default
    assert level("--log-level", "error") == "error"
    monkeypatch.setenv("STOKER_LOG_LEVEL", "debug")
    assert level() == "debug"
    assert level("--log-level", "error") == "error"
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert f"least severe messages to log (default: {default})" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], "--port: Input should be a valid integer"),
        (["--port", "70000"], "--port"),
        (["--config", "none.toml"], "no such file"),
        (["--config", "c.ini"], "want a .yaml or .toml"),
        (["--client-weights", "a=2,b"], "--client-weights: want NAME=WEIGHT"),
        (["--client-weights", "a=-1"], "got 'a=-1'"),
        (["--isolate-cache-per-key"], "separates by API key: it needs --api-key"),
        (["--rate-limit", "3"], "counts by API key: it needs --api-key"),
        *(
            (["--otlp-traces-endpoint", url], "--otlp-traces-endpoint: want http:// or https://")
            for url in ("nonsense", "", "collector:4318", "grpc://collector:4317", "http:///v1")
        ),
        *(
            (["--cors-origin", "https://a.example", "--cors-origin", origin], "--cors-origin: want")
            for origin in ("nonsense", "a.example", "https://", "https://a.example/", "https://*")
        ),
        (
            ["--schedule-policy", "lpm", "--disable-radix-cache"],
            "stoker: --schedule-policy lpm orders by the prefix cache",
        ),
    ],
)
def test_wrong_settings_are_one_line(flags, words, capsys):
    assert cli.main(["serve", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_good_urls():
    origins = ("*", "https://a.example", "http://localhost:3000", "http://[::1]:8", "app://x")
    assert ServerConfig(cors_origin=origins).cors_origin == origins
    for url in ("http://127.0.0.1:4318", "https://collector/otlp"):
        assert ServerConfig(otlp_traces_endpoint=url).otlp_traces_endpoint == url


def test_wrong_files(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(StartError, match=r"c\.toml: there is no setting 'prot' \(nearest: port\)$"):
        config_of("--config", str(file))
    file.write_text('port = "x"\n')
    with pytest.raises(StartError, match=r"c\.toml: port: Input should be a valid integer"):
        config_of("--config", str(file))
    with pytest.raises(StartError, match=r"^--port: Input should be a valid integer"):
        config_of("--config", str(file), "--port", "y")
    monkeypatch.setenv("STOKER_PORT", "z")
    with pytest.raises(StartError, match=r"^STOKER_PORT: Input should be a valid integer"):
        config_of("m")
    monkeypatch.delenv("STOKER_PORT")
    yaml = tmp_path / "c.yaml"
    for text, words in {
        "- port": "want settings by name, got a list",
        "port": "want settings by name, got a str",
        "7: 8": "there is no setting 7",
        "a: [": "parsing",
    }.items():
        yaml.write_text(text)
        with pytest.raises(StartError, match=rf"^--config [^\n]*c\.yaml: [^\n]*{words}[^\n]*$"):
            config_of("--config", str(yaml))
    yaml.write_text("# nothing\n")
    assert config_of("--config", str(yaml)).port == 8000
    file.write_text("port = \n")
    with pytest.raises(StartError, match=r"c\.toml"):
        config_of("--config", str(file))
    keys = tmp_path / "keys"
    with pytest.raises(StartError, match="keys"):
        ServerConfig(api_key_file=keys).keys()
    keys.write_text("\n \n")
    with pytest.raises(StartError, match="holds no key"):
        ServerConfig(api_key_file=keys).keys()
    for flags in (["--api-key", ""], ["--api-key", "hidden", "--api-key", " "]):
        with pytest.raises(StartError, match=r"^--api-key: a key is empty$"):
            config_of("m", *flags)
    with pytest.raises(StartError, match=r"^--admin-key: a key is empty$"):
        config_of("m", "--admin-key", "")
    for value in ("", "hidden,"):
        monkeypatch.setenv("STOKER_API_KEY", value)
        with pytest.raises(StartError, match=r"^STOKER_API_KEY: a key is empty$"):
            config_of("m")
    monkeypatch.delenv("STOKER_API_KEY")
    monkeypatch.setenv("STOKER_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(StartError, match="enableServiceLinks"):
        config_of()
    monkeypatch.setenv("STOKER_PROT", "1")
    assert unknown_variables() == ["STOKER_PROT"]


def test_no_variable_that_is_read_is_called_unknown(monkeypatch):
    package = Path(cli.__file__).resolve().parents[1]
    files = [f for part in ("engine", "backends", "http") for f in (package / part).rglob("*.py")]
    names = {name for f in files for name in re.findall(r"STOKER_[A-Z_]+", f.read_text())}
    assert {"STOKER_CACHE", "STOKER_CHECK", "STOKER_XPU_GRAPHS"} <= names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == []


def test_the_environment_is_read_by_load_config_only(monkeypatch):
    monkeypatch.setenv("STOKER_PORT", "2")
    assert ServerConfig().port == 8000
    assert load_config({}).port == 2


def test_help_is_grouped(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    groups = {field.json_schema_extra["group"] for field in ServerConfig.model_fields.values()}
    for group in groups:
        assert f"\n{group}:\n" in text
    assert "--quantization {fp8,int8,int4}" in text
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    text = capsys.readouterr().out
    assert "--api-key-file" not in text
    for name in EngineConfig.model_fields.keys() - {"model"}:
        assert "--" + name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--vocab", "0"),
        ("--requests", "0"),
        ("--prompt-len", "-4"),
        ("--output-len", "0"),
        ("--prefix-len", "-1"),
        ("--spread", "2"),
        ("--concurrency", "0"),
        ("--rate", "0"),
        ("--rate", "nan"),
    ],
)
def test_a_benchmark_without_sense_is_refused(flag, value, capsys):
    for command in ("serve", "offline"):
        if command == "offline" and flag in ("--concurrency", "--rate"):
            continue
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", command, flag, value])
        assert end.value.code == 2
        assert f"argument {flag}: want a" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [["chat"], ["bench", "serve"]])
def test_a_url_without_its_scheme_is_refused(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--url", "127.0.0.1:8411"])
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--url: want http:// or https:// before the host, got '127.0.0.1:8411'" in line


@pytest.mark.parametrize(
    ("command", "usage", "last"),
    [
        (["serve", "m", "--prot", "3"], "stoker serve", "--prot 3 (nearest: --port)"),
        (["bench", "serve", "--conc=4"], "stoker bench serve", "--conc=4 (nearest: --concurrency)"),
        (["bench", "serve", "--xyzzy=4"], "stoker bench serve", "arguments: --xyzzy=4"),
        (["models", "x"], "stoker models", "stoker models: error: unrecognized arguments: x"),
        (["--verson", "models"], "stoker", "(nearest: --version)"),
    ],
)
def test_an_unknown_flag_is_an_error_of_its_command(command, usage, last, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"usage: {usage} [")
    assert lines[-1].endswith(last)


def test_the_version_is_a_flag_too(capsys):
    assert cli.main(["version"]) == 0
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, printed)


def test_tables_are_whole_where_they_are_piped(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    cells = [tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in text.splitlines()]
    assert [row for row in cells if row] == support.rows()
    assert cli.main(["backends"]) == 0
    assert "…" not in capsys.readouterr().out


def test_simulate_says_which_models_it_takes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = capsys.readouterr().out
    assert "a config.json, its folder, or a known shape" in " ".join(text.split())
    assert "Hugging Face" not in text and ".gguf" not in text


# --- the command as a process ---


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": path, **variables}


@pytest.mark.parametrize("command", [["version"], ["--help"], ["serve", "--help"]])
def test_nothing_heavy_is_imported(command):
    script = (
        "import sys\nfrom stoker.http import cli\n"
        f"try: cli.main({command!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'aiohttp', 'transformers', 'tokenizers', 'numpy', 'rich'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=30)


class Process:
    """`serve_fake.py` running; `url` once it serves."""

    def __init__(self, *flags: str, **variables: str):
        self.process = subprocess.Popen(
            [sys.executable, HERE / "serve_fake.py", "serve", "fake", "--port", "0", *flags],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        self.url = re.search(r"http://\S+(?=/v1)", line)[0]
        self.curl = self.process.stdout.readline()

    def post(self, path: str, body: dict) -> urllib.request.Request:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=20)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


LONG = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}


def test_serve_drains_on_sigterm():
    with Process("--drain-timeout", "10", FAKE_STEP_S="0.005") as p:
        assert "curl " + p.url in p.curl
        stream = p.post("/v1/completions", LONG)
        stream.readline()
        p.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(urllib.error.HTTPError) as refused:
            p.post("/v1/completions", LONG)
        assert refused.value.code == 503
        assert refused.value.headers["Retry-After"]
        rest = stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"data: {") > 200  # outputs that end inside a character have none
        assert p.process.wait(10) == 0
        assert "draining 1 request, up to 10 s" in p.process.stderr.read()


def test_half_a_body_does_not_hold_the_drain():
    with Process("--drain-timeout", "20", FAKE_STEP_S="0.005") as p:
        host, port = p.url.removeprefix("http://").split(":")
        stream = p.post("/v1/completions", LONG)
        stream.readline()
        with socket.create_connection((host, int(port)), timeout=10) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.2)
            p.process.send_signal(signal.SIGTERM)
            assert half.recv(100).startswith(b"HTTP/1.1 503 ")
            assert stream.read().endswith(b"data: [DONE]\n\n")  # what has arrived goes on
            assert p.process.wait(10) == 0


def test_cache_events_end_well_when_the_server_drains():
    with Process("--cache-events") as p:
        with urllib.request.urlopen(p.url + "/cache_events", timeout=10) as events:
            events.readline()
            p.process.send_signal(signal.SIGTERM)
            events.read()  # an answer that is cut off raises IncompleteRead
        assert p.process.wait(10) == 0


def test_a_second_signal_aborts():
    with Process("--drain-timeout", "60") as p:
        stream = p.post("/v1/completions", {**LONG, "max_tokens": 4000} | {"n": 4})
        stream.readline()
        p.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        p.process.send_signal(signal.SIGTERM)
        rest = stream.read()
        assert b"shutting down" in rest
        assert p.process.wait(5) == 0


def test_the_file_of_a_unix_socket_goes_with_the_server(tmp_path):
    path = tmp_path / "s.sock"
    for signals in (1, 2):
        with Process("--uds", str(path), "--drain-timeout", "60", FAKE_STEP_S="0.01") as p:
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(path))
            body = json.dumps(LONG | {"max_tokens": 4000 if signals == 2 else 5}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            client.recv(1)
            for _ in range(signals):
                p.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert p.process.wait(10) == 0
            assert not path.exists()
            client.close()
    with Process("--uds", str(path), FAKE_DIES="1") as p:
        assert p.process.wait(10) == 70
        assert not path.exists()
    with Process("--uds", str(path)) as p:  # the path is another server's by now
        path.unlink()
        path.write_text("another's")
        p.process.send_signal(signal.SIGTERM)
        assert p.process.wait(10) == 0
        assert path.read_text() == "another's"


def test_the_file_of_a_unix_socket_goes_with_a_server_that_does_not_start(tmp_path):
    path = tmp_path / "s.sock"
    command = [sys.executable, HERE / "serve_fake.py", "serve", "--uds", str(path)]
    missing = subprocess.run([*command, "missing"], env=environment(), timeout=30, check=False)
    assert missing.returncode == 2
    assert not path.exists()
    process = subprocess.Popen([*command, "fake"], env=environment(FAKE_LOAD_S="60"))
    while not path.exists():
        time.sleep(0.05)
    time.sleep(0.3)  # the handler comes a moment after the file
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not path.exists()


def test_a_dead_engine_ends_the_process():
    with Process(FAKE_DIES="1", FAKE_STEP_S="0.01") as p:
        stream = p.post("/v1/completions", LONG)
        assert b'"server_error"' in stream.read()
        assert p.process.wait(10) == 70
        assert "out of memory" in p.process.stderr.read()


def test_a_port_in_use_is_known_before_the_model_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, HERE / "serve_fake.py", "serve", "missing", "--port", port],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line == f"stoker: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_model_that_cannot_start_is_one_line():
    done = subprocess.run(
        [sys.executable, HERE / "serve_fake.py", "serve", "missing", "--port", "0"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (2, "stoker: there is no model here\n")
    assert done.stdout == ""


def test_json_log():
    with Process("--log-format", "json", "--access-log") as p:
        p.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).read()
        p.process.send_signal(signal.SIGTERM)
        p.process.wait(10)
        lines = [json.loads(line) for line in p.process.stderr.read().splitlines()]
    assert any("POST /v1/completions 200" in line["message"] for line in lines)


def test_generate_in_process():
    done = subprocess.run(
        [sys.executable, HERE / "serve_fake.py", "generate", "--prompt", "hi", "--max-tokens", "9"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "Rivers ru\n")


def test_a_chat_with_a_model_that_has_no_template_is_refused_at_once():
    done = subprocess.run(
        [sys.executable, HERE / "serve_fake.py", "chat", "base"],
        env=environment(),
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "has no chat template: use stoker generate" in line


# --- progress ---


@pytest.mark.parametrize(
    ("took_s", "want"),
    [
        (0.9, []),
        (3.2, [32, 64, 96]),  # a second each
        (200, [1, *range(10, 101, 10)]),  # a tenth each
    ],
)
def test_progress_without_a_terminal(took_s, want, caplog, monkeypatch):
    caplog.set_level("INFO")
    now = 0.0
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: now))
    with cli.StartProgress(has_terminal=False) as progress:
        for done in range(0, 101):
            now = took_s * done / 100
            progress("weights", done * 1_000_000, 100_000_000)
    lines = [record.message for record in caplog.records]
    assert lines == [f"weights: {done} of 100 MB" for done in want]
