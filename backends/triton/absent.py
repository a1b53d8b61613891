"""Compiles kernels for a GPU without touching one.

Inside `compile_only` and `collect` the ordinary launchers may be called with tensors of torch's
meta device: each launch is specialised as it would be in use, and not run. The first compiles it at
once, the second only notes what there is to compile, so that several processes can share it. What
is compiled lies in Triton's cache on disk.

Runs on: worker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, jit

from .arch import current_arch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class NoDevice:
    """What `JITFunction.run` asks of a driver when it only compiles."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> object:
        return self  # the key of the function's kernel cache

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Job(NamedTuple):
    """A kernel to compile."""

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    def run(self) -> None:
        """Compile it, and the C function that launches it."""
        kernel = compiler.compile(self.source, target=self.target, options=self.options)
        if self.target.backend == "cuda":
            from triton.backends.nvidia import driver

            if hasattr(driver, "make_launcher"):  # later versions have one launcher for all
                with suppress(AssertionError):  # there is no libcuda here to link with
                    driver.CudaLauncher(self.source, kernel.metadata)


@contextmanager
def compile_only(
    target: GPUTarget, seen: Callable[[Any, Any, tuple[Any, ...]], None] | None = None
) -> Iterator[None]:
    """Launches compile and do nothing else.

    Args:
        seen: called with (function, compiled kernel, arguments) after each launch.
    """
    before, launch = driver._active, jit.JITFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = launch(function, *args, grid=grid, warmup=True, **kwargs)
        if seen is not None:
            seen(function, kernel, args)
        return kernel

    driver.set_active(NoDevice(target))
    current_arch.cache_clear()
    jit.JITFunction.run = run
    try:
        yield
    finally:
        jit.JITFunction.run = launch
        driver._active = before
        current_arch.cache_clear()


@contextmanager
def collect(target: GPUTarget) -> Iterator[dict[str, Job]]:
    """Launches note what they would compile, each kernel once."""
    jobs: dict[str, Job] = {}
    compile_now = compiler.compile

    def note(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> object:
        key = f"{source.hash()} {sorted(options.items(), key=str)}"
        jobs.setdefault(key, Job(source, target, options))
        return object()

    with compile_only(target):
        compiler.compile = note
        try:
            yield jobs
        finally:
            compiler.compile = compile_now
