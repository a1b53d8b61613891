"""Layers with a sliding window in a KV pool of their own, on a GPU: same tokens, and what it costs.

    python benchmarks/gpu_windows.py [check] [bench] [--backend cpu]

check: a small model, five of whose six layers have a window, in float32 and bfloat16, with graphs
and without, chunked, out of the prefix cache, in a pool that runs dry: tokens are compared with
those of one pool for all layers. In float32 they must be equal; in bfloat16 near ties may fall
otherwise, so the share of equal answers is shown, beside that of one pool run twice in other
batches. bench: milliseconds a decode step of 256 streams at a context of 1,000, both ways.
Exits with 1 where tokens differ that must not.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.engine import Engine, EngineConfig, SamplingParams

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 256, 256, 384, 6, 8, 2, 64, 128
ONE_POOL = {"window_kv_ratio": 1.0}
BACKEND = "cpu" if "cpu" in sys.argv else "auto"
if BACKEND == "auto":
    import gpu_script  # noqa: F401 (--help, no GPU)


def write_model(folder: Path) -> None:
    """Weights that are large, so that greedy tokens are far apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["MinistralForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "eos_token_id": VOCAB - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, INNER),
        }
        norms += [f"{layer}.{which}_layernorm" for which in ("input", "post_attention")]
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.15
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(weights, str(folder / "model.safetensors"))


def engine_of(folder: Path, **options) -> Engine:
    options = {"max_running_requests": 64, "kv_tokens": 60_000} | options
    return Engine(EngineConfig(model=str(folder), backend=BACKEND, check=True, **options))


def answers(folder: Path, prompts: list[list[int]], times: int = 1, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine_of(folder, **options) as engine:
        for _ in range(times):
            done = engine.generate(prompts, params)
    return [list(c.token_ids) for c in done]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def check(folder: Path) -> bool:
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB - 1) for _ in range(700)]
    lengths = [1, 2, 127, 128, 129, 300, 900, 2000]
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(n)] for n in lengths]
    prompts += [shared + [rng.randrange(VOCAB - 1) for _ in range(n)] for n in (1, 30, 200, 500)]
    is_right = True
    for dtype in ("float32", "bfloat16"):
        one = answers(folder, prompts, dtype=dtype, **ONE_POOL)
        assert len({tuple(answer) for answer in one}) == len(prompts), "answers that say nothing"
        halves = [prompts[::2], prompts[1::2]]
        others = [answers(folder, half, dtype=dtype, **ONE_POOL) for half in halves]
        mixed = [others[i % 2][i // 2] for i in range(len(prompts))]
        print(f"{dtype}: one pool, other batches: {agreement(one, mixed):.0%} equal answers")
        for name, times, options in (
            ("window pool", 1, {}),
            ("out of the cache", 2, {}),
            ("no graphs", 2, {"disable_graphs": True}),
            ("chunks of 200", 2, {"chunked_prefill_size": 200}),
            ("runs dry", 2, {"kv_tokens": 6_000, "chunked_prefill_size": 300}),
        ):
            share = agreement(one, answers(folder, prompts, times, dtype=dtype, **options))
            is_right &= dtype != "float32" or share == 1
            print(f"{dtype}: {name}: {share:.0%} equal answers")
    return is_right


def bench(folder: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(1000)] for _ in range(256)]
    for name, ratio in (("one pool", 1.0), ("window pool", 0.3)):
        options = {"kv_tokens": 400_000, "max_running_requests": 256, "check": False}
        config = EngineConfig(
            model=str(folder), backend=BACKEND, dtype="bfloat16", window_kv_ratio=ratio, **options
        )
        with Engine(config) as engine:
            took = []
            for num_tokens in (2, 202, 202):  # the first computes the prompts, which stay cached
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
                begin = time.perf_counter()
                engine.generate(prompts, params)
                took.append(time.perf_counter() - begin)
        print(f"{name}: {min(took[1:]) / 201 * 1e3:.3f} ms a step of 256 streams")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        is_right = check(Path(name)) if "bench" not in sys.argv or "check" in sys.argv else True
        if "bench" in sys.argv:
            bench(Path(name))
    sys.exit(not is_right)
