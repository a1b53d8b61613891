"""From the configuration to a scheduler: what serves a model and what simulates it do the same.

Runs on: any (pure).
"""

from ..api.config import EngineConfig, parse_weights
from . import eviction, policy
from .budget import StepCost
from .fairness import FairShares
from .scheduler import Scheduler
from .tiers import Tiers

CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192
GPU_STEP_S = 0.036
BACKLOG_STRETCH = 4.0


def chunk_tokens(config: EngineConfig, *, is_cpu: bool) -> int:
    """The most new prompt tokens a step."""
    return config.chunked_prefill_size or (CPU_STEP_TOKENS if is_cpu else GPU_STEP_TOKENS)


def split_pool(
    budget: int, full_bytes: int, window_bytes: int, ratio: float, most: int, useful: int
) -> tuple[int, int]:
    """Tokens of the KV pools of layers that see all, and of those with a window.

    Args:
        budget: bytes for both. full_bytes, window_bytes: that a token takes in either.
        ratio: of the second to the first.
        most: tokens of the first that can be of use. useful: the same of the second.
    """
    tokens = int(budget / (full_bytes + ratio * window_bytes)) if full_bytes else most
    windowed = min(int(ratio * tokens), useful)
    if full_bytes:
        tokens = min((budget - windowed * window_bytes) // full_bytes, most)
    return tokens, min((budget - tokens * full_bytes) // window_bytes, useful)


def eviction_policy(config: EngineConfig, page_size: int) -> eviction.EvictionPolicy:
    """Which cached prefix is forgotten first."""
    if config.radix_eviction_policy == "tlru":
        return eviction.tlru(config.tlru_threshold, config.tlru_next_prompt, page_size)
    return eviction.POLICIES[config.radix_eviction_policy]


def make_scheduler(
    config: EngineConfig,
    *,
    kv_tokens: int,
    page_size: int,
    max_model_len: int,
    is_cpu: bool,
    cost: StepCost | None = None,
    tiers: Tiers | None = None,
    num_snapshots: int | None = None,
    window: int | None = None,
    num_window_pages: int = 0,
) -> Scheduler:
    """The scheduler of one engine.

    Args:
        kv_tokens: size of the KV pool; the last part of a page is left out.
        cost: what is known of a step's time already.
        tiers: the cache tiers below the device, if any.
        num_snapshots: of recurrent states, for a model that has some.
        window, num_window_pages: for a model whose layers with a window have a pool of their own.
    """
    max_step_s = None if is_cpu else GPU_STEP_S
    if config.max_step_ms is not None:
        max_step_s = config.max_step_ms / 1e3
    return Scheduler(
        num_pages=1 + kv_tokens // page_size,
        page_size=page_size,
        max_running=config.max_running_requests,
        max_step_tokens=chunk_tokens(config, is_cpu=is_cpu) + config.max_running_requests,
        max_model_len=max_model_len,
        use_radix=not config.disable_radix_cache,
        conservativeness=config.schedule_conservativeness,
        policy=policy.POLICIES[config.schedule_policy],
        eviction=eviction_policy(config, page_size),
        preemption_gap=config.priority_preemption,
        shares=FairShares(parse_weights(config.client_weights)) if config.fair_clients else None,
        seed=config.seed,
        tells_cache=config.cache_events,
        max_step_s=max_step_s,
        backlog_stretch=BACKLOG_STRETCH if config.max_step_ms is None else 1.0,
        prefill_decode_interval=config.prefill_decode_interval,
        cost=cost,
        tiers=tiers,
        num_snapshots=num_snapshots,
        window=window,
        num_window_pages=num_window_pages,
        queue_timeout_s=config.queue_timeout,
    )
