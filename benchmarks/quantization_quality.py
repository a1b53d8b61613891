"""What --quantization costs in quality: agreement with the float32 model, and KL divergence.

    python benchmarks/quantization_quality.py [--model smollm2-135m gemma3-270m] [--limit 1000]

Of the recorded answers of a float32 model (tests/data): at how many tokens the same one is
likeliest, and the mean KL divergence from float32, in nats a token; with a star, int8 and int4 in
the forms that GPUs have. The weights come out of GGUF files of 4 bits (Q4_1, Q4_K_M), dequantized:
what is measured is rounding them once more (the CPU's int4 is SmolLM2's own blocks).

Runs on: any (pure).
"""

import argparse
import json
import time
from dataclasses import replace

import torch
from gguf_packed import ANSWERS, DATA, log_probs

from stoker.backends import registry
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.quantization.config import online
from stoker.engine.runtime import gguf_weights, model_files

SCHEMES = (None, "int8", "int4", "fp8", "int8*", "int4*")
DTYPES = (torch.float32, torch.bfloat16)


def load(name: str, scheme: str | None, dtype: torch.dtype) -> Decoder:
    files = model_files.resolve(name)
    config = files.config
    device, ops = torch.device("cpu"), registry.select("cpu").ops
    if scheme is not None:  # with a star as a GPU has it, else as the CPU does
        types = frozenset() if scheme.endswith("*") else ops.gguf_types
        config = replace(config, quantization=online(scheme.removesuffix("*"), types))
    model = Decoder(config, ops, device, dtype, max_positions=2048)
    model.load(gguf_weights.from_gguf(files.gguf, config, dtype))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=ANSWERS, default=list(ANSWERS))
    parser.add_argument("--limit", type=int, default=1000, help="answers of each model")
    options = parser.parse_args()
    for name in options.model:
        items = json.loads((DATA / ANSWERS[name]).read_text())["items"][: options.limit]
        texts = [i["prompt_ids"] + i["output_ids"][:-1] for i in items]
        firsts = [len(i["prompt_ids"]) - 1 for i in items]
        answers = [torch.tensor(i["output_ids"]) for i in items]
        total = sum(map(len, answers))
        exact: list[torch.Tensor] = []
        for dtype in DTYPES:
            for scheme in SCHEMES:
                start = time.perf_counter()
                model = load(name, scheme, dtype)
                load_s = time.perf_counter() - start
                rows = [log_probs(model, dtype, t, f) for t, f in zip(texts, firsts, strict=True)]
                exact = exact or rows
                equal = sum(
                    int((r.argmax(-1) == a).sum()) for r, a in zip(rows, answers, strict=True)
                )
                kl = sum(float((e.exp() * (e - r)).sum()) for e, r in zip(exact, rows, strict=True))
                kind = f"{str(dtype).removeprefix('torch.')}, {scheme or 'as it is'}"
                share = f"{equal} of {total} ({equal / total:.1%})"
                print(f"{name:13s} {kind:19s} {share:22s} KL {kl / total:.5f}  load {load_s:.1f} s")


if __name__ == "__main__":
    main()
