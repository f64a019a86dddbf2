"""How texts are cut into words before BPE merges inside them, by the name that GGUF files give it.

The expressions are facts about the models: another one means other ids than those the model was trained with. Each name
stands for a list of them, applied in turn, each to what the one before left whole; a match and the text between matches
are words of their own.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from kvern.weights.files import ModelError

_SUFFIX = r"'(?i:s|t|re|ve|m|ll|d)"  # of an English contraction
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _gpt4(digits: str, letters: str = r"\p{L}") -> str:
    """The family of GPT-4's cl100k: words may begin with one other character, newlines end a run of spaces."""
    return (
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _gpt4o(digits: str, suffix: str) -> str:
    """The family of GPT-4o's o200k: a word changes from capitals to small letters once."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"

_EXPRESSIONS: dict[str, list[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9]{3}"],
    "llama-bpe": [_gpt4(r"\p{N}{1,3}")],
    "qwen2": [_gpt4(r"\p{N}")],
    "qwen35": [_gpt4(r"\p{N}", r"\p{L}\p{M}")],
    "gpt-4o": [_gpt4o(r"\p{N}{1,3}", f"(?:{_SUFFIX})?")],
    "tekken": [_gpt4o(r"\p{N}", "")],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+", _DEEPSEEK3],
}
_SAME_AS = {
    "gpt-2": ("default", "mpt", "olmo", "jais", "phi-2", "trillion", "exaone4", "granite-docling"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "lfm2"),
    "qwen2": ("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open"),
    "gpt-4o": ("llama4", "kanana2"),
    "deepseek-v3": ("hunyuan-dense",),
}
_FAMILY = {name: name for name in _EXPRESSIONS} | {alias: name for name, group in _SAME_AS.items() for alias in group}

# Whole words that are tokens are taken as they are, even where merges would not lead to them.
IGNORE_MERGES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "glm4", "lfm2", "tekken"))
ADDS_BOS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
)  # unless the file says otherwise
NORMALIZES_NFC = frozenset(("qwen2", "deepseek-r1-qwen"))


def byte_level_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`, spelling words in the byte-level alphabet. Raises ModelError."""
    if name not in _FAMILY:
        raise ModelError(f"pre-tokenizer {name!r} is not supported; supported are {', '.join(sorted(_FAMILY))}")
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in _EXPRESSIONS[_FAMILY[name]]
    ]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
