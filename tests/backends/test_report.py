"""`stoker check-backend`: it finds what is wrong, goes on, and tells so by its exit code."""

import contextlib
import json

import proofs
import pytest

from stoker.backends import cpu
from stoker.backends.api import BackendError
from stoker.backends.contract import report as report_module
from stoker.backends.contract.report import Done, check_backend
from stoker.backends.contract.workers import Ended
from stoker.backends.reference import ReferenceOps
from stoker.http.cli import main


class Wrong(ReferenceOps):
    """Off by a little in one op, broken in another, right in a third."""

    name = "wrong"

    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, weight, eps) * 1.1

    def silu_and_mul(self, x):
        raise RuntimeError("illegal memory access\nand more")


@pytest.fixture
def wrong(monkeypatch):
    monkeypatch.setattr(cpu, "providers", lambda: [Wrong()])


OPS = ["rms_norm", "silu_and_mul", "gelu_and_mul"]


def test_what_is_right(tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--backend", "cpu", "--op", "rms_norm", "--provider", "torch", "--case", "bfloat16"]
    assert main(["check-backend", *flags, "--report", str(path)]) == 0
    assert "all right" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["backend"] == "cpu" and report["facts"]["dist_backend"] == "gloo"
    assert report["versions"]["torch"]
    (row,) = report["ops"]
    assert (row["op"], row["provider"], row["failed"]) == ("rms_norm", "torch", [])
    assert row["passed"] == 4 and 0 < row["worst_error"] < 1


def test_what_is_wrong_is_told_and_the_rest_goes_on(wrong, tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = [part for op in OPS for part in ("--op", op)]
    code = main(["check-backend", "--backend", "cpu", *flags, "--report", str(path)])
    printed = capsys.readouterr().out
    assert code == 1 and "FAILED" in printed
    rows = {row["op"]: row for row in json.loads(path.read_text())["ops"]}
    assert all("times what is allowed" in line for line in rows["rms_norm"]["failed"])
    assert len(rows["rms_norm"]["failed"]) == 12 and rows["rms_norm"]["passed"] == 0
    assert "RuntimeError: illegal memory access (" in rows["silu_and_mul"]["failed"][0]
    assert rows["gelu_and_mul"]["failed"] == [] and rows["gelu_and_mul"]["is_chosen"]


def test_only_what_passed_earns_a_label(wrong, tmp_path, monkeypatch):
    *_, report = check_backend("cpu", OPS)
    (tmp_path / "machine.json").write_text(json.dumps(report.as_json()))
    monkeypatch.setattr(proofs, "REPORTS", tmp_path)
    assert proofs.reported() == {("cpu", "gelu_and_mul", "wrong", "ran")}


def test_what_is_not_there():
    with pytest.raises(BackendError, match="no rms_nrom is checked, there are add_rms_norm"):
        list(check_backend("cpu", ["rms_nrom"]))
    with pytest.raises(BackendError, match="no aiter is checked, there are native, torch"):
        list(check_backend("cpu", providers=["aiter"]))
    with pytest.raises(BackendError, match="no case contains 'nope'"):
        list(check_backend("cpu", case="nope"))
    assert main(["check-backend", "--backend", "rocm"]) == 2


def test_where_no_report_can_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report_module, "_run", lambda *_: pytest.fail("it was known before"))
    path = tmp_path / "missing" / "report.json"
    assert main(["check-backend", "--backend", "cpu", "--report", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_wrong_case_leaves_the_last_report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("{}")
    flags = ["--backend", "cpu", "--case", "nope", "--report", str(path)]
    assert main(["check-backend", *flags]) == 2 and path.read_text() == "{}"


def test_an_interrupted_check_leaves_a_report(tmp_path, monkeypatch):
    def interrupted(target, names):
        if names[0].startswith("gelu_and_mul"):
            raise KeyboardInterrupt
        return Done(len(names))

    monkeypatch.setattr(report_module, "_run", interrupted)
    path = tmp_path / "report.json"
    flags = ["--backend", "cpu", "--provider", "torch", "--report", str(path)]
    with contextlib.suppress(KeyboardInterrupt):
        main(["check-backend", *flags])
    done = [row["op"] for row in json.loads(path.read_text())["ops"]]
    assert done and "gelu_and_mul" not in done


class FaultyWorkers:
    """What `bad` is among ends the process; `breaks` leaves a device that answers no more."""

    def __init__(self):
        self.calls = []

    def run(self, backend, provider, names):
        self.calls.append(list(names))
        if "bad" in names:
            raise Ended("its process ended by SIGSEGV")
        if "breaks" in names:
            i = list(names).index("breaks")
            return Done(i, failed=["breaks: why"], left=tuple(names[i + 1 :]), is_lost=True)
        return Done(len(names))


def test_one_fault_fails_one_check():
    workers = FaultyWorkers()
    done = report_module._run_isolated(workers, "cpu", "torch", ["a", "bad", "b"])
    assert sum(part.passed for part in done) == 2
    assert [line for part in done for line in part.failed] == ["bad: its process ended by SIGSEGV"]
    done = report_module._run_isolated(workers, "cpu", "torch", ["a", "breaks", "b", "c"])
    assert sum(part.passed for part in done) == 3 and workers.calls[-1] == ["b", "c"]
    assert [line for part in done for line in part.failed] == ["breaks: why"]


def test_a_lost_device_in_this_process_fails_what_is_left(wrong, monkeypatch):
    monkeypatch.setattr(report_module, "_answers", lambda _: False)
    *_, report = check_backend("cpu", ["silu_and_mul"], jobs=0)
    (row,) = report.ops
    assert len(row.failed) == 9 and row.passed == 0
    assert all("not run: after the check before" in line for line in row.failed[1:])


def test_in_processes_as_in_one(capsys, tmp_path):
    reports = []
    for jobs in ("0", "2"):
        path = tmp_path / f"{jobs}.json"
        flags = ["--backend", "cpu", "--case", "bfloat16", "--op", "rms_norm", "--op", "linear"]
        assert main(["check-backend", *flags, "--jobs", jobs, "--report", str(path)]) == 0
        reports.append(json.loads(path.read_text())["ops"])
    for rows in reports:
        assert {row["provider"] for row in rows} == {"native", "torch"}  # native must be prepared
        assert all(row["passed"] > 0 and row["failed"] == [] for row in rows)
    names = "provider", "op", "passed"
    assert [[row[n] for n in names] for row in reports[0]] == [
        [row[n] for n in names] for row in reports[1]
    ]
