"""Imported first by scripts for a GPU: --help prints their docstring, and without a GPU they end.

Runs on: any (pure).
"""

import sys

import torch

_script = sys.modules["__main__"]
if {"-h", "--help"} & set(sys.argv):
    print((_script.__doc__ or "").strip())
    sys.exit()
if not torch.cuda.is_available():
    sys.exit(f"{sys.argv[0]} needs a GPU, and torch {torch.__version__} finds none here")
