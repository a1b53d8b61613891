"""Compiles a model's Triton kernels in other processes while the engine starts.

Triton compiles a kernel when it is first launched: some forty for a model, half a second each, most
of it with the GIL, so that threads do not help. Here another process imports what it needs while
the first does the same, walks through the steps that will be captured with tensors that have no
memory, and compiles each launch instead of making it; forks of it share the work. It needs no GPU,
and all that it leaves is Triton's cache on disk. What it misses is compiled at first use, as ever.

Runs on: loop, worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .api.config import EngineConfig

if TYPE_CHECKING:
    from ..backends.triton.absent import Job

log = logging.getLogger("stoker")

MAX_PROCESSES = 16
MAX_WAIT_S = 60.0
CUDA_ATTRIBUTES = {"major": 75, "minor": 76, "num_cores": 16}  # of cuDeviceGetAttribute


class Device(NamedTuple):
    """What kernels are compiled for."""

    major: int
    minor: int
    num_cores: int


class Ahead:
    """The compiling process."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]):
        self._process = process
        self._errors = errors

    def wait(self) -> None:
        """Until all is compiled, or it failed, or a minute has passed; both are logged."""
        try:
            if self._process.wait(MAX_WAIT_S) == 0:
                return
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), "it was ended")
        except subprocess.TimeoutExpired:
            self.stop()
            reason = f"it took more than {MAX_WAIT_S:g} s"
        log.warning("kernels were not compiled ahead, so the start takes longer: %s", reason)

    def stop(self) -> None:
        """End it and its forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_begun: dict[str, Ahead] = {}


def start(config: EngineConfig) -> Ahead | None:
    """Begin to compile, if a CUDA device will serve and its kernels are not known to be cached.

    May be called ahead of the engine's own call, which then gets the process that runs.
    """
    settings = json.dumps(_settings(config))
    if settings not in _begun and (ahead := _start(config)) is not None:
        _begun[settings] = ahead
    return _begun.get(settings)


def _start(config: EngineConfig) -> Ahead | None:
    if config.backend not in ("auto", "cuda") or importlib.util.find_spec("triton") is None:
        return None
    device = _first_cuda_device()
    if device is None or not Path(config.model).exists() or _marker(config, device).exists():
        return None
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=(errors := tempfile.TemporaryFile()),
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps({"config": _settings(config), "device": device}).encode())
    return Ahead(process, errors)


def _settings(config: EngineConfig) -> dict[str, Any]:
    """The engine's own settings; the server's may be secret and have no part in this."""
    return config.model_dump(mode="json", include=set(EngineConfig.model_fields))


def _first_cuda_device() -> Device | None:
    """The first visible device, by the driver's library alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), 0):
        return None
    values = []
    for attribute in CUDA_ATTRIBUTES.values():
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle):
            return None
        values.append(value.value)
    return Device(*values)


def _marker(config: EngineConfig, device: Device) -> Path:
    """A file in Triton's cache that says that this was compiled; it goes when the cache goes."""
    parts = [json.dumps(_settings(config)), str(device), sys.version]
    parts += [importlib.metadata.version(name) for name in ("torch", "triton")]
    digest = hashlib.sha256("\0".join(parts).encode())
    sources = Path(__file__).parents[1] / "backends/triton"
    model = Path(config.model) / "config.json"
    for path in [*sorted(sources.glob("*.[jp]*")), *([model] if model.exists() else [])]:
        digest.update(path.read_bytes())
    home = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    cache = Path(os.environ.get("TRITON_CACHE_DIR", home))
    return cache / f"stoker-{digest.hexdigest()[:32]}"


def find_jobs(config: EngineConfig, device: Device) -> list[Job]:
    """The kernels that an engine of this configuration launches, the longest first.

    For a process of its own: it takes torch's compiler away.
    """
    import torch

    from ..backends import cuda, registry
    from ..backends.triton.absent import TARGETS, collect
    from .build import Builder

    # Meta tensors have kernels in Python, and the first use of one imports torch's compiler to keep
    # them out of it: five seconds.
    stub: Any = types.ModuleType("torch._dynamo")
    stub.disable = lambda function, *_, **__: function
    torch._dynamo = sys.modules["torch._dynamo"] = stub
    runtime = cuda.AbsentCuda((device.major, device.minor), device.num_cores)
    with collect(TARGETS[f"sm_{device.major}{device.minor}"]) as found, torch.inference_mode():
        builder = Builder(config.model_copy(update={"load_format": "dummy"}))
        builder.find_files()
        backend = registry.assemble(cuda, runtime, builder.overrides)
        for step in builder.walk(backend, runtime.captured):
            step()
    return sorted(found.values(), key=lambda job: -len(job.source.fn.src))


def compile_all(jobs: list[Job], num_processes: int) -> None:
    """Compile kernels in forks of this process. RuntimeError if one fails."""
    queue, numbers = os.pipe()
    os.write(numbers, b"".join(i.to_bytes(2, "big") for i in range(len(jobs))))
    os.close(numbers)
    children = []
    for _ in range(num_processes):
        child = os.fork()
        if not child:
            while number := os.read(queue, 2):
                jobs[int.from_bytes(number, "big")].run()
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError(f"{len(failed)} of {num_processes} processes failed")


def main() -> None:
    """The process that `start` begins."""
    order = json.loads(sys.stdin.buffer.read())
    config, device = EngineConfig(**order["config"]), Device(*order["device"])
    num_processes = max(1, min(MAX_PROCESSES, os.cpu_count() or 1) - 1)
    compile_all(find_jobs(config, device), num_processes)
    marker = _marker(config, device)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


if __name__ == "__main__":
    main()
