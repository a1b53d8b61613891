"""Quantized products and fp8 KV caches on a GPU: checked against float64, then timed.

    python benchmarks/gpu_quantized.py [check] [linear] [attention] [experts] [tune]

`check` compares every kind of weight at many numbers of rows with the oracle; the others time
kernels on the shapes of Llama-3.1-8B, Qwen3-30B-A3B and GPT-OSS-20B beside bfloat16's. `tune` times
other tiles and prints the fastest. Results go to $OUT/gpu_quantized.json where OUT is set; the exit
status is 1 where a check failed.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, LLAMA, Table, build, graph_time_ms, kv_bytes

from stoker.backends import quantized as oracle
from stoker.backends.api import ExpertWeights, LayerCache, QuantizedExperts, QuantizedWeight
from stoker.backends.cuda import CublasOps, CudaRuntime
from stoker.backends.cuda import quantized as scaled_mm
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import attention, moe, moe_quantized, quantized
from stoker.backends.triton.flash import Tile as AttentionTile
from stoker.backends.triton.quantized import Tile

FP8 = torch.float8_e4m3fn
# name: (kind, block, activations, has offsets)
SCHEMES = {
    "fp8": ("fp8", (1, 0), "token", False),
    "fp8 blocks": ("fp8", (128, 128), "group", False),
    "int8": ("int8", (1, 0), "token", False),
    "fp8 a16": ("fp8", (1, 0), None, False),
    "fp8 blocks a16": ("fp8", (128, 128), None, False),
    "int8 g16 a16": ("int8", (1, 16), None, True),
    "int8 g32 a16": ("int8", (1, 32), None, False),
    "int8 a16": ("int8", (1, 0), None, False),
    "uint4 g32": ("uint4", (1, 32), None, True),
    "uint4 g64": ("uint4", (1, 64), None, True),
    "uint4 g128": ("uint4", (1, 128), None, True),
    "mxfp4": ("mxfp4", (1, 32), None, False),
}
TIMED = ("fp8", "fp8 blocks", "int8", "uint4 g128", "uint4 g32", "mxfp4")
IN_FLOAT16 = ("fp8", "int8 g32 a16", "uint4 g128", "mxfp4")
TUNED, TUNED_SHAPES, TUNED_ROWS = ("fp8", "uint4 g128", "mxfp4"), ("gate_up", "o"), (8, 64, 256)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 64, 256, 2048)
CHECKED_ROWS = (1, 16, 17, 64, 65, 1000)
CHECKED_SHAPES = ((1030, 2880), (512, 4096))


def make(name: str, num_out: int, num_in: int, num_experts: int = 0) -> QuantizedWeight:
    """Random codes whose values have a standard deviation of about 0.02."""
    kind, block, activations, has_offsets = SCHEMES[name]
    block = block[0], block[1] or num_in
    lead = (num_experts,) if num_experts else ()
    groups = (*lead, -(-num_out // block[0]), -(-num_in // block[1]))
    scales = torch.rand(groups, device=DEVICE) + 0.5
    size = (*lead, num_out, num_in)
    if kind in ("uint4", "mxfp4"):
        codes = torch.randint(0, 256, (*size[:-1], num_in // 2), device=DEVICE).to(torch.uint8)
        scales *= 0.02 / (4.6 if kind == "uint4" else 2.9)
    elif kind == "int8":
        codes = (torch.randn(size, device=DEVICE) * 40).clamp(-127, 127).to(torch.int8)
        scales *= 0.02 / 40
    else:
        codes = torch.empty(size, device=DEVICE, dtype=FP8)
        for part in codes if num_experts else (codes,):
            part.copy_((torch.randn(part.shape, device=DEVICE) * 100).clamp(-448, 448))
        scales *= 0.02 / 100
    if kind == "mxfp4":
        scales = torch.exp2(torch.log2(scales).round())
    offsets = None
    if has_offsets:
        offsets = (
            -scales * (7.5 if kind == "uint4" else 3.0) * (0.9 + 0.2 * torch.rand_like(scales))
        )
    return QuantizedWeight(kind, codes, size, scales, offsets, block, activations)


def num_bytes(weight: QuantizedWeight) -> int:
    """Of codes, and of scales and offsets in 16 bits (mxfp4: 8)."""
    scales = weight.scales.numel() * (1 if weight.kind == "mxfp4" else 2)
    return weight.codes.numel() + scales * (1 if weight.offsets is None else 2)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=scale)


def in_threads(jobs: Iterable[Callable[[], object]]) -> None:
    """Run them all, which compiles what they launch."""

    def run(job):
        torch.cuda.set_device(0)
        with torch.inference_mode():
            job()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(run, job) for job in jobs]:
            done.result()
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------ check


class Checks:
    """Compares, and counts what failed."""

    def __init__(self, table: Table):
        self._table = table
        self.failed = 0

    def __call__(self, name: str, got: torch.Tensor, want: torch.Tensor, allowed: float) -> None:
        error = float((got.double() - want).norm() / want.norm())
        ok = error <= allowed  # False for NaN too
        self.failed += not ok
        if not ok or os.environ.get("VERBOSE"):
            self._table.add("check", name + ("" if ok else "  FAILED"), error, "error")

    def same(self, name: str, first: torch.Tensor, second: torch.Tensor) -> None:
        if not torch.equal(first, second):
            self.failed += 1
            self._table.add("check", name + ": differs from run to run", 1.0, "FAILED")


def products(packed, x, tile: Tile | None = None) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to compute a product, by name."""
    ways = {}
    if packed.widened is not None:
        ways["widened"] = lambda: quantized.widened_linear(x, packed, x.dtype, tile)
    if packed.scaled is not None:
        ways["scaled"] = lambda: quantized.scaled_linear(
            quantized.round_rows(x, packed.scaled.dtype, packed.group, None), packed, x.dtype, tile
        )
    if tile is None and len(x) > 16 and scaled_mm.suits(packed, x.dtype):
        ways["torch"] = lambda: scaled_mm.scaled_mm(x, packed)
    return ways


def check_linear(checks: Checks, dtype: torch.dtype, names, shapes) -> None:
    cases = []
    for name in names:
        for num_out, num_in in shapes:
            weight = make(name, num_out, num_in)
            bias = random(num_out).to(dtype)
            packed = quantized.pack_quantized(weight, bias)
            for rows in CHECKED_ROWS:
                # A wider buffer, so that rows are strided.
                x = random(rows, num_in + 64).to(dtype)[:, :num_in]
                cases.append((name, weight, bias, packed, x))
    in_threads(way for *_, packed, x in cases for way in products(packed, x).values())
    for name, weight, bias, packed, x in cases:
        for how, way in products(packed, x).items():
            seen = replace(weight, activations=None) if how == "widened" else weight
            want = oracle.linear(x.double(), seen, bias.double(), None)
            what = f"{name} {tuple(weight.shape)}, {len(x)} rows, {how}, {dtype}"
            got = way()
            checks(what, got, want, 6e-3 if how == "widened" else 8e-3)  # uint4: up to 4.3e-3
            checks.same(what, got, way())


def check_attention(checks: Checks) -> None:
    ops = ReferenceOps()
    spec = replace(LLAMA, k_scale=0.02, v_scale=0.5)
    for page_size in (16, 64):
        rows = [(1, int(n)) for n in torch.randint(1, 9000, (40,))]
        meta, caches, q = build([*rows, (300, 5000), (1000, 1000)], layers=1, page_size=page_size)
        pools = [(x.float() / s).to(FP8) for x, s in zip(caches[0], (0.02, 0.5), strict=True)]
        got = attention.attend(q, meta, LayerCache(*pools), spec)
        seen = LayerCache(pools[0].double() * 0.02, pools[1].double() * 0.5)
        want = ops.attend(q.double(), meta, seen, replace(spec, k_scale=1.0, v_scale=1.0))
        checks(f"attention over fp8, pages of {page_size}", got, want, 4e-3)


# ------------------------------------------------------------------------------------------- time


def time_linear(table: Table, tune: bool) -> None:
    blas = CublasOps()
    shapes = TUNED_SHAPES if tune else SHAPES
    names = TUNED if tune else TIMED
    for shape in shapes:
        num_out, num_in = SHAPES[shape]
        size = num_out * num_in * 2
        copies = max(2, int(300e6 // size) + 1)
        packed = [
            blas.pack_linear(random(num_out, num_in, scale=0.02), None) for _ in range(copies)
        ]
        for rows in ROWS:
            x = random(rows, num_in)
            ms = graph_time_ms(lambda i: blas.linear(x, packed[i]), copies)
            report(table, shape, f"{rows} rows: bf16", rows, num_out, num_in, size, ms)
        del packed
        for name in names:
            weight = make(name, num_out, num_in)
            size = num_bytes(weight)
            copies = max(2, int(200e6 // size) + 1)
            packed = [quantized.pack_quantized(weight, None)]
            packed += [quantized.pack_quantized(make(name, num_out, num_in), None)
                       for _ in range(copies - 1)]  # fmt: skip
            inputs = {rows: random(rows, num_in) for rows in ROWS}
            ways = [
                (rows, how, tile)
                for rows in (TUNED_ROWS if tune else ROWS)
                for tile in candidates(rows, tune)
                for how in products(packed[0], inputs[rows], tile)
                if how != "widened" or rows <= 64 or packed[0].scaled is None
            ]
            in_threads(products(packed[0], inputs[rows], tile)[how] for rows, how, tile in ways)
            for rows in ROWS:
                took = []
                for n, how, tile in ways:
                    if n == rows:
                        calls = [products(p, inputs[rows], tile)[how] for p in packed]
                        took.append((graph_time_ms(lambda i: calls[i](), copies), how, tile))
                shown = took if not tune else sorted(took, key=lambda way: way[0])[:5]
                for ms, how, tile in shown:
                    title = f"{rows} rows: {name} {how} {'' if tile is None else tuple(tile)}"
                    report(table, shape, title, rows, num_out, num_in, size, ms)
        for n in ROWS:
            y = random(n, num_in)
            ms = graph_time_ms(lambda _: quantized.round_rows(y, FP8, 0, None), 4)
            table.add(shape, f"{n} rows: rounding to fp8", n * num_in * 3 / ms / 1e9, "TB/s", ms)


def report(table, shape, title, rows, num_out, num_in, size, ms) -> None:
    if rows <= 64:
        table.add(shape, title, size / ms / 1e9, "TB/s", ms)
    else:
        table.add(shape, title, 2 * rows * num_out * num_in / ms / 1e9, "TFLOP/s", ms)


def candidates(rows: int, tune: bool) -> list[Tile | None]:
    """The default, and others."""
    if not tune:
        return [None]
    if rows <= 64:
        few = 16 if rows <= 16 else 64
        tiles = [(few, 64, 256, 4, 3), (few, 64, 256, 4, 5), (few, 64, 256, 4, 4, 1),
                 (few, 64, 128, 4, 6), (few, 128, 256, 4, 3), (few, 128, 256, 8, 3),
                 (few, 128, 128, 8, 4)]  # fmt: skip
    else:
        tiles = [(64, 128, 128, 4, 4), (128, 128, 128, 4, 3), (128, 64, 128, 4, 4),
                 (64, 64, 256, 4, 3), (256, 64, 128, 4, 3), (128, 256, 128, 8, 3),
                 (256, 128, 128, 8, 3)]  # fmt: skip
    return [None, *(Tile(*tile) for tile in tiles)]


def time_attention(table: Table, tune: bool) -> None:
    for title, rows in (("256 x 1024", [(1, 1024)] * 256), ("8 x 32000", [(1, 32000)] * 8)):
        meta, caches, q = build(rows, page_size=64, layers=3)
        size = kv_bytes(meta.kv_lens_cpu, LLAMA)
        meta.plans = {}
        attention.attend(q, meta, caches[0], LLAMA)
        ms = graph_time_ms(lambda i: attention.attend(q, meta, caches[i], LLAMA), 3)
        table.add("decode", f"{title}: bf16", size / ms / 1e9, "TB/s", ms)
        short = [LayerCache(*(x.to(FP8) for x in cache)) for cache in caches]
        del caches
        tiles: list[AttentionTile | None] = [None]
        if tune:
            sizes = itertools.product((32, 64, 128), (2, 4), (2, 3, 4))
            tiles += [AttentionTile(16, *size) for size in sizes]
        in_threads(
            lambda tile=tile: attention.attend(q, meta, short[0], LLAMA, decode_tile=tile)
            for tile in tiles
        )
        best = []
        for tile in tiles:
            ms = graph_time_ms(
                lambda i: attention.attend(q, meta, short[i], LLAMA, decode_tile=tile), 3
            )
            best.append((ms, tile))
        for ms, tile in sorted(best, key=lambda pair: pair[0])[:4]:
            table.add(
                "decode", f"{title}: fp8 {tile and tuple(tile)}", size / 2 / ms / 1e9, "TB/s", ms
            )
    for title, rows in (("1 x 512 of 32000", [(512, 32000)]), ("4 x 2048", [(2048, 2048)] * 4)):
        meta, caches, q = build(rows, page_size=64, layers=2)
        ms = graph_time_ms(lambda i: attention.attend(q, meta, caches[i], LLAMA), 2)
        table.add("extend", f"{title}: bf16", 1.0, "", ms)
        short = [LayerCache(*(x.to(FP8) for x in cache)) for cache in caches]
        attention.attend(q, meta, short[0], LLAMA)
        ms = graph_time_ms(lambda i: attention.attend(q, meta, short[i], LLAMA), 2)
        table.add("extend", f"{title}: fp8", 1.0, "", ms)


EXPERTS = {  # experts, of a token, hidden, inner, activation, has biases
    "qwen3-30b": (128, 8, 2048, 768, "silu", False),
    "gpt-oss-20b": (32, 4, 2880, 2880, "swiglu_clamped", True),
}
EXPERT_SCHEMES = {
    "qwen3-30b": ("fp8", "fp8 blocks", "uint4 g128"),
    "gpt-oss-20b": ("mxfp4",),
}
TOKENS = (1, 2, 8, 64, 256, 2048)


def make_experts(shape: str, name: str) -> QuantizedExperts:
    """A layer's, of the shapes of EXPERTS."""
    num, _, hidden, inner, activation, has_bias = EXPERTS[shape]
    biases = (random(num, 2 * inner), random(num, hidden)) if has_bias else ()
    gate_up, down = make(name, 2 * inner, hidden, num), make(name, hidden, inner, num)
    return QuantizedExperts(gate_up, down, activation, *biases)


def random_pairs(tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts chosen uniformly, and weights."""
    values, ids = torch.rand(tokens, num_experts, device=DEVICE).softmax(-1).topk(top_k)
    return ids.int(), values / values.sum(-1, keepdim=True)


def check_experts(checks: Checks) -> None:
    """A few tokens' experts, one after the other in float64."""
    for shape, names in EXPERT_SCHEMES.items():
        num, top_k, hidden, _, activation, _ = EXPERTS[shape]
        for name in names:
            weights = make_experts(shape, name)
            packed = moe_quantized.pack_quantized_experts(weights)
            for tokens in TOKENS:
                x = random(tokens, hidden)
                ids, scales = random_pairs(tokens, num, top_k)
                got = moe_quantized.quantized_experts(x, ids, scales, packed)
                is_rounded = packed.down.widened is None and tokens > 1
                seen = [w if is_rounded else replace(w, activations=None)
                        for w in (weights.gate_up, weights.down)]  # fmt: skip
                known = QuantizedExperts(*seen, activation, weights.gate_up_bias, weights.down_bias)
                some = torch.randperm(tokens, device=DEVICE)[:4]
                want = ReferenceOps().quantized_experts(
                    x[some].double(), ids[some], scales[some].double(), known
                )
                what = f"{shape} {name}, {tokens} tokens"
                checks(what, got[some], want, 2e-2 if is_rounded else 1.2e-2)  # uint4: 8.6e-3
                again = moe_quantized.quantized_experts(x, ids, scales, packed)
                checks.same(what, got, again)


def time_experts(table: Table, tune: bool) -> None:
    for shape, (num, top_k, hidden, inner, activation, has_bias) in EXPERTS.items():
        pairs = {n: random_pairs(n, num, top_k) for n in TOKENS}
        used = {n: len(ids.unique()) / num for n, (ids, _) in pairs.items()}
        biases = (random(num, 2 * inner), random(num, hidden)) if has_bias else ()

        def timed(name, size, run, tokens, copies):
            ms = graph_time_ms(run, copies)
            flop = 6 * tokens * top_k * hidden * inner
            value, unit = (size * used[tokens] / ms / 1e9, "TB/s") if tokens <= 256 else (
                flop / ms / 1e9, "TFLOP/s")  # fmt: skip
            table.add(shape, f"{tokens} tokens: {name}", value, unit, ms)

        plain = [
            moe.pack_experts(
                ExpertWeights(random(num, 2 * inner, hidden, scale=0.02),
                              random(num, hidden, inner, scale=0.02), activation, *biases)
            )
            for _ in range(2)
        ]  # fmt: skip
        inputs = {n: random(n, hidden) for n in TOKENS}
        in_threads(lambda n=n: moe.experts(inputs[n], *pairs[n], plain[0]) for n in TOKENS)
        for n in TOKENS:
            size = 6 * num * hidden * inner
            timed("bf16", size, lambda i: moe.experts(inputs[n], *pairs[n], plain[i]), n, 2)
        plain.clear()
        for name in EXPERT_SCHEMES[shape]:
            made = [make_experts(shape, name) for _ in range(2)]
            size = num_bytes(made[0].gate_up) + num_bytes(made[0].down)
            layers = [moe_quantized.pack_quantized_experts(weights) for weights in made]
            del made
            ways = [(n, tile) for n in TOKENS for tile in expert_tiles(n * top_k / num, tune)]
            in_threads(
                lambda n=n, tile=tile: moe_quantized.quantized_experts(
                    inputs[n], *pairs[n], layers[0], tile
                )
                for n, tile in ways
            )
            for n, tile in ways:

                def run(i):
                    return moe_quantized.quantized_experts(inputs[n], *pairs[n], layers[i], tile)

                timed(f"{name} {'' if tile is None else tuple(tile)}", size, run, n, 2)


def expert_tiles(per_expert: float, tune: bool) -> list[Tile | None]:
    """The default, and others."""
    if not tune:
        return [None]
    few = 16 if per_expert <= 16 else 32 if per_expert <= 32 else 64
    sizes = [(few, 64, 256, 4, 3), (few, 64, 128, 4, 5), (few, 128, 256, 4, 3),
             (few, 128, 128, 8, 4), (few, 64, 256, 4, 5)]  # fmt: skip
    if per_expert > 64:
        sizes = [(128, 128, 128, 8, 3), (64, 128, 128, 4, 4), (128, 128, 128, 8, 4),
                 (128, 256, 128, 8, 3), (64, 64, 256, 4, 3)]  # fmt: skip
    return [None, *(Tile(*size) for size in sizes)]


def main() -> None:
    words = sys.argv[1:] or ["check", "linear", "attention", "experts"]
    torch.manual_seed(0)
    print(CudaRuntime().description, "torch", torch.__version__)
    table = Table()
    checks = Checks(table)
    tune = "tune" in words
    parts: dict[str, Callable[[], None]] = {
        "check": lambda: (
            check_linear(checks, torch.bfloat16, SCHEMES, CHECKED_SHAPES),
            check_linear(checks, torch.float16, IN_FLOAT16, CHECKED_SHAPES[:1]),
            check_attention(checks),
            check_experts(checks),
        ),
        "linear": lambda: time_linear(table, tune),
        "attention": lambda: time_attention(table, tune),
        "experts": lambda: time_experts(table, tune),
    }
    with torch.inference_mode():
        for word, part in parts.items():
            if word in words:
                begin = time.monotonic()
                part()
                torch.cuda.empty_cache()
                print(f"{word}: {time.monotonic() - begin:.0f} s", flush=True)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_quantized.json").write_text(json.dumps(table.rows, indent=1))
    print(f"{checks.failed} checks failed" if "check" in words else "")
    sys.exit(bool(checks.failed))


if __name__ == "__main__":
    main()
