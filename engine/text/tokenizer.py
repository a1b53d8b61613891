"""Text to token ids and back, from a model's folder or a GGUF file's metadata.

Decoding works on bytes: each id stands for exact bytes, and text is their UTF-8. It adds nothing
and cleans nothing up, so that streamed text, whole text and log-probability bytes agree.

Runs on: pool.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import RequestError, StartError
from ..api.token_ids import token_ids
from . import gguf_tokenizer
from .gguf_tokenizer import SPACE

# A GGUF file without an end-of-turn id: a control token with one of these names is it.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eom_id|>")
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Composing normal forms turn at most four characters into one.
_MAX_COMPOSED = 4


class Tokenizer:
    """A model's vocabulary and its special tokens. Safe to use from several threads.

    Attributes:
        vocab_size: one more than the largest id; the model's own may differ.
        bos_id: the id of the first token, None where the model has none.
        eos_ids: the ids that end an answer.
        special_ids: the ids that skip_special_tokens leaves out of the text.
        special_tokens: `bos_token`, `eos_token`, ... as chat templates name them.
        chat_templates: name to source; the usual one is "default".
        prefix_ids, suffix_ids: what add_special_tokens puts around a text.
        strips_first_space: the decoder takes one space away where a text begins.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        special_ids: Iterable[int] = (),
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})

        named = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
        self.bos_id = named.get("bos_token")
        eos_id = named.get("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(
            {i for i, token in added.items() if token.special}
            | {i for i in named.values() if i is not None}
            | set(special_ids)
        )
        self.eos_ids = frozenset(eos_ids) | ({eos_id} if eos_id is not None else set())

        steps = _steps(backend.decoder, "decoders")
        self.strips_first_space = any(_strips_first_space(step) for step in steps)
        self._token_bytes = _token_bytes(backend, added, steps)
        self.vocab_size = len(self._token_bytes)
        self._longest_token = max(
            len(data.decode("utf-8", "replace")) for data in self._token_bytes
        )
        if any(s["type"].startswith("NF") for s in _steps(backend.normalizer, "normalizers")):
            self._longest_token *= _MAX_COMPOSED
        self._token_texts: dict[tuple[bool, tuple[str, ...]], list[str | None]] = {}

        before, after = self._ends()
        self.prefix_ids = _with_end(before, self.bos_id, add_bos, first=True)
        self.suffix_ids = _with_end(after, eos_id, add_eos, first=False)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tokenizer":
        """From a model's folder, a tokenizer.json, or a GGUF file. Raises StartError."""
        path = Path(path)
        if path.is_dir():
            return cls.from_folder(path)
        if path.suffix == ".json":
            return cls.from_json(path)
        return cls.from_gguf(gguf_tokenizer.read_metadata(path))

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> "Tokenizer":
        """From tokenizer.json and the small files beside it. Raises StartError."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise StartError(f"{folder} has no tokenizer.json; convert the tokenizer to that form")
        return cls.from_json(file)

    @classmethod
    def from_json(cls, file: Path) -> "Tokenizer":
        """From a tokenizer.json by any name and the small files beside it. Raises StartError."""
        folder = file.parent
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise StartError(f"{file} cannot be read: {e}") from e
        config = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        special = {
            f"{name}_token": text
            for name in _SPECIAL_NAMES
            if (text := _token_text(config, special_map, f"{name}_token")) is not None
        }
        eos_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            eos_ids.update(token_ids(value, f"{folder / name}: eos_token_id"))
        return cls(
            backend,
            special_tokens=special,
            eos_ids=eos_ids,
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
            chat_templates=_chat_templates(folder, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF file, arrays as lists. Raises StartError."""
        vocabulary = gguf_tokenizer.build(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def token_id(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            ids = token_ids(metadata.get(key), f"the GGUF file's {key}")
            return ids[0] if ids and ids[0] < len(tokens) else None

        gguf_names = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
        ids = {name: token_id(gguf_names.get(name, name)) for name in _SPECIAL_NAMES}
        eos_ids = {token_id("eos"), token_id("eot"), token_id("eom")} - {None}
        if token_id("eot") is None:
            found = (vocabulary.backend.token_to_id(name) for name in _END_OF_TURN)
            eos_ids |= {i for i in found if i in vocabulary.special_ids}
        templates = {
            key.removeprefix("tokenizer.chat_template.") if key.count(".") > 1 else "default": value
            for key, value in metadata.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        return cls(
            vocabulary.backend,
            special_tokens={f"{k}_token": tokens[i] for k, i in ids.items() if i is not None},
            special_ids=vocabulary.special_ids,
            eos_ids=(i for i in eos_ids if i is not None),
            add_bos=vocabulary.add_bos,
            add_eos=vocabulary.add_eos,
            chat_templates=templates,
        )

    @property
    def chat_template(self) -> str | None:
        """The usual chat template's source; None where the model has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that stand in it become their ids.

        Frees the GIL while it works. Raises RequestError for text that is no valid Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text holds a lone surrogate: no valid Unicode") from None
        if not add_special_tokens:
            return [e.ids for e in encodings]
        return [[*self.prefix_ids, *e.ids, *self.suffix_ids] for e in encodings]

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, at_start: bool = True
    ) -> str:
        """The text of some ids. Bytes that are no UTF-8 become U+FFFD.

        Args:
            at_start: the ids begin the text, so SentencePiece's first space is no part of it.
                False for ids that continue another text, as a model's output does.
        """
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        if at_start and self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of an id; none for an id that has no entry."""
        return self._token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_str(self, token_id: int) -> str:
        """An id's text, with U+FFFD for bytes that are only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_texts(
        self, skip_special_tokens: bool, shown: tuple[str, ...] = ()
    ) -> list[str | None]:
        """Text of each id [vocab_size]; None where its bytes are no complete UTF-8.

        Args:
            shown: special tokens that stand in one of these are not skipped.
        """
        key = (skip_special_tokens, shown if skip_special_tokens else ())
        texts = self._token_texts.get(key)
        if texts is None:
            texts = [_text_or_none(data) for data in self._token_bytes]
            if skip_special_tokens:
                for i in self.special_ids:
                    if i < len(texts) and not any(self.token_str(i) in text for text in shown):
                        texts[i] = ""
            self._token_texts[key] = texts  # two threads would store the same
        return texts

    def max_chars(self, num_tokens: int) -> int:
        """The most characters that `num_tokens` tokens can come from.

        A longer prompt is too long for certain and need not be tokenized to know it. Whitespace
        that an added token swallows (its lstrip or rstrip) counts as text here.
        """
        return num_tokens * self._longest_token

    def _ends(self) -> tuple[list[int], list[int]]:
        """What the backend's own post-processor puts before and after a text."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        ids = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(ids) - len(plain) + 1):
            if ids[start : start + len(plain)] == plain:
                return ids[:start], ids[start + len(plain) :]
        raise StartError("the tokenizer's post-processor changes the text's own tokens")


def _with_end(
    ids: list[int], token_id: int | None, wanted: bool | None, *, first: bool
) -> tuple[int, ...]:
    """Ids around a text, with or without a certain one; `wanted` None leaves them alone."""
    if wanted is None or token_id is None or wanted == (token_id in ids):
        return tuple(ids)
    if wanted:
        return (token_id, *ids) if first else (*ids, token_id)
    return tuple(i for i in ids if i != token_id)


def _steps(part: Any, plural: str) -> list[dict[str, Any]]:
    """The settings of a tokenizer's part as a flat list; the parts of a Sequence one by one."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state[plural] if state["type"] == "Sequence" else [state]


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step["content"] == " " and step["start"] > 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"


def _token_bytes(
    backend: tokenizers.Tokenizer, added: Mapping[int, Any], steps: list[dict[str, Any]]
) -> list[bytes]:
    """Bytes of each id, [vocab_size]."""
    kinds = {step["type"] for step in steps}
    byte_level = "ByteLevel" in kinds
    if not byte_level and kinds.isdisjoint(("ByteFallback", "Metaspace", "Replace")):
        raise StartError(
            f"tokenizer.json has a decoder that is not supported: {', '.join(kinds) or 'none'}"
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    alphabet = _byte_alphabet()
    for token, i in vocab.items():
        if not byte_level:
            piece = _BYTE_PIECE.fullmatch(token)
            table[i] = bytes([int(piece[1], 16)]) if piece else token.replace(SPACE, " ").encode()
        elif i in added or not alphabet.keys() >= set(token):
            table[i] = token.encode()
        else:
            table[i] = bytes([alphabet[c] for c in token])
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte: itself where it prints, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _token_text(config: dict[str, Any], special_map: dict[str, Any], name: str) -> str | None:
    """A special token's text, which the files hold as a string or as an object with `content`."""
    value = config.get(name) or special_map.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over tokenizer_config.json."""
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(value, list):
        templates = {entry["name"]: entry["template"] for entry in value}
    else:
        templates = {"default": value} if value else {}
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise StartError(f"{file} is no valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise StartError(f"{file} must hold a JSON object")
    return value
