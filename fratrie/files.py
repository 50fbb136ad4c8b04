"""Files and folders that are whole or absent: made aside, flushed to disk, and renamed into their place.

Files are made in a hidden folder beside their place, which is locked as long as the process lives. A killed process
leaves that folder behind without a lock, and the next one that writes there sweeps it away. Without Python's `fcntl`
(on Windows) there are no locks, and leftovers stay.
"""

import errno
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

_ASIDE = ".incomplete-"
_held: set[int] = set()  # descriptors of the folders that this process has locked
# A folder without it is no model: out first and in last, it keeps half of a model from being read as one.
_CONFIG = "config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@contextmanager
def new_path(path: str | PathLike[str]) -> Iterator[Path]:
    """Give a path for a file that takes the place of `path` when the block ends, or vanishes on an exception.

    A file that is replaced hands on its permissions.

    Raises:
        OSError: it cannot be written; says which file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, f"{path} is no file that could be replaced; choose another name")
    with _aside(path, path.parent) as folder:
        made = folder / path.name
        yield made
        if path.exists():
            shutil.copymode(path, made)
        flush(made)
        made.replace(path)
        flush(path.parent)


@contextmanager
def new_file(path: str | PathLike[str]) -> Iterator[TextIO]:
    """Open a UTF-8 file for `new_path`; line ends are written as they are given."""
    with new_path(path) as made, made.open("w", encoding="utf-8", newline="") as file:
        yield file


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a text file as `new_file` does."""
    with new_file(path) as file:
        file.write(text)


def write_json(path: str | PathLike[str], data: Any) -> None:
    """Write data as a readable JSON file as `new_file` does."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")


@contextmanager
def new_folder(path: str | PathLike[str], whole: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `path` when the block ends, or vanishes on an exception.

    Where there is a folder already, the new files are moved into it: those of an older model are replaced, weights
    that the new one lacks are deleted, and all others stay. With `whole` the new folder replaces the old one with
    everything in it. All files get the permissions that the process gives files, whatever the library that wrote
    them chose.

    Raises:
        OSError: it cannot be written; says which folder.
    """
    path = Path(path).resolve()
    into = path.is_dir() and not whole
    with _aside(path, path if into else path.parent) as folder:
        made = folder / path.name
        made.mkdir()
        yield made
        for file in (file for file in made.rglob("*") if file.is_file()):
            file.chmod(made.stat().st_mode & 0o666)
            flush(file)
        for part in (made, *(part for part in made.rglob("*") if part.is_dir())):
            flush(part)
        if into:
            _replace_files(path, made)
        else:
            if path.is_dir():
                path.rename(folder / "replaced")
            made.rename(path)
            flush(path.parent)


def _replace_files(folder: Path, made: Path) -> None:
    files = sorted(file.relative_to(made) for file in made.rglob("*") if file.is_file())
    if blocked := [folder / file for file in files if (folder / file).is_dir()]:
        raise FileExistsError(errno.EEXIST, f"{blocked[0]} is a folder, where a file is to be written; move it away")
    if Path(_CONFIG) in files:
        (folder / _CONFIG).unlink(missing_ok=True)
        files.sort(key=lambda file: file == Path(_CONFIG))
        flush(folder)
        for old in folder.iterdir():
            if _WEIGHTS.fullmatch(old.name) and Path(old.name) not in files:
                old.unlink()
    for file in files:
        if file == Path(_CONFIG):
            flush(folder)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (made / file).replace(folder / file)
    flush(folder)


def flush(path: Path) -> None:
    """Have a file or the entries of a folder written to the disk."""
    if fcntl is None and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Delete a folder whole: it loses its name first, so that a killed process leaves no half of it.

    If it is a link, the link is deleted, and its target stays.
    """
    if path.is_symlink():
        path.unlink()
        return
    doomed = _name_aside(path, path.parent)
    path.rename(doomed)
    flush(path.parent)
    shutil.rmtree(doomed)


@contextmanager
def unused_folder_goes(folder: Path) -> Iterator[None]:
    """Of `folder` and its parents remove again those that were made in the block and are empty, where it fails.

    A folder that another process holds is its own.
    """
    folder = folder.absolute()
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        yield
    except BlockingIOError:
        raise
    except BaseException:
        for each in made:
            with suppress(OSError):  # it holds something
                each.rmdir()
        raise


def sweep(folder: Path, name: str | None = None) -> None:
    """Delete what killed processes left half-made in `folder`, of the file or folder `name` or of all."""
    pattern = "*" if name is None else glob.escape(_shortened(name))
    for leftover in folder.glob(f"{_ASIDE}{pattern}-{'[0-9a-f]' * 8}"):
        with suppress(OSError), held(leftover) as is_locked:  # in use, gone by now, or another user's
            if is_locked:
                shutil.rmtree(leftover)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which ends with the block or the process; gives whether there are locks at all.

    Processes that this one forks have no part in it, however long they live.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        yield _lock(descriptor, folder)
    finally:
        if descriptor in _held:  # not so in a process that was forked inside of the block
            _held.remove(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """A lock lasts until every process that has its descriptor closes it: forked ones do so at once."""
    while _held:
        os.close(_held.pop())


if fcntl:
    os.register_at_fork(after_in_child=_let_go)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another process is writing in {folder}: wait for its end or choose another") from None
    except OSError:  # a file system without locks
        return False
    return True


@contextmanager
def _aside(path: Path, parent: Path) -> Iterator[Path]:
    """A locked folder in `parent` to make `path` in; what cannot be written says so of `path`."""
    folder = _name_aside(path, parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent, path.name)
        folder.mkdir()
        with held(folder):
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        code = _system_error(error)
        if code is None or not _is_about(error, path, folder):
            raise
        # Of a file within a folder that is made, the cause alone: its name would be that of the hidden folder.
        reason = getattr(error.__cause__ or error, "strerror", None) or os.strerror(code)
        raise OSError(code, f"cannot write {path}: {reason}") from error


def _is_about(error: Exception, path: Path, folder: Path) -> bool:
    """Whether a failure is of the file or folder that is made, and not of another that is read meanwhile."""
    file = getattr(error, "filename", None)
    return not isinstance(file, str | PathLike) or Path(file).is_relative_to(folder) or path.is_relative_to(file)


def _name_aside(path: Path, parent: Path) -> Path:
    return parent / f"{_ASIDE}{_shortened(path.name)}-{secrets.token_hex(4)}"


def _shortened(name: str) -> str:
    return name[:60]  # names have an end: 255 bytes on most file systems


def _system_error(error: Exception) -> int | None:
    """The number of the system's error behind an exception; the libraries in Rust say it in their text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
