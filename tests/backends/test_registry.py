"""The choice of backend and providers, and what is said where a choice cannot be had."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from stoker.backends import labels, registry
from stoker.backends.api import BackendError
from stoker.backends.registry import FUSED_OPS, OP_NAMES, BackendModule


class Fast:
    """A provider with few ops that cannot always run."""

    name = "fast"

    def __init__(self, reason=None):
        self.reason = reason

    def probe(self, runtime):
        return self.reason

    def linear(self, x, packed, out_dtype=None):
        return "fast linear"

    def attend(self, q, meta, cache, spec):
        return "fast attend"


class Plain:
    """A provider with every op."""

    name = "plain"

    def probe(self, runtime):
        return None


for _op in OP_NAMES:
    setattr(Plain, _op, lambda self, *args, _op=_op: f"plain {_op}")


def make_backend(monkeypatch, name, providers, error=None):
    module = ModuleType(f"backend_{name}")

    def runtime():
        if error:
            raise BackendError(error)
        return SimpleNamespace(name=name, description=f"a {name} device")

    module.runtime, module.providers = runtime, lambda: providers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return BackendModule(name, module.__name__)


@pytest.fixture
def backends(monkeypatch):
    records = (
        make_backend(monkeypatch, "one", [Plain()], error="there is no such device"),
        BackendModule("two", "backend_that_nobody_wrote"),
        make_backend(monkeypatch, "three", [Fast(), Plain()]),
        make_backend(monkeypatch, "four", [Fast("its library is missing"), Plain()]),
    )
    monkeypatch.setattr(registry, "BACKENDS", records)


def test_auto_takes_the_first_backend_that_runs(backends):
    backend = registry.select("auto")
    assert backend.runtime.name == "three"
    assert backend.ops.attend(1, 2, 3, 4) == "fast attend"
    assert backend.ops.rms_norm(1, 2, 3) == "plain rms_norm"
    assert backend.choices["rms_norm"].passed_over == {"fast": "does not have this op"}


def test_ops_with_a_shared_format_come_from_one_provider(backends):
    ops = registry.select("three").ops
    assert ops.linear(1, 2) == "plain linear"  # Fast cannot pack what it would multiply


def test_write_qkv_follows_attends_layout_of_pages(monkeypatch):
    own = type("Own", (Plain,), {"name": "own", "kv_layout": "another order"})()
    record = make_backend(monkeypatch, "five", [own, Plain()])
    monkeypatch.setattr(registry, "BACKENDS", (record,))
    providers = {op: choice.provider for op, choice in registry.select("five").choices.items()}
    assert providers["write_qkv"] == providers["attend"] == "own"
    choices = registry.select("five", {"attend": "plain"}).choices
    assert choices["write_qkv"].provider == "plain"
    assert choices["write_qkv"].passed_over == {"own": "attend wants pages as NHD"}
    assert choices["rms_norm"].provider == "own"
    with pytest.raises(BackendError, match="attend wants pages as another order"):
        registry.select("five", {"write_qkv": "plain"})


def test_a_fused_op_is_there_only_where_all_of_its_parts_come_from_its_provider(monkeypatch):
    fused = type("Fused", (Plain,), {"name": "fused", "decoder_layer": lambda *args: "whole"})()
    record = make_backend(monkeypatch, "six", [fused, Plain()])
    monkeypatch.setattr(registry, "BACKENDS", (record,))
    backend = registry.select("six")
    assert backend.ops.decoder_layer() == "whole"
    assert backend.choices["decoder_layer"].provider == "fused"
    assert registry.select("six", {"sample": "plain"}).ops.decoder_layer() == "whole"
    backend = registry.select("six", {"rms_norm": "plain"})
    assert not hasattr(backend.ops, "decoder_layer")
    assert "decoder_layer" not in backend.choices


def test_reasons_of_a_probe_are_kept(backends):
    choice = registry.select("four").choices["attend"]
    assert (choice.provider, choice.passed_over) == ("plain", {"fast": "its library is missing"})


def test_an_override_forces_a_provider(backends):
    backend = registry.select("three", {"attend": "plain"})
    assert backend.ops.attend(1, 2, 3, 4) == "plain attend"
    assert backend.choices["attend"].passed_over == {"fast": "plain is asked for"}
    assert not backend.ops.float32_residual  # none of the providers asks for it


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("one", {}, "backend one cannot run here: there is no such device"),
        ("two", {}, "backend two cannot run here: No module named 'backend_that_nobody_wrote'"),
        ("five", {}, "unknown backend 'five', there are one, two, three, four"),
        ("three", {"atend": "plain"}, "unknown op 'atend', there are pack_linear, "),
        (
            "three",
            {"attend": "slow"},
            "attend of backend three cannot come from slow: there is no ",
        ),
        ("four", {"attend": "fast"}, "four cannot come from fast: its library is missing"),
        ("three", {"sample": "fast"}, "three cannot come from fast: does not have this op"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(backends, name, overrides, message):
    with pytest.raises(BackendError) as error:
        registry.select(name, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_backend_at_all_names_every_reason(backends, monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", registry.BACKENDS[:2])
    with pytest.raises(BackendError, match=r"no such device.*backend_that_nobody_wrote"):
        registry.select("auto")


def test_describe_has_a_row_for_every_op_and_reason(backends):
    rows = registry.describe()
    assert ("one", "", "", "", "backend one cannot run here: there is no such device", "") in rows
    assert ("three", "a three device", "attend", "fast", "", "") in rows
    assert ("four", "a four device", "attend", "fast", "its library is missing", "") in rows
    used = [row.op for row in rows if row.backend == "four" and not row.reason]
    assert sorted(used) == sorted(OP_NAMES)


def test_labels_are_those_of_the_committed_table(monkeypatch):
    monkeypatch.setattr(labels, "load", lambda: {"cpu": {"attend": {"native": ["ran"]}}})
    rows = [row for row in registry.describe() if row.backend == "cpu" and row.labels]
    assert [(row.op, row.provider, row.labels) for row in rows] == [("attend", "native", "ran")]


def test_auto_says_why(backends, caplog):
    with caplog.at_level("INFO", "stoker.backends.registry"):
        registry.select("auto")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "stoker.backends.registry"]
    assert line.startswith("backend three on a three device; backend one cannot run here: there is")


def test_what_was_never_run_says_so(backends, monkeypatch, caplog):
    known = {"three": {"attend": {"fast": ["emulated"], "plain": ["ran"]}}}
    monkeypatch.setattr(labels, "load", lambda: known)
    registry.select("three")
    assert "never run" not in caplog.text
    monkeypatch.setattr(registry, "NEVER_SEEN", ("three",))
    registry.select("three")
    assert "three was never run on its own devices" in caplog.text
    caplog.clear()
    registry.select("three", {"attend": "plain"})
    assert "never run" not in caplog.text


def test_the_cpu_backend_has_every_op():
    backend = registry.select("cpu")
    assert backend.runtime.name == "cpu"
    assert {"decoder_layer", "quantized_rows"} <= set(FUSED_OPS)
    assert set(OP_NAMES) < set(backend.choices) <= {*OP_NAMES, *FUSED_OPS}
    assert {choice.provider for choice in backend.choices.values()} <= {"native", "torch"}
    assert backend.ops.float32_residual
    forced = registry.select("cpu", {op: "torch" for op in OP_NAMES})
    assert {choice.provider for choice in forced.choices.values()} == {"torch"}
    assert not hasattr(forced.ops, "quantized_rows") and not forced.ops.gguf_types
