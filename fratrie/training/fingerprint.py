"""Digests of what decides the course of a run, which tell a resumed run from another one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .batches import seed_all

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 10_000
# Files up to this size are read whole; of larger ones, so many pieces of so many bytes, from head to tail.
WHOLE_BYTES, PIECES, PIECE_BYTES = 10**9, 64, 2**20


def digest_of(value: Any) -> str:
    """The digest of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def fingerprint_rows(dataset: Dataset) -> str:
    """The digest of all rows in their order: equal for equal values, whether Arrow or Python holds them.

    A dataset of another kind is read once with seeded generators, as it may draw from them.
    """
    size = len(cast(Any, dataset))
    digest = hashlib.sha256(str(size).encode())
    for start in range(0, size, ROWS_AT_ONCE):
        _add(digest, _read(dataset, start, min(start + ROWS_AT_ONCE, size)))
    return digest.hexdigest()[:32]


def _read(dataset: Any, start: int, stop: int) -> pa.Array:
    if isinstance(dataset, datasets.Dataset):
        table = dataset.with_format("arrow")[start:stop]
        return pa.StructArray.from_arrays([column.combine_chunks() for column in table.columns], table.column_names)
    seed_all(0, "fingerprint", start)
    rows = [dataset[index] for index in range(start, stop)]
    try:
        return pa.array(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):  # tensors, or values of mixed types
        plain = [_plain(row) for row in rows]
    try:
        return pa.array(plain)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.array([repr(row) for row in plain])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _add(digest: Any, column: pa.Array) -> None:
    """Add the values of a column, whatever the width of their type, its chunks and its offsets."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _add(digest, column.storage)
    if column.null_count:
        digest.update(b"nulls" + _bytes(column.is_null(), pa.uint8()))
    if column.null_count == len(column):  # of no type where Python holds it
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        digest.update(b"lists" + _bytes(pc.list_value_length(column), pa.int64()))
        return _add(digest, column.flatten())
    if pa.types.is_struct(kind):
        for name in sorted(field.name for field in kind):
            digest.update(b"field" + name.encode())
            _add(digest, pc.struct_field(column, name))
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        digest.update(b"whole numbers" + _bytes(column, pa.int64()))
    elif pa.types.is_floating(kind):
        digest.update(b"numbers" + _bytes(column, pa.float64()))
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        digest.update(b"texts" + _bytes(pc.binary_length(column), pa.int64()))
        digest.update("".join(column.drop_null().to_pylist()).encode())
    else:  # dates, decimals, bytes and the like
        digest.update(repr(column.to_pylist()).encode())
    return None


def _bytes(numbers: pa.Array, kind: pa.DataType) -> bytes:
    return cast(bytes, pc.fill_null(numbers.cast(kind, safe=False), 0).to_numpy(zero_copy_only=False).tobytes())


def fingerprint_files(paths: Sequence[str]) -> dict[str, str]:
    """Name, size and digest of each file, and of all files of each folder, by `file <number>`.

    Of a file beyond 1 GB the head, the tail and samples between them stand for the whole, which is logged.

    Raises:
        OSError: one cannot be read.
    """
    found = list(_files(paths))
    return {f"file {number}": f"{name}, {_file_digest(path)}" for number, (name, path) in enumerate(found, start=1)}


def _files(paths: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from ((str(file.relative_to(path)), file) for file in sorted(path.rglob("*")) if file.is_file())
        elif path.is_file():
            yield path.name, path


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            return f"{size} bytes, {hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
        logger.warning(
            "%s is larger than 1 GB: when the run goes on, its size, head, tail and %d samples are compared",
            *(path, PIECES - 2),
        )
        return f"{size} bytes, {_digest_of_pieces(file, size)} in samples"


def _digest_of_pieces(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    for place in range(PIECES):
        file.seek(place * (size - PIECE_BYTES) // (PIECES - 1))
        digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:32]


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The digest of vocabulary and special tokens; what else a tokenizer does shows in the rows."""
    return digest_of([tokenizer.get_vocab(), tokenizer.special_tokens_map]) if tokenizer else None


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each entry that differs between two runs."""
    return [
        f"{key}: {saved.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]
