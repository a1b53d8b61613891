"""What quantization_config may say, and what is wrong with tensors, in one line each."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats import CASES, linears_of, load
from writers import change_config, quantize_folder

from stoker.backends.cpu.torch_ops import TorchOps
from stoker.engine.api.errors import StartError
from stoker.engine.models.hf_config import Fields
from stoker.engine.models.quantization.awq import Awq
from stoker.engine.models.quantization.compressed_tensors import PackedInts, PlainCodes
from stoker.engine.models.quantization.config import online, parse
from stoker.engine.models.quantization.fp8 import Fp8
from stoker.engine.models.quantization.gptq import Gptq
from stoker.engine.models.quantization.online import Blocks, EightBits, FourBits

Q, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"
EXPERT = "model.layers.3.mlp.experts.17.down_proj"


def parsed(method, renamed=None, **fields):
    return parse(Fields({"quant_method": method, **fields}), renamed or {})


def group(weights=None, **more):
    given = dict(num_bits=4, type="int", strategy="group", group_size=128) | (weights or {})
    return dict(targets=["Linear"], weights=given) | more


def compressed(*groups, **more):
    groups = {f"group_{i}": g for i, g in enumerate(groups or (group(),))}
    return dict(format="pack-quantized", config_groups=groups, ignore=["lm_head"]) | more


def test_which_linears_are_quantized():
    config = parsed("fp8", ignored_layers=["model.layers.3.mlp", "q_proj"])
    assert config.scheme(DOWN) is config.scheme(Q) is config.scheme("lm_head") is None
    assert config.scheme("model.layers.33.mlp.down_proj") == Fp8()
    blocks = parsed("fp8", weight_block_size=[128, 128], modules_to_not_convert=None)
    assert blocks.scheme(EXPERT) == Fp8((128, 128))

    config = parsed("awq", group_size=64, modules_to_not_convert=["layers.3.mlp", "visual"])
    assert (config.scheme(Q), config.scheme(DOWN), config.scheme("lm_head")) == (
        Awq(64),
        None,
        None,
    )

    wide = dict(bits=8, group_size=32)
    config = parsed(
        "gptq",
        bits=4,
        group_size=128,
        desc_act=False,
        dynamic={r"-:.*\.q_proj": {}, r"+:.*layers\.3\.mlp": wide},
    )
    assert config.scheme(Q) is config.scheme("lm_head") is None
    assert config.scheme(DOWN) == Gptq(8, 32, 1, has_order=False)
    assert config.scheme("model.layers.3.self_attn.k_proj") == Gptq(4, 128, 1, has_order=False)
    names = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]
    config = parsed("gptq", lm_head=True, group_size=-1, modules_in_block_to_quantize=names)
    assert config.scheme(Q) == Gptq(4, None, 1, has_order=True)
    assert config.scheme(DOWN) is None

    config = parsed("mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    assert config.scheme("model.layers.0.mlp.experts") is not None
    assert config.scheme(Q) is config.scheme(DOWN) is None

    eight = group(dict(num_bits=8, strategy="channel"), targets=["re:.*down_proj", Q])
    config = parsed("compressed-tensors", **compressed(group(), eight))  # names before classes
    assert config.scheme(Q) == config.scheme(DOWN) == config.scheme(EXPERT) == PackedInts(8, 0)
    assert config.scheme("model.layers.3.mlp.up_proj") == PackedInts(4, 128)
    assert config.scheme("lm_head") is None
    of_group = group(
        dict(num_bits=8, type="float", strategy="channel"),
        input_activations=dict(num_bits=8, type="float", strategy="tensor", dynamic=True),
        format="float-quantized",
    )
    config = parsed("compressed-tensors", **compressed(of_group, format="mixed-precision"))
    assert config.scheme(Q) == PlainCodes("fp8", (1, 0), activations="token")

    assert online("int4").scheme(Q) == FourBits()
    assert online("fp8").scheme(EXPERT) == EightBits("fp8")
    assert online("int8").scheme("lm_head") is None
    blocks = online("int8", {"Q4_1", "Q8_0"})
    assert (blocks.scheme(Q), blocks.scheme(EXPERT)) == (Blocks(8), EightBits("int8"))
    assert online("fp8", {"Q4_1", "Q8_0"}).scheme(Q) == EightBits("fp8")


def test_names_that_the_family_renames():
    renamed = {"language_model.model.": "model."}
    config = parsed("fp8", renamed, ignored_layers=["language_model.model.layers.3.mlp.down_proj"])
    assert config.scheme(DOWN) is None
    assert config.scheme(Q) == Fp8()


INPUTS = dict(num_bits=8, type="int", strategy="token", dynamic=True)
REFUSED = {
    "quant_method 'bitsandbytes' is not supported; there are fp8, compressed-tensors, awq, gptq": (
        "bitsandbytes",
        {},
    ),
    "activation_scheme 'local' is not supported; there are dynamic, static": (
        "fp8",
        dict(activation_scheme="local"),
    ),
    "weight_block_size must be two positive integers, not [128]": (
        "fp8",
        dict(weight_block_size=[128]),
    ),
    "modules_to_not_convert must be a list of names, not 'lm_head'": (
        "fp8",
        dict(modules_to_not_convert="lm_head"),
    ),
    "version 'gemv' is not supported; there are gemm": ("awq", dict(version="gemv")),
    "bits 3 is not supported; there are 4": ("awq", dict(bits=3)),
    "bits 3 is not supported; there are 4, 8": ("gptq", dict(bits=3)),
    "checkpoint_format 'marlin' is not supported; there are gptq, gptq_v2": (
        "gptq",
        dict(checkpoint_format="marlin"),
    ),
    "dynamic: '*': nothing to repeat at position 0": ("gptq", dict(dynamic={"-:*": {}})),
    "config_groups is missing": ("compressed-tensors", {}),
    "config_groups.group_0.weights.num_bits 3 is not supported; there are int 4, int 8": (
        "compressed-tensors",
        compressed(group(dict(num_bits=3))),
    ),
    "config_groups.group_0.format 'nvfp4-pack-quantized' is not supported; there are float-quant": (
        "compressed-tensors",
        compressed(format="nvfp4-pack-quantized"),
    ),
    "config_groups.group_0.input_activations.symmetric False is not supported; there are True": (
        "compressed-tensors",
        compressed(
            group(
                dict(num_bits=8, strategy="channel"),
                input_activations=INPUTS | dict(symmetric=False),
            ),
            format="int-quantized",
        ),
    ),
    "config_groups.group_0.weights.strategy 'tensor_group' is not supported; there are tensor, c": (
        "compressed-tensors",
        compressed(group(dict(strategy="tensor_group"))),
    ),
    "kv_cache_scheme.type 'int' is not supported; there are float of 8 bits": (
        "compressed-tensors",
        compressed(kv_cache_scheme=dict(num_bits=8, type="int")),
    ),
    "sparsity_config.format 'sparse-24-bitmask' is not supported; there are dense": (
        "compressed-tensors",
        compressed(sparsity_config=dict(format="sparse-24-bitmask")),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_scheme_does_is_refused_by_its_field(message):
    method, fields = REFUSED[message]
    with pytest.raises(StartError) as error:
        parsed(method, **fields)
    assert f"quantization_config: {message}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory, make_hf_model):
    folder = tmp_path_factory.mktemp("gptq")
    hf = make_hf_model("Llama", {})
    hf.save_pretrained(folder)
    case = CASES["gptq act-order"]
    quantize_folder(folder, case.config, lambda n: case.writer if n in linears_of(hf) else None)
    return folder


def without(name):
    return lambda state: state.pop(name)


def with_(name, change):
    return lambda state: state.update({name: change(state.get(name))})


LINEAR = "model.layers.1.self_attn.o_proj"
BROKEN = {
    f"the weights lack the tensor {LINEAR}.qzeros": without(f"{LINEAR}.qzeros"),
    f"the weights hold a tensor '{LINEAR}.weight' that the model lacks": with_(
        f"{LINEAR}.weight", lambda _: torch.ones(64, 64)
    ),
    f"the tensor {LINEAR}.qweight has the shape [7, 64], not [8, 64]": with_(
        f"{LINEAR}.qweight", lambda t: t[:7]
    ),
    f"the tensor {LINEAR}.qweight holds int64, not int32": with_(
        f"{LINEAR}.qweight", lambda t: t.long()
    ),
    f"the tensor {LINEAR}.scales holds float8_e4m3fn, not floats": with_(
        f"{LINEAR}.scales", lambda t: t.to(torch.float8_e4m3fn)
    ),
    f"{LINEAR}: g_idx has other groups than of 32 inputs each": with_(
        f"{LINEAR}.g_idx", lambda t: torch.zeros_like(t)
    ),
    f"the tensor {LINEAR}.bias is not zero, which is not supported": with_(
        f"{LINEAR}.bias", lambda _: torch.ones(64)
    ),
    "the tensor model.norm.weight holds float8_e4m3fn, not floats": with_(
        "model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_tensor_is_named(message, gptq_folder, tmp_path):
    state = {name: t.clone() for name, t in load_file(gptq_folder / "model.safetensors").items()}
    BROKEN[message](state)
    save_file({k: t.contiguous() for k, t in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_folder / "config.json").read_text())
    with pytest.raises(StartError) as error:
        load(tmp_path, TorchOps())
    assert message in str(error.value)


def test_zero_biases_that_the_model_has_none_of_are_fine(gptq_folder, tmp_path, loop):
    """Older tools save one for every linear."""
    state = {name: t.clone() for name, t in load_file(gptq_folder / "model.safetensors").items()}
    plain = loop(load(gptq_folder, TorchOps()), 1, 8).step([(0, [5, 6, 7])])[0]
    save_file(state | {f"{LINEAR}.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_folder / "config.json").read_text())
    again = loop(load(tmp_path, TorchOps()), 1, 8).step([(0, [5, 6, 7])])[0]
    assert torch.equal(plain, again)


def test_a_weight_that_words_do_not_divide(tmp_path, make_hf_model):
    hf = make_hf_model("Llama", dict(intermediate_size=100))
    hf.save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=CASES["gptq"].config)
    with pytest.raises(StartError, match=r"gate_proj \[100, 64\]: 8 codes make a word"):
        load(tmp_path, TorchOps())


def test_gptq_s_groups_are_those_that_it_says():
    tensors = {
        "qweight": torch.zeros(8, 8, dtype=torch.int32),
        "qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "scales": torch.ones(2, 8),
        "g_idx": torch.arange(64) // 32,
    }
    scheme = Gptq(bits=4, group_size=32, zero_shift=1, has_order=False)
    scheme.load(tensors, 8, 64)
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(ValueError, match="g_idx is no order of neighbours"):
        scheme.load(tensors, 8, 64)
