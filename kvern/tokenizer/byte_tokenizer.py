"""The tokenizer of toy models: one token a byte."""

from __future__ import annotations

from kvern.tokenizer.base import Tokenizer, check_text

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ByteTokenizer(Tokenizer):
    """Ids: 0 padding, 1 BOS (never added), 2 EOS, byte b -> 3 + b. No text encodes to a special token."""

    PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
    NAMES = ("<pad>", "<bos>", "<eos>")

    def __init__(self) -> None:
        self.vocab_size = self.FIRST_BYTE + 256
        self.bos_token_id = self.BOS
        self.eos_token_ids = (self.EOS,)
        self.special_token_ids = frozenset(range(self.FIRST_BYTE))
        self.special_tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        self.chat_templates = {"default": _TEMPLATE}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.FIRST_BYTE + byte for byte in check_text(text)]

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < self.FIRST_BYTE:
            return self.NAMES[token_id].encode()
        if self.FIRST_BYTE <= token_id < self.vocab_size:
            return bytes((token_id - self.FIRST_BYTE,))
        return b""

    def token_ids_of(self, text: str) -> int | None:
        return self.NAMES.index(text) if text in self.NAMES else None
