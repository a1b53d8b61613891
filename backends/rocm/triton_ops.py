"""Our Triton kernels, with what AMD's GPUs want otherwise.

Runs on: gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..triton import TritonOps
from .fp8 import weight_to_fnuz

if TYPE_CHECKING:
    from torch import Tensor

    from ..api import DeviceRuntime, QuantizedExperts, QuantizedWeight


class RocmTritonOps(TritonOps):
    """fp8 weights become gfx942's own fp8 when they are packed."""

    _fp8: torch.dtype | None = None

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """See `TritonOps.probe`."""
        self._fp8 = runtime.facts.fp8
        return super().probe(runtime)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """See `TritonOps.pack_quantized`."""
        return super().pack_quantized(self._native(weight), bias)

    def pack_quantized_experts(self, weights: QuantizedExperts) -> Any:
        """See `TritonOps.pack_quantized_experts`."""
        gate_up, down = self._native(weights.gate_up), self._native(weights.down)
        return super().pack_quantized_experts(replace(weights, gate_up=gate_up, down=down))

    def _native(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight_to_fnuz(weight) if self._fp8 == torch.float8_e4m3fnuz else weight
