"""Subword tokenizers: byte-level BPE and SentencePiece style, on the `tokenizers` package.

Encoding is the package's. Decoding is done here, from a table of each token's bytes, so that a stream that is cut
between any two tokens, also in the middle of a character, adds up to exactly what decoding it whole gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import tokenizers

from kvern.tokenizer.base import Tokenizer, check_text

Style = Literal["byte-level", "sentencepiece"]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE (Radford et al. 2019): printable Latin-1 stands for itself, the other
    68 bytes for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class SubwordTokenizer(Tokenizer):
    """style: how tokens are spelled. "byte-level": one character a byte, see above. "sentencepiece": text with U+2581
    for a space and <0xNN> for a single byte.

    added: id -> text of tokens that are matched in the text as they are, before BPE. They are spelled as plain text.
    pieces: token spellings by id, where the caller has them at hand.
    strip_space: a text's encoding starts with a space that was not in it, so decoding takes one away.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        style: Style,
        added: Mapping[int, str],
        special: Mapping[int, str],
        vocab_size: int,
        pieces: Sequence[str] | None = None,
        strip_space: bool = False,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._style = style
        self._added = dict(added)
        self._special_ids = {text: token for token, text in special.items()}
        self._pieces = pieces
        self._strip_space = strip_space
        self._bytes: list[bytes | None] = [None] * vocab_size
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(special)
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self.add_bos = bos_token_id is not None and self.encode("")[:1] == [bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        # encode() would keep the interpreter locked for as long as it takes, this does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        found = self._bytes[token_id]
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        if text is not None:
            if self._style == "sentencepiece" and token_id not in self.special_token_ids:
                text = text.replace("\u2581", " ")
            return text.encode()
        piece = self._pieces[token_id] if self._pieces is not None else self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._style == "byte-level":
            if all(char in _BYTE_OF for char in piece):
                return bytes(_BYTE_OF[char] for char in piece)
            return piece.encode()  # no output of BPE: padding of the vocabulary
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes((int(match[1], 16),))
        return piece.replace("\u2581", " ").encode()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text = super().decode(token_ids, skip_special_tokens)
        return text[1:] if self._strip_space and text.startswith(" ") else text

    def token_ids_of(self, text: str) -> int | None:
        return self._special_ids.get(text)
