"""The disk tier over HTTP, across a restart of the server process."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

TEXT = "What the first server computed, the second finds on disk. " * 5


class Server:
    """`stoker serve` with tiers; ends by SIGTERM, as a supervisor would end it."""

    def __init__(self, model, folder):
        flags = ["--backend", "cpu", "--threads", "1", "--dtype", "float32", "--port", "0"]
        flags += ["--kv-tokens", "480", "--host-cache-ratio", "4", "--disk-cache-dir", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.http", "serve", str(model), *flags],
            env={**os.environ, "STOKER_CHECK": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = re.search(r"http://\S+(?=/v1)", self.process.stdout.readline())[0]

    def ask(self, prompt: str) -> tuple[str, int]:
        """Its answer, and how many prompt tokens were cached."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        reply = json.load(urllib.request.urlopen(request, timeout=60))
        return (
            reply["choices"][0]["text"],
            reply["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def metric(self, name: str) -> float:
        page = urllib.request.urlopen(self.url + "/metrics", timeout=60).read().decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.mark.slow
def test_evict_restart_ask_again(model, tmp_path):
    with Server(model, tmp_path) as server:
        first, cached = server.ask(TEXT)
        assert cached == 0
        for letter in "abc":
            server.ask(letter * 300)  # evicts it
        again, cached = server.ask(TEXT)
        assert again == first and cached == 288
        assert server.metric('stoker_tier_cached_tokens_total{tier="host"}') > 0
    with Server(model, tmp_path) as server:
        again, cached = server.ask(TEXT)
        assert again == first and cached == 288
        assert server.metric('stoker_tier_cached_tokens_total{tier="disk"}') == 288
        assert server.metric('stoker_tier_pages_total{event="fetched"}') == 18
