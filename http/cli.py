"""The `stoker` command: serve, chat, generate, bench, simulate, warm, backends, models, ...

Nothing heavy is imported before a command needs it. Errors are one line on stderr; the exit code is
2 where the command is wrong, 70 where the engine failed.

Runs on: loop.
"""

import argparse
import asyncio
import difflib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ..engine import compile_ahead
from ..engine.api.config import EngineConfig
from ..engine.api.errors import EngineError, StartError, StokerError
from .flag_types import http_url, non_negative_int
from .logs import set_up_logging
from .settings import (
    LOG_LEVELS,
    ServerConfig,
    add_flags,
    given_flags,
    load_config,
    unknown_variables,
    version,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..engine import AsyncEngine

log = logging.getLogger("stoker")

EXIT_USAGE = 2
EXIT_ENGINE_DEAD = 70  # sysexits.h calls it EX_SOFTWARE
PIPE_WIDTH = 1000  # columns


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except EngineError as error:
        print(f"stoker: {error}", file=sys.stderr)
        return EXIT_ENGINE_DEAD
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has gone; the last flush must not fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    """One of a command: a flag it does not know is its own error, and names the nearest."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint, known = "", list(self._option_string_actions)
            if flags := [text.partition("=")[0] for text in unknown if text.startswith("--")]:
                near = [flag for flag in known if flag.startswith(flags[0])]
                near = near or difflib.get_close_matches(flags[0], known, 1)
                hint = f" (nearest: {near[0]})" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("stoker", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[..., int | None], text: str, parent: Any = commands
    ) -> Any:
        sub = parent.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    def log_level(sub: Any, default: str = "warning") -> None:
        text = f"least severe messages to log (default: {default})"
        sub.add_argument("--log-level", choices=LOG_LEVELS, default=argparse.SUPPRESS, help=text)

    def settings(sub: Any, config: type[EngineConfig] = EngineConfig) -> None:
        sub.usage = f"{sub.prog} [options] [MODEL]"
        add_flags(sub, config)

    settings(command("serve", _serve, "Serve a model over HTTP."), ServerConfig)

    chat = command("chat", _chat, "Chat in the terminal, with a server or in process.")
    _add_client_flags(chat)
    chat.add_argument("--system", help="system message")
    chat.add_argument("--max-tokens", type=int, help="longest answer")
    chat.add_argument("--temperature", type=float, help="0 takes the likeliest; the model's own")
    log_level(chat)
    settings(chat)

    generate = command("generate", _generate, "Continue a prompt in process.")
    generate.add_argument("--prompt", help="text to continue; read from stdin if absent")
    text = "longest output (default: %(default)s)"
    generate.add_argument("--max-tokens", type=int, default=128, help=text)
    text = "0 takes the likeliest token (default: %(default)s)"
    generate.add_argument("--temperature", type=float, default=0.0, help=text)
    log_level(generate)
    settings(generate)

    bench = commands.add_parser("bench", help="Measure speed.", description="Measure speed.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    from .bench import add_offline_flags, add_serve_flags

    add_serve_flags(command("serve", _bench_serve, "Load a running server.", benches))
    offline = command("offline", _bench_offline, "Throughput in process, without HTTP.", benches)
    add_offline_flags(offline)
    log_level(offline)
    settings(offline)

    from .simulate_flags import add_simulate_flags

    text = "Serve a load in virtual time, to plan capacity; no device is needed."
    simulate = command("simulate", _simulate, text)
    add_simulate_flags(simulate)
    log_level(simulate)

    warm = command("warm", _warm, "Compile what serving a model needs, so that starts do not.")
    log_level(warm, "info")
    settings(warm)
    command("backends", _backends, "What each backend would use on this machine, and why not.")
    text = "Check every op on this machine's device against float64; writes a report to send back."
    check = command("check-backend", _check_backend, text)
    check.add_argument(
        "--backend", default="auto", help="hardware; auto takes the first that works"
    )
    check.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    text = "only this provider (repeatable)"
    check.add_argument("--provider", action="append", default=[], help=text)
    text = "only checks whose names contain this, as bfloat16"
    check.add_argument("--case", default="", help=text)
    text = "processes that check side by side (default: the cores, 16 at most; 0: in this one)"
    check.add_argument("--jobs", type=non_negative_int, metavar="N", help=text)
    text = "file for the report (default: %(default)s)"
    check.add_argument("--report", default="backend-report.json", help=text)
    command("models", _models, "The families of models that can be run, and what was tested.")
    command("version", _version, "Print the version.")
    return parser


def _add_client_flags(parser: argparse.ArgumentParser) -> None:
    text = "base URL of a running server, as http://127.0.0.1:8000"
    parser.add_argument("--url", type=http_url, help=text)
    parser.add_argument("--key", help="API key for --url")


# --- commands ---


def _serve(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    compile_ahead.start(config)  # while the rest is imported
    from .app import serve
    from .connection import listen, remove_file, tls

    config.keys(), tls(config)  # before the model loads: what is wrong is known at once
    sock = listen(config)

    def leave(code: int) -> None:
        remove_file(sock)
        logging.shutdown()
        os._exit(code)

    async def run() -> int:
        # Nothing runs yet that must end well; and without a handler a container's first process
        # ignores the signal.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, leave, 128 + signal.SIGTERM)
        engine = await start_engine(config)
        return await serve(engine, config, sock, lambda: _announce(engine, config, sock))

    try:
        code = _run(run())
        if code:  # after the engine's death the interpreter may crash at its end, or wait for ever
            leave(code)
        return code
    finally:
        remove_file(sock)


def _chat(arguments: argparse.Namespace) -> None:
    from . import chat

    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    options = {name: value for name, value in options.items() if value is not None}

    async def run() -> None:
        if arguments.url:
            async with chat.RemoteModel(arguments.url, arguments.key, options) as model:
                await chat.converse(model, arguments.system)
            return
        async with await start_engine(_config(arguments, log_level="warning")) as engine:
            await chat.converse(chat.LocalModel(engine, options), arguments.system)

    _run(run())


def _generate(arguments: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt

    async def run() -> None:
        from ..engine import SamplingParams

        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
        async with await start_engine(_config(arguments, log_level="warning")) as engine:
            async for output in engine.submit(await engine.encode(prompt), params):
                print(output.text, end="", flush=True)
            print()

    _run(run())


def _bench_serve(arguments: argparse.Namespace) -> int:
    from .bench import bench_serve

    return _run(bench_serve(arguments))


def _bench_offline(arguments: argparse.Namespace) -> int:
    from .bench import bench_offline

    async def run() -> int:
        async with await start_engine(_config(arguments, log_level="warning")) as engine:
            return await bench_offline(engine, arguments)

    return _run(run())


def _simulate(arguments: argparse.Namespace) -> int:
    from .simulate import run_simulate

    return run_simulate(_config(arguments, log_level="warning"), arguments)


def _warm(arguments: argparse.Namespace) -> None:
    """Libraries first; then a start with random weights compiles and measures the rest."""
    config = _config(arguments).model_copy(update={"load_format": "dummy"})
    from ..engine.build import build_modules

    for name in build_modules(config):
        log.info("compiled %s", name)

    async def run() -> None:
        await (await start_engine(config)).close()

    _run(run())


def _backends(_: argparse.Namespace) -> None:
    from ..backends.registry import describe

    console = _console()
    tables: dict[str, Table] = {}
    for row in describe():
        if not row.op:  # the backend as a whole cannot run
            console.print(row.reason, highlight=False, soft_wrap=True)
            continue
        name = f"backend {row.backend} on {row.device}"
        table = tables.setdefault(name, _table("op", "provider", "state", "verified"))
        table.add_row(row.op, row.provider, row.reason or "used", row.labels)
    for name, table in tables.items():
        console.print(name, highlight=False, soft_wrap=True)
        console.print(table)


def _check_backend(arguments: argparse.Namespace) -> int:
    """0 where all is right, 1 where an op is wrong."""
    import json
    from pathlib import Path

    from ..backends.api import BackendError
    from ..backends.contract.report import check_backend

    report, path = None, Path(arguments.report)
    flags = (arguments.backend, arguments.op, arguments.provider, arguments.case, arguments.jobs)
    try:
        for report in check_backend(*flags):  # the first is before any op
            try:
                path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
            except OSError as error:
                raise StartError(f"--report {path}: {error.strerror}") from None
            if not report.ops:
                print("op                provider       used  passed  error  seconds")
                continue
            row = report.ops[-1]
            counts = f"{row.passed}/{row.passed + len(row.failed)}"
            used = "yes" if row.is_chosen else ""
            print(f"{row.op:17} {row.provider:14} {used:4} {counts:>7} {row.worst_error:6.2f}"
                  f" {row.seconds:8.2f}", flush=True)  # fmt: skip
            for line in row.failed:
                print(f"    {line}", flush=True)
    except BackendError as error:
        raise StartError(str(error)) from None
    assert report is not None
    for name, reason in report.skipped.items():
        print(f"not checked: {name}: {reason}")
    print(f"{report.backend} on {report.device}: {'all right' if report.is_good else 'FAILED'}"
          f" (an error of 1 is what is allowed); the report is in {path}")  # fmt: skip
    return 0 if report.is_good else 1


def _models(_: argparse.Namespace) -> None:
    from ..engine import support

    table = _table(*support.COLUMNS)
    for row in support.rows():
        table.add_row(*row)
    _console().print(table)


def _version(_: argparse.Namespace) -> None:
    print(version())


# --- the parts that commands share ---


def _console() -> "Console":
    """stdout; where it is no terminal, a table there has a line a row, however long."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _table(*columns: str) -> "Table":
    """Cells are wrapped, never cut."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in columns))


def _config(arguments: argparse.Namespace, **defaults: Any) -> ServerConfig:
    config = load_config(given_flags(arguments), arguments.config, defaults)
    set_up_logging(config)
    for name in unknown_variables():
        log.warning("nothing reads the environment variable %s", name)
    return config


def _run(main: Coroutine[Any, Any, Any]) -> Any:
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        from uvloop import new_event_loop as make_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)


async def start_engine(config: ServerConfig) -> "AsyncEngine":
    """Load the model, showing how far it is. Raises StartError."""
    from ..engine import AsyncEngine

    began = time.perf_counter()
    with StartProgress(sys.stderr.isatty()) as progress:
        engine = await AsyncEngine.start(config, progress=progress)
    phases = "  ".join(f"{name} {took:.2f} s" for name, took in engine.start_phases.items())
    log.info("%s is ready after %.2f s: %s", engine.model_name, time.perf_counter() - began, phases)
    return engine


class StartProgress:
    """Shows `progress(phase, done, total)`: bars on a terminal, else a line each tenth,
    at most one a second.

    The engine calls it from its own threads.
    """

    def __init__(self, has_terminal: bool):
        self.lock = threading.Lock()
        self.shown: dict[str, int] = {}
        self.said_s = time.monotonic()
        self.bars: Any = None
        if has_terminal:
            from rich.console import Console
            from rich.progress import Progress

            self.bars = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> "StartProgress":
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        with self.lock:
            if self.bars:
                if phase not in self.shown:
                    self.shown[phase] = self.bars.add_task(phase, total=total)
                self.bars.update(self.shown[phase], completed=done, total=total)
                return
            tenth = done * 10 // total if total else 0
            now = time.monotonic()
            if self.shown.get(phase) != tenth and now >= self.said_s + 1:
                self.shown[phase], self.said_s = tenth, now
                log.info("%s: %.0f of %.0f MB", phase, done / 1e6, total / 1e6)


def _announce(engine: "AsyncEngine", config: ServerConfig, sock: socket.socket) -> None:
    scheme, curl = ("https" if config.ssl_certfile else "http"), "curl"
    is_open = not (config.api_key or config.api_key_file)
    if config.uds is not None:
        url, curl = f"{scheme}://localhost", f"curl --unix-socket {config.uds}"
    else:
        host, port = sock.getsockname()[:2]
        if is_open and host not in ("127.0.0.1", "::1"):
            log.warning("anyone who reaches %s:%d may use the server: set --api-key", host, port)
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    route, question = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if engine.chat_template is None:
        route, question = "completions", '"prompt": "Hello"'
    key = "" if is_open else " -H 'Authorization: Bearer KEY'"
    where = f" on {config.uds}" if config.uds is not None else ""
    name = next(iter(config.served_model_name), engine.model_name)
    print(f"Serving {name} at {url}/v1{where}")
    print(
        f"  {curl} {url}/v1/{route}{key} -H 'Content-Type: application/json' "
        f'-d \'{{{question}, "max_tokens": 100, "temperature": 0}}\'',
        flush=True,
    )
