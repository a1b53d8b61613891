"""The gated delta net, which takes attention's place in a layer.

Runs on: gpu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...backends.api import DeltaNetSpec
from .linear import Linear
from .parameters import Parameters

if TYPE_CHECKING:
    from ...backends.api import BatchMeta, LayerState
    from .config import DeltaNetConfig, ModelConfig


class DeltaNet:
    """A recurrent state in place of keys and values (Yang et al. 2024), with a gated norm behind.

    Attributes:
        state_shapes: of a request's LayerState: conv and recurrent.
    """

    def __init__(
        self, name: str, config: ModelConfig, delta_net: DeltaNetConfig, parameters: Parameters
    ):
        c, hidden = delta_net, config.hidden_size
        keys, values = c.num_key_heads * c.key_dim, c.num_value_heads * c.value_dim
        channels = 2 * keys + values
        if c.interleaved:
            parts = {
                "in_proj_qkvz": channels + values,
                "in_proj_ba": 2 * c.num_value_heads,
            }
        else:
            parts = {
                "in_proj_qkv": channels,
                "in_proj_z": values,
                "in_proj_b": c.num_value_heads,
                "in_proj_a": c.num_value_heads,
            }
        self._widths = [channels + values, 2 * c.num_value_heads]
        self._config, self._eps, self._parameters = c, config.norm_eps, parameters
        self.qkv = Linear({f"{name}.{p}": n for p, n in parts.items()}, hidden, False, parameters)
        self.out = Linear({f"{name}.out_proj": hidden}, values, False, parameters)
        self.state_shapes = (
            (channels, c.kernel_size - 1),
            (c.num_value_heads, c.key_dim, c.value_dim),
        )
        self._log_a = parameters.keep(f"{name}.A_log", (c.num_value_heads,))
        self._dt_bias = parameters.keep(f"{name}.dt_bias", (c.num_value_heads,))
        self._norm = parameters.keep(f"{name}.norm.weight", (c.value_dim,))
        self._conv = parameters.keep(f"{name}.conv1d.weight", (channels, 1, c.kernel_size))
        self._spec: DeltaNetSpec | None = None

    def finish(self) -> None:
        """Collect the weights, once all are loaded."""
        c = self._config
        self._spec = DeltaNetSpec(
            num_key_heads=c.num_key_heads,
            num_value_heads=c.num_value_heads,
            key_dim=c.key_dim,
            value_dim=c.value_dim,
            conv=self._conv.flatten(1).to(self._parameters.dtype),
            decay=-torch.exp(self._log_a),
            dt_bias=self._dt_bias,
            norm=self._norm,
            eps=self._eps,
            interleaved=c.interleaved,
        )

    def __call__(self, projected: Tensor, meta: BatchMeta, state: LayerState) -> Tensor:
        """What lies between the two linears; the rows' states change in place.

        Returns:
            [num_tokens, num_value_heads * value_dim].
        """
        assert self._spec is not None
        qkvz, ba = projected.split(self._widths, dim=1)
        return self._parameters.ops.delta_net(qkvz, ba, meta, state, self._spec)
