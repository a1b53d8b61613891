"""Attention by intel-extension-for-pytorch 2.8, the last of its releases: only if asked for.

Its pages are [num_pages, num_kv_heads, page_size, head_dim] (HND). The project was archived in 2026
and its last release wants torch 2.8: this is for who is held to that.

Runs on: gpu.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .. import indices
from ..api import LayerCache
from ..reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ..api import AttentionSpec, BatchMeta, DeviceRuntime, Rope

MODULE = "intel_extension_for_pytorch"
PAGE_SIZES = (16, 32, 64)
INDPTR = "ipex.indptr"  # in BatchMeta.plans


class IpexOps:
    """ipex.llm.modules.PagedAttention."""

    name, kv_layout = "ipex", "HND"

    def __init__(self) -> None:
        self._reference = ReferenceOps()

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Imports the package."""
        if runtime.name != "xpu":
            return "not an Intel GPU"
        if importlib.util.find_spec(MODULE) is None:
            return f"{MODULE.replace('_', '-')} is not installed"
        try:
            self._paged = importlib.import_module(f"{MODULE}.llm.modules").PagedAttention
        except (ImportError, OSError, AttributeError) as error:
            return f"{MODULE} cannot be imported beside torch {torch.__version__}: {error}"
        return None

    def settle(
        self,
        specs: Iterable[AttentionSpec],
        dtype: torch.dtype,
        page_size: int,
        runtime: DeviceRuntime,
        *,
        is_forced: bool,
    ) -> str | None:
        """Whether it is asked for, and can have such layers."""
        if not is_forced:
            return "archived in 2026: --attention-backend ipex asks for it"
        if page_size not in PAGE_SIZES:
            return f"it wants --page-size {', '.join(map(str, PAGE_SIZES))}, not {page_size}"
        specs = tuple(specs)
        if any(spec.sinks is not None for spec in specs):
            return "it has no sinks"
        if any(spec.window == 1 for spec in specs):
            return "it takes a window of one token for none"
        return None

    def from_nhd(self, cache: LayerCache) -> LayerCache:
        """Pages [num_pages, page_size, num_kv_heads, head_dim] as it keeps them, in that shape."""
        return LayerCache(*(x.transpose(1, 2).contiguous().view(x.shape) for x in cache))

    def to_nhd(self, cache: LayerCache) -> LayerCache:
        """The inverse."""
        return LayerCache(*(_hnd(x).transpose(1, 2).contiguous() for x in cache))

    def write_qkv(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cache: LayerCache,
        spec: AttentionSpec,
        rope: Rope | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norms and rotation in plain torch, then reshape_and_cache of the tokens with a slot."""
        flat = qkv.new_empty(2, qkv.shape[0], 1, spec.num_kv_heads, spec.head_dim)
        meta_of_tokens = _one_page_a_token(meta)
        q = self._reference.write_qkv(
            qkv, meta_of_tokens, LayerCache(*flat), spec, rope, q_norm, k_norm, eps
        )
        written = (meta.out_slots >= 0).nonzero().squeeze(1)
        k, v = (x.squeeze(1)[written] for x in flat)
        self._paged.reshape_and_cache(
            k, v, _hnd(cache.k), _hnd(cache.v), meta.out_slots[written].int()
        )
        return q

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """Decode steps and others by an op each; trees are the reference's."""
        if meta.tree_mask is not None:
            return self._reference.attend(q, meta, self.to_nhd(cache), spec)
        if INDPTR not in meta.plans:
            meta.plans[INDPTR] = indices.page_indptr(meta.kv_lens, 1)
        q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        tables, k, v = indices.row_tables(meta), _hnd(cache.k), _hnd(cache.v)
        window, softcap = spec.window or 0, spec.softcap or -1.0
        if meta.num_decode_rows == meta.num_rows:
            group = spec.num_heads // spec.num_kv_heads
            of_heads = torch.arange(spec.num_kv_heads, dtype=torch.int32, device=q.device)
            self._paged.single_query_cached_kv_attention(
                out, q, k, v, of_heads.repeat_interleave(group), spec.scale, tables, meta.kv_lens,
                meta.page_size, meta.max_kv_len, None, window_size=window - 1, softcap=softcap,
            )  # fmt: skip
        else:
            self._paged.flash_attn_varlen_func(
                out, q, k, v, meta.qo_indptr, meta.plans[INDPTR], indices.max_q_len(meta),
                meta.max_kv_len, spec.scale, True, tables, None, window_size_left=window - 1,
                window_size_right=0 if window else -1, softcap=softcap,
            )  # fmt: skip
        return out.flatten(1)


def _hnd(x: Tensor) -> Tensor:
    """A pool whose shape says NHD, in the order that its memory has."""
    pages, size, heads, dim = x.shape
    return x.view(pages, heads, size, dim)


def _one_page_a_token(meta: BatchMeta) -> BatchMeta:
    """The same batch with token i's K and V at slot i."""
    return replace(
        meta,
        page_size=1,
        out_slots=torch.arange(len(meta.positions), device=meta.positions.device),
        plans={},
    )
