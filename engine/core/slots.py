"""The running requests' counters and block tables, as arrays by slot.

Runs on: any (pure).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .request import Request

NEVER = 2**31 - 1  # in Slots.save_at


@dataclass(slots=True)
class Rows:
    """What rows of running requests have, whatever the step; nobody writes to the arrays.

    Attributes:
        order: intp [rows], their slots; slots: the same as int32.
        serials: of the slots' owners. requests: these.
        ones, no_logprobs: int32 [rows] of 1 and of -1: q_lens and prompt_logprobs of decode rows.
    """

    order: np.ndarray
    slots: np.ndarray
    serials: np.ndarray
    requests: list[Request]
    ones: np.ndarray
    no_logprobs: np.ndarray


class Slots:
    """Slots 1 to max_running; slot 0 pads graph batches and belongs to nobody.

    Attributes:
        order: intp [num_running], the slots in use in order of admission (numpy indexes fastest
            by intp).
        free: slots that nobody uses.
        table: int32 [max_running + 1, max_pages], the host's mirror of the device's block table.
        serial: the number of its owner's admission; 0 for nobody.
        committed, computed, length, pending: see scheduler.py.
        capacity: tokens that its pages hold.
        last_token: the last known one.
        limit: length at which it ends. compute_limit: the last token's KV is not needed.
        generates: False where only the prompt is computed.
        is_constrained: whether a grammar restricts its output. num_constrained: how many are.
        window_table: int32 like `table`, pages of layers with a window (windows.py); 0 where one
            is gone, or there are no such layers. first_window_page: where the others begin.
        save_at: the length from which on its recurrent state is to be saved (snapshots.py).
        dirty: slot to the first table index that the device must learn.
        gone: (slots, table indices) of window pages that went, which the device must learn, too:
            what it reads there in passing must not be somebody else's.
        untold: slots of which the runner must learn all again.
    """

    def __init__(self, max_running: int, max_pages: int, page_size: int):
        n = max_running + 1
        self.page_size = page_size
        self.order = np.empty(0, np.intp)
        self.free = list(range(max_running, 0, -1))
        self.table = np.zeros((n, max_pages), np.int32)  # touches no memory before it is used
        self.window_table = np.zeros_like(self.table)
        self.first_window_page = np.zeros(n, np.int32)
        self.serial = np.zeros(n, np.int64)
        self.committed = np.zeros(n, np.int32)
        self.computed = np.zeros(n, np.int32)
        self.length = np.zeros(n, np.int32)
        self.pending = np.zeros(n, np.int32)
        self.capacity = np.zeros(n, np.int32)
        self.last_token = np.zeros(n, np.int32)
        self.limit = np.zeros(n, np.int32)
        self.compute_limit = np.zeros(n, np.int32)
        self.generates = np.zeros(n, np.bool_)
        self.is_constrained = np.zeros(n, np.bool_)
        self.num_constrained = 0
        self.save_at = np.full(n, NEVER, np.int32)
        self.dirty: dict[int, int] = {}
        self.gone: list[tuple[np.ndarray, np.ndarray]] = []
        self.untold: set[int] = set()
        self._owners: list[Request | None] = [None] * n
        self._num_admissions = 0
        self._rows = self._new_rows(self.order)

    def owner(self, slot: int) -> Request:
        """The request in a slot that is in use."""
        request = self._owners[slot]
        assert request is not None
        return request

    def owners(self, slots: np.ndarray | None = None) -> list[Request]:
        """The requests in some slots that are in use; all, in order of admission, by default."""
        owners = self._owners
        numbers = (self.order if slots is None else slots).tolist()
        return [owners[slot] for slot in numbers]  # type: ignore[misc]

    def rows(self, order: np.ndarray) -> Rows:
        """Of these slots; as long as all that run are asked for, and are the same, made once."""
        if order is not self.order:
            return self._new_rows(order)
        if order is not self._rows.order:  # `order` is never changed, but replaced
            self._rows = self._new_rows(order)
        return self._rows

    def _new_rows(self, order: np.ndarray) -> Rows:
        ones = np.ones(len(order), np.int32)
        slots, serials = order.astype(np.int32), self.serial[order]
        return Rows(order, slots, serials, self.owners(order), ones, -ones)

    def open(self, request: Request, pages: np.ndarray, num_computed: int) -> int:
        """Give a request a slot; its first num_computed tokens are in `pages`, int32 [n]."""
        slot = self.free.pop()
        self._owners[slot] = request
        self.order = np.append(self.order, slot)
        self._num_admissions += 1
        self.serial[slot] = self._num_admissions
        self.table[slot, : len(pages)] = pages
        self.touch(slot, 0)
        self.committed[slot] = self.computed[slot] = num_computed
        self.capacity[slot] = len(pages) * self.page_size
        self.length[slot] = len(request.tokens)
        self.pending[slot] = 0
        self.last_token[slot] = request.tokens[-1]
        self.limit[slot] = request.limit
        self.compute_limit[slot] = max(request.prompt_len, request.limit - 1)
        self.generates[slot] = request.max_tokens > 0
        self.is_constrained[slot] = request.is_constrained
        self.num_constrained += request.is_constrained
        request.slot = slot
        return slot

    def close(self, request: Request) -> None:
        """Take a request's slot; whose its pages are now is the caller's matter."""
        slot = request.slot
        request.slot = 0
        self.num_constrained -= request.is_constrained
        self._owners[slot] = None
        self.serial[slot] = 0
        self.dirty.pop(slot, None)
        self.untold.discard(slot)
        self.order = self.order[self.order != slot]
        self.free.append(slot)

    def num_missing(self, slots: np.ndarray) -> np.ndarray:
        """Tokens to compute, the pending one included."""
        return (np.minimum(self.length, self.compute_limit) - self.computed)[slots]

    def num_pages(self, slot: int) -> int:
        """How many pages a slot has."""
        return int(self.capacity[slot]) // self.page_size

    def pages(self, slot: int) -> np.ndarray:
        """A view of its pages, int32."""
        return self.table[slot, : self.num_pages(slot)]

    def extend(self, slot: int, pages: np.ndarray, window_pages: np.ndarray | None = None) -> None:
        """Append pages to a slot's, and as many window pages where layers have these."""
        first = self.num_pages(slot)
        self.table[slot, first : first + len(pages)] = pages
        if window_pages is not None:
            self.window_table[slot, first : first + len(pages)] = window_pages
        self.capacity[slot] += len(pages) * self.page_size
        self.touch(slot, first)

    def touch(self, slot: int, index: int) -> None:
        """The device must learn a slot's table from this index on."""
        self.dirty[slot] = min(index, self.dirty.get(slot, index))
