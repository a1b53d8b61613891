"""Tiny mixtures of experts in quantized formats: their values, logits and greedy tokens."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_formats import AWQ, FP8, FP8_BLOCK, FP8_STATIC, Case, check_logits, load, of_gptq
from writers import awq, change_config, fp8, mxfp4, quantize_folder

from stoker.backends.cpu.torch_ops import TorchOps
from stoker.backends.quantized import dequantize
from stoker.engine.api.errors import StartError

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
MIXTRAL = dict(num_experts_per_tok=2, num_local_experts=3)
DEEPSEEK = dict(
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_key_value_heads=4,
    num_experts_per_tok=2,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
)
QWEN = dict(num_experts_per_tok=2, num_experts=8, moe_intermediate_size=64, norm_topk_prob=True)
CASES = {
    "fp8 blocks": (
        "Mixtral",
        MIXTRAL,
        Case(FP8_BLOCK, fp8(block=(32, 32), names=("weight_scale_inv", ""))),
    ),
    "fp8 tensor": ("Qwen3Moe", QWEN, Case(FP8, fp8())),
    "fp8 tensor static": ("Mixtral", MIXTRAL, Case(FP8_STATIC, fp8(input_scale=0.1))),
    "fp8 channel": ("Qwen3Moe", QWEN, Case(FP8, fp8(per_channel=True))),
    "awq": ("Mixtral", MIXTRAL, Case(AWQ | dict(group_size=32), awq(32))),
    "fp8 blocks, latent attention": (
        "DeepseekV3",
        DEEPSEEK,
        Case(FP8_BLOCK, fp8(block=(32, 32), names=("weight_scale_inv", ""))),
    ),
    "gptq act-order": ("Qwen3Moe", QWEN, of_gptq(act_order=True, is_symmetric=False)),
    "gptq 8 bits": ("Mixtral", MIXTRAL, of_gptq(8, is_symmetric=False)),
}


class Recorder(TorchOps):
    """Keeps the values of the experts that it packs, and leaves inputs as they are.

    transformers' experts cannot be made to round theirs; the contract's tests compare that.
    """

    def __init__(self):
        self.gate_up, self.down = [], []

    def pack_quantized(self, weight, bias):
        return super().pack_quantized(replace(weight, activations=None), bias)

    def pack_quantized_experts(self, weights):
        self.gate_up.append(dequantize(weights.gate_up))
        self.down.append(dequantize(weights.down))
        gate_up, down = (replace(w, activations=None) for w in (weights.gate_up, weights.down))
        return super().pack_quantized_experts(replace(weights, gate_up=gate_up, down=down))


def is_quantized(name: str) -> bool:
    return name.startswith("model.layers") and not name.endswith(("gate", "norm"))


def oracle(folder, state, **config):
    """transformers' model of these weights."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


@pytest.mark.parametrize("name", CASES)
def test_experts(name, tmp_path, make_hf_model, loop):
    family, fields, case = CASES[name]
    make_hf_model(family, fields).save_pretrained(tmp_path / "quantized")
    config = json.loads((tmp_path / "quantized/config.json").read_text())
    rounded = quantize_folder(
        tmp_path / "quantized", case.config, lambda n: case.writer if is_quantized(n) else None
    )
    ops = Recorder()
    model = load(tmp_path / "quantized", ops)
    parts = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "Mixtral" else "mlp"
    num = next(fields[n] for n in NUM_EXPERTS if n in fields)
    for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]):
        gate, up, down = (
            torch.stack(
                [
                    rounded[f"model.layers.{layer}.{block}.experts.{e}.{part}.weight"]
                    for e in range(num)
                ]
            )
            for part in parts
        )
        assert any((g - torch.cat((gate, up), 1)).abs().max() < 1e-6 for g in ops.gate_up)
        assert any((d - down).abs().max() < 1e-6 for d in ops.down)
    hf = oracle(tmp_path / "rounded", rounded, **config)
    check_logits(model, hf, loop)


def test_gpt_oss(tmp_path, make_hf_model, loop):
    """Blocks and exponents of all experts in one tensor, gate and up by turns."""
    fields = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8)
    fields |= dict(hidden_size=64, intermediate_size=96)
    make_hf_model("GptOss", fields).save_pretrained(tmp_path / "mxfp4")
    config = json.loads((tmp_path / "mxfp4/config.json").read_text())
    path = tmp_path / "mxfp4/model.safetensors"
    saved = {name: tensor.clone() for name, tensor in load_file(path).items()}
    state, rounded = {}, dict(saved)
    for name, tensor in saved.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = tensor
            continue
        blocks, scales, values = mxfp4(tensor.transpose(1, 2))
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        rounded[name] = values.transpose(1, 2).contiguous()
    save_file(state, path)
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    quantization = dict(quant_method="mxfp4", modules_to_not_convert=names)
    change_config(tmp_path / "mxfp4", quantization_config=quantization)
    ops = Recorder()
    model = load(tmp_path / "mxfp4", ops)
    assert len(ops.down) == config["num_hidden_layers"]
    check_logits(model, oracle(tmp_path / "rounded", rounded, **config), loop)


def test_transformers_reads_the_blocks_alike():
    convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales, values = mxfp4(weight)
    theirs = convert(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs, values.transpose(1, 2))


def test_experts_of_different_orders_are_refused(tmp_path, make_hf_model):
    make_hf_model("Mixtral", MIXTRAL).save_pretrained(tmp_path)
    case = of_gptq(act_order=True)
    quantize_folder(tmp_path, case.config, lambda n: case.writer if is_quantized(n) else None)
    path = tmp_path / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = "model.layers.1.block_sparse_moe.experts.2.w3.g_idx"
    state[name] = state[name].flip(0)
    save_file(state, path)
    with pytest.raises(StartError, match=r"layers\.1.*gate and up have their inputs in different"):
        load(tmp_path, TorchOps())
