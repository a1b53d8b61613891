"""Latent attention on a GPU: the kernels against float64, then their times.

    python benchmarks/gpu_mla.py [check] [bench] [tune]

`check` runs the contract's checks and longer batches and fails where one does; `bench` times what
serves; `tune` times other tiles too (each compiles for some seconds). Times are of a CUDA graph of
several layers' launches, so that the L2 cache does not flatter. Prints a table; writes it to
$OUT/gpu_mla.json where OUT is set.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gpu_kernels import DEVICE, build, graph_time_ms
from torch import Tensor

from stoker.backends.api import BatchMeta, DenseRows, LayerCache, MLASpec, Rope
from stoker.backends.contract.checks import Target, checks
from stoker.backends.cuda import CudaRuntime
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import TritonOps, mla, mla_dense
from stoker.backends.triton.flash import Tile

PAGE_SIZE = 64
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
DTYPE = torch.bfloat16
ROWS: list[dict[str, object]] = []
DECODE_TILES = {
    16: (Tile(16, 32, 4, 3), Tile(16, 32, 4, 4), Tile(16, 64, 8, 2), Tile(16, 64, 8, 3)),
    128: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 3), Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
}
EXTEND_TILES = (Tile(64, 64, 8, 2), Tile(64, 32, 8, 3), Tile(32, 64, 8, 2))
DENSE_TILES = (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3))


def add(name: str, us: float, value: float, unit: str) -> None:
    ROWS.append({"name": name, "us": round(us, 2), "value": round(value, 4), "unit": unit})
    print(f"{name:72s} {us:9.1f} us {value:9.3f} {unit}", flush=True)


def graph_us(fn: Callable[[int], object], layers: int) -> float:
    """Microseconds of one fn(layer)."""
    return graph_time_ms(fn, layers) * 1e3


def inputs(
    rows: list[tuple[int, int]], heads: int, layers: int
) -> tuple[Tensor, Tensor, BatchMeta, list[LayerCache], MLASpec]:
    meta, _, _ = build(rows, page_size=PAGE_SIZE, layers=0)
    num_pages = int(meta.block_table.max()) + 1
    spec = MLASpec(heads, RANK, ROPE, NOPE, VALUE, (NOPE + ROPE) ** -0.5)
    shape = (num_pages, PAGE_SIZE, 1, RANK + ROPE)
    pools = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    q = torch.randn(heads, meta.num_tokens, RANK, device=DEVICE, dtype=DTYPE).transpose(0, 1)
    wide = torch.randn(meta.num_tokens, heads, NOPE + ROPE, device=DEVICE, dtype=DTYPE)
    return q * 0.2, wide[..., NOPE:], meta, [LayerCache(p, p[..., :0]) for p in pools], spec


# --------------------------------------------------------------------------------- correctness


def check() -> int:
    """How many checks failed."""
    target, failures = Target(CudaRuntime(), TritonOps()), 0
    for one in checks():
        if one.ops[0].startswith("mla") and "float32" not in str(one):
            try:
                add(str(one), 0, one.run(target), "of what is allowed")
            except AssertionError as error:
                failures += 1
                print(f"{one} FAILED: {error}", flush=True)
    oracle = ReferenceOps()
    lens = np.random.default_rng(1).integers(1, 9000, 40)
    for heads in (16, 128):
        for name, rows, splits in (
            ("decode, lengths to 9000", [(1, int(n)) for n in lens], None),
            ("mixed", [(1, 700), (1, 5000), (64, 4160), (300, 300), (9, 5000)], None),
            ("in three splits", [(64, 5000)], 3),
        ):
            q, q_rope, meta, caches, spec = inputs(rows, heads, 1)
            got = mla.mla_attend(q, q_rope, meta, caches[0], spec, splits=splits)
            same = all(
                torch.equal(got, mla.mla_attend(q, q_rope, meta, caches[0], spec, splits=splits))
                for _ in range(20)
            )
            up = LayerCache(caches[0].k.double(), caches[0].v)
            want = oracle.mla_attend(q.double(), q_rope.double(), meta, up, spec)
            error = float(((got - want).abs() / (1 + want.abs())).max())
            ok = error < 2e-2 and same
            failures += not ok
            add(f"{name}, {heads} heads{'' if ok else ' FAILED'}", 0, error, "error")
    for described in (True, False):
        q, kv, keys, rows, spec = dense_inputs(16, [(700, 700, 0), (300, 2900, 2600)])
        k_rope = keys[:, RANK:]
        got, lse = mla_dense.mla_attend_dense(q, kv, k_rope, rows, spec, described=described)
        want, lse_want = oracle.mla_attend_dense(
            q.double(), kv.double(), k_rope.double(), rows, spec
        )
        error = max(float((got - want).abs().max()), float((lse - lse_want).abs().max()))
        failures += not error < 2e-2
        add(f"dense, descriptors {described}{'' if error < 2e-2 else ' FAILED'}", 0, error, "error")
    return failures


def dense_inputs(
    heads: int, rows: list[tuple[int, int, int]]
) -> tuple[Tensor, Tensor, Tensor, DenseRows, MLASpec]:
    q_lens, kv_lens, offsets = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    qo, bounds = (F.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (q_lens, kv_lens))
    q = torch.randn(int(qo[-1]), heads, NOPE + ROPE, device=DEVICE, dtype=DTYPE)
    kv = torch.randn(int(bounds[-1]), heads, NOPE + VALUE, device=DEVICE, dtype=DTYPE)
    keys = torch.randn(len(kv), RANK + ROPE, device=DEVICE, dtype=DTYPE)
    spec = MLASpec(heads, RANK, ROPE, NOPE, VALUE, (NOPE + ROPE) ** -0.5)
    return q, kv, keys, DenseRows(*(x.to(DEVICE) for x in (qo, bounds, offsets))), spec


# ---------------------------------------------------------------------------------------- time


@contextmanager
def patched(**values: int):
    """Set constants of the absorbed kernels' module for a while."""
    old = {name: getattr(mla, name) for name in values}
    for name, value in values.items():
        setattr(mla, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(mla, name, value)


def bench(tune: bool) -> None:
    for heads in (16, 128):
        for num_rows, context in ((256, 1024), (64, 4096), (8, 4096), (1, 8192), (1, 1024)):
            num_bytes = num_rows * context * (RANK + ROPE) * 2
            layers = int(min(24, max(2, 4e8 // num_bytes)))
            q, q_rope, meta, caches, spec = inputs([(1, context)] * num_rows, heads, layers)

            def decode(layer: int, tile: Tile | None = None) -> None:
                if not layer:  # as in a captured step: once for all layers
                    meta.plans.clear()
                mla.mla_attend(q, q_rope, meta, caches[layer], spec, tile=tile)

            name = f"decode {heads} heads {num_rows} x {context}"
            us = graph_us(decode, layers)
            add(name, us, num_bytes / us / 1e6, "TB/s")
            if tune and (num_rows, context) in ((256, 1024), (1, 8192)):
                for tile in DECODE_TILES[heads]:
                    us = graph_us(lambda layer, tile=tile: decode(layer, tile), layers)
                    add(f"{name} {tuple(tile)}", us, num_bytes / us / 1e6, "TB/s")
                for items, chunk in ((1, 128), (2, 64), (2, 256), (4, 64), (4, 128), (8, 128)):
                    with patched(ITEMS_PER_CORE=items, MIN_CHUNK=chunk):
                        us = graph_us(decode, layers)
                    add(f"{name} items {items} chunk {chunk}", us, num_bytes / us / 1e6, "TB/s")
        for new, context in ((64, 2048), (512, 2048), (2048, 2048)):
            q, q_rope, meta, caches, spec = inputs([(new, context)], heads, 2)
            flops = 2 * heads * new * (context - new / 2) * (2 * RANK + ROPE)

            def extend(layer: int, tile: Tile | None = None) -> None:
                mla.mla_attend(q, q_rope, meta, caches[layer], spec, tile=tile)

            for tile in (None, *(EXTEND_TILES if tune else ())):
                us = graph_us(lambda layer, tile=tile: extend(layer, tile), 2)
                name = f"extend {heads} heads {new} of {context} {'' if tile is None else tile}"
                add(name, us, flops / us / 1e6, "TFLOP/s")
        q, kv, keys, rows, spec = dense_inputs(heads, [(8192, 8192, 0)])
        flops = heads * 8192**2 * (NOPE + ROPE + VALUE)
        for described in (True, False):
            for tile in (None, *(DENSE_TILES if tune else ())):

                def dense(_: int, tile: Tile | None = tile, described: bool = described) -> None:
                    mla_dense.mla_attend_dense(
                        q, kv, keys[:, RANK:], rows, spec, tile=tile, described=described
                    )

                us = graph_us(dense, 1)
                how = "descriptors" if described else "pointers"
                tile_name = "" if tile is None else str(tuple(tile))
                add(f"dense {heads} heads 8192 {how} {tile_name}", us, flops / us / 1e6, "TFLOP/s")
        up = torch.randn(heads * (NOPE + VALUE), RANK, device=DEVICE, dtype=DTYPE)
        us = graph_us(lambda _: F.linear(keys[:, :RANK], up), 1)
        add(f"up-projection {heads} heads 8192", us, 2 * 8192 * up.numel() / us / 1e6, "TFLOP/s")
    for heads, num_tokens in (
        (16, 1),
        (16, 256),
        (128, 1),
        (128, 256),
    ):
        up = torch.randn(16, heads, NOPE + VALUE, RANK, device=DEVICE, dtype=DTYPE)
        q = torch.randn(num_tokens, heads, NOPE + ROPE, device=DEVICE, dtype=DTYPE)
        x = torch.randn(num_tokens, heads, RANK, device=DEVICE, dtype=DTYPE)
        out = torch.empty(num_tokens, heads, VALUE, device=DEVICE, dtype=DTYPE)

        def project(layer: int) -> None:
            torch.bmm(q[..., :NOPE].transpose(0, 1), up[layer, :, :NOPE])
            torch.bmm(
                x.transpose(0, 1), up[layer, :, NOPE:].transpose(1, 2), out=out.transpose(0, 1)
            )

        us = graph_us(project, len(up))
        num_bytes = up[0].numel() * 2
        add(f"queries in, values out, {heads} heads {num_tokens}", us, num_bytes / us / 1e6, "TB/s")
    for num_tokens in (1, 256, 8192):
        q, q_rope, meta, caches, spec = inputs([(num_tokens, num_tokens)], 16, 2)
        latent = torch.randn(num_tokens, RANK + ROPE, device=DEVICE, dtype=DTYPE)
        rope = Rope(torch.randn(8192, ROPE, device=DEVICE), ROPE, True)
        norm = torch.ones(RANK, device=DEVICE, dtype=DTYPE)
        us = graph_us(
            lambda layer: mla_dense.mla_write(
                latent, q_rope, meta, caches[layer], spec, rope, norm, 1e-6
            ),
            2,
        )
        num_bytes = 4 * (latent.numel() + q_rope.numel())
        add(f"write {num_tokens} tokens, 16 heads", us, num_bytes / us / 1e6, "TB/s")


def main() -> None:
    torch.manual_seed(0)
    asked = set(sys.argv[1:]) or {"check", "bench"}
    failures = check() if "check" in asked else 0
    if asked & {"bench", "tune"}:
        bench("tune" in asked)
    if folder := os.environ.get("OUT"):
        (Path(folder) / "gpu_mla.json").write_text(json.dumps(ROWS, indent=1))
    if failures:
        sys.exit(f"{failures} checks failed")


if __name__ == "__main__":
    main()
