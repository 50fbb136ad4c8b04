"""Train a tokenizer on your own texts and save it where `AutoTokenizer.from_pretrained` finds it.

Example: fratrie train-tokenizer --files fratrie/data/family_relations/train.txt --annotated
--algorithm unigram --vocab_size 2000 --output_dir runs/tokenizer
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from fratrie.checkpoints import CONFIG, TOKENIZER_CONFIG, TOKENIZER_FILES
from fratrie.data.loading import load_texts
from fratrie.data.text_files import existing_file, read_text
from fratrie.files import held, new_folder
from fratrie.tokenization import (
    Sibling,
    train_byte_level_bpe,
    train_character_tokenizer,
    train_unigram,
    train_wordpiece,
)
from fratrie.training.corpora import named_texts
from fratrie.training.options import TextOptions

from .options import read_options
from .running import run

SAMPLE = 10_000
# Each algorithm with the options that it alone, or not every other one, has.
_ALGORITHMS: dict[str, tuple[Callable[..., PreTrainedTokenizerFast], tuple[str, ...]]] = {
    "byte_level_bpe": (train_byte_level_bpe, ("vocab_size", "min_frequency", "split_digits")),
    "wordpiece": (
        train_wordpiece,
        ("vocab_size", "min_frequency", "limit_alphabet", "lowercase", "strip_accents"),
    ),
    "unigram": (train_unigram, ("vocab_size", "limit_alphabet", "byte_fallback")),
    "character": (train_character_tokenizer, ()),
}


@dataclass(kw_only=True)
class TokenizerArguments(TextOptions):
    """What to read, what to train and where to save it."""

    output_dir: str = field(metadata={"help": "Folder for the tokenizer; created if it does not exist."})
    overwrite: bool = field(default=False, metadata={"help": "Replace a tokenizer that the folder holds."})
    algorithm: Literal["byte_level_bpe", "wordpiece", "unigram", "character"] = field(
        default="byte_level_bpe",
        metadata={
            "help": "byte_level_bpe: GPT-2's and RoBERTa's, loses nothing; wordpiece: BERT's; unigram: "
            "SentencePiece's, as CamemBERT and XLM-R have it; character: one token per character."
        },
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "Tokens in all, special tokens and the alphabet (or 256 bytes) included."}
    )
    min_frequency: int = field(
        default=2,
        metadata={"help": "byte_level_bpe, wordpiece: two tokens are merged only if they meet this often."},
    )
    split_digits: bool = field(default=False, metadata={"help": "byte_level_bpe: each digit is a token of its own."})
    limit_alphabet: int = field(
        default=1000,
        metadata={"help": "wordpiece, unigram: the most frequent characters to learn; others are unknown."},
    )
    lowercase: bool = field(default=False, metadata={"help": "wordpiece: capitals become small letters."})
    strip_accents: bool = field(
        default=False,
        metadata={"help": "wordpiece: drop the accents, by which French tells words apart (a, à; pêche, péché)."},
    )
    byte_fallback: bool = field(
        default=False, metadata={"help": "unigram: an unknown character becomes its bytes, and is not lost."}
    )
    sibling: Sibling = field(
        default="encoder",
        metadata={
            "help": "Tokens put around a text: encoder '<s> A </s>', decoder '<s> A' (padded on the left), "
            "seq2seq 'A </s>'; wordpiece calls them [CLS] and [SEP]."
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
    arguments.check_sources()
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
    """Passes the texts on and keeps the first ones that are not blank, since a stream is read only once."""
    for text in texts:
        if len(sample) < SAMPLE and text.strip():
            sample.append(text)
        yield text


def _train(texts: Iterable[str], arguments: TokenizerArguments) -> PreTrainedTokenizerFast:
    train, own = _ALGORITHMS[arguments.algorithm]
    for name in sorted({name for _, names in _ALGORITHMS.values() for name in names} - set(own)):
        if getattr(arguments, name) != getattr(TokenizerArguments, name):
            raise ValueError(f"--{name} has no meaning for --algorithm {arguments.algorithm}: leave it out")
    shared = ("sibling", "num_sentinels", "model_max_length")
    return train(texts, **{name: getattr(arguments, name) for name in (*shared, *own)})


def _summary(tokenizer: PreTrainedTokenizerFast, sample: list[str], arguments: TokenizerArguments) -> str:
    encodings = tokenizer.backend_tokenizer.encode_batch(sample, add_special_tokens=False)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    words = sum(len(text.split()) for text in sample)
    size = sum(len(text.encode()) for text in sample)
    unknown = Counter(
        text[start:end]
        for text, encoding in zip(sample, encodings, strict=True)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        if token == tokenizer.unk_token_id
    )
    shown = ", ".join(repr(piece) for piece, _ in unknown.most_common(5))
    return (
        f"{arguments.algorithm} tokenizer for the {arguments.sibling}, saved to {arguments.output_dir}\n"
        f"vocabulary: {len(tokenizer)} tokens, {len(tokenizer.all_special_tokens)} of them special\n"
        f"first {len(sample)} text(s): {tokens / words:.2f} tokens per word, {size / tokens:.2f} bytes per token, "
        f"{unknown.total()} unknown{f' ({shown})' if unknown else ''}"
    )


if __name__ == "__main__":
    run(main)
