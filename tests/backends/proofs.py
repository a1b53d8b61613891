"""What the tests of this folder prove of (backend, op, provider), for `backends/labels.json`.

A test that passes earns labels in one of two ways:
    with a parameter `target` (see targets.py), one for each op it asked for and each of
    target.proves; so a new backend's plugin sets `proves` on its targets and is done;
    or by a call of `prove`, where there is no target (signatures, compile checks).

They go to a file of lines, which processes that a test starts inherit by CONTRACT_PROOFS. At the
end of a whole run `test_labels.py` compares them with the committed labels, and

    python tests/backends/proofs.py [TESTS, as for pytest]

runs the folder and writes labels.json; or it runs some tests, and adds what they prove to what is
there. "ran" on a device that is not here comes from the reports of `stoker check-backend` in
tests/data/reports.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stoker.backends import labels, registry

REPORTS = Path(__file__).parents[1] / "data" / "reports"
VARIABLE = "CONTRACT_PROOFS"

Proof = tuple[str, str, str, str]  # backend, op, provider, label; compiled:TARGET for one target
COMPILED_FOR = {"cuda": {"sm_80", "sm_90", "sm_100"}, "rocm": {"gfx90a", "gfx942", "gfx950"}}
OF_AITER = {"gfx942", "gfx950"}


def prove(backend: str, op: str, provider: str, label: str) -> None:
    """To be called after the assertions that it follows from."""
    assert label.split(":")[0] in labels.LABELS, label
    with open(os.environ[VARIABLE], "a") as file:  # one write a line: processes may interleave
        file.write(json.dumps([backend, op, provider, label]) + "\n")


def read(path: str) -> set[Proof]:
    """All that was proved so far."""
    return {tuple(json.loads(line)) for line in Path(path).read_text().splitlines()}


def reported() -> set[Proof]:
    """What runs on real devices proved."""
    proofs = set()
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text())
        for row in report["ops"]:
            if row["failed"] == [] and row["passed"] > 0:
                proofs |= {(report["backend"], op, row["provider"], "ran") for op in row["ops"]}
    return proofs


def passed_over() -> set[tuple[str, str]]:
    """(backend, provider) of what could not run on those devices."""
    reports = [json.loads(path.read_text()) for path in REPORTS.glob("*.json")]
    return {(report["backend"], name) for report in reports for name in report["skipped"]}


def provided() -> list[tuple[str, str, str]]:
    """Every (backend, op, provider) there is, in the order of ops and providers."""
    found = []
    for record in registry.BACKENDS:
        module = importlib.import_module(record.module, "stoker.backends")
        for op in (*registry.OP_NAMES, *registry.FUSED_OPS, *registry.OPTIONAL_OPS):
            found += [(record.name, op, p.name) for p in module.providers() if hasattr(p, op)]
    return found


def earned(proofs: set[Proof]) -> labels.Labels:
    """The labels that follow from proofs, in the form of labels.json."""
    out: labels.Labels = {}
    for backend, op, provider in provided():
        which = {label for b, o, p, label in proofs if (b, o, p) == (backend, op, provider)}
        targets = {label.split(":")[1] for label in which if ":" in label}
        wanted = OF_AITER if provider == "aiter" else COMPILED_FOR.get(backend, {""})
        if targets >= wanted:
            which.add("compiled")
        names = [label for label in labels.LABELS if label in which]
        out.setdefault(backend, {}).setdefault(op, {})[provider] = names
    return out


def write(found: labels.Labels) -> None:
    """A line an op."""
    backends = []
    for backend, by_op in found.items():
        lines = (f"  {json.dumps(op)}: {json.dumps(known)}" for op, known in by_op.items())
        backends.append(f" {json.dumps(backend)}: {{\n" + ",\n".join(lines) + "\n }")
    labels.PATH.write_text("{\n" + ",\n".join(backends) + "\n}\n")


def main(tests: list[str]) -> int:
    """Run tests, then write the labels that they earned."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-m", "pytest", "-q", *(tests or [str(Path(__file__).parent)])]
        command += ["--ignore", str(Path(__file__).with_name("test_labels.py"))]
        done = subprocess.run(command, env={**os.environ, VARIABLE: file.name})
        if done.returncode:
            return done.returncode
        proofs = read(file.name) | reported()
    if tests:
        proofs |= {
            (backend, op, provider, label)
            for backend, by_op in labels.load().items()
            for op, by_provider in by_op.items()
            for provider, known in by_provider.items()
            for label in known
        }
    write(earned(proofs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
