"""Greedy tokens of two real models, in float32, equal those of transformers."""

import pytest
import torch

from stoker.engine.runtime import weights


@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_greedy_tokens_of_a_gguf_file_equal_those_of_transformers(
    name, request, loop, float32_model
):
    files = request.getfixturevalue(name)
    items = request.getfixturevalue(f"{name}_greedy")
    model = float32_model(files.config)
    model.load(weights.from_gguf(files.gguf, files.config, torch.float32))
    prompts = [item["prompt_ids"] for item in items]
    expected = [item["output_ids"] for item in items]
    num_new = [len(tokens) for tokens in expected]
    longest = max(len(p) + n for p, n in zip(prompts, num_new, strict=True))
    outputs = loop(model, len(prompts), longest, page_size=16).greedy(prompts, num_new, chunk=37)
    assert outputs == expected
