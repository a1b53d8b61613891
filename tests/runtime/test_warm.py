"""`stoker warm`: what takes long to compile is compiled ahead, without weights."""

import shutil

import pytest

from stoker.backends import cpu
from stoker.backends.api import BackendError
from stoker.engine.api.config import EngineConfig
from stoker.engine.api.errors import StartError
from stoker.engine.build import build_modules
from stoker.http import cli


class Library:
    """A provider that compiles; it is never chosen."""

    name = "library"
    asked = ()
    error = None

    def probe(self, runtime):
        return "not built yet"

    def build(self, specs, dtype):
        Library.asked = [(s.num_heads, s.num_kv_heads, s.head_dim, dtype.itemsize) for s in specs]
        if Library.error:
            raise BackendError(Library.error)
        return ["one", "two"]


@pytest.fixture
def folder(tiny_model, tmp_path, monkeypatch):
    """A model without weights, on a backend with that library."""
    for path in tiny_model.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, tmp_path)
    providers = cpu.providers
    monkeypatch.setattr(cpu, "providers", lambda: [Library(), *providers()])
    monkeypatch.setattr(Library, "error", None)
    return str(tmp_path)


def test_libraries_are_told_the_models_layers(folder):
    config = EngineConfig(model=folder, backend="cpu", dtype="bfloat16", load_format="dummy")
    assert build_modules(config) == ["one", "two"]
    assert Library.asked == [(4, 2, 16, 2)]
    Library.error = "there is no compiler"
    with pytest.raises(StartError, match="there is no compiler"):
        build_modules(config)


def test_the_command_builds_and_starts_once(folder):
    flags = ["--backend", "cpu", "--kv-tokens", "512", "--dtype", "float32"]
    assert cli.main(["warm", folder, *flags]) == 0
    assert Library.asked == [(4, 2, 16, 4)]


def test_auto_leaves_the_provider_of_attention_to_measurement():
    assert EngineConfig(attention_backend="auto").attention_backend is None
    assert EngineConfig(attention_backend="triton").attention_backend == "triton"
