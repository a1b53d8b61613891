"""Tiny random models of every family: logits and greedy tokens equal transformers', in float32."""

import json
import math
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from stoker.backends.cpu.torch_ops import TorchOps
from stoker.backends.registry import OP_NAMES, select
from stoker.engine.models.decoder import Decoder
from stoker.engine.models.registry import BY_ARCHITECTURE, parse_config
from stoker.engine.models.rope import inverse_frequencies
from stoker.engine.runtime import model_files, weights

VOCAB = 300  # of make_hf_model
NUM_NEW = 32
PROMPT_LENS = (41, 5, 1, 18)


def rope(kind: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


def longrope(original: int, **fields) -> dict:
    factors = {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0] * 4 + [5.0] * 4,
    }
    given = rope("longrope", original_max_position_embeddings=original, **factors, **fields)
    return given | {"original_max_position_embeddings": original}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GEMMA = dict(num_hidden_layers=7, head_dim=24, query_pre_attn_scalar=40, sliding_window=8)
GEMMA2 = dict(head_dim=24, query_pre_attn_scalar=40, sliding_window=8, tie_word_embeddings=True)
GEMMA2 |= dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)  # that they matter
OLMO3 = dict(num_hidden_layers=5, sliding_window=8) | {
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        | {"original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3)
GRANITE |= dict(logits_scaling=1.5, rms_norm_eps=0.1, attention_bias=True)
QWEN_WINDOW = dict(use_sliding_window=True, max_window_layers=1, sliding_window=9)
MOE = dict(num_experts_per_tok=2)
QWEN_MOE = MOE | dict(
    head_dim=24, num_experts=16, moe_intermediate_size=48, norm_topk_prob=True
)  # of 16, a prompt of five tokens leaves some unused
QWEN2_MOE = MOE | dict(num_experts=8, moe_intermediate_size=48, shared_expert_intermediate_size=40)
GPT_OSS = MOE | dict(head_dim=24, num_local_experts=6, sliding_window=8)
GPT_OSS |= dict(initializer_range=0.3)  # that values are clamped
DEEPSEEK_MOE = MOE | dict(n_routed_experts=8, moe_intermediate_size=48, first_k_dense_replace=1)
DEEPSEEK_MOE |= dict(n_group=1, topk_group=1)
GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=False)
MLA = DEEPSEEK_MOE | dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=12)
MLA |= dict(qk_rope_head_dim=8, num_key_value_heads=4)
DEEPSEEK_YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    mscale=0.7,
    mscale_all_dim=1.2,
)
ERNIE_MOE = dict(moe_k=2, moe_num_experts=6, moe_intermediate_size=48, moe_num_shared_experts=1)
GRANITE_MOE = MOE | GRANITE | dict(num_local_experts=6)
DELTA_NET = dict(linear_num_key_heads=2, linear_num_value_heads=4, head_dim=24)
DELTA_NET |= dict(linear_key_head_dim=8, linear_value_head_dim=12, num_hidden_layers=4)
DELTA_NET |= dict(rms_norm_eps=1e-3)  # the gated norm blows up the rounding of small values
QWEN_NEXT = MOE | DELTA_NET | dict(num_experts=16, moe_intermediate_size=48)
QWEN_NEXT |= dict(shared_expert_intermediate_size=40)
CASES = {
    "llama": ("Llama", {}),
    "llama one kv head, tied": ("Llama", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "llama head_dim": ("Llama", dict(head_dim=24)),
    "llama biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama rope llama3": ("Llama", LLAMA3),
    "llama rope yarn": ("Llama", YARN),
    "llama rope yarn, DeepSeek's": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=1.0,
            beta_fast=16,
            beta_slow=2,
            truncate=False,
        ),
    ),
    "llama rope linear": ("Llama", rope("linear", factor=3.0)),
    "mistral": ("Mistral", dict(head_dim=24, sliding_window=7)),
    "mistral without window": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2 window": ("Qwen2", QWEN_WINDOW),
    "qwen2 window not used": ("Qwen2", QWEN_WINDOW | dict(use_sliding_window=False)),
    "qwen3": ("Qwen3", dict(head_dim=24, tie_word_embeddings=True)),
    "qwen3 window, biases": ("Qwen3", QWEN_WINDOW | dict(head_dim=16, attention_bias=True)),
    "mixtral": ("Mixtral", MOE | dict(num_local_experts=3, sliding_window=7)),
    "qwen3 moe": ("Qwen3Moe", QWEN_MOE),
    "qwen3 moe, weights as they are": ("Qwen3Moe", QWEN_MOE | dict(norm_topk_prob=False)),
    "qwen3 moe, every other layer": (
        "Qwen3Moe",
        QWEN_MOE | dict(decoder_sparse_step=2, num_hidden_layers=4, attention_bias=True),
    ),
    "qwen3 moe, a dense layer, window": (
        "Qwen3Moe",
        QWEN_MOE | dict(mlp_only_layers=[1], use_sliding_window=True, sliding_window=9),
    ),
    "qwen2 moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2 moe, weights renormalized, a dense layer, windows": (
        "Qwen2Moe",
        QWEN2_MOE
        | dict(norm_topk_prob=True, mlp_only_layers=[1], qkv_bias=False)
        | dict(shared_expert_intermediate_size=96)  # which is two experts
        | dict(use_sliding_window=True, sliding_window=9, max_window_layers=2),
    ),
    "olmoe": ("Olmoe", MOE | dict(num_experts=6)),
    "olmoe, weights renormalized, biases": (
        "Olmoe",
        MOE | dict(num_experts=6, norm_topk_prob=True, attention_bias=True),
    ),
    "gpt oss": (
        "GptOss",
        GPT_OSS | rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=32),
    ),
    "gpt oss without biases in attention": ("GptOss", GPT_OSS | dict(attention_bias=False)),
    "glm4 moe": ("Glm4Moe", DEEPSEEK_MOE | dict(attention_bias=True)),
    "glm4 moe, groups, norms of q and k": (
        "Glm4Moe",
        DEEPSEEK_MOE | GROUPS | dict(use_qk_norm=True, head_dim=24, first_k_dense_replace=0),
    ),
    "deepseek v2 lite": ("DeepseekV2", MLA | dict(q_lora_rank=None)),
    "deepseek v2, groups, yarn, biases": (
        "DeepseekV2",
        MLA
        | DEEPSEEK_YARN
        | dict(topk_method="group_limited_greedy", n_group=2, topk_group=1)  # that it matters
        | dict(routed_scaling_factor=1.5, attention_bias=True, mlp_bias=True),
    ),
    "deepseek v3": ("DeepseekV3", MLA | DEEPSEEK_YARN | GROUPS),
    "deepseek v3, halves rotate, biases, weights renormalized": (
        "DeepseekV3",
        MLA | dict(rope_interleave=False, attention_bias=True, q_lora_rank=20),
    ),
    "glm4 moe lite": (
        "Glm4MoeLite",
        MLA | GROUPS | dict(mlp_layer_types=["dense", "sparse", "dense"]),
    ),
    "granite moe": ("GraniteMoe", GRANITE_MOE),
    "granite moe, shared": ("GraniteMoeShared", GRANITE_MOE | dict(shared_intermediate_size=40)),
    "minimax m2": (
        "MiniMaxM2",
        MOE | dict(num_local_experts=6, head_dim=24) | rope("default", partial_rotary_factor=0.5),
    ),
    "ernie 4.5": ("Ernie4_5", dict(head_dim=24, use_bias=True)),
    "ernie 4.5 moe": ("Ernie4_5_Moe", ERNIE_MOE | dict(moe_num_shared_experts=0)),
    "ernie 4.5 moe, a range of layers": (
        "Ernie4_5_Moe",
        ERNIE_MOE | dict(moe_layer_end_index=3, moe_layer_interval=2, num_hidden_layers=5),
    ),
    "seed oss": ("SeedOss", dict(head_dim=24, mlp_bias=True)),
    "seed oss, bias of the output": (
        "SeedOss",
        dict(head_dim=16, attention_bias=False, attention_out_bias=True),
    ),
    "exaone4": ("Exaone4", dict(sliding_window=8, num_hidden_layers=5)),
    "exaone4 without windows": (
        "Exaone4",
        dict(sliding_window=None, layer_types=["full_attention"] * 3),
    ),
    "ministral3": (
        "Ministral3",
        dict(head_dim=24)
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.7,
        ),
    ),
    "qwen3 next": ("Qwen3Next", QWEN_NEXT),
    "qwen3 next, a dense layer, other layers attend, biases": (
        "Qwen3Next",
        QWEN_NEXT
        | dict(mlp_only_layers=[1], attention_bias=True, linear_conv_kernel_dim=3)
        | dict(layer_types=["full_attention", "linear_attention"] * 2, norm_topk_prob=False),
    ),
    "qwen3.5": ("Qwen3_5", DELTA_NET | dict(linear_num_value_heads=2)),
    "qwen3.5 moe": ("Qwen3_5Moe", QWEN_NEXT),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2 without softcaps, untied": (
        "Gemma2",
        GEMMA2
        | dict(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True)
        | dict(tie_word_embeddings=False),
    ),
    "phi3": ("Phi3", dict(sliding_window=7)),
    "phi3 longrope, short": ("Phi3", longrope(256, attention_factor=1.3)),
    "phi3 longrope, long": ("Phi3", longrope(24)),
    "phi3 partial rotary": ("Phi3", rope("default", partial_rotary_factor=0.75)),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", OLMO3),
    "granite": ("Granite", GRANITE),
    "smollm3": ("SmolLM3", dict(no_rope_layer_interval=2, attention_bias=True)),
    "smollm3 windows": (
        "SmolLM3",
        dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=8, mlp_bias=True),
    ),
    "glm4": ("Glm4", dict(head_dim=24)),
    "glm": ("Glm", dict(head_dim=24, attention_bias=True)),
    "cohere": ("Cohere", dict(logit_scale=0.7)),
    "cohere norms of q and k": ("Cohere", dict(logit_scale=0.7, use_qk_norm=True)),
    "cohere2": ("Cohere2", dict(logit_scale=0.7, sliding_window=8, num_hidden_layers=5)),
    "starcoder2": ("Starcoder2", dict(sliding_window=7)),
    "starcoder2 without biases": ("Starcoder2", dict(use_bias=False, tie_word_embeddings=True)),
    "stablelm": ("StableLm", dict(use_qkv_bias=True)),
    "stablelm parallel, norms of q and k": (
        "StableLm",
        dict(use_parallel_residual=True, qk_layernorm=True),
    ),
    "ministral": (
        "Ministral",
        dict(
            head_dim=24,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "gemma3": ("Gemma3", GEMMA | GEMMA_ROPE | dict(tie_word_embeddings=True)),
    "gemma3 untied, softcap": ("Gemma3", GEMMA | dict(final_logit_softcapping=3.0)),
}


NATIVE_CASES = ["gemma2", "phi3 partial rotary", "olmo3", "granite", "smollm3", "glm4", "cohere2"]
NATIVE_CASES += ["starcoder2", "stablelm parallel, norms of q and k", "gpt oss", "deepseek v3"]
NATIVE_CASES += ["qwen2 moe, weights renormalized, a dense layer, windows"]
CPU = torch.device("cpu")


def float32(config, max_positions=None):
    return Decoder(config, TorchOps(), CPU, torch.float32, max_positions)


@pytest.fixture(scope="module")
def native_ops():
    backend = select("cpu")
    if backend.choices["linear"].provider != "native":
        pytest.skip("no AVX-512, or no compiler")
    return backend.ops


@torch.inference_mode()
def hf_logits(hf: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]"""
    return hf(torch.tensor([tokens]), use_cache=False).logits[0]


def load(folder, float32_model):
    files = model_files.resolve(str(folder))
    model = float32_model(files.config)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case, tmp_path, make_hf_model, loop, float32_model):
    hf = make_hf_model(*CASES[case])
    hf.save_pretrained(tmp_path)
    model = load(tmp_path, float32_model)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENS
    ]
    num_new = [NUM_NEW] * len(prompts)
    longest = max(PROMPT_LENS) + NUM_NEW
    outputs = loop(model, len(prompts), longest).greedy(prompts, num_new)

    # If each token is transformers' choice after those before it, all are its greedy answer.
    texts = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
    ours = loop(model, len(prompts), longest).step(list(enumerate(texts)))
    for text, output, row in zip(texts, outputs, ours, strict=True):
        theirs = hf_logits(hf, text)
        assert theirs.std() > 0.5  # otherwise the next line would say little
        torch.testing.assert_close(row, theirs, rtol=0, atol=1e-4)
        assert theirs.argmax(-1)[-NUM_NEW - 1 : -1].tolist() == output

    for chunk, page_size in ((7, 1), (1, 16)):
        again = loop(model, len(prompts), longest, page_size).greedy(prompts, num_new, chunk)
        assert again == outputs
    hit = loop(model, 2, longest)
    hit.step([(0, texts[0][:30])])  # ten pages, where a state is kept, too
    hit.step([(0, texts[0][30:40])])
    start = hit.hit(1, 0, 10)
    (row,) = hit.step([(1, texts[0][start:])])
    torch.testing.assert_close(row, ours[0][start:], rtol=0, atol=1e-4)
    for prompt, output in zip(prompts[:2], outputs, strict=False):
        assert loop(model, 1, longest).greedy([prompt], [NUM_NEW], 13) == [output]


@pytest.mark.parametrize("length", [32, 40, 64])
def test_dynamic_rope_scales_by_the_longest_context(length, tmp_path, make_hf_model, loop):
    """transformers scales by each text's own length, so a text of that length is equal."""
    fields = rope("dynamic", factor=2.0) | dict(max_position_embeddings=32)
    hf = make_hf_model("Llama", fields)
    hf.save_pretrained(tmp_path)
    config = model_files.resolve(str(tmp_path)).config
    assert (config.max_position_embeddings, config.longest_context) == (32, 64)
    model = load(tmp_path, partial(float32, max_positions=length))
    tokens = torch.randint(3, VOCAB, (length,)).tolist()
    (ours,) = loop(model, 1, length).step([(0, tokens)])
    torch.testing.assert_close(ours, hf_logits(hf, tokens), rtol=0, atol=1e-4)
    if length > 32:  # shorter ones are scaled as much, whose keys may be in the cache
        (ours,) = loop(model, 1, length).step([(0, tokens[:20])])
        assert (ours - hf_logits(hf, tokens[:20])).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "factors"), [(24, "short_factor"), (25, "long_factor")])
def test_longrope_chooses_by_the_longest_context(length, factors, shape):
    hf = {"architectures": ["Phi3ForCausalLM"], **shape, **longrope(24)}
    given = parse_config(hf).rope
    expected = 1 / 10_000.0 ** (torch.arange(8) / 8) / torch.tensor(hf["rope_parameters"][factors])
    torch.testing.assert_close(inverse_frequencies(given, length), expected)
    grown = math.sqrt(1 + math.log(256 / 24) / math.log(24))
    assert given.attention_factor == pytest.approx(grown)


@pytest.mark.parametrize("case", NATIVE_CASES)
def test_the_kernels_of_the_processor_give_the_same(
    case, tmp_path, make_hf_model, loop, native_ops
):
    """Gemma 2's softcap, GLM's pairs, StableLM's heads and the rest in the fused layer, or not."""
    hf = make_hf_model(*CASES[case])
    hf.save_pretrained(tmp_path)
    model = load(tmp_path, lambda config: Decoder(config, native_ops, CPU, torch.float32))
    texts = [list(range(3, 43)), [7], list(range(60, 80))]
    ours = loop(model, 3, 48, 16).step(list(enumerate(texts)))
    for text, row in zip(texts, ours, strict=True):
        torch.testing.assert_close(row, hf_logits(hf, text), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ["llama biases", "qwen3", "gemma3", "glm4", "smollm3 windows"])
def test_a_layer_op_by_op_is_the_same(case, tmp_path, make_hf_model, loop, float32_model):
    """As on backends without `decoder_layer`."""
    hf = make_hf_model(*CASES[case])
    hf.save_pretrained(tmp_path)
    model = load(tmp_path, float32_model)
    plain = TorchOps()
    ops = SimpleNamespace(**{op: getattr(plain, op) for op in (*OP_NAMES, "float32_residual")})
    by_op = load(tmp_path, lambda config: Decoder(config, ops, torch.device("cpu"), torch.float32))
    rows = [(0, list(range(3, 40))), (1, [7]), (2, [9, 8])]
    whole = loop(model, 3, 40).step(rows)
    for ours, theirs in zip(loop(by_op, 3, 40).step(rows), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "llama biases",
        "qwen3",
        "gemma3",
        "gemma2",
        "granite",
        "olmo2",
        "starcoder2",
        "cohere norms of q and k",
        "qwen3.5",
    ],
)
def test_bfloat16_is_near_float32(case, tmp_path, make_hf_model, loop):
    hf = make_hf_model(*CASES[case])
    hf.save_pretrained(tmp_path)
    files = model_files.resolve(str(tmp_path))
    model = Decoder(files.config, TorchOps(), torch.device("cpu"), torch.bfloat16)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    tokens = list(range(3, 40))
    (ours,) = loop(model, 1, len(tokens)).step([(0, tokens)])
    theirs = hf_logits(hf, tokens)
    assert ours.dtype == torch.float32
    assert 1e-4 < float((ours - theirs).std() / theirs.std()) < 0.1


def test_which_families_run_as_fused_layers(shape, loop):
    """A change of the blocks must not cost the common ones their fast path."""
    calls: list[int] = []

    class Counter(TorchOps):
        def decoder_layer(self, *args):
            calls.append(1)
            return super().decoder_layer(*args)

    fused = {}
    for case, (family, fields) in CASES.items():
        if family in fused or "norms of q and k" in case:
            continue
        hf = {"architectures": [f"{family}ForCausalLM"], **shape, **fields}
        model = Decoder(parse_config(hf), Counter(), CPU, torch.float32)
        config = model.config
        model.load(weights.dummy(model.shapes, config, CPU, torch.float32, 0))
        calls.clear()
        loop(model, 1, 4).step([(0, [5, 6])])
        has_mlp = config.num_layers - (sum(config.moe.layers) if config.moe else 0)
        fused[family] = len(calls) == has_mlp
    unfused = {family for family, is_fused in fused.items() if not is_fused}
    assert unfused == {
        "Olmo2",
        "Olmo3",
        "Exaone4",
        "Cohere",
        "Cohere2",
        "Starcoder2",
        "StableLm",
        "Ministral3",
        "Qwen3_5",
        "DeepseekV2",
        "DeepseekV3",
        "Glm4MoeLite",
    }


@pytest.mark.parametrize("case", ["llama", "qwen3"])  # untied, tied
def test_only_packed_weights_stay_in_memory(case, tmp_path, make_hf_model):
    given = []

    class Recorder(TorchOps):
        def pack_linear(self, weight, bias):
            given.append(weakref.ref(weight))
            return weight.clone(), bias

    make_hf_model(*CASES[case]).save_pretrained(tmp_path)
    files = model_files.resolve(str(tmp_path))
    model = Decoder(files.config, Recorder(), torch.device("cpu"), torch.float32)
    model.load(weights.from_safetensors(list(files.weights), files.config))
    kept = [ref() for ref in given if ref() is not None]
    assert len(given) == 4 * files.config.num_layers + 1
    if files.config.tie_word_embeddings:  # the head is made of the embedding itself
        assert [tuple(weight.shape) for weight in kept] == [(VOCAB, 64)]
    else:
        assert not kept


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        (
            "llama rope llama3",
            {
                "rope_theta": 10_000.0,
                "rope_scaling": {
                    "type": "llama3",
                    **{k: v for k, v in LLAMA3["rope_parameters"].items() if "rope_" not in k},
                },
            },
        ),
        (
            "gemma3",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 6,
                "layer_types": None,
            },
        ),
        ("qwen2 window", {"layer_types": None, "rope_theta": 10_000.0}),
        (
            "phi3 longrope, long",
            {
                "rope_theta": 10_000.0,
                "rope_scaling": {
                    k: v
                    for k, v in longrope(24)["rope_parameters"].items()
                    if k.endswith("_factor")
                }
                | {"type": "su"},
            },
        ),
        ("glm4", {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
        ("stablelm", {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}),
        (
            "olmo3",
            {
                "rope_theta": 10_000.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0}
                | {"original_max_position_embeddings": 32},
            },
        ),
    ],
)
def test_older_config_files_mean_the_same(case, fields, tmp_path, make_hf_model):
    make_hf_model(*CASES[case]).save_pretrained(tmp_path)
    new = model_files.resolve(str(tmp_path), needs_weights=False).config
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config | fields))
    assert model_files.resolve(str(tmp_path), needs_weights=False).config == new


def test_every_architecture_is_tested():
    tested = {f"{family}ForCausalLM" for family, _ in CASES.values()}
    with_images = {a for a in BY_ARCHITECTURE if a.endswith("ForConditionalGeneration")}
    assert tested | with_images == set(BY_ARCHITECTURE)  # those are in test_vision_models.py


ALWAYS_SAID = {  # by published configs: defaults are odd, or none
    "Glm4Moe": ("head_dim",),
    "DeepseekV2": ("num_experts_per_tok",),
    "Ernie4_5": ("head_dim", "num_key_value_heads"),
    "Ernie4_5_Moe": ("num_key_value_heads",),
    "Ministral3": ("rope_parameters",),
}


def test_defaults_are_those_of_transformers():
    for family in sorted({family for family, _ in CASES.values()}):
        is_text = family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
        config = getattr(transformers, f"{family}{'Text' * is_text}Config")()
        full = config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        needed += ("num_attention_heads", "architectures")
        full |= {"Glm4Moe": {"head_dim": 128}, "DeepseekV2": {"num_experts_per_tok": 6}}.get(
            family, {}
        )
        if family in ALWAYS_SAID or family.startswith("Qwen"):
            needed += ALWAYS_SAID.get(family, ("num_key_value_heads",))
        short = {key: full[key] for key in needed if key in full}
        assert parse_config(short) == parse_config(full), family


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_language_model_of_a_gemma3_with_vision(
    prefix, tmp_path, make_hf_model, loop, float32_model
):
    hf = make_hf_model(*CASES["gemma3 untied, softcap"])
    text_config = hf.config.to_dict()
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text_config,
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {"vision_tower.patch.weight": torch.zeros(2, 2)}
    for name, tensor in hf.state_dict().items():
        if prefix == "model.language_model.":  # the newer layout
            name = name.replace("model.", prefix, 1)
        else:
            name = prefix + name
        tensors[name] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = list(range(3, 40))
    (ours,) = loop(load(tmp_path, float32_model), 1, len(tokens)).step([(0, tokens)])
    torch.testing.assert_close(ours, hf_logits(hf, tokens), rtol=0, atol=1e-4)
