"""Layers with a sliding window in a KV pool of their own give the tokens that one pool gives."""

import json
import random
import shutil

import pytest

from stoker.engine import Engine, EngineConfig, SamplingParams
from stoker.engine.build import Builder
from stoker.engine.core.configure import split_pool

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
WINDOW = 24


@pytest.fixture(scope="module", params=["upper layer", "all layers"])
def windowed_model(request, tiny_model, tmp_path_factory):
    """The tiny model as a Ministral, with a window on one or both of its layers."""
    folder = tmp_path_factory.mktemp("windowed")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    lower = "full_attention" if request.param == "upper layer" else "sliding_attention"
    config |= {
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": [lower, "sliding_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def schedulers():
    """Of the engines that were made, in order."""
    made, load = [], Builder.load

    def load_and_keep(self):
        scheduler, runner = load(self)
        made.append(scheduler)
        return scheduler, runner

    Builder.load = load_and_keep
    yield made
    Builder.load = load


def config_of(folder, **options):
    options = {"dtype": "float32", "backend": "cpu", "page_size": 4, "check": True} | options
    options = {"max_running_requests": 16, "chunked_prefill_size": 32, "threads": 1} | options
    return EngineConfig(model=str(folder), **options)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(70)]
    alone = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 23, 24, 25, 64, 130)]
    return alone + [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 5, 40)]


@pytest.fixture(scope="module")
def expected(windowed_model, prompts, schedulers):
    """Each prompt alone, in one pool, without a prefix cache."""
    with Engine(config_of(windowed_model, disable_radix_cache=True, window_kv_ratio=1)) as engine:
        assert schedulers[-1].windows is None
        return [engine.generate([p], GREEDY)[0].token_ids for p in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7, "page_size": 1},
        {"kv_tokens": 480, "window_kv_ratio": 0.3},
        {"disable_overlap": True, "disable_radix_cache": True},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_one_pool(
    windowed_model, prompts, expected, schedulers, options
):
    with Engine(config_of(windowed_model, **options)) as engine:
        windows = schedulers[-1].windows
        assert windows is not None and windows.window == WINDOW
        for _ in range(2):  # the second time out of the prefix cache
            done = engine.generate(prompts, GREEDY)
            assert [c.token_ids for c in done] == expected
        if not options:
            assert sum(c.num_cached for c in done) > sum(map(len, prompts)) // 2


def test_the_pools_share_the_memory():
    """Gemma 3 27B: 10 layers see all, 52 a window of 1024; 40 GB, 16 KV heads of 128, bfloat16."""
    layer = 2 * 16 * 128 * 2
    budget, useful = 40 * 10**9, 2 * (256 * 1100 + 8448)
    one_pool = budget // (62 * layer)
    tokens, windowed = split_pool(budget, 10 * layer, 52 * layer, 0.3, 256 * 131072, useful)
    assert tokens * 10 * layer + windowed * 52 * layer <= budget
    assert windowed == pytest.approx(0.3 * tokens, rel=0.01)
    assert tokens > 2.4 * one_pool


def test_what_requests_cannot_use_goes_to_the_other_pool():
    assert split_pool(1000, 1, 1, 0.5, 10**6, 100) == (900, 100)
    assert split_pool(1000, 1, 1, 0.1, 600, 10**6) == (600, 400)
    assert split_pool(1000, 0, 2, 0.4, 10**6, 10**6) == (10**6, 500)
