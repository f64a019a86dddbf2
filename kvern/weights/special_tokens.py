"""Which tokens end a turn. The engine process and the HTTP process both ask, and must get the same answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvern.weights.files import ModelError
from kvern.weights.gguf import GGUFFile

# Names that chat models give to the token after a turn. A model ends at one of them if its own template writes it,
# also where the files name another end-of-sequence token (that of the base model, often).
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_CONTROL = 3  # ggml's token type


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file. Raises ModelError if it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read {path}: {exc}") from None
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")
    return value


def gguf_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """eos, eot and eom of the metadata, then end-of-turn tokens of the chat template."""
    meta = file.metadata
    found = [meta[key] for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id") in meta]
    template = str(meta.get("tokenizer.chat_template", ""))
    written = [name for name in END_OF_TURN if name in template]
    types = meta.get("tokenizer.ggml.token_type")
    if written and types is not None:
        tokens = file.strings("tokenizer.ggml.tokens")
        control = {tokens[i]: i for i in (types == _CONTROL).nonzero()[0].tolist() if i < len(tokens)}
        found += [control[name] for name in written if name in control]
    return tuple(dict.fromkeys(int(i) for i in found))


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json and config.json (a number or a list), the tokenizer's eos_token, then
    end-of-turn tokens of the chat template."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    config = read_json(folder / "tokenizer_config.json")
    template = "".join(hf_chat_templates(folder).values())
    names = [text_of(config.get("eos_token")), *(name for name in END_OF_TURN if name in template)]
    if any(names):
        special = hf_special_tokens(folder)
        found += [special[name] for name in names if name in special]
    return tuple(dict.fromkeys(int(i) for i in found))


def hf_special_tokens(folder: Path) -> dict[str, int]:
    """Text -> id of the tokens marked special. tokenizer_config.json has them, in newer folders only tokenizer.json."""
    config = read_json(folder / "tokenizer_config.json")
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        return {entry["content"]: int(i) for i, entry in added.items() if entry.get("special")}
    return {entry["content"]: int(entry["id"]) for entry in _added_tokens(folder) if entry.get("special")}


def _added_tokens(folder: Path) -> list[dict[str, Any]]:
    """added_tokens of tokenizer.json, without parsing the vocabulary after it, which may be 30 MB."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    key = text.find('"added_tokens"')
    start = text.find("[", key)
    if key < 0 or start < 0:
        return []
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError as exc:
        raise ModelError(f"cannot read {path}: {exc}") from None
    return list(tokens)


def hf_chat_templates(folder: Path) -> dict[str, str]:
    """Name -> template; the one to use when nothing else is said is "default"."""
    path = folder / "chat_template.jinja"
    named = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(named, str):
        templates = {"default": named}
    elif isinstance(named, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in named}
    else:
        templates = {}
    if path.exists():
        templates["default"] = path.read_text("utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text("utf-8")
    return templates


def text_of(token: Any) -> str | None:
    """A token in the JSON files is its text or an object around it."""
    return token.get("content") if isinstance(token, dict) else token
