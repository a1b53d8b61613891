"""A store on disk: one file a page, named by its key, in a folder for each fingerprint.

    DIR/kv-<fingerprint>/ab/abcd...   the least recently used files go when the limit is reached

Files are written beside their place and renamed into it, so a reader never sees half of one; what
a crash leaves behind is found by its checksum. Several processes may share a folder: what another
one has removed is missing, what it has written is found; the limit is what one process sees.

Runs on: pool.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ...api.errors import StartError

STALE_S = 3600  # an unfinished file this old has no writer any more


class DiskStore:
    """Records as files.

    Args:
        folder: made where it is not there.
        fingerprint: of model, dtype, layout and page size.
        limit_bytes: of all records together, those of other fingerprints in the folder included
            at the start.

    Raises:
        StartError: the folder cannot be written to.
    """

    name = "disk"

    def __init__(self, folder: Path, fingerprint: bytes, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._folder = folder / f"kv-{fingerprint.hex()[:32]}"
        self._lock = threading.Lock()
        # Path to size of every file, the least recently used first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        self._num_written = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
            self._scan(folder)
        except OSError as error:
            raise StartError(f"--disk-cache-dir {folder}: {error.strerror}") from None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """By name; a file that another process wrote counts as well."""
        return [self._find(self._path(key)) for key in keys]

    def get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """A file of another size than a record counts as missing, and is removed."""
        return [self._read(self._path(k), r) for k, r in zip(keys, records, strict=True)]

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """Raises OSError where the disk is full or broken."""
        return [self._write(self._path(k), r) for k, r in zip(keys, records, strict=True)]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        for key in keys:
            self._remove(self._path(key))

    def close(self) -> None:
        """Nothing is open."""

    @property
    def num_bytes(self) -> int:
        """What all files take."""
        return self._num_bytes

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return os.path.join(self._folder, name[:2], name)

    def _find(self, path: str) -> bool:
        if path in self._sizes:
            return True
        try:
            size = os.stat(path).st_size
        except OSError:
            return False
        self._note(path, size)
        return True

    def _read(self, path: str, record: memoryview) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._forget(path)
            return False
        try:
            at = 0
            while at < len(record) and (n := os.readv(fd, [record[at:]])):
                at += n
            is_whole = at == len(record) and os.fstat(fd).st_size == at
            os.utime(fd)  # what was used stays longer, after a restart too
        finally:
            os.close(fd)
        if not is_whole:
            self._remove(path)
            return False
        self._note(path, len(record))
        return True

    def _write(self, path: str, record: memoryview) -> bool:
        if len(record) > self._limit_bytes:
            return False
        if self._find(path):
            return True
        self._make_room(len(record))
        with self._lock:
            self._num_written += 1
            unfinished = f"{path}.{os.getpid()}-{self._num_written}.tmp"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                at = 0
                while at < len(record):
                    at += os.write(fd, record[at:])
            finally:
                os.close(fd)
            os.replace(unfinished, path)
        except BaseException:
            _unlink(unfinished)
            raise
        self._note(path, len(record))
        return True

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or self._num_bytes + num_bytes <= self._limit_bytes:
                    return
                path, size = self._sizes.popitem(last=False)
                self._num_bytes -= size
            _unlink(path)

    def _note(self, path: str, size: int) -> None:
        with self._lock:
            self._num_bytes += size - self._sizes.get(path, 0)
            self._sizes[path] = size
            self._sizes.move_to_end(path)

    def _forget(self, path: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(path, 0)

    def _remove(self, path: str) -> None:
        self._forget(path)
        _unlink(path)

    def _scan(self, folder: Path) -> None:
        """Note the files that are there, and remove what was never finished."""
        found = []
        for kind in folder.glob("kv-*"):
            for entry in _entries(kind):
                if not entry.is_dir(follow_symlinks=False):
                    continue
                for file in _entries(entry.path):
                    try:
                        stat = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if not file.name.endswith(".tmp"):
                        found.append((stat.st_mtime, file.path, stat.st_size))
                    elif time.time() - stat.st_mtime > STALE_S:
                        _unlink(file.path)
        for _, path, size in sorted(found):
            self._note(path, size)
        self._make_room(0)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or not ours to remove: it is not counted any more
