"""The committed labels are those that were earned: none is missing, none is better."""

import os
from pathlib import Path

import proofs
import pytest

from stoker.backends import labels

HERE = Path(__file__).parent
STALE = "backends/labels.json is stale: run `python tests/backends/proofs.py`"


def test_every_op_has_a_label():
    """But FlashInfer's, which runs on a GPU alone, and only where its modules are built."""
    for backend, op, provider in proofs.provided():
        if backend == "cuda" and (backend, provider) in proofs.passed_over():
            assert provider.startswith("flashinfer")
            continue
        assert labels.of(backend, op, provider), f"{backend}: {op} of {provider} was not verified"


def test_no_label_is_better_than_what_was_proved(request):
    ran = {item.path.name for item in request.session.items}
    wanted = {path.name for path in HERE.glob("test_*.py")}
    if not ran >= wanted or request.config.option.keyword or request.session.testsfailed:
        pytest.skip("only a whole run of tests/backends proves all labels")
    found = proofs.earned(proofs.read(os.environ[proofs.VARIABLE]) | proofs.reported())
    assert found == labels.load(), STALE


def test_what_is_not_proved_earns_nothing():
    one = {("rocm", "rms_norm", "triton", f"compiled:{gfx}") for gfx in ("gfx90a", "gfx942")}
    assert proofs.earned(one)["rocm"]["rms_norm"]["triton"] == []
    one |= {("rocm", "rms_norm", "triton", "compiled:gfx950")}
    assert proofs.earned(one)["rocm"]["rms_norm"]["triton"] == ["compiled"]
