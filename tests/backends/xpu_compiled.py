"""Our kernels to SPIR-V, by the Triton that `old_triton_xpu` completes; run by `test_xpu.py`.

SPIR-V is not yet machine code: how many registers a kernel spills, the GPU's driver knows alone.
"""

import re
import sys

import pytest
import test_triton_compile as launches
import torch
from compile_only import OPS, _functions_on_the_stack
from old_triton_xpu import B580
from proofs import prove
from triton.backends.compiler import GPUTarget

from stoker.backends.api import AttentionSpec
from stoker.backends.triton.absent import compile_only

TARGET = GPUTarget("xpu", B580, 32)
SHARED_BYTES = B580["local_mem_size"]
MAGIC = b"\x03\x02\x23\x07"  # of SPIR-V
LLAMA = AttentionSpec(32, 8, 128, 128**-0.5)
LAUNCHES = {
    "attention": lambda: launches.launch_attention(LLAMA, torch.bfloat16),
    "trees": lambda: launches.launch_attention(LLAMA, torch.bfloat16, tree=True),
    "rest": lambda: launches.launch_rest(torch.bfloat16, torch.bfloat16),
    "delta net": lambda: launches.launch_delta_net(torch.bfloat16, interleaved=True),
    "pages": launches.launch_page_copies,
    "sampling": lambda: launches.launch_sampling(greedy=False),
    "experts": lambda: launches.launch_experts(4096),
}


def check(name, kernel):
    """It is SPIR-V, within a B580's limits, with DPAS where it multiplies matrices."""
    assert kernel.asm["spv"][:4] == MAGIC
    assert kernel.metadata.shared <= SHARED_BYTES, f"{name}: too much shared memory"
    assert kernel.metadata.num_warps * 32 <= B580["max_work_group_size"], name
    if name in launches.HAS_DOT:
        assert re.search(r"matrix_mad|MatrixMultiplyAccumulate", kernel.asm["llir"]), name


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile(name):
    ops = set()

    def seen(function, kernel, args):
        check(function.__name__, kernel)
        ops.update(set(_functions_on_the_stack()) & set(OPS))

    with compile_only(TARGET, seen):
        LAUNCHES[name]()
    assert ops
    for op in ops:
        prove("xpu", op, "triton", "compiled")


def test_what_needs_too_much_shared_memory_is_found(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SHARED_BYTES", 4096)
    with (
        compile_only(TARGET, lambda function, kernel, args: check(function.__name__, kernel)),
        pytest.raises(AssertionError, match="shared memory"),
    ):
        launches.launch_sampling(greedy=False)
