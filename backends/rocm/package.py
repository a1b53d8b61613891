"""AMD's package of kernels: whether it is here, and the functions of it that we call.

The distribution is `amd-aiter`, the module `aiter`; the `aiter` of the package index is something
else, and is told apart without being imported. Signatures grow parameters in the middle from one
version to the next, so everything is passed by keyword, and each function is compared with its
signature when the backend is chosen. Importing the package compiles a module with hipcc where that
was not done yet, and so does the first call of most functions.

Runs on: gpu.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .. import vendors

DISTRIBUTION = "amd-aiter"
MARK = "ops/mha.py"  # a file that the other `aiter` does not have


class Function:
    """A function of the package, called by these keywords alone.

    Args:
        name: in its module. modules: where it is, in newer versions first.
        keywords: all that we ever pass.
    """

    def __init__(self, name: str, modules: str | tuple[str, ...], keywords: str):
        self.name = name
        self.modules = (modules,) if isinstance(modules, str) else modules
        self.keywords = tuple(keywords.split())

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)

    @cached_property
    def function(self) -> Any:
        """As imported. Raises ImportError."""
        for module in self.modules:
            try:
                return getattr(importlib.import_module(module), self.name)
            except AttributeError:
                continue
            except ModuleNotFoundError as error:
                if error.name is None or not module.startswith(error.name):
                    raise
        raise ImportError(f"it has no {self.name}")

    def reason_against(self) -> str | None:
        """Why calls of it would fail, or None."""
        try:
            known = inspect.signature(self.function).parameters
            if any(p.kind is p.VAR_KEYWORD for p in known.values()):  # torch has its schema
                op = getattr(torch.ops.aiter, self.name).default
                required = {a.name for a in op._schema.arguments if not a.has_default_value()}
                names = {a.name for a in op._schema.arguments}
            else:
                required = {n for n, p in known.items() if p.default is p.empty}
                names = set(known)
        except (ImportError, AttributeError) as error:
            return f"aiter {version()} is not one that is known: {error}"
        if wrong := vendors.wrong_keyword(self.keywords, names, required):
            return f"aiter {version()} is not one that is known: {self.name} and {wrong}"
        return None


unified_attention = Function(
    "unified_attention",
    ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention"),
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size "
    "block_table softcap q_descale k_descale v_descale sinks",
)
paged_attention_v1 = Function(
    "paged_attention_v1",
    "aiter.ops.attention",
    "out workspace_buffer query key_cache value_cache scale block_tables cu_query_lens "
    "context_lens max_context_len alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap "
    "k_scale v_scale sliding_window",
)
_MLA = "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale"
mla_decode_fwd = Function("mla_decode_fwd", "aiter.mla", _MLA)
mla_prefill_fwd = Function("mla_prefill_fwd", "aiter.mla", _MLA)
rmsnorm2d_fwd = Function("rmsnorm2d_fwd", "aiter.ops.rmsnorm", "input weight epsilon")
rmsnorm2d_fwd_with_add = Function(
    "rmsnorm2d_fwd_with_add",
    "aiter.ops.rmsnorm",
    "out input residual_in residual_out weight epsilon",
)
silu_and_mul = Function("silu_and_mul", "aiter.ops.activation", "out input")
gelu_tanh_and_mul = Function("gelu_tanh_and_mul", "aiter.ops.activation", "out input")
rope_cached_positions_2c_fwd_inplace = Function(
    "rope_cached_positions_2c_fwd_inplace",
    "aiter.ops.rope",
    "input_x input_y cos sin positions rotate_style reuse_freqs_front_part nope_first",
)
reshape_and_cache_flash = Function(
    "reshape_and_cache_flash",
    "aiter.ops.cache",
    "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
)
topk_softmax = Function(
    "topk_softmax",
    "aiter.ops.moe_op",
    "topk_weights topk_indices token_expert_indices gating_output need_renorm",
)
grouped_topk = Function(
    "grouped_topk",
    "aiter.ops.topk",
    "gating_output topk_weights topk_ids num_expert_group topk_group need_renorm is_softmax "
    "routed_scaling_factor",
)
biased_grouped_topk = Function(
    "biased_grouped_topk",
    "aiter.ops.topk",
    "gating_output correction_bias topk_weights topk_ids num_expert_group topk_group need_renorm "
    "routed_scaling_factor",
)
fused_moe = Function(
    "fused_moe",
    "aiter.fused_moe",
    "hidden_states w1 w2 topk_weight topk_ids quant_type w1_scale w2_scale",
)
shuffle_weight = Function("shuffle_weight", "aiter.ops.shuffle", "x layout")
per_token_quant_hip = Function("per_token_quant_hip", "aiter.ops.quant", "x quant_dtype")
per_group_quant_hip = Function("per_group_quant_hip", "aiter.ops.quant", "x quant_dtype group_size")
gemm_a8w8 = Function("gemm_a8w8", "aiter.ops.gemm_op_a8w8", "XQ WQ x_scale w_scale dtype")
gemm_a8w8_bpreshuffle = Function(
    "gemm_a8w8_bpreshuffle", "aiter.ops.gemm_op_a8w8", "XQ WQ x_scale w_scale dtype"
)
gemm_a8w8_blockscale = Function(
    "gemm_a8w8_blockscale", "aiter.ops.gemm_op_a8w8", "XQ WQ x_scale w_scale dtype"
)

FUNCTIONS = tuple(value for value in globals().values() if isinstance(value, Function))


def quant_type(name: str) -> Any:
    """A member of the package's QuantType: "No", "per_Token", "per_128x128"."""
    return getattr(importlib.import_module("aiter").QuantType, name)


def version() -> str:
    """As installed; a build from source may have another distribution's name."""
    return vendors.version(DISTRIBUTION)


def reason_against(functions: Iterable[Function] = FUNCTIONS) -> str | None:
    """Why these cannot be called here, in one line; None if they can."""
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return f"{DISTRIBUTION} is not installed"
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((place / MARK).exists() for place in places):
        return (
            "the installed package `aiter` is not AMD's, which the package index calls "
            f"{DISTRIBUTION}: pip uninstall aiter, then pip install {DISTRIBUTION}"
        )
    try:
        importlib.import_module("aiter")
    except Exception as error:  # whatever its build of a module raises
        first = next(iter(str(error).splitlines()), "")
        return f"aiter {version()} cannot be imported: {type(error).__name__}: {first}"
    return next((reason for f in functions if (reason := f.reason_against())), None)
