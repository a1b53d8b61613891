"""Runs `async def` tests, each on its own loop, and lets tests import this folder's modules."""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

LIMIT_S = 30


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run coroutine tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited():
        await asyncio.wait_for(pyfuncitem.obj(**arguments), LIMIT_S)

    asyncio.run(limited())
    return True
