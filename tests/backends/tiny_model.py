"""A tiny Llama whose greedy tokens must be the same on any backend's ops."""

import importlib.util
from pathlib import Path

import torch

from stoker.backends.api import LayerCache
from stoker.backends.cpu.torch_ops import TorchOps
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import parse_config

PROMPTS = [list(range(3, 24)), [7], list(range(60, 80))]


def says_the_same(ops) -> bool:
    """Whether float16 on these ops and float32 in plain torch give the same tokens."""
    folder = Path(__file__).parents[1] / "models"
    spec = importlib.util.spec_from_file_location("models_loop", folder / "conftest.py")
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    shape = {**helper.SHAPE, "num_hidden_layers": 2, "head_dim": 64}
    config = parse_config({"architectures": ["LlamaForCausalLM"], **shape})
    said = []
    for provider, dtype in ((TorchOps(), torch.float32), (ops, torch.float16)):
        model = Decoder(config, provider, torch.device("cpu"), dtype)
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: torch.randn(s, generator=generator) / s[-1] ** 0.5
            for name, s in model.shapes.items()
        }
        norms_are_positive = {n: x.abs() if x.dim() == 1 else x for n, x in weights.items()}
        model.load((name, x.to(dtype)) for name, x in norms_are_positive.items())
        loop = helper.Loop(model, 3, 64, 16)
        loop.caches = [LayerCache(*(x.to(dtype) for x in cache)) for cache in loop.caches]
        said.append(loop.greedy(PROMPTS, [4, 4, 4], chunk=16))
    return said[0] == said[1]
