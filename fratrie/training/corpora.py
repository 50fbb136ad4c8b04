"""From texts to the rows that pretraining reads, in memory or as a stream.

The row makers take a batch `{"text": [...]}` as `datasets` gives it to `map`, and return columns of rows.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import datasets
from pyarrow import compute
from transformers import PreTrainedTokenizerBase

from fratrie.checkpoints import read_json
from fratrie.data.annotation import excerpt, text_problem
from fratrie.data.hub import may_be_hub_id
from fratrie.data.loading import load_texts
from fratrie.data.tables import missing_column, row_noun, stream_column, table_kind
from fratrie.data.text_files import UTF8, TextFormat, checked_lines, existing_file, open_text

from .encoding import tell_unknown, unknown_token
from .tracking import pace_bars_of_datasets

logger = logging.getLogger(__name__)

RowColumns = dict[str, list[list[int]]]
DatasetType = TypeVar("DatasetType", datasets.Dataset, datasets.IterableDataset)


def read_texts(
    paths: Sequence[str], text_column: str = "text", annotated: bool = False, form: TextFormat = UTF8
) -> datasets.Dataset:
    """The texts of local files as a dataset with the column `text`; empty ones are left out and logged.

    Args:
        paths: txt (one text per line), csv, jsonl or parquet files.
        text_column: column of the text in tables.
        annotated: the files are in the annotation format; its sentences without codes are the texts.
        form: encoding and delimiter of the files, sheet of spreadsheets.

    Raises:
        ValueError: a file cannot be understood, or there is no text; names the file.
        OSError: a file is missing or cannot be read.
    """
    texts: list[str] = []
    for path in paths:
        texts += load_texts(path, text_column, annotated, form)
    if not texts:
        raise ValueError(f"{', '.join(paths) or 'no file'}: no text found; give files that hold text")
    return datasets.Dataset.from_dict({"text": texts})


def stream_texts(paths: Sequence[str], text_column: str = "text", form: TextFormat = UTF8) -> datasets.IterableDataset:
    """The texts that `read_texts` reads, as a stream, file after file; the first empty one of each file is logged.

    Raises:
        ValueError: a file is of an unknown kind; or, once it is read, a row holds something other than a text.
        OSError: a file is missing or cannot be read.
    """
    for path in paths:
        if existing_file(path).suffix.lower() != ".txt":
            table_kind(Path(path))
    return datasets.IterableDataset.from_generator(
        _stream,
        features=datasets.Features(text=datasets.Value("string")),
        gen_kwargs={"paths": [str(path) for path in paths], "text_column": text_column, "form": form},
    )


def _stream(paths: Sequence[str], text_column: str, form: TextFormat) -> Iterator[dict[str, str]]:
    for path in paths:
        told = False
        for number, text in _stream_file(Path(path), text_column, form):
            row = f"{row_noun(path)} {number}"
            if _has_text(text, f"{path}, {row}"):
                yield {"text": text}
            elif not told:
                logger.warning("%s: %s holds no text and is left out, as further such ones are", path, row)
                told = True


def _stream_file(path: Path, text_column: str, form: TextFormat) -> Iterator[tuple[int, Any]]:
    if path.suffix.lower() != ".txt":
        yield from stream_column(path, text_column, form)
        return
    with open_text(path, form, newline="\n") as file:
        for number, line in enumerate(checked_lines(file, path), start=1):
            yield number, line.removesuffix("\n").removesuffix("\r")


def named_texts(
    name: str, configuration: str | None, split: str, text_column: str = "text", streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """The texts of a dataset: a folder of files, one saved by `datasets`, or one on a hub.

    Args:
        name: path of the folder, or name on the hub.
        configuration: of the dataset, if it has several.
        split: of the dataset.
        text_column: column of the text.
        streaming: read it as it comes instead of loading all of it.

    Raises:
        ValueError: it cannot be loaded.
    """
    if not name or not (Path(name).is_dir() or may_be_hub_id(name)):
        raise ValueError(f"{name!r}: there is no such folder; give the folder of a dataset, or its name on a hub")
    pace_bars_of_datasets()
    try:
        loaded = _load(name, configuration, split, streaming)
    except Exception as error:  # whatever the readers of all kinds of files raise
        reason = str(error.__cause__ or error).strip()
        raise ValueError(f"{name}: cannot load the dataset, split {split!r}: {reason}") from error
    return only_text(loaded, text_column, name)


def _load(
    name: str, configuration: str | None, split: str, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    parts, state = Path(name, "dataset_dict.json"), Path(name, "state.json")
    if not (parts.is_file() or state.is_file()):
        return datasets.load_dataset(name, configuration, split=split, streaming=streaming)
    if configuration:
        raise ValueError(f"it was saved by `datasets`, without a configuration: leave out {configuration!r}")
    there = read_json(parts).get("splits", []) if parts.is_file() else [read_json(state).get("_split") or "train"]
    if split not in there and (parts.is_file() or split != "train"):
        raise ValueError(f"it was saved by `datasets`, and has the split {' or '.join(there)}")
    datasets.disable_caching()  # which would put files into this folder
    saved = datasets.load_from_disk(parts.parent / split if parts.is_file() else name)
    return saved.to_iterable_dataset() if streaming else saved


def only_text(dataset: DatasetType, text_column: str, source: str = "the data") -> DatasetType:
    """`dataset` with nothing but a column `text`, without blank and absent texts.

    Raises:
        ValueError: `text_column` is missing (names the columns that exist), or a row holds something other than a
            text (in a stream, once the row is read).
    """
    names = dataset.column_names or list(next(iter(dataset), {}))
    if text_column not in names:
        raise missing_column(source, text_column, names, "text_column")
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.select_columns([text_column])
    kept = dataset.filter(
        lambda row, place: _has_text(row.get(text_column), f"{source}, row {place + 1}"), with_indices=True
    )
    if isinstance(dataset, datasets.Dataset) and len(kept) < len(dataset):
        logger.warning(
            "%s: %d of %d rows hold no text and are left out", source, len(dataset) - len(kept), len(dataset)
        )
    kept = kept.select_columns([text_column])
    return kept if text_column == "text" else kept.rename_column(text_column, "text")


def _has_text(text: Any, place: str) -> bool:
    """Whether there is a text; a ValueError says that something else is there."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return False
    problem = text_problem(text) if isinstance(text, str) else f"is {excerpt(text)}, expected a string"
    if problem:
        raise ValueError(f"{place}: the text {problem}")
    return True


@dataclass(frozen=True)
class SentenceRows:
    """Rows of an encoder: each text with its special tokens, cut into several rows where it is too long."""

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    word_offsets: bool = False

    def __call__(self, batch: dict[str, list[str]]) -> RowColumns:
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

    def __call__(self, batch: dict[str, list[str]]) -> RowColumns:
        """Columns `input_ids` and `position_ids`, at most `block_size` long."""
        end = self.tokenizer.eos_token_id
        documents = self.tokenizer(batch["text"], verbose=False)["input_ids"]
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

    def __call__(self, batch: dict[str, list[str]]) -> RowColumns:
        """Column `input_ids`."""
        documents = self.tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": cut_documents(documents, self.block_size - self.added)}


def cut_documents(documents: Iterable[Sequence[int]], size: int) -> list[list[int]]:
    """The documents in order, those longer than `size` as several pieces, empty ones left out.

    Raises:
        ValueError: the size is below 1.
    """
    if size < 1:
        raise ValueError(f"rows leave room for {size} tokens of text; give a larger block_size")
    return [list(ids[start : start + size]) for ids in documents for start in range(0, len(ids), size)]


def pack_documents(documents: Iterable[Sequence[int]], block_size: int) -> list[list[list[int]]]:
    """Fill rows of at most `block_size` tokens with documents: best fit, longest first.

    Returns:
        The rows, each a list of documents (of pieces, where a document is longer than a row).
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


def make_rows(dataset: DatasetType, maker: SentenceRows | PackedRows | PlainRows, name: str) -> DatasetType:
    """Apply a row maker to all texts of `dataset`; unless it is a stream, how many tokens are unknown is logged.

    Args:
        dataset: with the column `text`.
        maker: makes rows from a batch of texts.
        name: of the part, for the progress bar and the error.

    Raises:
        ValueError: the texts give no row.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(maker, batched=True, remove_columns=["text"])
    pace_bars_of_datasets()
    rows = dataset.map(maker, batched=True, remove_columns=["text"], desc=f"tokenizing {name}")
    if not len(rows):
        raise ValueError(f"the {name} texts give no token")
    ids = compute.list_flatten(rows.with_format("arrow")["input_ids"][:])
    if (unknown := unknown_token(maker.tokenizer)) is not None:
        tell_unknown(compute.sum(compute.equal(ids, unknown)).as_py() or 0, len(ids), f"{name} texts")
    return rows
