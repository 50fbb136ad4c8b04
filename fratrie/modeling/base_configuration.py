"""What all our configurations share: unknown fields are refused, and code that a checkpoint carries is named."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import CONFIG_NAME, logging

logger = logging.get_logger(__name__)

# What Hugging Face itself hands to a config besides its declared fields.
_LIBRARY_FIELDS = frozenset(
    {
        "architectures",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "experts_implementation",
        "finetuning_task",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
    }
)


class FratrieBaseConfig(PreTrainedConfig):
    """Base of our configurations: what they write, and what a config.json says of code beside it.

    Attributes that are no fields are not written, since an unknown field could not be read again. Carried code
    (`fratrie.export_code`) is named only where it lies, or a model that was loaded from a folder with code would leave
    folders that Hugging Face cannot load. And a registered pipeline wins over one in a folder, as registered models
    do.
    """

    # What Hugging Face's Trainer leaves out of the predictions: all but the logits (or the states of a bare model).
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *("cache", "hidden_states", "attentions", "cross_attentions", "aux_loss", "z_loss", "router_logits"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions", "encoder_router_logits"),
        *("decoder_hidden_states", "decoder_attentions", "decoder_router_logits"),
    ]

    def __post_init__(self, **kwargs: Any) -> None:
        self._require_readable_fields(kwargs.get("torch_dtype"))
        super().__post_init__(**kwargs)
        vars(self).setdefault("auto_map", {})  # trl reads it of every class outside transformers
        if carried := vars(self).get("custom_pipelines"):
            vars(self)["custom_pipelines"] = _CarriedPipelines(carried)

    def _require_readable_fields(self, torch_dtype: Any) -> None:
        # Hugging Face reads these before any type is checked.
        for dtype in (self.dtype, torch_dtype):
            known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if dtype is not None and not isinstance(known, torch.dtype):
                raise ValueError(f"dtype={dtype!r} is none of torch's: use 'float32', 'bfloat16' or 'float16'.")
        if not isinstance(self.id2label, dict | None):
            raise ValueError(f"id2label={self.id2label!r} must give each number a label, as {{0: 'joie'}} does.")

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write config.json (see Hugging Face's method)."""
        names = ("auto_map", "custom_pipelines")
        said: dict[str, Any] = {name: vars(self).pop(name) for name in names if name in vars(self)}
        held = super().to_dict()
        # Trainer sets `use_cache` of every model.
        if lost := held.keys() - without_unknown_fields(self, held).keys() - {"use_cache"}:
            logger.warning("%s are no fields of %s, and not saved.", ", ".join(sorted(lost)), type(self).__name__)
        folder = Path(save_directory)
        for name, entries in said.items():
            carried = {key: entry for key, entry in (entries or {}).items() if _code_is_in(folder, entry)}
            if carried:
                setattr(self, name, carried)
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            vars(self).update(said)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> Any:
        """Read the configuration of a checkpoint (see Hugging Face's method, and `from_dict`)."""
        # `AutoConfig` calls `from_dict` itself, and tells it the name.
        place = None if "name_or_path" in kwargs else pretrained_model_name_or_path
        with _naming_the_file(place):
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of saved fields (see Hugging Face's method).

        Raises:
            ValueError: they are those of another family of models; and what is wrong with those of a checkpoint, by
                the name of its config.json.
        """
        with _naming_the_file(kwargs.get("name_or_path")):  # as AutoConfig gives it
            return cls._from_fields(config_dict, **kwargs)

    @classmethod
    def _from_fields(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        model_type = config_dict.get("model_type") or cls.model_type
        if model_type != cls.model_type:
            raise ValueError(
                f"{cls.__name__} is no configuration of the model type {model_type!r}. Checkpoints of the families "
                "that we can be are read by from_pretrained of our models, and by fratrie convert."
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields (see Hugging Face's method), without attributes that are none."""
        return without_unknown_fields(self, super().to_dict())


@contextmanager
def _naming_the_file(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Say of what is wrong with the fields of a checkpoint, if they are of one, where they stand."""
    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        if folder is None:
            raise
        file = os.path.join(folder, CONFIG_NAME) if os.path.isdir(folder) else f"{CONFIG_NAME} of {folder}"
        raise ValueError(f"{file}: {error}") from error


class _CarriedPipelines(dict[str, Any]):
    # Hugging Face takes the implementation of a task from the folder if the task is `in` this.
    def __contains__(self, task: object) -> bool:
        return super().__contains__(task) and task not in PIPELINE_REGISTRY.get_supported_tasks()


def _code_is_in(folder: Path, entry: str | list[str | None] | dict[str, Any]) -> bool:
    given = entry["impl"] if isinstance(entry, dict) else entry
    references = [name for name in given if name] if isinstance(given, list) else [given]  # slow and fast tokenizer
    # `repository--file.Class`
    return all("--" in name or (folder / f"{name.split('.')[0]}.py").is_file() for name in references)


def reject_unknown_fields(
    config: PreTrainedConfig, given: dict[str, Any], shared: frozenset[str] = frozenset()
) -> None:
    """Raise a `ValueError` that names the unknown fields of `given` and the closest known ones.

    Args:
        config: whose fields are known.
        given: the fields to check.
        shared: further names to suggest.
    """
    known = [*(field.name for field in fields(config)), *shared]
    unknown = [name for name in given if not name.startswith("_") and name not in _LIBRARY_FIELDS]
    if not unknown:
        return
    generation = vars(GenerationConfig())
    hints = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        if name in generation:
            hints.append(f"{name} (belongs to model.generation_config)")
        else:
            hints.append(f"{name} (did you mean {close[0]}?)" if close else name)
    raise ValueError(f"{type(config).__name__} has no field {', '.join(hints)}.")


def require_tokens_in_vocabulary(config: PreTrainedConfig, vocab_size: int) -> None:
    """Refuse special tokens that a vocabulary does not have.

    Raises:
        ValueError: names the token.
    """
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        ids = getattr(config, name, None)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if token_id is not None and not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name}={token_id} lies outside the vocabulary of vocab_size={vocab_size} tokens: choose another "
                    "token, or a larger vocabulary."
                )


def without_unknown_fields(config: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Leave out what tools set on a config besides its fields: as an unknown field it could not be read again."""
    known = {*(field.name for field in fields(config)), *_LIBRARY_FIELDS}
    if not given.get("auto_map"):
        known.remove("auto_map")
    return {name: value for name, value in given.items() if name in known or name.startswith("_")}
