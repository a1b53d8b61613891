"""Random blocks of every GGUF type that is multiplied packed."""

import numpy as np
import torch

from stoker.backends.api import QuantizedWeight
from stoker.backends.gguf_blocks import BLOCK_TYPES

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_gguf(gguf_type: str, num_out: int, num_in: int, seed: int = 0) -> QuantizedWeight:
    """Random codes, with float16 scales of both signs, of sizes that real weights have."""
    rng = np.random.default_rng(seed)
    block = BLOCK_TYPES[gguf_type]
    num_blocks = num_in // block.size
    raw = rng.integers(0, 256, (num_out, num_blocks, block.num_bytes), dtype=np.uint8)
    scale = 4.0 / num_in**0.5 / 2**block.bits / (32 if gguf_type.endswith("K") else 1)
    for at in HALVES.get(gguf_type, (0,)):
        scales = rng.normal(scale=scale, size=(num_out, num_blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    rows = torch.from_numpy(raw.reshape(num_out, -1))
    return QuantizedWeight("gguf", rows, (num_out, num_in), gguf_type=gguf_type)
