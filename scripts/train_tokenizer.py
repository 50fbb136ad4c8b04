"""Train a tokenizer on your own texts and save it where `AutoTokenizer.from_pretrained` finds it.

Example: python scripts/train_tokenizer.py --files fratrie/data/family_relations/train.txt --annotated
--vocab_size 2000 --output_dir runs/tokenizer
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser, PreTrainedTokenizerFast

from fratrie.data.annotation import read_annotations
from fratrie.data.tables import existing_file, raise_row_problems, read_table, read_text
from fratrie.tokenization import Sibling, train_byte_level_bpe, train_character_tokenizer
from fratrie.training.cli import run

SAMPLE = 10_000


@dataclass
class TokenizerArguments:
    """What to read, what to train and where to save it."""

    output_dir: str = field(metadata={"help": "Folder for the tokenizer; created if it does not exist."})
    files: list[str] = field(
        default_factory=list,
        metadata={"help": "Texts: .txt, .csv, .tsv, .json, .jsonl or .parquet files, UTF-8."},
    )
    annotated: bool = field(
        default=False,
        metadata={"help": "The files hold annotated lines 'CODE SENTENCE': train on the sentences alone."},
    )
    text_column: str = field(
        default="text", metadata={"help": "Column that holds the text, in everything but .txt files."}
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Instead of files: a folder, or a dataset of the Hugging Face Hub by its name."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the dataset as it comes instead of storing it first."}
    )
    kind: Literal["bpe", "character"] = field(
        default="bpe", metadata={"help": "Byte-level BPE, or one token a character."}
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "bpe: tokens in all, special tokens and 256 bytes included."}
    )
    min_frequency: int = field(
        default=2, metadata={"help": "bpe: two tokens are merged only if they meet this often."}
    )
    split_digits: bool = field(default=False, metadata={"help": "bpe: each digit is a token of its own."})
    sibling: Sibling = field(
        default="encoder",
        metadata={
            "help": "Tokens put around a text: encoder '<s> A </s>', decoder '<s> A' (padded on the left), "
            "seq2seq 'A </s>'."
        },
    )
    num_sentinels: int | None = field(
        default=None,
        metadata={"help": "Span-corruption tokens <extra_id_0>, …; by default 32 for seq2seq, else none."},
    )
    model_max_length: int = field(default=512, metadata={"help": "Longest input of the model, in tokens."})


def main() -> None:
    """Read, train, save, and print what came out."""
    parser = HfArgumentParser(TokenizerArguments, description=__doc__)
    (arguments,) = parser.parse_args_into_dataclasses()
    texts = _texts(arguments)
    _prepare_folder(arguments.output_dir)
    sample: list[str] = []
    tokenizer = _train(_remember(texts, sample), arguments)
    tokenizer.save_pretrained(arguments.output_dir)
    print(_summary(tokenizer, sample, arguments))


def _texts(arguments: TokenizerArguments) -> Iterable[str]:
    if bool(arguments.files) == bool(arguments.dataset):
        raise ValueError("give either --files or --dataset: one of them says which texts to train on")
    if arguments.dataset:
        return _dataset_texts(arguments)
    return [text for path in arguments.files for text in _file_texts(existing_file(path), arguments)]


def _file_texts(path: Path, arguments: TokenizerArguments) -> list[str]:
    if arguments.annotated:
        return [segment.text for segment in read_annotations(path)]
    if path.suffix.lower() == ".txt":
        text = read_text(path).replace("\r\n", "\n")
        if not text.strip():
            raise ValueError(f"{path}: the file is empty, expected text")
        # Line ends stay: they are characters to learn like any other.
        return text.splitlines(keepends=True)
    texts = read_table(path).column(arguments.text_column, "text_column")
    problems: dict[str, list[int]] = {}
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            problems.setdefault(f"{text!r} is not a text", []).append(row)
    raise_row_problems(path, problems, "remove these rows or pick another column by --text_column")
    return texts


def _dataset_texts(arguments: TokenizerArguments) -> Iterator[str]:
    from datasets.exceptions import DatasetsError

    name, column = arguments.dataset, arguments.text_column
    try:
        for row in _load_dataset(arguments):
            if column not in row:
                there = ", ".join(map(repr, row))
                raise ValueError(f"no column {column!r}; its columns are {there}: pick one by --text_column")
            yield row[column]
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"{name}: {error.__cause__ or error}") from error


def _load_dataset(arguments: TokenizerArguments) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset, load_from_disk

    folder = Path(str(arguments.dataset))
    if (folder / "dataset_dict.json").exists():
        folder = folder / arguments.dataset_split
    if (folder / "state.json").exists():
        return load_from_disk(folder)
    return load_dataset(
        arguments.dataset,
        arguments.dataset_config,
        split=arguments.dataset_split,
        streaming=arguments.streaming,
    )


def _prepare_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}; choose another --output_dir") from error


def _remember(texts: Iterable[str], sample: list[str]) -> Iterator[str]:
    """Passes the texts on and keeps the first ones, since a stream is read only once."""
    for text in texts:
        if len(sample) < SAMPLE:
            sample.append(text)
        yield text


def _train(texts: Iterable[str], arguments: TokenizerArguments) -> PreTrainedTokenizerFast:
    shared = {name: getattr(arguments, name) for name in ("sibling", "num_sentinels", "model_max_length")}
    bpe_only = ("vocab_size", "min_frequency", "split_digits")
    if arguments.kind == "bpe":
        return train_byte_level_bpe(texts, **shared, **{name: getattr(arguments, name) for name in bpe_only})
    given = [name for name in bpe_only if getattr(arguments, name) != getattr(TokenizerArguments, name)]
    if given:
        raise ValueError(f"--{given[0]} has no meaning for --kind character: leave it out")
    return train_character_tokenizer(texts, **shared)


def _summary(tokenizer: PreTrainedTokenizerFast, sample: list[str], arguments: TokenizerArguments) -> str:
    encodings = tokenizer.backend_tokenizer.encode_batch(sample, add_special_tokens=False)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    words = sum(len(text.split()) for text in sample)
    size = sum(len(text.encode()) for text in sample)
    return (
        f"{arguments.kind} tokenizer for the {arguments.sibling}, saved to {arguments.output_dir}\n"
        f"vocabulary: {len(tokenizer)} tokens, {len(tokenizer.all_special_tokens)} of them special\n"
        f"first {len(sample)} text(s): {tokens / words:.2f} tokens a word, {size / tokens:.2f} bytes a token"
    )


if __name__ == "__main__":
    run(main)
