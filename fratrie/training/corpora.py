"""From texts to the rows that pretraining reads, in memory or as a stream.

The row makers take a batch `{"text": [...]}` as `datasets` gives it to `map`, and return columns of rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import datasets
from transformers import PreTrainedTokenizerBase

from fratrie.data.loading import load_texts

from .tracking import pace_bars_of_datasets

Rows = dict[str, list[list[int]]]
_BUILDERS = {
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
AnyDataset = TypeVar("AnyDataset", datasets.Dataset, datasets.IterableDataset)


def read_texts(paths: Sequence[str], text_column: str = "text", annotated: bool = False) -> datasets.Dataset:
    """The texts of local files as a dataset with the column `text`.

    Args:
        paths: txt (one text a line), csv, jsonl or parquet files.
        text_column: column of the text in tables.
        annotated: the files are in the annotation format; its sentences without codes are the texts.

    Raises `ValueError` or `OSError`, with the file, for what cannot be read or holds no text.
    """
    texts: list[str] = []
    for path in paths:
        texts += load_texts(path, text_column, annotated)
    if not texts:
        raise ValueError(f"{', '.join(paths) or 'no file'}: no text found; give files that hold text")
    return datasets.Dataset.from_dict({"text": texts})


def stream_texts(paths: Sequence[str], text_column: str = "text") -> datasets.IterableDataset:
    """The texts of local files of one kind as a stream with the column `text`; blank texts are left out.

    Raises `ValueError` for files of several or unknown kinds, and `OSError` for a missing one.
    """
    kinds = {Path(path).suffix.lower() for path in paths}
    if len(kinds) != 1 or not kinds <= _BUILDERS.keys():
        raise ValueError(f"cannot stream files of the kinds {sorted(kinds)}: give files of one of {list(_BUILDERS)}")
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
    (kind,) = kinds
    extra = {"sep": "\t"} if kind == ".tsv" else {}
    stream = datasets.load_dataset(_BUILDERS[kind], data_files=list(paths), split="train", streaming=True, **extra)
    return only_text(stream, text_column)


def named_texts(
    name: str, configuration: str | None, split: str, text_column: str = "text", streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """The texts of a dataset folder, or of a dataset of the Hugging Face Hub by its name.

    Raises `ValueError` where it cannot be loaded.
    """
    try:
        loaded = datasets.load_dataset(name, configuration, split=split, streaming=streaming)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"cannot load the dataset {name!r}, split {split!r}: {error}") from error
    return only_text(loaded, text_column)


def only_text(dataset: AnyDataset, text_column: str) -> AnyDataset:
    """`dataset` with nothing but a column `text`, without blank texts.

    Raises `ValueError`, with the columns there are, where `text_column` is missing.
    """
    names = dataset.column_names or list(next(iter(dataset), {}))
    if text_column not in names:
        raise ValueError(f"the data have no column {text_column!r}, only {names}; name one by --text_column")
    if text_column != "text":
        dataset = dataset.remove_columns([name for name in names if name == "text"])
        dataset = dataset.rename_column(text_column, "text")
    others = [name for name in names if name not in (text_column, "text")]
    return dataset.remove_columns(others).filter(_has_text)


def _has_text(row: dict[str, Any]) -> bool:
    return bool(row["text"] and row["text"].strip())


@dataclass(frozen=True)
class SentenceRows:
    """Rows of an encoder: each text with its special tokens, cut into several rows where it is too long."""

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    word_offsets: bool = False

    def __call__(self, batch: dict[str, list[str]]) -> Rows:
        """Columns `input_ids`, `special_tokens_mask` and, if asked for, `offset_mapping`."""
        encoded = self.tokenizer(
            batch["text"],
            truncation=True,
            max_length=self.block_size,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=self.word_offsets,
        )
        names = ["input_ids", "special_tokens_mask", *["offset_mapping"] * self.word_offsets]
        return {name: [list(row) for row in encoded[name]] for name in names}


@dataclass(frozen=True)
class PackedRows:
    """Rows of a decoder: whole documents, each closed by the end token, laid side by side.

    A document longer than a row is cut into several. `position_ids` begin at 0 with each document, which is how
    attention tells them apart.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int

    def __call__(self, batch: dict[str, list[str]]) -> Rows:
        """Columns `input_ids` and `position_ids`, at most `block_size` long."""
        end = self.tokenizer.eos_token_id
        documents = self.tokenizer(batch["text"])["input_ids"]
        closed = [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in documents]
        rows = pack_documents(closed, self.block_size)
        return {
            "input_ids": [[token for document in row for token in document] for row in rows],
            "position_ids": [[place for document in row for place in range(len(document))] for row in rows],
        }


@dataclass(frozen=True)
class PlainRows:
    """Rows of bare tokens, without special ones, cut so that `block_size` also holds what a collator adds."""

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    added: int = 2

    def __call__(self, batch: dict[str, list[str]]) -> Rows:
        """Column `input_ids`."""
        documents = self.tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": cut_documents(documents, self.block_size - self.added)}


def cut_documents(documents: Iterable[Sequence[int]], size: int) -> list[list[int]]:
    """The documents in order, those longer than `size` as several pieces, empty ones left out."""
    if size < 1:
        raise ValueError(f"rows leave room for {size} tokens of text; give a larger block_size")
    return [list(ids[start : start + size]) for ids in documents for start in range(0, len(ids), size)]


def pack_documents(documents: Iterable[Sequence[int]], block_size: int) -> list[list[list[int]]]:
    """Fill rows of at most `block_size` tokens with documents: best fit, longest first.

    Returns the rows, each a list of documents or, of longer ones, pieces.
    """
    pieces = sorted(cut_documents(documents, block_size), key=len, reverse=True)
    rows: list[list[list[int]]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for piece in pieces:
        place = bisect.bisect_left(space, (len(piece), -1))
        if place == len(space):
            rows.append([])
            free, row = block_size, len(rows) - 1
        else:
            free, row = space.pop(place)
        rows[row].append(piece)
        bisect.insort(space, (free - len(piece), row))
    return rows


def make_rows(dataset: AnyDataset, maker: SentenceRows | PackedRows | PlainRows, name: str) -> AnyDataset:
    """Apply a row maker to all texts of `dataset`. Raises `ValueError` where no row comes of them."""
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(maker, batched=True, remove_columns=["text"])
    pace_bars_of_datasets()
    rows = dataset.map(maker, batched=True, remove_columns=["text"], desc=f"tokenizing {name}")
    if not len(rows):
        raise ValueError(f"the {name} texts give no token")
    return rows
