"""AMD's wheel, as the package index has it: fetched once, unpacked beside other caches.

Its kernels in C++ are compiled at first use, so that the wheel is the same on every machine: all of
its Python and Triton can be read and run without an AMD GPU.
"""

import ast
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from stoker.backends.cache import cache_folder

VERSION = "0.1.7.post2.dev18"
NEWER = Path(__file__).parents[1] / "data" / "aiter_signatures.json"
WANTED = ("aiter/", "aiter_meta/csrc/", "amd_aiter-")


def unpacked() -> Path:
    """The folder that holds `aiter`; a skip where the index cannot be reached."""
    folder = cache_folder() / "tests" / f"amd-aiter-{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", temporary]
        done = subprocess.run([*command, f"amd-aiter=={VERSION}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"amd-aiter cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
        aside = Path(temporary) / "unpacked"
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            members = [name for name in wheel.namelist() if name.startswith(WANTED)]
            wheel.extractall(aside, [name for name in members if not name.endswith(".co")])
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder


def signature(text: str) -> inspect.Signature:
    """Of a parameter list as source, "(q, k, scale=None)"; defaults are only there or not."""
    function = ast.parse(f"def f{text}: ...").body[0]
    given, kind = function.args, inspect.Parameter
    assert not given.vararg and not given.kwonlyargs and not given.kwarg
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    num_required = len(names) - len(given.defaults)
    return inspect.Signature(
        kind(name, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < num_required else ...)
        for i, name in enumerate(names)
    )


@cache
def of_the_wheel(module: str, name: str) -> inspect.Signature | None:
    """A function's signature, out of the wheel's source; None where it does not have it."""
    path = unpacked() / (module.replace(".", "/") + ".py")
    if not path.exists():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return signature(f"({ast.unparse(node.args)})")
    return None


@cache
def of_the_newer(module: str, name: str) -> inspect.Signature | None:
    """The same of the newer version, whose signatures are facts in a file."""
    text = json.loads(NEWER.read_text())["functions"].get(f"{module}.{name}")
    return None if text is None else signature(text)
