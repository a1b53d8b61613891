"""What a check is given, and how results are compared with the oracle's.

Runs on: gpu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..api import DeviceRuntime, LayerCache, Provider
from .cases import TOLERANCE, AttentionCase, AttentionInputs, build_attention

POISON = 1e4  # in slots that nobody owns, for providers that read them and mask what they give


@dataclass(frozen=True)
class Target:
    """One provider on one device."""

    runtime: DeviceRuntime
    provider: Provider

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.runtime.device

    @property
    def has_float32_residual(self) -> bool:
        """Whether its ops take a float32 residual beside activations of another type."""
        return getattr(self.provider, "float32_residual", False)

    def op(self, name: str) -> Any:
        """The provider's method."""
        return getattr(self.provider, name)

    def attention(self, case: AttentionCase, dtype: torch.dtype) -> AttentionInputs:
        """A case's tensors; what must not be read holds NaN, or large numbers."""
        inputs = build_attention(case, dtype, self.device)
        if getattr(self.provider, "needs_finite_cache", False):
            cache = LayerCache(*(x.nan_to_num(POISON) for x in inputs.cache))
            inputs = replace(inputs, cache=cache)
        return inputs

    def kept(self, cache: LayerCache) -> LayerCache:
        """A cache in the contract's order as the provider keeps it."""
        convert = getattr(self.provider, "from_nhd", None)
        return convert(cache) if convert else cache

    def nhd(self, cache: LayerCache) -> LayerCache:
        """The inverse of `kept`."""
        convert = getattr(self.provider, "to_nhd", None)
        return convert(cache) if convert else cache


@dataclass(frozen=True)
class Check:
    """A check of the first of these ops, which calls them all.

    Attributes:
        run: raises BackendError where the provider says that it does not serve this case.
        wants_float32_residual: it is for providers with that attribute alone.
    """

    ops: tuple[str, ...]
    case: str
    run: Callable[[Target], float]
    wants_float32_residual: bool = False

    def __str__(self) -> str:
        return f"{self.ops[0]}-{self.case}"

    def missing(self, target: Target) -> str | None:
        """Why it is not for this target, or None."""
        for op in self.ops:
            if not hasattr(target.provider, op):
                return f"{target.provider.name} does not have {op}"
        if self.wants_float32_residual and not target.has_float32_residual:
            return f"{target.provider.name} keeps the residual in the model's type"
        return None


def randn(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Tensor:
    """The same numbers on every device."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype)


def up(x: Any) -> Any:
    """A tensor in float64 on the CPU, or None."""
    return None if x is None else x.cpu().double()


def compare(
    got: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    tolerance: float | None = None,
) -> float:
    """The largest error as a share of what is allowed: TOLERANCE (scale + |want|).

    Raises:
        AssertionError: it is more than 1, or type or shape is another.
    """
    assert got.dtype == dtype, f"{got.dtype}, not {dtype}"
    assert got.shape == want.shape, f"{tuple(got.shape)}, not {tuple(want.shape)}"
    allowed = (tolerance or TOLERANCE[dtype]) * (scale + want.abs())
    got = got.double().cpu()
    share = ((got - want).abs() / allowed).masked_fill(got.isnan() & want.isnan(), 0.0)
    share = share.masked_fill(got == want, 0.0)
    worst = float(share.nan_to_num(math.inf).max()) if share.numel() else 0.0
    assert worst <= 1, f"off by {worst:.3g} times what is allowed"
    return worst


def same(got: Tensor, want: Tensor, what: str) -> float:
    """0, or an AssertionError where two tensors differ in a bit."""
    assert torch.equal(got, want), f"{what} differs"
    return 0.0
