"""The order of copies on a device with streams, on one that only pretends to have them.

A stream keeps what it was given; an operation is done when a stream is driven past it, so an event
that is not waited for gives wrong bytes. `tests/tiers/test_tiers_gpu.py` does it on a real one.
"""

import ctypes
import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.backends.api import LayerCache
from stoker.engine.core.copy_orders import Load, Save
from stoker.engine.runtime import kv_copies

PAGE_BYTES, LAYERS = 64, 3


class Stream:
    """Operations in order; `current` takes what is queued."""

    current = None

    def __init__(self, *_):
        self.queued = []

    def do(self, operation):
        self.queued.append(operation)

    def wait_event(self, event):
        self.do(lambda: event.stream.drive(event))

    def drive(self, until=None):
        while self.queued and (until is None or not until.is_done):
            self.queued.pop(0)()

    synchronize = drive

    def __enter__(self):
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.outer


class Event:
    def __init__(self, *_, **__):
        self.is_done = False

    def record(self, stream):
        self.stream = stream
        stream.do(lambda: setattr(self, "is_done", True))

    def synchronize(self):
        self.stream.drive(self)


def copy_pages(parts, max_bytes, pages, address, record_bytes, rows, *, to_pool, is_host):
    """The kernel's job, when its stream comes to it, with the memory at the given addresses."""

    def view(address, n):
        return np.frombuffer((ctypes.c_uint8 * n).from_address(address), np.uint8)

    parts, pairs = parts.tolist(), list(zip(pages.tolist(), rows.tolist(), strict=True))

    def run():
        for pool, num_bytes, offset in parts:
            for page, row in pairs:
                a = view(pool + page * num_bytes, num_bytes)
                b = view(address + row * record_bytes + offset, num_bytes)
                a[:], b[:] = (b.copy(), b) if to_pool else (a, a.copy())

    Stream.current.do(run)


class Target:
    """Host records; a copy into them is an operation of the current stream."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape, self.device, self.data_ptr = tensor.shape, tensor.device, tensor.data_ptr

    def __getitem__(self, span):
        def copy_(source, non_blocking):
            assert non_blocking
            Stream.current.do(lambda: self.tensor[span].copy_(source))

        return SimpleNamespace(copy_=copy_)


@pytest.fixture
def stream(monkeypatch):
    """A copy stream over three layers of 12 pages and 8 host records; `main` is its counterpart."""
    main = Stream.current = Stream()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: main)
    monkeypatch.setattr(kv_copies._CopyStream, "_to_device", lambda _, v: torch.from_numpy(v))
    monkeypatch.setattr(kv_copies, "STAGING_BYTES", 1100)  # two records each
    pools = [
        LayerCache(*(torch.randint(0, 255, (12, PAGE_BYTES), dtype=torch.uint8) for _ in "kv"))
        for _ in range(LAYERS)
    ]
    layout = kv_copies.RecordLayout(pools)
    host = kv_copies.HostPool(8, layout.record_bytes, torch.device("cpu"))
    host.is_registered = True
    host.tensor = Target(host.tensor)
    ops = SimpleNamespace(copy_pages=copy_pages)
    copies = kv_copies._CopyStream(layout, host, torch.device("cpu"), ops)
    main.drive()
    assert copies._staging[0].shape[0] == 2
    ended = queue.SimpleQueue()
    copies._post = ended.put
    return SimpleNamespace(copies=copies, main=main, pools=pools, host=host, layout=layout)


def content(pools, page):
    return [pool[page].clone() for cache in pools for pool in cache]


def records(s, slot):
    spans = [(offset, offset + PAGE_BYTES) for _, offset in s.layout.parts]
    return [torch.from_numpy(s.host.rows[slot, a:b].copy()) for a, b in spans]


def overwrite(s, page):
    """The page's next owner, on the main stream."""
    s.main.do(lambda: [pool[page].fill_(255) for cache in s.pools for pool in cache])


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("ahead", ["main", "copies"])
def test_a_page_may_be_overwritten_as_soon_as_its_save_is_queued(stream, ahead):
    pages, slots = [3, 1, 7, 8, 9], [5, 6, 7, 0, 2]
    expected = [content(stream.pools, page) for page in pages]
    stream.copies.submit(Save(1, np.array(pages, np.int32), np.array(slots, np.int32)))
    for page in pages:
        overwrite(stream, page)
    order = [stream.main, stream.copies._stream]
    for each in order if ahead == "main" else order[::-1]:
        each.drive()  # ahead of the other, as far as it may be
    for slot, want in zip(slots, expected, strict=True):
        assert same(records(stream, slot), want)


def test_saves_then_loads_of_the_same_record(stream):
    """The load comes behind the save on the copy stream, and behind the main stream's last use."""
    want = content(stream.pools, 3)
    stream.copies.submit(Save(1, np.array([3], np.int32), np.array([4], np.int32)))
    overwrite(stream, 5)  # a step that still writes to the page that is loaded next
    stream.copies.submit(Load(2, np.array([4], np.int32), np.array([5], np.int32)))
    assert stream.copies.is_loading
    seen = []
    for layer, cache in enumerate(stream.copies.layers(stream.pools)):
        stream.main.do(lambda c=cache: seen.append([pool[5].clone() for pool in c]))
        stream.main.drive()
        assert same(seen[layer], want[2 * layer : 2 * layer + 2]), "a layer was read too early"
        if layer == 0:
            assert stream.copies._stream.queued, "it waited for more than its own layer"
    assert not stream.copies.is_loading


def test_a_load_comes_behind_the_pages_last_use(stream):
    want = content(stream.pools, 3)
    stream.copies.submit(Save(1, np.array([3], np.int32), np.array([4], np.int32)))
    overwrite(stream, 5)
    stream.copies.submit(Load(2, np.array([4], np.int32), np.array([5], np.int32)))
    stream.copies._stream.drive()
    stream.main.drive()
    assert same(content(stream.pools, 5), want)


def test_a_graph_waits_for_all_layers(stream):
    want = content(stream.pools, 3)
    stream.copies.submit(Save(1, np.array([3], np.int32), np.array([4], np.int32)))
    stream.copies.submit(Load(2, np.array([4], np.int32), np.array([5], np.int32)))
    stream.copies.wait_for_loads()
    stream.main.drive()
    assert same(content(stream.pools, 5), want) and not stream.copies.is_loading


def test_a_step_that_fails_in_the_middle_is_launched_again(stream):
    stream.copies.submit(Load(1, np.array([0], np.int32), np.array([5], np.int32)))
    next(stream.copies.layers(stream.pools))
    assert stream.copies.is_loading, "the next launch waits for all layers once more"
    assert len(list(stream.copies.layers(stream.pools))) == LAYERS


def test_a_loaded_page_that_no_step_has_waited_for_is_saved_right(stream):
    want = content(stream.pools, 3)
    stream.copies.submit(Save(1, np.array([3], np.int32), np.array([4], np.int32)))
    stream.copies.submit(Load(2, np.array([4], np.int32), np.array([5], np.int32)))
    stream.copies.submit(Save(3, np.array([5], np.int32), np.array([6], np.int32)))
    stream.main.drive()
    stream.copies._stream.drive()
    assert same(records(stream, 6), want)
