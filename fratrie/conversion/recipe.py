"""Recipes: how a family of Hugging Face models and our block name the same things, stated once for both directions.

A recipe is data: pairs of configuration fields, pairs of weights, and for each head of the family ours that computes
the same. `Recipe.read_config` and `Recipe.write_config` convert configurations, `Recipe.read_weights` and
`Recipe.write_weights` state dicts.
"""

import copy
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieConfig, FratrieDecoderConfig, FratrieEncoderConfig
from fratrie.modeling.decoder import FratrieDecoderForSequenceClassification, FratrieDecoderModel
from fratrie.modeling.encoder import (
    FratrieEncoderForImageClassification,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
)
from fratrie.modeling.pretrained import FratriePreTrainedModel
from fratrie.modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel

States = dict[str, torch.Tensor]

_BARE_MODELS = (FratrieEncoderModel, FratrieDecoderModel, FratrieSeq2SeqModel)
_CLASSIFIERS = (
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderForImageClassification,
    FratrieDecoderForSequenceClassification,
)
_WITH_HEAD_FIELDS = (FratrieEncoderForMaskedLM, FratrieSeq2SeqForConditionalGeneration)
# Fields of ours that no Hugging Face configuration has a word for, and that change neither weights nor outputs, except
# by a rounding in half precision, and `label_calibration`, of whose loss `unsaid` tells.
_OURS_ALONE = frozenset(
    {"unpad_inputs", "linear_chunk_size", "label_thresholds", "label_calibration", "pos_weight",
     "sparse_prediction", "chunked_loss", "foreign_fields", "initializer_range", "use_cache", "output_router_logits",
     "router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef", "pooler_activation", "float32_parts"}
)  # fmt: skip
_ROUTER_LOSSES = ("router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef")
_CLASSIFIER = frozenset(f.name for f in fields(FratrieConfig) if f.name.startswith("classifier_"))
_LANGUAGE_MODEL = frozenset({"head_activation", "head_bias", "lm_head_bias"})
_BASE_FIELDS = frozenset(f.name for f in fields(PreTrainedConfig))
_COMPARED = frozenset(
    f.name for config in (FratrieEncoderConfig, FratrieDecoderConfig) for f in fields(config)
) - (_BASE_FIELDS | _OURS_ALONE)  # fmt: skip
# Their configurations take every type that any model has; most of theirs and ours agree on two.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LABELS = ("id2label", "label2id", "problem_type")
_OF_LABELS = ("pos_weight", "label_thresholds", "label_calibration")
# Those that a model can do without; an unusable start of a decoder is refused, since there is no decoding without one.
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# What says nothing of the model itself.
_UNKEPT = frozenset(
    {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version", *_LABELS}
)


@dataclass(frozen=True)
class Field:
    """A field that both configurations have.

    Attributes:
        theirs: its name in the Hugging Face configuration.
        ours: its name or names in ours, all of one value; `"decoder.hidden_size"` is a field of a stack. By default
            the same name.
        values: pairs of their value and ours, where these differ.
        default: what `None` on their side stands for, from their configuration.
    """

    theirs: str
    ours: str | tuple[str, ...] = ()
    values: Mapping[Any, Any] | None = None
    default: Callable[[PreTrainedConfig], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Our names."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours or (self.theirs,)

    def read(self, theirs: PreTrainedConfig) -> Any:
        """Return our value, given their configuration.

        Raises:
            ValueError: ours has no such value.
        """
        value = getattr(theirs, self.theirs)
        if self.values is not None:
            if value not in self.values:
                raise ValueError(
                    f"{theirs.model_type}: {self.theirs}={value!r} has no counterpart; known are {[*self.values]}."
                )
            return self.values[value]
        return self.default(theirs) if value is None and self.default else value

    def write(self, ours: PreTrainedConfig) -> Any:
        """Return their value, given our configuration; if ours has several names, the first counts.

        Raises:
            ValueError: theirs has no such value.
        """
        value = look_up(ours, self.names[0])
        if self.values is None:
            return value
        for key, known in self.values.items():
            if known == value:
                return key
        raise ValueError(f"{self.names[0]}={value!r} has no counterpart; known are {[*self.values.values()]}.")


@dataclass(frozen=True)
class Groups:
    """How rows lie that one tensor of theirs has group by group, of heads for instance, and ours part by part.

    Attributes:
        number: of groups.
        rows: for each name of ours, the rows in one group of each of its parts, as they follow one another there.
    """

    number: int
    rows: tuple[tuple[int, ...], ...]

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make our tensors from theirs: of each part all groups, then the next part."""
        parts = iter(tensor.unflatten(0, (self.number, -1)).split([size for sizes in self.rows for size in sizes], 1))
        return tuple(torch.cat([next(parts).flatten(0, 1) for _ in sizes]) for sizes in self.rows)

    def join(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Make their tensor from ours."""
        parts = [
            part.unflatten(0, (self.number, -1))
            for tensor, sizes in zip(tensors, self.rows, strict=True)
            for part in tensor.split([self.number * size for size in sizes])
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Weight:
    """A module or a parameter that both models have; `*` stands for the number of a layer.

    Attributes:
        theirs: its name in the Hugging Face model, without `.weight` and `.bias`.
        ours: its name in ours; several if their matrix holds ours stacked; none if ours does not need it.
        transposed: their matrix is `(in, out)`.
        leading: their tensor has an additional first dimension, of size one.
        formula: what their tensor has to be, as a function of its rows and columns, where ours is computed.
        when: fields of their configuration, and the values with which the line holds.
        groups: how the rows of their tensor lie, from their configuration, where they do not follow the order of ours.
    """

    theirs: str
    ours: str | tuple[str, ...] = ()
    transposed: bool = False
    leading: bool = False
    formula: Callable[[int, int], torch.Tensor] | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    groups: Callable[[PreTrainedConfig], Groups] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Our names."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def holds(self, theirs: PreTrainedConfig) -> bool:
        """Whether the line is one for models of this configuration of theirs."""
        return all(getattr(theirs, name) == value for name, value in self.when.items())

    def read(self, tensor: torch.Tensor, theirs: PreTrainedConfig | None = None) -> tuple[torch.Tensor, ...]:
        """Make our tensors from theirs.

        Args:
            tensor: theirs.
            theirs: their configuration, of a line with groups.

        Returns:
            One tensor per name of ours.

        Raises:
            ValueError: ours computes this tensor, and theirs differs from it.
        """
        if self.formula is not None and not _is_rounded(tensor, self.formula(*tensor.shape)):
            raise ValueError(f"{self.theirs} has been changed: ours computes it, and cannot have another.")
        if not self.names:
            return ()
        if self.groups is not None:
            assert theirs is not None
            return self.groups(theirs).split(tensor)
        tensor = tensor.squeeze(0) if self.leading else tensor
        tensor = tensor.T if self.transposed and tensor.ndim == 2 else tensor
        return tuple(part.contiguous() for part in tensor.chunk(len(self.names)))

    def write(self, tensors: Iterable[torch.Tensor], theirs: PreTrainedConfig | None = None) -> torch.Tensor:
        """Make their tensor from ours (see `read`)."""
        if self.groups is not None:
            assert theirs is not None
            return self.groups(theirs).join(tensors)
        tensor = torch.cat(tuple(tensors))
        tensor = tensor.T if self.transposed and tensor.ndim == 2 else tensor
        return (tensor.unsqueeze(0) if self.leading else tensor).contiguous()


@dataclass(frozen=True)
class Head:
    """A class of the family and ours that computes the same.

    Attributes:
        theirs: name of their class.
        ours: our class.
        prefix: prefix of their bare model within theirs, such as `"bert."`.
        weights: the weights of the head.
        always: fields that ours has with this head.
        read: fields of ours as functions of their configuration.
        fields: pairs of fields that this head alone reads.
        pooler: the activation of their pooler, of a bare model that may have one.
    """

    theirs: str
    ours: type[FratriePreTrainedModel]
    prefix: str = ""
    weights: tuple[Weight, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Callable[[PreTrainedConfig], Any]] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    pooler: Callable[[PreTrainedConfig], str] | None = None

    @property
    def their_class(self) -> type[transformers.PreTrainedModel]:
        """Their class."""
        return getattr(transformers, self.theirs)

    @property
    def our_prefix(self) -> str:
        """Prefix of our bare model within ours."""
        return "" if issubclass(self.ours, _BARE_MODELS) else f"{self.ours.base_model_prefix}."


@dataclass(frozen=True)
class Recipe:
    """A family: its configurations, weights and heads, theirs beside ours.

    Attributes:
        model_type: what Hugging Face calls the family.
        config: our configuration class.
        fields: pairs of fields.
        always: fields that ours has for every model of the family.
        read: fields of ours as functions of their configuration.
        write: fields of theirs as functions of our configuration (`None`: leave it out). Whatever `read` and `write`
            do, `write_config` reads its result back and refuses a model that would come out as another one.
        neutral: fields that ours may have with another value than `always`, without another computation.
        renamed: names of weights in checkpoints of other classes of the family, as for Hugging Face's `key_mapping`.
        required: fields of theirs that must have this value, since ours cannot be otherwise.
        inert: fields of theirs that change neither weights nor outputs.
        layer_types: those that the family and ours agree on.
        weights: pairs of weights of the bare model.
        heads: the classes.
    """

    model_type: str
    config: type[PreTrainedConfig]
    fields: tuple[Field, ...]
    weights: tuple[Weight, ...]
    heads: tuple[Head, ...]
    always: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Callable[[PreTrainedConfig], Any]] = field(default_factory=dict)
    write: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    layer_types: frozenset[str] = _LAYER_TYPES

    @cached_property
    def their_config(self) -> type[PreTrainedConfig]:
        """Their configuration class."""
        return transformers.CONFIG_MAPPING[self.model_type]

    def read_config(self, theirs: PreTrainedConfig, head: Head) -> PreTrainedConfig:
        """Make our configuration from theirs.

        Args:
            theirs: their configuration.
            head: the class of the model.

        Returns:
            Our configuration.

        Raises:
            ValueError: ours cannot represent the value of a field; the message names it.
        """
        self._refuse_unknown(theirs, head)
        ours: dict[str, Any] = {**self.always, **head.always}
        for pair in (*self.fields, *head.fields):
            ours.update(dict.fromkeys(pair.names, pair.read(theirs)))
        ours.update({name: compute(theirs) for name, compute in {**self.read, **head.read}.items()})
        ours.update({name: getattr(theirs, name) for name in _LABELS if getattr(theirs, name, None)})
        vocabulary = ours.get("decoder.vocab_size", ours.get("vocab_size"))
        if vocabulary is not None:
            ours.update({name: _usable(ours[name], vocabulary) for name in SPECIAL_TOKENS if name in ours})
        config = cast(Any, self.config)(**copy.deepcopy(_nested(ours)))
        config.foreign_fields = {"model_type": self.model_type, **self._unwritten(theirs, config, head)}
        return config

    def write_config(self, ours: PreTrainedConfig, head: Head) -> PreTrainedConfig:
        """Make their configuration from ours.

        The fields kept from theirs stay as they were as long as the result says what ours says; once ours says
        something else, only those stay that the recipe does not write.

        Args:
            ours: our configuration.
            head: the class of the model.

        Returns:
            Their configuration.

        Raises:
            ValueError: theirs cannot represent the value of a field; the message names it.
        """
        ours = _written_out(ours)
        written, kept = self._write(ours, head), dict(ours.foreign_fields or {})
        if kept.pop("model_type", None) != self.model_type:
            kept = {}
        theirs = self._build({**written, **kept})
        if self._problem(ours, theirs, head):
            unwritten = {name: value for name, value in kept.items() if name not in {**self.write, **written}}
            theirs = self._build({**unwritten, **written})
        if problem := self._problem(ours, theirs, head):
            raise ValueError(problem)
        return cast(PreTrainedConfig, theirs)

    def _write(self, ours: PreTrainedConfig, head: Head) -> dict[str, Any]:
        """Fields of theirs that the recipe makes from ours."""
        written = {pair.theirs: pair.write(ours) for pair in (*self.fields, *head.fields)}
        written.update({name: getattr(ours, name) for name in _LABELS if getattr(ours, name, None)})
        written.update({name: value for name, compute in self.write.items() if (value := compute(ours)) is not None})
        return written

    def _build(self, their_fields: Mapping[str, Any]) -> PreTrainedConfig | str:
        """Build their configuration from these fields, or return the reason why their class refuses them."""
        try:
            return self.their_config(**copy.deepcopy(dict(their_fields)))
        except (StrictDataclassError, ValueError) as error:
            return f"There is no {self.model_type!r} model like it: {' '.join(str(error).split())}"

    def _unwritten(self, theirs: PreTrainedConfig, ours: PreTrainedConfig, head: Head) -> dict[str, Any]:
        """Fields of theirs that the recipe alone would write otherwise, or not at all."""
        written = self._build(self._write(ours, head))
        said = {} if isinstance(written, str) else written.to_dict()
        return {
            name: value
            for name, value in theirs.to_dict().items()
            if name not in _UNKEPT and (name not in said or _unlike(said[name], value))
        }

    def _problem(self, ours: PreTrainedConfig, theirs: PreTrainedConfig | str, head: Head) -> str:
        """Return what of our configuration theirs does not say, as a message; empty if it says everything."""
        if isinstance(theirs, str):
            return theirs
        try:
            read_back = _written_out(self.read_config(theirs, head))
            pooler = head.pooler(theirs) if head.pooler and ours.pooler_activation else None
        except ValueError as error:
            return f"A {self.model_type!r} model cannot have this: {str(error).rstrip('.')}."
        if "tie_word_embeddings" in self.inert:  # which the weights alone tell
            read_back.tie_word_embeddings = ours.tie_word_embeddings
        for name, value in self.neutral.items():
            if getattr(ours, name) == value:
                setattr(read_back, name, value)
        lost = _differences(ours, read_back, head)
        balance = "router_aux_loss_coef"
        if balance in self.read and not math.isclose(getattr(ours, balance), getattr(read_back, balance)):
            lost.append(f"{balance}={getattr(ours, balance)!r}")
        if pooler and pooler != ours.pooler_activation:
            lost.append(f"pooler_activation={ours.pooler_activation!r}")
        return f"A {self.model_type!r} model cannot have this: {', '.join(lost)}." if lost else ""

    def unsaid(self, ours: PreTrainedConfig, written: PreTrainedConfig, head: Head) -> dict[str, Any]:
        """Fields of ours that guide training and labelling, which `written`, their configuration of it, cannot say."""
        found = {name: value for name in _OF_LABELS if (value := getattr(ours, name, None))}
        if "sparse" in (getattr(ours, "mlp_layer_types", None) or ()):
            read_back = self.read_config(written, head)
            found |= {name: getattr(ours, name) for name in _ROUTER_LOSSES
                      if getattr(ours, name) != getattr(read_back, name) and name not in self.read}  # fmt: skip
        return found

    def read_weights(self, states: Mapping[str, torch.Tensor], head: Head, theirs: PreTrainedConfig) -> States:
        """Make our state dict from theirs.

        A tensor to which the caller keeps no reference is freed once ours is made from it.

        Args:
            states: their state dict.
            head: the class of the model.
            theirs: their configuration.

        Returns:
            Our state dict, without the second names of tied weights.

        Raises:
            ValueError: the recipe has no line for a weight; the message names it.
        """
        lines = self._lines(head, theirs)
        states = dict(states)
        ours, unknown, known = {}, {}, set()
        for name in list(states):
            tensor = states.pop(name)
            for rule, their_pattern, our_patterns in lines:
                if match := _fit(their_pattern, name):
                    parts = rule.read(tensor, theirs)
                    ours.update({_fill(p, match): part for p, part in zip(our_patterns, parts, strict=True)})
                    known.add(tensor.data_ptr())
                    break
            else:
                unknown[name] = tensor
        _refuse_all_but_copies(unknown, known, f"{head.theirs}: {head.ours.__name__}")
        return ours

    def write_weights(self, states: Mapping[str, torch.Tensor], head: Head, theirs: PreTrainedConfig) -> States:
        """Make their state dict from ours.

        Args:
            states: our state dict.
            head: the class of the model.
            theirs: their configuration.

        Returns:
            Their state dict, without the second names of tied weights. It shares no memory with ours.

        Raises:
            ValueError: the recipe has no line for a weight; the message names it.
        """
        lines = self._lines(head, theirs)
        written, unknown, known = {}, {}, set()
        for name, tensor in states.items():
            for rule, their_pattern, our_patterns in lines:
                match = next(filter(None, (_fit(pattern, name) for pattern in our_patterns)), None)
                if match is not None:
                    parts = [states[_fill(pattern, match)] for pattern in our_patterns]
                    written[_fill(their_pattern, match)] = rule.write(parts, theirs)
                    known.add(tensor.data_ptr())
                    break
            else:
                unknown[name] = tensor
        _refuse_all_but_copies(unknown, known, f"{head.ours.__name__}: {head.theirs}")
        return written

    def _lines(self, head: Head, theirs: PreTrainedConfig | None) -> list[tuple[Weight, str, list[str]]]:
        """The lines for a head and a configuration of theirs (`None`: all), with the full names of both sides."""
        body = [(rule, head.prefix + rule.theirs, [head.our_prefix + ours for ours in rule.names])
                for rule in self.weights]  # fmt: skip
        lines = [(rule, rule.theirs, list(rule.names)) for rule in head.weights] + body
        return [line for line in lines if theirs is None or line[0].holds(theirs)]

    def computed_weights(self, head: Head, with_formulas: bool = True) -> set[str]:
        """Names of their weights that no output depends on, or that a formula gives; their class makes them."""
        lines = self._lines(head, None)
        names = {line for rule, line, ours in lines if not ours and (with_formulas or rule.formula is None)}
        return names | {f"{name}.{part}" for name in names for part in ("weight", "bias")}

    def _inert_fields(self, head: Head) -> set[str]:
        """Fields of theirs that mean nothing to this head of ours."""
        others = {pair.theirs for other in self.heads for pair in other.fields}
        return {*self.inert, *(others - {pair.theirs for pair in head.fields})}

    def _known_fields(self, head: Head) -> set[str]:
        pairs = (*self.fields, *head.fields)
        known = {*(pair.theirs for pair in pairs), *self.write, *self.required, *_LABELS, *self._inert_fields(head)}
        return known | _BASE_FIELDS

    def _refuse_unknown(self, theirs: PreTrainedConfig, head: Head) -> None:
        wrong = [
            f"{name}={getattr(theirs, name)!r} (only {value!r})"
            for name, value in self.required.items()
            if getattr(theirs, name, value) != value
        ]
        default, known = self.their_config(), self._known_fields(head)
        for f in fields(theirs):
            if f.name not in known and getattr(theirs, f.name) != getattr(default, f.name):
                wrong.append(f"{f.name}={getattr(theirs, f.name)!r}")
        if set(getattr(theirs, "layer_types", None) or ()) - self.layer_types:
            wrong.append(f"layer_types={theirs.layer_types!r} (only {sorted(self.layer_types)})")
        if wrong:
            raise ValueError(f"Our block cannot represent this {self.model_type!r} model: {', '.join(wrong)}.")


def _is_rounded(tensor: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a tensor holds these numbers, perhaps after a time in half precision."""
    rounded = [exact.to(dtype).to(tensor) for dtype in (tensor.dtype, torch.float16, torch.bfloat16)]
    return any(torch.allclose(tensor, numbers, rtol=0, atol=4 * torch.finfo(tensor.dtype).eps) for numbers in rounded)


def _usable(token_ids: Any, vocab_size: int) -> Any:
    """Of an id of a special token, or a list of them, what the vocabulary has: others stand for nothing."""
    if isinstance(token_ids, list):
        return [token for token in token_ids if 0 <= token < vocab_size] or None
    return token_ids if token_ids is not None and 0 <= token_ids < vocab_size else None


def look_up(config: PreTrainedConfig, name: str) -> Any:
    """A field of a configuration or, by a dotted name, of one of its stacks."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def both(name: str) -> tuple[str, str]:
    """The field of this name of both stacks."""
    return f"encoder.{name}", f"decoder.{name}"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as dictionaries in a dictionary."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *stack, name = name.split(".")
        (nested.setdefault(stack[0], {}) if stack else nested)[name] = value
    return nested


def _unlike(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or one != other  # 0, 0.0 and False are written in three ways


def _written_out(ours: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a configuration and fill in the default of `head_activation`, which theirs must state."""
    ours = copy.copy(ours)
    if getattr(ours, "head_activation", "") is None:
        ours.head_activation = ours.hidden_act
    return ours


def _differences(ours: PreTrainedConfig, read_back: PreTrainedConfig, head: Head) -> list[str]:
    """Fields in which two of our configurations differ, as `name=value` of the first."""
    free = frozenset() if issubclass(head.ours, _CLASSIFIERS) else _CLASSIFIER
    if not issubclass(head.ours, _WITH_HEAD_FIELDS):
        free |= _LANGUAGE_MODEL
    different = []
    for stack in ("", "encoder.", "decoder.") if getattr(ours, "encoder", None) else ("",):
        pair = [look_up(config, stack[:-1]) if stack else config for config in (ours, read_back)]
        names = {f.name for f in fields(pair[0])} & (_COMPARED | _seq2seq_fields(stack)) - free
        if "sliding_attention" not in (getattr(pair[0], "layer_types", None) or ()):
            names -= {"sliding_window"}
        if getattr(pair[0], "position_type", None) == "relative":
            names -= {"max_position_embeddings"}
        different += [
            f"{stack}{name}={getattr(pair[0], name)!r}"
            for name in sorted(names)
            if getattr(pair[0], name) != getattr(pair[1], name)
        ]
    return different


def _seq2seq_fields(stack: str) -> frozenset[str]:
    return frozenset() if stack else frozenset({"share_embeddings", "scale_decoder_outputs", "decoder_start_token_id"})


def _refuse_all_but_copies(unknown: States, known: Collection[int], classes: str) -> None:
    """Refuse tensors without a line in the recipe, except for the second names of tied weights.

    Args:
        unknown: the tensors without a line.
        known: addresses of the others.
        classes: the two classes, for the message.

    Raises:
        ValueError: there is such a tensor.
    """
    strange = [name for name, tensor in unknown.items() if tensor.data_ptr() not in known]
    if strange:
        raise ValueError(f"{classes} has no counterpart for the weights {', '.join(strange)}.")


def _fit(pattern: str, name: str) -> tuple[str, ...] | None:
    """The numbers and the ending (`.weight`, `.bias` or nothing) of a name that fits a pattern."""
    regex = re.escape(pattern).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias|)"
    match = re.fullmatch(regex, name)
    return match.groups() if match else None


def _fill(pattern: str, numbers_and_ending: tuple[str, ...]) -> str:
    *numbers, ending = numbers_and_ending
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern + ending
