"""Reads tensors by their Hugging Face names, from safetensors, GGUF, or a random generator.

Runs on: gpu, pool.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
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
    total, done = sum(p.stat().st_size for p in paths), 0
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name.startswith(family.ignored) or name.endswith(DERIVED):
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

    A few are dequantized ahead, by threads; order and values do not depend on that.

    Raises:
        StartError: a tensor's name or type is not known.
    """
    jobs: list[tuple[str, str]] = []
    for name in file.tensors:
        if name == gguf_map.ROPE_FACTORS:
            continue
        ours = gguf_map.hf_name(name, config.family)
        if ours is None:
            raise StartError(f"{file.path} has a tensor {name!r:.100} that the model lacks")
        jobs.append((name, ours))

    def read(name: str, ours: str) -> Tensor:
        undo = gguf_map.undo(ours, config.family, config.num_heads, config.num_kv_heads)
        tensor = undo(dequantized(file, name))
        return tensor if tensor.ndim == 1 else tensor.to(dtype)

    total, done = sum(t.num_bytes for t in file.tensors.values()), 0
    num_threads = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = deque(pool.submit(read, *job) for job in jobs[: 2 * num_threads])
        for job, later in zip_longest(jobs, jobs[2 * num_threads :]):
            yield job[1], ahead.popleft().result()
            if later is not None:
                ahead.append(pool.submit(read, *later))
            done += file.tensors[job[0]].num_bytes
            if progress is not None:
                progress(done, total)
    if progress is not None:
        progress(total, total)


def dequantized(file: GGUFFile, name: str) -> Tensor:
    """A tensor as float32, in its torch shape."""
    entry = file.tensors[name]
    data = file.data(name)
    match entry.type:
        case GGML.F32:
            values = data.view(np.float32)
        case GGML.F16:
            values = data.view(np.float16).astype(np.float32)
        case _:
            try:
                values = dequantize(data.reshape(*entry.shape[:-1], -1), entry.type)
            except NotImplementedError:
                raise StartError(
                    f"{file.path} stores {name} as {entry.type.name}, which cannot be read"
                ) from None
    return torch.from_numpy(np.require(values.reshape(entry.shape), requirements="W"))


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
        if name.endswith("norm.weight"):
            tensor.fill_(0.0 if config.norm_plus_one else 1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        yield name, tensor
