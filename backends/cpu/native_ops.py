"""The ops of kernels.cpp, called through ctypes, which frees the GIL while they run.

bfloat16 and float32 on processors with AVX-512; what the kernels do not cover (float16, odd
shapes, pages of fewer than 16 tokens) is left to plain torch, whose ops this provider inherits.

Runs on: gpu.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..api import BackendError, LayerCache
from . import build
from .memory import Arena
from .torch_ops import TorchOps

if TYPE_CHECKING:
    from ..api import AttentionSpec, BatchMeta, DeviceRuntime, Rope, SamplingRows

MAX_HEAD_DIM = 512

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_LINEAR = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32]
_ARGUMENTS = {
    "pack": [c_void_p, c_int64, c_int64, c_void_p],
    "linear": _LINEAR,
    "rms_norm": [
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_int32,
        c_int64,
        c_int64,
        c_float,
        c_void_p,
    ],
    "silu_and_mul": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
    "gelu_and_mul": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
    "write_qkv": [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 3],
    "attend": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
}
_SAMPLE = [c_void_p, c_int64, c_int64, *[c_void_p] * 7]


class Weight(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (("data", c_void_p), ("is_f32", c_bool))


class Layer(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("interleaved", c_int32),
        ("q_norm", Weight),
        ("k_norm", Weight),
        ("eps", c_float),
    )


class Batch(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (
        ("num_rows", c_int64),
        ("page_size", c_int64),
        ("table_stride", c_int64),
        ("qo_indptr", c_void_p),
        ("kv_lens", c_void_p),
        ("slots", c_void_p),
        ("block_table", c_void_p),
        ("tree_mask", c_void_p),
    )


@dataclass(slots=True)
class PackedLinear:
    """A weight as panels of 32 columns (see kernels.cpp); addresses are kept for the calls."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    num_in: int
    num_out: int
    call: Any
    weight_ptr: int
    bias_ptr: int | None


class NativeOps(TorchOps):
    """Kernels of our own, compiled at first use."""

    name = "native"
    kv_layout = "chunks of 16 tokens"

    def __init__(self) -> None:
        self._arena = Arena()
        self._layers: dict[int, tuple[AttentionSpec, Layer, int]] = {}

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Compiles and loads the kernels."""
        features: frozenset[str] = getattr(runtime, "features", frozenset())
        if missing := {"avx512f", "avx512bw", "avx512vl", "avx512dq"} - features:
            return f"the processor lacks {', '.join(sorted(missing))}"
        try:
            library = build.load(f"{runtime.description} {' '.join(sorted(features))}")
        except BackendError as error:
            return str(error)
        self._bind(library)
        return None

    def _bind(self, library: ctypes.CDLL) -> None:
        def function(name: str, arguments: list) -> Any:
            bound = getattr(library, f"stoker_{name}")
            bound.argtypes, bound.restype = arguments, None
            return bound

        for name, arguments in _ARGUMENTS.items():
            calls = {d: function(f"{name}_{s}", arguments) for d, s in _SUFFIXES.items()}
            setattr(self, f"_{name}", calls)
        self._sample = function("sample", _SAMPLE)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Panels for the kernels' one layout, which serves every number of rows."""
        dtype, (num_out, num_in) = weight.dtype, weight.shape
        if dtype not in _SUFFIXES or num_in * weight.itemsize % 4:
            return super().pack_linear(weight, bias)
        weight, bias = weight.contiguous(), None if bias is None else bias.to(dtype).contiguous()
        panels = self._arena.empty((-(-num_out // 32) * 32, num_in), dtype)
        self._pack[dtype](weight.data_ptr(), num_in, num_out, panels.data_ptr())
        return PackedLinear(
            panels,
            bias,
            dtype,
            num_in,
            num_out,
            self._linear[dtype],
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x weight^T + bias, summed in float32 in the order of the inputs."""
        if type(packed) is not PackedLinear:
            return super().linear(x, packed, out_dtype)
        x_stride, inner = x.stride()
        if inner != 1 or x.dtype is not packed.dtype:
            x = x.to(packed.dtype).contiguous()
            x_stride = packed.num_in
        num_tokens = x.shape[0]
        as_f32 = out_dtype is torch.float32
        out = torch.empty((num_tokens, packed.num_out), dtype=out_dtype if as_f32 else packed.dtype)
        packed.call(
            x.data_ptr(),
            x_stride,
            num_tokens,
            packed.weight_ptr,
            packed.bias_ptr,
            packed.num_in,
            packed.num_out,
            out.data_ptr(),
            as_f32,
        )
        return out if out_dtype is None or as_f32 else out.to(out_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One pass for the sum of squares, one for the result."""
        call = self._rms_norm.get(x.dtype)
        if call is None or not _is_norm_weight(weight, x):
            return super().rms_norm(x, weight, eps)
        n = x.shape[-1]
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        stride = x.stride(0) if x.dim() == 2 else n
        is_f32 = weight.dtype is torch.float32
        rows = x.numel() // n
        call(x.data_ptr(), stride, None, weight.data_ptr(), is_f32, rows, n, eps, out.data_ptr())
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Both in one call."""
        call = self._rms_norm.get(x.dtype)
        if (
            call is None
            or residual.dtype is not x.dtype
            or not (residual.is_contiguous() and x.is_contiguous())
            or not _is_norm_weight(weight, x)
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        n = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        call(
            x.data_ptr(),
            n,
            residual.data_ptr(),
            weight.data_ptr(),
            weight.dtype is torch.float32,
            x.numel() // n,
            n,
            eps,
            out.data_ptr(),
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x sigmoid(x), vectorized."""
        call = self._silu_and_mul.get(x.dtype)
        return super().silu_and_mul(x) if call is None else _gate(call, x)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """x sigmoid(2 u) is x (1 + tanh u) / 2."""
        call = self._gelu_and_mul.get(x.dtype)
        return super().gelu_and_mul(x) if call is None else _gate(call, x)

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
        """Norms, rotation and the cache write in one call; q is a view of qkv."""
        if not packs_pages(cache):
            return super().write_qkv(qkv, meta, cache, spec, rope, q_norm, k_norm, eps)
        dtype = cache.k.dtype
        if qkv.dtype is not dtype or qkv.stride(1) != 1:
            qkv = qkv.to(dtype).contiguous()
        layer, address = self._layer(spec)
        if rope is None:
            layer.cos_sin = None
        else:
            layer.cos_sin = rope.cos_sin.data_ptr()
            layer.rotary_dim = rope.rotary_dim
            layer.interleaved = rope.interleaved
        layer.q_norm, layer.k_norm, layer.eps = _weight(q_norm), _weight(k_norm), eps
        num_tokens, stride = qkv.shape[0], qkv.stride(0)
        self._write_qkv[dtype](
            qkv.data_ptr(),
            stride,
            num_tokens,
            meta.positions.data_ptr(),
            meta.out_slots.data_ptr(),
            meta.page_size,
            address,
            cache.k.data_ptr(),
            cache.v.data_ptr(),
        )
        return qkv.as_strided(
            (num_tokens, spec.num_heads, spec.head_dim), (stride, spec.head_dim, 1)
        )

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """Reads pages in place; a row's result does not depend on the batch or on chunks."""
        if not packs_pages(cache):
            return super().attend(q, meta, cache, spec)
        dtype = cache.k.dtype
        if q.dtype is not dtype or q.stride()[1:] != (spec.head_dim, 1):
            q = q.to(dtype).contiguous()
        batch = meta.plans.get(self.name)
        if batch is None:
            batch = meta.plans[self.name] = _batch(meta)
        out = torch.empty((q.shape[0], spec.num_heads * spec.head_dim), dtype=dtype)
        self._attend[dtype](
            q.data_ptr(),
            q.stride(0),
            ctypes.addressof(batch),
            self._layer(spec)[1],
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            out.data_ptr(),
        )
        return out

    def from_nhd(self, cache: LayerCache) -> LayerCache:
        """A copy of a cache in the order of the contract, in the kernels' order (kernels.cpp)."""
        if not packs_pages(cache):
            return cache
        num_pages, page_size, heads, dim = cache.k.shape
        per_word = 4 // cache.k.itemsize
        k = cache.k.view(num_pages, page_size // 16, 16, heads, dim // per_word, per_word)
        v = cache.v.view(num_pages, page_size // per_word, per_word, heads, dim)
        k, v = k.permute(0, 3, 1, 4, 2, 5), v.permute(0, 3, 1, 4, 2)
        return LayerCache(k.reshape(cache.k.shape), v.reshape(cache.v.shape))

    def to_nhd(self, cache: LayerCache) -> LayerCache:
        """The inverse of `from_nhd`."""
        if not packs_pages(cache):
            return cache
        num_pages, page_size, heads, dim = cache.k.shape
        per_word = 4 // cache.k.itemsize
        k = cache.k.view(num_pages, heads, page_size // 16, dim // per_word, 16, per_word)
        v = cache.v.view(num_pages, heads, page_size // per_word, dim, per_word)
        k, v = k.permute(0, 2, 4, 1, 3, 5), v.permute(0, 2, 4, 1, 3)
        return LayerCache(k.reshape(cache.k.shape), v.reshape(cache.v.shape))

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Sorts only the logits near the largest, and those only for rows with filters."""
        if logits.dtype is not torch.float32 or not logits.is_contiguous():
            logits = logits.float().contiguous()
        num_rows, vocab = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int32)
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
        pointers = [column.data_ptr() for column in columns]
        self._sample(logits.data_ptr(), num_rows, vocab, *pointers, tokens.data_ptr())
        return tokens

    def _layer(self, spec: AttentionSpec) -> tuple[Layer, int]:
        """The spec as the kernels read it, made once and kept with the spec."""
        known = self._layers.get(id(spec))
        if known is None:
            layer = Layer(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window or 0,
                scale=spec.scale,
                softcap=spec.softcap or 0.0,
                sinks=None if spec.sinks is None else spec.sinks.data_ptr(),
            )
            known = self._layers[id(spec)] = (spec, layer, ctypes.addressof(layer))
        return known[1:]


def packs_pages(cache: LayerCache) -> bool:
    """Whether the kernels keep this cache, in their order; plain torch keeps the others."""
    _, page_size, _, dim = cache.k.shape
    return not (page_size % 16 or dim % 16 or dim > MAX_HEAD_DIM or cache.k.dtype not in _SUFFIXES)


def _batch(meta: BatchMeta) -> Batch:
    """The batch as the kernels read it. Meta keeps what it points to."""
    assert meta.qo_indptr_cpu.dtype == meta.kv_lens_cpu.dtype == np.int32
    assert meta.kv_lens_cpu.flags.c_contiguous
    return Batch(
        meta.num_rows,
        meta.page_size,
        meta.block_table.stride(0),
        meta.qo_indptr_cpu.ctypes.data,
        meta.kv_lens_cpu.ctypes.data,
        meta.slots.data_ptr(),
        meta.block_table.data_ptr(),
        None if meta.tree_mask is None else meta.tree_mask.data_ptr(),
    )


def _gate(call: Any, x: Tensor) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    out = torch.empty((num_rows, width // 2), dtype=x.dtype)
    call(x.data_ptr(), x.stride(0), num_rows, width // 2, out.data_ptr())
    return out


def _is_norm_weight(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype is x.dtype or weight.dtype is torch.float32


def _weight(weight: Tensor | None) -> Weight:
    if weight is None:
        return Weight(None, False)
    return Weight(weight.data_ptr(), weight.dtype is torch.float32)
