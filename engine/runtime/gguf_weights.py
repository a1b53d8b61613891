"""Reads tensors of a GGUF file by their Hugging Face names, packed as they are or dequantized.

Runs on: gpu, pool.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as GGML
from gguf.quants import dequantize
from torch import Tensor

from ..api.errors import StartError
from ..models import gguf_map
from ..models.quantization.gguf import GgufBlocks, GgufConfig

if TYPE_CHECKING:
    from ...backends.api import Ops
    from ..models.config import ModelConfig
    from .gguf_file import GGUFFile
    from .weights import Progress, Weights

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 20  # dequantized at once: small enough for a cache, and for short waits
READABLE = {GGML.F32, GGML.F16, GGML.BF16, GGML.Q4_0, GGML.Q4_1, GGML.Q5_0, GGML.Q5_1, GGML.Q8_0,
            GGML.Q2_K, GGML.Q3_K, GGML.Q4_K, GGML.Q5_K, GGML.Q6_K, GGML.IQ4_NL, GGML.IQ4_XS,
            GGML.MXFP4}  # fmt: skip


def keep_packed(file: GGUFFile, config: ModelConfig, ops: Ops) -> ModelConfig:
    """The config with those matrices of the file as quantized that the ops multiply packed.

    Raises:
        StartError: a tensor's name is not known.
    """
    schemes, rest = {}, Counter[str]()
    for name, entry in file.tensors.items():
        kind = entry.type.name
        if len(entry.shape) != 2 or kind in ("F32", "F16", "BF16"):
            continue
        ours = _hf_name(file, name, config)
        if kind in ops.gguf_types and (ours != EMBEDDING or hasattr(ops, "quantized_rows")):
            schemes[ours.removesuffix(".weight")] = GgufBlocks(kind)
        else:
            rest[kind] += 1
    packed = Counter(scheme.gguf_type for scheme in schemes.values())
    for what, counts in (("stay packed", packed), ("are dequantized", rest)):
        if counts:
            types = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
            logger.info("%s: matrices that %s: %s", file.path.name, what, types)
    return replace(config, quantization=GgufConfig(schemes)) if schemes else config


EMBEDDING = "model.embed_tokens.weight"


def from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Tensors in Hugging Face's layout: matrices as `dtype`, vectors (norms, biases) as float32,
    and raw rows, uint8, of those that the config keeps packed (see `keep_packed`).

    Threads dequantize a few tensors ahead, in chunks of rows; nothing but time depends on that.

    Raises:
        StartError: a tensor's name or type is not known.
    """
    names = {
        name: _hf_name(file, name, config)
        for name in file.tensors
        if name != gguf_map.ROPE_FACTORS  # is in the config
    }
    total, done = sum(file.tensors[name].num_bytes for name in names), 0
    num_threads = min(os.cpu_count() or 1, 8)

    def start(name: str) -> tuple[Tensor, list[Future[None]]]:
        quantization = config.quantization
        if isinstance(quantization, GgufConfig) and quantization.scheme(
            names[name].removesuffix(".weight")
        ):
            return _raw(file, name), []
        return _start(file, name, dtype, pool)

    with ThreadPoolExecutor(num_threads) as pool:
        todo = iter(names)
        ahead = deque(start(name) for name in islice(todo, 2 * num_threads))
        for name, ours in names.items():
            tensor, chunks = ahead.popleft()
            for chunk in chunks:
                chunk.result()
            yield ours, gguf_map.undo(ours, config)(tensor)
            ahead.extend(start(later) for later in islice(todo, 1))
            done += file.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)


def _hf_name(file: GGUFFile, name: str, config: ModelConfig) -> str:
    ours = gguf_map.hf_name(name, config.family)
    if ours is None:
        raise StartError(f"{file.path} has a tensor {name!r:.100} that the model lacks")
    return ours


def _raw(file: GGUFFile, name: str) -> Tensor:
    """Raw rows of a matrix, uint8 [rows, row_bytes], in the file's memory."""
    rows = file.tensors[name].shape[0]
    return torch.from_numpy(file.data(name)).view(rows, -1)


def _start(
    file: GGUFFile, name: str, dtype: torch.dtype, pool: ThreadPoolExecutor
) -> tuple[Tensor, list[Future[None]]]:
    """A tensor that the pool is about to fill."""
    entry = file.tensors[name]
    if entry.type not in READABLE:
        raise StartError(f"{file.path} stores {name} as {entry.type.name}, which is not read")
    tensor = torch.empty(entry.shape, dtype=torch.float32 if len(entry.shape) == 1 else dtype)
    rows = tensor.view(-1, entry.shape[-1])
    data = file.data(name).reshape(len(rows), -1)

    def fill(chunk: slice) -> None:
        rows[chunk] = torch.from_numpy(dequantized(data[chunk], entry.type))

    step = max(CHUNK_ELEMENTS // entry.shape[-1], 1)
    chunks = [slice(at, at + step) for at in range(0, len(rows), step)]
    return tensor, [pool.submit(fill, chunk) for chunk in chunks]


def dequantized(data: np.ndarray, kind: GGML) -> np.ndarray:
    """Raw rows uint8 [rows, row_bytes] as float32 [rows, row_length]."""
    if kind is GGML.F32:
        return data.view(np.float32)
    return dequantize(data, kind)
