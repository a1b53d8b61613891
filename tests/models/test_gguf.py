"""GGUF: every type, names and layouts against gguf's own writer, and files that lie."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as GGML
from gguf_files import convert, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.api.errors import StartError
from stoker.engine.models.rope import inverse_frequencies
from stoker.engine.runtime import gguf_weights, model_files
from stoker.engine.runtime.gguf_file import GGUFFile

ROWS, ROW = 70, 512
LARGEST_ERROR = {  # relative to the largest value; of types that gguf can write
    "F32": 0.0,
    "F16": 0.001,
    "BF16": 0.004,
    "Q8_0": 0.004,
    "Q5_1": 0.04,
    "Q5_0": 0.07,
    "Q4_1": 0.07,
    "Q4_0": 0.13,
}


def raw(kind: GGML, values: np.ndarray) -> np.ndarray:
    """`values` in a GGUF type; random codes with scales of 0.01 where gguf cannot quantize."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        codes = np.random.default_rng(0).integers(
            0, 256, (values.shape[0], values.shape[1] // block, block_bytes), dtype=np.uint8
        )
        half = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        # Where a block keeps its float16 scales: K-quants 2, 4 and 5 have two of them.
        at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
        for offset in at.get(kind.name, (0,)):
            codes[:, :, offset : offset + 2] = half
        return codes.reshape(values.shape[0], -1)


@pytest.mark.parametrize("kind", sorted(gguf_weights.READABLE), ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_every_type(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_weights, "CHUNK_ELEMENTS", 8 * ROW)  # so that there are several chunks
    values = np.random.default_rng(1).normal(size=(ROWS, ROW)).astype(np.float32)
    data = raw(kind, values)
    path = write(tmp_path / "x.gguf", "qwen2", {}, {"blk.3.ffn_up.weight": (data, kind)})
    config = type(
        "Config", (), {"family": "qwen2", "quantization": None, "moe": None, "unread": ()}
    )
    [(name, tensor)] = gguf_weights.from_gguf(GGUFFile(path), config, dtype)
    assert name == "model.layers.3.mlp.up_proj.weight"
    assert tensor.dtype == dtype
    reference = gguf.quants.dequantize(data.reshape(ROWS, -1), kind)
    assert np.isfinite(reference).all() and reference.std() > 0.05
    assert torch.equal(tensor, torch.from_numpy(reference).to(dtype))
    if dtype == torch.float32 and kind.name in LARGEST_ERROR:
        assert np.abs(reference - values).max() <= LARGEST_ERROR[kind.name] * np.abs(values).max()


HF_CASES = {  # family to (llama.cpp's name, fields of a small config)
    "Llama": ("llama", dict(attention_bias=True)),
    "Mistral": ("llama", dict(sliding_window=None, head_dim=24)),
    "Qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "Qwen3": ("qwen3", dict(head_dim=24, tie_word_embeddings=True)),
    "Gemma3": (
        "gemma3",
        dict(
            num_hidden_layers=7,
            head_dim=24,
            query_pre_attn_scalar=24,
            sliding_window=8,
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
}


@pytest.mark.parametrize("family", HF_CASES)
def test_a_whole_model_in_float32(family, tmp_path, make_hf_model, loop, float32_model):
    architecture, fields = HF_CASES[family]
    hf = make_hf_model(family, fields)
    path = write(tmp_path / "tiny.gguf", architecture, *convert(hf, architecture))
    files = model_files.resolve(str(path))
    assert (files.kind, files.name, files.config.dtype) == ("gguf", "tiny", "float32")
    assert files.eos_token_ids == (2, 7)
    assert files.chat_template == "{{ messages }}"
    assert files.gguf.metadata["tokenizer.ggml.tokens"][299] == "token 299"
    steps = []
    model = float32_model(files.config)
    model.load(
        gguf_weights.from_gguf(
            files.gguf, files.config, torch.float32, lambda done, total: steps.append((done, total))
        )
    )
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 100_000
    tokens = list(range(3, 60))
    with torch.inference_mode():
        theirs = hf(torch.tensor([tokens]), use_cache=False).logits[0]
    (ours,) = loop(model, 1, len(tokens)).step([(0, tokens)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_rope_factors_of_llama3_and_yarn(tmp_path, make_hf_model):
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10_000.0,
    }
    hf = make_hf_model("Llama", {"rope_parameters": llama3})
    fields, tensors = convert(hf, "llama")
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](hf.config)
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    with_factors = tensors | {"rope_freqs.weight": (plain / inverse).numpy()}
    files = model_files.resolve(str(write(tmp_path / "a.gguf", "llama", fields, with_factors)))
    torch.testing.assert_close(inverse_frequencies(files.config.rope, 256), inverse)
    assert "rope_freqs.weight" not in dict(
        gguf_weights.from_gguf(files.gguf, files.config, torch.float32)
    )

    fields |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    rope = model_files.resolve(
        str(write(tmp_path / "b.gguf", "llama", fields, tensors))
    ).config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """A GGUF file of 1 KB with each kind of value."""
    fields = {
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": [0.5, 0.25],
        "block_count": 1,
        "rope.freq_base": 2.0,
        "general.name": "small",
    }
    tensors = {"token_embd.weight": np.ones((2, 32), np.float32), "x": np.ones(8, np.float32)}
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf", "llama", fields, tensors).read_bytes()


def read(path: Path, content: bytes) -> GGUFFile:
    path.write_bytes(content)
    return GGUFFile(path)


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    file = read(tmp_path / "a.gguf", small)
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, 0.25]
    assert file.data("x").view(np.float32).tolist() == [1.0] * 8
    last = max(t.offset + t.num_bytes for t in file.tensors.values())
    for length in [*range(0, 200), *range(200, last, 7), last - 1]:
        with pytest.raises(StartError, match=r"a\.gguf"):
            read(tmp_path / "a.gguf", small[:length])


def header(num_tensors: int, num_entries: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


def tensor(dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    packed = struct.pack(f"<Q1sI{len(dims)}Q", 1, b"t", count, *dims)
    return packed + struct.pack("<IQ", kind, offset) + bytes(256)


KEY = struct.pack("<Q1s", 1, b"k")
LIES = {
    "is no GGUF file": b"GGML" + bytes(100),
    "version 50331648": header(0, 0, b"", version=3 << 24),
    "claims": header(1 << 60, 0, bytes(64)),
    "claims 0 tensors": header(0, 1 << 17, bytes(64)),
    "a text of": header(0, 1, struct.pack("<Q", 1 << 62) + bytes(64)),
    "ends inside its header": header(0, 1, struct.pack("<Q", 1 << 20) + bytes(64)),
    "an array of 1152921504606846976": header(0, 1, KEY + struct.pack("<IIQ", 9, 4, 1 << 60)),
    "values of type 9": header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 1) * 40),
    "unknown type 77": header(0, 1, KEY + struct.pack("<I", 77)),
    "not UTF-8": header(0, 1, struct.pack("<Q2sI", 2, b"\xff\xfe", 7) + b"\0"),
    "the key 'k' twice": header(0, 2, (KEY + struct.pack("<I?", 7, True)) * 2),
    "5 dimensions": header(1, 0, tensor([1] * 5)),
    "4000000000 dimensions": header(1, 0, tensor([1], num_dims=4_000_000_000)),
    "the shape": header(1, 0, tensor([0, 4])),
    "ends at": header(1, 0, tensor([1 << 32, 1 << 32, 1 << 32])),
    "ends at 9223372036854775908": header(1, 0, tensor([1, 1], offset=1 << 63)),
    "rows of 33": header(1, 0, tensor([33, 2], kind=2)),
    "as unknown type 4096": header(1, 0, tensor([1], kind=4096)),
    "the tensor 't' twice": header(2, 0, tensor([1])[:-256] * 2 + bytes(256)),
    "the alignment 3": header(
        0, 1, struct.pack("<Q17sII", 17, b"general.alignment", 4, 3) + bytes(64)
    ),
}


@pytest.mark.parametrize("message", LIES)
def test_a_header_that_lies_is_refused_by_name(message, tmp_path):
    with pytest.raises(StartError, match=message) as error:
        read(tmp_path / "lie.gguf", LIES[message])
    assert "\n" not in str(error.value)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_headers_raise_nothing_but_start_errors(small, tmp_path, data):
    content = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(content) - 9))
        width = data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    (tmp_path / "damaged.gguf").write_bytes(content)
    try:
        file = GGUFFile(tmp_path / "damaged.gguf")
    except StartError:
        return
    for name, entry in file.tensors.items():
        assert len(file.data(name)) == entry.num_bytes  # inside the file


@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "output_norm.weight"])
def test_missing_and_unknown_tensors_are_named(name, tmp_path, make_hf_model, float32_model):
    fields, tensors = convert(make_hf_model("Qwen2", {}), "qwen2")
    path = tmp_path / "a.gguf"
    moved = {("blk.0.mystery.weight" if n == name else n): t for n, t in tensors.items()}
    files = model_files.resolve(str(write(path, "qwen2", fields, moved)))
    with pytest.raises(StartError, match=r"blk\.0\.mystery\.weight"):
        float32_model(files.config).load(
            gguf_weights.from_gguf(files.gguf, files.config, torch.float32)
        )
    del tensors[name]
    files = model_files.resolve(str(write(path, "qwen2", fields, tensors)))
    with pytest.raises(StartError, match=r"lack the tensor model\.(layers\.0\.|norm)"):
        float32_model(files.config).load(
            gguf_weights.from_gguf(files.gguf, files.config, torch.float32)
        )


def test_an_unknown_architecture_and_an_unread_type(tmp_path):
    embedding = {"token_embd.weight": np.ones((2, 256), np.float32)}
    path = write(tmp_path / "a.gguf", "qwen9", {}, embedding)
    with pytest.raises(StartError, match=r"'qwen9' is not supported \(nearest: qwen.*gemma3"):
        model_files.resolve(str(path))
    block = np.zeros((2, 66), np.uint8)
    path = write(tmp_path / "b.gguf", "llama", {}, {"output.weight": (block, GGML.IQ2_XXS)})
    config = type(
        "Config", (), {"family": "llama", "quantization": None, "moe": None, "unread": ()}
    )
    with pytest.raises(StartError, match=r"output\.weight as IQ2_XXS"):
        list(gguf_weights.from_gguf(GGUFFile(path), config, torch.float32))
