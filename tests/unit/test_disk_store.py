"""Blocks as files: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvern.runner.disk_store import DiskStore

SIZE = 1000


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, "model-a", SIZE)


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def test_what_was_written_is_read_by_another_process_too(store: DiskStore, tmp_path: Path) -> None:
    assert store.write("ab12", content(1)) and store.write("cd34", content(2))
    again = DiskStore(tmp_path, "model-a", SIZE)
    assert sorted(again.names()) == ["ab12", "cd34"]
    assert np.array_equal(again.read("ab12"), content(1)) and np.array_equal(again.read("cd34"), content(2))
    again.delete("ab12")
    again.delete("ab12")
    assert again.read("ab12") is None and again.names() == ["cd34"]


def test_another_fingerprint_sees_nothing(store: DiskStore, tmp_path: Path) -> None:
    store.write("ab12", content(1))
    other = DiskStore(tmp_path, "model-b", SIZE)
    assert other.names() == [] and other.read("ab12") is None


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "header", "empty"])
def test_a_damaged_file_is_dropped_never_read(store: DiskStore, damage: str) -> None:
    store.write("ab12", content(1))
    path = store.folder / "ab" / "ab12"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1:]
    elif damage == "longer":
        data += b"x"
    elif damage == "flipped":
        data[500] ^= 1
    elif damage == "header":
        data[0] ^= 1
    else:
        data.clear()
    path.write_bytes(data)
    assert store.read("ab12") is None and not path.exists()


def test_an_interrupted_writer_leaves_nothing(store: DiskStore) -> None:
    store.write("ab12", content(1))
    (store.folder / "ab" / ".half").write_bytes(b"half of a block")
    assert store.names() == ["ab12"] and not (store.folder / "ab" / ".half").exists()


def test_a_full_disk_is_no_failure(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert not store.write("ab12", content(1)) and store.read("ab12") is None


def test_what_was_read_is_the_last_to_go(store: DiskStore) -> None:
    for i, name in enumerate(("aa", "bb", "cc")):
        store.write(name, content(i))
    store.read("aa")
    assert store.names()[-1] == "aa"
