"""Times FlashInfer's attention against our Triton kernels on a GPU, with the host's cost of plans.

    python benchmarks/gpu_flashinfer.py [--only decode|prefill] [--fa3] [--build]

The layer is that of Llama-3.1-8B in bfloat16, pages of 64 tokens. Modules that are not built are
left out; --build builds those of decode first (38 s with 16 cores), with --fa3 prefill's too. Each
line says the time of a layer in a CUDA graph (decode) or in a row of launches (prefill), the share
of the copy bandwidth or the TFLOP/s, the largest difference to ours, and how long the host plans a
step. `step` adds up 32 layers, and what of the plan a step of that length cannot hide.
"""

import argparse
import time
from collections.abc import Callable

import gpu_script  # noqa: F401 (--help, no GPU)
import numpy as np
import torch

from stoker.backends.api import AttentionSpec, LayerCache
from stoker.backends.cuda import CudaRuntime, flashinfer
from stoker.backends.cuda.flashinfer import FlashInferOps, Kind, Use
from stoker.backends.triton.attention import attend

LLAMA = AttentionSpec(32, 8, 128, 128**-0.5)
KIND = Kind.of(LLAMA, torch.bfloat16)
PAGE_SIZE, LAYERS, MODEL_LAYERS = 64, 4, 32
DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 640), (256, 2048), (32, 16_384))
PREFILLS = ((1, 512, 512), (1, 4096, 4096), (4, 2048, 2048), (1, 2048, 32_768))


def median_us(run: Callable[[], object], repeats: int = 12) -> float:
    """Of the device's work between two events."""
    times = []
    for _ in range(repeats + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return float(np.median(times[2:]))


def host_us(run: Callable[[], object], repeats: int = 30) -> float:
    """Of the host's time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return float(np.median(times)) * 1e6


def copy_bytes_per_us() -> float:
    source = torch.zeros(1 << 30, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source))


def example(rows: int, q_len: int, context: int, runtime: CudaRuntime):
    """A batch, and caches of several layers so that the L2 cache does not flatter."""
    q, meta, cache = flashinfer._example(KIND, rows, q_len, context, PAGE_SIZE, runtime.device)
    caches = [cache, *(LayerCache(cache.k.roll(i, 0), cache.v.roll(i, 0)) for i in (1, 2, 3))]
    return q, meta, caches


def decode(ops: FlashInferOps, built: tuple[str, ...], runtime: CudaRuntime) -> None:
    copied = copy_bytes_per_us()
    print(f"decode; copies {copied / 1e6:.2f} TB/s")
    for rows, context in DECODES:
        q, meta, caches = example(rows, 1, context, runtime)
        meta.max_kv_len += 1  # as in a captured step
        num_bytes = rows * context * 2 * 8 * 128 * 2
        want = None
        for name in ("triton", *(name for name in flashinfer.DECODE_MODULES if name in built)):
            if name != "triton":
                ops.uses[KIND] = Use(name, None)
                ops._captured.clear()
                call, plan = ops.attend, lambda: ops.replan(meta, meta.kv_lens_cpu)  # noqa: B023
            else:
                call, plan = attend, lambda: None
            got = []

            def run(call=call, got=got, q=q, meta=meta, caches=caches) -> None:
                meta.plans.clear()
                got[:] = [call(q, meta, cache, LLAMA) for cache in caches]

            replay = runtime.capture(run)
            plan()
            replay()
            want = want or [x.clone() for x in got]
            error = max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True))
            took = median_us(replay) / LAYERS
            planned = host_us(plan)
            step = MODEL_LAYERS * took
            print(
                f"  {rows:4d} x {context:6d}  {name:13s} {took:8.1f} us "
                f"{num_bytes / took / copied:6.1%}  error {error:.4f}  plan {planned:7.1f} us  "
                f"step {step / 1e3:6.2f} ms, longer by {max(0.0, planned - step) / 1e3:.2f} ms",
                flush=True,
            )


def prefill(ops: FlashInferOps, built: tuple[str, ...], runtime: CudaRuntime) -> None:
    print("prefill")
    for rows, q_len, context in PREFILLS:
        q, meta, caches = example(rows, q_len, context, runtime)
        pairs = rows * q_len * (context - (q_len - 1) / 2)
        want = None
        for name in ("triton", *(n for n, w in flashinfer.PREFILL_MODULES.items() if w in built)):
            if name != "triton":
                ops.uses[KIND] = Use(None, name)
            call = attend if name == "triton" else ops.attend
            meta.plans.clear()
            got = call(q, meta, caches[0], LLAMA)
            want = got.clone() if want is None else want
            error = float((got - want).abs().max())

            def run(call=call, q=q, meta=meta, caches=caches) -> None:
                for cache in caches:
                    call(q, meta, cache, LLAMA)

            took = median_us(run) / LAYERS

            def first(call=call, q=q, meta=meta, caches=caches) -> None:
                meta.plans.clear()
                call(q, meta, caches[0], LLAMA)

            planned = host_us(first) - host_us(lambda: call(q, meta, caches[0], LLAMA))  # noqa: B023
            tflops = 4 * pairs * LLAMA.num_heads * LLAMA.head_dim / took / 1e6
            print(
                f"  {rows:2d} x {q_len:5d} of {context:6d}  {name:7s} {took:9.1f} us "
                f"{tflops:6.1f} TFLOP/s  error {error:.4f}  plan {planned:7.1f} us",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--fa3", action="store_true", help="build prefill's fa3, too")
    arguments = parser.parse_args()
    runtime = CudaRuntime()
    if arguments.build:
        from flashinfer.jit import build_jit_specs

        wanted = flashinfer.wanted_modules() if arguments.fa3 else tuple(flashinfer.DECODE_MODULES)
        began = time.perf_counter()
        build_jit_specs([flashinfer.module(KIND, which) for which in wanted])
        print(f"built {', '.join(wanted)} in {time.perf_counter() - began:.0f} s")
    built, ops = flashinfer.built_modules(KIND), FlashInferOps()
    print(f"{runtime.description}; built: {', '.join(built) or 'nothing'}")
    with torch.inference_mode():
        if arguments.only != "prefill":
            decode(ops, built, runtime)
        if arguments.only != "decode":
            prefill(ops, built, runtime)


if __name__ == "__main__":
    main()
