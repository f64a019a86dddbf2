"""Makes smollm2_tokens.jsonl: 1000 strings and their token ids by an implementation that is not kvern's.

The vocabulary is read from the GGUF file by `transformers`; the pre-tokenizer, which that conversion leaves at GPT-2's,
is set to what SmolLM2's own tokenizer.json has: single digits, then byte-level with the package's built-in expression.

usage: python tests/data/make_smollm2_tokens.py FILE.gguf > tests/data/smollm2_tokens.jsonl
"""

import json
import random
import sys
from pathlib import Path

PIECES = [
    *("def f(x):\n    return x+1\n", 'for i in range(10): print(f"{i}")', "#include <stdio.h>", "a_b-c.d/e\\f", "x=>y"),
    *("{", "}", '{"a": [1, 2]}', "https://x.org/a?b=c&d", "!!!", "...", "--", "$$", "_", "%20", "'", '"', "’s", "“so”"),
    *("hello", "World", " the", " quick", "don't", "I'LL", "we've", "It's", "camelCaseWord", "SCREAMING", "aaaaaaaaaa"),
    *(
        "été",
        "naïve",
        "Straße",
        "Ångström",
        "e\u0301",
        "ﬁ",
        "Ω",
        "中文字符",
        "日本語テスト",
        "한국어",
        "ภาษาไทย",
        "العربية",
    ),
    *("العربية", "हिन्दी", "ქართული", "👩‍👩‍👧‍👦", "🇩🇪", "🦙", "🏳️‍🌈", "𝔘𝔫𝔦", "\u200b", "\ufeff", "\u00a0", "\u3000"),
    *("12345", "3.14159", "1,000,000", "2024-01-31", "٣٤", "Ⅷ", "½", "²"),
    *("\n", "\n\n", "\r\n", "\t", "\t\t", " ", "  ", "     ", " \n ", "\x00", "\x07", "\x1b[0m"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "<s>", "</s>"),
]
RANGES = [
    (32, 127),
    (0xA0, 0x250),
    (0x370, 0x600),
    (0x900, 0xE80),
    (0x3040, 0x3100),
    (0x4E00, 0xA000),
    (0x1F300, 0x1FB00),
]


def strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    found = ["", *PIECES]
    while len(found) < count:
        if rng.random() < 0.25:
            found.append("".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 9))))
        else:
            found.append("".join(rng.choice(PIECES) + rng.choice(("", "", " ")) for _ in range(rng.randrange(1, 6))))
    return found


def main(path: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    for text in strings(1000, seed=131):
        print(json.dumps([text, tokenizer(text, add_special_tokens=False).input_ids]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
