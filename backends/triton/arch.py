"""Which GPU the kernels are compiled for, as far as block sizes depend on it.

Runs on: gpu.
"""

import functools
from typing import NamedTuple

import triton


class Arch(NamedTuple):
    """A GPU architecture: its name, shared memory a block may use, and multiprocessors."""

    name: str
    shared_bytes: int
    num_cores: int


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_80", 166_912, 108),
        Arch("sm_90", 232_448, 132),
        Arch("sm_100", 232_448, 148),
        Arch("gfx90a", 65_536, 104),
        Arch("gfx942", 65_536, 304),
        Arch("gfx950", 163_840, 256),
    )
}


@functools.cache
def current_arch() -> Arch:
    """The current device's architecture; one that is not in the table gets modest limits."""
    if triton.knobs.runtime.interpret:
        return Arch("interpreter", 65_536, 4)
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "xpu":  # arch is a dict of the device's properties
        known = target.arch
        return Arch("xpu", known.get("local_mem_size", 65_536), known.get("max_compute_units", 64))
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    return ARCHS.get(name, Arch(name, 65_536, 64))
