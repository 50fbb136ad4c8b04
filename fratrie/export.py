"""Checkpoints that carry their code: they load with `trust_remote_code=True` where fratrie is not installed."""

import json
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, cast

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
    `trust_remote_code=True`, and so do the pipelines of ours that the model serves. A model loaded this way saves its
    code again by itself. With fratrie installed its own classes load the folder, as they load any other.

    Args:
        model: of exactly one of our classes.
        folder: made where there is none.

    Raises:
        ValueError: the model or a mixer of it is of another class, or the folder holds another model or an unreadable
            config.json.
    """
    model_code = _source(require_own_class(model))
    _require_own_mixers(model)
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


def _require_own_mixers(model: PreTrainedModel) -> None:
    """Refuse mixers of the user's own, whose code lies elsewhere."""
    package = FratriePreTrainedModel.__module__.rpartition(".")[0]
    for config in cast(FratriePreTrainedModel, model).stack_configs():
        for name, mixer in zip(config.mixer_types or [], config.mixers, strict=True):
            if mixer.__module__.rpartition(".")[0] != package:
                raise ValueError(
                    f"The mixer {name!r} is {mixer.__module__}.{mixer.__qualname__}, which is no part of fratrie: its "
                    "code cannot be exported."
                )


def _with_imports(source: Path) -> list[Path]:
    return [source, *map(Path, get_relative_import_files(source))]


def carries_code(model: Any) -> bool:
    """Whether a model of ours was loaded from a folder with its code, or had it exported to one."""
    return any(map(_is_ours, (vars(model.config).get("auto_map") or {}).values()))


def takes_code(model: Any, asked: bool) -> bool:
    """Whether code is saved with a model: because it is asked for, or because the model came with it.

    Args:
        model: to be saved.
        asked: whether the code is asked for.

    Raises:
        ValueError: it is asked for, and the class of the model is none of ours.
    """
    if asked:
        require_own_class(model)
    return asked or (carries_code(model) and _own_class(model) is not None)


def require_own_class(model: Any) -> type[FratriePreTrainedModel]:
    """Our class of a model, which may be sharded by FSDP.

    Raises:
        ValueError: it is none of our classes, or a copy of one that a checkpoint carries.
    """
    if own := _own_class(model):
        return own
    if type(model).__module__.startswith("transformers_modules."):  # where Hugging Face puts the code of folders
        raise ValueError(
            f"This {type(model).__name__} was loaded with trust_remote_code and already carries its code: "
            "`save_pretrained` saves that code again, without an export."
        )
    raise ValueError(
        f"{type(model).__name__} is none of the models of fratrie, whose code can be exported: unwrap or merge it "
        "first; a class of transformers needs no code."
    )


def _own_class(model: Any) -> type[FratriePreTrainedModel] | None:
    from torch.distributed.fsdp import FSDPModule  # which some builds of torch lack

    # `fully_shard` puts a class of its own before that of the model.
    given = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return next((ours for _, ours in AUTO_CLASSES if given is ours), None)


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
    """Replace the entries of an earlier export, whose labels may have been different."""
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
