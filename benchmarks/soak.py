"""Many requests of mixed lengths, a fifth of them aborted, with all cache tiers on.

    python benchmarks/soak.py --requests 10000
    python benchmarks/soak.py --seconds 600 --backend cuda --model FOLDER --concurrency 200

Fails where resident memory grows by 2% or more over the last half, on a GPU also where its memory
grows, where a page is lost, where a request hangs, or where an answer differs from what its prompt
gave before. The last is asked of the tiny float32 model that is made without --model; a model in
bfloat16 may answer otherwise in another batch.
"""

import argparse
import asyncio
import contextlib
import gc
import random
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path

import torch
from tiers import make_model

from stoker.engine import AsyncEngine, SamplingParams
from stoker.engine.api.config import EngineConfig

NUM_TRUNKS = 12  # long prefixes that requests begin with
ABORTED = 0.2
CONTEXT = 1024


def resident_bytes() -> int:
    """Of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class Soak:
    """The load, and what it has seen."""

    def __init__(self, engine: AsyncEngine, args: argparse.Namespace):
        self.engine = engine
        self.compares = args.model is None
        self.concurrency = args.concurrency
        self.ends_s = time.monotonic() + (args.seconds or 1e9)
        self.num_aborted = self.num_finished = self.num_tokens = 0
        self.resident: list[int] = []
        self.on_device: list[int] = []
        self._random = random.Random(args.seed)
        self._trunks = [self._tokens(self._random.randrange(64, 600)) for _ in range(NUM_TRUNKS)]
        self._answers: dict[bytes, tuple[int, ...]] = {}
        self._left = iter(range(sys.maxsize if args.seconds else args.requests))

    def _tokens(self, n: int) -> array:
        return array("i", self._random.choices(range(250), k=n))

    async def run(self) -> None:
        """All requests, so many at once."""
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._client() for _ in range(self.concurrency)))
        watch.cancel()

    async def _watch(self) -> None:
        while True:
            self.resident.append(resident_bytes())
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.on_device.append(total - free)
            await asyncio.sleep(0.3)

    async def _client(self) -> None:
        rng = self._random
        for _ in self._left:
            if time.monotonic() > self.ends_s:
                return
            trunk = rng.choice(self._trunks)
            prompt = trunk[: rng.choice([len(trunk), rng.randrange(1, len(trunk))])]
            if rng.random() < 0.7:
                prompt = prompt + self._tokens(rng.randrange(1, 120))
            max_tokens = rng.choice([1, 4, 16, 16, 64])
            abort_after = rng.randrange(max_tokens + 1) if rng.random() < ABORTED else None
            await asyncio.wait_for(self._request(prompt, max_tokens, abort_after), 600)

    async def _request(self, prompt: array, max_tokens: int, abort_after: int | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        async with contextlib.aclosing(self.engine.submit(prompt, params)) as stream:
            if abort_after == 0:
                await asyncio.sleep(self._random.random() * 0.05)
                self.num_aborted += 1
                return
            async for output in stream:
                tokens += output.token_ids
                if abort_after is not None and len(tokens) >= abort_after:
                    self.num_aborted += 1
                    return
        self.num_finished += 1
        self.num_tokens += len(tokens)
        if self.compares and len(self._answers) < 2000 and prompt in self._trunks:
            known = self._answers.setdefault(prompt.tobytes(), tuple(tokens))
            n = min(len(known), len(tokens))
            if known[:n] != tuple(tokens[:n]):
                raise AssertionError("the same prompt gave two answers")


async def soak(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run the load; returns what is wrong."""
    model = args.model
    if model is None:
        (folder / "model").mkdir()
        model = str(make_model(folder / "model", "tiny", CONTEXT))
    config = EngineConfig(
        model=model,
        load_format="dummy",
        backend=args.backend,
        dtype="float32" if args.model is None else "auto",
        threads=args.threads if args.backend == "cpu" else None,
        kv_tokens=256 * args.concurrency * 2 // 3,
        max_running_requests=args.concurrency * 2 // 3,
        host_cache_ratio=2.0,
        disk_cache_dir=str(folder / "pages"),
        disk_cache_gib=0.02,
        check=args.check,
    )
    wrong = []
    async with await AsyncEngine.start(config) as engine:
        load = Soak(engine, args)
        began = time.monotonic()
        await load.run()
        seconds = time.monotonic() - began
        await engine.flush_cache()
        for _ in range(200):  # copies that were on their way
            stats = engine.stats
            if not stats.num_running and not stats.tiers.num_host_used:
                break
            await engine.flush_cache()
            await asyncio.sleep(0.05)
        print(stats)
        lost = stats.num_pages - stats.num_free_pages
        if lost or stats.tiers.num_host_used or stats.num_running or stats.num_waiting:
            wrong.append(f"{lost} pages and {stats.tiers.num_host_used} host pages are lost")
    first, last = last_half(load.resident)
    growth = last / first - 1
    if growth >= 0.02:
        wrong.append(f"resident memory grew by {growth:.1%} over the last half")
    if load.on_device:
        before, after = last_half(load.on_device)
        print(f"device memory {before / 2**20:.0f} to {after / 2**20:.0f} MiB over the last half")
        if after > before * 1.002:
            wrong.append("device memory grew over the last half")
    print(
        f"{load.num_finished + load.num_aborted} requests in {seconds:.0f} s, "
        f"{load.num_aborted} aborted, {load.num_tokens} tokens; "
        f"resident {first / 2**20:.0f} to {last / 2**20:.0f} MiB "
        f"({growth:+.2%}) over the last half; {lost} pages lost"
    )
    return wrong


def last_half(samples: list[int]) -> tuple[float, float]:
    """Means of the first and the last quarter of the second half."""
    half = samples[len(samples) // 2 :]
    quarter = max(len(half) // 4, 1)
    return statistics.mean(half[:quarter]), statistics.mean(half[-quarter:])


def main() -> None:
    """Exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="so long, instead of so many requests")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--model", help="a folder whose config gets random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="verify the ledger after every step")
    args = parser.parse_args()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        wrong = asyncio.run(soak(args, Path(folder)))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
