"""AMD's package, without an AMD GPU: signatures of two versions, and its Python run for real."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import aiter_package
import pytest

import stoker.backends
from stoker.backends.rocm import package

HERE = Path(__file__).parent
OURS = Path(next(iter(stoker.backends.__path__)), "rocm")
GENERATIONS = {"0.1.7": aiter_package.of_the_wheel, "newer": aiter_package.of_the_newer}
functions = pytest.mark.parametrize("function", package.FUNCTIONS, ids=lambda f: f.name)
generations = pytest.mark.parametrize("generation", GENERATIONS)


def known(generation, function):
    """Its signature, which one of its modules must have."""
    found = [GENERATIONS[generation](module, function.name) for module in function.modules]
    found = [signature for signature in found if signature is not None]
    assert len(found) == 1, f"{generation} has {function.name} in {len(found)} of the modules"
    return found[0]


@functions
@generations
def test_our_keywords_bind(generation, function):
    known(generation, function).bind(**dict.fromkeys(function.keywords))


@functions
@generations
def test_a_call_that_is_wrong_would_be_seen(generation, function):
    signature, given = known(generation, function), dict.fromkeys(function.keywords)
    required = [n for n, p in signature.parameters.items() if p.default is p.empty]
    with pytest.raises(TypeError, match=required[-1]):  # dropped
        signature.bind(**{name: None for name in given if name != required[-1]})
    with pytest.raises(TypeError, match="renamed"):
        signature.bind(**given, renamed=None)


def test_by_position_a_scale_would_become_a_page_size():
    """Why everything goes by keyword."""
    at = [list(known(g, package.mla_decode_fwd).parameters)[8] for g in GENERATIONS]
    assert at == ["sm_scale", "page_size"]


def test_every_name_of_the_package_is_in_the_checked_table():
    modules = {module for function in package.FUNCTIONS for module in function.modules}
    used = set()
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                module = getattr(node, "module", None) or ""
                level = getattr(node, "level", 0)
                assert level or not any(n.split(".")[0] == "aiter" for n in [*names, module]), file
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_name = node.value.startswith("aiter.") and " " not in node.value
                assert not is_name or node.value in modules, f"{node.value} in {file.name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "package":
                    used.add(node.attr)
    names = {function.name for function in package.FUNCTIONS}
    assert used - {"Function", "FUNCTIONS", "reason_against", "quant_type"} == names


SELECTED = (
    "test_op and ((rms_norm and float16 and not mla) or (_and_mul and bfloat16) or route"
    " or (write_qkv and norms-bfloat16) or experts-aligned"
    " or (attend and bfloat16 and not mla and (decode-page16 or mixed-page16 or heads7 or dim80"
    " or everything-page16 or page64 or tree))) or not test_op"
)


def test_the_contract_s_checks_on_the_real_package():
    plugins = ["-p", "triton_interpreter", "-p", "aiter_emulated", "-k", SELECTED]
    _passes([*plugins, "test_contract.py", "aiter_cases.py"], TRITON_INTERPRET="1")


def test_its_attention_compiles():
    _passes(["aiter_compiled.py"])


def _passes(arguments, **variables):
    """In a process of its own: the package is imported, in one of two ways."""
    aiter_package.unpacked()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    names = [str(HERE / name) if name.endswith(".py") else name for name in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *names],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages are imported from, and nothing called aiter elsewhere."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_another_package_of_that_name_is_told_apart(site, monkeypatch):
    (site / "aiter").mkdir()
    (site / "aiter/__init__.py").write_text("raise SystemExit('it must not be imported')")
    reason = package.reason_against()
    assert reason == (
        "the installed package `aiter` is not AMD's, which the package index calls amd-aiter: "
        "pip uninstall aiter, then pip install amd-aiter"
    )


def test_an_installation_that_is_broken_is_a_reason(site):
    (site / "aiter/ops").mkdir(parents=True)
    (site / "aiter/ops/mha.py").touch()
    (site / "aiter/__init__.py").write_text("raise RuntimeError('ROCm version file not found\\n.')")
    reason = package.reason_against()
    assert reason.endswith("cannot be imported: RuntimeError: ROCm version file not found")


def test_without_it():
    if sys.modules.get("aiter") is None and not package.importlib.util.find_spec("aiter"):
        assert package.reason_against() == "amd-aiter is not installed"
