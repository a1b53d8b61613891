"""vllm-xpu-kernels, as the package index has it: fetched once, kept as far as it is readable here.

Its libraries need an Intel GPU's runtime to be loaded. But an op's schema is a string in them, with
which it is registered, and what a kernel was compiled for is in its symbol's name: these facts and
the package's Python are kept beside other caches, the libraries are not.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stoker.backends.cache import cache_folder
from stoker.backends.xpu import package

VERSION = "0.1.16.2"
FACTS = "facts.json"
SCHEMA = re.compile(rb"(?<=\0)[a-z_][a-z0-9_]*\([ -~\n]*\)\s+->\s+[ -~\n]+(?=\0)")
# Ops that the library _C registers as _C_cache_ops: the namespace is beside its own, a schema's
# namespace cannot be read. These are vLLM's calls.
OF_CACHES = re.compile("(reshape_and_cache|concat_and_cache|swap_blocks|(cp_)?gather_)")
SYMBOLS = {  # facts: library, and what stands before the number
    "top_ks": ("_moe_C.abi3.so", rb"RemapHiddenStatesI\w{0,80}?Li(\d+)EEE"),
    "head_dims": ("libattn_kernels_xe_2.so", rb"qpacked_headIN4cute1CILi\d+EEENS\d*_ILi(\d+)E"),
}


def unpacked() -> Path:
    """The folder that holds `vllm_xpu_kernels`; a skip where the index cannot be reached."""
    folder = cache_folder() / "tests" / f"vllm-xpu-kernels-{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        # Of whatever platform this is: its libraries are read, not loaded.
        platform = ["--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *platform]
        done = subprocess.run(
            [*command, "--dest", temporary, f"vllm-xpu-kernels=={VERSION}"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"vllm-xpu-kernels cannot be fetched: {done.stderr.splitlines()[-1:]}")
        aside = Path(temporary) / "unpacked"
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            wheel.extractall(aside, [n for n in wheel.namelist() if not n.endswith(".so")])
            (aside / FACTS).write_text(json.dumps(read(wheel), indent=1))
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder


def read(wheel: zipfile.ZipFile) -> dict[str, Any]:
    """What its libraries say: schemas by namespace, and the numbers in SYMBOLS."""
    schemas: dict[str, list[str]] = {}
    for library in package.LIBRARIES:
        for found in SCHEMA.findall(wheel.read(f"{package.MODULE}/{library}.abi3.so")):
            schema = " ".join(found.decode().split())
            is_of_caches = library == "_C" and OF_CACHES.match(schema)
            schemas.setdefault("_C_cache_ops" if is_of_caches else library, []).append(schema)
    facts: dict[str, Any] = {"schemas": schemas}
    for name, (library, pattern) in SYMBOLS.items():
        numbers = re.findall(pattern, wheel.read(f"{package.MODULE}/{library}"))
        facts[name] = sorted({int(number) for number in numbers})
    return facts


@cache
def facts() -> dict[str, Any]:
    """See `read`."""
    return json.loads((unpacked() / FACTS).read_text())
