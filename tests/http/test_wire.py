"""The checks for any server hold for ours with the fake engine."""

import pytest
from served import Served
from wire_checks import CHECKS, Client


@pytest.mark.parametrize("name", CHECKS)
async def test_check(name):
    async with Served() as s, Client(s.url) as client:
        s.engine.step_s = 0.001
        await CHECKS[name](client)
