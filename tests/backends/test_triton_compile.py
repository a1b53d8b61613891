"""Every kernel compiles for every GPU we serve, within its limits; no GPU is needed."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stoker.backends.api import (
    AttentionSpec,
    BatchMeta,
    DeltaNetSpec,
    LayerCache,
    LayerState,
    QuantizedExperts,
    QuantizedWeight,
    Rope,
    RouterSpec,
    SamplingRows,
    SharedPrefixes,
)

pytest.importorskip("triton", reason="triton is not installed: no compile checks")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("one process cannot both interpret and compile", allow_module_level=True)

from compile_only import TARGETS, CompileOnly

from stoker.backends.triton import (
    TritonOps,
    attention,
    delta_net,
    fused,
    linear,
    moe,
    moe_quantized,
    page_copies,
    quantized,
    routing,
    sampling,
)
from stoker.backends.triton.flash import Tile

HAS_DOT = {"_decode", "_extend", "_shared_prefix", "_grouped", "_within_chunks", "_scan_chunks"}
GROUPS = RouterSpec(8, "sigmoid", 8, 4, scale=2.5, num_shared=1)
MAX_SPILL = 64  # bytes of stack (NVIDIA) or registers (AMD): a few addresses, not a tile
NATIVE_FP8 = {
    "sm_90": torch.float8_e4m3fn,
    "sm_100": torch.float8_e4m3fn,
    "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
}


def meta_tensor(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def batch(
    num_decode: int, q_lens: list[int], page_size=16, tree=False, kv_len=100, max_pages=1024
) -> BatchMeta:
    q_lens = np.array([1] * num_decode + q_lens, np.int32)
    rows, tokens = len(q_lens), int(q_lens.sum())
    return BatchMeta(
        num_rows=rows,
        num_tokens=tokens,
        num_decode_rows=num_decode,
        page_size=page_size,
        qo_indptr=meta_tensor(rows + 1),
        kv_lens=meta_tensor(rows),
        slots=meta_tensor(rows),
        block_table=meta_tensor(512, max_pages),
        positions=meta_tensor(tokens, dtype=torch.int64),
        out_slots=meta_tensor(tokens, dtype=torch.int64),
        logit_tokens=meta_tensor(rows, dtype=torch.int64),
        qo_indptr_cpu=np.concatenate(([0], q_lens.cumsum())).astype(np.int32),
        kv_lens_cpu=np.full(rows, kv_len, np.int32),
        max_kv_len=kv_len,
        tree_mask=meta_tensor(1000, dtype=torch.bool) if tree else None,
    )


def pool(num_pages: int, spec: AttentionSpec, dtype: torch.dtype, page_size=16) -> LayerCache:
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    return LayerCache(meta_tensor(*shape, dtype=dtype), meta_tensor(*shape, dtype=dtype))


def shared_prefixes(num_rows: int) -> SharedPrefixes:
    return SharedPrefixes(meta_tensor(7, 16), meta_tensor(7), meta_tensor(num_rows))


def launch_attention(spec, dtype, cache_dtype=None, num_pages=1 << 17, **flags):
    """Decode, extend and a shared prefix; 2 GiB of pool, as in use."""
    cache = pool(num_pages, spec, cache_dtype or dtype)
    meta = batch(64, [512, 2048], **flags)
    meta.shared = shared_prefixes(meta.num_rows)
    q = meta_tensor(meta.num_tokens, spec.num_heads, spec.head_dim, dtype=dtype)
    lse = meta_tensor(meta.num_tokens, spec.num_heads, dtype=torch.float32)
    attention.attend(q, meta, cache, spec, lse=lse if flags else None)


def launch_rest(dtype, cache_dtype):
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    meta = batch(64, [])
    qkv = meta_tensor(64, 48 * 128, dtype=dtype)
    weight = meta_tensor(128, dtype=dtype)
    cos_sin = meta_tensor(8192, 128, dtype=torch.float32)
    cache = pool(1 << 17, spec, cache_dtype)
    fused.write_qkv(qkv, meta, cache, spec, Rope(cos_sin, 128), None, None, 1e-6)
    fused.write_qkv(qkv, meta, cache, spec, Rope(cos_sin, 64, True), weight, weight, 1e-6)
    fused.write_qkv(qkv, meta, cache, spec, None, None, None, 1e-6)
    x = meta_tensor(64, 4096, dtype=dtype)
    fused.rms_norm(x, meta_tensor(4096, dtype=dtype), 1e-6)
    fused.add_rms_norm(x, x, meta_tensor(4096, dtype=dtype), 1e-6)
    fused.silu_and_mul(x)
    fused.gelu_and_mul(x)


def launch_linear(num_rows, num_out, *, has_norm, gate="", num_in=4096):
    weight = meta_tensor(num_out, num_in, dtype=torch.bfloat16)
    tile = linear.choose_tile(num_rows, weight, has_norm=has_norm) or linear.SOME_ROWS
    x = meta_tensor(num_rows, num_in, dtype=torch.bfloat16)
    out = meta_tensor(num_rows, num_out // (2 if gate else 1), dtype=torch.bfloat16)
    norm = meta_tensor(num_in, dtype=torch.bfloat16) if has_norm else None
    linear.linear(x, weight, None, out, tile, norm=norm, eps=1e-5, gate=gate, add=not has_norm)


def launch_experts(
    num_tokens, dtype=torch.bfloat16, activation="silu", has_bias=False, router=None
):
    """The shapes of Qwen3-30B-A3B."""
    num_experts, top_k, hidden, inner = 128, 8, 2048, 768
    logits = meta_tensor(num_tokens, num_experts, dtype=torch.float32)
    bias = meta_tensor(num_experts, dtype=torch.float32) if has_bias else None
    ids, scales = routing.route(logits, router or RouterSpec(top_k), bias)
    packed = moe.PackedExperts(
        meta_tensor(num_experts, 2 * inner, hidden, dtype=dtype),
        meta_tensor(num_experts, hidden, inner, dtype=dtype),
        meta_tensor(num_experts, 2 * inner, dtype=dtype) if has_bias else None,
        meta_tensor(num_experts, hidden, dtype=dtype) if has_bias else None,
        activation,
    )
    moe.experts(meta_tensor(num_tokens, hidden, dtype=dtype), ids, scales, packed)


def quantized_weight(target, kind, block, activations, *size):
    """Without memory, as `pack_quantized` takes it; block 0 is the whole row."""
    dtypes = {"fp8": NATIVE_FP8.get(target, torch.float8_e4m3fn), "int8": torch.int8}
    block = block[0], block[1] or size[-1]
    groups = (*size[:-2], -(-size[-2] // block[0]), -(-size[-1] // block[1]))
    scales = meta_tensor(*groups, dtype=torch.float32)
    halved = (*size[:-1], size[-1] if kind in dtypes else size[-1] // 2)
    codes = meta_tensor(*halved, dtype=dtypes.get(kind, torch.uint8))
    offsets = scales if kind == "uint4" else None
    has_zeros = kind == "uint4" and block[1] == 128
    return QuantizedWeight(
        kind, codes, size, scales, offsets, block, activations, has_zero_points=has_zeros
    )


def launch_delta_net(dtype, *, interleaved):
    """The sizes of Qwen3-Next."""
    spec = DeltaNetSpec(
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        conv=meta_tensor(8192, 4, dtype=dtype),
        decay=meta_tensor(32, dtype=torch.float32),
        dt_bias=meta_tensor(32, dtype=torch.float32),
        norm=meta_tensor(128, dtype=torch.float32),
        eps=1e-6,
        interleaved=interleaved,
    )
    state = LayerState(
        meta_tensor(257, 8192, 3, dtype=dtype),
        meta_tensor(257, 32, 128, 128, dtype=torch.float32),
    )
    meta = batch(64, [512, 2048])
    projected = meta_tensor(meta.num_tokens, 12288 + 64, dtype=dtype)
    delta_net.delta_net(projected[:, :12288], projected[:, 12288:], meta, state, spec)


def launch_page_copies():
    parts, rows = meta_tensor(2, 3, dtype=torch.int64), meta_tensor(500)
    for to_pool in (False, True):
        page_copies.copy_pages(
            parts, 1 << 18, rows, 1 << 40, 1 << 23, rows, to_pool=to_pool, is_host=to_pool
        )


def launch_sampling(*, greedy: bool):
    column = meta_tensor(64, dtype=torch.float32)
    sampling.sample(
        meta_tensor(64, 128_256, dtype=torch.float32),
        SamplingRows(
            temperature=column,
            top_k=meta_tensor(64),
            top_p=column,
            min_p=column,
            seeds=meta_tensor(64, dtype=torch.int64),
            positions=meta_tensor(64),
            all_greedy=greedy,
            has_top_k=True,
            has_top_p=True,
            has_min_p=True,
        ),
    )


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    llama = AttentionSpec(32, 8, 128, 128**-0.5)
    sinks = meta_tensor(64, dtype=torch.bfloat16)
    launches = [
        lambda: launch_attention(llama, torch.bfloat16),
        lambda: launch_attention(AttentionSpec(64, 8, 64, 0.125, 128, None, sinks), torch.bfloat16),
        lambda: launch_attention(AttentionSpec(16, 8, 256, 0.0625, 4096, 50.0), torch.bfloat16),
        lambda: launch_rest(torch.bfloat16, NATIVE_FP8.get(target, torch.bfloat16)),
        lambda: launch_sampling(greedy=False),
        launch_page_copies,
        lambda: launch_delta_net(torch.bfloat16, interleaved=target != "sm_90"),
        lambda: launch_linear(1, 4096, has_norm=False),
        lambda: launch_linear(1, 28672, has_norm=True, gate="silu"),
        lambda: launch_linear(8, 28672, has_norm=True, gate="silu"),
        lambda: launch_linear(8, 130, has_norm=True, num_in=200),
        lambda: launch_experts(1),
        lambda: launch_experts(64),
        lambda: launch_experts(4096),
    ]
    if target not in ("sm_100", "gfx950"):
        launches.append(lambda: launch_attention(llama, torch.bfloat16, tree=True))
    if target in NATIVE_FP8:
        launches.append(lambda: launch_attention(llama, torch.bfloat16, NATIVE_FP8[target]))
    else:
        launches.append(lambda: launch_attention(AttentionSpec(9, 3, 64, 0.125), torch.float32))
        launches.append(lambda: launch_sampling(greedy=True))
        launches.append(lambda: launch_experts(64, torch.float32, "swiglu_clamped", True, GROUPS))
    with CompileOnly(target) as compiled, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(launch) for launch in launches]:
            done.result()
    names = {kernel.name for kernel in compiled.kernels}
    assert names >= HAS_DOT | {"_plan_decode", "_write_qkv", "_rms_norm", "_gated", "_linear",
                               "_sample", "_route", "_pair_gate_up", "_pair_down", "_count",
                               "_place", "_sum_parts", "_copy_pages", "_convolve", "_decode_delta",
                               "_invert", "_norm_heads"}  # fmt: skip
    for kernel in compiled.kernels:
        assert kernel.num_threads <= 1024, kernel
        if kernel.name in HAS_DOT and not kernel.is_float32:
            assert kernel.matrix_instructions > 0, kernel
            assert kernel.spilled <= MAX_SPILL, kernel
    compiled.prove()


QUANTIZED_PRODUCTS = [  # rows, or tokens of experts; kind; block; rounding of activations
    (64, "mxfp4", (1, 32), None),
    (256, "fp8", (128, 128), "group"),
    (256, "uint4", (1, 32), None),
    (1, "uint4", (1, 128), None),
    (1, "int8", (1, 16), None),
    (2048, "uint4", (1, 128), None),
    (17, "fp8", (1, 0), "token"),
]
QUANTIZED_EXPERTS = [
    (1, "mxfp4", (1, 32), None),
    (1, "fp8", (128, 128), "group"),
    (4096, "fp8", (1, 0), "token"),
]
NO_DOT = ("_expand", "_pair_gate_up", "_pair_down")


@pytest.mark.parametrize("target", TARGETS)
def test_quantized_products_compile(target):
    """All of them for the target that compiles fastest, for the others what differs most."""
    is_whole = target == "sm_90"
    plain = QUANTIZED_PRODUCTS if is_whole else QUANTIZED_PRODUCTS[:2]
    experts = QUANTIZED_EXPERTS if is_whole else QUANTIZED_EXPERTS[: 2 * target.startswith("gfx")]

    def launch(num_rows, kind, block, activations):
        weight = quantized_weight(target, kind, block, activations, 4096, 4096)
        x = meta_tensor(num_rows, 4096, dtype=torch.bfloat16)
        quantized.quantized_linear(x, quantized.pack_quantized(weight, None))

    def launch_experts(num_tokens, *scheme):
        """The shapes of gpt-oss."""
        num_experts, hidden, inner = 32, 2880, 2880
        gate_up = quantized_weight(target, *scheme, num_experts, 2 * inner, hidden)
        down = quantized_weight(target, *scheme, num_experts, hidden, inner)
        biases = [meta_tensor(num_experts, n, dtype=torch.bfloat16) for n in (2 * inner, hidden)]
        packed = moe_quantized.pack_quantized_experts(
            QuantizedExperts(gate_up, down, "swiglu_clamped", *biases)
        )
        x = meta_tensor(num_tokens, hidden, dtype=torch.bfloat16)
        ids = meta_tensor(num_tokens, 4)
        moe_quantized.quantized_experts(x, ids, ids.float(), packed)

    with CompileOnly(target) as compiled, ThreadPoolExecutor(os.cpu_count()) as pool:
        launched = [pool.submit(launch, *arguments) for arguments in plain]
        launched += [pool.submit(launch_experts, *arguments) for arguments in experts]
        for done in launched:
            done.result()
    products = [k for k in compiled.kernels if k.name.endswith(("_widened", "_scaled", *NO_DOT))]
    assert len(products) == len(plain) + 2 * len(experts)
    for kernel in products:
        assert kernel.matrix_instructions > 0 or kernel.name in NO_DOT, kernel
        assert kernel.spilled <= MAX_SPILL, kernel
    compiled.prove()


def test_small_and_large_pools_are_read_by_other_instructions():
    """What AMD's compiler makes of pools below 2 GiB and beyond: both are compiled in tests."""
    spec, meta = AttentionSpec(32, 8, 128, 128**-0.5), batch(64, [])
    q = meta_tensor(64, 32, 128, dtype=torch.bfloat16)
    with CompileOnly("gfx942") as compiled:
        for num_pages in (1 << 10, 1 << 17):
            attention.attend(q, meta, pool(num_pages, spec, torch.bfloat16), spec)
    small, large = (k.buffer_loads for k in compiled.kernels if k.name == "_decode")
    assert small > large


def test_a_tile_that_is_too_large_is_found():
    spec = AttentionSpec(32, 8, 256, 0.0625)
    cache = pool(1 << 10, spec, torch.bfloat16)
    q = meta_tensor(512, 32, 256, dtype=torch.bfloat16)
    for target, meta, tiles in (
        ("sm_80", batch(0, [512]), {"extend_tile": Tile(128, 128, 8, 4)}),
        ("gfx942", batch(512, []), {"decode_tile": Tile(16, 256, 4, 2)}),
    ):
        with CompileOnly(target), pytest.raises(MemoryError, match="shared memory"):
            attention.attend(q, meta, cache, spec, **tiles)


def test_too_many_threads_are_found():
    """AMD's compiler takes 32 warps of 64 without a word."""
    with CompileOnly("gfx942") as compiled:
        fused._gated[(1, 1)](
            meta_tensor(64, dtype=torch.bfloat16), meta_tensor(64, dtype=torch.bfloat16), 32, 64,
            GELU=False, BLOCK=64, num_warps=32,
        )  # fmt: skip
    assert [kernel.num_threads for kernel in compiled.kernels] == [2048]


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_warm_server_compiles_nothing(page_size):
    """Steps of many sizes, after the warm-up, launch only what it compiled."""
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    with CompileOnly("sm_90") as compiled:
        for step in TritonOps().warm_steps([spec], torch.bfloat16, page_size, torch.device("meta")):
            step()
        warmed = len(compiled.kernels)
        for num_decode, q_lens in (
            (1, []), (7, []), (33, []), (256, []), (257, []), (1000, []), (0, [2]), (0, [17]),
            (0, [33]), (5, [1000]), (48, [64] * 4), (3, [256]), (0, [8192]), (2, [4, 3, 9]),
        ):  # fmt: skip
            for context in (8192, 100_000):
                meta = batch(num_decode, q_lens, page_size, kv_len=context, max_pages=1001)
                q = meta_tensor(meta.num_tokens, 32, 128, dtype=torch.bfloat16)
                cache = pool(1000, spec, torch.bfloat16, page_size)
                for is_shared in (False, True):
                    meta.plans.clear()
                    meta.shared = shared_prefixes(meta.num_rows) if is_shared else None
                    attention.attend(q, meta, cache, spec)
    assert warmed >= 12
    assert compiled.kernels[warmed:] == []
