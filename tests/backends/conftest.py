"""Lets the tests of this folder import each other's modules, and notes what they prove."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import proofs


def pytest_configure(config):
    if proofs.VARIABLE not in os.environ:
        handle, path = tempfile.mkstemp(suffix=".jsonl", prefix="stoker-proofs-")
        os.close(handle)
        os.environ[proofs.VARIABLE] = path
        config.add_cleanup(lambda: Path(path).unlink(missing_ok=True))


def pytest_collection_modifyitems(items):
    """The labels are compared when all else has run."""
    items.sort(key=lambda item: item.path.name == "test_labels.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    target = getattr(item, "callspec", None) and item.callspec.params.get("target")
    if hasattr(target, "asked"):
        if report.when == "call" and report.passed:
            for backend, label in target.proves:
                for op in target.asked:
                    proofs.prove(backend, op, target.provider.name, label)
        if report.when == "teardown":
            target.asked.clear()
    return report
