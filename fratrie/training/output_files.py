"""The files that scripts write for a user, checked before the work: nothing that is read may be lost."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

# Where they lie, there is a model, or a reader would take them for one.
_MODEL_FILES = re.compile(
    r"(.*config|tokenizer|vocab|special_tokens_map|added_tokens|trainer_state|modules)\.json"
    r"|.*\.safetensors(\.index\.json)?|(merges|vocab)\.txt|.*\.(model|jinja|bin)"
)


def prepare_output(
    path: str | os.PathLike[str],
    read: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    is_ours: Callable[[Path], bool] | None = None,
    overwrite: bool = False,
) -> Path:
    """The path of a file to write later, its folder created; what cannot be written fails here, before the work.

    Args:
        path: the file to write.
        read: the file that is read, which must not be lost.
        model: the folder of the model, whose files must not be lost either.
        is_ours: whether a file is an earlier output, which may be replaced.
        overwrite: replace any other file, too.

    Raises:
        ValueError: the file is one of these, is named like a file of a model, or belongs to something else.
        OSError: the folder cannot be created, or the file not be written.
    """
    if not os.fspath(path):
        raise ValueError("an empty path names no output: is a variable of the shell unset?")
    output = Path(path)
    if _MODEL_FILES.fullmatch(output.name):
        raise ValueError(f"{path} has the name of a file that belongs to a model: choose another --output_file")
    try:
        place = Path(os.path.realpath(output)).parent  # it is made there and renamed
        place.mkdir(parents=True, exist_ok=True)
        if _exists(output):
            _check_replaceable(output, read, model)
            if not overwrite and not (is_ours and is_ours(output)):
                raise ValueError(f"{path} is no earlier output for this model: choose another file, or --overwrite")
            output.open("r+b").close()  # on Windows it is locked while Excel shows it
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise type(error)(f"cannot write {path} ({error.strerror}): choose another --output_file") from error
    return output


def _exists(path: Path) -> bool:
    """Whether there is something; unlike pathlib's, it raises an OSError for a loop of links or too long a name."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _check_replaceable(
    output: Path, read: str | os.PathLike[str] | None, model: str | os.PathLike[str] | None
) -> None:
    kept = [Path(read)] if read is not None else []
    kept += [file for file in Path(model).iterdir() if file.is_file()] if model and Path(model).is_dir() else []
    if any(file.exists() and output.samefile(file) for file in kept):
        raise ValueError(f"{output} is a file that is read, and would be lost: choose another --output_file")
    if not output.is_file():
        raise FileExistsError(errno.EEXIST, "it is no regular file")
