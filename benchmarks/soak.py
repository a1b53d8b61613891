"""Many requests of mixed lengths, a fifth of them aborted, with all cache tiers on.

    python benchmarks/soak.py --requests 10000

Fails where resident memory grows by 2% or more over the last half, where a page is lost, where a
request hangs, or where an answer differs from what its prompt gave before.
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

from tiers import make_model

from stoker.engine import AsyncEngine, SamplingParams
from stoker.engine.api.config import EngineConfig

CONCURRENCY = 24
NUM_TRUNKS = 12  # long prefixes that requests begin with
SAMPLES = 100  # of the resident memory
ABORTED = 0.2
CONTEXT = 1024


def resident_bytes() -> int:
    """Of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class Soak:
    """The load, and what it has seen."""

    def __init__(self, engine: AsyncEngine, num_requests: int, seed: int):
        self.engine = engine
        self.num_requests = num_requests
        self.num_aborted = self.num_finished = self.num_tokens = 0
        self.resident: list[int] = []
        self._random = random.Random(seed)
        self._trunks = [self._tokens(self._random.randrange(64, 600)) for _ in range(NUM_TRUNKS)]
        self._answers: dict[bytes, tuple[int, ...]] = {}
        self._left = iter(range(num_requests))

    def _tokens(self, n: int) -> array:
        return array("i", self._random.choices(range(250), k=n))

    async def run(self) -> None:
        """All requests, CONCURRENCY at once."""
        await asyncio.gather(*(self._client() for _ in range(CONCURRENCY)))

    async def _client(self) -> None:
        rng = self._random
        for number in self._left:
            trunk = rng.choice(self._trunks)
            prompt = trunk[: rng.choice([len(trunk), rng.randrange(1, len(trunk))])]
            if rng.random() < 0.7:
                prompt = prompt + self._tokens(rng.randrange(1, 120))
            max_tokens = rng.choice([1, 4, 16, 16, 64])
            abort_after = rng.randrange(max_tokens + 1) if rng.random() < ABORTED else None
            await asyncio.wait_for(self._request(prompt, max_tokens, abort_after), 600)
            if number % max(self.num_requests // SAMPLES, 1) == 0:
                self.resident.append(resident_bytes())

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
        if len(self._answers) < 2000 and prompt in self._trunks:
            known = self._answers.setdefault(prompt.tobytes(), tuple(tokens))
            n = min(len(known), len(tokens))
            if known[:n] != tuple(tokens[:n]):
                raise AssertionError("the same prompt gave two answers")


async def soak(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run the load; returns what is wrong."""
    model = folder / "model"
    model.mkdir()
    config = EngineConfig(
        model=str(make_model(model, "tiny", CONTEXT)),
        load_format="dummy",
        backend="cpu",
        dtype="float32",
        threads=args.threads,
        kv_tokens=4096,
        max_running_requests=16,
        host_cache_ratio=2.0,
        disk_cache_dir=str(folder / "pages"),
        disk_cache_gib=0.02,
        check=args.check,
    )
    wrong = []
    async with await AsyncEngine.start(config) as engine:
        load = Soak(engine, args.requests, args.seed)
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
    half = load.resident[len(load.resident) // 2 :]
    first, last = (
        statistics.mean(part) for part in (half[: len(half) // 4], half[-len(half) // 4 :])
    )
    growth = last / first - 1
    if growth >= 0.02:
        wrong.append(f"resident memory grew by {growth:.1%} over the last half")
    print(
        f"{args.requests} requests in {seconds:.0f} s, {load.num_aborted} aborted, "
        f"{load.num_tokens} tokens; resident {first / 2**20:.0f} to {last / 2**20:.0f} MiB "
        f"({growth:+.2%}) over the last half; {lost} pages lost"
    )
    return wrong


def main() -> None:
    """Exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
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
