"""Stores of KV pages behind the host memory, and the record that all of them keep.

A store keeps opaque records of one size under keys of 32 bytes. A record is a page over all layers
behind a header that says what it is; who reads one verifies it, so a store may lose, truncate, mix
up or damage what it holds, and the page is computed again.

    bytes   0 -   7   "stokerKV"
            8 -  11   format version, little-endian
           12 -  15   CRC-32 of all bytes from 16 on
           16 -  47   the page's key, which stands for its model, namespace and tokens
           48 -  79   the fingerprint of model, dtype, layout and page size, for whoever looks
           80 - 127   zero
          128 -       keys and values, layer after layer

Runs on: any (pure).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

HEADER_BYTES = 128
FORMAT_VERSION = 1
_MAGIC = b"stokerKV"


class PageStore(Protocol):
    """Keeps records. Its methods are called from several threads at once, and may raise anything.

    Attributes:
        name: in figures and logs.
    """

    name: str

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys it holds. Being wrong costs time, not correctness."""

    def get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """Read records into buffers of their size; False for each that is not there whole."""

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """Keep records; they may be changed once this returns. False for each it does not keep."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget records that were found to be damaged."""

    def close(self) -> None:
        """Let go of files and connections."""


def seal(record: memoryview, key: bytes, fingerprint: bytes) -> None:
    """Write the header of a record."""
    record[:HEADER_BYTES] = bytes(HEADER_BYTES)
    record[16:48] = key
    record[48:80] = fingerprint
    record[:8] = _MAGIC
    record[8:12] = FORMAT_VERSION.to_bytes(4, "little")
    record[12:16] = zlib.crc32(record[16:]).to_bytes(4, "little")


def is_intact(record: memoryview, key: bytes) -> bool:
    """Whether a record is of this format and key, and as it was written."""
    return (
        record[:8] == _MAGIC
        and record[8:12] == FORMAT_VERSION.to_bytes(4, "little")
        and record[16:48] == key
        and record[12:16] == zlib.crc32(record[16:]).to_bytes(4, "little")
    )
