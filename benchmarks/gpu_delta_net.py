"""The gated delta net's kernels on a GPU: checks against float64, then times.

    python benchmarks/gpu_delta_net.py [check] [bench]

The sizes are Qwen3-Next's: 16 key heads, 32 value heads, of 128 each. Decode is stated as bytes of
recurrent state read and written a second; times are of a CUDA graph over several layers' states.
Results go to $OUT/gpu_delta_net.json where OUT is set.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, Table, graph_time_ms

from stoker.backends.api import LayerState
from stoker.backends.contract.cases import TOLERANCE
from stoker.backends.contract.delta_net import (
    CASES,
    DeltaNetCase,
    DeltaNetInputs,
    build_delta_net,
    in_float64,
)
from stoker.backends.cuda import CudaRuntime
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import TritonOps, delta_net_chunks

KERNELS, EXACT = TritonOps(), ReferenceOps()
HEADS, DIMS = (16, 32), (128, 128)
LAYERS = 4


def sized(name: str, rows: list[tuple[int, int]]) -> DeltaNetCase:
    return DeltaNetCase(name, rows, HEADS, DIMS, interleaved=True)


def run(inputs: DeltaNetInputs, state: LayerState | None = None) -> torch.Tensor:
    return KERNELS.delta_net(
        inputs.qkvz, inputs.ba, inputs.meta, state or inputs.state, inputs.spec
    )


def check(table: Table) -> None:
    """Outputs and states against float64, then a captured step replayed against one run as is."""
    large = [
        sized("decode", [(1, 1), (1, 0), *((1, 9 + n) for n in range(60))]),
        sized("mixed", [(1, 7), (1, 1), (1, 0), (700, 700), (65, 900), (64, 64), (0, 0)]),
    ]
    for case in [*CASES, *large]:
        # Each type and size compiles all kernels anew: float32 is left to the real sizes.
        for dtype in (torch.bfloat16, torch.float32) if case in large else (torch.bfloat16,):
            allowed = TOLERANCE[dtype]
            inputs = build_delta_net(case, dtype, DEVICE)
            exact, start = in_float64(inputs), LayerState(*(x.clone() for x in inputs.state))
            want = EXACT.delta_net(exact.qkvz, exact.ba, exact.meta, exact.state, exact.spec)
            got, real = run(inputs), inputs.real_tokens.to(DEVICE)
            worst = float((got[real].double() - want[real]).abs().max())
            off = float((inputs.state.recurrent[1:] - exact.state.recurrent[1:]).abs().max())
            assert torch.equal(inputs.state.conv[1:], exact.state.conv[1:].to(dtype)), case.name
            name = f"{case.name}, {case.heads}, {str(dtype).removeprefix('torch.')}"
            table.add("check", f"{name}: state", off / allowed, "of allowed")
            table.add("check", f"{name}: output", worst / allowed / 3, "of allowed")
            assert max(worst / 3, off) < allowed, name
            same_in_a_graph(inputs, start, got[real], real)
            print(f"{name}: a graph gives the same bits, and the same states", flush=True)


def same_in_a_graph(
    inputs: DeltaNetInputs, start: LayerState, want: torch.Tensor, real: torch.Tensor
) -> None:
    """A replay gives the same bits, and leaves the same state."""
    after, state = inputs.state, LayerState(*(x.clone() for x in start))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs, state)
    for _ in range(2):
        for target, source in zip(state, start, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[real], want)
        assert all(torch.equal(x[1:], y[1:]) for x, y in zip(state, after, strict=True))


def bench(table: Table) -> None:
    for num_rows in (1, 8, 64, 256):
        inputs = build_delta_net(sized("", [(1, 100)] * num_rows), torch.bfloat16, DEVICE)
        states = [LayerState(*(x.clone() for x in inputs.state)) for _ in range(LAYERS)]
        ms = graph_time_ms(lambda i: run(inputs, states[i]), LAYERS)
        num_bytes = num_rows * inputs.state.recurrent[0].numel() * 4 * 2
        table.add("decode", f"{num_rows} rows", num_bytes / ms / 1e9, "TB/s", ms)
    chunks = {
        "1 x 8192 tokens": [(8192, 8192)],
        "8 x 1024 tokens": [(1024, 1024)] * 8,
        "1 x 512 tokens after 4096": [(512, 4608)],
        "256 decodes, 1 x 2048 tokens": [(1, 100)] * 256 + [(2048, 2048)],
    }
    for name, rows in chunks.items():
        inputs = build_delta_net(sized("", rows), torch.bfloat16, DEVICE)
        states = [LayerState(*(x.clone() for x in inputs.state)) for _ in range(2)]
        for columns in (16, 32, 64):
            chosen, delta_net_chunks.VALUE_BLOCK = delta_net_chunks.VALUE_BLOCK, columns
            ms = graph_time_ms(lambda i: run(inputs, states[i]), 2)
            delta_net_chunks.VALUE_BLOCK = chosen
            title = f"{name}, {columns} columns" + " (chosen)" * (columns == chosen)
            table.add("chunks", title, inputs.meta.num_tokens / ms / 1e3, "Mtok/s", ms)
        if name.startswith("1 x 8192"):
            kernels(table, inputs)


def kernels(table: Table, inputs: DeltaNetInputs) -> None:
    """Each kernel's share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(inputs)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.key.startswith("_"):
            table.add("kernel", event.key, event.count, "x", event.device_time_total / 1e3)


def main() -> None:
    print(CudaRuntime().description, "torch", torch.__version__)
    table, words = Table(), sys.argv[1:] or ["check", "bench"]
    with torch.inference_mode():
        if "check" in words:
            check(table)
        if "bench" in words:
            bench(table)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_delta_net.json").write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
