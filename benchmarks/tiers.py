"""Time to the first token of a long prompt: computed, from the device, the host, and the disk.

    python benchmarks/tiers.py                                      # 4,096 tokens on the CPU
    python benchmarks/tiers.py --backend cuda --shape llama-8b --tokens 32000

The model has random weights, or is --model. The device's pool holds little more than one prompt,
so other prompts push it out. Each row is the median of --repeats runs; "disk" reads
files that the system still has in memory, "disk, cold" files that it was told to forget.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.engine import AsyncEngine, SamplingParams
from stoker.engine.api.config import EngineConfig

SHAPES = {  # layers, hidden, inner, query heads, KV heads, head dim, vocabulary
    "tiny": (2, 64, 96, 4, 2, 16, 512),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152),
    "llama-8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
MAX_SPARE = 1024  # tokens that the pool holds beside the prompt


def make_model(folder: Path, shape: str, length: int) -> Path:
    """A folder with a config and a tokenizer, for --load-format dummy."""
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = SHAPES[shape]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "eos_token_id": vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Bench:
    """One engine, and what it has been asked."""

    def __init__(self, engine: AsyncEngine, num_tokens: int, seed: int = 0):
        self.engine = engine
        self.num_tokens = num_tokens
        self._random = random.Random(seed)

    def prompt(self) -> array:
        """Random tokens that nobody has seen."""
        return array(
            "i", self._random.choices(range(self.engine.vocab_size - 2), k=self.num_tokens)
        )

    async def ask(self, prompt: array) -> tuple[float, str, tuple[int, ...]]:
        """Seconds to the first token, cached prompt tokens by tier, and the token."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        before = dict(self.engine.stats.tiers.cached_tokens)
        began = time.perf_counter()
        (output,) = [output async for output in self.engine.generate(prompt, params)]
        seconds = time.perf_counter() - began
        after = dict(self.engine.stats.tiers.cached_tokens)
        by_tier = {tier: after[tier] - before.get(tier, 0) for tier in after}
        by_tier["device"] = output.num_cached - sum(by_tier.values())
        cached = ", ".join(f"{n} {tier}" for tier, n in by_tier.items() if n)
        return seconds, cached or "0", output.token_ids

    async def settle(self) -> None:
        """Wait until nothing moves between the tiers any more."""
        before = None
        while before != (now := self.engine.stats.tiers):
            before = now
            await asyncio.sleep(1.0)

    async def push_out(self) -> None:
        """Fill the device's pool with other prompts."""
        for _ in range(2):
            await self.ask(self.prompt())
        await self.settle()


def forget_files(folder: Path) -> None:
    """Have the system drop the files of a folder from its memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(args: argparse.Namespace, model: Path, disk: Path) -> list[tuple[str, list]]:
    """Rows of (source, [(seconds, cached tokens, whether the token is right)])."""
    config = EngineConfig(
        model=args.model or str(model),
        load_format="auto" if args.model else "dummy",
        backend=args.backend,
        threads=args.threads,
        kv_tokens=args.tokens + MAX_SPARE,
        max_running_requests=8,
        host_cache_ratio=3.0,
        disk_cache_dir=str(disk),
        disk_cache_gib=args.disk_gib,
        prefetch_timeout=60.0,
        disable_graphs=args.backend == "cpu",
    )
    rows: dict[str, list] = {}
    async with await AsyncEngine.start(config) as engine:
        bench = Bench(engine, args.tokens)
        await bench.ask(bench.prompt())  # what is loaded and compiled at first use
        for _ in range(args.repeats):
            prompt = bench.prompt()
            answers = {"computed": await bench.ask(prompt)}
            await bench.settle()
            answers["device"] = await bench.ask(prompt)
            await bench.push_out()
            answers["host"] = await bench.ask(prompt)
            await engine.flush_cache()  # of device and host
            answers["disk"] = await bench.ask(prompt)
            await engine.flush_cache()
            forget_files(disk)
            answers["disk, cold"] = await bench.ask(prompt)
            token = answers["computed"][2]
            for source, (seconds, cached, found) in answers.items():
                rows.setdefault(source, []).append((seconds, cached, found == token))
        print(engine.stats.tiers)
    return list(rows.items())


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--model", help="a model with weights, instead of a shape")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--disk-gib", type=float, default=32.0)
    parser.add_argument("--disk", type=Path, default=None, help="where the disk tier is to be")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        model, disk = Path(folder) / "model", Path(folder) / "pages"
        model.mkdir()
        make_model(model, args.shape, args.tokens + MAX_SPARE)
        rows = asyncio.run(measure(args, model, disk))
    print(f"\n{args.model or args.shape} on {args.backend}, {args.tokens} tokens, "
          f"median of {args.repeats}\n")  # fmt: skip
    print("| prefix from | TTFT ms | times faster | cached tokens | same token |")
    print("|---|---|---|---|---|")
    baseline = 0.0
    for source, runs in rows:
        seconds = statistics.median(run[0] for run in runs)
        baseline = baseline or seconds
        cached = " / ".join(sorted({run[1] for run in runs}))
        same = "yes" if all(run[2] for run in runs) else "NO"
        print(f"| {source} | {seconds * 1e3:.1f} | {baseline / seconds:.1f} | {cached} | {same} |")


if __name__ == "__main__":
    main()
