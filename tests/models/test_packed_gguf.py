"""Real GGUF files kept packed: how near their answers are to those of the weights as floats."""

import pytest
import torch

from stoker.backends import registry
from stoker.engine.api.config import EngineConfig
from stoker.engine.build import Builder
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.quantization.gguf import GgufConfig
from stoker.engine.runtime import gguf_weights

NATIVE = registry.select("cpu")
pytestmark = pytest.mark.skipif(
    not NATIVE.ops.gguf_types, reason="no provider multiplies packed GGUF weights here"
)
# Of the tokens that float32 chose, how many are chosen again; mean KL from float32, in nats.
BOUNDS = {"smollm2": (0.93, 0.006), "gemma3_270m": (0.96, 0.004)}


@pytest.mark.parametrize("name", BOUNDS)
def test_packed_weights_agree_with_float32(name, request, loop, float32_model):
    files = request.getfixturevalue(name)
    items = request.getfixturevalue(f"{name}_greedy")[:3]
    config = gguf_weights.keep_packed(files.gguf, files.config, NATIVE.ops)
    packed = Decoder(config, NATIVE.ops, torch.device("cpu"), torch.float32)
    packed.load(gguf_weights.from_gguf(files.gguf, config, torch.float32))
    exact = float32_model(files.config)
    exact.load(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
    num_equal, num_tokens, kl = 0, 0, 0.0
    for item in items:
        prompt, answer = item["prompt_ids"], item["output_ids"]
        tokens = prompt + answer[:-1]
        got, want = (
            loop(model, 1, len(tokens), page_size=16).step([(0, tokens)])[0][len(prompt) - 1 :]
            for model in (packed, exact)
        )
        assert want.argmax(-1).tolist() == answer
        num_equal += int((got.argmax(-1) == torch.tensor(answer)).sum())
        num_tokens += len(answer)
        log_p = want.log_softmax(-1)
        kl += float((log_p.exp() * (log_p - got.log_softmax(-1))).sum())
    agreement, divergence = BOUNDS[name]
    assert num_equal >= agreement * num_tokens
    assert 1e-6 < kl / num_tokens < divergence  # not zero: inputs are rounded to 8 bits


@pytest.mark.parametrize("dtype, is_packed", [("auto", True), ("bfloat16", False)])
def test_dtype_says_whether_weights_stay_packed(smollm2, dtype, is_packed, caplog):
    caplog.set_level("INFO")
    builder = Builder(
        EngineConfig(model="smollm2-135m", backend="cpu", dtype=dtype, kv_tokens=256, threads=1)
    )
    builder.find_files()
    _, runner = builder.load()
    assert isinstance(runner.model.config.quantization, GgufConfig) == is_packed
    assert ("stay packed: 1 of Q8_0, 210 of Q4_1" in caplog.text) == is_packed
