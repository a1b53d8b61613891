"""Latent attention: both ways are equal, a token keeps its latents alone, quantized projections."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker.backends import registry
from stoker.backends.api import BackendError
from stoker.backends.cpu.torch_ops import TorchOps
from stoker.engine.api.config import EngineConfig
from stoker.engine.build import Builder
from stoker.engine.models import latent
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import parse_config
from stoker.engine.runtime import kv_buffers, model_files, weights
from stoker.engine.runtime.kv_copies import RecordLayout

CPU = torch.device("cpu")
MLA = dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
MLA |= dict(num_key_value_heads=4, num_experts_per_tok=2, n_routed_experts=4, n_group=1)
MLA |= dict(moe_intermediate_size=48, first_k_dense_replace=1, topk_group=1)
V2_LITE = dict(
    architectures=["DeepseekV2ForCausalLM"],
    hidden_size=2048,
    intermediate_size=10944,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_experts_per_tok=6,
    n_routed_experts=64,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    q_lora_rank=None,
    vocab_size=102_400,
)


def load(folder, float32_model):
    files = model_files.resolve(str(folder))
    model = float32_model(files.config)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    return model


@pytest.fixture
def model(tmp_path, make_hf_model, float32_model):
    make_hf_model("DeepseekV2", MLA).save_pretrained(tmp_path)
    return load(tmp_path, float32_model)


class Counter(TorchOps):
    """Counts the tokens and keys of each way."""

    def __init__(self):
        self.absorbed, self.dense = [], []

    def mla_attend(self, q_latent, *args):
        self.absorbed.append(len(q_latent))
        return super().mla_attend(q_latent, *args)

    def mla_attend_dense(self, q, kv, *args):
        self.dense.append((len(q), len(kv)))
        return super().mla_attend_dense(q, kv, *args)


def steps(model, loop):
    """Logits of whole prompts, chunks behind cached ones, a prefix hit, decode rows beside them."""
    run = loop(model, 4, 120)
    texts = [[3 + (7 * i + slot) % 290 for i in range(120)] for slot in range(3)]
    out = run.step([(0, texts[0][:90]), (1, texts[1][:5]), (2, texts[2][:40])])
    start = run.hit(3, 0, 20)
    rows = [
        (0, texts[0][90:91]),
        (1, texts[1][5:60]),
        (2, texts[2][40:41]),
        (3, texts[0][start:90]),
    ]
    return [*out, *run.step(rows), *run.step([(slot, [9]) for slot in range(4)])]


@pytest.mark.parametrize("max_bytes", [1 << 30, 112 * 4 * 17, 112 * 4])
def test_absorbed_equals_dense(model, loop, monkeypatch, max_bytes):
    """Also where contexts are projected in parts: of 17 tokens, and of one."""
    counter = Counter()
    for layer in model._layers:
        layer.attention._ops = counter
    monkeypatch.setattr(latent, "dense_is_less", lambda *_: False)
    absorbed = steps(model, loop)
    assert not counter.dense
    monkeypatch.setattr(latent, "dense_is_less", lambda *_: True)
    monkeypatch.setattr(latent, "DENSE_BYTES", max_bytes)
    counter.absorbed.clear()
    dense = steps(model, loop)
    assert set(counter.absorbed) == {2, 4}  # the rows of one token
    num_keys = max_bytes // (112 * 4)
    assert max(keys for _, keys in counter.dense) == min(num_keys, 60 + 90)
    if num_keys == 17:  # row 0 ends in its sixth part, where rows 1 and 2 begin
        assert counter.dense[5] == (90 + 5 + 40, 17)
    for ours, theirs in zip(dense, absorbed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_prompts_and_many_new_tokens_are_dense_few_are_absorbed():
    config = parse_config(V2_LITE).latent
    assert latent.dense_is_less(config, 30 * 31 // 2, 30, 30)  # a prompt without a cached prefix
    for num_new, is_dense in ((1, False), (150, False), (200, True)):
        num_pairs = num_new * 8000 - num_new * (num_new - 1) // 2
        assert latent.dense_is_less(config, num_pairs, num_new, 8000) == is_dense


def test_a_token_takes_its_latents_alone():
    config = parse_config(V2_LITE)
    spec = Decoder(config, TorchOps(), torch.device("meta"), torch.bfloat16, 1).kv_spec
    assert kv_buffers.bytes_per_token(spec, torch.bfloat16) == 27 * (512 + 64) * 2
    caches = kv_buffers.allocate(spec[:2], 3, 16, torch.bfloat16, CPU)
    assert sum(pool.nbytes for cache in caches for pool in cache) == 3 * 16 * 2 * (512 + 64) * 2
    layout = RecordLayout(caches)
    sizes = [pool.shape[1] for pool, _ in layout.parts]
    assert sizes == [16 * 576 * 2, 0] * 2
    assert layout.parts[2][1] - layout.parts[0][1] == sizes[0]
    assert layout.parts[0][0].data_ptr() == caches[0].k.data_ptr()


def test_the_attention_backend_is_that_of_latent_attention(tmp_path, make_hf_model):
    make_hf_model("DeepseekV2", MLA).save_pretrained(tmp_path)
    builder = Builder(EngineConfig(model=str(tmp_path), backend="cpu", attention_backend="torch"))
    builder.find_files()
    chosen = registry.select("cpu", builder.overrides).choices
    assert chosen["mla_attend"].provider == chosen["mla_attend_dense"].provider == "torch"
    with pytest.raises(BackendError, match=r"mla_attend_dense of .* cannot come from aiter"):
        registry.select("cpu", {"mla_attend": "aiter"})


def test_a_quantized_up_projection_is_taken_apart(tmp_path, make_hf_model, loop, float32_model):
    """As DeepSeek V3 is published: linears in blocks of 128 x 128."""
    hf = make_hf_model("DeepseekV3", MLA | dict(first_k_dense_replace=3))
    hf.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rounded = {}
    for name, tensor in list(tensors.items()):
        if "_proj" in name:
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[name] = codes
            tensors[name.removesuffix("weight") + "weight_scale_inv"] = scale.view(1, 1)
            rounded[name] = codes.float() * scale
    assert any("kv_b_proj" in name for name in rounded)
    save_file(tensors, tmp_path / "model.safetensors")
    config = hf.config.to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    model = load(tmp_path, float32_model)
    for layer, block in enumerate(model._layers):
        up = block.attention._kv_up.flatten(0, 1)
        torch.testing.assert_close(up, rounded[f"model.layers.{layer}.self_attn.kv_b_proj.weight"])
    assert all(x.isfinite().all() for x in steps(model, loop))
