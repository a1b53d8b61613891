"""Real clients against a running server: STOKER_URL says where it is (run.py sets it).

They run in virtual environments without Stoker, so nothing here imports it.
"""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The server's base URL, without /v1."""
    if "STOKER_URL" not in os.environ:
        pytest.skip("no STOKER_URL: use tests/clients/run.py")
    return os.environ["STOKER_URL"].rstrip("/")


@pytest.fixture(scope="session")
def model() -> str:
    """The model that is served."""
    return os.environ.get("STOKER_MODEL", "smollm2-135m")


def pytest_collection_modifyitems(items):
    """All of them carry the mark."""
    for item in items:
        if "tests/clients" in str(item.path):
            item.add_marker("clients")
