"""What the adapters of vendors' packages share.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)  # the types that vendors' kernels take


class Scales(dict[tuple[float, torch.device], Tensor]):
    """Scales on the device, float32 [1], each made once: `scales[value, device]`."""

    def __missing__(self, key: tuple[float, torch.device]) -> Tensor:
        value, device = key
        self[key] = torch.full((1,), value, device=device)
        return self[key]


def version(distribution: str) -> str:
    """As installed; a build from source may have another distribution's name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def wrong_keyword(passed: Iterable[str], known: set[str], required: set[str]) -> str | None:
    """A keyword that we pass and the callee does not know, or that it requires and does not get."""
    return min((set(passed) - known) | (required - set(passed)), default=None)
