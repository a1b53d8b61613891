"""lm-eval: loglikelihoods with echo equal transformers' in float32; generation over both routes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

DATA = Path(__file__).parents[1] / "data" / "smollm2_loglikelihoods_fp32.json"


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)
    ]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihood(url, model, batch_size):
    """With our tokenizer over HTTP; the server must run in float32."""
    lm = LocalCompletionsAPI(
        base_url=url + "/v1/completions",
        model=model,
        tokenizer_backend="auto",
        batch_size=batch_size,
        num_concurrent=2,
    )
    assert lm.tokenizer_backend == "remote"  # found by itself, through /tokenizer_info
    items = json.loads(DATA.read_text())["items"]
    pairs = [(item["context"], item["continuation"]) for item in items]
    answers = lm.loglikelihood(instances("loglikelihood", pairs))
    for item, (loglikelihood, is_greedy) in zip(items, answers, strict=True):
        assert loglikelihood == pytest.approx(item["loglikelihood"], abs=1e-3)
        assert is_greedy == item["is_greedy"]


def test_rolling_loglikelihood(url, model):
    lm = LocalCompletionsAPI(base_url=url + "/v1/completions", model=model, batch_size=1)
    [value] = lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", [("The capital of France is Paris.",)])
    )
    assert -60 < value < -5


def test_generation(url, model):
    lm = LocalCompletionsAPI(base_url=url + "/v1/completions", model=model, batch_size=2)
    options = {"until": ["."], "max_gen_toks": 12, "temperature": 0}
    prompts = ["The capital of France is", "Two plus two is"]
    answers = lm.generate_until(
        instances("generate_until", [(prompt, dict(options)) for prompt in prompts])
    )
    assert "Paris" in answers[0]
    assert all("." not in answer for answer in answers)


def test_chat_generation(url, model):
    lm = LocalChatCompletion(base_url=url + "/v1/chat/completions", model=model)
    chat = lm.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    options = {"until": ["\n\n"], "max_gen_toks": 20, "temperature": 0}
    [answer] = lm.generate_until(instances("generate_until", [(chat, options)]))
    assert "Paris" in answer
