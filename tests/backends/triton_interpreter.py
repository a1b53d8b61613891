"""A pytest plugin: the contract tests on Triton's interpreter, on the CPU.

    TRITON_INTERPRET=1 PYTHONPATH=...:tests/backends pytest -p triton_interpreter tests/backends

It mends two faults of the interpreter (Triton 3.6 to 3.9): `tl.dot` multiplies the bit patterns of
bfloat16 and fp8 operands, and casts to these types truncate instead of rounding to nearest even.
"""

import numpy as np
import pytest
import targets
import torch
import triton.language as tl
from triton.runtime import interpreter

from stoker.backends.cpu import CpuRuntime
from stoker.backends.triton import TritonOps

TORCH_TYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
MENDED = {tl.bfloat16, tl.float8e4nv, tl.float8e4b8}


def as_torch(data: np.ndarray, kind) -> torch.Tensor:
    """The interpreter's array (bit patterns for MENDED types) as a tensor of its true type."""
    dtype = TORCH_TYPES[kind]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = np.ascontiguousarray(data).view(f"i{dtype.itemsize}" if dtype.itemsize > 1 else "u1")
    return torch.from_numpy(bits).view(raw).view(dtype)


def as_float32(handle) -> np.ndarray:
    kind = handle.dtype.scalar
    if kind in MENDED:
        return as_torch(handle.data, kind).float().numpy()
    return handle.data.astype(np.float32)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(as_float32(a), as_float32(b))
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


convert_unmended = interpreter._convert_float


def convert_float(data, source, target, rounding_mode):
    if source in TORCH_TYPES and target in TORCH_TYPES and MENDED & {source, target}:
        out = as_torch(data, source).to(torch.float32).to(TORCH_TYPES[target])
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return out.view(raw[out.dtype.itemsize]).numpy().view(f"u{out.dtype.itemsize}")
    return convert_unmended(data, source, target, rounding_mode)


interpreter.InterpreterBuilder.create_dot = create_dot
interpreter._convert_float = convert_float

PROVES = tuple((backend, "interpreted") for backend in ("cuda", "rocm", "xpu"))
targets.targets = lambda: [
    pytest.param(targets.Target(CpuRuntime(), TritonOps(), PROVES), id="triton-interpreter")
]
