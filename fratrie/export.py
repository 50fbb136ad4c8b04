"""Checkpoints that carry their code: they load with `trust_remote_code=True` where fratrie is not installed."""

import json
import shutil
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME

from .auto_classes import AUTO_CLASSES
from .modeling.stack import FratriePreTrainedModel
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
        ValueError: the model is of another class, or the folder holds another model.
    """
    model_code = _source(require_own_class(model))
    folder = Path(folder)
    _check_folder(folder, model)
    folder.mkdir(parents=True, exist_ok=True)
    pipelines = list(_pipelines_of(model.config))
    for source in [model_code, *map(_source, pipelines)]:
        for file in {source, *map(Path, get_relative_import_files(source))}:
            shutil.copyfile(file, folder / file.name)
    with open(folder / model_code.name, "a", encoding="utf-8") as code:
        code.writelines(_travelling_imports(pipelines))
    # What a config.json says of code is written only where that lies beside it (`FratrieBaseConfig`).
    entries: dict[str, dict[str, Any]] = {
        "auto_map": _auto_map(model.config),
        "custom_pipelines": _custom_pipelines(pipelines),
    }
    for name, entry in entries.items():
        if entry:
            setattr(model.config, name, {**(getattr(model.config, name, None) or {}), **entry})
    if (folder / CONFIG_NAME).is_file():
        _add_to_config(folder / CONFIG_NAME, entries)


def require_own_class(model: Any) -> type[FratriePreTrainedModel]:
    """The class of ours that a model is of, sharded by FSDP or not.

    Raises:
        ValueError: it is of no class of ours.
    """
    name = type(model).__name__.removeprefix("FSDP")  # which derives a class of this name
    for _, ours in AUTO_CLASSES:
        if ours.__name__ == name and isinstance(model, ours):
            return ours
    raise ValueError(
        f"{type(model).__name__} is none of the models of fratrie, whose code can be exported: unwrap or merge it "
        "first; a class of transformers needs no code."
    )


def _check_folder(folder: Path, model: PreTrainedModel) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a checkpoint.")
    if (folder / CONFIG_NAME).is_file():
        saved = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")).get("model_type")
        if saved != model.config.model_type:
            raise ValueError(
                f"{folder} holds a {saved!r} model, not the {model.config.model_type!r} that is exported."
            )


def _auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """The class of each Auto class, as Hugging Face names them: `file.Class`."""
    models = {auto.__name__: ours for auto, ours in AUTO_CLASSES if ours.config_class is type(config)}
    classes = {"AutoConfig": type(config), **models}
    return {auto: f"{_source(ours).stem}.{ours.__name__}" for auto, ours in classes.items()}


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
            "impl": f"{_source(pipeline).stem}.{pipeline.__name__}",
            "pt": [pipeline.auto_model.__name__],
            "type": "text",
        }
        for pipeline in pipelines
    }


def _travelling_imports(pipelines: list[type[TextPipeline]]) -> Iterator[str]:
    # With a model that it loaded from such a folder, Hugging Face saves the files that the model's own imports.
    for pipeline in pipelines:
        yield f"\n\nif False:  # saved with the model\n    from .{_source(pipeline).stem} import {pipeline.__name__}\n"


def _add_to_config(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in entries.items():
        if entry:
            config[name] = dict(sorted({**(config.get(name) or {}), **entry}.items()))
    # As Hugging Face writes it; it sorts the labels' numbers as numbers, which are texts here.
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n", encoding="utf-8")


def _source(own_class: type) -> Path:
    """The file that defines a class."""
    file = sys.modules[own_class.__module__].__file__
    assert file is not None
    return Path(file)
