"""Tiers on a GPU: copies on a second stream, beside steps (pytest -m gpu tests/tiers)."""

import asyncio
import queue
from array import array

import numpy as np
import pytest
import torch

from stoker.backends import registry
from stoker.backends.api import LayerCache
from stoker.engine import AsyncEngine, SamplingParams
from stoker.engine.api.config import EngineConfig
from stoker.engine.core.copy_orders import Load, Save
from stoker.engine.runtime import kv_copies

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return registry.select("cuda")


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "torch"])
def test_pages_survive_the_way_to_the_host_and_back(backend, monkeypatch, has_kernel):
    """Through staging buffers of two records, with slots that are no neighbours."""
    device = backend.runtime.device
    shape = (20, 16, 4, 64)
    caches = [
        LayerCache(*(torch.randn(shape, device=device).bfloat16() for _ in range(2)))
        for _ in range(3)
    ]
    if not has_kernel:
        monkeypatch.delattr(backend.ops, "copy_pages")
    monkeypatch.setattr(kv_copies, "STAGING_BYTES", 2 * 8192 * 2 * 3 + 5000)
    copies = kv_copies.KVCopies(caches, backend.runtime, backend.ops, 12)
    ended = queue.SimpleQueue()
    copies.start(ended.put)
    pages = np.array([3, 19, 1, 7, 8], np.int32)
    slots = np.array([5, 6, 7, 0, 11], np.int32)
    back = np.array([2, 4, 9, 18, 6], np.int32)
    expected = [[pool[torch.from_numpy(pages).long()].clone() for pool in c] for c in caches]
    copies.submit([Save(1, pages, slots)])
    for cache in caches:
        for pool in cache:
            pool[torch.from_numpy(pages).long().to(device)] = 0  # the next owner, at once
    copies.submit([Load(2, slots, back)])
    assert copies.is_loading
    for cache, kept in zip(copies.layers(), expected, strict=True):
        for pool, content in zip(cache, kept, strict=True):
            assert torch.equal(pool[torch.from_numpy(back).long().to(device)], content)
    assert not copies.is_loading
    assert [ended.get(timeout=10).order_id for _ in range(2)] == [1, 2]
    copies.close()


@pytest.mark.parametrize("step_load_bytes", [1 << 20, 1 << 30], ids=["pieces", "whole"])
def test_answers_from_host_and_disk(backend, tiered, tmp_path, monkeypatch, step_load_bytes):
    """With streams beside them, and graphs; what was computed in equal chunks is equal."""
    monkeypatch.setattr("stoker.engine.build.STEP_LOAD_BYTES", step_load_bytes)
    model = tmp_path / "model"
    model.mkdir()
    tiered.load("benchmarks/tiers.py").make_model(model, "smollm2-135m", 4096)
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        backend="cuda",
        kv_tokens=8192,
        max_running_requests=8,
        host_cache_ratio=4.0,
        disk_cache_dir=str(tmp_path / "pages"),
        check=True,
    )
    prompt = array("i", [(7 * i + i // 13) % 4000 for i in range(2000)])

    async def ask(engine, prompt, max_tokens=16):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens = []
        async for output in engine.generate(prompt, params):
            tokens += output.token_ids
        return tokens, output.num_cached

    async def main():
        async with await AsyncEngine.start(config) as engine:
            await ask(engine, prompt)
            expected = await ask(engine, prompt)
            assert expected[1] == 1984
            for i in range(5):
                await ask(engine, array("i", [(3 * j + 50 * i) % 4000 for j in range(2500)]))
            streams = [
                asyncio.create_task(ask(engine, array("i", [i, 1, 2]), 400)) for i in range(4)
            ]
            await asyncio.sleep(0.2)
            _, cached = await ask(engine, prompt)
            assert cached == 1984 and dict(engine.stats.tiers.cached_tokens)["host"] == 1984
            assert all(len(tokens) == 400 for tokens, _ in await asyncio.gather(*streams))
            assert await ask(engine, prompt) == expected
        async with await AsyncEngine.start(config) as engine:
            _, cached = await ask(engine, prompt)
            assert cached == 1984 and dict(engine.stats.tiers.cached_tokens)["disk"] == 1984
            assert await ask(engine, prompt) == expected  # from the device, as then

    asyncio.run(main())
