"""Content keys of KV pages: what a page holds, told by 32 bytes.

A page's KV depends on all tokens up to its end, on the namespace (adapter, salt, ...) and on the
model. So a key is the hash of its parent's key and its own tokens, and the chain begins at a root
that hashes namespace and fingerprint, each part framed by its length: ("a", "bc") is not
("ab", "c"). Equal keys mean equal KV, in this process, after a restart, and on other machines.

Runs on: any (pure).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np

KEY_BYTES = 32


def root_key(namespace: tuple[str, ...], fingerprint: bytes = b"") -> bytes:
    """The parent of a namespace's first pages, for the model with this fingerprint."""
    root = blake2b(digest_size=KEY_BYTES, person=b"stoker kv root")
    for part in (fingerprint, *(name.encode("utf-8", "surrogatepass") for name in namespace)):
        root.update(len(part).to_bytes(8, "little"))
        root.update(part)
    return root.digest()


def extend(keys: list[bytes], root: bytes, tokens: array | np.ndarray, page_size: int) -> None:
    """Append the keys of the whole pages of tokens (int32) that `keys` does not cover yet."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_size, len(tokens) // page_size * page_size, page_size):
        page = tokens[start : start + page_size].tobytes()
        parent = blake2b(parent + page, digest_size=KEY_BYTES).digest()
        keys.append(parent)
