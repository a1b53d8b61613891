"""How much the KV pools hold, and how many snapshots of recurrent states there are.

Runs on: gpu.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from .api.config import EngineConfig
from .api.errors import StartError
from .core.configure import split_pool
from .core.windows import pages_of_window
from .runtime import kv_buffers

if TYPE_CHECKING:
    import torch

    from ..backends.api import DeviceRuntime
    from .models.decoder import Decoder

log = logging.getLogger("stoker")

CPU_POOL_SHARE = 0.25  # of the free memory: the machine has other uses for the rest
GRAPH_BYTES = 1 << 30  # captured graphs, cuBLAS workspaces, fragments
MIN_TOKENS = 256


class PoolSizes(NamedTuple):
    """What there is room for.

    Attributes:
        tokens: of the KV pool. snapshots: of recurrent states.
        window_tokens: of the pool of layers with a window; 0 where all layers share one.
    """

    tokens: int
    snapshots: int = 0
    window_tokens: int = 0


def windows_of(model: Decoder) -> list[int | None]:
    """The window of each layer with a KV pool, in tokens."""
    return [getattr(spec, "window", None) for spec in model.attention_specs]


def pool_sizes(
    config: EngineConfig,
    runtime: DeviceRuntime,
    model: Decoder,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    max_model_len: int,
    chunk: int,
    max_step_tokens: int,
    window: int | None,
    working_bytes: int,
) -> PoolSizes:
    """What KV pool and snapshots hold, with room left for a step's working memory.

    Args:
        chunk: the most prompt tokens in a step. max_step_tokens: with those that decode.
        window: in tokens, of the layers that are to have a pool of their own, if any.
        working_bytes: that a step takes beside weights and pools.

    Raises:
        StartError: there is room for fewer than MIN_TOKENS.
    """
    per_state = kv_buffers.bytes_per_state(model.state_spec, dtype)
    snapshots = config.state_snapshots
    if not per_state or config.disable_radix_cache:
        snapshots = 0
    elif snapshots is None:
        snapshots = 2 * config.max_running_requests
    windowed = useful = least = 0
    if window is not None:
        least = pages_of_window(window, page_size) * page_size
        # As much as all requests that may run hold, and once more for the prefix cache.
        useful = 2 * (config.max_running_requests * least + max_step_tokens)
        least += chunk
    if config.kv_tokens is not None:
        windowed = min(int(config.kv_tokens * config.window_kv_ratio), useful)
        return PoolSizes(config.kv_tokens, snapshots, windowed if windowed > least else 0)
    free, total = runtime.memory()
    if runtime.device.type == "cpu":
        budget = int(free * CPU_POOL_SHARE)
    else:
        reserve = max(int(total * (1 - config.mem_fraction)), working_bytes + GRAPH_BYTES)
        budget = free - reserve
    budget -= (config.max_running_requests + 1) * per_state
    if per_state and config.state_snapshots is None:
        snapshots = min(snapshots, max(budget, 0) // 4 // per_state)
    budget -= snapshots * per_state
    per_token = kv_buffers.bytes_per_token(model.kv_spec, kv_dtype)
    most = config.max_running_requests * max_model_len
    tokens = min(budget // per_token, most)
    if window is not None:
        shapes = zip(model.kv_spec, windows_of(model), strict=True)
        full = kv_buffers.bytes_per_token([s for s, own in shapes if not own], kv_dtype)
        ratio = config.window_kv_ratio
        sizes = split_pool(budget, full, per_token - full, ratio, most, useful)
        if sizes[1] > least:
            tokens, windowed = sizes
    if tokens < MIN_TOKENS:
        others, flags = "", "--mem-fraction, or --kv-tokens"
        if per_state:
            others = f" and a request's state {per_state / 2**20:.1f} MiB"
            flags = "--mem-fraction, or fewer --max-running-requests or --state-snapshots"
        raise StartError(
            f"no memory for the KV cache: {free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB "
            f"are free, a token takes {per_token / 2**10:.0f} KiB{others}; a smaller model, a "
            f"higher {flags} may help"
        )
    return PoolSizes(tokens, snapshots, windowed)


def warn_of_idle_flags(config: EngineConfig, sizes: PoolSizes) -> None:
    """Say which flags about the pools change nothing."""
    if config.state_snapshots and not sizes.snapshots:
        log.warning("--state-snapshots does nothing: no recurrent layers, or no prefix cache")
    default = EngineConfig.model_fields["window_kv_ratio"].default
    if config.window_kv_ratio not in (default, 1.0) and not sizes.window_tokens:
        log.warning(
            "--window-kv-ratio does nothing: no windows, a host cache or recurrent states "
            "beside them, or too small a pool to divide"
        )
