"""Times one step of SmolLM2-135M's shape on the CPU's providers, in one run: compare by ratio.

    python benchmarks/cpu_ops.py [--rows 1 8 32 256] [--dtype bfloat16] [--repeats 9]

Rows decode with 200 tokens of context each; the last lines are prompts of 128 and 512 tokens. The
figures are the fastest of the repeats, which alternate between the providers.

Runs on: any (pure).
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from stoker.backends import cpu
from stoker.backends.api import (
    AttentionSpec,
    BatchMeta,
    LayerCache,
    LayerWeights,
    Rope,
    SamplingRows,
)
from stoker.backends.reference import ReferenceOps

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SHAPES = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
    "out": (HEADS * DIM, HIDDEN),
    "gate_up": (HIDDEN, 2 * INNER),
    "down": (INNER, HIDDEN),
}
SPECS = [AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5) for _ in range(LAYERS)]


def make_meta(q_lens: list[int], kv_lens: list[int], page_size: int) -> BatchMeta:
    """Rows whose pages lie one after the other, as a fresh pool hands them out."""
    num_rows, max_pages = len(q_lens), -(-max(kv_lens) // page_size)
    indptr = np.cumsum([0, *q_lens], dtype=np.int32)
    table = torch.arange(num_rows * max_pages, dtype=torch.int32).view(num_rows, max_pages)
    at = [(row, p) for row in range(num_rows) for p in range(kv_lens[row])[-q_lens[row] :]]
    slots = [int(table[row, p // page_size]) * page_size + p % page_size for row, p in at]
    return BatchMeta(
        num_rows=num_rows,
        num_tokens=len(at),
        num_decode_rows=sum(n == 1 for n in q_lens),
        page_size=page_size,
        qo_indptr=torch.from_numpy(indptr),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        slots=torch.arange(num_rows, dtype=torch.int32),
        block_table=table,
        positions=torch.tensor([p for _, p in at]),
        out_slots=torch.tensor(slots),
        logit_tokens=torch.from_numpy(indptr[1:].astype(np.int64) - 1),
        qo_indptr_cpu=indptr,
        kv_lens_cpu=np.array(kv_lens, dtype=np.int32),
        max_kv_len=max(kv_lens),
    )


def make_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers in memory that numpy asked the kernel to back with large pages, as it does
    for the engine's pools; their order, a provider's own, does not matter here.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape).normal_()


class Step:
    """The model's step on one provider, in parts that can be timed alone."""

    def __init__(self, ops, weights: list[dict], head: torch.Tensor, caches: list[LayerCache]):
        self.ops, self.caches = ops, caches
        self.layers = [{n: ops.pack_linear(w, None) for n, w in x.items()} for x in weights]
        self.head = ops.pack_linear(head, None)
        self.norm = norm = torch.ones(HIDDEN, dtype=head.dtype)
        angles = torch.arange(2048)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.rope = Rope(torch.cat((angles.cos(), angles.sin()), 1), DIM)
        self.dtype = head.dtype
        self.weights = [
            LayerWeights(
                spec=spec,
                rope=self.rope,
                eps=1e-5,
                activation="silu",
                input_norm=norm,
                q_norm=None,
                k_norm=None,
                attention_out_norm=None,
                mlp_norm=norm,
                mlp_out_norm=None,
                **layer,
            )
            for spec, layer in zip(SPECS, self.layers, strict=True)
        ]

    def set_batch(self, q_lens: list[int], kv_lens: list[int], page_size: int) -> None:
        """What the next calls compute."""
        self.meta = make_meta(q_lens, kv_lens, page_size)
        n, rows = self.meta.num_tokens, len(q_lens)
        self.inputs = {k: torch.randn(n, k).to(self.dtype) for k in (HIDDEN, INNER, 2 * INNER)}
        self.qkv = torch.randn(n, SHAPES["qkv"][1]).to(self.dtype)
        self.rows = SamplingRows(
            temperature=torch.zeros(rows),
            top_k=torch.full((rows,), VOCAB, dtype=torch.int32),
            top_p=torch.ones(rows),
            min_p=torch.zeros(rows),
            seeds=torch.arange(rows),
            positions=torch.zeros(rows, dtype=torch.int32),
            all_greedy=True,
            has_top_k=False,
            has_top_p=False,
            has_min_p=False,
        )

    def linears(self) -> None:
        """All linears of the layers."""
        for layer in self.layers:
            for name, packed in layer.items():
                self.ops.linear(self.inputs[SHAPES[name][0]], packed)

    def attention(self) -> None:
        """Rotary embedding, cache write and attention of all layers."""
        for spec, cache in zip(SPECS, self.caches, strict=True):
            q = self.ops.write_qkv(self.qkv, self.meta, cache, spec, self.rope, None, None, 1e-5)
            self.ops.attend(q, self.meta, cache, spec)

    def logits(self) -> None:
        """The LM head on the rows' last tokens, and greedy sampling."""
        x = self.inputs[HIDDEN][self.meta.logit_tokens]
        self.ops.sample(self.ops.linear(x, self.head, torch.float32), self.rows)

    def by_op(self) -> None:
        """A decoder's step, a call an op."""
        self._whole(partial(ReferenceOps.decoder_layer, self.ops))

    def whole(self) -> None:
        """A decoder's step, a call a layer where the provider has one."""
        self._whole(self.ops.decoder_layer)

    def _whole(self, decoder_layer: Callable) -> None:
        residual = self.inputs[HIDDEN].to(torch.float32, copy=True)
        x = None
        for weights, cache in zip(self.weights, self.caches, strict=True):
            x = decoder_layer(x, residual, weights, self.meta, cache)
        x = residual.add_(x)[self.meta.logit_tokens]
        logits = self.ops.norm_linear(x, self.norm, 1e-5, self.head, torch.float32)
        self.ops.sample(logits, self.rows)


def fastest_ms(calls: list[Callable[[], None]], repeats: int) -> list[float]:
    """The fastest run of each call, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            own.append((time.perf_counter() - begin) * 1e3)
    return [min(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 256])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--providers", nargs="*", default=["torch", "native"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    runtime = cpu.runtime()
    runtime.set_threads(args.threads)
    page_size = args.page_size or runtime.default_page_size
    providers = {p.name: p for p in cpu.providers()}
    for name in args.providers:
        if reason := providers[name].probe(runtime):
            raise SystemExit(f"{name}: {reason}")
    num_slots = max([*(n * (args.context + 2 * page_size) for n in args.rows), 1024, *args.prompts])
    shape = (num_slots // page_size + 1, page_size, KV_HEADS, DIM)
    caches = [LayerCache(make_pool(shape, dtype), make_pool(shape, dtype)) for _ in range(LAYERS)]
    weights = [
        {n: (torch.randn(o, i) / i**0.5).to(dtype) for n, (i, o) in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    head = (torch.randn(VOCAB, HIDDEN) / 24).to(dtype)
    steps = [Step(providers[name], weights, head, caches) for name in args.providers]
    del weights
    print(f"{runtime.description}; {args.dtype}, page size {page_size}; ms a step")
    parts = ("linears", "attention", "logits", "by_op", "whole")
    print(f"{'batch':>14} {'provider':>9}", *(f"{part:>10}" for part in parts))
    batches = [(f"{n} rows", [1] * n, [args.context] * n) for n in args.rows]
    batches += [(f"prompt of {n}", [n], [n]) for n in args.prompts]
    for label, q_lens, kv_lens in batches:
        for step in steps:
            step.set_batch(q_lens, kv_lens, page_size)
        with torch.inference_mode():
            table = [fastest_ms([getattr(s, p) for s in steps], args.repeats) for p in parts]
        for i, name in enumerate(args.providers):
            print(f"{label:>14} {name:>9}", *(f"{times[i]:10.2f}" for times in table), flush=True)
        if len(steps) > 1:
            ratios = (f"{times[0] / times[-1]:9.2f}x" for times in table)
            print(f"{'':>14} {'ratio':>9}", *ratios, flush=True)
        if q_lens[0] > 1:
            rate = sum(q_lens) / table[-1][-1] * 1e3
            print(f"{'':>14} {rate:9.0f} tokens/s with {args.providers[-1]}", flush=True)


if __name__ == "__main__":
    main()
