"""Reads tensors by their Hugging Face names, from safetensors or a random generator.

Runs on: gpu, pool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..api.errors import StartError
from ..models.registry import FAMILIES

if TYPE_CHECKING:
    from ..models.config import ModelConfig

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Weights = Iterator[tuple[str, Tensor]]

# Tensors of old checkpoints that hold nothing a config does not say.
DERIVED = ("rotary_emb.inv_freq", "masked_bias")
CODE_DEVIATION = 16  # of dummy codes of 8 bits, so that none is too large
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


def dummy(
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Weights:
    """Random weights, near normal (0, 0.02), made on the device; norms do not scale.

    Args:
        shapes, dtypes: `Decoder.shapes` and `Decoder.dtypes`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, device=device, dtype=(dtypes or {}).get(name, dtype))
        if "norm" in name and name.endswith(".weight"):
            tensor.fill_(0.0 if config.norm_plus_one else 1.0)
        elif "_scale" in name or name.endswith(".scales"):
            tensor.fill_(120 if tensor.dtype == torch.uint8 else 0.02 / CODE_DEVIATION)
        elif tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.normal_(0, 0.02, generator=generator)
        elif tensor.dtype in (torch.uint8, torch.int32):  # several codes
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        else:
            codes = torch.empty(shape, device=device, dtype=dtype)
            tensor.copy_(codes.normal_(0, CODE_DEVIATION, generator=generator))
        yield name, tensor
