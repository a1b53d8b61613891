import asyncio
import json
from array import array

import aiohttp
from served import Served

from stoker.engine.api.messages import CacheEvent
from stoker.engine.cache_feed import MAX_BEHIND

STORED = CacheEvent("stored", (b"\x01\x02",), b"\x00", array("i", [5, 6]), ("salt", "x"))
REMOVED = CacheEvent("removed", (b"\x01\x02",))


async def lines_of(response: aiohttp.ClientResponse) -> list[bytes]:
    return [line for line in (await response.read()).split(b"\n\n") if line]


async def test_events_are_streamed_until_the_server_drains():
    async with Served(cache_events=True, keep_alive_s=0.05) as s:
        s.engine.cache_feed.publish(STORED)  # nobody follows: it is lost
        async with s.session.get(s.url + "/cache_events") as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            s.engine.cache_feed.publish(STORED)
            s.engine.cache_feed.publish(REMOVED)
            await asyncio.sleep(0.2)
            s.engine.cache_feed.publish(STORED)
            assert await s.engine.drain(1.0)
            lines = await lines_of(response)
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
        assert events == [
            {
                "kind": "stored",
                "keys": ["0102"],
                "parent": "00",
                "tokens": [5, 6],
                "namespace": ["salt", "x"],
            },
            {"kind": "removed", "keys": ["0102"]},
            events[0],
        ]
        assert b": keep-alive" in lines
        assert not s.engine.cache_feed._queues


async def test_who_is_far_behind_is_left_behind():
    async with Served(cache_events=True) as s:
        feed = s.engine.cache_feed
        events = feed.follow(5.0)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for _ in range(MAX_BEHIND + 1):
            feed.publish(REMOVED)
        assert await first == REMOVED
        assert not feed._queues
        assert [event async for event in events] == []


async def test_the_route_is_for_admins_of_servers_with_the_flag():
    async with Served(admin_key="top", api_key=("k",), cache_events=True) as s:
        assert (await s.get("/cache_events")).status == 401
        reply = await s.get("/cache_events", headers={"Authorization": "Bearer k"})
        assert reply.status == 403
    async with Served() as s:
        reply = await s.get("/cache_events")
        assert reply.status == 400 and "--cache-events" in reply.error["message"]
