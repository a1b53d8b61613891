"""Keys and values in fp8: what a model does with them, and with a checkpoint's scales."""

import json

import pytest
import torch

from stoker.backends.api import LayerCache
from stoker.backends.reference import ReferenceOps
from stoker.engine.api.config import EngineConfig
from stoker.engine.api.errors import StartError
from stoker.engine.build import Builder
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import parse_config
from stoker.engine.runtime import kv_buffers

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
SCALES = {"k_scale": 0.02, "k_proj.k_scale": 0.02, "v_scale": 0.01, "v_proj.v_scale": 0.01}


class Ops(ReferenceOps):
    float32_residual = False


@pytest.fixture
def make(shape):
    """Makes a model: make(kv_dtype, names and values of the first layer's scales)."""

    def model(kv_dtype=None, scales=()):
        config = parse_config({"architectures": ["LlamaForCausalLM"], **shape})
        model = Decoder(config, Ops(), CPU, torch.float32, None, kv_dtype)
        gen = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(size, generator=gen) * 0.15 if len(size) == 2 else torch.ones(size)
            for name, size in model.shapes.items()
        }
        layer = "model.layers.0.self_attn."
        model.load([*weights.items(), *((layer + n, torch.tensor(SCALES[n])) for n in scales)])
        return model

    return model


def test_a_model_over_an_fp8_cache(make, loop):
    """Whole prompts and single tokens; logits within the rounding of keys and values."""
    prompts = [[3, 9, 27, 81, 243, 129, 87], [5, 25]]
    logits = []
    for model in (make(), make(FP8, ["k_scale", "v_scale"]), make(FP8)):
        run = loop(model, 2, 32)
        if model.attention_specs[0].kv_dtype is not None:
            run.caches = [LayerCache(c.k.to(FP8), c.v.to(FP8)) for c in run.caches]
        steps = [run.step(list(enumerate(prompts))), run.step([(0, [11]), (1, [12])])]
        logits.append(torch.cat([x for step in steps for x in step]))
    want, scaled, plain = logits
    for got in (scaled, plain):
        assert 1e-3 < float((got - want).norm() / want.norm()) < 0.12
    assert not torch.equal(scaled, plain)


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_of_a_checkpoint(make, names):
    def first_and_last(model):
        specs = model.attention_specs
        return [(s.k_scale, s.v_scale) for s in (specs[0], specs[-1])]

    scaled = pytest.approx((0.02, 0.01))
    assert first_and_last(make(FP8, names)) == [scaled, (1.0, 1.0)]
    wider = pytest.approx((0.02 * 448 / 240, 0.01 * 448 / 240))  # its range is smaller
    assert first_and_last(make(torch.float8_e4m3fnuz, names)) == [wider, (1.0, 1.0)]
    assert first_and_last(make(None, names)) == [(1.0, 1.0)] * 2


def test_a_scale_that_is_none(make, monkeypatch):
    monkeypatch.setitem(SCALES, "k_scale", 0.0)
    with pytest.raises(StartError, match=r"k_scale is 0\.0"):
        make(FP8, ["k_scale"])


def test_a_pool_holds_twice_the_tokens(make):
    kv_spec = make().kv_spec
    assert kv_buffers.bytes_per_token(kv_spec, torch.bfloat16) == 2 * kv_buffers.bytes_per_token(
        kv_spec, FP8
    )
    pools = kv_buffers.allocate(kv_spec, 3, 16, FP8, CPU)
    num_bytes = sum(pool.nbytes for cache in pools for pool in cache)
    assert num_bytes == 3 * 16 * kv_buffers.bytes_per_token(kv_spec, FP8)


def test_the_cpu_has_no_fp8_cache(tmp_path, shape):
    fields = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **shape}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(tmp_path), backend="cpu", load_format="dummy",
                          kv_cache_dtype="fp8_e4m3")  # fmt: skip
    builder = Builder(config)
    builder.find_files()
    with pytest.raises(StartError, match=r"--kv-cache-dtype fp8_e4m3: .* does not compute in fp8"):
        builder.load()
