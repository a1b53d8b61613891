"""The Triton kernels' numerics, in Triton's interpreter on the CPU.

TRITON_INTERPRET is read when a kernel is decorated, so these tests run in processes of their own:
the contract tests with the Triton provider, and the files `triton_*cases.py`.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: its kernels are not interpreted")

HERE = Path(__file__).parent
# The interpreter takes milliseconds a block: float16 goes the way of bfloat16, and of the large
# cases one dtype is run.
SELECTIONS = {
    "fused": ("test_contract.py", "rms_norm or _and_mul"),
    "write_qkv": ("test_contract.py", "write_qkv and (norms-bfloat16 or rotary64-float32)"),
    "attend": ("test_contract.py", "attend and bfloat16 and not long and not mla"),
    "attend_float32": ("test_contract.py", "attend and float32 and (everything or dim or tree) "
                       "and not mla"),
    "sample": ("test_contract.py", "sample and not distribution"),
    "more": ("triton_cases.py", ""),
    "linear": ("triton_linear_cases.py", ""),
    "mla": ("test_contract.py", "mla and bfloat16 or mla_write and float32"),
    "more of mla": ("triton_mla_cases.py", ""),
    "pages": ("test_contract.py", "copy_pages"),
    "moe": ("triton_moe_cases.py", ""),
    "quantized contract": ("test_contract.py", "quantized and bfloat16 and (98x320 or silu) and "
                           "(fp8-channel-token or uint4-group128 or mxfp4)"),
    "quantized": ("triton_quantized_cases.py", ""),
    "quantized experts": ("triton_moe_quantized_cases.py", ""),
    "flashinfer": ("flashinfer_cases.py", ""),
    "flashinfer mla": ("flashinfer_mla_cases.py", ""),
    "delta_net": ("test_contract.py", "delta_net and (interleaved-bfloat16 or -chunks-float32)"),
    "experts": ("test_contract.py", "not quantized and ((experts and not float16) or route or "
                "norm_experts_add-9-bfloat16)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(request):
    """Those that are asked for, as many at once as there are cores."""
    names = [item.callspec.params["name"] for item in request.session.items
             if item.path == request.path]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run, *SELECTIONS[name]) for name in names}


def run(file, expression):
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "triton_interpreter", "-W", "ignore"]
    return subprocess.run(
        [*command, "-k", expression, str(HERE / file)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", SELECTIONS)
def test_in_the_interpreter(name, runs):
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
