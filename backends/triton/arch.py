"""Which GPU the kernels are compiled for, as far as block sizes depend on it.

Runs on: gpu.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl


class Arch(NamedTuple):
    """A GPU architecture: its name, shared memory a block may use, and multiprocessors."""

    name: str
    shared_bytes: int
    num_cores: int

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel can start while the one before it drains (sm_90 and later)."""
        return self.name.startswith("sm_") and int(self.name.removeprefix("sm_")) >= 90

    @property
    def launch_options(self) -> dict[str, bool]:
        """For kernels that wait for the one before: programmatic dependent launch where it is."""
        return {"PDL": True, "launch_pdl": True} if self.has_pdl else {"PDL": False}


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_80", 166_912, 108),
        Arch("sm_90", 232_448, 132),
        Arch("sm_100", 232_448, 148),
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
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    return ARCHS.get(name, Arch(name, 65_536, 64))


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the one before to be done.

    Every kernel that is launched with PDL must wait: the next one takes it for granted that what
    came before has been written.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
