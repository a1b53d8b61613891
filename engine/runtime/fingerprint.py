"""What a page's bytes depend on beside its tokens, as 32 bytes: weights, types and layout.

Runs on: gpu.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

# Weights are told apart by a sample, for reading all of them would take longer than loading them:
# SAMPLE_BYTES of every STRIDE_BYTES, and the sizes. So copies on other machines have the same.
STRIDE_BYTES = 1 << 20
SAMPLE_BYTES = 4096
FORMAT = 1  # of what the sources below mean


def fingerprint(weights: Sequence[Path], **facts: Any) -> bytes:
    """A hash of the files' content and of some facts (which JSON can write)."""
    digest = blake2b(digest_size=32, person=b"stoker kv model")
    digest.update(json.dumps([FORMAT, facts], sort_keys=True).encode())
    for path in sorted(weights, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            for offset in [*range(0, size, STRIDE_BYTES), max(size - SAMPLE_BYTES, 0)]:
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
