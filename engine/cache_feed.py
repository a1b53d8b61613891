"""What enters and leaves the prefix cache, for those on the loop who follow it.

Runs on: loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from .api.messages import CacheEvent

MAX_BEHIND = 10_000  # events; who reads no faster is left behind


class CacheFeed:
    """Gives each follower all events from its first look on."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[CacheEvent | None]] = set()

    def publish(self, event: CacheEvent) -> None:
        """Tell all followers."""
        for queue in list(self._queues):
            if queue.qsize() >= MAX_BEHIND:
                self._leave(queue)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """End all followers' iterations."""
        for queue in list(self._queues):
            self._leave(queue)

    async def follow(self, idle_s: float) -> AsyncIterator[CacheEvent | None]:
        """The events as they come; None when there was none for so long.

        It ends when the engine stops, and for a follower that is MAX_BEHIND events behind: what
        it knows is worth nothing then.
        """
        queue: asyncio.Queue[CacheEvent | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            while queue in self._queues:
                try:
                    event = await asyncio.wait_for(queue.get(), idle_s)
                except TimeoutError:
                    yield None
                    continue
                if event is not None:
                    yield event
        finally:
            self._queues.discard(queue)

    def _leave(self, queue: asyncio.Queue[CacheEvent | None]) -> None:
        self._queues.discard(queue)
        queue.put_nowait(None)  # wakes it
