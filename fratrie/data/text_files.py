"""Text files as people have them: what is no file is refused before it is opened, and wrong bytes are located."""

import codecs
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TextIO

_MARK = "\ufeff"
ENCODING_ADVICE = "save the file as UTF-8, or name its encoding by encoding (--encoding cp1252, --encoding utf-16, …)"


@dataclass(frozen=True)
class TextFormat:
    """How a file of texts is stored.

    Args:
        encoding: any that Python knows by name; a byte order mark at the beginning is no part of the text, and one of
            UTF-16 is believed instead of the default.
        delimiter: what stands between the columns of a csv file, one character (`\\t` is a tab); by default the one of
            comma, semicolon and tab that gives all rows as many fields as the header.
        sheet: the sheet of a spreadsheet; by default the only one that has content.

    Raises:
        ValueError: an encoding that Python does not know, or a delimiter that is not one character.
    """

    encoding: str = "utf-8"
    delimiter: str | None = None
    sheet: str | None = None

    def __post_init__(self) -> None:
        try:
            " ".encode(self.encoding)
        except (LookupError, ValueError):
            known = "utf-8, utf-16, cp1252 (Windows) or latin-1"
            raise ValueError(f"encoding={self.encoding!r} is no encoding of texts: name one such as {known}") from None
        if self.delimiter == "\\t":
            object.__setattr__(self, "delimiter", "\t")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise ValueError(f"delimiter={self.delimiter!r} must be one character, such as ';'")


UTF8 = TextFormat()


def existing_file(path: str | PathLike[str]) -> Path:
    """The path if a regular file is there.

    Raises:
        ValueError: the path is empty.
        OSError: there is no file, or a folder, a pipe or a device, which might never end.
    """
    if not os.fspath(path):
        raise ValueError("an empty path names no file: is a variable of the shell unset?")
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        what = "is a link that leads nowhere" if os.path.islink(path) else "there is no such file"
        raise FileNotFoundError(f"{path}: {what}") from None
    except (OSError, ValueError) as error:  # a circle of links, a name that is too long or holds a NUL
        raise OSError(f"{path!s:.200}: {getattr(error, 'strerror', error)}") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder, expected a file")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is a pipe or a device, expected a file: write its output into a file")
    return Path(path)


def stored_encoding(beginning: bytes, encoding: str) -> str:
    """UTF-16 where a byte order mark says so and the encoding asked for is UTF-8, the default."""
    marked = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if marked and codecs.lookup(encoding).name == "utf-8" else encoding


def encoding_advice(data: bytes, place: int) -> str:
    """The way out where a byte is not UTF-8: what the line says as Windows would have stored it, if that is a text."""
    begin = max(data.rfind(b"\n", 0, place) + 1, place - 40)
    line = data[begin : place + 40].partition(b"\n")[0].removesuffix(b"\r")
    try:
        shown = line.decode("cp1252").replace("\t", " ")
    except UnicodeDecodeError:
        return ENCODING_ADVICE
    if not shown.isprintable():
        return ENCODING_ADVICE
    way = "encoding='cp1252' (--encoding cp1252)"
    return f"if «{shown}» is what it should say, give {way}; otherwise save the file as UTF-8"


def read_text(path: str | PathLike[str], form: TextFormat = UTF8) -> str:
    """The text of a file without its byte order mark; line ends stay as they are.

    Raises:
        ValueError: the file is of another encoding; locates the first wrong byte.
        OSError: the file is missing or cannot be read.
    """
    data = existing_file(path).read_bytes()
    try:
        text = data.decode(stored_encoding(data, form.encoding))
    except UnicodeError as error:
        raise _wrong_encoding(path, form.encoding, data, error) from None
    if "\0" in text:
        raise _nul(path, text.count("\n", 0, text.index("\0")) + 1)
    return text.removeprefix(_MARK)


@contextmanager
def open_text(path: str | PathLike[str], form: TextFormat = UTF8, newline: str = "") -> Iterator[TextIO]:
    """Open a file to read it piece by piece, byte order mark included.

    Raises:
        ValueError: the file is of another encoding.
        OSError: the file is missing or cannot be read.
    """
    with existing_file(path).open("rb") as file:
        encoding = stored_encoding(file.read(2), form.encoding)
    try:
        with Path(path).open(encoding=encoding, newline=newline) as file:
            yield file
    except UnicodeError as error:
        raise _wrong_encoding(path, form.encoding, b"", error) from None


def checked_lines(lines: Iterable[str], path: str | PathLike[str]) -> Iterator[str]:
    """The lines of an open file without its byte order mark; a ValueError names the first that holds a NUL."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise _nul(path, number)
        yield line.removeprefix(_MARK) if number == 1 else line


def _nul(path: str | PathLike[str], line: int) -> ValueError:
    return ValueError(f"{path}, line {line}: a NUL, which no text holds: {ENCODING_ADVICE}")


def _wrong_encoding(path: str | PathLike[str], encoding: str, data: bytes, error: UnicodeError) -> ValueError:
    utf8 = codecs.lookup(encoding).name == "utf-8"
    name = "UTF-8" if utf8 else encoding
    if not isinstance(error, UnicodeDecodeError):
        return ValueError(f"{path} is not {name}: {ENCODING_ADVICE}")
    wrong = f"byte 0x{error.object[error.start]:02x}"
    advice = encoding_advice(error.object, error.start) if utf8 else ENCODING_ADVICE
    if not data:
        return ValueError(f"{path}: {wrong} is not {name}: {advice}")
    line = data.count(b"\n", 0, error.start) + 1
    return ValueError(f"{path}, line {line}: {wrong} at offset {error.start} is not {name}: {advice}")
