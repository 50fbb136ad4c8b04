"""Whether a folder is a sound checkpoint: what can be known of its files before a library reads them.

Everything here raises a `ValueError` (or an `OSError`) that names the file, what is wrong with it and, where there is
one, the way out. No file outside the folder is read, except where its own links lead, as in a hub's cache.
"""

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from fratrie.data.text_files import existing_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_CONFIG, MODULES = "tokenizer_config.json", "modules.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
# The JSON files that transformers looks for in every checkpoint.
_JSON = (CONFIG, "generation_config.json", INDEX, "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json",
         "added_tokens.json", "preprocessor_config.json", "processor_config.json")  # fmt: skip
_READ = {".json", ".safetensors", ".txt", ".model", ".jinja"}
# Packages that read the vocabularies of sentencepiece (*.model), by their modules.
_READERS = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
_SENTENCE_FILES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
# Libraries make an object for each of these, so a slip of the pen would keep them busy for hours.
_COUNTED, MOST_COUNTED = ("layer", "expert", "num_labels"), 10_000


def check_checkpoint_files(folder: str | PathLike[str]) -> dict[str, Any]:
    """Check the files of a checkpoint: that they can be opened, and that those in JSON, and the weights, are whole.

    Args:
        folder: with a config.json, and with safetensors or without.

    Returns:
        The fields of config.json.

    Raises:
        ValueError: names the first file that is unsound.
        OSError: a file cannot be read.
    """
    folder = Path(folder)
    check_kinds(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter, whose model lies elsewhere: merge them, save the whole, give that"
        )
    for name in _JSON[1:]:
        if (folder / name).is_file():
            read_json(folder / name)
    config = check_config(folder)
    check_tokenizer_config(folder)
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        check_weights(folder)
    return config


def check_kinds(folder: Path) -> None:
    """Check that the files of a folder are regular ones: opening a pipe or a device may never end.

    Raises:
        OSError: one is a pipe, a device or an endless link.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ and not path.is_dir():
            existing_file(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: it holds something else.
        OSError: it is no file, or cannot be read.
    """
    existing_file(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def check_config(folder: Path) -> dict[str, Any]:
    """Check what config.json says of the model's kind, labels and files, and return its fields.

    Raises:
        ValueError: names the field.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint: it lacks {CONFIG}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ValueError(f"{path}: model_type={config.get('model_type')!r} must name the kind of the model")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{path}: architectures={architectures!r} must be a list of names of classes")
    if config.get("id2label") is not None:
        _check_labels(path, config["id2label"])
    if config.get("transformers_weights") is not None:
        name = config["transformers_weights"]
        raise ValueError(f"{path}: transformers_weights={name!r} is not followed: call the weights {WEIGHTS}")
    check_counts(path, config)
    return config


def check_counts(place: object, fields: dict[str, Any]) -> None:
    """Check numbers of layers, experts and labels, before a list of that length is made.

    Raises:
        ValueError: one is unreasonably large.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            check_counts(place, value)
        elif isinstance(value, int) and value > MOST_COUNTED and any(part in name for part in _COUNTED):
            raise ValueError(f"{place}: {name}={value} is more than {MOST_COUNTED}, which no model here has")


def _check_labels(path: Path, labels: Any) -> None:
    if not isinstance(labels, dict):
        raise ValueError(f"{path}: id2label={labels!r} must give a label for each number")
    missing = sorted({str(i) for i in range(len(labels))} - labels.keys(), key=int)
    if missing:
        others = ", ".join(sorted(labels.keys() - {str(i) for i in range(len(labels))}))
        raise ValueError(f"{path}: id2label has {len(labels)} labels, but none for {missing[0]}, and one for {others}")


def check_tokenizer_config(folder: Path) -> None:
    """Check the numbers of tokenizer_config.json, if there is one.

    Raises:
        ValueError: names the field.
    """
    path = folder / TOKENIZER_CONFIG
    length = read_json(path).get("model_max_length") if path.is_file() else None
    is_number = isinstance(length, int | float) and not isinstance(length, bool)
    if length is not None and not (is_number and length > 0):
        raise ValueError(f"{path}: model_max_length={length!r} must be a positive number")


def check_weights(folder: str | PathLike[str]) -> None:
    """Check that the weights of a folder are whole, by the headers of their files.

    Raises:
        ValueError: there are none, a file of several is missing or lies elsewhere, or one is damaged.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        _tensors_in(folder / WEIGHTS)
        return
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(f"{folder} has no weights: it lacks {WEIGHTS}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map must name the file of each weight")
    found: set[str] = set()
    for name in sorted(set(places.values())):
        if PurePosixPath(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}: weights are read from .safetensors files in the folder itself")
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not complete: it lacks {name}, which {INDEX} names")
        found |= _tensors_in(folder / name)
    if lost := sorted(places.keys() - found):
        raise ValueError(f"{folder} is not complete: {places[lost[0]]} lacks the weight {lost[0]}")


def _tensors_in(path: Path) -> set[str]:
    """Names of the tensors in a file, whose header and length fit each other."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_memory(make: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse the model that `make` builds of a configuration, on the meta device, if it exceeds the free memory.

    Raises:
        ValueError: says both sizes, of weights in float32.
    """
    try:
        with torch.device("meta"):
            model = make(copy.deepcopy(config))
    except KeyError:  # an unknown activation, say, which loading will complain about
        return
    size = sum(part.numel() for part in (*model.parameters(), *model.buffers())) * 4
    free = psutil.virtual_memory().available
    if size > free:
        raise ValueError(
            f"a model of {size / 2**30:,.0f} GiB, where {free / 2**30:,.1f} are free: are its sizes meant?"
        )


def has_tokenizer(folder: str | PathLike[str]) -> bool:
    """Whether a folder holds a file from which a tokenizer is made."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def missing_reader(folder: str | PathLike[str]) -> str | None:
    """A package that reads the vocabulary of a folder without tokenizer.json and is not installed, if there is one."""
    if (Path(folder) / "tokenizer.json").is_file() or not any(Path(folder).glob("*.model")):
        return None
    return next((package for module, package in _READERS.items() if not _is_installed(module)), None)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def sentence_files(folder: str | PathLike[str]) -> list[Path]:
    """Files of a sentence-transformers folder besides the model itself, relative to it: its pooling, its length, ….

    Returns:
        The files; none for a folder of another kind.

    Raises:
        ValueError: modules.json is damaged, or names a place outside the folder.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return []
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        places = [module["path"] for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder / MODULES} is no list of modules with a path each: {reason_of(error)}") from error
    found = [Path(name) for name in _SENTENCE_FILES if (folder / name).is_file()]
    for place in places:
        if not isinstance(place, str) or PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise ValueError(f"{folder / MODULES} names {place!r}: modules are read from the folder itself")
        if place in ("", "."):
            continue
        if not (folder / place).is_dir():
            raise ValueError(f"{folder} is not complete: it lacks {place}, which {MODULES} names")
        check_kinds(folder / place)
        found += [path.relative_to(folder) for path in sorted((folder / place).rglob("*")) if path.is_file()]
    return found


def reason_of(error: BaseException) -> str:
    """What a library says about a folder that it cannot read, in one line."""
    reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    if "trust_remote_code" in reason:
        return "it asks for code of its own (auto_map), which is never run here"
    return reason.partition("Model type should be one of")[0].strip()  # all that there are follow
