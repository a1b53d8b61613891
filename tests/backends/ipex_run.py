"""intel-extension-for-pytorch's CPU kernels under our calls of them, against float64.

    python tests/backends/ipex_run.py FOLDER_OF_STOKER

is for an interpreter with torch 2.8 and the package, without pytest; `test_xpu.py` starts it. The
layout of pages, the names and the meaning of arguments are those of its GPU kernels.
"""

import sys
from types import SimpleNamespace

import intel_extension_for_pytorch  # noqa: F401 - before triton is hidden
import torch

sys.modules["triton"] = None  # torch 2.8's is older than our kernels
sys.path.insert(0, sys.argv[1])

from stoker.backends.contract.checks import Target, checks  # noqa: E402
from stoker.backends.xpu import IpexOps  # noqa: E402

RUNTIME = SimpleNamespace(name="xpu", device=torch.device("cpu"), facts=None)
REFUSED = ("sinks", "everything", "gpt-oss", "page1-", "window1-")  # by `IpexOps.settle`


def main() -> int:
    """How many checks passed, on the standard output; how many did not, as the exit status."""
    ops, failed, passed = IpexOps(), 0, 0
    assert ops.probe(RUNTIME) is None, ops.probe(RUNTIME)
    for check in checks():
        if check.ops[0] not in ("attend", "write_qkv") or any(r in str(check) for r in REFUSED):
            continue
        try:
            assert check.run(Target(RUNTIME, ops)) <= 1
            passed += 1
        except Exception as error:
            failed += 1
            print(check, type(error).__name__, str(error)[:200])
    print(f"{passed} passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
