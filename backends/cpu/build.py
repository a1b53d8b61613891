"""Compiles kernels.cpp and its headers with the system's compiler at first use, and loads it.

The library is kept under STOKER_CACHE (or the user's cache folder), named by a hash of all that
went into it, so that a changed source, compiler, flag or processor makes a new one.

Runs on: gpu.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..api import BackendError
from ..cache import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-O3 -march=native -std=c++17 -fopenmp -fno-math-errno -fPIC -fvisibility=hidden "
    "-Wall -Wextra -Werror=return-type"
).split()
TIMEOUT_S = 120

logger = logging.getLogger(__name__)


def load(cpu: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled kernels.

    Args:
        cpu: model and features of the processor, which -march=native looks at.

    Raises:
        BackendError: there is no compiler, or it fails, or the result cannot be loaded.
    """
    compiler = _compiler()
    openmp = _loaded_openmp()
    version = _run([*compiler, "--version"])
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    parts = (*sources, *compiler, version, *FLAGS, *extra_flags, *openmp, cpu)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cache_folder() / f"cpu-kernels-{name}.so"
    if not path.exists():
        logger.info("compiling the CPU kernels into %s (once)", path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Built aside and renamed, so that starts at the same time do not collide.
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                obj, lib = Path(folder, "kernels.o"), Path(folder, "kernels.so")
                _run([*compiler, *FLAGS, *extra_flags, "-c", str(SOURCE), "-o", str(obj)])
                _run([*compiler, "-shared", str(obj), "-o", str(lib), *openmp])
                lib.replace(path)
        except OSError as error:
            raise BackendError(f"cannot write to {path.parent}: {error}") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"cannot load {path}: {error}") from error


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "c++"):
        if shutil.which(name):
            return [name]
    raise BackendError("no C++ compiler (g++ or c++) on PATH")


def _loaded_openmp() -> list[str]:
    """Torch's own OpenMP library, so that both share one pool of threads; else the compiler's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libgomp" in Path(path).name:
            return [path]
    return ["-fopenmp"]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        message = next((line for line in lines if "error" in line), "".join(lines[-1:]))
        raise BackendError(f"{command[0]} failed: {message}")
    if done.stderr.strip():
        logger.warning("%s: %s", command[0], done.stderr.strip())
    return done.stdout
