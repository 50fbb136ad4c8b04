"""What fields of a stack's configuration fit together, and what is said of those that do not."""

import difflib
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .base_configuration import require_tokens_in_vocabulary
from .calibration import check_points

if TYPE_CHECKING:
    from .configuration import FratrieConfig
    from .mixer import Mixer

# No size, number of tokens or factor comes near to it; torch counts up to 2**63.
_BEYOND_ALL = 1e18

_FLOAT32_PARTS = {"rotations", "expert_weights", "down_proj"}


def mixer_registry() -> dict[str, type["Mixer"]]:
    """The mixers by name; imported here, since they are built on configurations."""
    from .mixers import MIXERS

    return MIXERS


def require(condition: bool, message: str) -> None:
    """Raise a `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_finite_numbers(config: PreTrainedConfig) -> None:
    """Refuse fields that are infinite, no number or beyond what torch counts, and a negative `initializer_range`.

    Raises:
        ValueError: with the field and its value.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int | float):
            require(math.isfinite(value), f"{field.name}={value} must be finite.")
            require(abs(value) < _BEYOND_ALL, f"{field.name}={value} must be below {_BEYOND_ALL:.0e}.")
    require(config.initializer_range >= 0, f"initializer_range={config.initializer_range} must not be negative.")


def check_stack(config: "FratrieConfig") -> None:
    """Refuse contradictory fields of a `FratrieConfig`.

    Raises:
        ValueError: with the field, its value and the way out.
    """
    _check_sizes(config)
    _check_positions(config)
    _check_mixers(config)
    _check_feed_forward(config)
    _check_head(config)


def _check_sizes(config: "FratrieConfig") -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                 "num_key_value_heads", "intermediate_size", "max_position_embeddings",
                 "linear_chunk_size"):  # fmt: skip
        value = getattr(config, name)
        # Hugging Face makes configurations without a width or a vocabulary; only a model of them is refused.
        may_be_empty = name == "vocab_size" or (name in ("hidden_size", "head_dim") and config.hidden_size == 0)
        least = 0 if may_be_empty else 1
        require(value is not None and value >= least, f"{name}={value} must be at least 1.")
    require(
        config.num_attention_heads % (config.num_key_value_heads or 1) == 0,
        f"num_attention_heads={config.num_attention_heads} is not a multiple of num_key_value_heads="
        f"{config.num_key_value_heads}: each key-value head serves the same number of query heads.",
    )
    for name in ("embedding_dropout", "hidden_dropout", "attention_dropout", "activation_dropout",
                 "classifier_dropout"):  # fmt: skip
        value = getattr(config, name)
        require(0 <= value < 1, f"{name}={value} must lie in [0, 1).")
    require_finite_numbers(config)
    require(config.norm_eps > 0, f"norm_eps={config.norm_eps} must be positive.")
    require(
        config.attention_scale is None or config.attention_scale > 0,  # kernels hide keys before they scale
        f"attention_scale={config.attention_scale} must be positive.",
    )
    require_tokens_in_vocabulary(config, config.vocab_size)


def _check_positions(config: "FratrieConfig") -> None:
    uses = {"position_offset": ("learned", 0), "sinusoid_layout": ("sinusoidal", "interleaved"),
            "rope_interleaved": ("rotary", False), "axial_shape": ("axial", None),
            "axial_dims": ("axial", None)}  # fmt: skip
    for name, (kind, neutral) in uses.items():
        require(
            config.position_type == kind or getattr(config, name) == neutral,
            f"{name}={getattr(config, name)!r} has no use with position_type={config.position_type!r}: leave it out, "
            f"or set position_type={kind!r}.",
        )
    require(config.position_offset >= 0, f"position_offset={config.position_offset} must not be negative.")
    _check_axial(config)
    if config.position_type == "sinusoidal":
        require(config.hidden_size % 2 == 0, f"sinusoidal positions need an even hidden_size, not "
                      f"{config.hidden_size}.")  # fmt: skip
    if config.position_type == "rotary":
        require((config.head_dim or 0) % 2 == 0, f"rotary positions need an even head_dim, not {config.head_dim}.")
        _check_rotary(config)
    if config.position_type == "relative":
        directions = 1 if config.is_causal_stack else 2
        exact = config.relative_num_buckets // directions // 2
        require(
            exact >= 1 and config.relative_max_distance > exact,
            f"relative_num_buckets={config.relative_num_buckets} and relative_max_distance="
            f"{config.relative_max_distance} leave no room: use at least {2 * directions} buckets and a distance "
            f"above {exact}.",
        )


def _check_axial(config: "FratrieConfig") -> None:
    for name in ("axial_shape", "axial_dims"):
        value = getattr(config, name)
        require(
            value is None or (len(value) == 2 and min(value) >= 1),
            f"{name}={value} must be two positive numbers: of the rows and of the columns of the grid.",
        )
    require(
        config.axial_shape is None or math.prod(config.axial_shape) >= config.max_position_embeddings,
        f"axial_shape={config.axial_shape} has no place for max_position_embeddings={config.max_position_embeddings}: "
        "make the grid larger, or this number smaller.",
    )
    require(
        config.axial_dims is None or sum(config.axial_dims) == config.hidden_size,
        f"axial_dims={config.axial_dims} must sum to hidden_size={config.hidden_size}.",
    )
    require(
        config.position_type != "axial" or config.hidden_size != 1,
        f"axial positions need a hidden_size of at least 2, not {config.hidden_size}.",
    )


def _check_rotary(config: "FratrieConfig") -> None:
    parameters: dict[Any, Any] = dict(config.rope_parameters or {})
    # Hugging Face completes sets for layer types that the model has not into one set for all.
    one_set = "rope_type" in parameters and not any(isinstance(value, dict) for value in parameters.values())
    types = set(config.layer_types or [])
    require(
        one_set or (set(parameters) == types and all(parameters.values())),
        f"rope_parameters={parameters} must be one set, or one for each of the layer types {sorted(types)}; "
        "a set is, for example, {'rope_type': 'default', 'rope_theta': 10000.0}.",
    )
    known = ["default", *ROPE_INIT_FUNCTIONS]
    for rope in [parameters] if one_set else parameters.values():
        require(
            isinstance(rope, dict) and {"rope_type", "rope_theta"} <= rope.keys(),
            f"rope_parameters={parameters} must name a rope_type, such as 'default', and a rope_theta, such as "
            "10000.0.",
        )
        require(rope["rope_type"] in known, f"rope_type={rope['rope_type']!r} is unknown: use {', '.join(known)}.")


def _check_mixers(config: "FratrieConfig") -> None:
    for names in (("layer_types", "mixer_types"), ("mlp_layer_types",)):
        for name in names:
            entries = len(getattr(config, name) or [])
            require(
                entries == config.num_hidden_layers,
                f"{' or '.join(names)} has {entries} entries for num_hidden_layers={config.num_hidden_layers}: give "
                "one per layer.",
            )
    mixers = config.mixers
    for index, (layer_type, mixer) in enumerate(zip(config.layer_types or [], mixers, strict=True)):
        place = f"mixer_types[{index}]={(config.mixer_types or [])[index]!r}"
        require(
            layer_type in mixer.layer_types,
            f"{place} runs under {', '.join(mixer.layer_types)}, not under layer_types[{index}]={layer_type!r}: give "
            "one of the two lists alone, or make them agree.",
        )
        runs = mixer.runs_causal if config.is_causal_stack else mixer.runs_bidirectional
        direction = "causal" if config.is_causal_stack else "bidirectional"
        require(runs, f"{place} cannot be part of a {direction} stack: choose another mixer.")
        require(
            mixer.takes_position_bias or config.position_type not in ("relative", "alibi"),
            f"layer_types[{index}]={layer_type!r} takes no position bias, as position_type="
            f"{config.position_type!r} needs: choose another position_type, or another layer type.",
        )
        mixer.check(config, layer_type)
    for name, mixer in mixer_registry().items():
        _check_unused_fields(config, name, mixer)
    require(
        config.first_input_norm or config.mixer_input_norm is not None,
        "first_input_norm=False has no use without mixer_input_norm.",
    )
    require(
        not config.norm_after_residual or bool(config.mixer_output_norm or config.feed_forward_output_norm),
        "norm_after_residual=True has no use without mixer_output_norm or feed_forward_output_norm.",
    )
    require(
        not (config.reversible and config.norm_after_residual),
        "reversible=True adds branches to streams as they are, but norm_after_residual=True norms the sum: use "
        "norm_slots('pre') or norm_slots('sandwich').",
    )
    require(
        not (config.reversible and config.num_experts),
        f"reversible=True computes layers anew, where the losses of a router would lose their gradient: leave out "
        f"num_experts={config.num_experts}.",
    )


def _check_unused_fields(config: "FratrieConfig", name: str, mixer: type["Mixer"]) -> None:
    read = {field for each in config.mixers for field in each.own_fields}  # mixers may share fields
    unread = [field for field in mixer.own_fields if field not in read]
    values = {field: getattr(config, field, None) for field in unread}
    given = {field: value for field, value in values.items() if value is not None and value is not False}
    if not given:
        return
    enabling = mixer.enabled_by
    require(enabling is None or enabling in given, f"{given} have no use without {enabling}.")
    said = ", ".join(f"{field}={value}" for field, value in given.items())
    has = "has" if len(given) == 1 else "have"
    raise ValueError(
        f"{said} {has} no use without a {mixer.layer_types[0]!r} layer in layer_types={config.layer_types} whose "
        f"mixer is {name!r}."
    )


def _check_feed_forward(config: "FratrieConfig") -> None:
    for name in ("hidden_act", "classifier_activation", "head_activation", "pooler_activation"):
        activation = getattr(config, name, None)
        if activation is None:
            continue
        close = difflib.get_close_matches(activation, ACT2FN, n=3)
        hint = f": did you mean {', '.join(close)}?" if close else f": choose from {', '.join(sorted(ACT2FN))}."
        require(activation in ACT2FN, f"{name}={activation!r} is unknown{hint}")
    for index, kind in enumerate(config.mlp_layer_types or []):
        require(kind in ("dense", "sparse"), f"mlp_layer_types[{index}]={kind!r} is unknown: use dense, sparse.")
    for name in ("num_experts", "num_shared_experts"):
        require(getattr(config, name) >= 0, f"{name}={getattr(config, name)} must not be negative.")
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        size = getattr(config, name)
        require(size is None or size > 0, f"{name}={size} must be at least 1.")
    for name in ("shared_expert_intermediate_size", "shared_experts_gate"):
        value = getattr(config, name)
        require(not value or config.num_shared_experts > 0, f"{name}={value} has no use without num_shared_experts.")
    sparse = "sparse" in (config.mlp_layer_types or [])
    require(
        set(config.float32_parts or ()) <= _FLOAT32_PARTS,
        f"float32_parts={config.float32_parts} must be of {sorted(_FLOAT32_PARTS)}.",
    )
    require(
        not sparse or config.num_experts > 0,
        f"mlp_layer_types has sparse layers, but num_experts={config.num_experts}: set num_experts.",
    )
    require(
        sparse or config.num_experts == 0,
        f"num_experts={config.num_experts} has no use without a 'sparse' layer in mlp_layer_types="
        f"{config.mlp_layer_types}: name one, or set num_experts=0.",
    )
    require(
        not sparse or 1 <= config.num_experts_per_tok <= config.num_experts,
        f"num_experts_per_tok={config.num_experts_per_tok} must lie between 1 and num_experts={config.num_experts}.",
    )
    require(
        sparse or config.num_shared_experts == 0,
        f"num_shared_experts={config.num_shared_experts} has no use without a 'sparse' layer.",
    )
    if sparse:
        _check_router(config)


def _check_router(config: "FratrieConfig") -> None:
    groups, chosen = config.router_num_groups, config.router_groups_per_tok
    require(
        1 <= chosen <= groups,
        f"router_groups_per_tok={chosen} must lie between 1 and router_num_groups={groups}.",
    )
    require(
        groups == 1 or (config.num_experts % groups == 0 and config.num_experts // groups >= 2),
        f"router_num_groups={groups} must divide num_experts={config.num_experts} into groups of two or more.",
    )
    require(
        config.num_experts_per_tok <= chosen * (config.num_experts // groups),
        f"num_experts_per_tok={config.num_experts_per_tok} experts cannot be found in router_groups_per_tok="
        f"{chosen} groups of {config.num_experts // groups}: allow more groups.",
    )
    for name in ("routed_scaling_factor", "router_norm_eps"):
        require(getattr(config, name) > 0, f"{name}={getattr(config, name)} must be positive.")


def _check_head(config: "FratrieConfig") -> None:
    known = (None, "regression", "single_label_classification", "multi_label_classification")
    require(
        config.problem_type in known,
        f"problem_type={config.problem_type!r} is unknown: use {', '.join(map(str, known[1:]))}.",
    )
    for name in ("pos_weight", "label_thresholds"):
        values = getattr(config, name)
        require(
            values is None or len(values) == config.num_labels,
            f"{name} has {len(values or [])} values for {config.num_labels} labels: give one per label.",
        )
    require(
        all(size > 0 for size in config.classifier_hidden_sizes or []),
        f"classifier_hidden_sizes={config.classifier_hidden_sizes} must be positive.",
    )
    require(
        bool(config.classifier_hidden_sizes) or (config.classifier_norm is None and config.classifier_bias),
        f"classifier_norm={config.classifier_norm!r} and classifier_bias={config.classifier_bias} have no use without "
        "classifier_hidden_sizes.",
    )
    require(
        config.pos_weight is None or config.problem_type in (None, "multi_label_classification"),
        f"pos_weight is for multi-label classification, but problem_type={config.problem_type!r}.",
    )
    require(
        all(0 < w < float("inf") for w in config.pos_weight or []), f"pos_weight={config.pos_weight} must be positive."
    )
    require(
        all(0 <= t <= 1 for t in config.label_thresholds or [] if not isinstance(t, str)),  # by order, not by name
        f"label_thresholds={config.label_thresholds} must lie in [0, 1].",
    )
    if config.label_calibration is not None:
        check_points(config.label_calibration, config.num_labels or 0)
