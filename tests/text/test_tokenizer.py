"""Tokenizers of real GGUF files and of folders, against transformers and against plain oracles."""

import itertools
import json
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from stoker.engine.api.errors import RequestError, StartError
from stoker.engine.text import gguf_tokenizer
from stoker.engine.text.tokenizer import Tokenizer

# Texts of all kinds, with the ids that transformers gives them with Gemma's tokenizer.
GEMMA3_IDS = json.loads(Path(__file__).with_name("gemma3_ids.json").read_text())
TEXTS = [text for text, _ in GEMMA3_IDS]


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2) -> dict:
    return smollm2.gguf.metadata


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_270m) -> Tokenizer:
    return Tokenizer.from_gguf(gemma3_270m.gguf.metadata)


def test_smollm2_gives_the_reference_prompt_ids(smollm2_tokenizer, smollm2_greedy):
    for item in smollm2_greedy:
        ids = smollm2_tokenizer.encode(item["text"], add_special_tokens=False)
        assert ids == item["prompt_ids"]
        assert smollm2_tokenizer.decode(item["output_ids"], at_start=False) == item["output_text"]


def test_gemma3_gives_the_reference_prompt_ids(gemma3_tokenizer, gemma3_270m_greedy):
    for item in gemma3_270m_greedy:
        assert gemma3_tokenizer.encode(item["text"]) == item["prompt_ids"]
        assert gemma3_tokenizer.decode(item["output_ids"], at_start=False) == item["output_text"]


def test_smollm2_equals_its_own_pipeline(smollm2, smollm2_tokenizer, smollm2_metadata):
    """transformers takes GPT-2's split rule for every GGUF. SmolLM2's own splits digits first."""
    oracle = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    without_digits = [t for t in TEXTS if not any(c.isnumeric() for c in t)]
    assert len(without_digits) > 100
    for text in without_digits:
        assert smollm2_tokenizer.encode(text) == oracle.encode(text)
        ids = oracle.encode(text)
        assert smollm2_tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert smollm2_tokenizer.encode(text) == oracle.encode(text)
    two_spaces = smollm2_tokenizer.encode("a  12")
    assert [smollm2_tokenizer.token_str(i) for i in two_spaces] == ["a", "  ", "1", "2"]


def test_gemma3_equals_transformers(gemma3_tokenizer):
    for text, ids in GEMMA3_IDS:
        assert gemma3_tokenizer.encode(text) == ids
        assert gemma3_tokenizer.encode(text, add_special_tokens=False) == ids[1:]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back(smollm2_tokenizer, gemma3_tokenizer, text):
    assume(not re.search(r"<[\w|/]+>", text))  # the names of special tokens are those tokens
    ids = gemma3_tokenizer.encode(text)
    assert gemma3_tokenizer.decode(ids) == text.replace("▁", " ")
    assert len(text) <= gemma3_tokenizer.max_chars(len(ids))
    # SmolLM2's vocabulary lacks some bytes: control characters, and rare ones of four bytes.
    single = (smollm2_tokenizer.token_bytes(i) for i in range(smollm2_tokenizer.vocab_size))
    known = {data[0] for data in single if len(data) == 1}
    assert set(b"\n azAZ09\xc3\xe2\xf0") <= known
    if known.issuperset(text.encode()):
        ids = smollm2_tokenizer.encode(text)
        assert smollm2_tokenizer.decode(ids) == text
        assert len(text) <= smollm2_tokenizer.max_chars(len(ids))


def test_special_tokens_of_gguf_files(smollm2_tokenizer, gemma3_tokenizer):
    assert smollm2_tokenizer.bos_id == 1
    assert smollm2_tokenizer.eos_ids == {2}
    assert smollm2_tokenizer.special_ids == set(range(17))
    assert smollm2_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2_tokenizer.prefix_ids == ()  # add_bos_token is false
    assert "<|im_start|>assistant" in smollm2_tokenizer.chat_template
    assert gemma3_tokenizer.bos_id == 2
    assert gemma3_tokenizer.eos_ids == {1, 106}  # <eos>, <end_of_turn>
    assert gemma3_tokenizer.prefix_ids == (2,)
    assert gemma3_tokenizer.suffix_ids == ()
    assert gemma3_tokenizer.chat_template is None
    assert 107 not in gemma3_tokenizer.special_ids  # "\n" is user-defined: it is text


def test_bytes_of_tokens(smollm2_tokenizer, gemma3_tokenizer):
    for tokenizer in (smollm2_tokenizer, gemma3_tokenizer):
        for text in ("é", "🎉", " the", "\n\n", "\x00", "  "):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert smollm2_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert gemma3_tokenizer.token_bytes(238 + 0xE2) == b"\xe2"
    assert gemma3_tokenizer.token_str(238 + 0xE2) == "\ufffd"


def test_ids_without_an_entry_are_empty(smollm2_tokenizer):
    size = smollm2_tokenizer.vocab_size
    assert smollm2_tokenizer.token_bytes(size) == b""
    assert smollm2_tokenizer.token_bytes(-1) == b""
    ids = smollm2_tokenizer.encode("hi there")
    assert smollm2_tokenizer.decode([ids[0], size, *ids[1:], size + 100_000]) == "hi there"


def test_lone_surrogate_is_the_clients_fault(smollm2_tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        smollm2_tokenizer.encode("a\ud800b")


def test_batch_equals_single(gemma3_tokenizer):
    assert gemma3_tokenizer.encode_batch(TEXTS) == [gemma3_tokenizer.encode(t) for t in TEXTS]


def test_unknown_gguf_tokenizers_are_refused(smollm2_metadata):
    with pytest.raises(StartError, match=r"tokenizer\.ggml\.pre='new-model'"):
        Tokenizer.from_gguf(smollm2_metadata | {"tokenizer.ggml.pre": "new-model"})
    with pytest.raises(StartError, match="'rwkv'"):
        Tokenizer.from_gguf(smollm2_metadata | {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(StartError, match="merges"):
        Tokenizer.from_gguf(smollm2_metadata | {"tokenizer.ggml.merges": ["Ġ nowhere"]})
    with pytest.raises(StartError, match="token_type"):
        Tokenizer.from_gguf(smollm2_metadata | {"tokenizer.ggml.token_type": [1]})


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(StartError, match=r"x\.gguf"):
        Tokenizer.load(tmp_path / "x.gguf")
    with pytest.raises(StartError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It|'s| 12345| A|!!|\n|\n|FooBar|  | x| é|\u0301"),
        ("smollm", "It|'s| |1|2|3|4|5| A|!!|\n|\n|FooBar|  | x| é|\u0301"),
        ("llama-bpe", "It|'s| |123|45| A|!!\n\n|FooBar|  | x| é|\u0301"),
        ("qwen2", "It|'s| |1|2|3|4|5| A|!!\n\n|FooBar|  | x| é|\u0301"),
        ("qwen35", "It|'s| |1|2|3|4|5| A|!!\n\n|FooBar|  | x| é\u0301"),
        ("tekken", "It|'s| |1|2|3|4|5| A|!!\n\n|Foo|Bar|  | x| é\u0301"),
        ("gpt-4o", "It's| |123|45| A|!!\n\n|Foo|Bar|  | x| é\u0301"),
        ("deepseek-v3", "It|'s| |123|45| A|!!\n\n|FooBar|  | x| é\u0301"),
    ],
)
def test_split_rules(pre, words):
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": sorted(pre_tokenizers.ByteLevel.alphabet()),
        }
    )
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(words.replace("|", ""))
    spelled = {tokenizer.token_bytes(i): t for t, i in tokenizer._backend.get_vocab().items()}
    expected = ["".join(spelled[bytes([b])] for b in w.encode()) for w in words.split("|")]
    assert [word for word, _ in cut] == expected


# --- SentencePiece ---

PIECES = ["▁", *"abcdehlorw", "he", "ll", "hell", "lo", "hello", "▁w", "or", "ld", "▁wor", "▁world"]


def sentencepiece_metadata(**more) -> dict:
    """A small Llama-2-like vocabulary: special, byte, normal pieces; scores fall with the id."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "<|tool|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [-1000.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def sentencepiece_oracle(text: str, metadata: dict) -> list[int]:
    """The definition: join the neighbours with the best score, leftmost first; then bytes."""
    vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[vocab[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in vocab and vocab[a + b] >= 259
        ]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [3 + b for b in part.encode()]
    return ids


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="helowrd ab漢\n", min_size=1, max_size=24))
def test_sentencepiece_equals_its_definition(text):
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert ids == [1, *sentencepiece_oracle(" " + text, metadata)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[1:], at_start=False) == " " + text


def test_sentencepiece_space_prefix():
    with_prefix = Tokenizer.from_gguf(sentencepiece_metadata())
    without = Tokenizer.from_gguf(
        sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    )
    assert [with_prefix.token_str(i) for i in with_prefix.encode("world")] == ["<s>", " world"]
    assert without.decode(without.encode(" world")) == " world"
    assert [without.token_str(i) for i in without.encode("world")] == ["<s>", *"w", "or", "ld"]
    # A text after a special token gets its space too, as llama.cpp and Llama 2's own files do it.
    pieces = [with_prefix.token_str(i) for i in with_prefix.encode("hello</s>world")]
    assert pieces == ["<s>", " ", "hello", "</s>", " world"]


@pytest.mark.parametrize(
    ("flags", "ends"),
    [({}, ([1], [])), ({"bos": False}, ([], [])), ({"eos": True}, ([1], [2]))],
)
def test_add_bos_and_eos(flags, ends):
    metadata = sentencepiece_metadata(
        **{f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}
    )
    ids = Tokenizer.from_gguf(metadata).encode("hello", add_special_tokens=True)
    before, after = ends
    assert ids[: len(before)] == before
    assert ids[len(ids) - len(after) :] == after
    assert len(ids) == len(before) + 2 + len(after)


def test_user_defined_tokens_are_whole_and_are_text():
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    tool = tokenizer.vocab_size - 1
    ids = tokenizer.encode("hello<|tool|>")
    assert ids[-1] == tool
    assert tool not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "hello<|tool|>"


def test_end_of_turn_ids():
    tokens = [*sentencepiece_metadata()["tokenizer.ggml.tokens"], "<|im_end|>", "<|x|>"]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*sentencepiece_metadata()["tokenizer.ggml.token_type"], 3, 3],
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    im_end, x = len(tokens) - 2, len(tokens) - 1
    assert Tokenizer.from_gguf(sentencepiece_metadata(**more)).eos_ids == {2, im_end}
    more["tokenizer.ggml.eot_token_id"] = x
    assert Tokenizer.from_gguf(sentencepiece_metadata(**more)).eos_ids == {2, x}


# --- folders ---


def write_folder(folder, *, metaspace=False, **files):
    """A folder with a small tokenizer, byte-level or SentencePiece-like."""
    backend = tokenizers.Tokenizer.from_str(
        tokenizers.Tokenizer(
            models.BPE(
                vocab={"a": 0, "b": 1, "ab": 2, "Ġ": 3, "▁": 4, "<s>": 5, "</s>": 6, "Ã": 7},
                merges=[("a", "b")],
            )
        ).to_str()
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens(["<think>"])
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 5)]
    )
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        stem, _, suffix = name.rpartition("_")
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{stem}.{suffix}").write_text(text)
    return Tokenizer.load(folder)


def test_folder(tmp_path):
    tokenizer = write_folder(
        tmp_path,
        tokenizer_config_json={"eos_token": {"content": "</s>"}, "chat_template": "{{ 1 }}"},
        special_tokens_map_json={"bos_token": "<s>"},
        generation_config_json={"eos_token_id": [6, 2]},
    )
    assert tokenizer.bos_id == 5
    assert tokenizer.eos_ids == {6, 2}
    assert tokenizer.special_ids == {5, 6}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == 9
    assert tokenizer.encode("abba<think>") == [5, 2, 1, 0, 8]  # not truncated
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]
    assert tokenizer.decode([5, 2, 8, 3, 6]) == "ab<think> "
    assert tokenizer.decode([5, 2], skip_special_tokens=False) == "<s>ab"
    assert tokenizer.token_bytes(7) == b"\xc3"
    assert tokenizer.chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [5, 2]),
        ({"add_bos_token": False}, [2]),
        ({"add_bos_token": True}, [5, 2]),
        ({"add_eos_token": True}, [5, 2, 6]),
        ({"add_bos_token": False, "add_eos_token": True}, [2, 6]),
    ],
)
def test_folder_add_bos_and_eos(tmp_path, config, ids):
    config |= {"bos_token": "<s>", "eos_token": "</s>"}
    assert write_folder(tmp_path, tokenizer_config_json=config).encode("ab") == ids


def test_folder_by_its_tokenizer_json(tmp_path):
    folder = write_folder(
        tmp_path, tokenizer_config_json={"bos_token": "<s>", "chat_template": "A"}
    )
    for name in ("tokenizer.json", "another.json"):
        file = (tmp_path / "tokenizer.json").rename(tmp_path / name)
        tokenizer = Tokenizer.load(file)
        assert (tokenizer.bos_id, tokenizer.chat_template) == (5, "A")
        assert tokenizer.encode("ab<think>") == folder.encode("ab<think>")


def test_a_file_of_another_kind_says_what_is_wanted(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"SentencePiece" * 9)
    with pytest.raises(
        StartError, match=r"tokenizer\.model is no readable GGUF.* nor a tokenizer\.j"
    ):
        Tokenizer.load(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("value", ["6", "x", [None], 6.0, [6, 2.5], True, -1, {"id": 6}], ids=str)
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_folder_with_ends_that_are_no_token_ids(tmp_path, name, value):
    with pytest.raises(StartError, match=rf"{name}\.json: eos_token_id is .*: want token ids"):
        write_folder(tmp_path, **{f"{name}_json": {"eos_token_id": value}})


def test_gguf_ends_that_are_no_token_ids():
    for key in ("eos", "eot", "eom", "bos"):
        for value in ("2", 2.0, True, -1):
            metadata = sentencepiece_metadata(**{f"tokenizer.ggml.{key}_token_id": value})
            with pytest.raises(StartError, match=rf"tokenizer\.ggml\.{key}_token_id is "):
                Tokenizer.from_gguf(metadata)
    none = {"tokenizer.ggml.eos_token_id": 2**32 - 1}  # how llama.cpp writes that there is none
    assert Tokenizer.from_gguf(sentencepiece_metadata(**none)).eos_ids == set()


def test_folder_chat_templates(tmp_path):
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tokenizer = write_folder(tmp_path, tokenizer_config_json={"chat_template": listed})
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    tokenizer = write_folder(tmp_path, chat_template_jinja="C")  # the file wins
    assert tokenizer.chat_templates == {"default": "C", "tool_use": "B"}


def test_folder_first_space(tmp_path):
    tokenizer = write_folder(tmp_path, metaspace=True)
    assert tokenizer.strips_first_space
    ids = tokenizer.encode("ab ab")
    assert ids == [5, 4, 2, 4, 2]
    assert tokenizer.decode(ids) == "ab ab"
    assert tokenizer.decode(ids, at_start=False) == " ab ab"


def test_folder_with_broken_files(tmp_path):
    with pytest.raises(StartError, match=r"tokenizer_config\.json is no valid JSON"):
        write_folder(tmp_path, tokenizer_config_json="{")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_max_chars_counts_composed_characters(tmp_path):
    tokenizer = write_folder(tmp_path)
    assert tokenizer.max_chars(10) == 10 * len("<think>")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).max_chars(10) == 40 * len("<think>")


def test_split_regexes_compile():
    for split in set(gguf_tokenizer._SPLITS.values()):
        for regex in split.regexes:
            Regex(regex)


def test_long_prompts_take_seconds_at_most(smollm2_tokenizer, gemma3_tokenizer):
    """One word of 2 MiB is the worst case of byte-pair merging. It must not be quadratic."""
    text = "a" * (1 << 21)
    assert len(smollm2_tokenizer.encode(text)) == 1 << 19
    assert len(gemma3_tokenizer.encode(text)) == (1 << 18) + 1
