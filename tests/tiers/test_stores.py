"""Records, the disk store alone, and the threads' guard against stores that fail."""

import os
import queue
from array import array

import pytest

from stoker.engine.api.errors import StartError
from stoker.engine.core.copy_orders import DAMAGED, MISSING, Fetch, Find, Put
from stoker.engine.core.page_keys import extend, root_key
from stoker.engine.runtime.fingerprint import STRIDE_BYTES, fingerprint
from stoker.engine.runtime.stores import HEADER_BYTES, is_intact, seal
from stoker.engine.runtime.stores.disk import DiskStore
from stoker.engine.runtime.stores.threads import GuardedStore, StoreThreads

KEYS = [bytes([i]) * 32 for i in range(10)]
PRINT = b"p" * 32
SIZE = 1024


def record(i: int) -> memoryview:
    content = memoryview(bytearray([i]) * SIZE)
    seal(content, KEYS[i], PRINT)
    return content


def blank() -> memoryview:
    return memoryview(bytearray(SIZE))


def test_every_flipped_bit_is_seen():
    for position in range(0, SIZE):
        content = record(3)
        assert is_intact(content, KEYS[3])
        content[position] ^= 1 << position % 8
        assert not is_intact(content, KEYS[3]), position
    assert not is_intact(record(3), KEYS[4]), "another page's record"
    assert bytes(record(3)[HEADER_BYTES:]) == bytes([3]) * (SIZE - HEADER_BYTES)


def test_keys_frame_their_parts():
    roots = [
        root_key(("a", "bc"), b"model"),
        root_key(("ab", "c"), b"model"),
        root_key(("abc",), b"model"),
        root_key(("a", "bc"), b"modelx"),
        root_key(("", "a", "bc"), b"model"),
        root_key((), b"model"),
        root_key(("model",), b""),
    ]
    assert len(set(roots)) == len(roots)
    tokens = [list(range(8)), [0, 1, 2, 3, 9, 5, 6, 7], [9, *range(1, 8)]]
    chains = []
    for each in tokens:
        keys = []
        extend(keys, roots[0], array("i", each[:5]), 4)
        extend(keys, b"not used any more", array("i", each), 4)
        chains.append(keys)
    assert [len(keys) for keys in chains] == [2, 2, 2]
    assert chains[0][0] == chains[1][0] and chains[0][1] != chains[1][1]
    assert chains[0][0] != chains[2][0] and chains[0][1] != chains[2][1], (
        "equal tokens after others"
    )


def test_a_fingerprint_tells_weights_and_layouts_apart(tmp_path):
    path = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(3 * STRIDE_BYTES))
    path.write_bytes(content)
    prints = [fingerprint([path], dtype="bfloat16", page_size=16)]
    prints.append(fingerprint([path], dtype="float32", page_size=16))
    prints.append(fingerprint([path], dtype="bfloat16", page_size=64))
    content[2 * STRIDE_BYTES + 7] ^= 1
    path.write_bytes(content)
    prints.append(fingerprint([path], dtype="bfloat16", page_size=16))
    assert len(set(prints)) == 4
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / path.name).write_bytes(content)
    assert fingerprint([other / path.name], dtype="bfloat16", page_size=16) == prints[-1]


def test_disk_keeps_reads_and_forgets(tmp_path):
    store = DiskStore(tmp_path, PRINT, 100 * SIZE)
    assert store.put(KEYS[:3], [record(i) for i in range(3)]) == [True] * 3
    assert store.exists(KEYS[:4]) == [True, True, True, False]
    buffers = [blank() for _ in range(4)]
    assert store.get(KEYS[:4], buffers) == [True, True, True, False]
    assert [bytes(b) for b in buffers[:3]] == [bytes(record(i)) for i in range(3)]
    store.drop(KEYS[1:2])
    again = DiskStore(tmp_path, PRINT, 100 * SIZE)  # after a restart
    assert again.exists(KEYS[:3]) == [True, False, True] and again.num_bytes == 2 * SIZE
    assert DiskStore(tmp_path, b"q" * 32, 100 * SIZE).exists(KEYS[:3]) == [False] * 3
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".tmp"]


def test_disk_limit_and_order_survive_a_restart(tmp_path):
    store = DiskStore(tmp_path, PRINT, 4 * SIZE)
    for i in range(4):
        store.put(KEYS[i : i + 1], [record(i)])
        os.utime(store._path(KEYS[i]), (i, i))
    store.get(KEYS[:1], [blank()])  # the oldest is used
    store = DiskStore(tmp_path, PRINT, 4 * SIZE)
    store.put(KEYS[4:6], [record(4), record(5)])
    assert store.exists(KEYS[:6]) == [True, False, False, True, True, True]
    assert store.num_bytes == 4 * SIZE
    assert DiskStore(tmp_path, PRINT, 2 * SIZE).num_bytes == 2 * SIZE, (
        "a smaller limit at the start"
    )
    assert DiskStore(tmp_path, PRINT, SIZE - 1).put(KEYS[:1], [record(0)]) == [False]


def test_disk_files_of_the_wrong_size_are_missing(tmp_path):
    store = DiskStore(tmp_path, PRINT, 100 * SIZE)
    store.put(KEYS[:2], [record(0), record(1)])
    for i, content in enumerate((bytes(record(0))[:-1], bytes(record(1)) + b"x")):
        with open(store._path(KEYS[i]), "wb") as file:
            file.write(content)
    assert store.get(KEYS[:2], [blank(), blank()]) == [False, False]
    assert store.exists(KEYS[:2]) == [False, False] and store.num_bytes == 0


def test_two_processes_share_a_folder(tmp_path):
    one, two = (DiskStore(tmp_path, PRINT, 100 * SIZE) for _ in range(2))
    one.put(KEYS[:2], [record(0), record(1)])
    assert two.exists(KEYS[:2]) == [True, True]
    one.drop(KEYS[:1])
    assert two.get(KEYS[:2], [blank(), blank()]) == [False, True]
    assert two.exists(KEYS[:2]) == [False, True]


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, PRINT, 100 * SIZE)
    written = os.write

    def write(fd, data):
        if len(data) < SIZE:
            raise OSError(28, "No space left on device")
        return written(fd, data[: SIZE // 2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError):
        store.put(KEYS[:1], [record(0)])
    assert not [p for p in tmp_path.rglob("*") if p.is_file()] and store.num_bytes == 0


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="--disk-cache-dir"):
        DiskStore(tmp_path / "file", PRINT, SIZE)


class Remembers:
    """A store in a dict, which fails while `is_broken`."""

    def __init__(self, name="memory"):
        self.name = name
        self.pages, self.is_broken, self.num_calls, self.dropped = {}, False, 0, []

    def _call(self):
        self.num_calls += 1
        if self.is_broken:
            raise ConnectionError("no answer")

    def exists(self, keys):
        self._call()
        return [key in self.pages for key in keys]

    def get(self, keys, records):
        self._call()
        for key, target in zip(keys, records, strict=True):
            if key in self.pages:
                target[:] = self.pages[key]
        return [key in self.pages for key in keys]

    def put(self, keys, records):
        self._call()
        self.pages |= {key: bytes(r) for key, r in zip(keys, records, strict=True)}
        return [True] * len(keys)

    def drop(self, keys):
        self.dropped += keys

    def close(self):
        self.is_closed = True


def test_a_store_that_fails_is_left_alone_longer_each_time():
    now, store = [0.0], Remembers()
    guarded = GuardedStore(store, clock=lambda: now[0])
    store.is_broken = True
    calls = []
    for second in range(32):
        now[0] = float(second)
        before = store.num_calls
        assert guarded.call(store.exists, KEYS[:2]) == [False, False]
        if store.num_calls > before:
            calls.append(second)
    assert calls == [0, 1, 3, 7, 15, 31] and guarded.num_errors == 6
    store.is_broken = False
    now[0] = 1000.0
    guarded.call(store.exists, KEYS[:1])
    store.is_broken = True
    guarded.call(store.exists, KEYS[:1])
    now[0] = 1001.0
    assert guarded.is_open, "after a success the first wait is short again"


def test_the_threads_use_the_nearest_store_that_has_a_page():
    slots = [bytearray(SIZE) for _ in range(4)]
    near, far, answers = Remembers("near"), Remembers("far"), queue.SimpleQueue()
    threads = StoreThreads([near, far], lambda i: memoryview(slots[i]), PRINT, answers.put)

    def ask(order):
        threads.submit(order)
        answer = answers.get(timeout=10)
        assert answer.order_id == order.order_id
        return answer.results

    slots[0][HEADER_BYTES:] = b"a" * (SIZE - HEADER_BYTES)
    slots[1][HEADER_BYTES:] = b"b" * (SIZE - HEADER_BYTES)
    assert ask(Put(1, tuple(KEYS[:2]), (0, 1))) == (1, 1)
    content = [bytes(slot) for slot in slots[:2]]
    del near.pages[KEYS[1]]
    assert ask(Find(2, tuple(KEYS[:4]))) == (2,)
    assert ask(Fetch(3, tuple(KEYS[:3]), (2, 3, 0))) == (0, 1, MISSING)
    assert [bytes(slots[2]), bytes(slots[3])] == content
    near.pages[KEYS[0]] = near.pages[KEYS[0]][:-1] + b"!"
    assert ask(Fetch(4, (KEYS[0],), (2,))) == (1,), "what is damaged here is read there"
    assert near.dropped == [KEYS[0]]
    del far.pages[KEYS[0]]
    assert ask(Fetch(5, (KEYS[0],), (2,))) == (DAMAGED,)
    near.is_broken = far.is_broken = True
    assert ask(Fetch(6, (KEYS[0],), (2,))) == (MISSING,)
    assert ask(Put(7, (KEYS[5],), (0,))) == (0,)
    assert ask(Find(8, (KEYS[0],))) == (0,)
    threads.close(5)
    assert near.is_closed and far.is_closed
