"""The kernels of latent attention compile for every GPU we serve; a warm server compiles none."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoker.backends.api import DenseRows, LayerCache, MLASpec, Rope

pytest.importorskip("triton", reason="triton is not installed: no compile checks")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("one process cannot both interpret and compile", allow_module_level=True)

from compile_only import TARGETS, CompileOnly
from test_triton_compile import MAX_SPILL, batch, meta_tensor

from stoker.backends.triton import TritonOps, mla, mla_dense

# Around its main loop, where descriptors have no part: in the masked last block of a context.
TAIL_SPILL = 512
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128


def spec(num_heads: int, nope: int = NOPE, value: int = VALUE) -> MLASpec:
    return MLASpec(num_heads, RANK, ROPE, nope, value, (nope + ROPE) ** -0.5)


def absorbed(num_heads, num_decode, q_lens, dtype=torch.bfloat16, kv_len=5000, **options):
    """As a model calls it: latent queries head after head, rotary parts within wider heads."""
    meta = batch(num_decode, q_lens, 64, kv_len=kv_len)
    pool = meta_tensor(1 << 15, 64, 1, RANK + ROPE, dtype=dtype)
    q_latent = meta_tensor(num_heads, meta.num_tokens, RANK, dtype=dtype).transpose(0, 1)
    q = meta_tensor(meta.num_tokens, num_heads, NOPE + ROPE, dtype=dtype)
    cache = LayerCache(pool, pool[..., :0])
    mla.mla_attend(q_latent, q[..., NOPE:], meta, cache, spec(num_heads), **options)


def dense(num_heads, num_tokens, nope=NOPE, value=VALUE):
    dtype = torch.bfloat16
    q = meta_tensor(num_tokens, num_heads, nope + ROPE, dtype=dtype)
    kv = meta_tensor(num_tokens, num_heads, nope + value, dtype=dtype)
    keys = meta_tensor(num_tokens, RANK + ROPE, dtype=dtype)
    rows = DenseRows(meta_tensor(3), meta_tensor(3), meta_tensor(2))
    mla_dense.mla_attend_dense(q, kv, keys[:, RANK:], rows, spec(num_heads, nope, value))


def write(num_tokens, dtype=torch.bfloat16):
    pool = meta_tensor(1 << 15, 64, 1, RANK + ROPE, dtype=dtype)
    latent = meta_tensor(num_tokens, RANK + ROPE, dtype=dtype)
    q = meta_tensor(num_tokens, 16, NOPE + ROPE, dtype=dtype)
    rope = Rope(meta_tensor(8192, ROPE, dtype=torch.float32), ROPE, True)
    cache, norm = LayerCache(pool, pool[..., :0]), meta_tensor(RANK, dtype=dtype)
    meta = batch(num_tokens, [], 64)
    mla_dense.mla_write(latent, q[..., NOPE:], meta, cache, spec(16), rope, norm, 1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    """Heads of V3 and, where tiles are others, of V2-Lite and GLM-4.7-Flash."""
    launches = [
        lambda: absorbed(128, 64, []),
        lambda: absorbed(16, 0, [512, 100], splits=2),
        lambda: dense(16, 8192),
        lambda: write(64),
    ]
    if target in ("sm_90", "gfx942"):
        launches.append(lambda: absorbed(16, 64, []))
        launches.append(lambda: dense(20, 8192, 192, 256))
    with CompileOnly(target) as compiled, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(launch) for launch in launches]:
            done.result()
    has_dot = {"_mla_decode", "_mla_extend", "_mla_dense"}
    assert {k.name for k in compiled.kernels} == has_dot | {"_mla_plan", "_mla_merge", "_mla_write"}
    for kernel in compiled.kernels:
        assert kernel.num_threads <= 1024, kernel
        if kernel.name in has_dot:
            assert kernel.matrix_instructions > 0, kernel
            is_described = target in mla.HAS_DESCRIPTORS
            assert kernel.spilled <= (TAIL_SPILL if is_described else MAX_SPILL), kernel
    compiled.prove()


def test_a_warm_server_compiles_nothing():
    """Steps of many sizes, after the warm-up, launch only what it compiled."""
    with CompileOnly("sm_90") as compiled:
        steps = TritonOps().mla_warm_steps([spec(16)], torch.bfloat16, 64, torch.device("meta"))
        for step in steps:
            step()
        warmed = len(compiled.kernels)
        for num_decode, q_lens in ((1, []), (7, []), (33, []), (256, []), (257, []), (1000, []),
                                   (0, [2]), (0, [17]), (5, [1000]), (48, [64] * 4)):  # fmt: skip
            for context in (8192, 100_000):
                absorbed(16, num_decode, q_lens, kv_len=context)
        for num_tokens in (300, 1000, 8192):
            dense(16, num_tokens)
    assert warmed >= 7
    assert compiled.kernels[warmed:] == []
