"""A server in a thread of its own, for clients that are not asyncio's."""

import asyncio
import threading

from served import Served


class Background:
    """`with Background(flag=...) as b`: b.url, b.served, and b.call(coroutine) on its loop."""

    def __init__(self, **flags):
        self.flags = flags
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def call(self, coroutine, limit_s=30):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(limit_s)

    def __enter__(self):
        self.thread.start()
        self.served = Served(**self.flags)
        self.call(self.served.__aenter__())
        self.url = self.served.url
        return self

    def __exit__(self, *_):
        self.call(self.served.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
