"""AITER's Triton attention on an NVIDIA GPU, through the ROCm backend's own call, against float64.

    python benchmarks/gpu_aiter.py WHEEL_OR_FOLDER

Its kernels are plain Triton. What it says of itself there is printed; AMD's launch options, which
NVIDIA's compiler does not know, are left out. The wheel is amd-aiter 0.1.7.post2.dev18; a zip of
its aiter/ops/triton is enough.
"""

import importlib
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import gpu_script  # noqa: F401 (--help, no GPU)


def check_aiter(source: Path) -> bool:
    """AITER's attention on this GPU, through our adapter, against float64."""
    import torch

    from stoker.backends import rocm
    from stoker.backends.contract.cases import attention_cases
    from stoker.backends.contract.checks import Target, attend
    from stoker.backends.cuda import CudaRuntime
    from stoker.backends.rocm import package

    if source.is_file():
        folder = tempfile.mkdtemp()
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("aiter/")])
        source = Path(folder)
    sys.path.insert(0, str(source))
    for name in ("aiter", "aiter.ops"):  # without __init__, which needs ROCm
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(source / name.replace(".", "/"))]
    # Its modules compare the architecture, a number on NVIDIA GPUs, with AMD's names.
    arch_info = importlib.import_module("aiter.ops.triton.utils._triton.arch_info")
    try:
        importlib.import_module("aiter.ops.triton.unified_attention")
    except Exception as error:
        print(f"aiter as it is: {type(error).__name__}: {error}")
        arch_info.get_arch = lambda: "nvidia"
    attention = sys.modules[package.unified_attention.function.__module__]
    for name in ("select_2d_config", "select_3d_config"):
        setattr(attention, name, _without_amd_options(getattr(attention, name)))
    target, is_good = Target(CudaRuntime(), rocm.AiterOps()), True
    for case in attention_cases():
        for dtype in (torch.bfloat16, torch.float16):
            try:
                shown = f"{attend(target, dtype, case):.2f}"
            except Exception as error:
                is_good, shown = False, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"aiter unified_attention {case.name:22} {str(dtype)[6:]:9} {shown}", flush=True)
    return is_good


def _without_amd_options(select):
    def plain(config):
        return {name: value for name, value in config.items() if name != "waves_per_eu"}

    def selected(*args, **kwargs):
        found = select(*args, **kwargs)
        return tuple(map(plain, found)) if isinstance(found, tuple) else plain(found)

    return selected


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(0 if check_aiter(Path(sys.argv[1])) else 1)
