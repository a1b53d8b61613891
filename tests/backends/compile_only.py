"""Compile Triton kernels for a GPU that is not there.

Inside `CompileOnly("gfx942")` the ordinary launchers may be called with meta tensors: each launch
is compiled for that target, specialized as it would be in use, and not run.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from proofs import prove

import stoker.backends.triton
from stoker.backends.registry import OP_NAMES, OPTIONAL_OPS
from stoker.backends.triton import absent
from stoker.backends.triton.absent import compile_only
from stoker.backends.triton.arch import ARCHS

NAMES = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950")
TARGETS = {name: absent.TARGETS[name] for name in NAMES}
MATRIX_INSTRUCTIONS = {
    "sm_80": r"\bmma\.sync",
    "sm_90": r"\b(?:wgmma\.mma_async|mma\.sync)",
    "sm_100": r"\b(?:tcgen05\.mma|mma\.sync)",
    "gfx90a": r"\bv_mfma",
    "gfx942": r"\bv_mfma",
    "gfx950": r"\bv_mfma",
}


KERNELS = next(iter(stoker.backends.triton.__path__))
OPS = (*OP_NAMES, *OPTIONAL_OPS)


@dataclass
class Compiled:
    """What one launch became."""

    name: str
    shared_bytes: int
    num_threads: int
    spilled: int  # registers (AMD) or bytes of stack (NVIDIA)
    matrix_instructions: int
    is_float32: bool  # its first argument is
    buffer_loads: int  # AMD's loads of tensors below 2 GiB


class CompileOnly:
    """Context manager; `kernels` lists what was compiled, `ops` the ops that launched it.

    An op is recognised by its function in backends/triton, which has its name.

    Raises:
        MemoryError: at a launch that needs more shared memory than the target has.
    """

    def __init__(self, name: str):
        self.name = name
        self.kernels: list[Compiled] = []
        self.ops: set[str] = set()

    def __enter__(self):
        seen = set()

        def note(function, kernel, args):
            self.ops |= set(_functions_on_the_stack()) & set(OPS)
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                self.kernels.append(self._describe(function.__name__, kernel, args))

        self._context = compile_only(TARGETS[self.name], note)
        self._context.__enter__()
        return self

    def __exit__(self, *raised):
        return self._context.__exit__(*raised)

    def prove(self) -> None:
        """That the ops compile: to be called after the assertions about the kernels."""
        backend = "cuda" if self.name.startswith("sm_") else "rocm"
        for op in self.ops:
            prove(backend, op, "triton", f"compiled:{self.name}")

    def _describe(self, name: str, kernel, args) -> Compiled:
        shared, limit = kernel.metadata.shared, ARCHS[self.name].shared_bytes
        if shared > limit:
            raise MemoryError(f"{name} on {self.name}: {shared} bytes of shared memory > {limit}")
        is_amd = "amdgcn" in kernel.asm
        asm = kernel.asm["amdgcn" if is_amd else "ptx"]
        binary = kernel.asm["hsaco" if is_amd else "cubin"]
        assert binary[:4] == b"\x7fELF"
        return Compiled(
            name,
            shared,
            kernel.metadata.num_warps * TARGETS[self.name].warp_size,
            _amd_spills(asm) if is_amd else _nvidia_stack(binary),
            len(re.findall(MATRIX_INSTRUCTIONS[self.name], asm)),
            bool(args) and args[0].dtype == torch.float32,
            len(re.findall(r"\bbuffer_load_", asm)),
        )


def _functions_on_the_stack() -> Iterator[str]:
    """Names of our kernels' host functions that are running."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(KERNELS):
            yield frame.f_code.co_name
        frame = frame.f_back


def _amd_spills(asm: str) -> int:
    return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", asm)[1])


def _nvidia_stack(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)[1])
