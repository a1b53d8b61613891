"""Grouped-query attention.

Runs on: gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.api import AttentionSpec, Rope
from ..api.errors import StartError
from .linear import Linear
from .norms import HeadNorms, RMSNorm, weight_of
from .parameters import Expected, Parameters
from .rope import query_scales

if TYPE_CHECKING:
    from ...backends.api import BatchMeta, LayerCache
    from .config import ModelConfig


class Attention:
    """Grouped-query attention with rotary embedding, q and k norms, and a window.

    Attributes:
        is_plain: `Ops.write_qkv` and `Ops.attend` are all that it does.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        rope: Rope | None,
        parameters: Parameters,
    ):
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        sinks = None
        if config.has_sinks:
            sinks = parameters.keep(f"{name}.sinks", (heads,))
        self.spec = AttentionSpec(
            heads,
            kv_heads,
            dim,
            config.attention_scale,
            window,
            config.attention_softcap,
            sinks,
            parameters.kv_dtype,
        )
        for scale, also in (("k_scale", f"{name}.k_proj"), ("v_scale", f"{name}.v_proj")):
            for owner in (name, also):
                number = Expected((), is_optional=True)
                parameters.expect(f"{owner}.{scale}", number, partial(self._put_scale, scale))
        self.kv_shape = (kv_heads, dim, dim)
        self.rope = rope
        self._query_scales: Tensor | None = None
        if config.query_scaling is not None and rope is not None:
            self._query_scales = query_scales(
                config.query_scaling, len(rope.cos_sin), parameters.device, parameters.dtype
            )
        self._eps = config.norm_eps
        self._ops = parameters.ops
        self._has_gate = config.output_gate
        q_size = (2 if config.output_gate else 1) * heads * dim
        sizes = {"q_proj": q_size, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if config.fused_qkv:
            sizes = {"qkv_proj": sum(sizes.values())}
        self.qkv = Linear(
            {f"{name}.{part}": size for part, size in sizes.items()},
            config.hidden_size,
            config.qkv_bias,
            parameters,
        )
        self.out = Linear(
            {f"{name}.o_proj": config.hidden_size}, heads * dim, config.o_bias, parameters
        )
        self.is_plain = (
            config.qk_norm in (None, "head")
            and not config.output_gate
            and config.query_scaling is None
        )
        # Norms with one weight for all heads are the op's; others come before it.
        self.q_norm = self.k_norm = None
        self._norms_before: list[tuple[slice, Callable[[Tensor], Tensor]]] = []
        q_name, k_name = (f"{name}.{norm}" for norm in config.qk_norm_names)
        if config.qk_norm == "head":
            self.q_norm = RMSNorm(q_name, dim, config, parameters)
            self.k_norm = RMSNorm(k_name, dim, config, parameters)
        elif config.qk_norm is not None:
            start = 0
            for full_name, n in ((q_name, heads), (k_name, kv_heads)):
                part = slice(start, start + n * dim)
                if config.qk_norm == "each_head":
                    norm: HeadNorms | RMSNorm = HeadNorms(full_name, n, config, parameters)
                else:
                    norm = RMSNorm(full_name, n * dim, config, parameters)
                self._norms_before.append((part, norm))
                start += n * dim

    def _put_scale(self, which: str, scale: Tensor) -> None:
        """An fp8 cache's, measured for e4m3fn; for a smaller range they are larger."""
        if not float(scale) > 0:
            raise StartError(f"a layer's {which} is {float(scale)}, which is no scale")
        if (kv_dtype := self.spec.kv_dtype) is not None:
            wider = torch.finfo(torch.float8_e4m3fn).max / torch.finfo(kv_dtype).max
            given: dict[str, Any] = {which: float(scale) * wider}
            self.spec = replace(self.spec, **given)

    def __call__(self, qkv: Tensor, meta: BatchMeta, cache: LayerCache) -> Tensor:
        """What lies between the two linears; new keys and values go to the cache.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        gate = None
        if self._has_gate:
            heads, dim = self.spec.num_heads, self.spec.head_dim
            by_head = qkv.unflatten(1, (-1, dim))  # each query is followed by its gate
            q, gate = by_head[:, : 2 * heads].unflatten(1, (heads, 2)).unbind(2)
            qkv = torch.cat((q, by_head[:, 2 * heads :]), dim=1).flatten(1)
        for part, norm in self._norms_before:
            qkv[:, part] = norm(qkv[:, part])
        q = self._ops.write_qkv(
            qkv,
            meta,
            cache,
            self.spec,
            self.rope,
            weight_of(self.q_norm),
            weight_of(self.k_norm),
            self._eps,
        )
        if self._query_scales is not None:
            q = q * self._query_scales[meta.positions][:, None, None]
        out = self._ops.attend(q, meta, cache, self.spec)
        if gate is None:
            return out
        return out.view_as(gate).mul_(gate.sigmoid()).flatten(1)
