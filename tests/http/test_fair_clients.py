import hashlib

import pytest
from served import CHAT, TEXT, Served, chat, text


@pytest.fixture
def clients(monkeypatch):
    """The clients that the engine was told."""
    from fake_engine import FakeEngine

    told = []
    original = FakeEngine.submit

    def submit(self, *args, **kw):
        told.append((kw["client"], kw["priority"]))
        return original(self, *args, **kw)

    monkeypatch.setattr(FakeEngine, "submit", submit)
    return told


async def test_without_keys_the_user_is_the_client(clients):
    async with Served() as s:
        await s.ok(CHAT, chat(user="alice", priority=3))
        await s.ok(TEXT, text(["a", "b"], user="bob"))
        await s.ok(CHAT, chat())
        assert (await s.post(CHAT, chat(user="x" * 513))).status == 400
    assert clients == [("alice", 3), ("bob", 0), ("bob", 0), ("", 0)]


async def test_with_keys_the_key_is_the_client_whatever_it_says(clients):
    async with Served(api_key=("one", "two")) as s:
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            await s.ok(CHAT, chat(user="alice"), headers=headers)
    digests = [hashlib.sha256(key).hexdigest()[:12] for key in (b"one", b"two")]
    assert [client for client, _ in clients] == digests
