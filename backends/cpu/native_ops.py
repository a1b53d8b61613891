"""The ops of kernels.cpp, called through ctypes, which frees the GIL while they run.

bfloat16 and float32 on processors with AVX-512; what the kernels do not cover (float16, odd
shapes) is left to plain torch, whose ops this provider inherits.

Runs on: gpu.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..api import BackendError, LayerCache
from . import build, gguf
from .gguf import PackedGGUF
from .memory import Arena
from .torch_ops import TorchOps

if TYPE_CHECKING:
    from ..api import (
        AttentionSpec,
        BatchMeta,
        DeviceRuntime,
        ExpertWeights,
        LayerWeights,
        QuantizedWeight,
        Rope,
        SamplingRows,
    )

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 512

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_ARGUMENTS: dict[str, list[Any]] = {
    "pack": [c_void_p, c_int64, c_int64, c_void_p],
    "linear": [c_void_p, c_int64, c_int64, *[c_void_p] * 2, c_int64, c_int64, c_void_p, c_int32],
    "gguf_linear": [
        c_void_p,
        *[c_int64] * 2,
        c_void_p,
        c_int64,
        c_void_p,
        *[c_int64] * 2,
        c_void_p,
        c_int32,
    ],
    "gguf_rows": [c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    "gguf_pack": [c_void_p, c_int64, c_int64, c_int32, c_void_p],
    "gguf_panel_bytes": [c_int32, c_int64],
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
    "experts": [c_void_p, *[c_int64] * 3, *[c_void_p] * 4],
    "write_qkv": [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 3],
    "attend": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    "decoder_layer": [c_void_p, c_void_p, c_int64, *[c_void_p] * 7],
    "sample": [c_void_p, c_int64, c_int64, *[c_void_p] * 7],
}


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


class Linear(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_in", c_int64),
        ("num_out", c_int64),
        ("num_parts", c_int64),
    )


class DecoderLayer(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (
        ("input_norm", Weight),
        ("attention_out_norm", Weight),
        ("mlp_norm", Weight),
        ("mlp_out_norm", Weight),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention", c_void_p),
        ("eps", c_float),
        ("is_gelu", c_int32),
    )


class Experts(ctypes.Structure):
    """Twin of kernels.cpp's."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("num_experts", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gate", c_int32),
    )


GATES = ("silu", "gelu_tanh", "swiglu_clamped")  # kernels.cpp's Gate


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


@dataclass(slots=True)
class PackedExperts:
    """Experts as panels, one after the other; the tensors are kept for their addresses."""

    dtype: torch.dtype
    struct: Experts
    address: int
    tensors: tuple[Tensor | None, ...]


class AttentionLayer:
    """An AttentionSpec and its cache as the kernels read them, made once for all calls of a layer.

    Attributes:
        is_served: whether the kernels serve the cache that was seen last.
    """

    __slots__ = ("_kept", "address", "is_served", "k", "k_ptr", "struct", "v_ptr")

    def __init__(self, spec: AttentionSpec) -> None:
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        self.struct = Layer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        self.address = ctypes.addressof(self.struct)
        self.k: Tensor | None = None
        self._kept = (spec, sinks)  # so that its id and the address stay theirs

    def rotate(
        self, rope: Rope | None, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
    ) -> None:
        """What write_qkv does besides writing."""
        struct = self.struct
        if rope is None:
            struct.cos_sin = None
        else:
            struct.cos_sin = rope.cos_sin.data_ptr()
            struct.rotary_dim = rope.rotary_dim
            struct.interleaved = rope.interleaved
        _set(struct.q_norm, q_norm)
        _set(struct.k_norm, k_norm)
        struct.eps = eps

    def see(self, cache: LayerCache) -> None:
        """Remember a cache's addresses."""
        self.k, self.is_served = cache.k, serves(cache)
        self.k_ptr, self.v_ptr = cache.k.data_ptr(), cache.v.data_ptr()


class Block:
    """LayerWeights as the kernels read them.

    Args:
        dtype: of the cache and the activations.

    Attributes:
        dtype: the same; None where the kernels do not serve these weights in it.
    """

    __slots__ = ("_weights", "address", "attention", "dtype", "hidden", "struct")

    def __init__(self, weights: LayerWeights, dtype: torch.dtype) -> None:
        linears = (weights.qkv, weights.out, weights.gate_up, weights.down)
        self._weights = weights  # so that its id and the addresses stay theirs
        self.attention = attention = AttentionLayer(weights.spec)
        self.dtype: torch.dtype | None = None
        structs = [_linear_struct(packed, dtype) for packed in linears]
        if any(struct is None for struct in structs):
            return
        self.hidden = weights.qkv.num_in
        norms = [weights.input_norm, weights.mlp_norm, weights.q_norm, weights.k_norm]
        norms += [weights.attention_out_norm, weights.mlp_out_norm]
        if any(n is not None and n.dtype not in (dtype, torch.float32) for n in norms):
            return
        self.dtype = dtype
        self.struct = struct = DecoderLayer(
            **dict(zip(("qkv", "out", "gate_up", "down"), structs, strict=True)),
            attention=attention.address,
            eps=weights.eps,
            is_gelu=weights.activation != "silu",
        )
        for name in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
            _set(getattr(struct, name), getattr(weights, name))
        attention.rotate(weights.rope, weights.q_norm, weights.k_norm, weights.eps)
        self.address = ctypes.addressof(struct)


class NativeOps(TorchOps):
    """Kernels of our own, compiled at first use."""

    name = "native"
    kv_layout = "chunks of 16 tokens"
    gguf_types = frozenset(gguf.TYPES)

    def __init__(self) -> None:
        self._arena = Arena()
        self._layers: dict[int, AttentionLayer] = {}
        self._blocks: dict[int, Block] = {}

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

        def by_dtype(name: str) -> dict[torch.dtype, Any]:
            return {d: function(f"{name}_{s}", _ARGUMENTS[name]) for d, s in _SUFFIXES.items()}

        self._pack = by_dtype("pack")
        self._linear = by_dtype("linear")
        self._gguf_linear = by_dtype("gguf_linear")
        self._gguf_rows = by_dtype("gguf_rows")
        self._gguf_pack = function("gguf_pack", _ARGUMENTS["gguf_pack"])
        self._gguf_panel_bytes = function("gguf_panel_bytes", _ARGUMENTS["gguf_panel_bytes"])
        self._gguf_panel_bytes.restype = c_int64
        self._rms_norm = by_dtype("rms_norm")
        self._silu_and_mul = by_dtype("silu_and_mul")
        self._gelu_and_mul = by_dtype("gelu_and_mul")
        self._experts = by_dtype("experts")
        self._write_qkv = by_dtype("write_qkv")
        self._attend = by_dtype("attend")
        self._decoder_layer = by_dtype("decoder_layer")
        self._sample = function("sample", _ARGUMENTS["sample"])

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Panels for the kernels' one layout, which serves every number of rows."""
        dtype, (num_out, num_in) = weight.dtype, weight.shape
        if dtype not in _SUFFIXES or num_in * weight.itemsize % 4:
            return super().pack_linear(weight, bias)
        bias = None if bias is None else bias.to(dtype).contiguous()
        panels = self._panels(weight[None])
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

    def _panels(self, weights: Tensor) -> Tensor:
        """Weights [n, out, in] as panels, [n, out in whole panels, in]."""
        dtype, (num, num_out, num_in) = weights.dtype, weights.shape
        panels = self._arena.empty((num, -(-num_out // 32) * 32, num_in), dtype)
        for weight, packed in zip(weights.contiguous(), panels, strict=True):
            self._pack[dtype](weight.data_ptr(), num_in, num_out, packed.data_ptr())
        return panels

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x weight^T + bias, summed in float32 in the order of the inputs.

        For a GGUF weight x is rounded, 32 inputs at a time, to 8 bits times a scale (see gguf.h).
        """
        if type(packed) is PackedGGUF:
            return self.quantized_linear(x, packed, out_dtype)
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

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """Panels of raw rows of GGUF files; other kinds as plain torch has them."""
        if weight.kind != "gguf":
            return super().pack_quantized(weight, bias)
        return self.pack_quantized_rows([weight], bias)

    def pack_quantized_rows(self, weights: Sequence[QuantizedWeight], bias: Tensor | None) -> Any:
        """Weights of different types in one call."""
        panels = []
        for weight in weights:
            if weight.kind != "gguf" or weight.gguf_type not in self.gguf_types:
                raise BackendError(f"no kernel multiplies {weight.kind} {weight.gguf_type}")
            (num_out, num_in), raw = weight.shape, weight.codes.contiguous()
            number = gguf.TYPES.index(weight.gguf_type)
            size = self._gguf_panel_bytes(number, num_in)
            panels.append(self._arena.empty((-(-num_out // gguf.ROWS), size), torch.uint8).zero_())
            self._gguf_pack(raw.data_ptr(), num_in, num_out, number, panels[-1].data_ptr())
        types, sizes = [w.gguf_type for w in weights], [w.shape[0] for w in weights]
        return PackedGGUF(panels, types, sizes, num_in, bias)

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `linear`."""
        if type(packed) is not PackedGGUF:
            return super().quantized_linear(x, packed, out_dtype)
        dtype = x.dtype
        if dtype not in _SUFFIXES or x.stride(1) != 1:
            x = x.to(dtype if dtype in _SUFFIXES else torch.float32).contiguous()
        num_tokens, as_f32 = x.shape[0], out_dtype is torch.float32
        out = torch.empty((num_tokens, packed.num_out), dtype=out_dtype if as_f32 else x.dtype)
        self._gguf_linear[x.dtype](
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            packed.address,
            len(packed.panels),
            packed.bias_ptr(x.dtype),
            packed.num_in,
            packed.num_out,
            out.data_ptr(),
            as_f32,
        )
        return out.to(dtype if out_dtype is None else out_dtype)

    def quantized_rows(self, packed: Any, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Out of the panels that the head multiplies, where an embedding shares them."""
        known = dtype if dtype in _SUFFIXES else torch.float32
        out = torch.empty((len(rows), packed.num_in), dtype=known)
        rows = rows.contiguous()
        self._gguf_rows[known](
            packed.address, packed.num_in, rows.data_ptr(), len(rows), out.data_ptr()
        )
        return out.to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One pass for the sum of squares, one for the result."""
        dtype = x.dtype
        if dtype not in _SUFFIXES:
            return super().rms_norm(x, weight, eps)
        if weight.dtype is not dtype:
            weight = weight.float()
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=dtype)
        n = x.shape[-1]
        self._rms_norm[dtype](
            x.data_ptr(),
            x.stride(-2) if x.dim() > 1 else n,
            None,
            weight.data_ptr(),
            weight.dtype is torch.float32,
            x.numel() // n,
            n,
            eps,
            out.data_ptr(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Both in one call, for a residual in float32."""
        dtype, as_f32 = x.dtype, weight.dtype is torch.float32
        if (
            dtype not in _SUFFIXES
            or residual.dtype is not torch.float32
            or not (as_f32 or weight.dtype is dtype)
            or not (residual.is_contiguous() and x.is_contiguous())
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        out = torch.empty(x.shape, dtype=dtype)
        n = x.shape[-1]
        self._rms_norm[dtype](
            x.data_ptr(),
            n,
            residual.data_ptr(),
            weight.data_ptr(),
            as_f32,
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

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """Panels of all experts."""
        w, dtype = weights, weights.down.dtype
        num, hidden, inner = w.down.shape
        if dtype not in _SUFFIXES or hidden * dtype.itemsize % 4 or inner * dtype.itemsize % 4:
            return super().pack_experts(weights)
        biases = (
            None if bias is None else bias.to(dtype).contiguous()
            for bias in (w.gate_up_bias, w.down_bias)
        )
        tensors = (self._panels(w.gate_up), self._panels(w.down), *biases)
        addresses = (None if t is None else t.data_ptr() for t in tensors)
        struct = Experts(*addresses, num, hidden, inner, GATES.index(w.activation))
        return PackedExperts(dtype, struct, ctypes.addressof(struct), tensors)

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """Three kernels in one call; sums in float32, in the order of a token's experts."""
        if type(packed) is not PackedExperts:
            return super().experts(x, topk_ids, topk_weights, packed)
        dtype = x.dtype
        x = x.to(packed.dtype).contiguous()
        ids, weights = topk_ids.int().contiguous(), topk_weights.float().contiguous()
        out = torch.empty_like(x)
        self._experts[packed.dtype](
            x.data_ptr(),
            x.stride(0),
            *ids.shape,
            ids.data_ptr(),
            weights.data_ptr(),
            packed.address,
            out.data_ptr(),
        )
        return out.to(dtype)

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
        layer = self._layer(spec, cache)
        if not layer.is_served:
            return super().write_qkv(qkv, meta, cache, spec, rope, q_norm, k_norm, eps)
        dtype = cache.k.dtype
        if qkv.dtype is not dtype or qkv.stride(1) != 1:
            qkv = qkv.to(dtype).contiguous()
        layer.rotate(rope, q_norm, k_norm, eps)
        num_tokens, stride = qkv.shape[0], qkv.stride(0)
        self._write_qkv[dtype](
            qkv.data_ptr(),
            stride,
            num_tokens,
            meta.positions.data_ptr(),
            meta.out_slots.data_ptr(),
            meta.page_size,
            layer.address,
            layer.k_ptr,
            layer.v_ptr,
        )
        return qkv.as_strided(
            (num_tokens, spec.num_heads, spec.head_dim), (stride, spec.head_dim, 1)
        )

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """Reads pages in place; a row's result does not depend on the batch or on chunks."""
        layer = self._layer(spec, cache)
        if not layer.is_served:
            _log_plain_attention(cache.k.shape[1:], cache.k.dtype)
            return super().attend(q, meta, cache, spec)
        dtype = cache.k.dtype
        stride, *inner = q.stride()
        if q.dtype is not dtype or inner != [spec.head_dim, 1]:
            q = q.to(dtype).contiguous()
            stride = q.stride(0)
        batch = meta.plans.get(self.name)
        if batch is None:
            batch = meta.plans[self.name] = _batch(meta)
        out = torch.empty((q.shape[0], spec.num_heads * spec.head_dim), dtype=dtype)
        self._attend[dtype](
            q.data_ptr(),
            stride,
            ctypes.addressof(batch),
            layer.address,
            layer.k_ptr,
            layer.v_ptr,
            out.data_ptr(),
        )
        return out

    def decoder_layer(
        self,
        x: Tensor | None,
        residual: Tensor,
        weights: LayerWeights,
        meta: BatchMeta,
        cache: LayerCache,
    ) -> Tensor:
        """The ops above in one call, with the same bits."""
        block = self._blocks.get(id(weights))
        if block is None:
            block = self._blocks[id(weights)] = Block(weights, cache.k.dtype)
        attention = block.attention
        if attention.k is not cache.k:
            attention.see(cache)
        dtype = block.dtype
        if not (
            attention.is_served
            and dtype is cache.k.dtype
            and residual.dtype is torch.float32
            and residual.is_contiguous()
            and (x is None or (x.dtype is dtype and x.is_contiguous()))
        ):
            return super().decoder_layer(x, residual, weights, meta, cache)
        batch = meta.plans.get(self.name)
        if batch is None:
            batch = meta.plans[self.name] = _batch(meta)
        num_tokens = residual.shape[0]
        out = torch.empty((num_tokens, block.hidden), dtype=dtype)
        self._decoder_layer[dtype](
            None if x is None else x.data_ptr(),
            residual.data_ptr(),
            num_tokens,
            block.address,
            ctypes.addressof(batch),
            meta.positions.data_ptr(),
            meta.out_slots.data_ptr(),
            attention.k_ptr,
            attention.v_ptr,
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

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Sorts only the logits near the largest, and those only for rows with filters."""
        if logits.dtype is not torch.float32 or not logits.is_contiguous():
            logits = logits.float().contiguous()
        num_rows, vocab = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int32)
        is_finite = logits.amax(-1).isfinite()  # first: the kernel overwrites logits
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
        pointers = [column.data_ptr() for column in columns]
        self._sample(logits.data_ptr(), num_rows, vocab, *pointers, tokens.data_ptr())
        return tokens, is_finite

    def _layer(self, spec: AttentionSpec, cache: LayerCache) -> AttentionLayer:
        layer = self._layers.get(id(spec))
        if layer is None:
            layer = self._layers[id(spec)] = AttentionLayer(spec)
        if layer.k is not cache.k:
            layer.see(cache)
        return layer


def serves(cache: LayerCache) -> bool:
    """Whether the kernels read and write this cache; plain torch does the others."""
    dim = cache.k.shape[3]
    return dim % 16 == 0 and dim <= MAX_HEAD_DIM and cache.k.dtype in _SUFFIXES


def packs_pages(cache: LayerCache) -> bool:
    """Whether pages are kept in the kernels' order, which is fastest; the others are NHD."""
    return serves(cache) and cache.k.shape[1] % 16 == 0


@functools.cache
def _log_plain_attention(page_shape: torch.Size, dtype: torch.dtype) -> None:
    """Once: it is many times slower."""
    logger.warning(
        "attention over pages [page_size, num_kv_heads, head_dim] = %s in %s runs in plain torch; "
        "the kernels want a multiple of 16 dimensions, in bfloat16 or float32",
        list(page_shape),
        dtype,
    )


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


def _linear_struct(packed: Any, dtype: torch.dtype) -> Linear | None:
    """A packed weight as the kernels read it; None where they do not serve it in this type."""
    if type(packed) is PackedGGUF:
        num_parts, sizes = len(packed.panels), (packed.num_in, packed.num_out)
        return Linear(packed.address, packed.bias_ptr(dtype), *sizes, num_parts)
    if type(packed) is PackedLinear and packed.dtype is dtype:
        return Linear(packed.weight_ptr, packed.bias_ptr, packed.num_in, packed.num_out, 0)
    return None


def _gate(call: Any, x: Tensor) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    out = torch.empty((num_rows, width // 2), dtype=x.dtype)
    call(x.data_ptr(), x.stride(0), num_rows, width // 2, out.data_ptr())
    return out


def _set(target: Weight, weight: Tensor | None) -> None:
    if weight is None:
        target.data = None
    else:
        target.data, target.is_f32 = weight.data_ptr(), weight.dtype is torch.float32
