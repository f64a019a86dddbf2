"""What kvern needs of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvern.sampling_params import InvalidRequest


class Tokenizer(ABC):
    """Between text and token ids. Immutable after loading; every method may be called from several threads at once.

    vocab_size: ids are 0 .. vocab_size - 1; the model's vocabulary may be larger (padding rows).
    add_bos: encode(text, add_special_tokens=True) puts the BOS token first.
    special_token_ids: tokens that stand for no text (turn markers, BOS, padding).
    special_tokens: "bos_token", "eos_token", ... -> text, as chat templates use them.
    chat_templates: name -> Jinja template; empty for a base model.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_token_ids: frozenset[int] = frozenset()
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    add_bos: bool = False

    @property
    def chat_template(self) -> str | None:
        """The template used when a request says nothing else; None for a base model."""
        return self.chat_templates.get("default")

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become those tokens.

        add_special_tokens: also what the model wants around a plain text, most often a BOS token. A rendered chat
        template has that already.
        Raises InvalidRequest if the text holds lone surrogates, which are no characters.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes that the token adds to a text, in the middle of it; a special token: its name in UTF-8.
        b"" for an id outside the vocabulary."""

    @abstractmethod
    def token_ids_of(self, text: str) -> int | None:
        """Id of the special token whose name is exactly `text`."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`: their bytes in a row, read as UTF-8, U+FFFD for what is not."""
        skip = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skip).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The token alone, for display; holds U+FFFD if it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def check_text(text: str) -> bytes:
    """`text` in UTF-8. Raises InvalidRequest on a lone surrogate (JSON can carry one as \\ud800)."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"the text holds a lone surrogate (character {exc.start}), which is no character"
        ) from None
