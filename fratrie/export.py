"""Checkpoints that carry their code: they load with `trust_remote_code=True` where fratrie is not installed."""

import json
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME

from .auto_classes import AUTO_CLASSES
from .files import write_text
from .modeling.pretrained import FratriePreTrainedModel
from .pipelines.family_relations import FamilyRelationsPipeline, label_columns
from .pipelines.text2text_generation import Text2TextGenerationPipeline
from .pipelines.text_pipeline import TextPipeline


def export_code(model: PreTrainedModel, folder: str | PathLike[str]) -> None:
    """Put the code of a model into the folder of its checkpoint, before or after `model.save_pretrained(folder)`.

    Without fratrie, `AutoConfig`, `AutoModel` and every head of the same sibling then load from the folder with
    `trust_remote_code=True`, and so do the pipelines of ours that the model serves. A model loaded so saves its code
    again by itself. With fratrie installed its own classes load the folder, as they load any other.

    Args:
        model: of exactly one of our classes.
        folder: made where there is none.

    Raises:
        ValueError: the model is of another class, or the folder holds another model or an unreadable config.json.
    """
    model_code = _source(require_own_class(model))
    folder = Path(folder)
    saved = _saved_config(folder, model)
    folder.mkdir(parents=True, exist_ok=True)
    pipelines = list(_pipelines_of(model.config))
    sources = {model_code, *map(_source, pipelines)}
    code = {file: file.read_text(encoding="utf-8") for source in sources for file in _with_imports(source)}
    code[model_code] += "".join(_travelling_imports(pipelines))
    for file, text in code.items():
        write_text(folder / file.name, text)
    # What a config.json says of code is written only where that lies beside it (`FratrieBaseConfig`).
    entries: dict[str, dict[str, Any]] = {
        "auto_map": _auto_map(model.config),
        "custom_pipelines": _custom_pipelines(pipelines),
    }
    _replace_entries(vars(model.config), entries)
    if saved is not None:
        _replace_entries(saved, entries)
        # As Hugging Face writes it; it sorts the labels' numbers as numbers, which are texts here.
        write_text(folder / CONFIG_NAME, json.dumps(dict(sorted(saved.items())), indent=2) + "\n")


def _with_imports(source: Path) -> list[Path]:
    return [source, *map(Path, get_relative_import_files(source))]


def carries_code(model: Any) -> bool:
    """Whether a model of ours was loaded from a folder with its code, or had it exported to one."""
    return any(map(_is_ours, (vars(model.config).get("auto_map") or {}).values()))


def require_own_class(model: Any) -> type[FratriePreTrainedModel]:
    """The class of ours that a model is of, sharded by FSDP or not.

    Raises:
        ValueError: it is of no class of ours, or of a copy that a checkpoint carries.
    """
    name = type(model).__name__.removeprefix("FSDP")  # which derives a class of this name
    for _, ours in AUTO_CLASSES:
        if ours.__name__ == name and isinstance(model, ours):
            return ours
    if type(model).__module__.startswith("transformers_modules."):  # where Hugging Face puts the code of folders
        raise ValueError(
            f"This {type(model).__name__} was loaded with trust_remote_code and already carries its code: "
            "`save_pretrained` saves that code again, without an export."
        )
    raise ValueError(
        f"{type(model).__name__} is none of the models of fratrie, whose code can be exported: unwrap or merge it "
        "first; a class of transformers needs no code."
    )


def _saved_config(folder: Path, model: PreTrainedModel) -> dict[str, Any] | None:
    """What the config.json of a folder says, which must be of this model; None where there is none."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a checkpoint.")
    path = folder / CONFIG_NAME
    if not path.exists():
        return None
    way_out = "save the model there again, or give another folder."
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): {way_out}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds a {type(saved).__name__}, not an object with the fields of a model: {way_out}")
    if "model_type" not in saved:
        raise ValueError(f"{path} names no model_type, so it is no config of a model: {way_out}")
    if saved["model_type"] != model.config.model_type:
        raise ValueError(
            f"{folder} holds a {saved['model_type']!r} model, not the {model.config.model_type!r} that is exported."
        )
    for name in ("auto_map", "custom_pipelines"):
        if not isinstance(saved.get(name) or {}, dict):
            raise ValueError(f"{path} has {name} = {saved[name]!r}, which is not an object: {way_out}")
    return saved


def _auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """The class of each Auto class, as Hugging Face names them: `file.Class`."""
    models = {auto.__name__: ours for auto, ours in AUTO_CLASSES if ours.config_class is type(config)}
    classes = {"AutoConfig": type(config), **models}
    return {auto: _reference(ours) for auto, ours in classes.items()}


def _pipelines_of(config: PreTrainedConfig) -> Iterator[type[TextPipeline]]:
    if config.is_encoder_decoder:
        yield Text2TextGenerationPipeline
        return
    try:
        label_columns(config)
    except ValueError:
        return
    yield FamilyRelationsPipeline


def _custom_pipelines(pipelines: list[type[TextPipeline]]) -> dict[str, dict[str, Any]]:
    return {
        pipeline.task_name: {
            "impl": _reference(pipeline),
            "pt": [pipeline.auto_model.__name__],
            "type": "text",
        }
        for pipeline in pipelines
    }


def _travelling_imports(pipelines: list[type[TextPipeline]]) -> Iterator[str]:
    # With a model that it loaded from such a folder, Hugging Face saves the files that the model's own imports.
    for pipeline in pipelines:
        yield f"\n\nif False:  # saved with the model\n    from .{_source(pipeline).stem} import {pipeline.__name__}\n"


def _replace_entries(config: dict[str, Any], entries: dict[str, dict[str, Any]]) -> None:
    """Put our entries in place of those of an earlier export, whose labels may have been others."""
    for name, ours in entries.items():
        others = {key: entry for key, entry in (config.pop(name, None) or {}).items() if not _is_ours(entry)}
        if others or ours:
            config[name] = dict(sorted({**others, **ours}.items()))


def _is_ours(entry: Any) -> bool:
    reference = entry.get("impl") if isinstance(entry, dict) else entry
    classes: list[Any] = [FamilyRelationsPipeline, Text2TextGenerationPipeline]
    classes += [own for _, ours in AUTO_CLASSES for own in (ours, ours.config_class)]
    return reference in [_reference(own) for own in classes]


def _reference(own_class: type) -> str:
    return f"{_source(own_class).stem}.{own_class.__name__}"


def _source(own_class: type) -> Path:
    """The file that defines a class."""
    file = sys.modules[own_class.__module__].__file__
    assert file is not None
    return Path(file)
