"""The contract's checks on a GPU, several processes at once; and AITER's Triton attention there.

    python benchmarks/gpu_contract.py [--backend cuda] [--report FILE] [--aiter WHEEL_OR_FOLDER]

Every op of every provider is checked in a process of its own, by `stoker check-backend`, so that
kernels compile in parallel and a fault of one ends no other. The reports become one, which belongs
in tests/data/reports: what is good there has the label "ran".

With --aiter, on an NVIDIA GPU, the ROCm backend's call of AITER's `unified_attention` runs there:
its kernels are plain Triton. What it says of itself there is printed; AMD's launch options, which
NVIDIA's compiler does not know, are left out. The wheel is amd-aiter 0.1.7.post2.dev18; a zip of
its aiter/ops/triton is enough.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.backends.contract.checks import checks

MANY = ("attend", "quantized_linear", "quantized_experts", "delta_net", "mla_attend")
KINDS = ("-float32", "-float16", "-bfloat16")


def check_in_processes(backend: str, only: list[str], report: Path) -> bool:
    """Check all ops; those with many kernels by type."""
    ops = only or list(dict.fromkeys(check.ops[0] for check in checks()))
    jobs = [(op, kind) for op in ops if op in MANY for kind in KINDS]
    jobs += [(op, "") for op in ops if op not in MANY]

    def run(job: tuple[str, str]) -> tuple[str, dict]:
        op, case = job
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            command = [sys.executable, "-m", "stoker.http", "check-backend", "--backend", backend]
            command += ["--op", op, f"--case={case}", "--report", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if not path.exists():
                return done.stdout + done.stderr[-2000:], {}
            return done.stdout, json.loads(path.read_text())

    merged: dict = {}
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (op, _), (printed, found) in zip(jobs, pool.map(run, jobs), strict=True):
            print("".join(f"{line}\n" for line in printed.splitlines()[1:-1]), end="")
            if not found:
                print(f"{op}: the process ended without a report\n{printed}")
                return False
            if not merged:
                merged = found
                continue
            for row in found["ops"]:
                same = [r for r in merged["ops"] if r["op"] == row["op"]
                        and r["provider"] == row["provider"]]  # fmt: skip
                if not same:
                    merged["ops"].append(row)
                for known in same:
                    known["passed"] += row["passed"]
                    known["failed"] += row["failed"]
                    known["seconds"] += row["seconds"]
                    known["worst_error"] = max(known["worst_error"], row["worst_error"])
    report.write_text(json.dumps(merged, indent=1) + "\n")
    failed = sum(len(row["failed"]) for row in merged["ops"])
    passed = sum(row["passed"] for row in merged["ops"])
    print(f"{merged['device']}: {passed} checks passed, {failed} failed; the report is in {report}")
    return failed == 0


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--report", type=Path, default=Path("gpu-contract.json"))
    parser.add_argument("--aiter", type=Path, help="wheel of amd-aiter, or a folder with its files")
    parser.add_argument("--only-aiter", action="store_true", help="leave out the other checks")
    arguments = parser.parse_args()
    is_good = arguments.only_aiter or check_in_processes(
        arguments.backend, arguments.op, arguments.report
    )
    if arguments.aiter is not None:
        is_good &= check_aiter(arguments.aiter)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
