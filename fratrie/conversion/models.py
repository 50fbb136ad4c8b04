"""From models of Hugging Face to ours and back, in memory and from checkpoints."""

import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fratrie.modeling.pretrained import FratriePreTrainedModel
from fratrie.quiet import without_bars, without_reports

from . import (
    bamba,
    bart,
    bert,
    big_bird,
    deepseek,
    gpt2,
    gpt_neo,
    lfm2,
    llama,
    longformer,
    longt5,
    modernbert,
    qwen3_next,
    t5,
    vit,
)
from .recipe import SPECIAL_TOKENS, Head, Recipe, States

RECIPES: dict[str, Recipe] = {
    recipe.model_type: recipe
    for recipe in (
        *(bert.BERT, bert.ROBERTA, bert.XLM_ROBERTA, bert.CAMEMBERT, modernbert.MODERNBERT),
        *(gpt2.GPT2, llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.MIXTRAL, llama.QWEN3_MOE),
        *(
            deepseek.DEEPSEEK_V3,
            lfm2.LFM2,
            lfm2.LFM2_MOE,
            bamba.BAMBA,
            qwen3_next.QWEN3_NEXT,
            bart.BART,
            bart.MARIAN,
            t5.T5,
            vit.VIT,
        ),
        *(longformer.LONGFORMER, longformer.LED, big_bird.BIG_BIRD, longt5.LONGT5, gpt_neo.GPT_NEO),
    )
}
# Stacks of encoder-decoders on their own: further classes of theirs, and another configuration of ours.
STACK_RECIPES: dict[str, Recipe] = {
    recipe.model_type: recipe
    for recipe in (bart.BART_DECODER, bart.MARIAN_DECODER, t5.T5_ENCODER, longt5.LONGT5_ENCODER)
}


def register_loaders() -> None:
    """Let `from_pretrained` of our classes load the checkpoints of every family that has a recipe."""
    FratriePreTrainedModel.foreign_loaders.update(dict.fromkeys(RECIPES, load_checkpoint))


_Model = TypeVar("_Model", bound=FratriePreTrainedModel)
# Arguments of `from_pretrained` that say where a checkpoint is, not what the model is.
_HUB_ARGUMENTS = (
    *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"),
)
_WEIGHT_ARGUMENTS = ("key_mapping", "state_dict", "use_safetensors", "variant")
# Hugging Face's own logger, so that its verbosity also holds for what is logged here, as for its loading report.
_logger = transformers_logging.get_logger()


def find_recipe(model_type: str, model_class: type[PreTrainedModel] | str | None = None) -> tuple[Recipe, Head]:
    """Find the recipe of a family, and in it the head of a class.

    A class that is derived from one of a head has that head. A class that the code of a checkpoint defines anew is
    known by its name alone.

    Args:
        model_type: what Hugging Face calls the family.
        model_class: a class of theirs or ours or its name; by default the bare model.

    Returns:
        The recipe and the head.

    Raises:
        ValueError: there is none.
    """
    if model_type not in RECIPES:
        raise ValueError(f"No recipe for model type {model_type!r}; there are {', '.join(RECIPES)}.")
    recipes = [recipes[model_type] for recipes in (RECIPES, STACK_RECIPES) if model_type in recipes]
    pairs = [(recipe, head) for recipe in recipes for head in recipe.heads]
    if model_class is None:
        return pairs[0]
    name, bases = (model_class, ()) if isinstance(model_class, str) else (model_class.__name__, model_class.__mro__)
    for sought in (*bases, name):
        for recipe, head in pairs:
            if sought in (head.ours, head.their_class, head.ours.__name__, head.theirs):
                return recipe, head
    is_ours = FratriePreTrainedModel in bases
    known = ", ".join(head.ours.__name__ if is_ours else head.theirs for _, head in pairs)
    raise ValueError(f"{name} has no counterpart for model type {model_type!r}; {known} have.")


def from_hf(model: PreTrainedModel) -> FratriePreTrainedModel:
    """Convert a Hugging Face model into ours, which has the same weights and computes the same outputs.

    Args:
        model: a model whose head ours has too; it is not changed, and shares no memory with the result.

    Returns:
        Our model.

    Raises:
        ValueError: a class, a field or a weight has no counterpart; the message names it.
    """
    if isinstance(model, FratriePreTrainedModel):
        raise ValueError(f"{type(model).__name__} is already one of our models: to_hf converts it into one of theirs.")
    _require_weights(model)
    recipe, head = find_recipe(model.config.model_type, type(model))
    config = _read_config(recipe, head, model)
    ours = _build(head.ours, config, recipe.read_weights(model.state_dict(), head, model.config), model)
    _keep_generation_config(model, ours)
    return ours


def to_hf(model: FratriePreTrainedModel, model_type: str | None = None) -> PreTrainedModel:
    """Convert our model into Hugging Face's, which has the same weights and computes the same outputs.

    Args:
        model: one of ours; it is not changed, and shares no memory with the result.
        model_type: the family to convert it to; by default the one it was converted from.

    Returns:
        The Hugging Face model.

    Raises:
        ValueError: the family lacks something that the model has; the message names it.
    """
    if not isinstance(model, FratriePreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not one of our models: convert it with from_hf.")
    _require_weights(model)
    model_type = model_type or (model.config.foreign_fields or {}).get("model_type")
    if model_type is None:
        raise ValueError(f"This model was not converted: give a model_type, one of {', '.join(RECIPES)}.")
    recipe, head = find_recipe(model_type, type(model))
    config = recipe.write_config(model.config, head)
    states = recipe.write_weights(model.state_dict(), head, config)
    computed = recipe.computed_weights(head)
    arguments = {"add_pooling_layer": model.config.pooler_activation is not None} if head.pooler else {}
    for name, value in recipe.unsaid(model.config, config, head).items():
        _logger.warning(f"{name}={value!r} has no place in a {model_type!r} model.")
    theirs = _build(head.their_class, config, states, model, computed, **arguments)
    unread = recipe.computed_weights(head, with_formulas=False)
    for name, weight in theirs.named_parameters():
        if name in unread and weight.ndim > 1:
            _logger.warning(f"{name} is drawn anew: no output of a {head.theirs} depends on it, so ours has none.")
    _keep_generation_config(model, theirs)
    return theirs


def load_checkpoint(
    our_class: type[_Model],
    name: str | os.PathLike[str],
    config: PreTrainedConfig | str | os.PathLike[str] | None = None,
    *,
    their_fields: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a Hugging Face checkpoint into one of our classes, as `our_class.from_pretrained` does.

    Weights of a head that the checkpoint lacks are initialised and reported as missing. Weights that the class does
    not use are reported under the names that they have in the checkpoint.

    Args:
        our_class: the class to load into.
        name: folder or hub id of the checkpoint.
        config: a configuration to use instead of the checkpoint's: ours, theirs, or a folder or hub id with one.
        their_fields: the content of the checkpoint's config.json, if it has been read already.
        **kwargs: as for `from_pretrained`; without `config`, fields of our configuration to change.

    Returns:
        Our model, or with `output_loading_info=True` the model and the report of its loading.

    Raises:
        ValueError: a class, a field or a weight has no counterpart (the message names it), or the weights are pickled
            and `use_safetensors=False` was not given.
    """
    hub = {key: kwargs.pop(key) for key in _HUB_ARGUMENTS if key in kwargs}
    weights = {key: kwargs.pop(key) for key in _WEIGHT_ARGUMENTS if key in kwargs}
    if isinstance(config, (str, os.PathLike)):
        config = cast(PreTrainedConfig, AutoConfig.from_pretrained(config, trust_remote_code=False))
    is_theirs = getattr(config, "model_type", None) in RECIPES
    their_config: Any = config if is_theirs else _their_config(name, their_fields, hub)
    if getattr(their_config, "quantization_config", None):
        raise ValueError(f"{name} is quantised: convert the checkpoint that it was made from.")
    recipe, head = find_recipe(their_config.model_type, our_class)
    if recipe.renamed:
        weights.setdefault("key_mapping", dict(recipe.renamed))
    weights["dtype"] = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
    theirs, report = _load_theirs(head, name, their_config, hub | weights)
    if report["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
        key, saved, built = min(report["mismatched_keys"])
        raise ValueError(
            f"{name}: the weights {key} are {tuple(saved)}, and {tuple(built)} by the configuration: correct that, or "
            "initialise them with ignore_mismatched_sizes=True."
        )
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if config is None or is_theirs:
        config = _read_config(recipe, head, theirs, missing)
        config = _as_class(cast(Any, our_class.config_class), config)
        config = config if is_theirs else _change_fields(config, kwargs)
    states = recipe.read_weights(_take_states(theirs, missing), head, theirs.config)
    with without_bars():  # theirs have been shown
        loaded = our_class.from_pretrained(None, config=config, state_dict=states, dtype=theirs.dtype, **kwargs)
    ours = loaded[0] if isinstance(loaded, tuple) else loaded
    if unread := sorted(report["unexpected_keys"]):
        _logger.warning(f"{name}: {our_class.__name__} has no use for {len(unread)} weights, such as {unread[0]}.")
    if isinstance(loaded, tuple):
        loaded[1]["unexpected_keys"] = {*loaded[1]["unexpected_keys"], *unread}
    ours.name_or_path = ours.config.name_or_path = str(name)
    _keep_generation_config(theirs, ours)
    return loaded


def _their_config(
    name: str | os.PathLike[str], their_fields: dict[str, Any] | None, hub: dict[str, Any]
) -> PreTrainedConfig:
    """Their configuration, made from fields that have been read, or else read by `AutoConfig`."""
    if their_fields is not None:
        their_class = RECIPES[their_fields["model_type"]].their_config
        # AutoConfig takes a Mistral with types of layers for another family.
        if "layer_types" not in their_fields.keys() - {f.name for f in fields(their_class)}:
            return their_class.from_dict(their_fields, name_or_path=name)
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(name, trust_remote_code=False, **hub))


def _load_theirs(
    head: Head, name: str | os.PathLike[str], config: PreTrainedConfig, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load their model, and report mismatched sizes instead of raising them.

    Raises:
        ValueError: the weights are pickled, or the configuration names something unknown.
        OSError: there is no checkpoint.
    """
    arguments = {"ignore_mismatched_sizes": True, "output_loading_info": True, **arguments}
    arguments["use_safetensors"] = arguments.get("use_safetensors") is not False
    try:
        with without_reports():
            return cast(Any, head.their_class.from_pretrained(name, config=config, **arguments))
    except OSError as error:
        if "safetensors" not in str(error) or not list(Path(name).glob("**/pytorch_model*.bin")):
            raise
        raise ValueError(
            f"{name} has only pickled weights (pytorch_model.bin), which are read on request: "
            "from_pretrained(…, use_safetensors=False); save_pretrained then writes them as safetensors."
        ) from error
    except KeyError as error:
        raise ValueError(f"{name}: its configuration names {error}, which transformers does not know.") from error


def _take_states(model: PreTrainedModel, missing: Collection[str]) -> States:
    """Take the weights of a model, but for the missing ones, out of it: then each is freed when it is dropped."""
    states = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    model.to("meta")  # type: ignore[arg-type] # transformers wraps it
    return states


def _require_weights(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{kind} is not a model of transformers. Folders and hub ids are read by from_pretrained of our classes; "
            "for a PEFT model, call merge_and_unload() first."
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError(f"This {kind} is on the meta device: it has no weights to convert.")
    if any(type(weight.data) is not torch.Tensor for weight in model.parameters()):
        raise ValueError(f"This {kind} is quantised or split over devices: convert the original model.")


def _as_class(config_class: type[PreTrainedConfig], config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration in the class that a user derived from ours, whose further fields have their defaults."""
    if type(config) is config_class:
        return config
    return config_class.from_dict({**config.to_dict(), "model_type": config_class.model_type})


def _change_fields(config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """Change the fields of a configuration that `kwargs` names, and remove them from `kwargs`."""
    names = {*(f.name for f in fields(config)), "num_labels", "output_attentions"} & kwargs.keys()
    changed = {name: kwargs.pop(name) for name in names}
    return type(config).from_dict(config.to_dict(), **changed) if changed else config


def _build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    states: States,
    like: PreTrainedModel,
    computed: Collection[str] = (),
    **kwargs: Any,
) -> Any:
    """Build a model with the dtype, device and mode of another.

    Args:
        model_class: its class.
        config: its configuration.
        states: its weights, except for the computed ones.
        like: the model that it is converted from.
        computed: names of weights that the class makes itself.
        **kwargs: for `from_pretrained`.

    Raises:
        ValueError: the weights do not fit the configuration.
    """
    shared = {tensor.untyped_storage().data_ptr() for tensor in like.state_dict().values()}
    states = {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in shared else tensor
        for name, tensor in states.items()
    }
    kwargs |= {"dtype": like.dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with without_reports(), without_bars():
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
    # Otherwise it would be saved under the names it was built from, not in the format of its family's checkpoints.
    model._weight_conversions = None
    return model.to(like.device).train(like.training)


def _keep_dtypes(model: PreTrainedModel, states: States) -> None:
    """Restore the dtype of each weight, such as norms in float32, where the computation supports it."""
    rounded = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in states or tensor.dtype == states[name].dtype:
            continue
        is_matrix = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
        bits, given = torch.finfo(tensor.dtype).bits, torch.finfo(states[name].dtype).bits
        if not is_matrix or bits > given:  # a matrix of higher precision supports both
            tensor.data = states[name]
        elif bits < given:
            rounded.append(name)  # a matrix must have the dtype of its input
    if rounded:
        _logger.warning(
            f"{len(rounded)} matrices, such as {rounded[0]}, are rounded to {model.dtype} like the others."
        )


def _read_config(
    recipe: Recipe, head: Head, theirs: PreTrainedModel, missing: Collection[str] = ()
) -> PreTrainedConfig:
    """Make our configuration from their model, which alone shows some of it.

    That is whether there is a pooler, and whether output layer and input embedding are tied: the configurations of
    T5 1.1 say that they are, but the checkpoints have two matrices.
    """
    config = recipe.read_config(theirs.config, head)
    for name in SPECIAL_TOKENS:
        token_ids = getattr(theirs.config, name, None)
        if token_ids not in (None, getattr(config, name, None)):
            _logger.warning(f"{name}={token_ids} lies outside the vocabulary: kept for converting back, but not used.")
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
