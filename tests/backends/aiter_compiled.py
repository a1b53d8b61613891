"""AITER's own Triton attention, compiled by the calls that we make; run by `test_aiter.py`.

Only the package's `__init__`, which needs ROCm, is left out.
"""

import os
import sys
import types

import aiter_package
import pytest
import torch
from compile_only import TARGETS, CompileOnly
from proofs import prove
from test_triton_compile import MAX_SPILL, batch, meta_tensor, pool
from triton.runtime import driver

from stoker.backends import rocm
from stoker.backends.api import AttentionSpec
from stoker.backends.triton import absent

SOURCE = aiter_package.unpacked()
STEPS = ((4, []), (200, []), (3, [300]))  # few rows are split; many; an extend beside them


@pytest.fixture(scope="module", autouse=True)
def package():
    """The wheel's folders as packages."""
    sys.path.insert(0, str(SOURCE))
    for name in ("aiter", "aiter.ops"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(SOURCE / name.replace(".", os.sep))]
    properties = types.SimpleNamespace(multi_processor_count=304)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.current_device = lambda: 0


@pytest.mark.parametrize("target, page_size", [("gfx942", 64), ("gfx950", 16)])
def test_attention_compiles(target, page_size):
    driver._active = absent.NoDevice(TARGETS[target])
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    kernels = []
    for dtype, steps in ((torch.bfloat16, STEPS), (rocm.facts(target).fp8, STEPS[:1])):
        for rows, q_lens in steps:
            meta = batch(rows, q_lens, page_size, kv_len=4000)
            q = meta_tensor(meta.num_tokens, spec.num_heads, spec.head_dim, dtype=torch.bfloat16)
            with CompileOnly(target) as compiled:
                rocm.AiterOps().attend(q, meta, pool(1 << 14, spec, dtype, page_size), spec)
            kernels += compiled.kernels
    names = {kernel.name for kernel in kernels}
    assert names >= {"kernel_unified_attention_2d", "kernel_unified_attention_3d"}
    for kernel in kernels:
        assert kernel.num_threads <= 1024 and kernel.spilled <= MAX_SPILL, kernel
        assert kernel.matrix_instructions > 0 or kernel.name == "reduce_segments", kernel
    prove("rocm", "attend", "aiter", f"compiled:{target}")
