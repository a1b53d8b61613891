"""The layout rules that no tool knows: where files live, who may import whom, which thread."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("engine", "backends", "http")
MODULES = sorted(p for top in TOPS for p in (ROOT / top).rglob("*.py"))
THREADS = {"any (pure)", "loop", "pool", "gpu", "worker"}

# Each folder may import from itself and from these; the longest match wins.
MAY_IMPORT = {
    "backends": set(),
    "engine/api": set(),
    "engine/core": {"engine/api"},
    "engine/text": {"engine/api"},
    "engine/models": {"engine/api", "backends"},
    "engine/runtime": {"engine/api", "engine/core", "engine/models", "backends"},
    "engine": {
        "engine/api",
        "engine/core",
        "engine/models",
        "engine/runtime",
        "engine/text",
        "backends",
    },
    "http": {"engine", "engine/api", "engine/text", "backends"},
}
MAY_USE = {  # beside the standard library
    "engine/api": {"pydantic"},
    "engine/core": {"numpy"},
}
# Each of these is imported in one place only, so a missing one breaks that place only.
HOME_OF = {
    "aiohttp": "http",
    "aiter": "backends/rocm",
    "flashinfer": "backends/cuda",
    "intel_extension_for_pytorch": "backends/xpu",
    "jinja2": "engine/text",
    "redis": "engine/runtime/stores",
    "tokenizers": "engine/text",
    "triton": "backends",
    "vllm_xpu_kernels": "backends/xpu",
}


def layer_of(path: str) -> str:
    return max((k for k in MAY_IMPORT if path == k or path.startswith(k + "/")), key=len)


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Yield ('engine/core/scheduler', '') for our modules and ('', 'torch') for others."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].relative_to(ROOT)
            module = base / (node.module or "").replace(".", "/")
            if (ROOT / module).is_dir():  # from ..engine import runtime
                for name in node.names:
                    inner = ROOT / module / name.name
                    is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                    yield str(module / name.name if is_module else module), ""
            else:
                yield str(module), ""
        elif isinstance(node, ast.ImportFrom):
            yield "", (node.module or "").split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (("", a.name.split(".")[0]) for a in node.names)


@pytest.mark.parametrize("file", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module(file):
    here = layer_of(str(file.relative_to(ROOT).parent))
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    tags = doc.rsplit("Runs on: ", 1)[-1].rstrip(".").split(", ")
    assert set(tags) <= THREADS, "the module docstring must end with 'Runs on: THREADS.'"
    for ours, other in imports(file):
        if ours:
            there = layer_of(ours)
            assert there == here or there in MAY_IMPORT[here], f"{here} may not import {there}"
            continue
        assert other not in ("stoker", *TOPS[:2]), "import our own modules relatively"
        if here in MAY_USE:
            assert other in sys.stdlib_module_names | MAY_USE[here], f"{other} in {here}"
        home = HOME_OF.get(other, "")
        assert str(file.relative_to(ROOT)).startswith(home), f"{other} belongs in {home}/"


def test_http_never_shadows_the_standard_library():
    assert not (ROOT / "http/__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "http").glob("*_test.py")) + list((ROOT / "http").glob("test_*.py"))


def test_pyproject_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"stoker." + ".".join(p.parent.relative_to(ROOT).parts) for p in MODULES}
    assert set(listed) == found


def test_no_serialized_code_is_loaded():
    banned = ("pickle", "dill", "marshal", "cloudpickle")
    for file in MODULES:
        names = {other for _, other in imports(file)}
        assert not names & set(banned), f"{file.name} imports {names & set(banned)}"
        assert "torch.load(" not in file.read_text(), f"{file.name} calls torch.load"


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda f: f.name)
def test_a_benchmark_explains_itself(file):
    """--help gives its docstring: through argparse, or by gpu_script, which looks for a GPU too."""
    text = file.read_text()
    guarded = {"gpu_script", "gpu_kernels"} & {name for _, name in imports(file)}
    if file.name != "gpu_script.py":
        assert guarded or "description=__doc__, formatter_class=" in text
        assert guarded or not file.name.startswith("gpu_")


@pytest.mark.parametrize("flags", [["--help"], []])
def test_a_benchmark_without_its_gpu(flags):
    file = ROOT / "benchmarks" / "gpu_linear.py"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, file, *flags],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if flags:
        text = ast.get_docstring(ast.parse(file.read_text()))
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, text, "")
    else:
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "needs a GPU" in done.stderr
