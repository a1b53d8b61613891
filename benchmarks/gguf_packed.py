"""GGUF files on the CPU: packed weights against floats, and against llama.cpp.

    python benchmarks/gguf_packed.py agreement|memory|speed [--model smollm2-135m gemma3-270m]
        [--threads 1 2] [--rounds 3] [--llama-bench PATH]

agreement: of the recorded answers of a float32 model (tests/data), at how many tokens the same one
is likeliest, and the mean KL divergence from float32, in nats a token. memory: what the process has
beside the file's own pages. speed: tokens/s of a prompt of 128 tokens and of 64 that follow one, as
llama-bench has them, whose runs take turns with ours: on a shared machine only ratios mean
something.

Runs on: any (pure).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from stoker.backends import registry
from stoker.backends.api import BatchMeta, LayerCache
from stoker.engine import Engine, EngineConfig, SamplingParams
from stoker.engine.models.decoder import Decoder
from stoker.engine.runtime import gguf_weights, model_files

DATA = Path(__file__).parents[1] / "tests/data"
ANSWERS = {
    "smollm2-135m": "smollm2_greedy_fp32.json",
    "gemma3-270m": "gemma3_270m_greedy_fp32.json",
}
MODES = {  # --dtype, and whether weights stay packed
    "packed, bfloat16": (torch.bfloat16, True),
    "packed, float32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
}
PAGE_SIZE = 16
NUM_PROMPT, NUM_NEW = 128, 64


def load(name: str, mode: str) -> Decoder:
    dtype, is_packed = MODES[mode]
    files, ops = model_files.resolve(name), registry.select("cpu").ops
    config = files.config
    if is_packed:
        config = gguf_weights.keep_packed(files.gguf, config, ops)
    model = Decoder(config, ops, torch.device("cpu"), dtype, max_positions=2048)
    model.load(gguf_weights.from_gguf(files.gguf, config, dtype))
    return model


@torch.inference_mode()
def log_probs(model: Decoder, dtype: torch.dtype, tokens: list[int], first: int) -> torch.Tensor:
    """Of what may follow each token from `first` on: [len(tokens) - first, vocab]."""
    n = len(tokens)
    num_pages = -(-n // PAGE_SIZE)
    indptr, kv_lens = np.array([0, n], np.int32), np.array([n], np.int32)
    meta = BatchMeta(
        num_rows=1,
        num_tokens=n,
        num_decode_rows=int(n == 1),
        page_size=PAGE_SIZE,
        qo_indptr=torch.from_numpy(indptr),
        kv_lens=torch.from_numpy(kv_lens),
        slots=torch.zeros(1, dtype=torch.int32),
        block_table=torch.arange(num_pages, dtype=torch.int32)[None],
        positions=torch.arange(n),
        out_slots=torch.arange(n),
        logit_tokens=torch.arange(first, n),
        qo_indptr_cpu=indptr,
        kv_lens_cpu=kv_lens,
        max_kv_len=n,
    )
    caches = [
        LayerCache(*(torch.zeros(num_pages, PAGE_SIZE, heads, dim, dtype=dtype) for dim in dims))
        for heads, *dims in model.kv_spec
    ]
    hidden = model.forward(torch.tensor(tokens), meta, caches)
    return model.logits(hidden[first:]).log_softmax(-1)


def agreement(names: list[str]) -> None:
    for name in names:
        items = json.loads((DATA / ANSWERS[name]).read_text())["items"]
        models = {mode: load(name, mode) for mode in MODES}
        equal, divergence = dict.fromkeys(MODES, 0), dict.fromkeys(MODES, 0.0)
        total = 0
        for item in items:
            tokens, first = (
                item["prompt_ids"] + item["output_ids"][:-1],
                len(item["prompt_ids"]) - 1,
            )
            answer = torch.tensor(item["output_ids"])
            want = log_probs(models["float32"], torch.float32, tokens, first)
            total += len(answer)
            for mode, model in models.items():
                got = log_probs(model, MODES[mode][0], tokens, first)
                equal[mode] += int((got.argmax(-1) == answer).sum())
                divergence[mode] += float((want.exp() * (want - got)).sum())
        for mode in MODES:
            share = f"{equal[mode]} of {total} ({equal[mode] / total:.1%})"
            print(f"{name:13s} {mode:17s} {share:22s} KL {divergence[mode] / total:.6f}")


def private_bytes() -> int:
    """Memory of the process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


def memory(names: list[str]) -> None:
    """Each in a process of its own, so that nothing is left of another."""
    for name in names:
        for mode in MODES:
            command = [sys.executable, __file__, "one-memory", "--model", name, "--mode", mode]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            mib = float(out.split()[-1])
            print(f"{name:13s} {mode:17s} weights {mib:7.1f} MiB")


def one_memory(name: str, mode: str) -> None:
    load_nothing = torch.zeros(8, 8) @ torch.zeros(8, 8)  # torch's own buffers come first
    registry.select("cpu")
    before = private_bytes()
    model = load(name, mode)
    print((private_bytes() - before) / 2**20)
    del model, load_nothing


class Ours:
    """An engine; `run` gives tokens/s of the prompt, and of what follows."""

    def __init__(self, name: str, dtype: str, threads: int):
        self._engine = Engine(
            EngineConfig(
                model=name,
                dtype=dtype,
                threads=threads,
                max_running_requests=1,
                kv_tokens=512,
                max_model_len=512,
                disable_radix_cache=True,
            )
        )

    def run(self) -> tuple[float, float]:
        prompt = [random.randrange(1000, 40_000) for _ in range(NUM_PROMPT)]
        prefill = self._time(prompt, 1)
        return NUM_PROMPT / prefill, NUM_NEW / (
            self._time(prompt[:1], NUM_NEW + 1) - self._time(prompt[:1], 1)
        )

    def _time(self, prompt: list[int], num_new: int) -> float:
        began = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        self._engine.generate([prompt], params)
        return time.perf_counter() - began

    def close(self) -> None:
        self._engine.close()


def llama_bench(path: str, file: Path, threads: int) -> tuple[float, float]:
    command = [path, "-m", str(file), "-t", str(threads), "-p", str(NUM_PROMPT), "-n", str(NUM_NEW)]
    out = subprocess.run(
        [*command, "-r", "2", "-o", "json"], capture_output=True, check=True
    ).stdout
    prompt, new = (result["avg_ts"] for result in json.loads(out))
    return prompt, new


def speed(names: list[str], threads: list[int], rounds: int, bench: str | None) -> None:
    for name in names:
        file = model_files.resolve(name).path
        for count in threads:
            results: dict[str, list[tuple[float, float]]] = {}
            engines = {
                "packed": Ours(name, "auto", count),
                "bfloat16": Ours(name, "bfloat16", count),
            }
            for engine in engines.values():
                engine.run()
            for _ in range(rounds):
                for kind, engine in engines.items():
                    results.setdefault(kind, []).append(engine.run())
                if bench is not None:
                    results.setdefault("llama.cpp", []).append(llama_bench(bench, file, count))
            for engine in engines.values():
                engine.close()
            report(f"{name:13s} {count} threads", results)


def report(case: str, results: dict[str, list[tuple[float, float]]]) -> None:
    """The best of each kind's runs, and the median."""
    best = {kind: [max(runs) for runs in zip(*r, strict=True)] for kind, r in results.items()}
    for kind, runs in results.items():
        prompt, new = best[kind]
        middle = [statistics.median(r) for r in zip(*runs, strict=True)]
        line = f"{case} {kind:10s} pp{NUM_PROMPT} {prompt:6.0f} tg{NUM_NEW} {new:6.1f} tokens/s"
        line += f" (median {middle[0]:.0f}, {middle[1]:.1f})"
        if kind == "packed" and "llama.cpp" in best:
            theirs = best["llama.cpp"]
            line += f"; {prompt / theirs[0]:.2f} and {new / theirs[1]:.2f} of llama.cpp's"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["agreement", "memory", "speed", "one-memory"])
    parser.add_argument("--model", nargs="+", default=list(ANSWERS))
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", help="path of llama.cpp's llama-bench")
    args = parser.parse_args()
    if args.what == "agreement":
        agreement(args.model)
    elif args.what == "memory":
        memory(args.model)
    elif args.what == "speed":
        speed(args.model, args.threads, args.rounds, args.llama_bench)
    else:
        one_memory(args.model[0], args.mode)


if __name__ == "__main__":
    main()
