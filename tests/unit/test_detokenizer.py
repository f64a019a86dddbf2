"""Incremental text: whole characters only, the prompt never, stop strings wherever they lie."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvern.engine.detokenizer import Detokenizer, StopStringFinder
from kvern.sampling_params import SamplingParams
from kvern.tokenizer.byte_tokenizer import ByteTokenizer


class PieceTokenizer:
    """Tokens are the given byte strings; the special ones are shown by their text."""

    def __init__(self, pieces, special=(), drop_first_space=False):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.vocab_size = len(self.pieces)
        self.special_token_ids = frozenset(special)
        self.drop_first_space = drop_first_space

    def token_bytes(self, token):
        return self.pieces[token]

    def token_text(self, token):
        return self.pieces[token].decode("utf-8", "replace")

    def token_ids_of(self, text):
        return next((t for t in sorted(self.special_token_ids) if self.pieces[t] == text.encode()), None)

    def decode(self, ids, skip_special_tokens=True):
        kept = [t for t in ids if not (skip_special_tokens and t in self.special_token_ids)]
        text = b"".join(self.pieces[t] for t in kept).decode("utf-8", "replace")
        return text[1:] if self.drop_first_space and text.startswith(" ") else text

    def encode(self, text, add_special_tokens=True):
        out, data = [], text.encode()
        while data:
            token = max(
                (t for t in range(self.vocab_size) if self.pieces[t] and data.startswith(self.pieces[t])),
                key=lambda t: len(self.pieces[t]),
            )
            out.append(token)
            data = data[len(self.pieces[token]) :]
        return out


BYTES = PieceTokenizer([bytes([b]) for b in range(256)] + ["<eos>", "<|end|>", "</think>"], special=(256, 257, 258))
EOS, END, THINK = 256, 257, 258


def run(tokenizer, tokens, prompt=(), **params):
    """(deltas, stop string, tokens used)"""
    detokenizer = Detokenizer(tokenizer, list(prompt), SamplingParams(max_tokens=10_000, **params))
    deltas = []
    for used, token in enumerate(tokens, 1):
        deltas.append(detokenizer.push(token))
        if detokenizer.stop_string is not None:
            return deltas, detokenizer.stop_string, used
    deltas.append(detokenizer.finish())
    return deltas, detokenizer.stop_string, len(tokens)


def text_of(*args, **params):
    return "".join(run(*args, **params)[0])


# ---- characters

TEXTS = ["family 👨‍👩‍👧‍👦!", "🇫🇷🇯🇵", "ภาษาไทย", "ď", "𠀀𠀁", "é", "a\u2028b\ufeffc\0d", "اللغة"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(text):
    """B078."""
    deltas, _, _ = run(BYTES, list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert all(len(delta) <= 1 for delta in deltas)


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_cut_character_is_flushed_at_the_end_and_not_before(cut):
    """B078, K24: max_tokens in the middle of a character."""
    deltas, _, _ = run(BYTES, list(b"a" + "👋".encode()[:cut]))
    assert deltas == ["a", *[""] * cut, "\ufffd"]


@given(
    st.lists(st.integers(0, 258) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x91, 0x8B, 0xC3]), max_size=40),
    st.booleans(),
)
@example([0xE2, 0x82, THINK, 0xAC], True)
@example([0xE2, 0x82, THINK, 0xAC], False)
@example([0xF0, 0x9F], True)
def test_deltas_make_the_full_decode(tokens, skip):
    deltas, _, _ = run(BYTES, tokens, prompt=list(b"Hello"), skip_special_tokens=skip)
    assert "".join(deltas) == BYTES.decode(tokens, skip)


@given(st.lists(st.sampled_from([" ", " a", "b", "  ", "<s>", "é"]), max_size=8), st.booleans())
def test_the_first_space_of_a_sentencepiece_text(words, skip):
    pieces = [" ", " a", "b", "  ", "<s>", "é"]
    tokenizer = PieceTokenizer(pieces, special=(4,), drop_first_space=True)
    tokens = [pieces.index(word) for word in words]
    assert text_of(tokenizer, tokens, skip_special_tokens=skip) == tokenizer.decode(tokens, skip)


# ---- the prompt's end


def test_prompt_text_never_comes_back():
    """B076."""
    prompt = list(b"Hello world ") + list("ก".encode())[:2]
    assert text_of(BYTES, list("ก".encode())[2:] + list(b"!"), prompt=prompt) == "ก!"


@pytest.mark.parametrize("lost", [b"!", b"\xc3\xa9", "ก".encode(), b"\xff"])
def test_a_dangling_prompt_character_that_is_not_completed_is_dropped(lost):
    """B076, K23."""
    prompt = list(b"Hi ") + list("ก".encode())[:2]
    assert text_of(BYTES, list(lost), prompt=prompt) == lost.decode("utf-8", "replace")
    assert text_of(BYTES, [], prompt=prompt) == ""
    assert text_of(BYTES, [EOS], prompt=prompt) == ""


def test_a_whole_character_at_the_end_of_the_prompt_changes_nothing():
    tokens = [0xB8, ord("x")]
    assert text_of(BYTES, tokens, prompt=list("ก".encode())) == BYTES.decode(tokens)
    # Half a character, then a special token: the half is over.
    assert text_of(BYTES, tokens, prompt=[*list("ก".encode())[:2], END]) == BYTES.decode(tokens)


# ---- special tokens


def test_special_tokens_are_hidden_or_shown_and_never_held():
    """B072: a marker arrives whole, in its own delta, also beside a stop string that nearly matches."""
    tokens = [*b"a", THINK, *b"b"]
    assert text_of(BYTES, tokens) == "ab"
    deltas, _, _ = run(BYTES, tokens, skip_special_tokens=False, stop=["b,c"])
    assert deltas == ["a", "</think>", "", "b"]


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [(True, False, "ab"), (True, True, "ab"), (False, False, "ab"), (False, True, "ab<|end|>")],
)
def test_a_stop_string_that_is_a_special_token(skip, include, text):
    """B074."""
    deltas, stop, used = run(
        BYTES,
        [*b"ab", END, *b"c"],
        stop=["<|end|>"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )
    assert ("".join(deltas), stop, used) == (text, "<|end|>", 3)


def test_the_text_of_a_hidden_special_token_is_still_found_as_text():
    assert run(BYTES, list(b"ab<|end|>c"), stop=["<|end|>"])[1:] == ("<|end|>", 9)


def test_the_token_that_ends_the_request_shows_no_text():
    for skip in (True, False):
        detokenizer = Detokenizer(BYTES, [], SamplingParams(stop=["ax"], skip_special_tokens=skip))
        assert detokenizer.push(ord("a")) == ""
        assert detokenizer.push_last(EOS) == "a"
        assert detokenizer.stop_string is None
    detokenizer = Detokenizer(BYTES, [], SamplingParams(stop=["<eos>"]))
    assert detokenizer.push_last(EOS) == "" and detokenizer.stop_string == "<eos>"


# ---- stop strings


def test_a_stop_string_over_several_tokens_is_never_shown():
    """B071: 'DEFGHIJ' out of the alphabet."""
    deltas, stop, used = run(BYTES, list(b"ABCDEFGHIJKLM"), stop=["DEFGHIJ"])
    assert ("".join(deltas), stop, used) == ("ABC", "DEFGHIJ", 10)
    assert deltas[:4] == ["A", "B", "C", ""]


def test_a_stop_string_in_the_middle_of_a_token_ends_with_that_token():
    """B053: the token in which it is complete is the last one."""
    tokenizer = PieceTokenizer([" ha ", "ha ha", "x"])
    deltas, stop, used = run(tokenizer, [2, 0, 1, 2], stop=["ha ha"])
    assert ("".join(deltas), stop, used) == ("x ", "ha ha", 3)


def test_what_was_held_comes_when_it_cannot_match_or_at_the_end():
    deltas, stop, _ = run(BYTES, list(b"ab,ab,d"), stop=["b,c"])
    assert stop is None
    assert deltas == ["a", "", "", "b,a", "", "", "b,d", ""]
    deltas, _, _ = run(BYTES, list(b"xb,"), stop=["b,c"])
    assert deltas == ["x", "", "", "b,"]


def test_the_first_stop_string_wins_and_the_shorter_of_two_that_begin_together():
    tokenizer = PieceTokenizer(["abcdef"])
    assert run(tokenizer, [0], stop=["ef", "cd", "cde"])[:2] == (["ab"], "cd")
    assert run(tokenizer, [0], stop=["bcdef", "cd"])[:2] == (["a"], "bcdef")
    # As the text grows, what is complete first has stopped it.
    assert run(BYTES, list(b"abcdef"), stop=["bcdef", "cd"])[1:] == ("cd", 4)


def test_include_stop_str_in_output():
    assert text_of(BYTES, list(b"one two three"), stop=["two"], include_stop_str_in_output=True) == "one two"


@pytest.mark.parametrize(
    ("min_tokens", "text", "used"), [(0, "", 1), (1, "", 1), (2, "x", 2), (3, "xx", 3), (9, "xxxx", 4)]
)
def test_no_stop_string_before_min_tokens(min_tokens, text, used):
    """K36: it counts if it becomes complete with token min_tokens or later."""
    deltas, _, got = run(BYTES, list(b"xxxx"), stop=["x"], min_tokens=min_tokens)
    assert ("".join(deltas), got) == (text, used)


def test_no_special_stop_token_before_min_tokens():
    assert run(BYTES, [END, *b"a", END], stop=["<|end|>"], min_tokens=2) == (["", "a", ""], "<|end|>", 3)


def test_a_stop_string_that_overlaps_one_passed_over_before_min_tokens():
    assert run(BYTES, list(b"abab"), stop=["aba", "bab"], min_tokens=4) == (["", "", "a", ""], "bab", 4)
    assert run(BYTES, list(b"ababab"), stop=["aba"], min_tokens=4) == (["", "", "ab", "", ""], "aba", 5)


def random_pieces(rng, text):
    pieces = []
    while text:
        size = rng.randint(1, 6)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def first_match(pieces, stops):
    """The documented rule, naively: grow the text token by token and search all of it again."""
    text = ""
    for used, piece in enumerate(pieces, 1):
        text += piece
        hits = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
        if hits:
            start, _, stop = min(hits)
            return text[:start], stop, used
    return text, None, len(pieces)


def test_200_random_stops():
    """B071: any offset, any length, any token borders; and a stop that never comes."""
    rng = random.Random(7)
    text = "The café's naïve   owner said: Observation: the the theremin 👋👋 says hello, hello, hell. " * 2
    for _ in range(200):
        pieces = random_pieces(rng, text)
        tokenizer = PieceTokenizer(pieces)
        begin = rng.randrange(len(text) - 12)
        stops = [text[begin : begin + rng.randint(1, 12)]]
        stops += ["hello there", "theory"] if rng.random() < 0.5 else []
        deltas, stop, used = run(tokenizer, range(len(pieces)), stop=stops)
        assert ("".join(deltas), stop, used) == first_match(pieces, stops)


@settings(max_examples=300)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_repetitive_texts_and_stops(text, stops, rng):
    """Where matches overlap themselves and each other."""
    pieces = random_pieces(rng, text)
    deltas, stop, used = run(PieceTokenizer(pieces), range(len(pieces)), stop=stops)
    assert ("".join(deltas), stop, used) == first_match(pieces, stops)
    # Nothing waits that could not become a stop string.
    sent = ""
    for i, delta in enumerate(deltas[:-1]):
        sent += delta
        held = "".join(pieces[: i + 1])[len(sent) :]
        assert held == "" or stop is not None or any(s.startswith(held) for s in stops)


def test_a_long_stop_string_costs_no_more_per_character():
    finder = StopStringFinder(["a" * 9_999 + "b"])
    assert finder.feed("a" * 20_000, True) is None
    assert finder.num_pending == 9_999
    assert finder.feed("b", True) == (-9_999, 0)


# ---- real tokenizers


@given(st.lists(st.integers(0, 258), max_size=60), st.booleans(), st.text(max_size=5))
def test_byte_tokenizer_deltas_make_the_full_decode(tokens, skip, prompt):
    tokenizer = ByteTokenizer()
    deltas, _, _ = run(tokenizer, tokens, prompt=tokenizer.encode(prompt), skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(tokens, skip)


@pytest.fixture(scope="module")
def smollm2():
    from kvern.tokenizer import load_tokenizer
    from kvern.weights.hub import resolve_model

    try:
        files = resolve_model("smollm2-135m-instruct", progress=False)
    except Exception as exc:
        pytest.skip(f"SmolLM2 cannot be had: {exc}")
    return load_tokenizer(files)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(20))
def test_smollm2_deltas_make_the_full_decode(smollm2, seed):
    """B078: random ids, which are full of broken characters, and special tokens among them."""
    rng = random.Random(seed)
    prompt = smollm2.encode("".join(rng.choices(TEXTS, k=2)))
    tokens = [rng.randrange(smollm2.vocab_size) for _ in range(300)]
    tokens += rng.choices(sorted(smollm2.special_token_ids), k=20) + smollm2.encode("".join(TEXTS))
    if seed % 2:
        rng.shuffle(tokens)
    skip = seed % 3 > 0
    deltas, _, _ = run(smollm2, tokens, prompt=prompt, skip_special_tokens=skip)
    assert "".join(deltas) == smollm2.decode(tokens, skip)


@pytest.mark.model
def test_smollm2_200_random_stops(smollm2):
    """B071 on real token borders."""
    rng = random.Random(1)
    tokens = smollm2.encode("\n".join([*TEXTS, "1. Carol has 20 apples, and an Observation: none is naïve."]))
    pieces, text, detokenizer = [], "", Detokenizer(smollm2, [], SamplingParams())
    for token in tokens:
        pieces.append(detokenizer.push(token))
    text = "".join(pieces)
    for _ in range(200):
        begin = rng.randrange(len(text) - 1)
        stops = [text[begin : begin + rng.randint(1, 12)]]
        deltas, stop, used = run(smollm2, tokens, stop=stops)
        assert ("".join(deltas), stop, used) == first_match(pieces, stops)
        assert "".join(deltas) == text[: text.find(stop)]


@pytest.mark.model
def test_smollm2_special_token_as_stop_string(smollm2):
    """B074."""
    tokens = [*smollm2.encode("Paris."), *smollm2.encode("<|im_end|>"), *smollm2.encode("more")]
    for skip in (True, False):
        deltas, stop, _ = run(smollm2, tokens, stop=["<|im_end|>"], skip_special_tokens=skip)
        assert ("".join(deltas), stop) == ("Paris.", "<|im_end|>")
