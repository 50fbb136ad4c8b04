"""Configurations of the three siblings: one set of shared fields, and what is particular to each."""

import difflib
from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .base_configuration import FratrieBaseConfig, reject_unknown_fields, require_tokens_in_vocabulary
from .mixers import MIXERS
from .plans import (
    Plan,
    expert_parallel_plan,
    pipeline_parallel_plan,
    sharded_data_parallel_plan,
    tensor_parallel_plan,
)

PositionType = Literal["learned", "sinusoidal", "rotary", "relative", "alibi", "none"]
NormType = Literal["layer_norm", "rms_norm"]
Pooling = Literal["first", "mean", "last"]
SinusoidLayout = Literal["interleaved", "halves"]
RouterScoring = Literal["softmax", "sigmoid"]


def norm_slots(position: Literal["pre", "post", "sandwich"], norm: NormType = "layer_norm") -> dict[str, Any]:
    """The norm fields of the three usual layouts, to be unpacked into a config.

    Args:
        position: `"pre"` normalises the input of each branch and the end of the stack (GPT-2, Llama), `"post"` the
            sum of residual and branch (Vaswani et al. 2017, BERT), `"sandwich"` the input and the output of each
            branch before the sum, and the end of the stack (Ding et al. 2021).
        norm: the kind of every norm.

    Returns:
        The config fields, for example `FratrieEncoderConfig(**norm_slots("pre", "rms_norm"))`.
    """
    if position not in ("pre", "post", "sandwich"):
        raise ValueError(f"Unknown norm position {position!r}: use 'pre', 'post' or 'sandwich'.")
    before = None if position == "post" else norm
    after = None if position == "pre" else norm
    return {
        "mixer_input_norm": before,
        "mixer_output_norm": after,
        "feed_forward_input_norm": before,
        "feed_forward_output_norm": after,
        "norm_after_residual": position == "post",
        "embedding_norm": None,
        "final_norm": None if position == "post" else norm,
    }


@strict
class FratrieConfig(FratrieBaseConfig):
    """The fields that every stack of blocks shares; the siblings derive from it.

    Unknown fields and contradictory combinations raise a `ValueError` that holds the value and the way out.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: number H of query heads.
        num_key_value_heads: number K of key and value heads: H (multi-head, the default), a divisor of H (grouped,
            Ainslie et al. 2023) or 1 (multi-query, Shazeer 2019).
        head_dim: size C of a head; `hidden_size / num_attention_heads` by default.
        intermediate_size: width F of the feed-forward.
        hidden_act: any activation that transformers knows.
        gated_feed_forward: gate the feed-forward (GLU variants, Shazeer 2020): SwiGLU with `hidden_act="silu"`,
            GeGLU with `"gelu"`.
        feed_forward_bias, attention_bias, attention_output_bias, norm_bias: biases of the feed-forward, of query,
            key and value, of the attention output, of LayerNorm.
        attention_scale: factor of the attention scores; `head_dim ** -0.5` by default.
        query_key_norm: norm of each query and key head (Henry et al. 2020).
        kv_lora_rank: let the full-attention layers keep keys and values as a latent vector of this size a token
            (multi-head latent attention, DeepSeek-AI 2024). A query or key head then has `head_dim` numbers that
            rotary positions turn and `qk_nope_head_dim` that they do not.
        q_lora_rank: size of a latent vector between the hidden state and its queries; none by default.
        qk_nope_head_dim, v_head_dim: with latents, the unturned part of a query or key head, and the size of a value
            head; `head_dim` by default.
        position_type: `"learned"`, `"sinusoidal"` (Vaswani et al. 2017), `"rotary"` (Su et al. 2021), `"relative"`
            (the bucketed bias of T5, Raffel et al. 2020), `"alibi"` (Press et al. 2022) or `"none"`.
        max_position_embeddings: number of learned positions, and the length the other kinds are meant for.
        position_offset: rows of the learned table before that of the first position (RoBERTa and BART keep two that no
            token uses); the table has `max_position_embeddings + position_offset` rows.
        sinusoid_layout: sines and cosines in turn (`"interleaved"`), or all sines before all cosines (`"halves"`).
        rope_parameters: Hugging Face's description of the rotary embedding (`rope_type`, `rope_theta`, …): one for
            all layers, or one a layer type.
        rope_interleaved: turn neighbouring numbers of a head as pairs (Su et al. 2021), not those half a head apart.
        relative_num_buckets, relative_max_distance: size of the relative bias table, and the distance from which all
            positions share a bucket.
        layer_types: one of `"full_attention"`, `"sliding_attention"`, `"linear_attention"` a layer (all full by
            default). It names the mixer of the layer.
        sliding_window: reach of the sliding layers: the last `sliding_window` tokens where causal (two at least),
            that many to each side where bidirectional. Other layers do not read it.
        linear_chunk_size: chunk of the causal linear attention, in tokens; changes speed and memory only.
        mixer_input_norm, mixer_output_norm, feed_forward_input_norm, feed_forward_output_norm: `"layer_norm"`,
            `"rms_norm"` or `None` in the four slots of a block. `norm_slots` fills them for the usual layouts.
        first_input_norm: whether the first block, too, has the norm before its mixer; ModernBERT leaves it out, its
            embeddings being normed already (Warner et al. 2024).
        norm_after_residual: the output norms act on the sum of residual and branch (post-norm) instead of on the
            branch alone.
        embedding_norm, final_norm: norm after the embeddings, and after the last block.
        norm_eps: epsilon of every norm.
        mlp_layer_types: `"dense"` or `"sparse"` (mixture of experts) a layer; all dense by default.
        num_experts, num_experts_per_tok: number E of experts, and how many each token is sent to.
        moe_intermediate_size: width of an expert; `intermediate_size` by default.
        num_shared_experts: experts that every token passes besides the chosen ones (Dai et al. 2024).
        norm_topk_prob: let the weights of the chosen experts sum to one.
        router_scoring: how logits of the router become weights: `"softmax"` over the experts, or `"sigmoid"` of each.
        router_selection_bias: add a bias an expert to what experts are chosen by, not to their weights; no gradient
            reaches it (Wang et al. 2024).
        router_num_groups, router_groups_per_tok: choose the experts of a token within its best groups of experts
            (DeepSeek-AI 2024): number of groups, and how many of them a token may use.
        routed_scaling_factor: factor of the weights of the chosen experts.
        router_aux_loss_coef, router_z_loss_coef: weights of the load-balancing loss (Fedus et al. 2021) and of the
            router's z loss (Zoph et al. 2022) in the training loss; by default 0.01 with sparse layers, and 0.
        output_router_logits: return the router logits.
        embedding_dropout, hidden_dropout, attention_dropout, activation_dropout: dropout after the embeddings, of
            each residual branch, of the attention weights, inside the feed-forward.
        scale_embeddings: multiply the token embeddings by `sqrt(hidden_size)`.
        tie_word_embeddings: let the output layer share the input embedding.
        initializer_range: standard deviation of the initial weights.
        unpad_inputs: take padding out of a batch before the first layer (equal outputs for real tokens, less work).
        pad_token_id, bos_token_id, eos_token_id: special tokens.
        classifier_pooling: what a sentence is classified by: its `"first"` token, the `"mean"` or the `"last"` of its
            real tokens.
        classifier_hidden_sizes: widths of dense layers before the output layer (none by default).
        classifier_activation: their activation.
        classifier_norm: norm after each dense layer's activation.
        classifier_bias, classifier_output_bias: biases of the dense layers, and of the output layer.
        classifier_dropout: dropout before each of the head's layers.
        pos_weight: weight of the positives of each label in the multi-label loss.
        label_thresholds: probability above which each label is given (0.5 by default), read by the scripts and by the
            family-relations pipeline.
        foreign_fields: of a converted model, the fields of its Hugging Face configuration that say nothing about what
            it computes, kept for the way back (`fratrie.conversion`).
    """

    default_theta = 10_000.0
    is_causal_stack: ClassVar[bool] = False

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 1024
    hidden_act: str = "gelu"
    gated_feed_forward: bool = False
    feed_forward_bias: bool = True
    attention_bias: bool = True
    attention_output_bias: bool = True
    norm_bias: bool = True
    attention_scale: float | int | None = None
    query_key_norm: NormType | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None

    position_type: PositionType = "learned"
    max_position_embeddings: int = 512
    position_offset: int = 0
    sinusoid_layout: SinusoidLayout = "interleaved"
    rope_parameters: RopeParameters | dict | None = None
    rope_interleaved: bool = False
    relative_num_buckets: int = 32
    relative_max_distance: int = 128

    layer_types: list[str] | None = None
    sliding_window: int | None = None
    linear_chunk_size: int = 64

    mixer_input_norm: NormType | None = None
    mixer_output_norm: NormType | None = None
    feed_forward_input_norm: NormType | None = None
    feed_forward_output_norm: NormType | None = None
    first_input_norm: bool = True
    norm_after_residual: bool = False
    embedding_norm: NormType | None = None
    final_norm: NormType | None = None
    norm_eps: float | int = 1e-5

    mlp_layer_types: list[str] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    norm_topk_prob: bool = True
    router_scoring: RouterScoring = "softmax"
    router_selection_bias: bool = False
    router_num_groups: int = 1
    router_groups_per_tok: int = 1
    routed_scaling_factor: float | int = 1.0
    router_aux_loss_coef: float | int | None = None
    router_z_loss_coef: float | int = 0.0
    output_router_logits: bool = False

    embedding_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0

    scale_embeddings: bool = False
    tie_word_embeddings: bool = True
    initializer_range: float | int = 0.02
    unpad_inputs: bool = True

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    classifier_pooling: Pooling = "mean"
    classifier_hidden_sizes: list[int] | None = None
    classifier_activation: str = "tanh"
    classifier_norm: NormType | None = None
    classifier_bias: bool = True
    classifier_output_bias: bool = True
    classifier_dropout: float | int = 0.0
    pos_weight: list[float] | None = None
    label_thresholds: list[float] | None = None
    foreign_fields: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        reject_unknown_fields(self, kwargs)
        rotary = self.position_type == "rotary"
        given_rope = [name for name in ("rope_parameters", "rope_theta", "rope_scaling") if kwargs.get(name)]
        if not rotary and (self.rope_parameters or given_rope):
            raise ValueError(
                f"rope_parameters={self.rope_parameters or kwargs[given_rope[0]]} has no use with "
                f"position_type={self.position_type!r}: remove it, or set position_type='rotary'."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            self._require(
                self.hidden_size % self.num_attention_heads == 0,
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}: "
                "change one of them, or set head_dim.",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.kv_lora_rank is not None:
            self.qk_nope_head_dim = self.head_dim if self.qk_nope_head_dim is None else self.qk_nope_head_dim
            self.v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        if self.layer_types is None:
            self._require(
                self.sliding_window is None,
                f"sliding_window={self.sliding_window} has no use without a 'sliding_attention' layer: name them in "
                "layer_types.",
            )
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse" if self.num_experts else "dense"] * self.num_hidden_layers
        if self.router_aux_loss_coef is None:  # trl asks by it for router logits, which a dense model lacks
            self.router_aux_loss_coef = 0.01 if "sparse" in self.mlp_layer_types else 0.0
        super().__post_init__(**kwargs)
        if not rotary:  # Hugging Face fills in a default wherever the field exists.
            self.rope_parameters = None
        self.validate_architecture()  # here, since what `strict` raises is no ValueError

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of saved fields and changed ones (see Hugging Face's method).

        Fewer `num_hidden_layers` are the first ones. Hugging Face would set what changes after the construction,
        without the defaults that follow from it.
        """
        changed = {name: kwargs.pop(name) for name in _STACK_FIELDS & kwargs.keys()}
        if changed.get("num_hidden_layers") is not None:
            config_dict = _first_layers(config_dict, changed["num_hidden_layers"])
        return super().from_dict({**config_dict, **changed}, **kwargs)

    def validate_architecture(self) -> None:
        """Refuse contradictory fields; called at construction, when a model is built, and before saving.

        Raises:
            ValueError: with the field, its value and the way out.
        """
        self._validate_sizes()
        self._validate_positions()
        self._validate_mixers()
        self._validate_feed_forward()
        self._validate_head()

    @property
    def base_model_tp_plan(self) -> Plan:  # type: ignore[override]
        """See `plans.tensor_parallel_plan`."""
        return tensor_parallel_plan(self)

    @property
    def base_model_ep_plan(self) -> Plan | None:  # type: ignore[override]
        """See `plans.expert_parallel_plan`."""
        return expert_parallel_plan(self)

    @property
    def base_model_pp_plan(self) -> Plan | None:  # type: ignore[override]
        """See `plans.pipeline_parallel_plan`."""
        return pipeline_parallel_plan(self)

    @property
    def base_model_fsdp_plan(self) -> Plan:  # type: ignore[override]
        """See `plans.sharded_data_parallel_plan`."""
        return sharded_data_parallel_plan(self)

    @property
    def qk_rope_head_dim(self) -> int | None:
        """Hugging Face's name of `head_dim` where keys are kept as latents, read when a model is split."""
        return self.head_dim

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    def _validate_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                     "num_key_value_heads", "intermediate_size", "max_position_embeddings",
                     "linear_chunk_size"):  # fmt: skip
            value = getattr(self, name)
            # Hugging Face makes configurations without a width or a vocabulary; only a model of them is refused.
            may_be_empty = name == "vocab_size" or (name in ("hidden_size", "head_dim") and self.hidden_size == 0)
            least = 0 if may_be_empty else 1
            self._require(value is not None and value >= least, f"{name}={value} must be at least 1.")
        self._require(
            self.num_attention_heads % (self.num_key_value_heads or 1) == 0,
            f"num_attention_heads={self.num_attention_heads} is not a multiple of num_key_value_heads="
            f"{self.num_key_value_heads}: each key-value head serves the same number of query heads.",
        )
        for name in ("embedding_dropout", "hidden_dropout", "attention_dropout", "activation_dropout",
                     "classifier_dropout"):  # fmt: skip
            value = getattr(self, name)
            self._require(0 <= value < 1, f"{name}={value} must lie in [0, 1).")
        self._require(self.initializer_range >= 0, f"initializer_range={self.initializer_range} must not be negative.")
        self._require(self.norm_eps > 0, f"norm_eps={self.norm_eps} must be positive.")
        require_tokens_in_vocabulary(self, self.vocab_size)

    def check_model_sizes(self) -> None:
        """Refuse what a configuration may be, but no model: called when a model is built.

        Raises:
            ValueError: without a width or a vocabulary.
        """
        for name in ("vocab_size", "hidden_size"):
            self._require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be at least 1.")

    def _validate_positions(self) -> None:
        uses = {"position_offset": ("learned", 0), "sinusoid_layout": ("sinusoidal", "interleaved"),
                "rope_interleaved": ("rotary", False)}  # fmt: skip
        for name, (kind, neutral) in uses.items():
            self._require(
                self.position_type == kind or getattr(self, name) == neutral,
                f"{name}={getattr(self, name)!r} has no use with position_type={self.position_type!r}: leave it out, "
                f"or set position_type={kind!r}.",
            )
        self._require(self.position_offset >= 0, f"position_offset={self.position_offset} must not be negative.")
        if self.position_type == "sinusoidal":
            self._require(self.hidden_size % 2 == 0, f"sinusoidal positions need an even hidden_size, not "
                          f"{self.hidden_size}.")  # fmt: skip
        if self.position_type == "rotary":
            self._require(
                (self.head_dim or 0) % 2 == 0, f"rotary positions need an even head_dim, not {self.head_dim}."
            )
            self._validate_rotary()
        if self.position_type == "relative":
            directions = 1 if self.is_causal_stack else 2
            exact = self.relative_num_buckets // directions // 2
            self._require(
                exact >= 1 and self.relative_max_distance > exact,
                f"relative_num_buckets={self.relative_num_buckets} and relative_max_distance="
                f"{self.relative_max_distance} leave no room: use at least {2 * directions} buckets and a distance "
                f"above {exact}.",
            )

    def _validate_rotary(self) -> None:
        parameters: dict[Any, Any] = dict(self.rope_parameters or {})
        # Hugging Face completes sets for layer types that the model has not into one set for all.
        one_set = "rope_type" in parameters and not any(isinstance(value, dict) for value in parameters.values())
        types = set(self.layer_types or [])
        self._require(
            one_set or (set(parameters) == types and all(parameters.values())),
            f"rope_parameters={parameters} must be one set, or one for each of the layer types {sorted(types)}; "
            "a set is, for example, {'rope_type': 'default', 'rope_theta': 10000.0}.",
        )
        known = ["default", *ROPE_INIT_FUNCTIONS]
        for rope in [parameters] if one_set else parameters.values():
            self._require(
                isinstance(rope, dict) and {"rope_type", "rope_theta"} <= rope.keys(),
                f"rope_parameters={parameters} must name a rope_type, such as 'default', and a rope_theta, such as "
                "10000.0.",
            )
            self._require(
                rope["rope_type"] in known, f"rope_type={rope['rope_type']!r} is unknown: use {', '.join(known)}."
            )

    def _validate_mixers(self) -> None:
        for name in ("layer_types", "mlp_layer_types"):
            entries = len(getattr(self, name) or [])
            self._require(
                entries == self.num_hidden_layers,
                f"{name} has {entries} entries for num_hidden_layers={self.num_hidden_layers}: give one a layer.",
            )
        known = ", ".join(sorted(MIXERS))
        for index, layer_type in enumerate(self.layer_types or []):
            self._require(layer_type in MIXERS, f"layer_types[{index}]={layer_type!r} is unknown: use {known}.")
            mixer = MIXERS[layer_type]
            self._require(
                mixer.supports_position_bias or self.position_type not in ("relative", "alibi"),
                f"layer_types[{index}]={layer_type!r} takes no position bias, as position_type="
                f"{self.position_type!r} needs: choose another position_type, or another layer type.",
            )
        self._validate_latents()
        sliding = "sliding_attention" in (self.layer_types or [])
        self._require(
            not sliding or (self.sliding_window or 0) > 0,
            f"layer_types has sliding layers, but sliding_window={self.sliding_window}: set it to a positive size.",
        )
        # The cache holds what a window has before the newest token, and of nothing Hugging Face's keeps everything.
        self._require(
            not sliding or not self.is_causal_stack or self.sliding_window != 1,
            f"sliding_window={self.sliding_window} would let a token see itself alone, for which no cache is made: "
            "set it to at least 2.",
        )
        self._require(
            self.first_input_norm or self.mixer_input_norm is not None,
            "first_input_norm=False has no use without mixer_input_norm.",
        )
        self._require(
            not self.norm_after_residual or bool(self.mixer_output_norm or self.feed_forward_output_norm),
            "norm_after_residual=True has no use without mixer_output_norm or feed_forward_output_norm.",
        )

    def _validate_latents(self) -> None:
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if not given:
            return
        for name, value in given.items():
            self._require(value > 0, f"{name}={value} must be at least 1.")
        self._require(self.kv_lora_rank is not None, f"{given} have no use without kv_lora_rank.")
        self._require(
            "full_attention" in (self.layer_types or []),
            f"kv_lora_rank={self.kv_lora_rank} has no use without a 'full_attention' layer in layer_types="
            f"{self.layer_types}.",
        )
        self._require(
            self.num_key_value_heads == self.num_attention_heads and self.query_key_norm is None,
            f"kv_lora_rank={self.kv_lora_rank} makes keys of every head from one latent vector: leave out "
            f"num_key_value_heads={self.num_key_value_heads} and query_key_norm={self.query_key_norm}.",
        )

    def _validate_feed_forward(self) -> None:
        for name in ("hidden_act", "classifier_activation", "head_activation", "pooler_activation"):
            activation = getattr(self, name, None) or "gelu"
            close = difflib.get_close_matches(activation, ACT2FN, n=3)
            hint = f": did you mean {', '.join(close)}?" if close else f": choose from {', '.join(sorted(ACT2FN))}."
            self._require(activation in ACT2FN, f"{name}={activation!r} is unknown{hint}")
        for index, kind in enumerate(self.mlp_layer_types or []):
            self._require(
                kind in ("dense", "sparse"), f"mlp_layer_types[{index}]={kind!r} is unknown: use dense, sparse."
            )
        for name in ("num_experts", "num_shared_experts"):
            self._require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative.")
        self._require(
            self.moe_intermediate_size is None or self.moe_intermediate_size > 0,
            f"moe_intermediate_size={self.moe_intermediate_size} must be at least 1.",
        )
        sparse = "sparse" in (self.mlp_layer_types or [])
        self._require(
            not sparse or self.num_experts > 0,
            f"mlp_layer_types has sparse layers, but num_experts={self.num_experts}: set num_experts.",
        )
        self._require(
            sparse or self.num_experts == 0,
            f"num_experts={self.num_experts} has no use without a 'sparse' layer in mlp_layer_types="
            f"{self.mlp_layer_types}: name one, or set num_experts=0.",
        )
        self._require(
            not sparse or 1 <= self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and num_experts={self.num_experts}.",
        )
        self._require(
            sparse or self.num_shared_experts == 0,
            f"num_shared_experts={self.num_shared_experts} has no use without a 'sparse' layer.",
        )
        if sparse:
            self._validate_router()

    def _validate_router(self) -> None:
        groups, chosen = self.router_num_groups, self.router_groups_per_tok
        self._require(
            1 <= chosen <= groups,
            f"router_groups_per_tok={chosen} must lie between 1 and router_num_groups={groups}.",
        )
        self._require(
            groups == 1 or (self.num_experts % groups == 0 and self.num_experts // groups >= 2),
            f"router_num_groups={groups} must divide num_experts={self.num_experts} into groups of two or more.",
        )
        self._require(
            self.num_experts_per_tok <= chosen * (self.num_experts // groups),
            f"num_experts_per_tok={self.num_experts_per_tok} experts cannot be found in router_groups_per_tok="
            f"{chosen} groups of {self.num_experts // groups}: allow more groups.",
        )
        self._require(
            self.routed_scaling_factor > 0, f"routed_scaling_factor={self.routed_scaling_factor} must be positive."
        )

    def _validate_head(self) -> None:
        known = (None, "regression", "single_label_classification", "multi_label_classification")
        self._require(
            self.problem_type in known,
            f"problem_type={self.problem_type!r} is unknown: use {', '.join(map(str, known[1:]))}.",
        )
        for name in ("pos_weight", "label_thresholds"):
            values = getattr(self, name)
            self._require(
                values is None or len(values) == self.num_labels,
                f"{name} has {len(values or [])} values for {self.num_labels} labels: give one a label.",
            )
        self._require(
            all(size > 0 for size in self.classifier_hidden_sizes or []),
            f"classifier_hidden_sizes={self.classifier_hidden_sizes} must be positive.",
        )
        self._require(
            bool(self.classifier_hidden_sizes) or (self.classifier_norm is None and self.classifier_bias),
            f"classifier_norm={self.classifier_norm!r} and classifier_bias={self.classifier_bias} have no use without "
            "classifier_hidden_sizes.",
        )
        self._require(
            self.pos_weight is None or self.problem_type in (None, "multi_label_classification"),
            f"pos_weight is for multi-label classification, but problem_type={self.problem_type!r}.",
        )
        self._require(all(w > 0 for w in self.pos_weight or []), f"pos_weight={self.pos_weight} must be positive.")
        self._require(
            all(0 <= t <= 1 for t in self.label_thresholds or []),
            f"label_thresholds={self.label_thresholds} must lie in [0, 1].",
        )


@strict
class FratrieEncoderConfig(FratrieConfig):
    """Configuration of the encoder; the defaults are the layout of BERT (Devlin et al. 2019).

    See `FratrieConfig` for the shared fields.

    Args:
        type_vocab_size: number of token types (segments A and B of BERT); 0 for none.
        patch_size: read images of square patches with this many pixels a side in the place of tokens (Dosovitskiy et
            al. 2021), behind one trained vector that stands for the whole image.
        image_size, num_channels: pixels a side, and numbers a pixel, of these images.
        pooler_activation: give the bare model a pooler, a dense layer and this activation over the first token.
        head_activation: activation in the language-model head; `hidden_act` by default.
        head_bias, lm_head_bias: biases of the dense layer and of the output layer of the language-model head.
        sparse_prediction: in training, send only the masked rows through the language-model head; `logits` then hold
            those rows alone.
    """

    model_type = "fratrie_encoder"

    mixer_output_norm: NormType | None = "layer_norm"
    feed_forward_output_norm: NormType | None = "layer_norm"
    norm_after_residual: bool = True
    embedding_norm: NormType | None = "layer_norm"
    type_vocab_size: int = 0
    patch_size: int | None = None
    image_size: int = 224
    num_channels: int = 3
    pooler_activation: str | None = None
    head_activation: str | None = None
    head_bias: bool = True
    lm_head_bias: bool = True
    sparse_prediction: bool = False

    @property
    def num_patches(self) -> int:
        """Patches of an image; 0 for a model of texts."""
        return (self.image_size // self.patch_size) ** 2 if self.patch_size else 0

    def validate_architecture(self) -> None:
        """Refuse contradictory fields (see `FratrieConfig.validate_architecture`)."""
        super().validate_architecture()
        if self.patch_size is None:
            return
        self._require(self.num_channels > 0, f"num_channels={self.num_channels} must be at least 1.")
        self._require(
            self.patch_size > 0 and self.image_size > 0 and self.image_size % self.patch_size == 0,
            f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}.",
        )
        self._require(
            self.position_type != "learned" or self.max_position_embeddings > self.num_patches,
            f"max_position_embeddings={self.max_position_embeddings} are too few for an image of {self.num_patches} "
            f"patches and the vector before them: use {self.num_patches + 1}.",
        )


@strict
class FratrieDecoderConfig(FratrieConfig):
    """Configuration of the decoder; the defaults are the layout of GPT-2 (Radford et al. 2019).

    See `FratrieConfig` for the shared fields.

    Args:
        use_cache: keep keys, values and states for generation.
        add_cross_attention: give each block an attention over the states of an encoder.
        cross_attention_hidden_size: width of those states; `hidden_size` by default.
    """

    model_type = "fratrie_decoder"
    is_causal_stack: ClassVar[bool] = True

    mixer_input_norm: NormType | None = "layer_norm"
    feed_forward_input_norm: NormType | None = "layer_norm"
    final_norm: NormType | None = "layer_norm"
    classifier_pooling: Pooling = "last"
    use_cache: bool = True
    add_cross_attention: bool = False
    cross_attention_hidden_size: int | None = None


_STACK_FIELDS = frozenset(field.name for field in fields(FratrieConfig)) - {
    *(field.name for field in fields(PreTrainedConfig)),
    "foreign_fields",
}


def _first_layers(saved: dict[str, Any], number: int) -> dict[str, Any]:
    """The saved fields of a stack that has only its first layers."""
    cut = {name: saved[name][:number] for name in ("layer_types", "mlp_layer_types") if saved.get(name)}
    rope = saved.get("rope_parameters")
    if rope and "rope_type" not in rope:  # a set a layer type, of which some may be gone
        cut["rope_parameters"] = {kind: rope[kind] for kind in rope if kind in cut.get("layer_types", rope)}
    return {**saved, **cut, "num_hidden_layers": number}


# What an encoder-decoder answers of its stacks, and hands on to them.
_STACK_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_TOKENS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@strict
class FratrieSeq2SeqConfig(FratrieBaseConfig):
    """Configuration of the encoder-decoder; the defaults are the layout of Vaswani et al. (2017).

    A shared field given at the top (`FratrieSeq2SeqConfig(hidden_size=64)`) goes to both stacks; `encoder` and
    `decoder` (dicts or configs) say what differs. The attributes `hidden_size`, `num_hidden_layers` and
    `num_attention_heads` are the decoder's; set, they and the token fields go to both stacks.

    Args:
        encoder, decoder: configuration of each stack.
        share_embeddings: let encoder and decoder share the input embedding.
        tie_word_embeddings: let the output layer share the decoder's input embedding.
        lm_head_bias: bias of the output layer.
        scale_decoder_outputs: multiply what the output layer reads by `hidden_size ** -0.5` (Raffel et al. 2020).
        use_cache: keep keys, values and states for generation.
        decoder_start_token_id: first token of every output (`pad_token_id` by default). Special tokens that are not
            given at the top are the decoder's.
        foreign_fields: as in `FratrieConfig`.
    """

    model_type = "fratrie_seq2seq"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "encoder": FratrieEncoderConfig,
        "decoder": FratrieDecoderConfig,
    }

    encoder: FratrieEncoderConfig | dict[Any, Any] | None = None
    decoder: FratrieDecoderConfig | dict[Any, Any] | None = None
    is_encoder_decoder: bool = True
    share_embeddings: bool = True
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    scale_decoder_outputs: bool = False
    use_cache: bool = True
    initializer_range: float | int = 0.02
    vocab_size: int = 8192
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    foreign_fields: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        shared = {name: kwargs.pop(name) for name in list(kwargs) if name in _STACK_FIELDS}
        reject_unknown_fields(self, kwargs, _STACK_FIELDS)
        top = {name: getattr(self, name) for name in _TOKENS}
        layout = {
            "position_type": "sinusoidal",
            "hidden_act": "relu",
            "scale_embeddings": True,
            **norm_slots("post"),
        }
        if shared and all(isinstance(stack, PreTrainedConfig) for stack in (self.encoder, self.decoder)):
            raise ValueError(
                f"{', '.join(sorted(shared))} given beside complete configurations of encoder and decoder: set it in "
                "them, or give them as dicts."
            )
        for name, own in (("encoder", {}), ("decoder", {"add_cross_attention": True})):
            stack = getattr(self, name)
            if not isinstance(stack, PreTrainedConfig):
                saved = stack is not None and "model_type" in stack  # as read from a config.json, complete
                base = {} if saved else {**layout, "initializer_range": self.initializer_range, **top, **shared}
                stack = self.sub_configs_defaults[name].config_class(**{**base, **own, **(stack or {})})
                setattr(self, name, stack)
        encoder, decoder = self.stacks
        self.vocab_size = decoder.vocab_size
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(decoder, name))
        decoder.cross_attention_hidden_size = encoder.hidden_size
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        super().__post_init__(**kwargs)
        self.validate_architecture()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of saved fields and changed ones (see `FratrieConfig.from_dict`)."""
        number = kwargs.pop("num_hidden_layers", None)
        if number is not None:
            stacks = {name: _first_layers(config_dict.get(name) or {}, number) for name in ("encoder", "decoder")}
            config_dict = {**config_dict, **stacks}
        return super().from_dict(config_dict, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _STACK_SIZES:
            return getattr(self.stacks[1], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        built = "_post_init_done" in vars(self)
        if built and name in (*_STACK_SIZES, *_TOKENS):
            for stack in self.stacks:
                setattr(stack, name, value)
        if not built or name not in _STACK_SIZES:
            super().__setattr__(name, value)

    @property
    def stacks(self) -> tuple[FratrieEncoderConfig, FratrieDecoderConfig]:
        """The configurations of encoder and decoder."""
        assert isinstance(self.encoder, FratrieEncoderConfig) and isinstance(self.decoder, FratrieDecoderConfig)
        return self.encoder, self.decoder

    @property
    def base_model_tp_plan(self) -> Plan:  # type: ignore[override]
        """The plans of both stacks (see `plans.tensor_parallel_plan`)."""
        return self._join("base_model_tp_plan")

    @property
    def base_model_ep_plan(self) -> Plan | None:  # type: ignore[override]
        """The plans of both stacks (see `plans.expert_parallel_plan`)."""
        return self._join("base_model_ep_plan") or None

    @property
    def base_model_fsdp_plan(self) -> Plan:  # type: ignore[override]
        """The plans of both stacks (see `plans.sharded_data_parallel_plan`)."""
        return self._join("base_model_fsdp_plan")

    def _join(self, name: str) -> Plan:
        encoder, decoder = self.stacks
        plans = {"encoder": getattr(encoder, name) or {}, "decoder": getattr(decoder, name) or {}}
        return {f"{stack}.{key}": style for stack, plan in plans.items() for key, style in plan.items()}

    def validate_architecture(self) -> None:
        """Refuse contradictory fields (see `FratrieConfig.validate_architecture`)."""
        encoder, decoder = self.stacks
        encoder.validate_architecture()
        decoder.validate_architecture()
        require_tokens_in_vocabulary(self, decoder.vocab_size)
        if encoder.patch_size:
            raise ValueError(f"encoder.patch_size={encoder.patch_size}: the encoder of a seq2seq model reads texts.")
        if not decoder.add_cross_attention:
            raise ValueError("decoder.add_cross_attention=False: the decoder of a seq2seq model attends the encoder.")

    def check_model_sizes(self) -> None:
        """Refuse what a configuration may be, but no model: called when a model is built.

        Raises:
            ValueError: for stacks that shall share an embedding, but differ in its size.
        """
        sizes = [(stack.vocab_size, stack.hidden_size) for stack in self.stacks]
        if self.share_embeddings and sizes[0] != sizes[1]:
            raise ValueError(
                f"share_embeddings=True, but encoder and decoder differ in (vocab_size, hidden_size): {sizes[0]} and "
                f"{sizes[1]}. Make them equal, or set share_embeddings=False."
            )
