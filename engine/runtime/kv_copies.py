"""Copies KV pages between device and host memory, and lets the stores' threads do the rest.

Host memory holds records: a page over all layers behind the header of `stores`, so that a store
reads and writes a record in one piece. On a device that works on its own

    save: main stream: gather pages into a staging buffer; copy stream: staging to host records.
          The page is free for its next owner at once.
    load: copy stream, behind the step before: records to pages, layer by layer. The main stream
          waits for a layer's event before that layer's kernels, so that the copies of the next
          layers run beside them.

A device without streams copies in place.

Runs on: gpu.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends.api import DeviceRuntime, LayerCache, Ops
from ...backends.cpu import CpuRuntime
from ..api.errors import StartError
from ..core.copy_orders import Copied, Load, Order, Save
from ..core.tiers import Tiers
from .stores import HEADER_BYTES, PageStore
from .stores.threads import StoreThreads

log = logging.getLogger("stoker")

ALIGN = 256
STAGING_BYTES = 128 << 20  # of each of the two buffers that saves go through
CLOSE_S = 10.0


class RecordLayout:
    """Where the keys and values of each layer are in a record.

    Attributes:
        parts: (pool bytes as uint8 [num_pages, page_bytes], offset in a record), keys then values,
            layer after layer.
        record_bytes: of a whole record, a multiple of ALIGN.
    """

    def __init__(self, caches: Sequence[LayerCache]):
        self.parts: list[tuple[Tensor, int]] = []
        offset = HEADER_BYTES
        for cache in caches:
            for pool in cache:
                # Latent attention's values are empty.
                rows = pool.flatten(1).view(torch.uint8)
                self.parts.append((rows, offset))
                offset += rows.shape[1]
        self.record_bytes = -(-offset // ALIGN) * ALIGN


class HostPool:
    """Records in host memory, registered with the device where it has a use for that.

    Untouched memory takes nothing on a CPU; for a GPU all of it is taken, and locked, at once.

    Attributes:
        rows, tensor: uint8 [num_slots, record_bytes].
        is_registered: whether a kernel may read and write it.
    """

    def __init__(self, num_slots: int, record_bytes: int, device: torch.device):
        self.record_bytes = record_bytes
        num_bytes = num_slots * record_bytes
        free_bytes, _ = CpuRuntime().memory()
        if num_bytes > free_bytes:
            raise StartError(
                f"a host cache of {num_bytes / 2**30:.1f} GiB does not fit: "
                f"{free_bytes / 2**30:.1f} GiB of host memory are free"
            )
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise StartError(
                f"no memory for a host cache of {num_bytes / 2**30:.1f} GiB: {error.strerror}"
            ) from None
        self.rows = np.frombuffer(self._memory, np.uint8).reshape(num_slots, record_bytes)
        self.tensor = torch.from_numpy(self.rows)
        self.is_registered = False
        if device.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0)
            if int(code):
                raise StartError(
                    f"cannot lock {num_bytes / 2**30:.1f} GiB of memory for the host cache "
                    f"(CUDA error {int(code)}): a smaller --host-cache-gib may help"
                )
            self.is_registered = True

    def record(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self.rows[slot])

    def close(self) -> None:
        """Unlock the memory. Nothing may be copied any more."""
        if self.is_registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.is_registered = False


class KVCopies:
    """Carries out the orders of `Tiers`.

    Args:
        caches: the pools. num_slots: records that the host memory holds.
        ops: of the backend; its `copy_pages` is used where it has one.
        stores: the nearest first. fingerprint: is written into what goes there.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        runtime: DeviceRuntime,
        ops: Ops,
        num_slots: int,
        stores: Sequence[PageStore] = (),
        fingerprint: bytes = bytes(32),
    ):
        self.layout = RecordLayout(caches)
        self.host = HostPool(num_slots, self.layout.record_bytes, runtime.device)
        self._caches = caches
        self._stores = tuple(stores)
        self._fingerprint = fingerprint
        self._threads: StoreThreads | None = None
        self._stream: _CopyStream | None = None
        if runtime.is_async:
            self._stream = _CopyStream(self.layout, self.host, runtime.device, ops)

    def start(self, post: Callable[[Copied], object]) -> None:
        """From now on tell `post`, on any thread, of each order that has ended."""
        self._post = post
        if self._stores:
            self._threads = StoreThreads(self._stores, self.host.record, self._fingerprint, post)
        if self._stream is not None:
            self._stream.start(post)

    def submit(self, orders: list[Order]) -> None:
        """Begin to carry out orders: those of the device before all that is queued later."""
        for order in orders:
            if not isinstance(order, Save | Load):
                assert self._threads is not None
                self._threads.submit(order)
            elif self._stream is not None:
                self._stream.submit(order)
            else:
                self._copy(order)
                self._post(Copied(order.order_id))

    def layers(self) -> list[LayerCache] | Iterator[LayerCache]:
        """The caches for a step; to take the next means to use it on the main stream now."""
        if self._stream is None or not self._stream.is_loading:
            return list(self._caches)
        return self._stream.layers(self._caches)

    def wait_for_loads(self) -> None:
        """Instead of `layers`: what is queued on the main stream from now on finds all loads."""
        if self._stream is not None:
            self._stream.wait_for_loads()

    @property
    def is_loading(self) -> bool:
        """Whether the next step must take its caches from `layers`, or wait for the loads."""
        return self._stream is not None and self._stream.is_loading

    def close(self) -> None:
        """End the threads and free the host memory. The device must be idle."""
        if self._threads is not None:
            self._threads.close(CLOSE_S)
        if self._stream is not None:
            self._stream.close()
        self.host.close()

    def _copy(self, order: Save | Load) -> None:
        rows = self.host.rows
        for pool, offset in self.layout.parts:
            part = rows[:, offset : offset + pool.shape[1]]
            if isinstance(order, Save):
                part[order.slots] = pool.numpy()[order.pages]
            else:
                pool.numpy()[order.pages] = part[order.slots]


class _CopyStream:
    """The second stream of a device, its events and its staging buffers."""

    def __init__(self, layout: RecordLayout, host: HostPool, device: torch.device, ops: Ops):
        self._layout = layout
        self._host = host
        self._device = device
        self._stream = torch.Stream(device)
        self._kernel: Any = getattr(ops, "copy_pages", None)
        pools = layout.parts
        is_aligned = all(pool.shape[1] % 16 == 0 == offset % 16 for pool, offset in pools)
        if not host.is_registered or not is_aligned:
            self._kernel = None
        if self._kernel is None:
            log.warning("the host cache copies through torch on this backend, which is slower")
        table = [[pool.data_ptr(), pool.shape[1], offset] for pool, offset in pools]
        self._parts = torch.tensor(table, dtype=torch.int64).to(device)
        self._max_bytes = max(pool.shape[1] for pool, _ in pools)
        size = layout.record_bytes
        self._staging = [
            torch.empty(max(STAGING_BYTES // size, 1), size, dtype=torch.uint8, device=device)
            for _ in range(2)
        ]
        self._staged: list[torch.Event | None] = [None, None]  # when a buffer is free again
        self._turn = 0
        self._loaded: list[list[torch.Event]] = []  # by load, by layer; of loads not waited for
        self._ended: queue.SimpleQueue[tuple[torch.Event, int, Any] | None] = queue.SimpleQueue()
        one = np.zeros(1, np.int32)  # so that no request waits for a compiler
        self._save(Save(0, one, one))
        self._load(Load(0, one, one))
        self._stream.synchronize()
        self._loaded.clear()

    def start(self, post: Callable[[Copied], object]) -> None:
        """Begin to tell of copies that ended."""
        self._post = post
        self._thread = threading.Thread(target=self._watch, name="stoker-copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.put(None)
        self._thread.join(CLOSE_S)

    @property
    def is_loading(self) -> bool:
        """Whether a load was queued that no step has waited for."""
        return bool(self._loaded)

    def layers(self, caches: Sequence[LayerCache]) -> Iterator[LayerCache]:
        """Each layer's cache, once the main stream is to wait for its loads."""
        main = torch.accelerator.current_stream(self._device)
        for layer, cache in enumerate(caches):
            for events in self._loaded:
                main.wait_event(events[layer])
            yield cache
        self._loaded.clear()  # not before: a step that fails in the middle is launched again

    def wait_for_loads(self) -> None:
        """Have the main stream wait for all layers of all loads."""
        main = torch.accelerator.current_stream(self._device)
        for events in self._loaded:
            main.wait_event(events[-1])
        self._loaded.clear()

    def submit(self, order: Save | Load) -> None:
        """Queue a copy; its end is told by `post`."""
        if isinstance(order, Save):
            keep = self._save(order)
        else:
            keep = self._load(order)
        ended = torch.Event(self._device, blocking=True)
        ended.record(self._stream)
        self._ended.put((ended, order.order_id, keep))

    def _save(self, order: Save) -> Any:
        main = torch.accelerator.current_stream(self._device)
        if self._loaded:  # a page that no step has read yet may be saved again
            self.wait_for_loads()
        room = self._staging[0].shape[0]
        pages = self._to_device(order.pages)
        rows = self._to_device(np.arange(room, dtype=np.int32))
        for at in range(0, len(order.slots), room):
            slots = order.slots[at : at + room]
            n = len(slots)
            buffer = self._staging[self._turn]
            if (free := self._staged[self._turn]) is not None:
                main.wait_event(free)
            some = pages[at : at + n]
            if self._kernel is not None:
                self._copy(self._parts, some, buffer, rows[:n], to_pool=False)
            else:
                for pool, offset in self._layout.parts:
                    buffer[:n, offset : offset + pool.shape[1]] = pool[some.long()]
            gathered = torch.Event(self._device)
            gathered.record(main)
            self._stream.wait_event(gathered)
            with self._stream:
                for first, last in _runs(slots):
                    target = self._host.tensor[slots[first] : slots[first] + last - first]
                    target.copy_(buffer[first:last], non_blocking=True)
                staged = self._staged[self._turn] = torch.Event(self._device)
                staged.record(self._stream)
            self._turn = 1 - self._turn
        return pages, rows

    def _load(self, order: Load) -> Any:
        main = torch.accelerator.current_stream(self._device)
        pages, slots = self._to_device(order.pages), self._to_device(order.slots)
        queued = torch.Event(self._device)  # behind it nobody uses the pages' old content
        queued.record(main)
        self._stream.wait_event(queued)
        if self._kernel is None:
            self._stream.synchronize()  # the processor reads the records: saves must have ended
        events: list[torch.Event] = []
        keep: list[Any] = [pages, slots]
        with self._stream:
            for part in range(0, len(self._layout.parts), 2):  # a layer's keys and values
                if self._kernel is not None:
                    parts = self._parts[part : part + 2]
                    self._copy(parts, pages, self._host.tensor, slots, to_pool=True)
                else:
                    for pool, offset in self._layout.parts[part : part + 2]:
                        rows = self._host.rows[order.slots, offset : offset + pool.shape[1]]
                        pool.index_copy_(0, pages.long(), torch.from_numpy(rows).to(pool.device))
                event = torch.Event(self._device)
                event.record(self._stream)
                events.append(event)
        self._loaded.append(events)
        return keep

    def _copy(
        self, parts: Tensor, pages: Tensor, records: Tensor, rows: Tensor, *, to_pool: bool
    ) -> None:
        self._kernel(
            parts,
            self._max_bytes,
            pages,
            records.data_ptr(),
            records.shape[1],
            rows,
            to_pool=to_pool,
            is_host=records.device.type == "cpu",
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def _watch(self) -> None:
        while (item := self._ended.get()) is not None:
            ended, order_id, _ = item  # with it the tensors that the copy reads stay alive
            ended.synchronize()
            self._post(Copied(order_id))


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of positions with consecutive values."""
    cuts = [0, *(np.flatnonzero(np.diff(values) != 1) + 1).tolist(), len(values)]
    return list(pairwise(cuts))


def drain(tiers: Tiers, copies: KVCopies, inbox: queue.SimpleQueue[Any]) -> None:
    """At the end of serving: wait until what is to be kept is kept, CLOSE_S at most."""
    deadline = time.monotonic() + CLOSE_S
    while tiers.is_busy and (left := deadline - time.monotonic()) > 0:
        copies.submit(tiers.take_orders())
        try:
            message = inbox.get(timeout=min(left, 0.5))
        except queue.Empty:
            continue
        if isinstance(message, Copied):
            tiers.handle(message)
