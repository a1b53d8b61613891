"""Reads tensors by their Hugging Face names, from safetensors, GGUF, or a random generator.

Runs on: gpu, pool.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as GGML
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..api.errors import StartError
from ..models import gguf_map
from ..models.registry import FAMILIES
from .gguf_file import GGUFFile

if TYPE_CHECKING:
    from ..models.config import ModelConfig

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Weights = Iterator[tuple[str, Tensor]]

# Tensors of old checkpoints that hold nothing a config does not say.
DERIVED = ("rotary_emb.inv_freq", "masked_bias")
CHUNK_ELEMENTS = 1 << 20  # dequantized at once: small enough for a cache, and for short waits
READABLE = {GGML.F32, GGML.F16, GGML.BF16, GGML.Q4_0, GGML.Q4_1, GGML.Q5_0, GGML.Q5_1, GGML.Q8_0,
            GGML.Q2_K, GGML.Q3_K, GGML.Q4_K, GGML.Q5_K, GGML.Q6_K, GGML.IQ4_NL, GGML.IQ4_XS,
            GGML.MXFP4}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check_safetensors(path: Path) -> None:
    """Compare a file's size with what its header says.

    Raises:
        StartError: it is no safetensors file, or it is truncated.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(header_bytes))
        end = max(
            (v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise StartError(f"{path} is no safetensors file, or truncated ({error})") from None
    if 8 + header_bytes + end != size:
        raise StartError(
            f"{path} has {size} bytes, but its header says {8 + header_bytes + end}; "
            "is it truncated?"
        )


def from_safetensors(
    paths: list[Path], config: ModelConfig, progress: Progress | None = None
) -> Weights:
    """Tensors as they are saved, memory-mapped; those that the family leaves unread are skipped.

    Raises:
        StartError: a file cannot be read.
    """
    family = FAMILIES[config.family]
    unread = family.ignored + config.unread
    total, done = sum(p.stat().st_size for p in paths), 0
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name.startswith(unread) or name.endswith(DERIVED):
                        continue
                    if name == "lm_head.weight" and config.tie_word_embeddings:
                        continue
                    tensor = file.get_tensor(name)
                    yield _renamed(name, family.renamed), tensor
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
        except SafetensorError as error:
            raise StartError(f"{path}: {error}") from None
    if progress is not None:
        progress(total, total)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for prefix, ours in renamed.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Tensors in Hugging Face's layout, matrices as `dtype`, vectors (norms, biases) as float32.

    Threads dequantize a few tensors ahead, in chunks of rows; nothing but time depends on that.

    Raises:
        StartError: a tensor's name or type is not known.
    """
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == gguf_map.ROPE_FACTORS:  # is in the config
            continue
        ours = gguf_map.hf_name(name, config.family)
        if ours is None:
            raise StartError(f"{file.path} has a tensor {name!r:.100} that the model lacks")
        names[name] = ours
    total, done = sum(file.tensors[name].num_bytes for name in names), 0
    num_threads = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(num_threads) as pool:
        todo = iter(names)
        ahead = deque(_start(file, name, dtype, pool) for name in islice(todo, 2 * num_threads))
        for name, ours in names.items():
            tensor, chunks = ahead.popleft()
            for chunk in chunks:
                chunk.result()
            yield ours, gguf_map.undo(ours, config)(tensor)
            ahead.extend(_start(file, later, dtype, pool) for later in islice(todo, 1))
            done += file.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)


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
        return data.view(np.float32).copy()  # torch wants memory that can be written to
    return dequantize(data, kind)


def dummy(
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> Weights:
    """Random weights, normal (0, 0.02), made on the device; norms do not scale.

    Args:
        shapes: `Decoder.shapes`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, device=device, dtype=dtype)
        if "norm" in name and name.endswith(".weight"):
            tensor.fill_(0.0 if config.norm_plus_one else 1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        yield name, tensor
