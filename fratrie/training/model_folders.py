"""Folders of models, here or on a hub: found, judged, and their config and tokenizer loaded."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from fratrie.checkpoints import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_checkpoint_files,
    check_config,
    check_kinds,
    check_tokenizer_config,
    has_tokenizer,
    missing_reader,
    reason_of,
)
from fratrie.data.hub import may_be_hub_id

# What is fetched from a repository; of its folders only those of sentence-transformers, such as 1_Pooling.
_WANTED = [
    *("*config.json", "*.safetensors", "*.safetensors.index.json", "*token*", "*vocab*", "*.model", "merges*"),
    *("*.jinja", "modules.json", "config_sentence_transformers.json"),
]

_UNWANTED = "[!0-9]*/*"

# What libraries raise for a damaged folder, besides the ValueError and OSError that end a script with a message.
LOADING_ERRORS = (
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def checkpoint_folder(name: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; one that is named by its hub id is fetched, or found in the cache.

    Raises:
        ValueError: there is no such folder, and the name is no hub id, or the hub cannot give it.
    """
    if not os.fspath(name):
        raise ValueError("an empty path names no checkpoint: is a variable of the shell unset?")
    path = Path(name)
    if path.is_dir():
        return path
    complaint = f"{path} is not a folder; give the folder of a checkpoint (config.json, weights, tokenizer)"
    if not may_be_hub_id(str(name)):
        raise ValueError(complaint)
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{complaint}. Nor does a hub give it: {reason}") from error


def check_checkpoint(name: str | os.PathLike[str], tokenizer: bool = True) -> Path:
    """The folder of a checkpoint, if it holds a config, safetensors weights and (unless told otherwise) a tokenizer.

    Args:
        name: a folder or a hub id.
        tokenizer: whether there must be one.

    Raises:
        ValueError: says what is missing or damaged.
    """
    path = checkpoint_folder(name)
    missing = [] if (path / CONFIG).is_file() else [CONFIG]
    if not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        pickled = (path / "pytorch_model.bin").is_file()
        way_out = (
            " (pytorch_model.bin is pickled and not read: in Python, from_pretrained(…, use_safetensors=False) of its "
            "class and save_pretrained write it as safetensors)"
        )
        missing.append(WEIGHTS + way_out * pickled)
    if tokenizer and not has_tokenizer(path):
        missing.append("tokenizer.json")
    if missing:
        raise ValueError(f"{path} is not a complete checkpoint: it lacks {', '.join(missing)}")
    check_checkpoint_files(path)
    return path


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    Raises:
        ValueError: there is none, it cannot be read, or it has no pad token.
    """
    path = Path(folder)
    if not has_tokenizer(path):
        raise ValueError(f"{path} holds no tokenizer (tokenizer.json); train one with fratrie train-tokenizer")
    check_kinds(path)
    check_tokenizer_config(path)
    if (path / CONFIG).is_file() and check_config(path)["model_type"] in CONFIG_MAPPING:
        load_config(path)  # whose errors AutoTokenizer, which reads it for the tokenizer's class, passes over
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        package = missing_reader(path)
        needed = f" Its .model file needs a package: pip install {package}" if package else ""
        raise ValueError(f"the tokenizer in {path} cannot be read: {reason_of(error)}{needed}") from error
    _try_tokenizer(tokenizer, path)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} has no pad token, so texts of different length cannot share a batch: "
            "set one, for example tokenizer.pad_token = tokenizer.eos_token, and save it again"
        )
    return tokenizer


def _try_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    try:
        tried = tokenizer(["a", "b c"], verbose=False)
        if tokenizer.pad_token_id is not None:
            tried = tokenizer.pad(tried)
    except Exception as error:
        raise ValueError(f"the tokenizer in {path} cannot be used: {reason_of(error)}") from error
    if "input_ids" not in tried:
        raise ValueError(f"the tokenizer in {path} gives no input_ids: look at model_input_names")


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that a tokenizer gives tokens the same ids as the one saved with a checkpoint, if there is one.

    The embeddings of a checkpoint belong to its own tokenizer. A tokenizer that only adds tokens to it is fine.

    Raises:
        ValueError: names the first token with another id.
    """
    if not has_tokenizer(folder):
        return
    numbers, others = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    for token, number in numbers.items():
        if others.get(token) != number:
            raise ValueError(
                f"--tokenizer gives {token!r} the number {others.get(token)}, the tokenizer in {folder} {number}: the "
                "embeddings of that checkpoint belong to its own tokenizer. Leave --tokenizer out"
            )


def load_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """Load the config of a folder.

    Raises:
        ValueError: no JSON, an unknown model type or field, or fields that contradict one another.
        OSError: there is none.
    """
    check_config(Path(folder))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(f"{Path(folder) / CONFIG}: {reason_of(error)}") from error
