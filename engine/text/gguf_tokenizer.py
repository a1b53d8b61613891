"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library.

A GGUF file names its split rule (`tokenizer.ggml.pre`) and stores no regex, so the rules are here,
as the models' own tokenizer.json files and llama.cpp's `src/llama-vocab.cpp` give them.

Runs on: any (pure).
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from os import PathLike
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ..api.errors import StartError

SPACE = "\u2581"  # SentencePiece writes a space as this character


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFVocabulary(NamedTuple):
    """What a GGUF file says about its tokenizer.

    Attributes:
        backend: encodes text without adding tokens at its ends.
        special_ids: control tokens and the unknown token.
        add_bos, add_eos: whether a text gets these tokens at its ends.
    """

    backend: tokenizers.Tokenizer
    special_ids: frozenset[int]
    add_bos: bool
    add_eos: bool


class _Split(NamedTuple):
    """How byte-level BPE cuts text into words, by regexes that are applied one after the other.

    No regex means GPT-2's own. `whole_words` takes a word that is in the vocabulary as it is,
    whatever the merges say; `add_bos` holds where the file does not say.
    """

    regexes: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = r"[\u4e00-\u9fa5\u3040-\u30ff]+"


def _words(digits: str, mark: str = "") -> str:
    """GPT-4's split rule. `mark` counts combining marks as letters."""
    letters = rf"[\p{{L}}{mark}]+" if mark else r"\p{L}+"
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
        rf"| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, tail: str = "") -> str:
    """GPT-4o's split rule: a word also ends where upper case follows lower case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{_UPPER}*{_LOWER}+{tail}|{head}{_UPPER}+{_LOWER}*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = _Split()
_SINGLE_DIGITS = _Split(digits=True)
_LLAMA3 = _Split((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_GPT4 = _Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = _Split((_words(r"\p{N}"),))
_QWEN35 = _Split((_words(r"\p{N}", r"\p{M}"),))
_TEKKEN = _Split((_cased_words(r"\p{N}"),), whole_words=True, add_bos=True)
_GPT4O = _Split((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))
_DEEPSEEK3 = _Split(
    (
        r"\p{N}{1,3}",
        _CJK,
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

_SPLITS: dict[str, _Split] = {
    name: split
    for split, names in (
        (_GPT2, "default gpt-2 phi-2 olmo mpt jais trillion exaone4 a.x-4.0 mellum gigachat"),
        (_SINGLE_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
        (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
        (_GPT4, "dbrx smaug-bpe glm4 chatglm-bpe"),
        (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo grok-2 solar-open"),
        (_QWEN35, "qwen35"),
        (_TEKKEN, "tekken mistral"),
        (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
        (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    )
    for name in names.split()
}


def read_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file. Raises StartError where it is not one."""
    import gguf  # takes a while to import, and only GGUF files need it

    try:
        fields = gguf.GGUFReader(path).fields
        return {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    except (OSError, ValueError, IndexError, UnicodeDecodeError) as e:
        raise StartError(
            f"{path} is no readable GGUF file, and neither a folder nor a tokenizer.json: {e}"
        ) from e


def build(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """The tokenizer of a GGUF file.

    Args:
        metadata: the file's `tokenizer.*` keys, arrays as lists.

    Raises:
        StartError: a key is missing, or the kind of tokenizer or its split rule is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    if not tokens:
        raise StartError("the GGUF file has no tokenizer.ggml.tokens: it holds no tokenizer")
    types = list(metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise StartError(
            f"the GGUF file has {len(tokens)} tokens but {len(types)} entries in token_type"
        )
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise StartError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported"
        )
    # Special tokens are cut out of the text before anything else; so are user-defined ones, but
    # those are ordinary text when they are decoded.
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    special = {i for i, t in enumerate(types) if t in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special |= {unknown} if unknown is not None and unknown < len(tokens) else set()
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == TokenType.USER_DEFINED and not _is_space_run(token)
        ]
    )
    return GGUFVocabulary(
        backend,
        frozenset(special),
        bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's kind: bytes in a printable alphabet, merges given."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise StartError(
            f"the GGUF file's split rule tokenizer.ggml.pre={name!r} is not known; "
            f"known are {', '.join(sorted(_SPLITS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = _bpe(tokens, merges, ignore_merges=split.whole_words)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(regex), "isolated") for regex in split.regexes]
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
            use_regex=not split.regexes,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece's kind of BPE: scored pieces, and bytes for what no piece covers."""
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    # Gemma's runs of spaces stand there as spaces. Text has SPACE when it reaches the merges.
    tokens = [SPACE * len(t) if _is_space_run(t) else t for t in tokens]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if given := metadata.get("tokenizer.ggml.merges"):
        merges = [tuple(merge.split(" ", 1)) for merge in given]
    else:
        pairs = sorted(_scored_pairs(tokens, types, scores))
        merges = [(tokens[left], tokens[right]) for _, _, left, right in pairs]
    backend = _bpe(
        tokens,
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    replace = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # SentencePiece puts a space before the text, and takes it away again when it decodes.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _scored_pairs(
    tokens: list[str], types: list[int], scores: list[float]
) -> Iterator[tuple[float, int, int, int]]:
    """Every way to join two pieces into a third: (rank, the third, left, right), low ranks first.

    SentencePiece joins the two neighbours whose piece has the best score. User-defined pieces have
    no score of their own: they come before all others, in the order of the vocabulary.
    """
    pieces = {
        token: i
        for i, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    for token, i in pieces.items():
        rank = -scores[i] if types[i] == TokenType.NORMAL else -float("inf")
        for cut in range(1, len(token)):
            left = pieces.get(token[:cut])
            if left is not None and (right := pieces.get(token[cut:])) is not None:
                yield rank, i, left, right


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as e:  # the library raises plain Exception: a merge outside the vocabulary
        raise StartError(f"the GGUF file's merges do not fit its vocabulary: {e}") from e


def _is_space_run(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")
