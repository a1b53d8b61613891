"""Compiles kernels for a GPU without touching one.

With `compile_only` the ordinary launchers may be called with tensors of torch's meta device: each
launch is compiled for the target, specialised as it would be in use, stored in Triton's cache on
disk, and not run.

Runs on: worker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
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


class _NoDevice:
    """What `JITFunction.run` asks of a driver when it only compiles."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target  # the key of the function's kernel cache

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


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

    driver.set_active(_NoDevice(target))
    current_arch.cache_clear()
    jit.JITFunction.run = run
    try:
        yield
    finally:
        jit.JITFunction.run = launch
        driver._active = before
        current_arch.cache_clear()
