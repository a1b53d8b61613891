"""Writes tests/data/aiter_signatures.json: parameter lists of a newer AITER than the index has.

    python tests/backends/extract_aiter.py CHECKOUT COMMIT

reads the functions that backends/rocm calls out of a checkout's source, without importing it.
"""

import ast
import json
import sys
from pathlib import Path

from aiter_package import NEWER

from stoker.backends.rocm import package


def main(checkout: str, commit: str) -> None:
    """Names alone, and whether there is a default: facts of an interface."""
    found = {}
    for function in package.FUNCTIONS:
        for module in function.modules:
            path = Path(checkout, module.replace(".", "/") + ".py")
            for node in ast.parse(path.read_text()).body if path.exists() else []:
                if isinstance(node, ast.FunctionDef) and node.name == function.name:
                    found[f"{module}.{function.name}"] = f"({plain(node.args)})"
    about = {"source": "ROCm/aiter", "commit": commit, "functions": dict(sorted(found.items()))}
    NEWER.write_text(json.dumps(about, indent=1) + "\n")


def plain(given: ast.arguments) -> str:
    """ "q, k, scale=..." """
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    num_required = len(names) - len(given.defaults)
    return ", ".join(name if i < num_required else f"{name}=..." for i, name in enumerate(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
