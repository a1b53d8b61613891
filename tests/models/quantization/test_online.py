"""--quantization: how near rounded weights are, and what the engine makes of the flag."""

import json

import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from test_experts import oracle
from test_formats import CASES, check_logits, linears_of, load
from writers import quantize_folder

from stoker.backends.cpu.torch_ops import TorchOps
from stoker.backends.quantized import dequantize
from stoker.backends.registry import select
from stoker.engine import Engine, SamplingParams
from stoker.engine.api.errors import StartError
from stoker.engine.models.quantization.config import online
from stoker.engine.models.quantization.online import SHRINKS, Blocks, EightBits, FourBits


def rounded(scheme, weight):
    return dequantize(scheme.load({"weight": weight}, *weight.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_near(dtype):
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3], weight[5, 7] = 0.0, 30.0
    largest = weight.float().abs().amax(1, keepdim=True)
    error = (rounded(EightBits("int8"), weight) - weight).abs()
    assert (error <= largest / 127 / 2 * 1.001).all()
    error = (rounded(EightBits("fp8"), weight) - weight).abs()
    # Three bits of mantissa; below 2**-6 of the codes' unit, steps of 2**-9.
    bound = torch.maximum(weight.float().abs() / 16, largest / 448 * 2**-10)
    assert (error <= bound * 1.001).all()


@pytest.mark.parametrize("num_in, size", [(256, 128), (192, 64), (96, 32), (50, 50)])
def test_four_bits_take_the_best_of_some_ranges(num_in, size):
    weight = torch.randn(24, num_in, generator=torch.Generator().manual_seed(num_in))
    weight[0], weight[1], weight[2, 3] = 0.0, weight[1].abs() + 5, 9.0
    packed = FourBits().load({"weight": weight}, 24, num_in)
    assert packed.block == (1, size) and packed.scales.shape == (24, num_in // size)
    error = (dequantize(packed) - weight).view(24, -1, size).square().sum(-1)
    groups = weight.view(24, -1, size)
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    best = torch.full_like(error, torch.inf)
    for shrink in SHRINKS:
        levels = torch.arange(16) * (high - low) * shrink / 15 + low * shrink
        nearest = (groups[..., None] - levels[..., None, :]).square().amin(-1)
        best = torch.minimum(best, nearest.sum(-1))
    torch.testing.assert_close(error, best, rtol=1e-3, atol=1e-4)
    assert (dequantize(packed)[0] == 0).all()


@pytest.mark.parametrize("bits, kind", [(8, "Q8_0"), (4, "Q4_1")])
def test_blocks_are_those_of_gguf(bits, kind):
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    weight[0], weight[1, 5] = 0.0, 20.0
    packed = Blocks(bits).load({"weight": weight}, 24, 96)
    data, number = packed.codes.numpy(), GGMLQuantizationType[kind]
    assert packed.gguf_type == kind
    assert torch.equal(torch.from_numpy(quants.dequantize(data, number)), dequantize(packed))
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), number), number))
    ours = (dequantize(packed) - weight).square().sum()
    assert ours <= (theirs - weight).square().sum() * 1.001
    assert (
        Blocks(bits).load({"weight": weight[:, :50]}, 24, 50).kind
        == f"{'u' * (bits == 4)}int{bits}"
    )


def test_four_bits_in_a_model(tmp_path, make_hf_model, loop):
    hf = make_hf_model("Llama", dict(tie_word_embeddings=True))
    hf.save_pretrained(tmp_path)
    model = load(tmp_path, TorchOps(), quantization=online("int4"))
    for linear in linears_of(hf).values():
        linear.weight.data = rounded(FourBits(), linear.weight.data)
    check_logits(model, hf, loop)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_four_bits_of_experts(family, tmp_path, make_hf_model, loop):
    """One tensor an expert, and all in one, transposed and by turns."""
    fields = dict(num_experts_per_tok=2)
    if family == "GptOss":
        fields |= dict(num_local_experts=4, head_dim=16, sliding_window=8)
    else:
        fields |= dict(num_experts=4, moe_intermediate_size=32, norm_topk_prob=True)
    make_hf_model(family, fields).save_pretrained(tmp_path / "floats")
    config = json.loads((tmp_path / "floats/config.json").read_text())
    model = load(tmp_path / "floats", TorchOps(), quantization=online("int4"))

    def write(name):
        is_plain = not name.startswith("model.layers") or name.endswith(("gate", "router"))
        return None if is_plain else (lambda w: ({"weight": w}, rounded(FourBits(), w)))

    state = quantize_folder(tmp_path / "floats", {}, write)
    for name, tensor in state.items():
        if tensor.dim() == 3:  # [num_experts, in, out]; rows by turns are still rows
            experts = [rounded(FourBits(), one.T.contiguous()).T for one in tensor]
            state[name] = torch.stack(experts).contiguous()
    check_logits(model, oracle(tmp_path / "rounded", state, **config), loop)


def test_the_flag(tmp_path, make_hf_model, save_model):
    hf = make_hf_model("Llama", {})
    save_model(hf, tmp_path)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompt = list(range(3, 40))
    with Engine(model=str(tmp_path), dtype="float32", quantization="int4") as engine:
        (answer,) = engine.generate([prompt], params)
    with Engine(model=str(tmp_path), dtype="float32") as engine:
        (other,) = engine.generate([prompt], params)

    def agreement(answer) -> int:
        """At how many of 16 tokens transformers agrees."""
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + answer.token_ids])).logits[0]
        choice = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        return sum(a == b for a, b in zip(choice, answer.token_ids, strict=True))

    assert agreement(other) == 16
    is_native = select("cpu").choices["quantized_linear"].provider == "native"
    scheme = Blocks(4) if is_native else FourBits()
    before = agreement(answer)
    for linear in linears_of(hf).values():
        linear.weight.data = rounded(scheme, linear.weight.data)
    assert agreement(answer) >= 13 > before  # native kernels round inputs, too
    case = CASES["awq"]
    quantize_folder(tmp_path, case.config, lambda n: case.writer if n in linears_of(hf) else None)
    with pytest.raises(
        StartError, match=r"--quantization int8: the checkpoint is quantized already \(awq"
    ):
        Engine(model=str(tmp_path), quantization="int8")
