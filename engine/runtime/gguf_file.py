"""A GGUF file's header, read with every count, length and offset checked against the file's size.

Format: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3, little-endian.

Runs on: any (pure).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..api.errors import StartError

MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_LENGTH = 1 << 24
MAX_DIMENSIONS = 4
SCALARS = {  # value type to struct format
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry: shape in torch's order, and where its bytes lie in the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Attributes:
        metadata: key to int, float, bool, str, or a list of those.
        tensors: name to entry, in the file's order.
    """

    def __init__(self, path: Path):
        """Read the header.

        Raises:
            StartError: this is no GGUF file, or its header contradicts its size.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                # Copy on write, though nobody writes: torch wants memory that can be written to.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise StartError(f"{path}: cannot be read ({error})") from None
        self._at = 0
        try:
            self._read_header()
        except struct.error:
            raise self._broken("ends inside its header; is it truncated?") from None
        except UnicodeDecodeError:
            raise self._broken("has text that is not UTF-8") from None

    def data(self, name: str) -> np.ndarray:
        """The raw bytes of a tensor, uint8, not copied."""
        tensor = self.tensors[name]
        return np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise self._broken("is no GGUF file")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._broken(f"has GGUF version {version}; 2 and 3 (little-endian) are read")
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        if max(num_tensors, num_entries) > MAX_ENTRIES:
            raise self._broken(f"claims {num_tensors} tensors and {num_entries} entries")
        for _ in range(num_entries):
            key = self._string()
            if key in self.metadata:
                raise self._broken(f"has the key {key!r:.100} twice")
            self.metadata[key] = self._value(self._scalar("<I"))
        raw = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"has the alignment {alignment!r:.40}")
        start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in raw:
            self._add(name, shape, type_id, start + offset)

    def _add(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> None:
        if name in self.tensors:
            raise self._broken(f"has the tensor {name!r:.100} twice")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise self._broken(f"stores {name!r:.100} as unknown type {type_id}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_elements = 1
        for size in shape:
            num_elements *= size
        if shape[-1] % block_size:
            raise self._broken(f"has rows of {shape[-1]} in {name!r:.100}, a {kind.name}")
        num_bytes = num_elements // block_size * block_bytes
        if offset + num_bytes > len(self._bytes):
            raise self._broken(
                f"has {len(self._bytes)} bytes, but tensor {name!r:.100} ends at "
                f"{offset + num_bytes}; is it truncated?"
            )
        self.tensors[name] = GGUFTensor(shape, kind, offset, num_bytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self._broken(f"gives {name!r:.100} {num_dims} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_dims)]))
        if not all(shape):
            raise self._broken(f"gives {name!r:.100} the shape {list(shape)}")
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._broken(f"has a value of unknown type {kind}")
        kind, length = self._scalar("<I"), self._scalar("<Q")
        if length > MAX_ARRAY_LENGTH:
            raise self._broken(f"has an array of {length} values")
        if kind == STRING:
            return [self._string() for _ in range(length)]
        if kind not in SCALARS:  # arrays of arrays are legal, but nobody writes them
            raise self._broken(f"has an array of values of type {kind}")
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        return values.tolist()

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        if length > MAX_STRING_BYTES:
            raise self._broken(f"has a text of {length} bytes")
        return self._take(length).decode()

    def _take(self, num_bytes: int) -> bytes:
        if self._at + num_bytes > len(self._bytes):
            raise self._broken("ends inside its header; is it truncated?")
        self._at += num_bytes
        return self._bytes[self._at - num_bytes : self._at]

    def _broken(self, what: str) -> StartError:
        return StartError(f"{self.path} {what}")
