"""Checkpoints that the compressed-tensors package writes: values, logits and greedy tokens."""

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from test_formats import OUTLIERS, Recorder, check_logits, check_values, linears_of, load

from stoker.engine.api.errors import StartError


def ints(bits, strategy, **more):
    return dict(num_bits=bits, type="int", strategy=strategy, **more)


def floats(strategy, **more):
    return dict(num_bits=8, type="float", strategy=strategy, **more)


DYNAMIC = dict(dynamic=True)
MXFP4 = dict(num_bits=4, type="float", strategy="group", group_size=32)
MXFP4 |= dict(scale_dtype=torch.uint8, zp_dtype=torch.uint8)
# Weights, inputs, how inputs are rounded.
SCHEMES = {
    "fp8 tensor static": (floats("tensor"), floats("tensor"), "fp8 0.01"),
    "fp8 channel token": (floats("channel"), floats("token", **DYNAMIC), "fp8 token"),
    "fp8 blocks": (
        floats("block", block_structure=[32, 32]),
        floats("group", group_size=32, **DYNAMIC),
        "fp8 32",
    ),
    "fp8 weights alone": (floats("channel"), None, None),
    "int8 channel token": (ints(8, "channel"), ints(8, "token", **DYNAMIC), "int8 token"),
    "int8 tensor static": (ints(8, "tensor"), ints(8, "tensor"), "int8 0.03"),
    "w8a16 channel": (ints(8, "channel"), None, None),
    "w8a16 groups": (ints(8, "group", group_size=32), None, None),
    "w4a16 channel": (ints(4, "channel"), None, None),
    "w4a16 groups": (ints(4, "group", group_size=32), None, None),
    "w4a16 asymmetric": (ints(4, "group", group_size=16, symmetric=False), None, None),
    "w4a16 asymmetric channel": (ints(4, "channel", symmetric=False), None, None),
    "w8a16 asymmetric": (ints(8, "group", group_size=32, symmetric=False), None, None),
    "w4a16 order of weights": (ints(4, "group", group_size=32, actorder="weight"), None, None),
    "mxfp4": (MXFP4, None, None),
}


def calibrate(module, input_scale):
    """Scales by the weight's range."""
    args, weight = module.quantization_scheme.weights, module.weight.data
    match args.strategy:
        case "tensor":
            low, high = weight.min().view(1), weight.max().view(1)
        case "channel":
            low, high = weight.amin(1, True), weight.amax(1, True)
        case "group":
            groups = weight.unflatten(1, (-1, args.group_size))
            low, high = groups.amin(-1), groups.amax(-1)
        case "block":
            rows, columns = args.block_structure
            blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args)
    module.weight_scale.data = scale
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data = torch.tensor([input_scale])


def write(hf, folder, scheme, input_scale=1.0, targets=("Linear",), ignore=("lm_head",)):
    """Quantize, compress and save by the package; then its own idea of the weights is in `hf`."""
    weights, inputs, _ = scheme
    group = dict(targets=list(targets), weights=weights, input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=list(ignore))
    apply_quantization_config(hf, config)
    for module in hf.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            calibrate(module, input_scale)
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.config.architectures = [type(hf).__name__]
    hf.config.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in hf.state_dict().items()}, folder / "model.safetensors")
    compressor.update_config(folder)
    compressor.decompress_model(hf)
    hf.float()  # mxfp4 comes back as bfloat16
    for module in hf.modules():
        module.quantization_enabled = False  # its rounding of inputs, for which we have our own


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name, tmp_path, make_hf_model, loop):
    hf = make_hf_model("Llama", {})
    for module_name, module in hf.named_modules():
        factor = OUTLIERS.get(module_name.rpartition(".")[2])
        if factor is not None:
            module.weight.data *= factor
    how = SCHEMES[name][2]
    static = float(how.split()[1]) if how is not None and "0." in how else 1.0
    write(hf, tmp_path, SCHEMES[name], static)
    ops = Recorder()
    model = load(tmp_path, ops)
    check_values(ops.values, {n: linear.weight.data for n, linear in linears_of(hf).items()})
    ops.check_inputs(how)
    check_logits(model, hf, loop)


def test_names_and_patterns(tmp_path, make_hf_model, loop):
    """Of one layer nothing is quantized, and of the others only what the targets name."""
    hf = make_hf_model("Llama", {})
    targets = ("re:.*down_proj$", "model.layers.0.self_attn.q_proj", "re:.*layers\\.1.*")
    ignore = ("lm_head", "re:.*layers\\.1\\.mlp.*")
    write(hf, tmp_path, SCHEMES["w4a16 groups"], targets=targets, ignore=ignore)
    ops = Recorder()
    model = load(tmp_path, ops)
    assert sorted(tuple(v.shape) for v in ops.values) == sorted(
        [(64, 96)] * 2 + [(64, 64), (128, 64), (64, 64)]  # down of 0 and 2, q of 0, qkv and o of 1
    )
    check_logits(model, hf, loop)


def test_what_has_no_meaning_here_must_be_zero(tmp_path, make_hf_model):
    hf = make_hf_model("Llama", {})
    write(hf, tmp_path, SCHEMES["int8 channel token"])
    name = "model.layers.0.self_attn.q_proj.weight_zero_point"
    saved = load_file(tmp_path / "model.safetensors")
    state = {k: v.contiguous().clone() for k, v in saved.items()}
    state[name] = torch.zeros(64, 1, dtype=torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    load(tmp_path, Recorder())
    state[name][3] = 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=f"the tensor {name} is not zero"):
        load(tmp_path, Recorder())
