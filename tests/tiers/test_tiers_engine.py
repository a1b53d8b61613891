"""Tiers under a real engine on the CPU: real memory, real files, a real Redis server."""

import asyncio
import shutil
import socket
import subprocess
import time
from array import array

import pytest

from stoker.engine import AsyncEngine, SamplingParams
from stoker.engine.api.config import EngineConfig
from stoker.engine.api.errors import StartError
from stoker.engine.build import has_tiers
from stoker.engine.runtime.stores.disk import DiskStore
from stoker.engine.runtime.stores.redis import RedisStore

PROMPT = array("i", [(7 * i + i // 13) % 250 for i in range(200)])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def config(model, **kw) -> EngineConfig:
    defaults = {"backend": "cpu", "threads": 1, "dtype": "float32", "page_size": 16}
    defaults |= {"kv_tokens": 512, "max_running_requests": 4, "check": True}
    return EngineConfig(model=str(model), **(defaults | kw))


async def ask(engine, prompt=PROMPT, params=GREEDY, **kw):
    """Output tokens, and how many prompt tokens were cached."""
    tokens, cached = [], 0
    async for output in engine.generate(prompt, params, **kw):
        tokens += output.token_ids
        cached = output.num_cached
    return tokens, cached


async def push_out(engine) -> None:
    """Fill the device's pool with other prompts."""
    for i in range(3):
        other = array("i", [(3 * j + 50 * i + 11) % 250 for j in range(200)])
        await ask(engine, other)


def from_tier(engine) -> dict[str, int]:
    return dict(engine.stats.tiers.cached_tokens)


async def settled(engine, is_settled):
    """Copies end behind the answers; `engine.stats` follows them."""
    for _ in range(500):
        if is_settled(engine.stats.tiers):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {engine.stats.tiers}")


@pytest.mark.parametrize("policy", ["write-through", "write-through-selective", "write-back"])
def test_an_evicted_prefix_comes_back_from_the_host(model, policy):
    async def main():
        options = {"cache_write_policy": policy, "cache_write_hits": 1, "host_cache_gib": 0.01}
        async with await AsyncEngine.start(config(model, **options)) as engine:
            first, cached = await ask(engine)
            assert cached == 0
            again, cached = await ask(engine)
            assert again == first and cached == 192 and from_tier(engine) == {"host": 0}
            await push_out(engine)
            again, cached = await ask(engine)
            assert again == first and cached == 192
            assert from_tier(engine)["host"] > 0

    asyncio.run(main())


def test_after_a_restart_the_disk_has_the_prefix(model, tmp_path):
    """Of the same model, dtype, page size and namespace, that is."""
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path)}

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            first, cached = await ask(engine)
            assert cached == 0
        async with await AsyncEngine.start(config(model, **options)) as engine:
            again, cached = await ask(engine)
            assert again == first and cached == 192
            assert from_tier(engine) == {"host": 0, "disk": 192}
            _, cached = await ask(engine, namespace=("another",))
            assert cached == 0, "equal tokens of another namespace"
        async with await AsyncEngine.start(config(model, page_size=32, **options)) as engine:
            _, cached = await ask(engine)
            assert cached == 0, "another page size is another layout"

    asyncio.run(main())


def test_flipped_bytes_and_truncated_files_are_recomputed(model, tmp_path):
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path)}

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            first, _ = await ask(engine)
        files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
        assert len(files) >= 12
        for number, file in enumerate(files):
            content = bytearray(file.read_bytes())
            if number % 3 == 0:
                content[len(content) // 2 + number] ^= 1
            elif number % 3 == 1:
                content = content[:-100]
            else:
                content[20] ^= 255  # in the header: the key
            file.write_bytes(content)
        async with await AsyncEngine.start(config(model, **options)) as engine:
            again, cached = await ask(engine)
            assert again == first and cached == 0
            await settled(engine, lambda tiers: tiers.damaged_pages > 0)
        async with await AsyncEngine.start(config(model, **options)) as engine:
            again, cached = await ask(engine)  # what was computed again was stored again
            assert again == first and cached == 192

    asyncio.run(main())


def test_a_full_disk_is_survived(model, tmp_path, monkeypatch):
    def put(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskStore, "put", put)
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path)}

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            first, _ = await ask(engine)
            await push_out(engine)
            again, cached = await ask(engine)
            assert again == first and cached == 192 and from_tier(engine)["host"] > 0
            await settled(engine, lambda tiers: tiers.unput_pages >= 12)

    asyncio.run(main())


def test_the_disks_limit_holds(model, tmp_path):
    record_bytes = 128 + 16 * 2 * 2 * 2 * 16 * 4  # header, then page * (k, v) * layers * heads...
    record_bytes = -(-record_bytes // 256) * 256
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path)}
    options["disk_cache_gib"] = (5 * record_bytes + 100) / 2**30

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            await ask(engine)
            await push_out(engine)
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert len(files) == 5 and {p.stat().st_size for p in files} == {record_bytes}

    asyncio.run(main())


class SlowStore:
    """Has everything, and says so after a while; its pages are nonsense."""

    name = "disk"

    def __init__(self, *_):
        pass

    def exists(self, keys):
        return [True] * len(keys)

    def get(self, keys, records):
        time.sleep(30)
        return [True] * len(keys)

    def put(self, keys, records):
        return [True] * len(keys)

    def drop(self, keys):
        pass

    def close(self):
        pass


class WrongStore(SlowStore):
    """Gives the bytes of another page."""

    def get(self, keys, records):
        for record in records:
            record[:] = bytes(range(256)) * (len(record) // 256)
        return [True] * len(keys)


class DeadStore(SlowStore):
    """Fails at everything, and sometimes answers with half a list."""

    def exists(self, keys):
        return [True] * (len(keys) // 2)

    def get(self, keys, records):
        raise ConnectionError("gone")

    put = drop = get


@pytest.mark.parametrize("store", [SlowStore, WrongStore, DeadStore])
def test_a_store_that_is_slow_wrong_or_dead(model, tmp_path, monkeypatch, store):
    """Requests wait for it no longer than they may, others do not wait, and all are right."""
    monkeypatch.setattr("stoker.engine.build.DiskStore", store)
    monkeypatch.setattr("stoker.engine.runtime.kv_copies.CLOSE_S", 0.5)
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path), "prefetch_timeout": 1.0}
    short = array("i", range(20))

    async def main():
        async with await AsyncEngine.start(config(model)) as engine:
            expected = (await ask(engine))[0], (await ask(engine, short))[0]
        async with await AsyncEngine.start(config(model, **options)) as engine:
            began = time.monotonic()
            long = asyncio.create_task(ask(engine))
            await asyncio.sleep(0)
            beside = (await ask(engine, short))[0]
            beside_s = time.monotonic() - began
            answer, cached = await long
            assert (answer, beside) == expected and cached == 0
            assert beside_s < 1.0 or store is not SlowStore, "a request waited for another's pages"
            assert time.monotonic() - began < 15
            timeouts = engine.stats.tiers.prefetch_timeouts
            assert timeouts == (1 if store is SlowStore else 0)

    asyncio.run(main())


def test_an_abort_while_pages_are_on_their_way(model, tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.engine.build.DiskStore", SlowStore)
    monkeypatch.setattr("stoker.engine.runtime.kv_copies.CLOSE_S", 0.5)
    options = {"host_cache_ratio": 4.0, "disk_cache_dir": str(tmp_path), "prefetch_timeout": 60.0}

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            stream = engine.submit(PROMPT, GREEDY)
            while not engine.stats.num_waiting:
                await asyncio.sleep(0.01)
            stream.abort()
            await ask(engine, array("i", range(20)))
            assert engine.stats.num_waiting == 0

    asyncio.run(main())


@pytest.fixture
def redis_url():
    """A real server on a free port, if one is installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory"]
    server = subprocess.Popen([*command, "64mb"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0", server
    finally:
        server.kill()
        server.wait()


def test_redis_keeps_pages_for_the_next_engine(model, redis_url):
    url, server = redis_url
    options = {"host_cache_ratio": 4.0, "cache_redis_url": url}

    async def main():
        async with await AsyncEngine.start(config(model, **options)) as engine:
            first, _ = await ask(engine)
        async with await AsyncEngine.start(config(model, **options)) as engine:
            again, cached = await ask(engine)
            assert again == first and cached == 192
            assert from_tier(engine) == {"host": 0, "redis": 192}
            server.kill()  # from here on it is away
            server.wait()
            other, cached = await ask(engine, PROMPT[::-1])
            assert cached == 0 and len(other) == 12

    asyncio.run(main())


def test_redis_store_alone(redis_url):
    store = RedisStore(redis_url[0])
    keys, records = [bytes([i]) * 32 for i in range(3)], [bytes([i]) * 500 for i in range(3)]
    assert store.exists(keys) == [False] * 3
    assert store.put(keys[:2], [memoryview(r) for r in records[:2]]) == [True, True]
    assert store.exists(keys) == [True, True, False]
    buffers = [bytearray(500) for _ in keys]
    assert store.get(keys, [memoryview(b) for b in buffers]) == [True, True, False]
    assert buffers[:2] == records[:2]
    assert store.get(keys[:1], [memoryview(bytearray(400))]) == [False]
    store.drop(keys[:1])
    assert store.exists(keys) == [False, True, False]
    store.close()


def test_a_host_cache_that_does_not_fit_stops_the_start(model):
    async def main():
        with pytest.raises(StartError, match="does not fit"):
            await AsyncEngine.start(config(model, host_cache_gib=1e6))
        with pytest.raises(StartError, match="smaller than a page"):
            await AsyncEngine.start(config(model, host_cache_gib=1e-9))

    asyncio.run(main())


def test_flags_that_do_not_fit(model):
    for kw, words in (
        ({"disk_cache_dir": "x"}, "need"),
        ({"host_cache_ratio": 1.0, "host_cache_gib": 1.0}, "one of them"),
        ({"host_cache_ratio": 1.0, "disable_radix_cache": True}, "nothing"),
    ):
        with pytest.raises(StartError, match=words):
            has_tiers(config(model, **kw))
    assert not has_tiers(config(model)) and has_tiers(config(model, host_cache_gib=0.1))
