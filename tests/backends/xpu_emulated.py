"""A pytest plugin: the contract's checks on vllm-xpu-kernels, its native ops in plain torch.

    pytest -p xpu_emulated tests/backends/...

The wheel's real schemas are registered on the CPU, so that torch's dispatcher checks names, number
and types of arguments; its real Python runs, with its own reference behind the attention op. So a
wrong call fails, and numbers say that a right one means what we think; they say nothing about the
package's SYCL kernels.
"""

import importlib
import sys
import types

import pytest
import targets
import torch
import torch.nn.functional as F
import xpu_package

from stoker.backends import xpu
from stoker.backends.api import RouterSpec
from stoker.backends.contract.cases import ORACLE
from stoker.backends.xpu import package

HALVES = (torch.float16, torch.bfloat16)
CALLED = set()  # native ops

# ---- the native ops


def rms_norm(result, input, weight, epsilon):  # noqa: A002 - the package's
    assert input.dtype == weight.dtype == result.dtype and result.is_contiguous()
    result.copy_(ORACLE.rms_norm(input, weight, epsilon))


def fused_add_rms_norm(input, residual, weight, epsilon):  # noqa: A002
    assert input.dtype == residual.dtype == weight.dtype
    residual += input
    input.copy_(ORACLE.rms_norm(residual, weight, epsilon))


def silu_and_mul(result, input):  # noqa: A002
    result.copy_(ORACLE.silu_and_mul(input))


def gelu_tanh_and_mul(out, input):  # noqa: A002
    out.copy_(ORACLE.gelu_and_mul(input))


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert positions.dtype == torch.int64 and cos_sin_cache.dtype == query.dtype
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, -1)
    for x in (query, key):
        part = x.view(len(positions), -1, head_size)[..., : cos_sin_cache.shape[1]]
        if is_neox:
            a, b = part.float().chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = part[..., 0::2].float(), part[..., 1::2].float()
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        part.copy_(turned)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    assert slot_mapping.dtype == torch.int64 and kv_cache_dtype == "auto"
    assert k_scale.dtype == v_scale.dtype == torch.float32
    written = slot_mapping >= 0
    for pool, new in ((key_cache, key), (value_cache, value)):
        pool.view(-1, *pool.shape[2:])[slot_mapping[written]] = new[written]


def topk_softmax(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias, is_padding
):
    assert topk_weights.dtype == torch.float32 and bias is is_padding is None
    assert gating_output.is_contiguous()
    spec = RouterSpec(topk_indices.shape[1], renormalize=renormalize)
    ids, weights = ORACLE.route(gating_output, spec, None)
    topk_indices.copy_(ids)
    topk_weights.copy_(weights)
    topk_indices[gating_output.isnan().any(1)] = 10**6  # of broken logits anything may come


def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink,
    zero_tensors, is_causal, window_size_left, window_size_right, softcap, return_softmax, gen,
    num_splits, mix_batch, splits_per_seq, work_list,
):  # fmt: skip
    """By the package's own reference, which it has for what it was not compiled for."""
    assert q.dtype in HALVES and q.shape[2] in xpu.ops.HEAD_DIMS and k.shape[1] % 16 == 0
    assert {x.dtype for x in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1
    q_lens = cu_seqlens_q.diff()
    assert q_lens.max() <= max_seqlen_q and seqused_k.max() <= max_seqlen_k
    assert (k_scale is None) == (k.dtype == q.dtype)
    assert softcap == 0.0  # it takes one, and does not pass it on to its kernels
    assert softmax_sink is None or softmax_sink.dtype == q.dtype  # read as such, unchecked
    for scale in (k_scale, v_scale):
        assert scale is None or scale.shape == (len(q_lens), k.shape[2])
    own = importlib.import_module(f"{package.MODULE}.flash_attn_interface")
    found, _ = own._fallback_varlen_attn(
        q, k, v, cu_seqlens_q, None, seqused_k, block_table, softmax_scale, is_causal,
        (window_size_left, window_size_right), softcap, q_descale=q_scale, k_descale=k_scale,
        v_descale=v_scale, s_aux=softmax_sink,
    )  # fmt: skip
    out[: len(found)] = found
    return [out, torch.empty(0)]


def remap_hidden_states(
    hidden_states, hidden_states_scales, remapped_hidden_states, remapped_hidden_states_scales,
    expert_map, rows_per_expert, unpermuted_row_to_permuted_row, topk_ids, total_experts_num,
    local_experts_num,
):  # fmt: skip
    assert topk_ids.dtype == torch.int32 and topk_ids.is_contiguous()
    assert topk_ids.shape[1] in xpu.ops.TOP_KS and total_experts_num == local_experts_num
    order = topk_ids.flatten().argsort(stable=True)
    remapped_hidden_states.copy_(hidden_states[order // topk_ids.shape[1]])
    rows_per_expert.copy_(topk_ids.flatten().bincount(minlength=local_experts_num))
    unpermuted_row_to_permuted_row.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)


def cutlass_grouped_gemm_interface(
    ptr_A, ptr_A_scale, ptr_B, ptr_B_scale, ptr_bias, ptr_D, rows_per_expert, N, K, num_experts
):  # fmt: skip
    assert ptr_B.shape == (num_experts, K, N) and ptr_B.is_contiguous()
    assert ptr_A_scale is ptr_B_scale is ptr_bias is None
    rows = ptr_A.split(rows_per_expert.tolist())
    torch.cat([F.linear(x, w.T) for x, w in zip(rows, ptr_B, strict=True)], out=ptr_D)
    return ptr_D


def moe_gather(output, moe_output, topk_weights, unpermuted_row_to_permuted_row, num_experts):
    assert topk_weights.dtype == torch.float32
    found = moe_output[unpermuted_row_to_permuted_row.long()].float()
    output.copy_((found * topk_weights[..., None]).sum(1))


NATIVE = {
    "_C": (rms_norm, fused_add_rms_norm, silu_and_mul, gelu_tanh_and_mul, rotary_embedding),
    "_C_cache_ops": (reshape_and_cache_flash,),
    "_moe_C": (topk_softmax, remap_hidden_states, moe_gather),
    "_xpu_C": (cutlass_grouped_gemm_interface,),
    "_vllm_fa2_C": (varlen_fwd,),
}

# ---- the import


def noted(function):
    def call(*args, **kwargs):
        CALLED.add(function.__name__)
        return function(*args, **kwargs)

    return call


def install():
    """All schemas, the functions above behind some, and modules that stand for the libraries."""
    registered = []
    for namespace, schemas in xpu_package.facts()["schemas"].items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            library.define(schema)
        for function in NATIVE[namespace]:
            library.impl(function.__name__, noted(function), "CPU")
        registered.append(library)
    sys.path.insert(0, str(xpu_package.unpacked()))
    for name in package.LIBRARIES:
        sys.modules[f"{package.MODULE}.{name}"] = types.ModuleType(name)
    return registered  # ops are gone when their Library is


LIBRARIES = install()


class EmulatedXpu(xpu.XpuRuntime):
    """A B580 whose tensors are the CPU's."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.has_graphs = False
        self.facts = xpu.facts(
            types.SimpleNamespace(name="Intel(R) Arc(TM) B580 Graphics", sub_group_sizes=[16, 32])
        )
        self.num_cores = 160
        self.description = "emulated"


RUNTIME = EmulatedXpu()


class Earned:
    """What a passed test proves: nothing where none of the package's ops was called."""

    def __iter__(self):
        if CALLED:
            yield "xpu", "emulated"


def xpu_targets():
    found = []
    for provider in (xpu.XpuKernelOps(), xpu.XpuRopeOps()):
        assert provider.probe(RUNTIME) is None, provider.probe(RUNTIME)
        target = targets.Target(RUNTIME, provider, Earned())
        found.append(pytest.param(target, id=provider.name))
    return found


def pytest_runtest_setup():
    CALLED.clear()


targets.targets = xpu_targets
