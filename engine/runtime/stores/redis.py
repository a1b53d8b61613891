"""A store on a Redis server: one value a page, under "stoker:kv:" and its key.

The server's own settings limit it (`maxmemory` with `maxmemory-policy allkeys-lru`, say); records
that are not used for a week expire by themselves.

Runs on: pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...api.errors import StartError

PREFIX = b"stoker:kv:"
TIMEOUT_S = 2.0
EXPIRY_S = 7 * 24 * 3600


class RedisStore:
    """Records on the server at a URL: redis://host:6379/0, rediss://..., unix://path.

    Raises:
        StartError: the redis package is not installed, or the URL is none. (A server that does
            not answer is no error: it may come back.)
    """

    name = "redis"

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S):
        try:
            import redis
        except ImportError:
            raise StartError("--cache-redis-url needs `pip install redis`") from None
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
        except ValueError as error:
            raise StartError(f"--cache-redis-url: {error}") from None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """One round trip."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(PREFIX + key)
        return [bool(n) for n in pipe.execute()]

    def get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """One round trip; a value of another size counts as missing."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.getex(PREFIX + key, ex=EXPIRY_S)
        found = []
        for value, record in zip(pipe.execute(), records, strict=True):
            is_whole = value is not None and len(value) == len(record)
            if is_whole:
                record[:] = value
            found.append(is_whole)
        return found

    def put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        """One round trip. Raises redis.RedisError where the server is full or away."""
        pipe = self._client.pipeline(transaction=False)
        for key, record in zip(keys, records, strict=True):
            pipe.set(PREFIX + key, record, ex=EXPIRY_S)
        return [bool(ok) for ok in pipe.execute()]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Delete values."""
        self._client.delete(*(PREFIX + key for key in keys))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
