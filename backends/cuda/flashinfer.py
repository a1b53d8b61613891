"""Attention by FlashInfer, where its modules are built already.

FlashInfer compiles each module with nvcc at its first use, which takes minutes, so a start never
asks for one that is not in its cache (or in the package flashinfer-jit-cache); `stoker warm` builds
them ahead. Where they are there, decode and prefill are timed against our own kernels, once for a
card, versions and shape, and what is faster serves; see docs/decisions/005-flashinfer.md.

Its kernels follow a plan that is made on the host from the context lengths. In a captured step
kernels and buffers are fixed, and a new plan is copied into them before each replay (`replan`).
The rows' pages are gathered by a kernel of ours within the step, since the block table is on the
device. The rest goes to our kernels: sinks, trees, float32, shared prefixes, and captured steps
with chunks. FlashInfer's sampling is not used: it draws by rejection from a generator's state,
where ours depends on a row's seed and position alone.

Runs on: gpu.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..api import AttentionSpec, BackendError, BatchMeta, LayerCache
from ..cache import cache_folder
from ..indices import is_captured

if has_triton := importlib.util.find_spec("triton") is not None:
    from ..triton.attention import attend as attend_by_triton
    from ..triton.page_indices import gather_pages

if TYPE_CHECKING:
    from ..api import DeviceRuntime

logger = logging.getLogger(__name__)

PLAN_KEY = "cuda.flashinfer"  # in BatchMeta.plans, beside the kind
# Of workspaces. FlashInfer recommends 128 MiB of floats; 512 rows of 64 heads of 128, captured on
# tensor cores, split into 16 x float32 each, take 256.
FLOAT_BYTES, INT_BYTES = 384 << 20, 8 << 20
HEAD_DIMS = (64, 128, 256)
TIMED_DECODE, TIMED_PREFILL = (64, 1, 2048), (2, 2048, 2048)  # rows, new tokens, context
MIN_GAIN = 1.03  # over our kernels, to be used
OURS = "triton"
MODULES = "batch_[dp]*"  # names of those for decode and prefill
PACKAGES = ("flashinfer-python", "torch", "triton")  # whose versions measurements depend on
NOT_BUILT = "its modules for this model are not built yet: run `stoker warm MODEL`"

Times = dict[str, dict[str, float]]  # of "decode" and "prefill", by kernel: us of a layer


class Kind(NamedTuple):
    """What a plan depends on beside the batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: AttentionSpec, dtype: torch.dtype) -> Kind | None:
        """None for layers that FlashInfer does not serve."""
        if spec.head_dim not in HEAD_DIMS or dtype.itemsize != 2:
            return None
        if spec.sinks is not None or spec.kv_dtype is not None:
            return None
        values = (getattr(spec, name) for name in cls._fields[:-1])
        return cls._make((*values, dtype))

    @property
    def plan_arguments(self) -> dict[str, Any]:
        """Those that decode's and prefill's plan have in common."""
        return {
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class Use(NamedTuple):
    """Which of FlashInfer's kernels serve a kind of layers; None for ours.

    Attributes:
        decode: "cuda cores" or "tensor cores". prefill: "fa2" or "fa3".
    """

    decode: str | None = None
    prefill: str | None = None


class Space:
    """Workspaces of plans that are never in use together.

    A plan is written to pinned memory and copied by the device later. Two such buffers take turns:
    a step is planned when the one before the last is done.
    """

    def __init__(self, floats: Tensor):
        self.floats = floats
        self.integers = torch.empty(INT_BYTES, dtype=torch.uint8, device=floats.device)
        self._pinned = itertools.cycle(
            [torch.empty(INT_BYTES, dtype=torch.uint8, pin_memory=floats.is_cuda) for _ in "ab"]
        )

    def give(self, wrapper: Any) -> None:
        """Have a wrapper's next plan written here."""
        wrapper._int_workspace_buffer = self.integers
        wrapper._pin_memory_int_workspace_buffer = next(self._pinned)


class Pages(NamedTuple):
    """Rows' contexts in pages, on the host: int32 [rows + 1] and [rows]."""

    indptr: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, kv_lens: np.ndarray, page_size: int) -> Pages:
        """Rows without a context, which pad a captured step, count as one token."""
        lens = np.maximum(kv_lens, 1)
        counts = -(-lens // page_size)
        indptr = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        last = (lens - (counts - 1) * page_size).astype(np.int32)
        return cls(torch.from_numpy(indptr), torch.from_numpy(last))


class Captured(NamedTuple):
    """A decode wrapper that captured steps of some number of rows replay."""

    wrapper: Any
    indptr: Tensor
    indices: Tensor


class FlashInferOps:
    """`attend`, for the layers and steps that it suits."""

    name = "flashinfer"

    def __init__(self) -> None:
        self.uses: dict[Kind, Use] = {}
        self._floats: Tensor | None = None
        self._spaces: dict[tuple[Kind, str], Space] = {}
        self._wrappers: dict[tuple[Kind, str], Any] = {}
        self._captured: dict[tuple[Kind, int], Captured] = {}

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Looks for built modules without importing FlashInfer, which takes seconds."""
        if runtime.name != "cuda":
            return "not a CUDA device"
        if not has_triton:
            return "the kernel that gathers its page indices needs triton, which is not installed"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if not any(built_libraries(MODULES)):
            return "none of its modules is built yet: run `stoker warm MODEL`"
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
        """Choose what it serves of a model with such layers; why that is nothing, or None."""
        kinds = _kinds(specs, dtype)
        if not kinds:
            return "it does not serve such layers (head size, type, sinks, or an fp8 cache)"
        try:
            if is_forced:
                self.uses, times = {kind: _preferred(kind) for kind in kinds}, {}
            else:
                times = {kind: self._times(kind, page_size, runtime) for kind in kinds}
        except BackendError as error:
            return str(error)
        for kind, by_step in times.items():
            self.uses[kind] = Use(*(fastest(by_step[step]) for step in ("decode", "prefill")))
            for step, took in by_step.items():
                shown = ", ".join(f"{name} {us:.1f} us" for name, us in took.items())
                logger.info("attention, %s with %d heads: %s", step, kind.num_heads, shown)
        if any(map(any, self.uses.values())):
            self._float_space(runtime.device)  # before the KV pool takes what is free
            return None
        self._floats = None
        is_built = any(took for by_step in times.values() for took in by_step.values())
        return "it is no faster here than our kernels, as measured" if is_built else NOT_BUILT

    def build(self, specs: Iterable[AttentionSpec], dtype: torch.dtype) -> list[str]:
        """Build, with nvcc, the modules that a model with such layers wants; their names.

        Raises:
            BackendError: nvcc is missing, or fails.
        """
        if importlib.util.find_spec("flashinfer") is None:
            return []
        kinds = _kinds(specs, dtype)
        return build_missing(module(kind, which) for kind in kinds for which in wanted_modules())

    # --- a step ---

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """See `Ops.attend`."""
        kind = Kind.of(spec, q.dtype)
        use = self.uses.get(kind, Use()) if kind is not None else Use()
        captured = is_captured(meta)
        decodes = meta.num_decode_rows
        is_ours = meta.tree_mask is not None or cache.k.dtype != q.dtype or meta.shared is not None
        if captured:
            is_ours |= decodes < meta.num_rows or use.decode is None
        else:
            is_ours |= bool(decodes) and use.decode is None
            is_ours |= decodes < meta.num_rows and use.prefill is None
        if is_ours or kind is None:
            return attend_by_triton(q, meta, cache, spec)
        if captured:
            wrapper = self._captured_wrapper(kind, use, meta)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            wrapper.run(q.contiguous(), tuple(cache), out=out)
            return out.flatten(1)
        if (planned := meta.plans.get((PLAN_KEY, kind))) is None:
            planned = meta.plans[PLAN_KEY, kind] = list(self._planned(kind, use, meta))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tokens, wrapper in planned:
            wrapper.run(q[tokens].contiguous(), tuple(cache), out=out[tokens])
        return out.flatten(1)

    def replan(self, meta: BatchMeta, kv_lens: np.ndarray) -> None:
        """Before a captured step is replayed: plan for its contexts of this time.

        Args:
            meta: the captured batch. kv_lens: host ints of its rows, but for those that pad it.
        """
        for kind in self.uses:
            captured = self._captured.get((kind, meta.num_rows))
            if captured is None or meta.num_decode_rows < meta.num_rows or meta.shared is not None:
                continue
            padded = np.zeros(meta.num_rows, np.int32)
            padded[: len(kv_lens)] = kv_lens
            self._plan_captured(kind, captured, padded, meta.page_size)

    def _planned(self, kind: Kind, use: Use, meta: BatchMeta) -> Iterator[tuple[slice, Any]]:
        """Tokens and planned wrapper of the decode rows, if there are any, then of the others."""
        decodes = meta.num_decode_rows
        for name, rows, tokens in (
            (use.decode, slice(0, decodes), slice(0, decodes)),
            (use.prefill, slice(decodes, meta.num_rows), slice(decodes, meta.num_tokens)),
        ):
            if rows.start == rows.stop:
                continue
            assert name is not None
            key = kind, name
            if key not in self._wrappers:
                self._spaces[key] = Space(self._float_space(meta.kv_lens.device))
                self._wrappers[key] = _wrapper(name, self._spaces[key].floats)
            wrapper, space = self._wrappers[key], self._spaces[key]
            pages = Pages.of(meta.kv_lens_cpu[rows], meta.page_size)
            indptr = pages.indptr.to(meta.kv_lens.device, non_blocking=True)
            indices = torch.empty(
                int(pages.indptr[-1]), dtype=torch.int32, device=meta.kv_lens.device
            )
            gather_pages(meta, rows.start, indptr, indices)
            space.give(wrapper)
            if name in ("fa2", "fa3"):
                qo_indptr = meta.qo_indptr_cpu[decodes:] - meta.qo_indptr_cpu[decodes]
                plan_prefill(wrapper, kind, torch.from_numpy(qo_indptr), pages, indices, meta)
            else:
                plan_decode(wrapper, kind, pages, indices, meta.page_size)
            yield tokens, wrapper

    def _captured_wrapper(self, kind: Kind, use: Use, meta: BatchMeta) -> Any:
        """Made before the capture: a runtime runs what cannot be captured at once."""
        rows, device = meta.num_rows, meta.kv_lens.device
        if (kind, rows) not in self._captured:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a plan of FlashInfer's cannot be made within a capture")
            key = kind, "captured"
            if key not in self._spaces:
                self._spaces[key] = Space(self._float_space(device))

            def integers(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=device)

            indptr, last = integers(rows + 1), integers(rows)
            indices = integers(rows * meta.block_table.shape[1])
            wrapper = _wrapper(
                use.decode or "",
                self._spaces[key].floats,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last,
            )
            captured = Captured(wrapper, indptr, indices)
            self._plan_captured(kind, captured, np.ones(rows, np.int32), meta.page_size)
            self._captured[kind, rows] = captured
        captured = self._captured[kind, rows]
        if (PLAN_KEY, kind) not in meta.plans:  # once a step
            meta.plans[PLAN_KEY, kind] = captured
            gather_pages(meta, 0, captured.indptr, captured.indices)
        return captured.wrapper

    def _plan_captured(
        self, kind: Kind, captured: Captured, kv_lens: np.ndarray, page_size: int
    ) -> None:
        self._spaces[kind, "captured"].give(captured.wrapper)
        none = captured.indices[:0]  # they are gathered in the step
        plan_decode(captured.wrapper, kind, Pages.of(kv_lens, page_size), none, page_size)

    def _float_space(self, device: torch.device) -> Tensor:
        """Of all wrappers: the device runs one at a time."""
        if self._floats is None:
            self._floats = torch.zeros(FLOAT_BYTES, dtype=torch.uint8, device=device)
        return self._floats

    # --- the choice ---

    def _times(self, kind: Kind, page_size: int, runtime: DeviceRuntime) -> Times:
        """Of the built kernels and ours, measured now or at an earlier start.

        FlashInfer is imported for a measurement only.
        """
        shape = f"{kind} | page {page_size}"
        measure = partial(self._measure, kind, page_size, runtime.device)
        return remembered(runtime, shape, MODULES, measure)

    @torch.inference_mode()
    def _measure(self, kind: Kind, page_size: int, device: torch.device) -> Times:
        spec = AttentionSpec(*kind[:-1])
        built = built_modules(kind)
        times: Times = {"decode": {}, "prefill": {}}
        for step, size, names in (
            ("decode", TIMED_DECODE, DECODE_MODULES),
            ("prefill", TIMED_PREFILL, PREFILL_MODULES),
        ):
            names = {name: which for name, which in names.items() if which in built}
            if not names:
                continue
            q, meta, cache = _example(kind, *size, page_size, device)
            times[step][OURS] = time_us(partial(attend_by_triton, q, meta, cache, spec))
            for name in names:
                self.uses[kind] = Use(name, name)
                meta.plans.clear()
                times[step][name] = time_us(partial(self.attend, q, meta, cache, spec))
        self.uses.pop(kind, None)
        return times


def remembered(
    runtime: DeviceRuntime, shape: str, modules: str, measure: Callable[[], Times]
) -> Times:
    """What was measured for card, versions, shape and built modules, now or at an earlier start."""
    path = cache_folder() / "flashinfer.json"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    libraries = sorted({library.stem for library in built_libraries(modules)})
    key = " | ".join([runtime.description, *versions, shape, *libraries])
    try:
        known: dict[str, Times] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = measure()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = path.with_suffix(".new")
            aside.write_text(json.dumps(known, indent=1))
            aside.replace(path)
        except OSError as error:
            logger.warning("cannot keep how fast FlashInfer is in %s: %s", path, error)
    return known[key]


DECODE_MODULES = {"cuda cores": "cuda cores", "tensor cores": "tensor cores"}  # kernel to module
PREFILL_MODULES = {"fa2": "tensor cores", "fa3": "fa3"}


def fastest(times: dict[str, float]) -> str | None:
    """The fastest of FlashInfer's, None where ours is about as fast."""
    name = min(times, key=lambda name: times[name], default=OURS)
    return name if times and times[name] * MIN_GAIN < times[OURS] else None


def _kinds(specs: Iterable[AttentionSpec], dtype: torch.dtype) -> set[Kind]:
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    return {kind for spec in attention if (kind := Kind.of(spec, dtype)) is not None}


def wanted_modules() -> tuple[str, ...]:
    """What may serve on this card."""
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return ("cuda cores", "tensor cores", "fa3") if is_hopper else ("cuda cores", "tensor cores")


def built_modules(kind: Kind) -> tuple[str, ...]:
    """Those of them that can be loaded without being compiled.

    Raises:
        BackendError: FlashInfer, or what it needs, cannot be imported.
    """
    check_import()
    return tuple(which for which in wanted_modules() if module(kind, which).is_compiled)


def check_import() -> None:
    """Raise BackendError where FlashInfer, or what it needs, cannot be imported."""
    try:
        importlib.import_module("flashinfer.jit")
    except (ImportError, RuntimeError) as error:  # the latter where versions do not match
        raise BackendError(f"it cannot be imported: {error}") from error


def build_missing(modules: Iterable[Any]) -> list[str]:
    """Build, with nvcc, those modules that are not built yet; their names.

    Raises:
        BackendError: nvcc is missing, or fails.
    """
    from flashinfer.jit import build_jit_specs

    missing = [m for m in {m.name: m for m in modules}.values() if not m.is_compiled]
    try:
        build_jit_specs(missing)
    except (RuntimeError, OSError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise BackendError(f"FlashInfer's modules cannot be built: {first}") from error
    return [m.name for m in missing]


def module(kind: Kind, which: str) -> Any:
    """FlashInfer's description of a module. Decode on tensor cores is prefill's fa2."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    types = {
        "dtype_q": kind.dtype,
        "dtype_kv": kind.dtype,
        "dtype_o": kind.dtype,
        "dtype_idx": torch.int32,
        "head_dim_qk": kind.head_dim,
        "head_dim_vo": kind.head_dim,
        "pos_encoding_mode": 0,  # none
        "use_sliding_window": kind.window is not None,
        "use_logits_soft_cap": kind.softcap is not None,
    }
    if which == "cuda cores":
        return gen_batch_decode_module(**types)
    backend = "fa3" if which == "fa3" else "fa2"
    return gen_batch_prefill_module(backend, **types, use_fp16_qk_reduction=False)


def _preferred(kind: Kind) -> Use:
    """Without a measurement: tensor cores for groups of heads, fa3 where it is."""
    built = built_modules(kind)
    decode: list[str] = [name for name in DECODE_MODULES if name in built]
    if kind.num_heads >= 4 * kind.num_kv_heads:
        decode.reverse()
    prefill = [name for name, which in reversed(PREFILL_MODULES.items()) if which in built]
    return Use(next(iter(decode), None), next(iter(prefill), None))


def built_libraries(modules: str) -> Iterator[Path]:
    """Modules of the installed version: in the user's cache, or prebuilt.

    Args:
        modules: a pattern of their names.
    """
    version = importlib.metadata.version("flashinfer-python")
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    yield from (base / ".cache/flashinfer" / version).glob(f"*/cached_ops/{modules}/{modules}.so")
    found = importlib.util.find_spec("flashinfer_jit_cache")
    for folder in (found and found.submodule_search_locations) or ():
        yield from Path(folder).glob(f"**/{modules}.so")


def _wrapper(name: str, floats: Tensor, **arguments: Any) -> Any:
    from flashinfer import (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )

    if name in ("fa2", "fa3"):
        return BatchPrefillWithPagedKVCacheWrapper(floats, "NHD", backend=name, **arguments)
    tensor_cores = name == "tensor cores"
    return BatchDecodeWithPagedKVCacheWrapper(
        floats, "NHD", use_tensor_cores=tensor_cores, **arguments
    )


def plan_decode(wrapper: Any, kind: Kind, pages: Pages, indices: Tensor, page_size: int) -> None:
    """Plan rows of one new token; indptr and lengths are on the host, so nothing waits."""
    wrapper.plan(
        pages.indptr,
        indices,
        pages.last_page_len,
        num_qo_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        page_size=page_size,
        **kind.plan_arguments,
    )


def plan_prefill(
    wrapper: Any, kind: Kind, qo_indptr: Tensor, pages: Pages, indices: Tensor, meta: BatchMeta
) -> None:
    """Plan rows of several new tokens."""
    wrapper.plan(
        qo_indptr,
        pages.indptr,
        indices,
        pages.last_page_len,
        num_qo_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim_qk=kind.head_dim,
        page_size=meta.page_size,
        causal=True,
        **kind.plan_arguments,
    )


def _example(
    kind: Kind, rows: int, q_len: int, context: int, page_size: int, device: torch.device
) -> tuple[Tensor, BatchMeta, LayerCache]:
    """A batch of equal rows, every page of its own."""
    count = -(-context // page_size)
    indptr = np.arange(rows + 1, dtype=np.int32) * q_len
    lens = np.full(rows, context, np.int32)
    nowhere = torch.zeros(rows * q_len, dtype=torch.int64, device=device)
    meta = BatchMeta(
        num_rows=rows,
        num_tokens=rows * q_len,
        num_decode_rows=rows if q_len == 1 else 0,
        page_size=page_size,
        qo_indptr=torch.from_numpy(indptr).to(device),
        kv_lens=torch.from_numpy(lens).to(device),
        slots=torch.arange(rows, dtype=torch.int32, device=device),
        block_table=torch.arange(rows * count, dtype=torch.int32, device=device).view(rows, count),
        positions=nowhere,
        out_slots=nowhere,
        logit_tokens=nowhere,
        qo_indptr_cpu=indptr,
        kv_lens_cpu=lens,
        max_kv_len=context,
    )

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=kind.dtype, device=device)

    pool = (rows * count, page_size, kind.num_kv_heads, kind.head_dim)
    q = randn(rows * q_len, kind.num_heads, kind.head_dim)
    return q, meta, LayerCache(randn(*pool), randn(*pool))


def time_us(run: Callable[[], object], calls: int = 8) -> float:
    """Of one call on the device, where it takes longer than the host takes to launch it."""
    times = []
    for _ in range(4):
        began, ended = (torch.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(calls):
            run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / calls)
    return round(min(times), 1)
