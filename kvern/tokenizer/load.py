"""From a model's files to its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, processors

from kvern.tokenizer import pre_tokenizers
from kvern.tokenizer.base import Tokenizer
from kvern.tokenizer.byte_tokenizer import ByteTokenizer
from kvern.tokenizer.subword import Style, SubwordTokenizer
from kvern.weights.files import ModelError, ModelFiles
from kvern.weights.gguf import GGUFFile
from kvern.weights.special_tokens import (
    gguf_eos_token_ids,
    hf_chat_templates,
    hf_eos_token_ids,
    read_json,
    text_of,
)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # ggml's token types
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError if it has none or one of an unknown kind."""
    if files.kind == "toy":
        return ByteTokenizer()
    if files.kind == "gguf":
        return _from_gguf(GGUFFile(files.location))
    return _from_hf(files.location)


def _from_hf(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{folder} has no tokenizer.json; `transformers` writes one when it saves a fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the package raises nothing more special
        raise ModelError(f"cannot read {path}: {exc}") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    named = {name: text for name in _NAMED if (text := text_of(config.get(name) or special_map.get(name)))}
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    added = backend.get_added_tokens_decoder()
    _set_bos(backend, named.get("bos_token"), bos, config.get("add_bos_token"))
    style, strip_space = _hf_style(path, backend)
    return SubwordTokenizer(
        backend,
        style=style,
        added={i: token.content for i, token in added.items()},
        special={i: t.content for i, t in added.items() if t.special or t.content in _ends(named)},
        vocab_size=max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1),
        strip_space=strip_space,
        bos_token_id=bos,
        eos_token_ids=hf_eos_token_ids(folder),
        special_tokens=named,
        chat_templates=hf_chat_templates(folder),
    )


def _hf_style(path: Path, backend: tokenizers.Tokenizer) -> tuple[Style, bool]:
    """How tokens are spelled, and whether decoding drops a first space; from the decoder's steps."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = {step["type"]: step for step in state.get("decoders", [state]) if "type" in step}
    if "ByteLevel" in steps:
        return "byte-level", False
    if metaspace := steps.get("Metaspace"):
        return "sentencepiece", metaspace.get("prepend_scheme", "always") != "never"
    if steps.get("Replace", {}).get("content") == " ":
        return "sentencepiece", "Strip" in steps
    raise ModelError(f"{path}: only byte-level BPE and SentencePiece-style tokenizers are supported")


def _set_bos(backend: tokenizers.Tokenizer, text: str | None, bos: int | None, wanted: Any) -> None:
    """tokenizer_config.json may contradict tokenizer.json about BOS, and has the last word."""
    if bos is None or text is None or not isinstance(wanted, bool):
        return
    has = bos in backend.encode("", add_special_tokens=True).ids
    if wanted != has:
        backend.post_processor = _bos_processor(text, bos) if wanted else processors.TemplateProcessing(single="$A")


def _bos_processor(text: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=[f"{text}:0", "$A:0"], special_tokens=[(text, token_id)])


def _ends(named: dict[str, str]) -> tuple[str, ...]:
    # Special whatever the files mark them as. Padding is not listed: some models pad with "!".
    return tuple(named[name] for name in ("bos_token", "eos_token") if name in named)


def _from_gguf(file: GGUFFile) -> Tokenizer:
    meta = file.metadata
    model = meta.get("tokenizer.ggml.model")
    if model is None:
        raise ModelError(f"{file.path} holds no tokenizer")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: tokenizer of kind {model!r} is not supported; supported are gpt2 and llama")
    pieces = file.strings("tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type")
    kinds: list[int] = types.tolist() if types is not None else [1] * len(pieces)
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id", -1) for name, key in _GGUF_NAMES.items()}
    named = {name: pieces[i] for name, i in ids.items() if 0 <= i < len(pieces)}
    ends = _ends(named)
    special = {i: pieces[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN) or pieces[i] in ends}
    added = special | {i: pieces[i] for i, kind in enumerate(kinds) if kind == _USER_DEFINED}
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    prefix_space = model == "llama" and bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    try:
        if model == "gpt2":
            backend = _byte_level_bpe(pieces, file.strings("tokenizer.ggml.merges"), pre)
        else:
            backend = _sentencepiece_bpe(pieces, meta["tokenizer.ggml.scores"].tolist(), prefix_space)
    except ModelError:
        raise
    except Exception as exc:  # the package raises nothing more special
        raise ModelError(f"{file.path}: the vocabulary is damaged: {exc!r}") from None
    backend.add_tokens([AddedToken(t, special=i in special, normalized=False) for i, t in sorted(added.items())])

    bos: int | None = ids["bos_token"] if "bos_token" in named else None
    adds_bos = meta.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in pre_tokenizers.ADDS_BOS)
    if adds_bos and bos is not None:
        backend.post_processor = _bos_processor(pieces[bos], bos)
    return SubwordTokenizer(
        backend,
        style="byte-level" if model == "gpt2" else "sentencepiece",
        added=added,
        special=special,
        vocab_size=len(pieces),
        pieces=pieces,
        strip_space=prefix_space,
        bos_token_id=bos,
        eos_token_ids=gguf_eos_token_ids(file),
        special_tokens=named,
        chat_templates=_gguf_chat_templates(meta),
    )


_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _gguf_chat_templates(meta: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: value for key, value in meta.items() if key.startswith(prefix + ".")}
    return named | ({"default": meta[prefix]} if prefix in meta else {})


def _byte_level_bpe(pieces: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        # Both halves are in the byte-level alphabet, which has no space.
        merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
        ignore_merges=pre in pre_tokenizers.IGNORE_MERGES,
    )
    backend = tokenizers.Tokenizer(model)
    if pre in pre_tokenizers.NORMALIZES_NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.byte_level_pre_tokenizer(pre)
    return backend


def _sentencepiece_bpe(pieces: list[str], scores: list[float], prefix_space: bool) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (Kudo and Richardson 2018) joins the adjacent pair whose union is the token of highest score.
    Here that becomes a list of merges in order of that score: every way to cut a token into two tokens."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=lambda piece: -scores[vocab[piece]]):
        cuts = []
        for i in range(1, len(piece)):
            left = piece[:i]
            if left in vocab and (right := piece[i:]) in vocab:
                cuts.append((left, right))
        if len(cuts) > 1:
            cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += cuts
    unknown = next((piece for piece in ("<unk>", "[UNK]") if piece in vocab), None)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    return backend
