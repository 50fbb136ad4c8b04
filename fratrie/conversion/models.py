"""From models of Hugging Face to ours and back, in memory and from checkpoints."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fratrie.modeling.pretrained import FratriePreTrainedModel

from . import bart, bert, deepseek, gpt2, llama, modernbert, t5, vit
from .recipe import SPECIAL_TOKENS, Head, Recipe, States

RECIPES: dict[str, Recipe] = {
    recipe.model_type: recipe
    for recipe in (
        *(bert.BERT, bert.ROBERTA, bert.XLM_ROBERTA, bert.CAMEMBERT, modernbert.MODERNBERT),
        *(gpt2.GPT2, llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.MIXTRAL, llama.QWEN3_MOE),
        *(deepseek.DEEPSEEK_V3, bart.BART, bart.MARIAN, t5.T5, vit.VIT),
    )
}
# Stacks of encoder-decoders on their own: further classes of theirs, and another configuration of ours.
STACK_RECIPES: dict[str, Recipe] = {
    recipe.model_type: recipe for recipe in (bart.BART_DECODER, bart.MARIAN_DECODER, t5.T5_ENCODER)
}


def register_loaders() -> None:
    """Let `from_pretrained` of our classes load the checkpoints of every family that has a recipe."""
    FratriePreTrainedModel.foreign_loaders.update(dict.fromkeys(RECIPES, load_checkpoint))


_Model = TypeVar("_Model", bound=FratriePreTrainedModel)
# What `from_pretrained` reads of a checkpoint's place rather than of the model.
_HUB_ARGUMENTS = (
    *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"),
)
_WEIGHT_ARGUMENTS = ("key_mapping", "state_dict", "use_safetensors", "variant")
# Hugging Face's own, which like its loading report follows the verbosity that a user sets there.
_logger = transformers_logging.get_logger()


def find_recipe(model_type: str, class_name: str | None = None) -> tuple[Recipe, Head]:
    """The recipe of a model type of Hugging Face, and its head of a class of theirs or ours (by default the bare one).

    Raises:
        ValueError: when there is none.
    """
    if model_type not in RECIPES:
        raise ValueError(f"No recipe for model type {model_type!r}; there are {', '.join(RECIPES)}.")
    recipes = [recipes[model_type] for recipes in (RECIPES, STACK_RECIPES) if model_type in recipes]
    pairs = [(recipe, head) for recipe in recipes for head in recipe.heads]
    for recipe, head in pairs:
        if class_name in (None, head.theirs, head.ours.__name__):
            return recipe, head
    is_ours = str(class_name).startswith("Fratrie")
    known = ", ".join(head.ours.__name__ if is_ours else head.theirs for _, head in pairs)
    raise ValueError(f"{class_name} has no counterpart for model type {model_type!r}; {known} have.")


def from_hf(model: PreTrainedModel) -> FratriePreTrainedModel:
    """Our model with the weights of a Hugging Face model, and its outputs.

    Args:
        model: with a head that ours has too; it stays as it is, and shares no memory with the result.

    Raises:
        ValueError: names the class, the field or the weight that has no counterpart.
    """
    if isinstance(model, FratriePreTrainedModel):
        raise ValueError(f"{type(model).__name__} is one of our models already: to_hf makes it one of theirs.")
    _require_weights(model)
    recipe, head = find_recipe(model.config.model_type, type(model).__name__)
    config = _read_config(recipe, head, model)
    ours = _build(head.ours, config, recipe.read_weights(model.state_dict(), head, model.config), model)
    _keep_generation_config(model, ours)
    return ours


def to_hf(model: FratriePreTrainedModel, model_type: str | None = None) -> PreTrainedModel:
    """The Hugging Face model with the weights of ours, and its outputs.

    Args:
        model: one of ours; it stays as it is, and shares no memory with the result.
        model_type: the family to make it; by default that it was converted from.

    Raises:
        ValueError: names what the family does not have.
    """
    if not isinstance(model, FratriePreTrainedModel):
        raise ValueError(f"{type(model).__name__} is none of our models: from_hf makes it one.")
    _require_weights(model)
    model_type = model_type or (model.config.foreign_fields or {}).get("model_type")
    if model_type is None:
        raise ValueError(f"This model was not converted: name the model_type to make it, of {', '.join(RECIPES)}.")
    recipe, head = find_recipe(model_type, type(model).__name__)
    config = recipe.write_config(model.config, head)
    states = recipe.write_weights(model.state_dict(), head, config)
    computed = recipe.computed_weights(head)
    arguments = {"add_pooling_layer": model.config.pooler_activation is not None} if head.pooler else {}
    for name, value in recipe.unsaid(model.config, config, head).items():
        _logger.warning(f"{name}={value!r} has no place in a {model_type!r} model.")
    theirs = _build(head.their_class, config, states, model, computed, **arguments)
    _keep_generation_config(model, theirs)
    return theirs


def load_checkpoint(
    our_class: type[_Model], name: str | os.PathLike[str], config: PreTrainedConfig | None = None, **kwargs: Any
) -> Any:
    """Load a Hugging Face checkpoint into one of our classes; what `our_class.from_pretrained` does with it.

    Weights of a head that the checkpoint lacks are new, as `from_pretrained` reports; those that the class has no use
    for are reported under their own names.

    Args:
        our_class: the class to load into.
        name: folder or hub id of the checkpoint.
        config: our configuration, if it is not that of the checkpoint; or theirs, or the place of one.
        **kwargs: as for `from_pretrained`; without `config`, fields of our configuration to change.

    Raises:
        ValueError: names the class, the field or the weight that has no counterpart; or the weights are pickled, which
            are read with `use_safetensors=False` alone.
    """
    hub = {key: kwargs.pop(key) for key in _HUB_ARGUMENTS if key in kwargs}
    weights = {key: kwargs.pop(key) for key in _WEIGHT_ARGUMENTS if key in kwargs}
    if isinstance(config, (str, os.PathLike)):
        config = cast(PreTrainedConfig, AutoConfig.from_pretrained(config, trust_remote_code=False))
    is_theirs = getattr(config, "model_type", None) in RECIPES
    their_config: Any = config if is_theirs else AutoConfig.from_pretrained(name, trust_remote_code=False, **hub)
    if getattr(their_config, "quantization_config", None):
        raise ValueError(f"{name} is quantised: take the checkpoint that it was made of.")
    recipe, head = find_recipe(their_config.model_type, our_class.__name__)
    if recipe.renamed:
        weights.setdefault("key_mapping", dict(recipe.renamed))
    weights["dtype"] = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
    theirs, report = _load_theirs(head, name, their_config, hub | weights)
    if report["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
        key, saved, built = min(report["mismatched_keys"])
        raise ValueError(
            f"{name}: the weights {key} are {tuple(saved)}, and {tuple(built)} by the configuration: mend that, or "
            "take new ones by ignore_mismatched_sizes=True."
        )
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if config is None or is_theirs:
        config = _read_config(recipe, head, theirs, missing)
        config = config if is_theirs else _change_fields(config, kwargs)
    states = {key: value for key, value in theirs.state_dict().items() if key not in missing}
    states = recipe.read_weights(states, head, theirs.config)
    with _without_bars():  # theirs have been shown
        loaded = our_class.from_pretrained(None, config=config, state_dict=states, dtype=theirs.dtype, **kwargs)
    ours = loaded[0] if isinstance(loaded, tuple) else loaded
    if unread := sorted(report["unexpected_keys"]):
        _logger.warning(f"{name}: {our_class.__name__} has no use for {len(unread)} weights, such as {unread[0]}.")
    if isinstance(loaded, tuple):
        loaded[1]["unexpected_keys"] = {*loaded[1]["unexpected_keys"], *unread}
    ours.name_or_path = ours.config.name_or_path = str(name)
    _keep_generation_config(theirs, ours)
    return loaded


def _load_theirs(
    head: Head, name: str | os.PathLike[str], config: PreTrainedConfig, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Their model and the report of its loading, which says what a mismatch is instead of raising it."""
    arguments = {"ignore_mismatched_sizes": True, "output_loading_info": True, **arguments}
    arguments["use_safetensors"] = arguments.get("use_safetensors") is not False
    try:
        with _without_report():
            return cast(Any, head.their_class.from_pretrained(name, config=config, **arguments))
    except OSError as error:
        if "safetensors" not in str(error) or not list(Path(name).glob("**/pytorch_model*.bin")):
            raise
        raise ValueError(
            f"{name} has pickled weights alone (pytorch_model.bin), which are read when asked for: "
            "from_pretrained(…, use_safetensors=False); save_pretrained then writes them as safetensors."
        ) from error
    except KeyError as error:
        raise ValueError(f"{name}: its configuration names {error}, which transformers does not know.") from error


def _require_weights(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{kind} is no model of transformers. Folders and hub ids are read by from_pretrained of our classes; a "
            "model of PEFT becomes one by merge_and_unload()."
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError(f"This {kind} is on the meta device: it has no weights to convert.")
    if any(type(weight.data) is not torch.Tensor for weight in model.parameters()):
        raise ValueError(f"This {kind} is quantised or split over devices: convert it as it was before.")


def _change_fields(config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """A configuration with the fields that `kwargs` names, which leave it."""
    names = {*(f.name for f in fields(config)), "num_labels", "output_attentions"} & kwargs.keys()
    changed = {name: kwargs.pop(name) for name in names}
    return type(config).from_dict(config.to_dict(), **changed) if changed else config


@contextmanager
def _without_report() -> Iterator[None]:
    """No loading report: the callers judge it, or ours will say the same in our names."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    states: States,
    like: PreTrainedModel,
    computed: Collection[str] = (),
    **kwargs: Any,
) -> Any:
    """A model with these weights, which are all but the computed ones, in the dtype, place and mode of another."""
    states = {name: tensor.clone() for name, tensor in states.items()}
    kwargs |= {"dtype": like.dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with _without_report(), _without_bars():
        loaded = model_class.from_pretrained(None, config=config, state_dict=states, **kwargs)
    model, report = cast(Any, loaded)
    report["missing_keys"] = set(report["missing_keys"]) - set(computed)
    strange = [key for kind in ("missing", "unexpected", "mismatched") for key in report[f"{kind}_keys"]]
    if strange:
        names = ", ".join(map(str, strange))
        raise ValueError(
            f"The weights of this {type(like).__name__} are not those of its configuration: {names}. Was the model "
            "changed after it was built?"
        )
    _keep_dtypes(model, states)
    model.name_or_path = model.config.name_or_path = like.config.name_or_path
    # Or it would be saved under the names that it was built from, and not in the format of its family's checkpoints.
    model._weight_conversions = None
    return model.to(like.device).train(like.training)


def _keep_dtypes(model: PreTrainedModel, states: States) -> None:
    """Give weights the dtype that they had, such as norms in float32, where the computation takes it."""
    rounded = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in states or tensor.dtype == states[name].dtype:
            continue
        is_matrix = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
        bits, given = torch.finfo(tensor.dtype).bits, torch.finfo(states[name].dtype).bits
        if not is_matrix or bits > given:  # a finer matrix is one that takes both
            tensor.data = states[name]
        elif bits < given:
            rounded.append(name)  # a matrix has to be of the dtype of what it multiplies
    if rounded:
        _logger.warning(
            f"{len(rounded)} matrices, such as {rounded[0]}, are rounded to {model.dtype}, as the others are."
        )


def _read_config(
    recipe: Recipe, head: Head, theirs: PreTrainedModel, missing: Collection[str] = ()
) -> PreTrainedConfig:
    """Our configuration of their model, with what only the model itself tells.

    That is whether there is a pooler, and whether the output layer is the input embedding: T5 1.1 says so and has two
    matrices.
    """
    config = recipe.read_config(theirs.config, head)
    for name in SPECIAL_TOKENS:
        token_ids = getattr(theirs.config, name, None)
        if token_ids not in (None, getattr(config, name, None)):
            _logger.warning(f"{name}={token_ids} lies outside the vocabulary: kept for the way back, and not used.")
    if head.pooler and getattr(theirs, "pooler", None) is not None and "pooler.dense.weight" not in missing:
        config.pooler_activation = head.pooler(theirs.config)
    output = theirs.get_output_embeddings()
    if output is not None:
        tables = [module.weight for module in theirs.modules() if isinstance(module, torch.nn.Embedding)]
        config.tie_word_embeddings = any(output.weight is table for table in tables)
    return config


def _keep_generation_config(source: PreTrainedModel, target: PreTrainedModel) -> None:
    generation = getattr(source, "generation_config", None)
    if generation is not None and target.can_generate():
        target.generation_config = transformers.GenerationConfig.from_dict(generation.to_dict())
