"""Latent attention of decode rows by FlashInfer, where its modules are built and faster.

As in `flashinfer.py`: a start asks for no module that is not built, times those that are against
our kernel, and in captured steps copies a new plan into fixed buffers before each replay. Steps
with other rows, and keys that were projected up, are our kernels'.

Runs on: gpu.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..api import BackendError, BatchMeta, LayerCache, MLASpec
from ..indices import is_captured
from .flashinfer import (
    FLOAT_BYTES,
    NOT_BUILT,
    OURS,
    Captured,
    Pages,
    Space,
    Times,
    build_missing,
    built_libraries,
    check_import,
    fastest,
    has_triton,
    remembered,
    time_us,
)

if has_triton:
    from ..triton.mla import mla_attend as mla_attend_by_triton
    from ..triton.mla_dense import mla_attend_dense
    from ..triton.page_indices import gather_pages
    from ..triton.warm import tiny_batch

if TYPE_CHECKING:
    from ..api import DenseRows, DeviceRuntime

logger = logging.getLogger(__name__)

PLAN_KEY = "cuda.flashinfer_mla"  # in BatchMeta.plans
RANK, ROPE_DIM = 512, 64  # of DeepSeek's, which FlashInfer's kernels are made for
TOO_NEW = (0, 7)  # of FlashInfer
TIMED_ROWS, TIMED_CONTEXT = 64, 2048


class LatentKind(NamedTuple):
    """What a plan depends on beside the batch."""

    num_heads: int
    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: MLASpec, dtype: torch.dtype) -> LatentKind | None:
        """None for layers that FlashInfer does not serve."""
        if (spec.rank, spec.rope_dim) != (RANK, ROPE_DIM) or dtype.itemsize != 2:
            return None
        return cls(spec.num_heads, spec.scale, dtype)


class FlashInferMLA:
    """`mla_attend`, for the layers and steps that it suits."""

    name = "flashinfer_mla"

    def __init__(self) -> None:
        self.uses: dict[LatentKind, str] = {}  # to "fa2" or "fa3"
        self._floats: Tensor | None = None
        self._spaces: dict[str, Space] = {}
        self._wrappers: dict[str, Any] = {}
        self._captured: dict[tuple[LatentKind, int], Captured] = {}

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Looks for built modules without importing FlashInfer, which takes seconds."""
        if runtime.name != "cuda":
            return "not a CUDA device"
        if not has_triton:
            return "the kernel that gathers its page indices needs triton, which is not installed"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        version = importlib.metadata.version("flashinfer-python")
        if tuple(map(int, version.split(".")[:2])) >= TOO_NEW:
            return f"version {version} makes its plans in buffers of its own"
        if not any(built_libraries("batch_mla_*")):
            return "none of its modules is built yet: run `stoker warm MODEL`"
        return None

    def settle(
        self,
        specs: Iterable[MLASpec],
        dtype: torch.dtype,
        page_size: int,
        runtime: DeviceRuntime,
        *,
        is_forced: bool,
    ) -> str | None:
        """Choose what it serves of a model with such layers; why that is nothing, or None."""
        kinds = {kind for spec in specs if (kind := LatentKind.of(spec, dtype)) is not None}
        if not kinds:
            return f"it serves a rank of {RANK} with {ROPE_DIM} rotary dimensions, in 16 bits"
        try:
            built = [name for name in wanted(runtime) if module(dtype, name).is_compiled]
        except BackendError as error:
            return str(error)
        if not built:
            return NOT_BUILT
        for kind in kinds:
            if is_forced:
                self.uses[kind] = built[-1]
                continue
            measure = partial(self._measure, kind, built, page_size, runtime.device)
            times = remembered(runtime, f"{kind} page {page_size}", "batch_mla_*", measure)
            if name := fastest(times["decode"]):
                self.uses[kind] = name
            shown = ", ".join(f"{name} {us:.1f} us" for name, us in times["decode"].items())
            logger.info("latent attention, decode with %d heads: %s", kind.num_heads, shown)
        if not self.uses:
            self._floats = None
            return "it is no faster here than our kernel, as measured"
        self._float_space(runtime.device)  # before the KV pool takes what is free
        return None

    def build(self, specs: Iterable[Any], dtype: torch.dtype) -> list[str]:
        """Build, with nvcc, the modules that a model with such layers wants; their names.

        Raises:
            BackendError: nvcc is missing, or fails.
        """
        latent = [spec for spec in specs if isinstance(spec, MLASpec)]
        if importlib.util.find_spec("flashinfer") is None:
            return []
        if not any(LatentKind.of(spec, dtype) for spec in latent):
            return []
        name = "fa3" if torch.cuda.get_device_capability()[0] == 9 else "fa2"
        return build_missing([module(dtype, name)])

    # --- a step ---

    def mla_attend(
        self, q_latent: Tensor, q_rope: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec
    ) -> Tensor:
        """See `Ops.mla_attend`."""
        kind = LatentKind.of(spec, q_latent.dtype)
        if (
            kind not in self.uses
            or kind is None
            or meta.num_decode_rows < meta.num_rows
            or meta.tree_mask is not None
            or cache.k.dtype != q_latent.dtype
        ):
            return mla_attend_by_triton(q_latent, q_rope, meta, cache, spec)
        if is_captured(meta):
            wrapper = self._captured_wrapper(kind, meta)
        elif (wrapper := meta.plans.get((PLAN_KEY, kind))) is None:
            wrapper = meta.plans[PLAN_KEY, kind] = self._planned(kind, meta)
        latents, k_ropes = cache.k[:, :, 0].split([RANK, ROPE_DIM], dim=2)
        out = q_latent.new_empty(q_latent.shape)
        wrapper.run(q_latent, q_rope, latents, k_ropes, out=out)
        return out

    def mla_attend_dense(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, rows: DenseRows, spec: MLASpec
    ) -> tuple[Tensor, Tensor]:
        """Our kernel."""
        return mla_attend_dense(q, kv, k_rope, rows, spec)

    def replan(self, meta: BatchMeta, kv_lens: np.ndarray) -> None:
        """Before a captured step is replayed: plan for its contexts of this time.

        Args:
            meta: the captured batch. kv_lens: host ints of its rows, but for those that pad it.
        """
        for kind in self.uses:
            captured = self._captured.get((kind, meta.num_rows))
            if captured is not None and meta.num_decode_rows == meta.num_rows:
                padded = np.zeros(meta.num_rows, np.int32)
                padded[: len(kv_lens)] = kv_lens
                self._plan_captured(kind, captured, padded, meta.page_size)

    def _planned(self, kind: LatentKind, meta: BatchMeta) -> Any:
        device, name = meta.kv_lens.device, self.uses[kind]
        if name not in self._wrappers:
            self._spaces[name] = Space(self._float_space(device))
            self._wrappers[name] = _wrapper(name, self._spaces[name].floats)
        wrapper = self._wrappers[name]
        self._spaces[name].give(wrapper)
        pages = Pages.of(meta.kv_lens_cpu, meta.page_size)
        indptr = pages.indptr.to(device, non_blocking=True)
        indices = torch.empty(int(pages.indptr[-1]), dtype=torch.int32, device=device)
        gather_pages(meta, 0, indptr, indices)
        plan(wrapper, kind, pages, meta.kv_lens_cpu, indices, meta.page_size)
        return wrapper

    def _captured_wrapper(self, kind: LatentKind, meta: BatchMeta) -> Any:
        """Made before the capture: a runtime runs what cannot be captured at once."""
        rows, device = meta.num_rows, meta.kv_lens.device
        if (kind, rows) not in self._captured:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a plan of FlashInfer's cannot be made within a capture")
            if "captured" not in self._spaces:
                self._spaces["captured"] = Space(self._float_space(device))

            def integers(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=device)

            indptr, indices = integers(rows + 1), integers(rows * meta.block_table.shape[1])
            wrapper = _wrapper(
                self.uses[kind],
                self._spaces["captured"].floats,
                use_cuda_graph=True,
                qo_indptr=integers(rows + 1),
                kv_indptr=indptr,
                kv_indices=indices,
                kv_len_arr=integers(rows),
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
        self, kind: LatentKind, captured: Captured, kv_lens: np.ndarray, page_size: int
    ) -> None:
        self._spaces["captured"].give(captured.wrapper)
        none = captured.indices[:0]  # they are gathered in the step
        plan(captured.wrapper, kind, Pages.of(kv_lens, page_size), kv_lens, none, page_size)

    def _float_space(self, device: torch.device) -> Tensor:
        """Of all wrappers: the device runs one at a time."""
        if self._floats is None:
            self._floats = torch.zeros(FLOAT_BYTES, dtype=torch.uint8, device=device)
        return self._floats

    # --- the choice ---

    @torch.inference_mode()
    def _measure(
        self, kind: LatentKind, names: list[str], page_size: int, device: torch.device
    ) -> Times:
        """Rows of their own pages, more than an L2 cache holds."""
        spec = MLASpec(kind.num_heads, RANK, ROPE_DIM, 128, 128, kind.scale)
        meta = tiny_batch(TIMED_ROWS, 1, page_size, device, is_shared=False)
        count = -(-TIMED_CONTEXT // page_size)
        pages = torch.arange(TIMED_ROWS * count, dtype=torch.int32, device=device)
        meta.block_table, meta.slots = pages.view(TIMED_ROWS, count), pages[:TIMED_ROWS]
        meta.kv_lens_cpu = np.full(TIMED_ROWS, TIMED_CONTEXT, np.int32)
        meta.kv_lens = torch.from_numpy(meta.kv_lens_cpu).to(device)
        meta.max_kv_len = TIMED_CONTEXT
        shape = (TIMED_ROWS * count, page_size, 1, RANK + ROPE_DIM)
        pool = torch.randn(shape, dtype=kind.dtype, device=device)
        q = torch.randn(
            TIMED_ROWS, kind.num_heads, RANK + ROPE_DIM, dtype=kind.dtype, device=device
        )
        arguments = (*q.split([RANK, ROPE_DIM], 2), meta, LayerCache(pool, pool[..., :0]), spec)
        times = {OURS: time_us(partial(mla_attend_by_triton, *arguments))}
        for name in names:
            self.uses[kind] = name
            meta.plans.clear()
            times[name] = time_us(partial(self.mla_attend, *arguments))
        self.uses.pop(kind, None)
        return {"decode": times}


def wanted(runtime: DeviceRuntime) -> tuple[str, ...]:
    """What may serve on this card, the likelier faster last.

    Raises:
        BackendError: FlashInfer, or what it needs, cannot be imported.
    """
    check_import()
    return ("fa2", "fa3") if torch.cuda.get_device_capability()[0] == 9 else ("fa2",)


def module(dtype: torch.dtype, name: str) -> Any:
    """FlashInfer's description of a module."""
    from flashinfer.jit import gen_batch_mla_module

    return gen_batch_mla_module(
        name, dtype, dtype, dtype, torch.int32, RANK, ROPE_DIM, use_profiler=False
    )


def plan(
    wrapper: Any,
    kind: LatentKind,
    pages: Pages,
    kv_lens: np.ndarray,
    indices: Tensor,
    page_size: int,
) -> None:
    """Plan rows of one new token; all but the indices is on the host, so nothing waits."""
    wrapper.plan(
        torch.arange(len(kv_lens) + 1, dtype=torch.int32),
        pages.indptr,
        indices,
        torch.from_numpy(np.maximum(kv_lens, 1).astype(np.int32)),
        num_heads=kind.num_heads,
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE_DIM,
        page_size=page_size,
        causal=False,
        sm_scale=kind.scale,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )


def _wrapper(name: str, floats: Tensor, **arguments: Any) -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(floats, backend=name, **arguments)
