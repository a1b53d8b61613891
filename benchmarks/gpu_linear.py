"""Small-batch matrix products on a GPU: tiles against cuBLAS, then whole decode steps.

    python benchmarks/gpu_linear.py [tiles] [steps] [--rows=1,8]

`tiles` checks each tile on each product of the Llama-3.1-8B shape against float32, and times it;
`steps` times 32 layers as a CUDA graph, with the tiles that won. Processes compile the kernels
ahead. Results go to $OUT/gpu_linear.json where OUT is set.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, LLAMA, Shard, Table, build, graph_time_ms

from stoker.backends.api import Rope
from stoker.backends.cuda import CublasOps, CudaRuntime
from stoker.backends.triton import TritonOps, arch, fused, linear
from stoker.backends.triton.linear import Tile

# name: (output features, input features, what is fused)
SHAPES = {
    "qkv": (6144, 4096, {"norm": True}),
    "o": (4096, 4096, {"add": True}),
    "gate_up": (14336, 4096, {"norm": True, "gate": "silu"}),
    "down": (4096, 14336, {"add": True}),
    "head": (128_256, 4096, {"norm": True}),
}
LAYERS = 32
EPS = 1e-5
FMA = [
    Tile(*t)
    for t in (
        (8, 512, 4, 4, "fma"), (16, 512, 4, 4, "fma"), (16, 512, 4, 6, "fma"),
        (16, 512, 4, 1, "fma"), (8, 1024, 4, 1, "fma"), (16, 1024, 8, 3, "fma"),
        (4, 2048, 4, 1, "fma"), (8, 512, 2, 6, "fma"), (16, 256, 4, 6, "fma"),
        (16, 512, 4, 4, "fma", 1), (16, 512, 4, 4, "fma", 2), (16, 512, 4, 4, "fma", 4),
        (8, 512, 4, 4, "fma", 4), (16, 512, 8, 4, "fma", 2), (32, 256, 8, 4, "fma", 2),
    )
]  # fmt: skip
DOT = [
    Tile(*t)
    for t in (
        (16, 256, 4, 5), (16, 512, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4), (32, 256, 4, 6),
        (64, 128, 4, 4), (64, 64, 4, 6), (32, 512, 8, 3), (32, 256, 4, 4, "dot", 1),
        (32, 256, 4, 4, "dot", 2), (32, 256, 4, 3, "dot", 3), (16, 256, 4, 5, "dot", 3),
        (64, 128, 4, 4, "dot_t"), (64, 128, 4, 6, "dot_t"), (64, 64, 4, 8, "dot_t"),
        (128, 64, 4, 6, "dot_t"), (64, 256, 4, 3, "dot_t"), (64, 128, 4, 4, "dot_t", 2),
    )
]  # fmt: skip


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=scale)


def label(t: Tile) -> str:
    where = f" x{t.programs_per_core}/core" if t.programs_per_core else ""
    return f"{t.kind} {t.block_out}x{t.block_in} w{t.num_warps} s{t.stages}{where}"


def reference(x, weight, norm, out, fusion) -> torch.Tensor:
    """The fused product in float32."""
    x = x.float()
    if "norm" in fusion:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.float()
    y = x @ weight.float().t()
    if "gate" in fusion:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return out.float() + y if "add" in fusion else y


def call(x, weight, norm, out, tile, fusion, **options) -> None:
    fusion = {**fusion, "norm": norm if fusion.get("norm") else None}
    linear.launch(x, weight, None, out, tile, eps=EPS, **fusion, **options)


def unfused(ops, blas, x, weight, norm, residual, fusion, out_dtype=None):
    """The same work as separate kernels."""
    if "norm" in fusion:
        x = ops.rms_norm(x, norm, EPS)
    y = blas.linear(x, (weight.t(), None), out_dtype)
    if "gate" in fusion:
        return ops.silu_and_mul(y)
    return residual.add_(y) if "add" in fusion else y


def tiles(table: Table, rows_list: list[int]) -> dict[tuple[str, int], list[Tile]]:
    """The tiles of each product and number of rows, fastest first."""
    ops, blas = TritonOps(), CublasOps()
    best: dict[tuple[str, int], list[Tile]] = {}
    for name, (num_out, num_in, fusion) in SHAPES.items():
        out_rows = num_out * (2 if "gate" in fusion else 1)
        size = out_rows * num_in * 2
        layers = max(2, int(500e6 // size) + 1)
        is_measured = Shard.index is None
        count = layers if is_measured else 1
        weights = [random(out_rows, num_in, scale=0.02) for _ in range(count)]
        norm = random(num_in) * 0.1 + 1
        for rows in rows_list:
            x = random(rows, num_in)
            dtype = torch.float32 if name == "head" else torch.bfloat16
            base = torch.randn(rows, num_out, device=DEVICE).to(dtype)
            if is_measured:
                ms = graph_time_ms(lambda i: blas.linear(x, (weights[i].t(), None), dtype), layers)
                table.add(name, f"{rows} rows: cuBLAS alone", size / ms / 1e9, "TB/s", ms)
                ms = graph_time_ms(
                    lambda i: unfused(ops, blas, x, weights[i], norm, base, fusion, dtype), layers
                )
                table.add(name, f"{rows} rows: cuBLAS and separate", size / ms / 1e9, "TB/s", ms)
                want = reference(x, weights[0], norm, base, fusion)
            timed = []
            for tile in [*(FMA if rows == 1 else ()), *DOT]:
                for stream in (False, True):
                    if stream and tile not in (FMA[1], DOT[3]):
                        continue
                    if Shard.skips():
                        continue
                    title = f"{rows} rows: {label(tile)}{' evict-first' if stream else ''}"
                    out = base.clone()
                    try:
                        call(x, weights[0], norm, out, tile, fusion, stream=stream)
                        if not is_measured:
                            call(x, weights[0], norm, out, tile, fusion, pdl=True)
                            continue
                        error = float((out.float() - want).abs().max() / want.abs().max())
                        if not error < 0.02:
                            table.add(name, f"{title}: FAILED", error, "error")
                            continue
                        ms = graph_time_ms(
                            lambda i: call(x, weights[i], norm, out, tile, fusion, stream=stream),
                            layers,
                        )
                    except Exception as problem:
                        print(f"{name} {title}: {type(problem).__name__}: {str(problem)[:80]}")
                        continue
                    table.add(name, title, size / ms / 1e9, "TB/s", ms)
                    if not stream:
                        timed.append((ms, tile))
            best[name, rows] = [tile for _, tile in sorted(timed)]
            for tile in best[name, rows][:4]:
                for prefetch in (0, 512, 2048):
                    early = tile._replace(prefetch=prefetch)
                    try:
                        ms = graph_time_ms(
                            lambda i: call(x, weights[i], norm, out, early, fusion, pdl=True),
                            layers,
                        )
                    except Exception as problem:
                        print(f"{name} {label(tile)} PDL: {str(problem)[:80]}")
                        continue
                    title = f"{rows} rows: {label(tile)} PDL prefetch {prefetch}"
                    table.add(name, title, size / ms / 1e9, "TB/s", ms)
        weights.clear()
        torch.cuda.empty_cache()
    return best


class Step:
    """A decode step of 32 layers of one shape, as several compositions of kernels."""

    def __init__(self) -> None:
        self.ops, self.blas = TritonOps(), CublasOps()
        self.weights = []
        for _ in range(LAYERS):
            layer = {}
            for name, (num_out, num_in, fusion) in list(SHAPES.items())[:4]:
                out_rows = num_out * (2 if "gate" in fusion else 1)
                layer[name] = random(out_rows, num_in, scale=0.02)
            self.weights.append(layer)
        self.head = random(128_256, 4096, scale=0.02)
        self.norm = random(4096) * 0.1 + 1
        self.rope = Rope(torch.randn(16384, 128, device=DEVICE), 128)

    def bare(self, x: torch.Tensor) -> None:
        """The products alone, by cuBLAS."""
        wide = x.repeat(1, 4)[:, :14336].contiguous()
        for w in self.weights:
            for name in ("qkv", "o", "gate_up"):
                self.blas.linear(x, (w[name].t(), None))
            self.blas.linear(wide, (w["down"].t(), None))
        self.blas.linear(x, (self.head.t(), None), torch.float32)

    def separate(self, x, meta, caches, pdl: bool = False) -> torch.Tensor:
        """cuBLAS and element-wise kernels, as the models call them; attention where caches are."""
        fused.current_arch = arch.current_arch if pdl else lambda: arch.ARCHS["sm_80"]
        ops, blas, norm = self.ops, self.blas, self.norm
        residual = x.clone()
        hidden = ops.rms_norm(residual, norm, EPS)
        for i, w in enumerate(self.weights):
            qkv = blas.linear(hidden, (w["qkv"].t(), None))
            out = self.attention(qkv, meta, caches, i)
            y = blas.linear(out, (w["o"].t(), None))
            hidden = ops.add_rms_norm(y, residual, norm, EPS)
            gated = ops.silu_and_mul(blas.linear(hidden, (w["gate_up"].t(), None)))
            y = blas.linear(gated, (w["down"].t(), None))
            hidden = ops.add_rms_norm(y, residual, norm, EPS)
        return blas.linear(hidden, (self.head.t(), None), torch.float32)

    def fused(self, x, meta, caches, plan: dict[str, Tile], pdl: bool) -> torch.Tensor:
        """Four kernels a layer beside attention."""
        fused.current_arch = arch.current_arch if pdl else lambda: arch.ARCHS["sm_80"]
        rows = x.shape[0]
        residual = x.clone()

        def product(name, x, weight, out):
            call(x, weight, self.norm, out, plan[name], SHAPES[name][2], pdl=pdl)
            return out

        for i, w in enumerate(self.weights):
            qkv = product("qkv", residual, w["qkv"], x.new_empty(rows, 6144))
            out = self.attention(qkv, meta, caches, i)
            product("o", out, w["o"], residual)
            gated = product("gate_up", residual, w["gate_up"], x.new_empty(rows, 14336))
            product("down", gated, w["down"], residual)
        logits = torch.empty(rows, 128_256, device=DEVICE)
        return product("head", residual, self.head, logits)

    def attention(self, qkv, meta, caches, layer) -> torch.Tensor:
        if caches is None:
            return qkv[:, :4096]
        q = self.ops.write_qkv(qkv, meta, caches[layer], LLAMA, self.rope, None, None, EPS)
        return self.ops.attend(q, meta, caches[layer], LLAMA)


def replayed(fn, times: int = 3) -> list[torch.Tensor]:
    """Results of several replays of one graph."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    results = []
    for _ in range(times):
        graph.replay()
        torch.cuda.synchronize()
        results.append(out.clone())
    return results


def steps(table: Table, best: dict[tuple[str, int], list[Tile]], rows_list: list[int]) -> None:
    step = Step()
    gb = 15.0
    for rows in rows_list:
        x = random(rows, 4096)
        ms = graph_time_ms(lambda _: step.bare(x), 1)
        table.add("step", f"{rows} rows: cuBLAS products alone", gb / ms, "TB/s", ms)
        meta, all_caches, _ = build([(1, 512)] * rows, layers=LAYERS)

        def prepared(caches):
            meta.plans = {}
            return caches

        for what, caches in (("no attention", None), ("whole, context 512", all_caches)):
            ms = graph_time_ms(lambda _: step.separate(x, meta, prepared(caches)), 1)
            table.add("step", f"{rows} rows: {what}: cuBLAS, separate kernels", gb / ms, "TB/s", ms)
            ms = graph_time_ms(lambda _: step.separate(x, meta, prepared(caches), True), 1)
            table.add("step", f"{rows} rows: {what}: the same with PDL", gb / ms, "TB/s", ms)
            want = replayed(lambda: step.separate(x, meta, prepared(caches)), 1)[0]
            plans = {}
            for place in (0, 1):
                plans[f"best {place}"] = {n: best[n, rows][place] for n in SHAPES}
            small = {
                n: next(t for t in best[n, rows] if shared_bytes(t, n) <= 72_000) for n in SHAPES
            }
            plans["best under 72 KB"] = small
            dots = {n: next(t for t in best[n, rows] if t.kind != "fma") for n in SHAPES}
            plans["best dot"] = dots
            for title, plan in plans.items():
                first = None
                for pdl, prefetch in ((False, 0), (True, 0), (True, 512), (True, 2048)):
                    plan = {n: t._replace(prefetch=prefetch) for n, t in plan.items()}
                    name = f"{rows} rows: {what}: {title}"
                    name += f" PDL prefetch {prefetch}" if pdl else ""
                    try:
                        got = replayed(lambda: step.fused(x, meta, prepared(caches), plan, pdl))
                        first = got[0] if first is None else first
                        same = all(torch.equal(first, g) for g in got)
                        error = float((got[0] - want).abs().mean() / want.abs().mean())
                        if not same or not error < 0.05:
                            table.add("step", f"{name}: FAILED same {same}", error, "error")
                        ms = graph_time_ms(
                            lambda _: step.fused(x, meta, prepared(caches), plan, pdl), 1
                        )
                        table.add("step", name, gb / ms, "TB/s", ms)
                    except Exception:
                        traceback.print_exc()
                print("   ", {n: label(t) for n, t in plan.items()}, f"error {error:.2g}")


def shared_bytes(tile: Tile, name: str) -> int:
    """Of the weights in flight."""
    factor = 2 if name == "gate_up" else 1
    return factor * tile.block_out * tile.block_in * 2 * max(tile.stages - 1, 0)


def main() -> None:
    words = sys.argv[1:]
    rows_list = [1, 8]
    for word in words:
        if word.startswith("--shard="):
            index, count = word.removeprefix("--shard=").split("/")
            Shard.index, Shard.count = int(index), int(count)
        if word.startswith("--rows="):
            rows_list = [int(n) for n in word.removeprefix("--rows=").split(",")]
    torch.manual_seed(0)
    if Shard.index is not None:
        with torch.inference_mode():
            tiles(Table(), rows_list)
        return
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
    with torch.inference_mode():
        big = random(1 << 29)
        ms = graph_time_ms(lambda _: big.view(1 << 14, -1).amax(1), 1)
        table.add("read", "torch amax of 1 GiB", big.numel() * 2 / ms / 1e9, "TB/s", ms)
        big = None
        best = tiles(table, rows_list)
        print(f"tiles done at {time.monotonic() - begin:.0f} s", flush=True)
        steps(table, best, rows_list)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_linear.json").write_text(json.dumps(table.rows, indent=1))
    print(f"\n=== summary at {time.monotonic() - begin:.0f} s")
    print("failed:", [row["name"] for row in table.rows if "FAILED" in row["name"]])
    for group in SHAPES:
        for rows in rows_list:
            of = [r for r in table.rows if r["group"] == group and r["ms"]
                  and r["name"].startswith(f"{rows} rows")]  # fmt: skip
            marks = [r for r in of if "cuBLAS" in r["name"]]
            rest = sorted((r for r in of if "cuBLAS" not in r["name"]), key=lambda r: r["ms"])
            kinds = [next((r for r in rest if f": {k} " in r["name"]), None)
                     for k in ("fma", "dot", "dot_t")]  # fmt: skip
            for r in [*marks, *rest[:3], *(k for k in kinds if k and k not in rest[:3])]:
                us = r["ms"] * 1e3
                print(f"{group:8s} {r['name']:44s} {r['value']:6.3f} TB/s {us:7.2f} us")
    for r in table.rows:
        if r["group"] == "step" and r["ms"]:
            print(f"step     {r['name']:64s} {r['ms']:8.4f} ms")


if __name__ == "__main__":
    main()
