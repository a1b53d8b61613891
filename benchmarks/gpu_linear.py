"""Small-batch matrix products on a GPU: the kernel against cuBLAS, then whole decode steps.

    python benchmarks/gpu_linear.py [--rows=1,2,4,8,16]

Products have the shapes of Llama-3.1-8B, each with what is fused with it; a step is its 32 layers
and the head as one CUDA graph, through the ops that the models call. Results are checked against
float32. They go to $OUT/gpu_linear.json where OUT is set.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, LLAMA, Table, build, graph_time_ms

from stoker.backends.api import Rope
from stoker.backends.cuda import CublasOps, CudaRuntime
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import TritonOps, linear
from stoker.backends.triton.linear import ONE_ROW, ONE_ROW_TILES, SOME_ROWS, Tile

# name: (output features of the weight, input features, op)
SHAPES = {
    "qkv": (6144, 4096, "norm"),
    "o": (4096, 4096, "add"),
    "gate_up": (28672, 4096, "gate"),
    "down": (4096, 14336, "add"),
    "head": (128_256, 4096, "head"),
}
LAYERS = 32
EPS = 1e-5
TILES = {
    1: (ONE_ROW, *ONE_ROW_TILES.values(), Tile(16, 512, 4, 4)),
    2: (SOME_ROWS, Tile(64, 128, 4, 4), Tile(128, 128, 8, 4)),
}
BLAS, KERNELS, EXACT = CublasOps(), TritonOps(), ReferenceOps()


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=scale)


@contextmanager
def choice(tile: Tile | None) -> Iterator[None]:
    """Every product takes this tile, or cuBLAS."""
    old = linear.choose_tile
    linear.choose_tile = lambda *_, **__: tile
    yield
    linear.choose_tile = old


def product(ops, op: str, x, packed, norm, residual) -> torch.Tensor:
    """One of the ops that the models call."""
    if op == "add":
        ops.linear_add(x, packed, residual)
        return residual
    if op == "gate":
        return ops.norm_gated_linear(x, norm, EPS, packed, "silu")
    return ops.norm_linear(x, norm, EPS, packed, torch.float32 if op == "head" else None)


def compile_kernels() -> None:
    """All that is measured, in threads."""

    def launch(rows: int, tile: Tile, name: str) -> None:
        torch.cuda.set_device(0)
        num_out, num_in, op = SHAPES[name]
        x, weight = random(rows, num_in), weights[name]
        num_out //= 2 if op == "gate" else 1
        dtype = torch.float32 if op == "head" else torch.bfloat16
        linear.linear(
            x,
            weight,
            None,
            torch.empty(rows, num_out, device=DEVICE, dtype=dtype),
            tile,
            norm=None if op == "add" else x[0],
            gate="silu" if op == "gate" else "",
            add=op == "add",
        )

    weights = {
        name: torch.empty(num_out, num_in, device=DEVICE, dtype=torch.bfloat16)
        for name, (num_out, num_in, _) in SHAPES.items()
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(launch, rows, tile, name)
            for rows, tiles in TILES.items()
            for tile in tiles
            for name in SHAPES
        ]
        for job in jobs:
            job.result()


def products(table: Table, rows_list: list[int]) -> None:
    for name, (num_out, num_in, op) in SHAPES.items():
        size = num_out * num_in * 2
        layers = max(2, int(500e6 // size) + 1)
        packed = [
            BLAS.pack_linear(random(num_out, num_in, scale=0.02), None) for _ in range(layers)
        ]
        norm = random(num_in) * 0.1 + 1
        for rows in rows_list:
            x, residual = random(rows, num_in), random(rows, num_out)
            want = product(EXACT, op, x.float(), (packed[0].weight.float(), None), norm.float(),
                           residual.float())  # fmt: skip
            chosen = linear.choose_tile(rows, packed[0].weight, has_norm=op != "add")
            candidates = [None, *(TILES[min(rows, 2)] if rows <= 16 else ())]
            for tile in candidates:
                title = f"{rows} rows: {'cuBLAS' if tile is None else tuple(tile)}"
                title += " (chosen)" if tile == chosen else ""
                with choice(tile):
                    got = product(BLAS, op, x, packed[0], norm, residual.clone())
                    error = float((got.float() - want).abs().max() / want.abs().max())
                    assert error < 0.02, (name, title, error)
                    out = residual.clone()
                    ms = graph_time_ms(lambda i: product(BLAS, op, x, packed[i], norm, out), layers)
                table.add(name, title, size / ms / 1e9, "TB/s", ms)


class Step:
    """A decode step without embedding and sampling."""

    def __init__(self) -> None:
        self.layers = [
            {
                name: random(num_out, num_in, scale=0.02)
                for name, (num_out, num_in, _) in SHAPES.items()
                if name != "head"
            }
            for _ in range(LAYERS)
        ]
        self.packed = [
            {name: BLAS.pack_linear(w, None) for name, w in layer.items()} for layer in self.layers
        ]
        self.head = BLAS.pack_linear(random(128_256, 4096, scale=0.02), None)
        self.norm = random(4096) * 0.1 + 1
        self.rope = Rope(torch.randn(16384, 128, device=DEVICE), 128)

    def run(self, x, meta, caches) -> torch.Tensor:
        """As the models do."""
        meta.plans = {}
        residual = x.clone()
        for w, cache in zip(self.packed, caches, strict=True):
            qkv = BLAS.norm_linear(residual, self.norm, EPS, w["qkv"])
            q = KERNELS.write_qkv(qkv, meta, cache, LLAMA, self.rope, None, None, EPS)
            BLAS.linear_add(KERNELS.attend(q, meta, cache, LLAMA), w["o"], residual)
            gated = BLAS.norm_gated_linear(residual, self.norm, EPS, w["gate_up"], "silu")
            BLAS.linear_add(gated, w["down"], residual)
        return BLAS.norm_linear(residual, self.norm, EPS, self.head, torch.float32)

    def exact(self, x, meta, caches) -> torch.Tensor:
        """The same in float32, but for attention, whose cache is bfloat16."""
        norm, residual = self.norm.float(), x.float()
        for w, cache in zip(self.layers, caches, strict=True):
            qkv = EXACT.norm_linear(residual, norm, EPS, (w["qkv"].float(), None)).bfloat16()
            q = KERNELS.write_qkv(qkv, meta, cache, LLAMA, self.rope, None, None, EPS)
            out = KERNELS.attend(q, meta, cache, LLAMA).float()
            EXACT.linear_add(out, (w["o"].float(), None), residual)
            gate_up = (w["gate_up"].float(), None)
            gated = EXACT.norm_gated_linear(residual, norm, EPS, gate_up, "silu")
            EXACT.linear_add(gated, (w["down"].float(), None), residual)
        return EXACT.norm_linear(residual, norm, EPS, (self.head.weight.float(), None))


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


def steps(table: Table, rows_list: list[int]) -> None:
    step = Step()
    for rows in rows_list:
        x = random(rows, 4096)
        meta, caches, _ = build([(1, 512)] * rows, layers=LAYERS)
        want = step.exact(x, meta, caches)

        def measure(title: str) -> float:
            got = replayed(lambda: step.run(x, meta, caches))
            same = all(torch.equal(got[0], other) for other in got)
            error = float((got[0] - want).abs().mean() / want.abs().mean())
            ms = graph_time_ms(lambda _: step.run(x, meta, caches), 1)
            table.add("step", f"{rows} rows: {title}", 15.0 / ms, "TB/s", ms)
            print(f"    same bits each time: {same}, relative error to float32: {error:.3f}")
            assert same
            return error

        with choice(None):
            plain = measure("cuBLAS")
        assert measure("as chosen") < 1.2 * plain + 0.005


def main() -> None:
    rows_list = [1, 2, 4, 8, 16]
    for word in sys.argv[1:]:
        if word.startswith("--rows="):
            rows_list = [int(n) for n in word.removeprefix("--rows=").split(",")]
    torch.manual_seed(0)
    print(CudaRuntime().description, "torch", torch.__version__)
    table = Table()
    begin = time.monotonic()
    compile_kernels()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    with torch.inference_mode():
        products(table, rows_list)
        steps(table, rows_list)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_linear.json").write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
