"""Train a tokenizer on your own texts and save it where `AutoTokenizer.from_pretrained` finds it.

Example: fratrie train-tokenizer --files fratrie/data/family_relations/train.txt --annotated
--vocab_size 2000 --output_dir runs/tokenizer
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from fratrie.checkpoints import CONFIG, TOKENIZER_CONFIG, TOKENIZER_FILES
from fratrie.data.loading import load_texts
from fratrie.data.text_files import existing_file, read_text
from fratrie.files import held, new_folder
from fratrie.tokenization import Sibling, train_byte_level_bpe, train_character_tokenizer
from fratrie.training.corpora import named_texts
from fratrie.training.options import ReadingOptions

from .options import read_options
from .running import run

SAMPLE = 10_000


@dataclass(kw_only=True)
class TokenizerArguments(ReadingOptions):
    """What to read, what to train and where to save it."""

    output_dir: str = field(metadata={"help": "Folder for the tokenizer; created if it does not exist."})
    overwrite: bool = field(default=False, metadata={"help": "Replace a tokenizer that the folder holds."})
    files: list[str] = field(
        default_factory=list,
        metadata={"help": "Texts: .txt, .csv, .tsv, .xlsx, .ods, .json, .jsonl or .parquet files."},
    )
    annotated: bool = field(
        default=False,
        metadata={"help": "The files hold annotated lines 'CODE SENTENCE': train on the sentences alone."},
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
        default="bpe", metadata={"help": "Byte-level BPE, or one token per character."}
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
    (arguments,) = read_options(__doc__, TokenizerArguments)
    texts = _texts(arguments)
    _prepare_folder(arguments.output_dir, arguments.overwrite)
    sample: list[str] = []
    with held(Path(arguments.output_dir)):  # a run that is writing there would put its own tokenizer in the place
        tokenizer = _train(_remember(texts, sample), arguments)
        with new_folder(arguments.output_dir) as folder:
            tokenizer.save_pretrained(folder)
    print(_summary(tokenizer, sample, arguments))


def _texts(arguments: TokenizerArguments) -> Iterable[str]:
    if bool(arguments.files) == bool(arguments.dataset):
        raise ValueError("give either --files or --dataset: one of them says which texts to train on")
    if arguments.streaming and not arguments.dataset:
        raise ValueError("--streaming reads a --dataset as it comes; --files are read whole: leave one of them out")
    if arguments.dataset:
        where = (arguments.dataset, arguments.dataset_config, arguments.dataset_split, arguments.text_column)
        return (row["text"] for row in named_texts(*where, arguments.streaming))
    return [text for path in arguments.files for text in _file_texts(path, arguments)]


def _file_texts(path: str, arguments: TokenizerArguments) -> list[str]:
    if arguments.annotated or existing_file(path).suffix.lower() != ".txt":
        return load_texts(path, arguments.text_column, arguments.annotated, arguments.text_format())
    text = read_text(path, arguments.text_format()).replace("\r\n", "\n")
    if not text.strip():
        raise ValueError(f"{path}: the file is empty, expected text")
    # Line ends stay: they are characters to learn like any other.
    return text.splitlines(keepends=True)


def _prepare_folder(path: str, overwrite: bool) -> None:
    there = [name for name in (*TOKENIZER_FILES, TOKENIZER_CONFIG, CONFIG) if (Path(path) / name).exists()]
    if there and not overwrite:
        raise ValueError(
            f"{path} holds {there[0]}, and a model would read other tokens than it has learnt: choose another "
            "--output_dir, or say --overwrite"
        )
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
        f"first {len(sample)} text(s): {tokens / words:.2f} tokens per word, {size / tokens:.2f} bytes per token"
    )


if __name__ == "__main__":
    run(main)
