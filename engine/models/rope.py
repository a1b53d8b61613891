"""Tables of the rotary embedding.

Runs on: gpu.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...backends.api import Rope
from .config import RopeConfig


def rope_table(config: RopeConfig, length: int, device: torch.device) -> Rope:
    """Cosines and sines of the positions 0 to length - 1.

    One table serves every context, so that cached keys stay valid: longrope and dynamic scale by
    the longest context that is served, not by each request's own length.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, length).to(device))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Rope(cos_sin.mul_(config.attention_factor), config.rotary_dim, config.interleaved)


@functools.lru_cache(1)
def query_scales(
    scaling: tuple[float, int], length: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """[length] factors of queries by position, see `ModelConfig`; None where all of them are 1."""
    beta, original = scaling
    if length <= original:
        return None
    positions = torch.arange(length, device=device, dtype=torch.float32)
    return (1 + beta * torch.log1p(torch.floor(positions / original))).to(dtype)


def inverse_frequencies(config: RopeConfig, length: int) -> Tensor:
    """Float32 [rotary_dim / 2] radians per position: theta^(-2i / rotary_dim), then scaled.

    Args:
        length: the longest context, in tokens.

    Sources: linear, Chen et al. 2023; yarn, Peng et al. 2023 (section 3.2); llama3, the Llama 3.1
    release: wavelengths above original / low_freq_factor are divided by factor, those below
    original / high_freq_factor stay, those in between are interpolated; longrope, Ding et al.
    2024: other divisors beyond the original context; dynamic, "NTK-aware" scaling (bloc97 and
    emozilla 2023): beyond the original context theta grows, so that the slowest dimension turns
    as far as it did.
    """
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "linear":
            return frequencies / config.factor
        case "factors":
            return frequencies / torch.tensor(config.factors)
        case "longrope":
            is_long = length > config.original_max_positions
            return frequencies / torch.tensor(config.factors if is_long else config.short_factors)
        case "dynamic" if length > config.original_max_positions:
            stretch = config.factor * length / config.original_max_positions - (config.factor - 1)
            return 1.0 / (config.theta * stretch ** (dim / (dim - 2))) ** exponents
        case "llama3":
            rotations = config.original_max_positions * frequencies / (2 * math.pi)
            low, high = config.low_freq_factor, config.high_freq_factor
            keep = ((rotations - low) / (high - low)).clamp(0, 1)
            return (1 - keep) * frequencies / config.factor + keep * frequencies
        case "yarn":
            # Dimensions that turn more than beta_fast times in the original context keep their
            # frequency, those that turn less than beta_slow times are divided by factor.
            first, last = (
                dim
                * math.log(config.original_max_positions / (beta * 2 * math.pi))
                / (2 * math.log(config.theta))
                for beta in (config.beta_fast, config.beta_slow)
            )
            if config.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            steps = torch.arange(dim // 2, dtype=torch.float32)
            divided = ((steps - first) / (last - first or 0.001)).clamp(0, 1)
            return divided * frequencies / config.factor + (1 - divided) * frequencies
    return frequencies
