"""Tensors of experts: one each or stacked, what is missing or too much; routers; layers unread."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker.backends.cpu.torch_ops import TorchOps
from stoker.engine.api.errors import StartError
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import parse_config
from stoker.engine.runtime import model_files, weights

CPU = torch.device("cpu")
QWEN3 = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=24)
GLM = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
EXPERTS = "model.layers.1.mlp.experts"


def load(folder, dtype=torch.float32):
    files = model_files.resolve(str(folder))
    model = Decoder(files.config, TorchOps(), CPU, dtype)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    return model


def edit(folder, change):
    """Let `change` work on a checkpoint's tensors by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def checkpoint(tmp_path, make_hf_model):
    """Saves a model of a family and returns its folder."""

    def save(family, fields, **options):
        make_hf_model(family, fields).save_pretrained(tmp_path, **options)
        return tmp_path

    return save


@pytest.mark.parametrize(("family", "fields"), [("Qwen3Moe", QWEN3), ("Glm4Moe", GLM)])
def test_stacked_experts_are_the_same(family, fields, checkpoint, loop):
    folder = checkpoint(family, fields)
    tokens = list(range(3, 20))
    (single,) = loop(load(folder), 1, 20).step([(0, tokens)])
    checkpoint(family, fields, save_original_format=False)
    assert f"{EXPERTS}.gate_up_proj" in load_file(folder / "model.safetensors")
    (stacked,) = loop(load(folder), 1, 20).step([(0, tokens)])
    assert torch.equal(single, stacked)


@pytest.mark.parametrize(
    ("family", "fields", "name", "value", "message"),
    [
        ("Qwen3Moe", QWEN3, f"{EXPERTS}.2.up_proj.weight", None, "lack the tensor {}"),
        ("Qwen3Moe", QWEN3, f"{EXPERTS}.2.up_proj.weight", (48, 63), r"{} has .* \[48, 63\]"),
        ("Qwen3Moe", QWEN3, f"{EXPERTS}.4.up_proj.weight", (48, 64), "'{}' that the model lacks"),
        ("Qwen3Moe", QWEN3, f"{EXPERTS}.down_proj", (4, 64, 48), "the tensor {} twice"),
        ("Qwen3Moe", QWEN3, f"{EXPERTS}.gate_up_proj_bias", (4, 96), "'{}' that the model lacks"),
        ("GptOss", GPT_OSS, f"{EXPERTS}.gate_up_proj", None, "lack the tensor {}"),
        ("GptOss", GPT_OSS, f"{EXPERTS}.down_proj_bias", None, "lack the tensor {}"),
        ("GptOss", GPT_OSS, f"{EXPERTS}.gate_up_proj", (4, 192, 64), r"not \[4, 64, 192\]"),
        ("GptOss", GPT_OSS, "model.layers.0.self_attn.sinks", (3,), r"{} has the shape \[3\]"),
        ("Glm4Moe", GLM, "model.layers.1.mlp.gate.e_score_correction_bias", None, "lack .* {}"),
        ("Glm4Moe", GLM, "model.layers.1.mlp.shared_experts.up_proj.weight", (9, 64), "{} has"),
        ("Glm4Moe", GLM, "model.layers.5.embed_tokens.weight", (9, 64), "'{}' that the model"),
    ],
)
def test_what_is_wrong_with_experts_is_named(family, fields, name, value, message, checkpoint):
    folder = checkpoint(family, fields)

    def change(tensors):
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = torch.zeros(value)

    edit(folder, change)
    with pytest.raises(StartError, match=message.replace("{}", name.replace(".", r"\."))):
        load(folder)


def test_layers_that_predict_further_tokens_are_left_unread(checkpoint, loop):
    folder = checkpoint("Glm4Moe", GLM | dict(num_mtp_layers=2))
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    tokens = list(range(3, 20))
    (before,) = loop(load(folder), 1, 20).step([(0, tokens)])

    def change(tensors):
        for name in ("3.eh_proj.weight", "3.mlp.experts.0.up_proj.weight", "4.enorm.weight"):
            tensors[f"model.layers.{name}"] = torch.zeros(2, 2)

    edit(folder, change)
    (after,) = loop(load(folder), 1, 20).step([(0, tokens)])
    assert torch.equal(before, after)


def test_a_router_in_float32_stays_so(checkpoint):
    """Only where bfloat16 would round it; what is chosen hangs on it."""
    kept = []

    class Recorder(TorchOps):
        def pack_linear(self, weight, bias):
            kept.append((tuple(weight.shape), weight.dtype))
            return super().pack_linear(weight, bias)

    folder = checkpoint("Glm4Moe", GLM)

    def routers():
        kept.clear()
        files = model_files.resolve(str(folder))
        model = Decoder(files.config, Recorder(), CPU, torch.bfloat16)
        model.load(weights.from_safetensors(list(files.weights), files.config))
        return {dtype for shape, dtype in kept if shape == (4, 64)}

    assert routers() == {torch.float32}

    def round_routers(tensors):
        for name in tensors:
            if name.endswith("mlp.gate.weight"):
                tensors[name] = tensors[name].bfloat16()

    edit(folder, round_routers)
    assert routers() == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "fields", "num_packed"),
    [
        ("Glm4Moe", GLM | dict(n_shared_experts=2), 6),
        ("Qwen2Moe", QWEN3 | dict(shared_expert_intermediate_size=48), 5),
        ("Qwen2Moe", QWEN3 | dict(shared_expert_intermediate_size=50), 4),  # 1.04 experts
    ],
)
def test_shared_experts_become_experts_that_every_token_has(family, fields, num_packed, shape):
    packed = []

    class Recorder(TorchOps):
        def pack_experts(self, weights):
            packed.append(len(weights.down))
            return super().pack_experts(weights)

    hf = {"architectures": [f"{family}ForCausalLM"], **shape, **fields}
    model = Decoder(parse_config(hf | {"head_dim": 32}), Recorder(), CPU, torch.float32)
    model.load(weights.dummy(model.shapes, model.config, CPU, torch.float32, 0))
    assert set(packed) == {num_packed}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(architectures=["OlmoeForCausalLM"], clip_qkv=8.0), "clip_qkv"),
        (dict(architectures=["Ernie4_5_MoeForCausalLM"], use_bias=True), "use_bias"),
        (dict(architectures=["MiniMaxM2ForCausalLM"], rotary_dim=40), "rotary_dim 40 of 32"),
        (dict(architectures=["DeepseekV2ForCausalLM"], norm_topk_prob=True), "softmax"),
        (dict(architectures=["GptOssForCausalLM"], swiglu_limit=8.0), "swiglu_limit"),
        (dict(architectures=["Glm4MoeForCausalLM"], topk_method="greedy"), "topk_method 'greedy'"),
        (
            dict(architectures=["Glm4MoeForCausalLM"], n_routed_experts=5, n_group=2),
            "1 of 2 groups of 5",
        ),
        (dict(architectures=["OlmoeForCausalLM"], num_experts=2), "8 experts a token of 2"),
        (dict(architectures=["Glm4MoeForCausalLM"], n_shared_experts=-1), "n_shared_experts"),
        (
            dict(architectures=["Glm4MoeForCausalLM"], n_group=4, n_routed_experts=8)
            | dict(topk_group=1),
            "8 experts a token of 2",
        ),
    ],
)
def test_what_no_block_does_is_refused(fields, message, shape):
    with pytest.raises(StartError, match=message):
        parse_config(dict(num_experts_per_tok=8, head_dim=32) | shape | fields)
