"""Intel's and vLLM's package of kernels, vllm-xpu-kernels: whether it is here, and what we call.

Its libraries register torch ops when they are imported. Everything is passed by keyword, and each
op's schema, each function's signature is compared with our keywords when the backend is chosen: an
unknown version is a reason not to use it, not a wrong call later.

Runs on: gpu.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from .. import vendors

DISTRIBUTION, MODULE = "vllm-xpu-kernels", "vllm_xpu_kernels"
LIBRARIES = ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")
OLDEST = (0, 1, 12)


class Callable:
    """An op of torch.ops or a function of the package, called by these keywords alone.

    Args:
        place: the library of an op, or the module of a function.
        keywords: all that we ever pass.
    """

    def __init__(self, name: str, place: str, keywords: str):
        self.name, self.place = name, place
        self.keywords = tuple(keywords.split())
        self.is_op = not place.startswith(MODULE)

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)

    @cached_property
    def function(self) -> Any:
        """As registered or imported. Raises AttributeError or ImportError."""
        if self.is_op:
            return getattr(getattr(torch.ops, self.place), self.name)
        return getattr(importlib.import_module(self.place), self.name)

    def reason_against(self) -> str | None:
        """Why calls of it would fail, or None."""
        try:
            if self.is_op:
                known = self.function.default._schema.arguments
                names = {a.name for a in known}
                required = {a.name for a in known if not a.has_default_value()}
            else:
                parameters = inspect.signature(self.function).parameters
                names = set(parameters)
                required = {n for n, p in parameters.items() if p.default is p.empty}
        except (AttributeError, ImportError, RuntimeError) as error:
            return f"{DISTRIBUTION} {version()} is not one that is known: {error}"
        if wrong := vendors.wrong_keyword(self.keywords, names, required):
            return f"{DISTRIBUTION} {version()} is not one that is known: {self.name}, {wrong}"
        return None


rms_norm = Callable("rms_norm", "_C", "result input weight epsilon")
fused_add_rms_norm = Callable("fused_add_rms_norm", "_C", "input residual weight epsilon")
silu_and_mul = Callable("silu_and_mul", "_C", "result input")
gelu_tanh_and_mul = Callable("gelu_tanh_and_mul", "_C", "out input")
rotary_embedding = Callable(
    "rotary_embedding", "_C", "positions query key head_size cos_sin_cache is_neox"
)
reshape_and_cache_flash = Callable(
    "reshape_and_cache_flash",
    "_C_cache_ops",
    "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
)
topk_softmax = Callable(
    "topk_softmax",
    "_moe_C",
    "topk_weights topk_indices token_expert_indices gating_output renormalize bias is_padding",
)
flash_attn_varlen_func = Callable(
    "flash_attn_varlen_func",
    f"{MODULE}.flash_attn_interface",
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale causal window_size "
    "block_table out k_descale v_descale s_aux",
)
XpuFusedMoe = Callable(
    "XpuFusedMoe",
    f"{MODULE}.fused_moe_interface",
    "w13 w13_scales w13_bias w2 w2_scales w2_bias n_experts_per_token activation num_experts",
)

CALLABLES = tuple(value for value in globals().values() if isinstance(value, Callable))


def version() -> str:
    """As installed."""
    return vendors.version(DISTRIBUTION)


def reason_against(wanted: Iterable[Callable] = CALLABLES) -> str | None:
    """Why these cannot be called here, in one line; None if they can."""
    if importlib.util.find_spec(MODULE) is None:
        return f"{DISTRIBUTION} is not installed"
    numbers = tuple(int(n) for n in re.findall(r"\d+", version())[:3])
    if numbers and numbers < OLDEST:
        return f"{DISTRIBUTION} {version()} is older than {'.'.join(map(str, OLDEST))}"
    try:
        for library in LIBRARIES:
            importlib.import_module(f"{MODULE}.{library}")
    except (ImportError, OSError) as error:  # built for another torch, or oneAPI is not there
        first = next(iter(str(error).splitlines()), "")
        found = f"{DISTRIBUTION} {version()} cannot be imported beside torch {torch.__version__}"
        return f"{found}: {first}"
    return next((reason for c in wanted if (reason := c.reason_against())), None)
