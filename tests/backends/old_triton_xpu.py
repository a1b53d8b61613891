"""Triton's only compiler for Intel GPUs on the package index, 3.3: our kernels to SPIR-V by it.

    PYTHONPATH=FOLDER_OF_TRITON_XPU:... pytest -p old_triton_xpu tests/backends/xpu_compiled.py

As a pytest plugin it adds to Triton 3.3 what our kernels, which are written for 3.5 and later, use
of these, so that the same source compiles.
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stoker.backends.cache import cache_folder

VERSION = "3.3.0b1"
B580 = {
    "name": "Intel(R) Arc(TM) B580 Graphics",
    "architecture": 0,
    "vendor": "Intel",
    "vendor_id": 0x8086,
    "driver_version": "",
    "version": "",
    "platform_name": "",
    "type": "gpu",
    "device_type": "gpu",
    "max_compute_units": 160,
    "gpu_eu_count": 160,
    "gpu_subslice_count": 20,
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "local_mem_size": 131_072,
    "max_shared_mem": 131_072,
    "total_memory": 12 << 30,
    "has_fp16": True,
    "has_fp64": True,
    "has_atomic64": True,
    "has_bfloat16_conversions": True,
    "has_subgroup_2d_block_io": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
}


def unpacked() -> Path:
    """The folder that holds its `triton`; a skip where the index has none for this Python."""
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / "tests" / f"triton-xpu-{VERSION}-{python}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", temporary]
        done = subprocess.run([*command, f"triton-xpu=={VERSION}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"triton-xpu cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
        aside = Path(temporary) / "unpacked"
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            unused = ("triton/backends/nvidia/lib/cupti", "triton/backends/nvidia/bin")
            wheel.extractall(aside, [n for n in wheel.namelist() if not n.startswith(unused)])
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder


def complete(triton: ModuleType) -> None:
    """Add to 3.3 what later versions have."""
    import triton.language as tl
    from triton.backends import backends
    from triton.compiler.code_generator import CodeGenerator
    from triton.runtime import driver

    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    triton.constexpr_function = lambda function: function
    later = ModuleType("triton.tools.tensor_descriptor")
    later.TensorDescriptor = type("TensorDescriptor", (), {})
    sys.modules[later.__name__] = later
    type(driver)._active = property(lambda self: None, lambda self, value: None)
    # Attributes of compile-time values are such values, too.
    tl.constexpr.__getattr__ = lambda self, name: tl.constexpr(
        getattr(self.__dict__["value"], name)
    )
    # It asks a C++ module that needs SYCL for this.
    known = backends["intel"].compiler.__init__.__globals__
    bmg = SimpleNamespace(parse_device_arch=lambda arch: "bmg")
    known["compile_module_from_src"] = lambda source, name: bmg

    visit_pair = CodeGenerator.visit_BoolOp

    def visit_boolean(self, node: ast.BoolOp):
        """a or b or c: it takes two at once."""
        values = list(node.values)
        while len(values) > 2:
            pair = ast.copy_location(ast.BoolOp(node.op, values[:2]), node)
            values = [pair, *values[2:]]
        return visit_pair(self, ast.copy_location(ast.BoolOp(node.op, values), node))

    CodeGenerator.visit_BoolOp = visit_boolean
    whole = tl.histogram

    @triton.jit
    def histogram(x, N: tl.constexpr, mask):
        """With a mask: what is masked out is counted as 0, and taken off again."""
        counts = whole(tl.where(mask, x, 0), N)
        return counts - tl.where(tl.arange(0, N) == 0, tl.sum((mask == 0).to(tl.int32), 0), 0)

    histogram.fn.__globals__.update(whole=whole, tl=tl)
    tl.histogram = histogram


def pytest_configure():
    import triton

    if triton.__version__.startswith("3.3"):
        complete(triton)
