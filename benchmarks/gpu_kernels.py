"""Checks the Triton kernels on a GPU against float64, then times them and some variants.

    python benchmarks/gpu_kernels.py [--quick] [check] [decode] [prefill] [shared] [fused]
                                     [sampling] [step]

Prints a table; writes all of it to $OUT/gpu_kernels.json where OUT is set. Times are of a CUDA
graph of several launches over different layers' data, so that the L2 cache does not flatter.
Processes compile the kernels ahead, each a share of them; then one process measures.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gpu_script  # noqa: F401 (--help, no GPU)
import numpy as np
import torch

from stoker.backends.api import (
    SHARED_TILE_ROWS,
    AttentionSpec,
    BatchMeta,
    LayerCache,
    Rope,
    SharedPrefixes,
)
from stoker.backends.cuda import CublasOps, CudaRuntime
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import TritonOps, attention, extend, fused, sampling, shared
from stoker.backends.triton import decode as decode_kernels
from stoker.backends.triton.flash import Tile
from stoker.engine.runtime.inputs import num_shared_tiles, tile_shared_groups

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/backends"))
import cases

DEVICE = torch.device("cuda")
LLAMA = AttentionSpec(32, 8, 128, 128**-0.5)
PAGE_SIZE = 16


class Shard:
    """Which of the measurements this process only compiles for; all are measured where None."""

    index: int | None = None
    count = 1
    seen = 0

    @classmethod
    def skips(cls) -> bool:
        """Call once a measurement."""
        cls.seen += 1
        return cls.index is not None and cls.seen % cls.count != cls.index


@dataclass
class Table:
    """Rows of results, printed as they come and once more at the end."""

    rows: list[dict] = field(default_factory=list)

    def add(self, group: str, name: str, value: float, unit: str, ms: float | None = None) -> None:
        row = {"group": group, "name": name, "value": round(value, 4), "unit": unit, "ms": ms}
        self.rows.append(row)
        time_ms = "" if ms is None else f"{ms * 1e3:10.1f} us"
        print(f"{group:10s} {name:58s} {value:10.4g} {unit:8s}{time_ms}", flush=True)


def graph_time_ms(fn: Callable[[int], object], layers: int = 4, repeats: int = 10) -> float:
    """Median milliseconds of one fn(layer), from a graph that runs it for each layer."""
    torch.cuda.synchronize()
    if Shard.index is not None:
        fn(0)
        return 1.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(layers):
            fn(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(layers):
                fn(layer)
        times = []
        for _ in range(repeats + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / layers)
    return float(np.median(times[2:]))


def build(
    rows: list[tuple[int, int]],
    spec: AttentionSpec = LLAMA,
    *,
    page_size: int = PAGE_SIZE,
    shared: int = 0,
    layers: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[BatchMeta, list[LayerCache], torch.Tensor]:
    """A batch of (q_len, kv_len) with pages in random order; `shared` leading tokens are common."""
    gen = np.random.default_rng(0)
    q_lens = np.array([q for q, _ in rows], np.int32)
    kv_lens = np.array([n for _, n in rows], np.int32)
    indptr = np.concatenate(([0], q_lens.cumsum())).astype(np.int32)
    counts = -(-kv_lens // page_size)
    common = shared // page_size
    num_pages = int((counts - common).sum()) + common + 1
    order = gen.permutation(num_pages - 1).astype(np.int32) + 1
    table = np.zeros((len(rows), int(counts.max()) + 8), np.int32)
    table[:, :common] = order[:common]
    taken = common
    for row, count in enumerate(counts):
        table[row, common:count] = order[taken : taken + count - common]
        taken += count - common
    tokens = int(q_lens.sum())
    row_of = np.repeat(np.arange(len(rows)), q_lens)
    positions = np.arange(tokens) - indptr[row_of] + (kv_lens - q_lens)[row_of]
    out_slots = table[row_of, positions // page_size].astype(np.int64) * page_size
    out_slots += positions % page_size
    num_decode = int(next((i for i, q in enumerate(q_lens) if q != 1), len(rows)))

    def on_device(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)

    meta = BatchMeta(
        num_rows=len(rows),
        num_tokens=tokens,
        num_decode_rows=num_decode,
        page_size=page_size,
        qo_indptr=on_device(indptr),
        kv_lens=on_device(kv_lens),
        slots=on_device(np.arange(len(rows), dtype=np.int32)),
        block_table=on_device(table),
        positions=on_device(positions.astype(np.int64)),
        out_slots=on_device(out_slots),
        logit_tokens=on_device(np.arange(len(rows))),
        qo_indptr_cpu=indptr,
        kv_lens_cpu=kv_lens,
        max_kv_len=int(kv_lens.max()),
    )
    if shared:
        share(meta, [(np.arange(len(rows), dtype=np.int32), shared)])
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    caches = [
        LayerCache(*(torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2)))
        for _ in range(layers)
    ]
    q = torch.randn(tokens, spec.num_heads, spec.head_dim, device=DEVICE, dtype=dtype)
    return meta, caches, q


def share(meta: BatchMeta, groups: list[tuple[np.ndarray, int]]) -> None:
    """Describe shared prefixes to the kernels, as the runner does."""
    num_tiles = num_shared_tiles(meta.num_rows)
    arrays = [np.empty((num_tiles, SHARED_TILE_ROWS), np.int32), np.empty(num_tiles, np.int32)]
    arrays.append(np.empty(meta.num_rows, np.int32))
    tile_shared_groups(groups, *arrays)
    meta.shared = SharedPrefixes(*(torch.from_numpy(a).to(DEVICE) for a in arrays))


def num_layers(num_bytes: int) -> int:
    """Layers whose data is more than the L2 cache holds, within 4 GiB."""
    return int(min(16, max(2, 400e6 // max(num_bytes, 1) + 1)))


def kv_bytes(kv_lens, spec: AttentionSpec, itemsize: int = 2) -> int:
    return int(np.sum(kv_lens)) * spec.num_kv_heads * spec.head_dim * 2 * itemsize


# --------------------------------------------------------------------------------- correctness


def check(table: Table, quick: bool) -> None:
    """Long batches, then (not quick) the contract's cases: the largest error of each op and dtype.

    float16 goes the way of bfloat16.
    """
    ops, oracle = TritonOps(), ReferenceOps()
    failures = 0

    def worst(name, pairs, tolerance):
        nonlocal failures
        error = max(
            float(((got.double().cpu() - want).abs() / (1 + want.abs())).max())
            for got, want in pairs
        )
        ok = error <= tolerance  # False for NaN too
        failures += not ok
        table.add("check", name + ("" if ok else "  FAILED"), error, "error")

    for dtype in () if Shard.skips() else (torch.bfloat16,):
        rows = [(1, 4096 + 64 + 7 * i) for i in range(64)]
        meta, caches, q = build(rows, shared=4096, layers=1, dtype=dtype)
        got = ops.attend(q, meta, caches[0], LLAMA)
        meta.shared, meta.plans = None, {}
        plain = ops.attend(q, meta, caches[0], LLAMA)
        up = LayerCache(*(x.double() for x in caches[0]))
        want = oracle.attend(q.double(), meta, up, LLAMA).cpu()
        worst("attend shared prefix 64 x 4096", [(got, want)], 2e-2)
        worst("attend the same, not shared", [(plain, want)], 2e-2)
        rows = [(1, int(n)) for n in np.random.default_rng(1).integers(1, 9000, 48)]
        meta, caches, q = build([*rows, (300, 5000), (1000, 1000)], layers=1, dtype=dtype)
        got = ops.attend(q, meta, caches[0], LLAMA)
        up = LayerCache(*(x.double() for x in caches[0]))
        want = oracle.attend(q.double(), meta, up, LLAMA).cpu()
        worst("attend mixed, lengths to 9000", [(got, want)], 2e-2)
        same = all(torch.equal(got, ops.attend(q, meta, caches[0], LLAMA)) for _ in range(50))
        failures += not same
        table.add("check", "attend is the same in 50 runs", float(same), "bool")

    # Descriptors over the pool, over the dense copy, and pointers; whole and in splits.
    for page_size, rows, splits, min_tokens in (
        (128, [(1000, 1000), (300, 2900)], 1, None),
        (128, [(64, 5000)], 3, None),
        (16, [(1000, 1000), (300, 2900)], 1, None),
        (16, [(256, 5000), (257, 3000)], 3, None),
        (16, [(1000, 1000), (300, 2900)], 1, 1 << 30),
        (16, [(7, 5000), (9, 3000)], 5, 1 << 30),
        (64, [(64, 4160)] * 4 + [(9, 5000)], None, None),
        (16, [(64, 4160)] * 4 + [(9, 5000)], None, None),
        (64, [(5, 30_000), (3, 9000)], None, None),
    ):
        if Shard.skips():
            continue
        meta, caches, q = build([(1, 700), *rows], page_size=page_size, layers=1)
        lse = torch.empty(q.shape[:2], device=DEVICE)
        with patched(extend__DENSE_MIN_TOKENS=min_tokens):
            got = attention.attend(q, meta, caches[0], LLAMA, lse=lse, splits=splits)
        if Shard.index is not None:
            continue
        up = LayerCache(*(x.double() for x in caches[0]))
        want = oracle.attend(q.double(), meta, up, LLAMA).cpu()
        how = "" if min_tokens is None else " by pointers"
        worst(f"attend {rows} page {page_size}{how} splits {splits}", [(got, want)], 2e-2)

    kinds = {d: t for d, t in cases.TOLERANCE.items() if d != torch.float16 and not quick}
    for dtype, tolerance in kinds.items():
        for case in [*cases.attention_cases(), *cases.tree_cases()]:
            if Shard.skips():
                continue
            inputs = cases.build_attention(case, dtype, DEVICE)
            if Shard.index is not None:
                ops.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
                continue
            known = cases.oracle_inputs(inputs)
            want = oracle.attend(known.q, known.meta, known.cache, known.spec)
            got = ops.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
            again = ops.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
            real = inputs.real_tokens
            assert torch.equal(got[real.to(DEVICE)], again[real.to(DEVICE)]), "not deterministic"
            worst(f"attend {case.name} {dtype}", [(got.cpu()[real], want[real])], tolerance)

    for dtype, tolerance in kinds.items():
        case = next(c for c in cases.attention_cases() if c.name == "mixed-page16")
        for rotary, interleaved, norms in ((64, False, True), (32, True, False), (0, False, True)):
            if Shard.skips():
                continue
            inputs = cases.build_attention(case, dtype, DEVICE)
            inputs.meta.out_slots[::3] = -1
            known = cases.oracle_inputs(inputs)
            norm = torch.randn(64, device=DEVICE, dtype=dtype) if norms else None
            norm64 = norm.double().cpu() if norms else None
            rope = cases.make_rope(rotary, interleaved) if rotary else None
            want = oracle.write_qkv(
                known.qkv, known.meta, known.cache, known.spec, rope, norm64, norm64, 1e-6
            )
            if rope:
                rope = Rope(rope.cos_sin.to(DEVICE), rotary, interleaved)
            got = ops.write_qkv(
                inputs.qkv, inputs.meta, inputs.cache, inputs.spec, rope, norm, norm, 1e-6
            )
            pairs = [(got, want)]
            pairs += [
                (a.nan_to_num(9.0), b.nan_to_num(9.0))
                for a, b in zip(inputs.cache, known.cache, strict=True)
            ]
            worst(f"write_qkv rotary {rotary} {dtype}", pairs, 2 * tolerance)
        if Shard.skips():
            continue
        x, r = (torch.randn(300, 4096, device=DEVICE, dtype=dtype) for _ in range(2))
        w = torch.randn(4096, device=DEVICE, dtype=dtype)
        total = (x + r).double().cpu()
        want = oracle.rms_norm(total, w.double().cpu(), 1e-6)
        worst(f"add_rms_norm {dtype}", [(ops.add_rms_norm(x, r, w, 1e-6), want), (r, total)],
              tolerance)  # fmt: skip
        for name in ("silu_and_mul", "gelu_and_mul"):
            want = getattr(oracle, name)(x.double().cpu())
            worst(f"{name} {dtype}", [(getattr(ops, name)(x), want)], tolerance)
        packed = CublasOps().pack_linear(w.view(2, 2048), None)
        want = x[:, :2048].double().cpu() @ w.view(2, 2048).t().double().cpu()
        got = CublasOps().linear(x[:, :2048], packed, torch.float32)
        worst(f"linear with float32 result {dtype}", [(got / 45, want / 45)], tolerance)

    for scale in () if Shard.skips() else (1.0, 4.0):
        logits = torch.randn(64, 128_256, device=DEVICE) * scale
        params = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0)]
        params += [(1.3, 1000, 0.8, 0.01), (1.0, 1, 1.0, 0.0), (2.0, 0, 0.99, 0.0), (1, 5, 0.5, 0)]
        rows = cases.sampling_rows(params * 8, 128_256, DEVICE)
        want, _ = oracle.sample(logits.clone(), rows)
        got, _ = ops.sample(logits, rows)
        again, _ = ops.sample(logits, rows)
        same = float((got == want).float().mean())
        failures += same < 0.95 or not torch.equal(got, again)
        table.add("check", f"sample: equal to the reference, scale {scale}", same, "share")
    if failures:
        print(f"{failures} CHECKS FAILED", flush=True)


# ---------------------------------------------------------------------------------------- time


@contextmanager
def patched(**values):
    """Set constants of the kernels' modules for a while: module__NAME=value; None leaves one."""
    modules = {"decode": decode_kernels, "extend": extend, "shared": shared}
    old = {}
    for key, value in values.items():
        module, name = key.split("__")
        old[key] = getattr(modules[module], name)
        if value is not None:
            setattr(modules[module], name, value)
    try:
        yield
    finally:
        for key, value in old.items():
            module, name = key.split("__")
            setattr(modules[module], name, value)


def decode(table: Table, quick: bool) -> None:
    def run(name, rows, tile=None, spec=LLAMA, items=None, plan=False, **kwargs):
        if Shard.skips():
            return
        kv_lens = [n for _, n in rows]
        size = kv_bytes(kv_lens, spec)
        layers = num_layers(size)
        meta, caches, q = build(rows, spec, layers=layers, **kwargs)

        def attend(i):
            if plan:
                meta.plans = {}
            attention.attend(q, meta, caches[i], spec, decode_tile=tile)

        try:
            with patched(decode__ITEMS_PER_CORE=items):
                ms = graph_time_ms(attend, layers)
            table.add("decode", name, size / ms / 1e9, "TB/s", ms)
        except Exception as error:
            print(f"decode {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)

    for batch in (1, 64, 256):
        for context in (128, 256, 1024, 4096):
            if batch * context <= 300_000:
                run(f"batch {batch} x {context}", [(1, context)] * batch)
    lengths = np.random.default_rng(0).integers(64, 4000, 128)
    run("batch 128 x random 64..4000", [(1, int(n)) for n in lengths])
    run("batch 32 x 300 and one of 32000", [(1, 300)] * 32 + [(1, 32000)])
    run("batch 256 x 1024, page 64", [(1, 1024)] * 256, page_size=64)
    run("batch 256 x 1024, page 1", [(1, 1024)] * 256, page_size=1)
    run("batch 1 x 256 with its plan", [(1, 256)], plan=True)
    run("batch 256 x 256 with its plan", [(1, 256)] * 256, plan=True)
    if quick:
        return
    for keys, warps, stages in ((32, 2, 3), (64, 4, 3)):
        tile = Tile(16, keys, warps, stages)
        for batch in (8, 16, 32, 64):
            run(f"{batch} x 256 keys {keys} warps {warps} stages {stages}",
                [(1, 256)] * batch, tile)  # fmt: skip
    for items in (4, 16):
        run(f"128 x random, {items} items a core", [(1, int(n)) for n in lengths], items=items)
        run(f"64 x 1024, {items} items a core", [(1, 1024)] * 64, items=items)
        run(f"32 x 300 and one of 32000, {items} items a core",
            [(1, 300)] * 32 + [(1, 32000)], items=items)  # fmt: skip


def prefill(table: Table, quick: bool) -> None:
    def run(name, rows, tile=None, splits=None, dense=True, **kwargs):
        if Shard.skips():
            return
        meta, caches, q = build(rows, layers=2, **kwargs)
        pairs = sum(q_len * (n - q_len) + q_len * (q_len + 1) / 2 for q_len, n in rows)
        flops = 4 * LLAMA.num_heads * LLAMA.head_dim * pairs

        def attend(i):
            attention.attend(q, meta, caches[i], LLAMA, extend_tile=tile, splits=splits)

        try:
            with patched(extend__DENSE_MIN_TOKENS=None if dense else 1 << 30):
                ms = graph_time_ms(attend, 2, 5)
            table.add("prefill", name, flops / ms / 1e9, "TFLOP/s", ms)
        except Exception as error:
            print(f"prefill {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)

    for length in (128, 512, 2048, 8192):
        run(f"1 x {length}", [(length, length)])
    run("8 x 1024", [(1024, 1024)] * 8)
    for chunk in (8, 128, 256, 512, 1024, 4096):
        run(f"{chunk} after 28000", [(chunk, 28000 + chunk)])
    run("8192, page 64", [(8192, 8192)], page_size=64)
    run("8192, page 128", [(8192, 8192)], page_size=128)
    meta, caches, q = build([(4096, 32_000)], layers=4)
    dense = extend.dense_copy(meta, LLAMA, q, 0)
    ms = graph_time_ms(lambda i: extend.copy_pages(dense, meta, caches[i], LLAMA))
    table.add("prefill", "dense copy of 32000 keys", 2 * kv_bytes([32_000], LLAMA) / ms / 1e9,
              "TB/s", ms)  # fmt: skip
    if not quick:
        for length in (512, 2048):
            run(f"1 x {length} in pages", [(length, length)], dense=False)
        run("8192 in pages", [(8192, 8192)], dense=False)
        for chunk in (8, 64, 256):
            for splits in (1, 2, 4, 8, 16, 32):
                run(f"{chunk} after 28000 in {splits} splits", [(chunk, 28000 + chunk)],
                    splits=splits)  # fmt: skip
        for page_size in (16, 64):
            run(f"4 x 64 after 4096, page {page_size}", [(64, 4160)] * 4, page_size=page_size)
            run(f"64 x 64 after 4096, page {page_size}", [(64, 4160)] * 64, page_size=page_size)
            run(f"8 after 28000, page {page_size}", [(8, 28008)], page_size=page_size)
        for queries, keys, warps, stages in (
            (128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 4),
        ):  # fmt: skip
            tile = Tile(queries, keys, warps, stages)
            name = f"tile {queries} x {keys} warps {warps} stages {stages}"
            run(f"8192 dense, {name}", [(8192, 8192)], tile)
            run(f"1024 after 28000 dense, {name}", [(1024, 29024)], tile, 1)
    # What torch's own kernels reach on dense K and V, as a mark.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for length in () if Shard.index is not None else (2048, 8192):
        q = torch.randn(1, 32, length, 128, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(1, 8, length, 128, device=DEVICE, dtype=q.dtype) for _ in range(2))
        flops = 4 * 32 * 128 * length * (length + 1) / 2
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    ms = graph_time_ms(
                        lambda _: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=True, enable_gqa=True
                        ),
                        2, 5,
                    )  # fmt: skip
                name = f"torch SDPA {backend.name.lower()} 1 x {length}"
                table.add("prefill", name, flops / ms / 1e9, "TFLOP/s", ms)
            except Exception as error:
                print(f"SDPA {backend.name}: {str(error)[:100]}", flush=True)


def shared_prefix(table: Table, quick: bool) -> None:
    def run(batch, prefix, how="read once", **constants):
        if Shard.skips():
            return
        meta, caches, q = build([(1, prefix + 72)] * batch, shared=prefix, layers=4)
        if how.startswith("read by each row"):
            meta.shared = None
        size = kv_bytes([prefix] + [72] * batch, LLAMA)
        with patched(**constants):
            ms = graph_time_ms(lambda i: attention.attend(q, meta, caches[i], LLAMA))
        table.add("shared", f"{batch} rows x {prefix} {how}", size / ms / 1e9, "TB/s", ms)

    shapes = ((64, 4096), (64, 1024), (256, 1024), (8, 4096))
    for batch, prefix in shapes:
        run(batch, prefix)
        run(batch, prefix, "read by each row (from L2)")
    if quick:
        return
    for batch, prefix in shapes:
        run(batch, prefix, "tails and merge alone", decode__attend_shared=lambda *_: None)
    for programs in (1, 4):
        for batch, prefix in shapes[:1] + shapes[2:3]:
            run(batch, prefix, f"{programs} programs a core", shared__PROGRAMS_PER_CORE=programs)
    for tile in (Tile(16, 64, 4, 3), Tile(16, 32, 2, 3)):
        run(64, 4096, f"tails by {tile.num_warps} warps", decode__WIDE_TILES={"sm_90": tile})


def fused_ops(table: Table, quick: bool) -> None:
    ops = TritonOps()
    for tokens in (1, 256, 8192):
        if Shard.skips():
            continue
        layers = 4
        meta, caches, _ = build([(1, 500)] * tokens if tokens <= 256 else [(8192, 8192)])
        qkv = [torch.randn(tokens, 48 * 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        rope = Rope(torch.randn(16384, 128, device=DEVICE), 128)
        ms = graph_time_ms(
            lambda i: ops.write_qkv(qkv[i], meta, caches[i], LLAMA, rope, None, None, 1e-6), layers
        )
        size = tokens * (48 + 48) * 128 * 2
        table.add("fused", f"write_qkv {tokens} tokens", size / ms / 1e9, "TB/s", ms)
        x = [torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        r = [torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        w = torch.randn(4096, device=DEVICE, dtype=torch.bfloat16)
        ms = graph_time_ms(lambda i: ops.add_rms_norm(x[i], r[i], w, 1e-6), layers)
        table.add(
            "fused", f"add_rms_norm {tokens} x 4096", tokens * 4096 * 8 / ms / 1e9, "TB/s", ms
        )
        gate = [torch.randn(tokens, 28672, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        for block in (1024,) if quick else (512, 1024, 2048, 4096):
            fused.GATE_BLOCK = block
            ms = graph_time_ms(lambda i: ops.silu_and_mul(gate[i]), layers)
            name = f"silu_and_mul {tokens} x 2 x 14336, block {block}"
            table.add("fused", name, tokens * 14336 * 6 / ms / 1e9, "TB/s", ms)
        fused.GATE_BLOCK = 1024


def sample(table: Table, quick: bool) -> None:
    ops = TritonOps()
    kinds = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top-k 50": (1.0, 50, 1.0, 0.0),
        "top-p 0.9": (1.0, 0, 0.9, 0.0),
        "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
        "top-p 0.95, min-p 0.05": (1.0, 0, 0.95, 0.05),
    }
    for batch in (1, 64, 256):
        for scale in (1.0, 4.0):
            logits = torch.randn(batch, 128_256, device=DEVICE) * scale
            for name, params in kinds.items():
                if scale == 1.0 and name in ("greedy", "temperature"):
                    continue
                if Shard.skips():
                    continue
                rows = cases.sampling_rows([params] * batch, 128_256, DEVICE)
                ms = graph_time_ms(lambda _: ops.sample(logits, rows), 2)
                size = logits.numel() * 4
                table.add("sampling", f"{batch} x 128256 scale {scale:.0f} {name}",
                          size / ms / 1e9, "TB/s", ms)  # fmt: skip
    logits = torch.randn(256, 128_256, device=DEVICE) * 4
    rows = cases.sampling_rows([kinds["top-p 0.9"]] * 256, 128_256, DEVICE)
    greedy = cases.sampling_rows([kinds["greedy"]] * 256, 128_256, DEVICE)
    if quick:
        return
    for block, pivot_block, pivots, warps in (
        (4096, 1024, 8, 16), (4096, 2048, 8, 16), (4096, 2048, 8, 32), (8192, 1024, 16, 32),
        (4096, 512, 16, 16), (2048, 1024, 16, 8),
    ):  # fmt: skip
        old = sampling.BLOCK, sampling.PIVOT_BLOCK, sampling.NUM_PIVOTS, sampling.NUM_WARPS
        sampling.BLOCK, sampling.PIVOT_BLOCK = block, pivot_block
        sampling.NUM_PIVOTS, sampling.NUM_WARPS = pivots, warps
        name = f"block {block} pivot block {pivot_block} pivots {pivots} warps {warps}"
        for kind, one in (("top-p", rows), ("greedy", greedy)):
            if Shard.skips():
                continue
            ms = graph_time_ms(lambda _, one=one: ops.sample(logits, one), 2)
            table.add("sampling", f"{kind} {name}", logits.numel() * 4 / ms / 1e9, "TB/s", ms)
        sampling.BLOCK, sampling.PIVOT_BLOCK, sampling.NUM_PIVOTS, sampling.NUM_WARPS = old


def step(table: Table, quick: bool) -> None:
    """A decode step of the Llama-3.1-8B shape in one graph: products alone, then everything."""
    if Shard.index is not None:
        return
    ops, blas = TritonOps(), CublasOps()
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096),
              "down": (4096, 14336)}  # fmt: skip
    layers = 32
    weights = [
        {
            name: blas.pack_linear(
                torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02, None
            )
            for name, shape in shapes.items()
        }
        for _ in range(layers)
    ]
    head = blas.pack_linear(
        torch.randn(128_256, 4096, device=DEVICE, dtype=torch.bfloat16) * 0.02, None
    )
    norm = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    rope = Rope(torch.randn(16384, 128, device=DEVICE), 128)

    for batch, context in ((1, 256), (64, 256), (256, 256), (256, 1024)):
        x = torch.randn(batch, 4096, device=DEVICE, dtype=torch.bfloat16)
        wide = torch.randn(batch, 14336, device=DEVICE, dtype=torch.bfloat16)

        def products(_, x=x, wide=wide):
            for w in weights:
                blas.linear(x, w["qkv"])
                blas.linear(x, w["o"])
                blas.linear(x, w["gate_up"])
                blas.linear(wide, w["down"])
            return blas.linear(x, head, torch.float32)

        products_ms = graph_time_ms(products, 1)
        table.add("step", f"batch {batch}: products", 15.0 / products_ms, "TB/s", products_ms)

        meta, caches, _ = build([(1, context)] * batch, layers=layers)
        rows = cases.sampling_rows([(0.0, 0, 1.0, 0.0)] * batch, 128_256, DEVICE)

        def whole(_, x=x, meta=meta, caches=caches, rows=rows):
            meta.plans = {}
            residual = x.clone()
            hidden = ops.rms_norm(residual, norm, 1e-5)
            for w, cache in zip(weights, caches, strict=True):
                qkv = blas.linear(hidden, w["qkv"])
                q = ops.write_qkv(qkv, meta, cache, LLAMA, rope, None, None, 1e-6)
                out = ops.attend(q, meta, cache, LLAMA)
                hidden = ops.add_rms_norm(blas.linear(out, w["o"]), residual, norm, 1e-5)
                gated = ops.silu_and_mul(blas.linear(hidden, w["gate_up"]))
                hidden = ops.add_rms_norm(blas.linear(gated, w["down"]), residual, norm, 1e-5)
            return ops.sample(blas.linear(hidden, head, torch.float32), rows)

        ms = graph_time_ms(whole, 1)
        table.add("step", f"batch {batch} x {context}: whole step", batch / ms * 1e3, "tok/s", ms)
        floor = products_ms + kv_bytes([context] * batch, LLAMA) * layers / 4.25e9
        table.add("step", f"batch {batch} x {context}: over the floor", ms / floor, "x", ms - floor)


GROUPS = {
    "decode": decode,
    "prefill": prefill,
    "shared": shared_prefix,
    "fused": fused_ops,
    "sampling": sample,
    "step": step,
}


def main() -> None:
    words = sys.argv[1:]
    quick = "--quick" in words
    chosen = [word for word in words if not word.startswith("-")] or ["check", *GROUPS]
    for word in words:
        if word.startswith("--shard="):
            index, count = word.removeprefix("--shard=").split("/")
            Shard.index, Shard.count = int(index), int(count)
    if Shard.index is None:
        begin = time.monotonic()
        count = min(14, os.cpu_count() or 1)
        others = [
            subprocess.Popen(
                [sys.executable, __file__, f"--shard={i}/{count}", *words],
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OUT": ""},
            )
            for i in range(count)
        ]
        for process in others:
            process.wait()
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    print(CudaRuntime().description, "torch", torch.__version__)
    table = Table()
    for name in chosen:
        begin = time.monotonic()
        try:
            with torch.inference_mode():
                check(table, quick) if name == "check" else GROUPS[name](table, quick)
        except Exception:
            traceback.print_exc()
        table.add("seconds", name, time.monotonic() - begin, "s")
        torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        Path(out, "gpu_kernels.json").write_text(json.dumps(table.rows, indent=1))
    print("\n=== summary")
    errors = [row for row in table.rows if row["unit"] == "error"]
    failed = [row for row in table.rows if "FAILED" in row["name"]]
    print(f"checks: {len(errors)}, failed: {[row['name'] for row in failed]}")
    for group in GROUPS:
        rows = [row for row in table.rows if row["group"] == group and row["ms"]]
        for row in rows if group == "step" else sorted(rows, key=lambda r: -r["value"])[:6]:
            us = row["ms"] * 1e3
            print(f"{group:9s} {row['name']:58s} {row['value']:9.2f} {row['unit']:8s} {us:9.1f} us")


if __name__ == "__main__":
    main()
