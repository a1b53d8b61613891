"""Times the experts' kernels on a GPU, finds the fastest tiles, and writes the table of them.

    python benchmarks/tune_moe.py [--quick] [--out FILE] [SHAPE ...]

SHAPE is EXPERTSxINNERxHIDDENxTOP_K, by default that of Qwen3-30B-A3B. For each number of tokens it
prints the time, what share of the copy bandwidth the active experts' weights are read with, and
the arithmetic speed; the first line of a shape is the error against float32. --quick times the
tiles that are used now, and writes nothing. FILE is by default the table that the kernels read,
backends/triton/moe_tiles.json; entries of other shapes and GPUs stay.

Times are of a CUDA graph over several layers' weights. Processes compile the candidates ahead.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import gpu_script  # noqa: F401 (--help, no GPU)
import numpy as np
import torch

from stoker.backends.api import ExpertWeights, RouterSpec
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import moe, routing
from stoker.backends.triton.arch import current_arch
from stoker.backends.triton.moe import Tile, Tiles

QWEN3_30B_A3B = "128x768x2048x8"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DEVICE, DTYPE = "cuda", torch.bfloat16
LAYERS = 4

ONE = [
    Tile(1, block_out, block_in, warps, stages)
    for block_out, block_in, warps in (
        (8, 256, 2), (8, 512, 2), (16, 256, 2), (16, 256, 4), (16, 512, 4), (32, 256, 4),
        (32, 128, 4), (64, 128, 4), (64, 64, 4), (128, 64, 4),
    )
    for stages in (3, 6)
]  # fmt: skip
GROUPED = {
    16: [
        Tile(16, block_out, block_in, warps, stages, *how)
        for block_out, block_in, warps, stages in (
            (32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3),
            (128, 128, 8, 4),
        )
        for how in product((False, True), repeat=2)
    ],
    32: [
        Tile(32, block_out, block_in, warps, stages, *how)
        for block_out, block_in, warps, stages in (
            (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 4),
        )
        for how in product((False, True), repeat=2)
    ],
    64: [
        Tile(64, block_out, block_in, warps, stages, swapped, described)
        for block_out, block_in, warps, stages in (
            (128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 4, 3), (256, 64, 8, 4),
        )
        for swapped, described in ((False, False), (False, True), (True, True))
    ],
    128: [
        Tile(128, block_out, block_in, warps, stages, False, described)
        for block_out, block_in, warps, stages in (
            (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
        )
        for described in (False, True)
    ],
}  # fmt: skip


def candidates(num_tokens: int, num_pairs: int, num_experts: int) -> list[list[Tile]]:
    """Tiles to try, in lists of as many rows."""
    per_expert = num_pairs / num_experts
    found = [ONE] if num_tokens <= 4 else []
    if num_tokens > 1:
        found += [tiles for rows, tiles in GROUPED.items() if rows / 8 <= max(per_expert, 2)
                  and (rows >= per_expert / 4 or rows == 128)]  # fmt: skip
    return found


class Layers:
    """Random weights of a few layers, and tokens for them."""

    def __init__(self, shape: str):
        self.sizes = tuple(int(n) for n in shape.split("x"))
        self.num_experts, self.inner, self.hidden, self.top_k = self.sizes

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, device=DEVICE, dtype=DTYPE) * size[-1] ** -0.5

        self.weights = [
            ExpertWeights(
                randn(self.num_experts, 2 * self.inner, self.hidden),
                randn(self.num_experts, self.hidden, self.inner),
            )
        ]
        self.packed = [moe.pack_experts(self.weights[0])]
        for _ in range(LAYERS - 1):
            first = self.packed[0]
            self.packed.append(
                first._replace(gate_up=first.gate_up.roll(1, 0), down=first.down.roll(1, 0))
            )

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, ids and weights, as `experts` takes them."""
        torch.manual_seed(count)
        x = torch.randn(count, self.hidden, device=DEVICE, dtype=DTYPE)
        logits = torch.randn(count, self.num_experts, device=DEVICE)
        return x, *routing.route(logits, RouterSpec(self.top_k), None)

    def used(self, count: int) -> Tiles:
        """The tiles of the table, or default ones."""
        return moe.choose_tiles(
            count * self.top_k, self.top_k, self.num_experts, self.inner, self.hidden, DTYPE
        )

    def time_us(self, count: int, tiles: Tiles, repeats: int = 8) -> float:
        """Median of one layer; infinite where the GPU cannot run it."""
        x, ids, scales = self.tokens(count)

        def run() -> None:
            for packed in self.packed:
                moe.experts(x, ids, scales, packed, tiles)

        try:
            return graph_time_us(run, repeats) / LAYERS
        except Exception as error:
            print(f"  {tiles}: {str(error).splitlines()[0]:.90}", flush=True)
            return float("inf")


def graph_time_us(run, repeats: int) -> float:
    """Median of replays of what run() launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(repeats + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times[2:]))


def copy_bytes_per_us() -> float:
    """Bytes read and written by a copy of 2 GiB."""
    source = torch.empty(1 << 30, dtype=torch.int16, device=DEVICE).zero_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time_us(lambda: target.copy_(source), 8)


def best_tiles(layers: Layers, count: int) -> Tiles:
    """The fastest, one product after the other."""
    start = layers.used(count)
    best, best_us = start, layers.time_us(count, start)
    for tiles in candidates(count, count * layers.top_k, layers.num_experts):
        down = start.down if start.down.rows == tiles[0].rows else tiles[0]
        timed = [(layers.time_us(count, Tiles(tile, down)), tile) for tile in tiles]
        gate_up = min(timed)[1]
        timed = [(layers.time_us(count, Tiles(gate_up, tile)), tile) for tile in tiles]
        took, down = min(timed)
        if took < best_us:
            best, best_us = Tiles(gate_up, down), took
    return best


def compile_share(layers: Layers, index: int, count: int) -> None:
    """Launch every count-th pair of tiles once."""
    seen = 0
    for num_tokens in TOKENS:
        for tiles in candidates(num_tokens, num_tokens * layers.top_k, layers.num_experts):
            for tile in tiles:
                seen += 1
                if seen % count == index:
                    try:
                        moe.experts(*layers.tokens(num_tokens), layers.packed[0], Tiles(tile, tile))
                    except Exception:
                        continue  # it is told when it is timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=[QWEN3_30B_A3B])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=moe.TABLE)
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        for shape in arguments.shapes:
            compile_share(Layers(shape), *arguments.compile)
        return
    if not arguments.quick:
        count = min(8, os.cpu_count() or 1)
        command = [sys.executable, __file__, *arguments.shapes, "--compile"]
        shares = [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]
        for share in shares:
            share.wait()
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    copied = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}: copies {copied / 1e6:.2f} TB/s")
    for shape in arguments.shapes:
        layers = Layers(shape)
        x, ids, scales = layers.tokens(40)
        up = [getattr(layers.weights[0], name).float() for name in ("gate_up", "down")]
        want = ReferenceOps().experts(x.float(), ids, scales, ExpertWeights(*up))
        got = moe.experts(x, ids, scales, layers.packed[0])
        print(f"{shape}: largest error of 40 tokens {float((got - want).abs().max()):.4f}")
        del up
        entries = {}
        for count in TOKENS:
            tiles = layers.used(count) if arguments.quick else best_tiles(layers, count)
            entries[str(count * layers.top_k)] = tiles
            took = layers.time_us(count, tiles, repeats=20)
            active = len(layers.tokens(count)[1].unique())
            read = active * 3 * layers.inner * layers.hidden * 2
            tflops = 6 * count * layers.top_k * layers.inner * layers.hidden / took / 1e6
            print(
                f"{count:6d} tokens {took:9.1f} us  {read / took / copied:6.1%} of copy bandwidth"
                f"  {tflops:6.1f} TFLOP/s  {tuple(tiles.gate_up)} {tuple(tiles.down)}",
                flush=True,
            )
        key = moe.table_key(layers.num_experts, layers.inner, layers.hidden, DTYPE)
        table.setdefault(current_arch().name, {})[key] = entries
    if not arguments.quick:
        text = json.dumps(table, indent=1)
        # A line for each number of pairs.
        text = re.sub(r"\[[^][]*\]", lambda m: " ".join(m[0].split()), text)
        arguments.out.write_text(re.sub(r"\[\s+(\[.*\],)\s+(\[.*\])\s+\]", r"[\1 \2]", text) + "\n")


if __name__ == "__main__":
    main()
