"""Kernels that a model needs are compiled for a GPU that is not there."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from stoker.engine import compile_ahead

pytest.importorskip("triton", reason="triton is not installed")

WALK = """
import json, sys
import triton.knobs as knobs
from stoker.engine import compile_ahead
from stoker.engine.api.config import EngineConfig

config = EngineConfig(model=sys.argv[1], max_running_requests=4, chunked_prefill_size=64)
jobs = compile_ahead.find_jobs(config, compile_ahead.Device(9, 0, 132))
compile_ahead.compile_all(jobs, 2)
missed = []
def listen(src=None, cache_hit=None, **_):
    if not cache_hit:
        missed.append(src.fn.__name__)
knobs.compilation.listener = listen
for job in jobs:  # all of them are in the cache now
    job.run()
print(json.dumps([sorted({job.source.fn.__name__ for job in jobs}), missed]))
"""


def test_a_process_that_fails_says_why(caplog):
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-c", "import sys; sys.exit('no such GPU')"]
        compile_ahead.Ahead(subprocess.Popen(command, stderr=errors), errors).wait()
    assert "not compiled ahead" in caplog.text and "no such GPU" in caplog.text


def test_all_kernels_are_compiled_once(tiny_model, tmp_path):
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-W", "ignore", "-c", WALK, str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    names, missed = json.loads(done.stdout)
    assert {"_decode", "_extend", "_sample", "_write_qkv", "_rms_norm"} <= set(names)
    assert missed == [] and any(tmp_path.rglob("*.cubin"))
