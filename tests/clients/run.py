"""Run real clients against a server: each group in a virtual environment of its own.

    python tests/clients/run.py                    # starts `stoker serve smollm2-135m` by itself
    python tests/clients/run.py --url http://...   # a server in float32, for the loglikelihoods
    python tests/clients/run.py --only lm-eval

Clients whose packages exclude each other are in different groups; guidellm brings torch along.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ("pytest", "pytest-timeout")
GROUPS = {  # name: what is installed, what is run
    "newest": (
        ("openai", "langchain-openai", "pydantic-ai-slim[openai]", "llm"),
        ("test_openai.py", "test_frameworks.py"),
    ),
    "instructor": (("instructor",), ("test_frameworks.py",)),  # it wants openai below 3
    "lm-eval": (("lm-eval[api]",), ("test_lm_eval.py",)),
    "guidellm": (("guidellm",), ("test_guidellm.py",)),
}


def environment(group: str, packages: tuple[str, ...]) -> Path:
    """The group's Python, made where it is missing."""
    folder = ROOT / ".cache" / "clients" / group
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-U"]
    subprocess.run([python, *install, *packages, *TESTS], check=True)
    return python


def run(group: str, url: str) -> int:
    """pytest's exit code."""
    packages, files = GROUPS[group]
    python = environment(group, packages)
    names = [package.partition("[")[0] for package in packages]
    print(f"== {group}", flush=True)
    show = "from importlib.metadata import version; import sys; "
    show += "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep='\\n')"
    subprocess.run([python, "-c", show, *names], check=True)
    command = [python, "-m", "pytest", "-q", "-rs", *(HERE / file for file in files)]
    command += [f"--confcutdir={HERE}", "-o", "addopts=--import-mode=importlib"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "STOKER_URL": url}).returncode


def main() -> int:
    """Run the groups; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server's base URL, without /v1")
    parser.add_argument("--only", choices=GROUPS, action="append")
    arguments = parser.parse_args()
    server = None
    url = arguments.url
    if url is None:
        command = ["-m", "stoker.http", "serve", "smollm2-135m", "--dtype", "float32"]
        server = subprocess.Popen(
            [sys.executable, *command, "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        url = server.stdout.readline().strip().partition(" at ")[2].removesuffix("/v1")
    try:
        codes = [run(group, url) for group in arguments.only or GROUPS]
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
