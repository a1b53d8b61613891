"""A pytest plugin: the contract's checks on AMD's real package, its native modules in plain torch.

    TRITON_INTERPRET=1 pytest -p triton_interpreter -p aiter_emulated tests/backends/...

`import aiter` runs for real, from the wheel: stubs, torch's registration of ops with their schemas,
checks of arguments, dispatch; and its Triton kernels in the interpreter. What it would compile with
hipcc at first use, modules named module_* and mha_*, is found here instead: functions of the same
names and positions, in plain torch on the CPU. So a wrong call fails, and numbers say that a right
one means what we think; they say nothing about AMD's native kernels.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import aiter_package
import pytest
import targets
import torch
import torch.nn.functional as F
from triton.runtime import driver

from stoker.backends import rocm
from stoker.backends.api import AttentionSpec, BatchMeta, LayerCache, RouterSpec
from stoker.backends.contract.cases import ORACLE
from stoker.backends.rocm import package
from stoker.backends.triton import absent

SOURCE = aiter_package.unpacked()
ARCH = "gfx942"
CALLED = set()  # native functions

# ---- what stands for ROCm's tools

TOOLS = {
    "hipconfig": "echo 6.4.0",
    "hipcc": "exit 1",  # nothing may be compiled
    "rocminfo": f"echo '  Name:  {ARCH}'",
}
home = Path(tempfile.mkdtemp(prefix="stoker-rocm-"))
for name, script in TOOLS.items():
    tool = home / "bin" / name
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
os.environ.update(
    ROCM_HOME=str(home),
    ROCM_PATH=str(home),
    GPU_ARCHS=ARCH,
    CU_NUM="304",
    AITER_JIT_DIR=str(home / "jit"),
    PATH=f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
)

# ---- the native modules' functions


def rmsnorm2d_fwd(input, weight, epsilon, use_model_sensitive_rmsnorm=0):  # noqa: A002 - AITER's
    return ORACLE.rms_norm(input, weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out, input, residual_in, residual_out, weight, epsilon, use_model_sensitive_rmsnorm=0  # noqa: A002
):  # fmt: skip
    residual_out.copy_(input + residual_in)
    out.copy_(ORACLE.rms_norm(residual_out, weight, epsilon))


def silu_and_mul(out, input):  # noqa: A002
    out.copy_(ORACLE.silu_and_mul(input))


def gelu_tanh_and_mul(out, input):  # noqa: A002
    out.copy_(ORACLE.gelu_and_mul(input))


def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm):
    spec = RouterSpec(topk_indices.shape[1], renormalize=need_renorm)
    _route(gating_output, spec, None, topk_weights, topk_indices)


def grouped_topk(
    gating_output, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm,
    is_softmax=True, routed_scaling_factor=1.0,
):  # fmt: skip
    spec = RouterSpec(
        topk_ids.shape[1], "softmax" if is_softmax else "sigmoid", num_expert_group, topk_group,
        need_renorm, routed_scaling_factor,
    )  # fmt: skip
    _route(gating_output, spec, None, topk_weights, topk_ids)


def biased_grouped_topk(
    gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_grp,
    need_renorm, routed_scaling_factor=1.0,
):  # fmt: skip
    spec = RouterSpec(
        topk_ids.shape[1], "sigmoid", num_expert_group, topk_grp, need_renorm,
        routed_scaling_factor,
    )  # fmt: skip
    _route(gating_output, spec, correction_bias, topk_weights, topk_ids)


def _route(logits, spec, bias, weights, ids):
    assert logits.dtype == weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert logits.is_contiguous()
    found = ORACLE.route(logits, spec, bias)
    ids.copy_(found[0])
    weights.copy_(found[1])
    ids[logits.isnan().any(1)] = 10**6  # of broken logits anything may come


def rope_cached_positions_2c_fwd_impl(
    output_x, output_y, input_x, input_y, cos, sin, positions, rotate_style,
    reuse_freqs_front_part, nope_first,
):  # fmt: skip
    assert reuse_freqs_front_part and not nope_first and cos.dtype == input_x.dtype
    assert cos.is_contiguous() and sin.is_contiguous()
    c, s = (table[positions].squeeze(-2).float() for table in (cos, sin))  # [s, b, 1, d / 2]
    for out, x in ((output_x, input_x), (output_y, input_y)):
        if rotate_style == 1:
            a, b = x[..., 0::2].float(), x[..., 1::2].float()
            turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        else:
            a, b = x.float().chunk(2, -1)
            turned = torch.cat((a * c - b * s, b * c + a * s), -1)
        out.copy_(turned)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    assert slot_mapping.dtype == torch.int64 and kv_cache_dtype == "auto"
    assert k_scale.dtype == v_scale.dtype == torch.float32
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    for x in (key, value):  # the kernel knows a stride of tokens alone
        assert x.stride()[1:] == (x.shape[2], 1)
    written = slot_mapping >= 0
    for pool, new in ((key_cache, key), (value_cache, value)):
        pool.view(-1, *pool.shape[2:])[slot_mapping[written]] = new[written]


def dynamic_per_token_scaled_quant(
    out, input, scales, scale_ub=None, shuffle_scale=False, num_rows=None, num_rows_factor=1  # noqa: A002
):  # fmt: skip
    assert scale_ub is None and not shuffle_scale and num_rows is None
    x = input.float()
    limit = 127.0 if out.dtype == torch.int8 else torch.finfo(out.dtype).max
    scale = x.abs().amax(-1, keepdim=True) / limit
    codes = x / scale.clamp(min=1e-12)
    out.view(x.shape).copy_((codes.round() if out.dtype == torch.int8 else codes).to(out.dtype))
    scales.view(scale.shape).copy_(scale)


def gemm_a8w8(XQ, WQ, x_scale, w_scale, Out, bias=None, splitK=0):
    assert XQ.dtype == WQ.dtype == torch.int8 and bias is None
    Out.copy_((XQ.float() * x_scale) @ (WQ.float() * w_scale).T)
    return Out


def gemm_a8w8_bpreshuffle(XQ, WQ, x_scale, w_scale, Out):
    assert XQ.dtype == WQ.dtype == torch.float8_e4m3fnuz
    Out.copy_((XQ.float() * x_scale) @ (unshuffled(WQ).float() * w_scale).T)
    return Out


def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, Out):
    assert XQ.dtype == WQ.dtype == torch.float8_e4m3fnuz
    Out.copy_((XQ.float() * _spread(x_scale, 1)) @ (WQ.float() * _spread(w_scale, 128)).T)
    return Out


def get_padded_m(m, n, k, level):
    return m


def _spread(scales, rows):
    return scales.repeat_interleave(rows, -2).repeat_interleave(128, -1)


def unshuffled(weight):
    """The inverse of AITER's shuffle_weight with tiles of 16 x 16."""
    *_, n, k = weight.shape
    pack = 16 // weight.element_size()
    raw = weight.view(torch.uint8 if weight.element_size() == 1 else torch.int16)
    tiles = raw.view(-1, n // 16, k // 32, 32 // pack, 16, pack)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(weight.shape).view(weight.dtype)


def paged_attention_v1(
    out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens,
    context_lens, max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap,
    k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1, sliding_window=0,
):  # fmt: skip
    """Replaces the whole function, whose body compiles a template."""
    assert (kv_cache_dtype, kv_cache_layout, cu_query_lens) == ("auto", "NHD", None)
    assert query.stride(2) == 1 and query.stride(1) == query.shape[2]
    parts = -(-max_context_len // partition_size)
    rows, heads, dim = query.shape
    size = rows * heads * parts * (dim * query.element_size() + 8)
    assert workspace_buffer.nbytes >= size and max_context_len >= context_lens.max()
    spec = AttentionSpec(
        heads, key_cache.shape[2], dim, scale, sliding_window or None, logits_soft_cap or None
    )
    meta = _decode_meta(block_tables, context_lens, key_cache.shape[1])
    out.copy_(ORACLE.attend(query, meta, LayerCache(key_cache, value_cache), spec).view_as(out))


def _decode_meta(tables, lens, page_size):
    rows = len(lens)
    one_each = torch.arange(rows + 1, dtype=torch.int32)
    nothing = torch.zeros(0)
    return BatchMeta(
        rows, rows, rows, page_size, one_each, lens, one_each[:-1], tables, nothing, nothing,
        nothing, one_each.numpy(), lens.numpy(), int(lens.max()),
    )  # fmt: skip


def _mla(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, last_page_lens, max_seqlen_q, sm_scale):
    assert q.dtype == kv_buffer.dtype == torch.bfloat16 and q.is_contiguous()
    assert kv_buffer.shape[1:3] == (1, 1) and (last_page_lens == 1).all()
    assert {x.dtype for x in (qo_indptr, kv_indptr, kv_indices)} == {torch.int32}
    assert len(qo_indptr) == len(kv_indptr) == len(last_page_lens) + 1
    rank, latents = o.shape[2], kv_buffer.flatten(0, 2)
    for row in range(len(last_page_lens)):
        tokens = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
        keys = latents[kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()].float()
        num_new = tokens.stop - tokens.start
        assert num_new <= max_seqlen_q
        if len(keys) == 0:
            continue
        logits = torch.einsum("thd,kd->htk", q[tokens].float(), keys) * sm_scale
        at = torch.arange(len(keys))
        logits.masked_fill_(at > at[len(keys) - num_new :, None], float("-inf"))
        o[tokens] = torch.einsum("htk,kd->thd", logits.softmax(-1), keys[:, :rank]).to(o.dtype)


def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
    sm_scale=None, **none,
):  # fmt: skip
    """Replaces the body, which reads the device; the real signature is checked before."""
    assert max_seqlen_q == 1
    _mla(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, 1, sm_scale)


def mla_prefill_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
    sm_scale=None, **none,
):  # fmt: skip
    """As above."""
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    _mla(q, kv_buffer, o, *lists, max_seqlen_q, sm_scale)


def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, quant_type=None, w1_scale=None, w2_scale=None,
    **none,
):  # fmt: skip
    """Replaces the whole function, which chooses among tuned kernels."""
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert w1.is_shuffled and w2.is_shuffled and hidden_states.is_contiguous()
    assert w2.shape[2] % 128 == 0
    kind = "No" if quant_type is None else next(
        name for name in ("No", "per_Token", "per_128x128")
        if quant_type == getattr(sys.modules["aiter"].QuantType, name)
    )  # fmt: skip
    scales = {
        "No": lambda s: 1.0,
        "per_Token": lambda s: s,
        "per_128x128": lambda s: _spread(s, 128),
    }
    gate_up, down = (
        unshuffled(w).float() * scales[kind](s) for w, s in ((w1, w1_scale), (w2, w2_scale))
    )
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, ranks = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[tokens].float(), gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert]) * topk_weight[tokens, ranks, None]
        out.index_add_(0, tokens, y)
    return out.to(hidden_states.dtype)


NATIVE = {f.__name__: f for f in (
    rmsnorm2d_fwd, rmsnorm2d_fwd_with_add, silu_and_mul, gelu_tanh_and_mul, topk_softmax,
    grouped_topk, biased_grouped_topk, rope_cached_positions_2c_fwd_impl, reshape_and_cache_flash,
    dynamic_per_token_scaled_quant, get_padded_m, gemm_a8w8, gemm_a8w8_bpreshuffle,
    gemm_a8w8_blockscale,
)}  # fmt: skip
# Python functions whose bodies cannot run here; calls are bound to their real signatures first.
REPLACED = (paged_attention_v1, mla_decode_fwd, mla_prefill_fwd, fused_moe)


# ---- the import


class NativeModule(types.ModuleType):
    """Stands for a module that hipcc would build."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("ActivationType", "QuantType"):
            return enumeration(name)

        def call(*args, **kwargs):
            CALLED.add(name)
            if name not in NATIVE:
                raise NotImplementedError(f"{self.__name__}.{name} is not emulated")
            return NATIVE[name](*args, **kwargs)

        call.__doc__ = "Members:"  # the package then takes the stub's own signature
        return call


def enumeration(name, made={}):  # noqa: B006
    """As pybind11 would make it, with the members in the wheel's header."""
    if name not in made:
        header = (SOURCE / "aiter_meta/csrc/include/aiter_enum.h").read_text()
        body = re.search(rf"enum class {name}[^{{]*{{([^}}]*)}}", header)[1]
        kind = type(
            name, (), {"__init__": lambda self, value=0: setattr(self, "value", int(value))}
        )
        kind.__doc__ = "Members:"
        kind.__int__ = kind.__index__ = lambda self: self.value
        kind.__eq__ = lambda self, other: self.value == int(getattr(other, "value", other))
        kind.__hash__ = lambda self: hash(self.value)
        value = 0
        for part in filter(None, (line.split("//")[0].strip() for line in body.split(","))):
            key, _, given = part.partition("=")
            value = int(given) if given else value
            setattr(kind, key.strip(), kind(value))
            value += 1
        made[name] = kind
    return made[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the native modules."""

    def find_spec(self, name, path, target=None):
        if re.fullmatch(r"(aiter\.jit\.)?(module|mha|fmha)_\w+", name):
            return importlib.machinery.ModuleSpec(name, self, origin="emulated")
        return None

    def create_module(self, spec):
        module = NativeModule(spec.name)
        module.__file__ = "emulated"
        return module

    def exec_module(self, module):
        pass


class Properties:
    """Of the GPU that is not there."""

    name = "AMD Instinct MI300X"
    gcnArchName = f"{ARCH}:sramecc+:xnack-"
    multi_processor_count, warp_size, total_memory = 304, 64, 1 << 37


def import_aiter():
    """The real package, its ops registered for the CPU instead of "cuda"."""
    driver._active = absent.NoDevice(absent.TARGETS[ARCH])
    sys.meta_path.insert(0, Finder())
    sys.path.insert(0, str(SOURCE))
    sys.path.insert(0, str(SOURCE / "aiter/jit/utils"))
    import torch_guard

    register = torch_guard.torch_compile_guard
    torch_guard.torch_compile_guard = lambda *args, **kwargs: register(
        *args, **{**kwargs, "device": "cpu"}
    )
    torch.cuda.get_device_properties = lambda *_: Properties()
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0)
    importlib.import_module("aiter")


class EmulatedRocm(rocm.RocmRuntime):
    """An MI300X whose tensors are the CPU's."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.facts = rocm.facts(ARCH)
        self.num_cores = Properties.multi_processor_count
        self.description = "emulated"


def bound(real, replacement):
    """The replacement, for calls that the real function's signature takes."""
    signature = inspect.signature(real)

    def call(*args, **kwargs):
        CALLED.add(real.__name__)
        signature.bind(*args, **kwargs)
        return replacement(*args, **kwargs)

    call.__signature__ = signature
    return call


import_aiter()
real_attention = package.unified_attention.function
package.unified_attention.function = bound(real_attention, real_attention)
for replacement in REPLACED:
    own = next(f for f in package.FUNCTIONS if f.name == replacement.__name__)
    own.function = bound(own.function, replacement)

RUNTIME = EmulatedRocm()


@dataclass(frozen=True)
class Earned:
    """What a passed test proves: nothing where our kernels, or another provider's, did it all."""

    provider: str

    def __iter__(self):
        if CALLED - {"unified_attention"}:
            yield "rocm", "emulated"
        elif CALLED and self.provider == "aiter":  # AITER's own kernel, in the interpreter
            yield "rocm", "interpreted"


def recorded(self, **arguments):
    """Every call of ours binds to both versions' signatures, and holds nothing unknown."""
    assert set(arguments) <= set(self.keywords), (self.name, set(arguments) - set(self.keywords))
    for find in (aiter_package.of_the_wheel, aiter_package.of_the_newer):
        signatures = filter(None, (find(module, self.name) for module in self.modules))
        next(signatures).bind(**arguments)
    return self.function(**arguments)


package.Function.__call__ = recorded


def aiter_targets():
    found = []
    for provider in (rocm.AiterOps(), rocm.AiterPagedOps(), rocm.AiterRopeOps()):
        assert provider.probe(RUNTIME) is None, provider.probe(RUNTIME)
        target = targets.Target(RUNTIME, provider, Earned(provider.name))
        found.append(pytest.param(target, id=provider.name))
    return found


def pytest_runtest_setup():
    CALLED.clear()


targets.targets = aiter_targets
