"""How far each op of each provider was verified, in `labels.json`, which the tests write.

Labels, the best first:
    ran             on the backend's own device, against float64
    interpreted     its Triton kernels in Triton's interpreter on a CPU, against float64
    compiled        its Triton kernels to machine code of the backend's GPUs (for Intel's, SPIR-V),
                    within their limits
    emulated        our code and the vendor's Python ran, native kernels replaced by plain torch
    signature-only  our calls bind to the vendor's signatures

A provider may have several for an op. Only the first says that numbers are right on the device.

Runs on: any (pure).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("labels.json")
LABELS = ("ran", "interpreted", "compiled", "emulated", "signature-only")
Labels = dict[str, dict[str, dict[str, list[str]]]]  # backend, op, provider


@cache
def load() -> Labels:
    """The committed labels."""
    labels: Labels = json.loads(PATH.read_text())
    return labels


def of(backend: str, op: str, provider: str) -> list[str]:
    """The labels of a provider's op, the best first; none where nothing was verified."""
    return load().get(backend, {}).get(op, {}).get(provider, [])


def table() -> str:
    """Markdown: a row an op, a column a backend, providers in alphabetical order in a cell."""
    labels = load()
    ops = {op: None for by_op in labels.values() for op in by_op}
    rows = [["op", *labels], ["---"] * (1 + len(labels))]
    for op in ops:
        cells = (
            "<br>".join(f"{name}: {_shown(which)}" for name, which in by_op.get(op, {}).items())
            for by_op in labels.values()
        )
        rows.append([f"`{op}`", *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _shown(which: list[str]) -> str:
    return ", ".join(which) or "nothing yet"
