"""Whether the files of a model's folder are sound: told by name before a library reads them.

A folder comes from anywhere. Nothing outside of it is read, no code of its own is run, nothing pickled is opened.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Libraries make one object for each of these, so a slip of the pen would keep them busy for hours.
MOST_LAYERS = 10_000
_COUNTED = ("layer", "expert", "num_labels")
_READ = (".json", ".safetensors", ".jinja", ".model", ".txt")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: it holds something else; says which file.
        OSError: there is no such file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file that can be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {_kind(value)}, expected a JSON object with fields")
    return value


def check_files(folder: Path) -> None:
    """Raise a `ValueError` for a pipe, a device or a link to nowhere among the files that a library would read."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is not a file (a pipe, a device, or a link that leads nowhere): replace it")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter, whose model lies elsewhere: merge them, save the whole, give that"
        )


def check_config(values: dict[str, Any], where: object) -> None:
    """Raise a `ValueError` for a number of layers, experts or labels beyond reason, before lists are made of it."""
    for name, value in _numbers(values):
        if any(part in name for part in _COUNTED) and value > MOST_LAYERS:
            raise ValueError(f"{where}: {name}={value} is more than {MOST_LAYERS}, which no model here has")
    if values.get("transformers_weights") is not None:
        raise ValueError(f"{where}: transformers_weights={values['transformers_weights']!r} is not followed: "
                         f"call the weights {WEIGHTS} and leave the field out")  # fmt: skip


def check_weights(folder: Path) -> None:
    """Raise a `ValueError` where the safetensors weights of a folder are not all there, whole, and in the folder.

    The headers are read, not the numbers: a file that ends too early is found, a flipped bit among the numbers is not.
    """
    if (folder / WEIGHTS).is_file():
        _names_in(folder / WEIGHTS)
        return
    index = folder / WEIGHTS_INDEX
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} names no weights: its weight_map is {_kind(shards)}")
    tensors = defaultdict(set)
    for name, file in shards.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!r} for {name}: the weights must be .safetensors files beside it")
        tensors[file].add(name)
    for file, names in tensors.items():
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing: {index.name} names it for {len(names)} weights")
        if lacking := names - _names_in(folder / file):
            raise ValueError(f"{folder / file} lacks {len(lacking)} weights of {index.name}: {min(lacking)}, …")


def _names_in(path: Path) -> set[str]:
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers of a nested object, each with the name of its field."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, str(key))
    elif isinstance(value, int):
        yield name, value


def _kind(value: Any) -> str:
    return {dict: "an empty object", list: "a list", type(None): "null"}.get(type(value), repr(value)[:40])
