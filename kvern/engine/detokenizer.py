"""From output tokens to text, one request at a time: incremental UTF-8, and stop strings.

What is delivered, put together, is exactly `tokenizer.decode(output ids)`, cut at the first stop string. Bytes of an
unfinished character are held back until it is whole, or until the end, so no piece holds half a character; text
that may be the beginning of a stop string is held back until it is one or cannot become one. Nothing else waits.

The prompt's text is never delivered. Only if the prompt ends inside a character are its last bytes put in front of
the output: if the output completes the character, the character is delivered; if not, the prompt's bytes are dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvern.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvern.tokenizer.base import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes


class StopStringFinder:
    """Finds stop strings in a text that grows, at a cost per character that does not depend on their lengths.

    One Knuth-Morris-Pratt automaton per stop string; its state is how much of the stop string the end of the
    text is. The longest such state is what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._fallbacks = [_borders(stop) for stop in stops]
        self._states = [0] * len(stops)

    @property
    def num_pending(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._states)

    def feed(self, piece: str, accept: bool) -> tuple[int, int] | None:
        """The text grew by `piece`. The first stop string that is complete in it, as (place of its first character,
        counted from the beginning of `piece` and negative if it began before; index of the stop string), else None.

        Of several, the one that begins first, the shorter one if they begin together. With accept=False whatever
        is complete is passed over.
        """
        found: list[tuple[int, int, int]] = []
        for index, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            state = self._states[index]
            for place, char in enumerate(piece):
                while state and stop[state] != char:
                    state = fallback[state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found.append((place + 1 - len(stop), len(stop), index))
                    state = fallback[state]
            self._states[index] = state
        if not found or not accept:
            return None
        start, _, index = min(found)
        return start, index


def _borders(stop: str) -> list[int]:
    """[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    borders = [0, 0]
    for char in stop[1:]:
        k = borders[-1]
        while k and stop[k] != char:
            k = borders[k]
        borders.append(k + 1 if stop[k] == char else 0)
    return borders


class Detokenizer:
    """The text of one completion.

    `push` every output token in order, then `finish`; each returns the text that can be delivered now. Once
    `stop_string` is set, the text is complete and the token just pushed was the last one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.stop_string: str | None = None  # the one that was found
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._num_tokens = 0
        self._decoder = _UTF8("replace")
        self._begun = False  # whether the output has bytes yet
        self._prompt_bytes = _unfinished_bytes(tokenizer, prompt_token_ids)
        self._held = ""  # decoded, not delivered
        self._finder = StopStringFinder(sampling.stop) if sampling.stop else None
        # Stop strings that are special tokens: where special tokens are skipped, the text never shows them.
        ids = {tokenizer.token_ids_of(stop): stop for stop in sampling.stop}
        self._stop_ids = {token: stop for token, stop in ids.items() if token is not None}

    def push(self, token: int) -> str:
        """Append an output token."""
        self._num_tokens += 1
        if self._sampling.skip_special_tokens and token in self._tokenizer.special_token_ids:
            if token not in self._stop_ids or not self._may_stop:
                return ""
            text = self.finish()
            self.stop_string = self.stop_string or self._stop_ids[token]
            return text
        return self._grow(self._decode(token))

    def push_last(self, token: int) -> str:
        """Append the token at which the engine stopped, EOS or a stop id, whose text is not delivered; then finish."""
        if token in self._stop_ids:
            text = self.push(token)
            return text if self.stop_string else text + self.finish()
        self._num_tokens += 1
        return self.finish()

    def finish(self) -> str:
        """No token comes any more: all that was held back, an unfinished character as U+FFFD."""
        text = self._grow(self._decoder.decode(b"", True))
        text, self._held = text + self._held, ""
        return text

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens >= self._sampling.min_tokens

    def _decode(self, token: int) -> str:
        """The characters that `token` completes."""
        data = self._tokenizer.token_bytes(token)
        if not self._begun and data:
            self._begun = True
            if _continues(self._prompt_bytes, data):
                data = self._prompt_bytes + data
            elif data[:1] == b" " and self._drops_first_space(token, data):
                data = data[1:]
        return self._decoder.decode(data)

    def _drops_first_space(self, token: int, data: bytes) -> bool:
        """Whether the space before a text's first word is no text, as in SentencePiece."""
        alone = self._tokenizer.decode([token], self._sampling.skip_special_tokens)
        return alone == data[1:].decode("utf-8", "replace")

    def _grow(self, piece: str) -> str:
        """The text grew by `piece`: what of it, and of what was held back, can be delivered."""
        if self._finder is None:
            return piece
        text = self._held + piece
        hit = self._finder.feed(piece, self._may_stop)
        if hit is not None:
            start, index = hit
            self.stop_string = self._sampling.stop[index]
            end = len(self._held) + start
            self._held = ""
            return text[: end + len(self.stop_string)] if self._sampling.include_stop_str_in_output else text[:end]
        border = len(text) - self._finder.num_pending
        self._held = text[border:]
        return text[:border]


def _unfinished_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The bytes of the character inside which the text of `token_ids` ends; b"" if it ends with a whole one."""
    tail = b""
    for token in reversed(token_ids):
        tail = tokenizer.token_bytes(token) + tail
        if len(tail) >= _LONGEST_CHARACTER:
            break
    decoder = _UTF8("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def _continues(unfinished: bytes, data: bytes) -> bool:
    """Whether `data` goes on with the unfinished character."""
    if not unfinished:
        return False
    try:
        _UTF8("strict").decode(unfinished + data[:1])
    except UnicodeDecodeError:
        return False
    return True
