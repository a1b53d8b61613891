"""The real `stoker` command with the fake engine: python serve_fake.py serve --port 0 ..."""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from stoker.engine.api.errors import StartError
from stoker.http import cli


async def start_fake(config):
    if config.model == "missing":
        raise StartError("there is no model here")
    await asyncio.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    engine = FakeEngine(config)
    engine.step_s = float(os.environ.get("FAKE_STEP_S", "0.001"))
    if config.model == "base":
        engine.chat_template = None
    if os.environ.get("FAKE_DIES"):
        engine.loop.call_later(0.5, engine._die, RuntimeError("out of memory"))
    return engine


cli.start_engine = start_fake
sys.exit(cli.main(sys.argv[1:]))
