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


EMBEDDING = "model.embed_tokens.weight"
JOINED = {kind: pair for pair in gguf_map.JOINED.items() for kind in pair}
ROUTER = "ffn_gate_inp"  # what the choice of experts hangs on is float32, never packed


def keep_packed(file: GGUFFile, config: ModelConfig, ops: Ops) -> ModelConfig:
    """The config with those matrices of the file as quantized that the ops multiply packed.

    Raises:
        StartError: a tensor's name is not known.
    """
    schemes: dict[str, GgufBlocks] = {}
    packed, rest = Counter[str](), Counter[str]()
    for name, ours in _names(file, config).items():
        entry = file.tensors[name]
        kind, is_experts = entry.type.name, len(entry.shape) == 3
        if len(entry.shape) == 1 or ROUTER in name or kind in ("F32", "F16", "BF16"):
            continue
        if (
            kind in ops.gguf_types
            and name.removeprefix("blk.").partition(".")[2] not in JOINED
            and (ours[0] != EMBEDDING or hasattr(ops, "quantized_rows"))
            and not (is_experts and _are_mixed(file, name, ops))
        ):
            schemes |= dict.fromkeys((n.removesuffix(".weight") for n in ours), GgufBlocks(kind))
            packed[kind] += 1
        else:
            rest[kind] += 1
    for what, counts in (("stay packed", packed), ("are dequantized", rest)):
        if counts:
            types = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
            logger.info("%s: matrices that %s: %s", file.path.name, what, types)
    return replace(config, quantization=GgufConfig(schemes)) if schemes else config


def _are_mixed(file: GGUFFile, name: str, ops: Ops) -> bool:
    """Whether a layer's experts cannot be packed: all of them must be, gate and up alike."""
    layer = name.rpartition(".ffn_")[0]
    entries = [file.tensors.get(f"{layer}.{part}_exps.weight") for part in gguf_map.EXPERTS]
    types = ["" if entry is None else entry.type.name for entry in entries]
    return types[0] != types[1] or not set(types) <= ops.gguf_types


def from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Tensors in Hugging Face's layout: matrices as `dtype`, vectors (norms, biases) as float32,
    and raw rows, uint8, of those that the config keeps packed (see `keep_packed`).

    Threads dequantize a few tensors ahead, in chunks of rows; nothing but time depends on that.

    Raises:
        StartError: a tensor's name or type is not known.
    """
    names = _names(file, config)
    packed = config.quantization if isinstance(config.quantization, GgufConfig) else GgufConfig({})
    total, done = sum(file.tensors[name].num_bytes for name in names), 0
    num_threads = min(os.cpu_count() or 1, 8)

    def start(name: str) -> tuple[Tensor, list[Future[None]]]:
        if packed.scheme(names[name][0].removesuffix(".weight")) is not None:
            return _raw(file, name), []
        return _start(file, name, dtype, pool)

    waiting: dict[str, Tensor] = {}  # for the other of their pair
    with ThreadPoolExecutor(num_threads) as pool:
        todo = iter(names)
        ahead = deque(start(name) for name in islice(todo, 2 * num_threads))
        for name, ours in names.items():
            tensor, chunks = ahead.popleft()
            for chunk in chunks:
                chunk.result()
            layer, _, kind = name.removeprefix("blk.").partition(".")
            if kind in JOINED:
                waiting[name] = tensor
                first, second = (f"blk.{layer}.{k}" for k in JOINED[kind])
                if first in waiting and second in waiting:
                    yield ours[0], gguf_map.join(waiting.pop(first), waiting.pop(second))
            else:
                for part, one in zip(ours, tensor if len(ours) > 1 else (tensor,), strict=True):
                    yield part, gguf_map.undo(part, config)(one)
            ahead.extend(start(later) for later in islice(todo, 1))
            done += file.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)


def _names(file: GGUFFile, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The Hugging Face names of all tensors that are read, by their names in the file."""
    names = {}
    for name, entry in file.tensors.items():
        if gguf_map.is_unread(name, config):
            continue
        names[name] = ours = gguf_map.hf_names(name, config)
        if not ours:
            raise StartError(f"{file.path} has a tensor {name!r:.100} that the model lacks")
        if len(ours) > 1 and len(ours) != entry.shape[0]:
            raise StartError(f"{file.path}: {name} is of {entry.shape[0]} parts, not {len(ours)}")
    return names


def _raw(file: GGUFFile, name: str) -> Tensor:
    """Raw rows of a matrix, uint8 [..., rows, row_bytes], in the file's memory."""
    return torch.from_numpy(file.data(name)).view(*file.tensors[name].shape[:-1], -1)


def _start(
    file: GGUFFile, name: str, dtype: torch.dtype, pool: ThreadPoolExecutor
) -> tuple[Tensor, list[Future[None]]]:
    """A tensor that the pool is about to fill."""
    entry = file.tensors[name]
    if entry.type not in READABLE:
        raise StartError(f"{file.path} stores {name} as {entry.type.name}, which is not read")
    is_exact = len(entry.shape) == 1 or ROUTER in name or "_norm" in name or name.endswith(".bias")
    tensor = torch.empty(entry.shape, dtype=torch.float32 if is_exact else dtype)
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
