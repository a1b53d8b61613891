"""Writes gemma3_ids.json: texts with the ids that transformers' tokenizer of the GGUF file gives.

transformers takes most of a minute to load that tokenizer, so the tests read its answers.
Run it with the folder and the name of the GGUF file of Gemma 3 270M.
"""

import json
import random
import re
import string
import sys
from pathlib import Path

import transformers

TEXTS = [
    "",
    "a",
    " a",
    "Hello, world!",
    "  two  spaces\tand a tab ",
    "trailing\n\n\n",
    "def f(x):\n    return x ** 2  # 12345\n\n\n\nclass A:\n\tpass\r\n",
    "It's they'll WE'RE I'M 'tis don't",
    "naïve café Ⅷ ½ x² été e\u0301",
    "日本語のテキスト と 한국어 und Ελληνικά, العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 ❤️",
    "\u200b\u00a0\u2028\ufeff\x00\x07",
    '{"key": [1, 2.5e-10, null], \'x\': "\\u00e9"}',
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <bos><eos><end_of_turn><unk>",
    "<|im_start|> <|im_end|  > < bos> <unused12> [multimodal] <table></table>",
    "SELECT * FROM t WHERE a>=3 AND b<>'x';--",
    "https://example.org/a_b-c?d=e&f=%20#g",
    " ".join(str(n) for n in range(0, 3000, 137)),
    "ThisIsCamelCase and snake_case_name and SCREAMING",
    "\U0001d54f\U0001d4b4 ﷽ ꧁꧂ \U0010ffff",
    "x" * 300 + " " * 30 + "y" * 300,
    "word\u2581with\u2581sentencepiece spaces",
    *(" " * n + "x" + "\n" * n + "y" for n in (2, 3, 5, 8, 15, 30, 31)),
]


def varied_texts() -> list[str]:
    """The texts above, mixtures of their pieces, and random characters of all planes."""
    rng = random.Random(0)
    pieces = [p for text in TEXTS for p in re.findall(r"\s+|\w+|\W", text)]
    pieces += [*string.printable, "<|im_end|>", "<eos>", "\n\n", "    ", "the ", " of"]
    mixed = ["".join(rng.choices(pieces, k=rng.randint(1, 20))) for _ in range(250)]
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    ranges = [characters[:128], characters[:0x800], characters[:0x10000], characters]
    drawn = ["".join(rng.choices(rng.choice(ranges), k=rng.randint(1, 12))) for _ in range(150)]
    return TEXTS + mixed + drawn


def main(folder: str, name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    lines = [json.dumps([t, tokenizer.encode(t)], separators=(",", ":")) for t in varied_texts()]
    out = Path(__file__).with_name("gemma3_ids.json")
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
