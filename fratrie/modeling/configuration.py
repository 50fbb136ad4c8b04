"""Configurations of encoder and decoder: the fields that every stack shares, and what is particular to each."""

import difflib
from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .base_configuration import FratrieBaseConfig, reject_unknown_fields
from .plans import (
    Plan,
    expert_parallel_plan,
    pipeline_parallel_plan,
    sharded_data_parallel_plan,
    tensor_parallel_plan,
)
from .validation import check_stack, mixer_registry, require

if TYPE_CHECKING:
    from .mixer import Mixer

PositionType = Literal["learned", "axial", "sinusoidal", "rotary", "relative", "alibi", "none"]
NormType = Literal["layer_norm", "rms_norm", "rms_norm_plus_one"]
Pooling = Literal["first", "mean", "last"]
LinformerSharing = Literal["none", "headwise", "key_value", "layerwise"]
SinusoidLayout = Literal["interleaved", "halves"]
RandomPlan = Literal["drawn", "first"]
RouterScoring = Literal["softmax", "sigmoid"]
RouterLossScope = Literal["layer", "model"]
FeatureMap = Literal["elu", "relu", "exp"]


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
    if norm not in get_args(NormType):
        raise ValueError(f"Unknown norm {norm!r}: use {', '.join(map(repr, get_args(NormType)))}.")
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
            key and value (of recurrent mixers, all), of the attention output, of LayerNorm.
        attention_scale: factor of the attention scores, above 0; `head_dim ** -0.5` by default.
        query_key_norm: norm of each query and key head (Henry et al. 2020).
        attention_output_gate: of softmax attention, multiply the mixed values by the sigmoid of a map of the layer's
            input, number by number, before they are projected (Qiu et al. 2025); cross-attention has none.
        kv_lora_rank: let the full-attention layers keep keys and values as a latent vector of this size per
            token (multi-head latent attention, DeepSeek-AI 2024). A query or key head then has `head_dim` numbers that
            rotary positions turn and `qk_nope_head_dim` that they do not.
        q_lora_rank: size of a latent vector between the hidden state and its queries; none by default.
        qk_nope_head_dim, v_head_dim: with latents, the unturned part of a query or key head, and the size of a value
            head; `head_dim` by default.
        position_type: `"learned"`, `"axial"` (vectors of the rows and the columns of a grid, Kitaev et al. 2020),
            `"sinusoidal"` (Vaswani et al. 2017), `"rotary"` (Su et al. 2021), `"relative"` (the bucketed bias of T5,
            Raffel et al. 2020), `"alibi"` (Press et al. 2022) or `"none"`.
        max_position_embeddings: number of learned or axial positions, and the length the other kinds are meant for.
        axial_shape: rows and columns of the grid, with a place for each position; by default a square.
        axial_dims: sizes of the vectors of a row and of a column, together `hidden_size`; by default half of it each.
        position_offset: rows of the learned table before that of the first position (RoBERTa and BART keep two that no
            token uses); the table has `max_position_embeddings + position_offset` rows.
        sinusoid_layout: sines and cosines in turn (`"interleaved"`), or all sines before all cosines (`"halves"`).
        rope_parameters: Hugging Face's description of the rotary embedding (`rope_type`, `rope_theta`, …): one for
            all layers, or one per layer type.
        rope_interleaved: turn neighbouring numbers of a head as pairs (Su et al. 2021), not those half a head apart.
        relative_num_buckets, relative_max_distance: size of the relative bias table, and the distance from which all
            positions share a bucket.
        layer_types: Hugging Face's type of each layer, which decides its mask and its cache: `"full_attention"` (the
            default), `"sliding_attention"`, `"linear_attention"`, `"conv"`.
        mixer_types: the mixer of each layer: `"softmax"` (under full or sliding attention), `"latent"` (under full
            attention, with `kv_lora_rank`), `"linear"` (under linear attention), `"longformer"` (a window and global
            tokens, under full attention, whose cache it needs), or what else `mixers.MIXERS` holds.
            Whoever gives one of these two lists gets the other derived from it, full attention for `"softmax"`, and
            latents for full attention where `kv_lora_rank` is set. Left out of config.json where `layer_types` tell
            it.
        sliding_window: reach of the sliding layers: the last `sliding_window` tokens where causal (two at least),
            that many to each side where bidirectional. Other layers do not read it.
        linear_chunk_size: longest chunk of the causal linear mixers, in tokens; changes speed and memory only.
        linear_feature_map: the map φ of linear attention, which weighs a key by φ(q)·φ(k): `"elu"` (elu(x) + 1),
            `"relu"`, or `"exp"` (numbers of keys cut to ±30 before).
        performer_num_features: random features of a head in the mixer `"performer"` (Choromanski et al. 2021), which
            estimates softmax attention the better the more it has; by default `head_dim * ceil(ln(head_dim))`.
        performer_seed: what they are drawn by, for each layer and head its own; 0 by default.
        short_conv_kernel_size, short_conv_bias: of layers whose mixer is `"short_conv"` (under `"conv"`, Liquid AI
            2025): number of tokens that the convolution sees, and biases of its maps; 3 and none by default.
        linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim: of layers whose mixer
            is `"gated_delta"` (Yang et al. 2025) or `"kimi_delta"` (Kimi Team 2025), both under linear attention:
            number and size of the heads of keys and queries, and of those of values; `num_attention_heads` and
            `head_dim` by default.
        linear_conv_kernel_dim: tokens that their convolution sees; 4 by default.
        mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state: of layers whose mixer is `"ssd"` (under linear
            attention, Dao and Gu 2024): number of heads, size of a head (`head_dim`; the heads are twice as wide
            together as the hidden state), number of groups of heads with a key and a query of their own (1), and size
            of these (128).
        mamba_d_conv, mamba_conv_bias, mamba_proj_bias: there, number of tokens of the convolution (4), its bias (yes),
            and biases of the maps into and out of the mixer (no).
        mamba_time_step_limit: there, smallest and largest step; no limits by default.
        adaptive_span_limit, adaptive_span_ramp: of the mixer `"adaptive_span"` (Sukhbaatar et al. 2019), in tokens:
            the longest span that a head can learn, `max_position_embeddings` by default; and over how many beyond its
            span the weights fall to nothing, 32 by default.
        adaptive_span_loss_coef: weight, in the training loss, of the mean span of the heads of a layer; 2e-6 by
            default.
        linformer_rank: of the mixer `"linformer"` (Wang et al. 2020), which is bidirectional: number of rows that keys
            and values of a text are mixed into; a quarter of `max_position_embeddings` by default.
        linformer_sharing: how far one map from positions to rows reaches: to one key-value head and to keys or values
            alone (`"none"`), to all heads of a layer (`"headwise"`, the default), to its keys and values
            (`"key_value"`), or to all layers (`"layerwise"`).
        reformer_num_buckets, reformer_num_hashes: of attention by hashing (`"reformer"`, Kitaev et al. 2020), the
            number of buckets of a round, 1 or even (32 by default), and of rounds (4).
        reformer_window: how many tokens of its bucket a query sees before it, and where bidirectional behind it (64).
        reformer_seed: what the directions of the hash are drawn from (0).
        sliding_window: reach of the sliding layers and of the longformer mixer: the last `sliding_window` tokens where
            causal (two at least), that many to each side where bidirectional. Other layers do not
            read it; the longformer mixer has 256 by default.
        bigbird_block_size, bigbird_random_blocks: of the mixer `"bigbird"` (Zaheer et al. 2020): tokens of a block, 64
            by default; and how many blocks besides its neighbours, the first and the last one a block sees, 3 by
            default.
        bigbird_random_plan: which these are: blocks that are drawn (`"drawn"`, the default), once for each layer, head
            and number of blocks; or again and again the first one (`"first"`), as Hugging Face's BigBird has it out of
            training, which also lets texts of up to 5 + 2 `bigbird_random_blocks` blocks see all of themselves.
        bigbird_seed: what they are drawn from; 0 by default.
        mixer_input_norm, mixer_output_norm, feed_forward_input_norm, feed_forward_output_norm: `"layer_norm"`,
            `"rms_norm"`, `"rms_norm_plus_one"` (RMSNorm times 1 + w, as Gemma and Qwen3-Next have it) or `None` in the
            four slots of a block. `norm_slots` fills them for the usual layouts.
        first_input_norm: whether the first block, too, has the norm before its mixer; ModernBERT leaves it out, its
            embeddings being normed already (Warner et al. 2024).
        norm_after_residual: the output norms act on the sum of residual and branch (post-norm) instead of on the
            branch alone.
        reversible: let two residual streams take turns, so that training computes the inputs of the layers anew from
            their outputs and keeps none (Gomez et al. 2017). Trained so, a model is of another kind: its layers read
            other states than those of a stack with one stream.
        embedding_norm, final_norm: norm after the embeddings, and after the last block.
        norm_eps: epsilon of every norm.
        mlp_layer_types: `"dense"` or `"sparse"` (mixture of experts) per layer; by default all sparse with
            `num_experts`, and all dense without.
        num_experts, num_experts_per_tok: number E of experts, and how many each token is sent to.
        moe_intermediate_size: width of an expert; `intermediate_size` by default.
        num_shared_experts: experts that every token passes besides the chosen ones (Dai et al. 2024).
        shared_expert_intermediate_size: width of each of them; that of the other experts by default.
        shared_experts_gate: multiply what they give by the sigmoid of a number made of the token (Qwen2-MoE).
        norm_topk_prob: let the weights of the chosen experts sum to one.
        router_norm_eps: what is added to their sum before they are divided by it.
        router_scoring: how logits of the router become weights: `"softmax"` over the experts, or `"sigmoid"` of each.
        router_selection_bias: add a bias an expert to what experts are chosen by, not to their weights; no gradient
            reaches it (Wang et al. 2024).
        router_num_groups, router_groups_per_tok: choose the experts of a token within its best groups of experts
            (DeepSeek-AI 2024): number of groups, and how many of them a token may use.
        routed_scaling_factor: factor of the weights of the chosen experts.
        router_aux_loss_coef, router_z_loss_coef: weights of the load-balancing loss (Fedus et al. 2021) and of the
            router's z loss (Zoph et al. 2022) in the training loss; by default 0.01 with sparse layers, and 0. The
            balance is that of each batch that passes the model: smaller ones, accumulated, have a slightly other one.
        router_aux_loss_scope: balance the experts of each `"layer"`, or those of the whole `"model"` together, as
            Hugging Face's Mixtral does.
        output_router_logits: return the router logits, and add the router's losses to the loss in evaluation too.
        float32_parts: what a model in half precision keeps in float32 all the same: `"rotations"` of rotary positions
            (ModernBERT), `"expert_weights"` from the router (Mixtral), `"down_proj"` of dense layers, in float16 alone
            (T5).
        embedding_dropout, hidden_dropout, attention_dropout, activation_dropout: dropout after the embeddings, of
            each residual branch, of the attention weights, inside the feed-forward.
        scale_embeddings: multiply the token embeddings by `sqrt(hidden_size)`.
        tie_word_embeddings: let the output layer share the input embedding.
        initializer_range: standard deviation of the initial weights.
        unpad_inputs: take padding out of a batch before the first layer (equal outputs for real tokens, less work).
        chunked_loss: in training, compute the loss of the language-model head a chunk of rows at a time, at a fraction
            of the memory; there are no `logits` then. Compiled graphs, and output layers that carry adapters or hooks
            or are sharded, compute them all the same.
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
            family-relations pipeline: one per label in their order, or some by the name of their label.
        label_calibration: for each label a broken line of points `[logit, calibrated logit]` that classifiers of texts
            and images apply to their logits outside of training (`modeling/calibration.py`); none by default.
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
    attention_output_gate: bool | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None

    position_type: PositionType = "learned"
    max_position_embeddings: int = 512
    axial_shape: list[int] | None = None
    axial_dims: list[int] | None = None
    position_offset: int = 0
    sinusoid_layout: SinusoidLayout = "interleaved"
    rope_parameters: RopeParameters | dict | None = None
    rope_interleaved: bool = False
    relative_num_buckets: int = 32
    relative_max_distance: int = 128

    layer_types: list[str] | None = None
    mixer_types: list[str] | None = None
    sliding_window: int | None = None
    linear_chunk_size: int = 64
    linear_feature_map: FeatureMap = "elu"
    performer_num_features: int | None = None
    performer_seed: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    short_conv_kernel_size: int | None = None
    short_conv_bias: bool | None = None
    mamba_n_heads: int | None = None
    mamba_d_head: int | None = None
    mamba_n_groups: int | None = None
    mamba_d_state: int | None = None
    mamba_d_conv: int | None = None
    mamba_conv_bias: bool | None = None
    mamba_proj_bias: bool | None = None
    mamba_time_step_limit: list[float | int] | None = None
    adaptive_span_limit: int | None = None
    adaptive_span_ramp: float | int | None = None
    adaptive_span_loss_coef: float | int | None = None
    linformer_rank: int | None = None
    linformer_sharing: LinformerSharing | None = None
    reformer_num_buckets: int | None = None
    reformer_num_hashes: int | None = None
    reformer_window: int | None = None
    reformer_seed: int | None = None
    bigbird_block_size: int | None = None
    bigbird_random_blocks: int | None = None
    bigbird_random_plan: RandomPlan | None = None
    bigbird_seed: int | None = None

    mixer_input_norm: NormType | None = None
    mixer_output_norm: NormType | None = None
    feed_forward_input_norm: NormType | None = None
    feed_forward_output_norm: NormType | None = None
    first_input_norm: bool = True
    norm_after_residual: bool = False
    reversible: bool = False
    embedding_norm: NormType | None = None
    final_norm: NormType | None = None
    norm_eps: float | int = 1e-5

    mlp_layer_types: list[str] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    shared_experts_gate: bool = False
    norm_topk_prob: bool = True
    router_norm_eps: float | int = 1e-20
    router_scoring: RouterScoring = "softmax"
    router_selection_bias: bool = False
    router_num_groups: int = 1
    router_groups_per_tok: int = 1
    routed_scaling_factor: float | int = 1.0
    router_aux_loss_coef: float | int | None = None
    router_z_loss_coef: float | int = 0.0
    router_aux_loss_scope: RouterLossScope = "layer"
    output_router_logits: bool = False
    float32_parts: list[str] | None = None

    embedding_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0

    scale_embeddings: bool = False
    tie_word_embeddings: bool = True
    initializer_range: float | int = 0.02
    unpad_inputs: bool = True
    chunked_loss: bool = False

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
    pos_weight: list[float | int] | None = None
    label_thresholds: list[float | int] | dict[str, float | int] | None = None
    label_calibration: list[list[list[float | int]]] | None = None
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
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}: "
                "change one of them, or set head_dim.",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = self._derive_layer_types()
            require(
                self.sliding_window is None or any(mixer.takes_global_tokens for mixer in self.mixers),
                f"sliding_window={self.sliding_window} has no use without a 'sliding_attention' layer: name them in "
                "layer_types.",
            )
        if self.mixer_types is None:
            self.mixer_types = self._derive_mixer_types()
        for mixer in dict.fromkeys(self.mixers):
            mixer.fill_defaults(self)
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse" if self.num_experts else "dense"] * self.num_hidden_layers
        if self.router_aux_loss_coef is None:  # trl asks by it for router logits, which a dense model lacks
            self.router_aux_loss_coef = 0.01 if "sparse" in self.mlp_layer_types else 0.0
        super().__post_init__(**kwargs)
        if not rotary:  # Hugging Face fills in a default wherever the field exists.
            self.rope_parameters = None
        self.validate_architecture()  # here, since what `strict` raises is no ValueError

    def __setattr__(self, name: str, value: Any) -> None:
        before, names = vars(self).get(name), vars(self).get("mixer_types")
        super().__setattr__(name, value)
        if "_post_init_done" not in vars(self) or name not in _deriving_fields() or value == before:
            return
        try:
            self._derive_after(name, was_enabled=before is not None)
        except ValueError:
            super().__setattr__(name, before)
            raise
        self._forget_fields_of(set(names or ()) - set(self.mixer_types or ()))

    def _forget_fields_of(self, names: set[str]) -> None:
        """Unset what mixers of these names alone read, unless it is what would choose them."""
        registry, read = mixer_registry(), {field for mixer in self.mixers for field in mixer.own_fields}
        for mixer in (registry[name] for name in names & registry.keys()):
            for field in set(mixer.own_fields) - read if mixer.enabled_by is None else ():
                super().__setattr__(field, None)

    def _derive_after(self, name: str, was_enabled: bool) -> None:
        """Set what follows from a field of a finished configuration that was set.

        Of the two lists the other one, and of a field that enables a mixer or does so no longer, the mixers.
        """
        for mixer in mixer_registry().values():
            if mixer.enabled_by == name and was_enabled == (getattr(self, name) is not None):
                return
            if mixer.enabled_by == name and was_enabled:
                for field in mixer.own_fields:  # of no use without it
                    super().__setattr__(field, None)
        if (name == "mixer_types" and self.mixer_types is not None) or self.layer_types is None:
            super().__setattr__("layer_types", self._derive_layer_types())
        else:
            super().__setattr__("mixer_types", self._derive_mixer_types())
        for mixer in dict.fromkeys(self.mixers):
            mixer.fill_defaults(self)

    @property
    def mixers(self) -> list[type["Mixer"]]:
        """The class of each layer's mixer.

        Raises:
            ValueError: for a name that the registry does not have.
        """
        registry = mixer_registry()
        for index, name in enumerate(self.mixer_types or []):
            if name not in registry:
                close = difflib.get_close_matches(str(name), registry, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                known = ", ".join(sorted(registry))
                raise ValueError(f"mixer_types[{index}]={name!r} is unknown{hint}: use {known}.")
        return [registry[name] for name in self.mixer_types or []]

    def _derive_layer_types(self) -> list[str]:
        """What each mixer runs under: its layer type as it is, where that suits it, else its first."""
        if self.mixer_types is None:
            return ["full_attention"] * self.num_hidden_layers
        mixers, given = self.mixers, self.layer_types or []
        kept = [kind if kind in mixer.layer_types else None for mixer, kind in zip(mixers, given, strict=False)]
        return [kind or mixer.layer_types[0] for mixer, kind in zip_longest(mixers, kept[: len(mixers)])]

    def _derive_mixer_types(self) -> list[str]:
        """The default mixer of each layer type: one that a field enables, else the first of the registry.

        Raises:
            ValueError: for a layer type that no mixer runs under.
        """
        chosen, registry = [], mixer_registry()
        enabled = {
            name: mixer
            for name, mixer in registry.items()
            if mixer.enabled_by is None or getattr(self, mixer.enabled_by, None) is not None
        }
        for index, layer_type in enumerate(self.layer_types or []):
            names = [name for name, mixer in enabled.items() if layer_type in mixer.layer_types]
            if not names:
                known = sorted({kind for mixer in enabled.values() for kind in mixer.layer_types})
                fields = [str(mixer.enabled_by) for mixer in registry.values() if layer_type in mixer.layer_types]
                hint = f"set {' or '.join(fields)}" if fields else f"use {', '.join(known)}"
                raise ValueError(f"layer_types[{index}]={layer_type!r} is unknown: {hint}.")
            chosen.append(min(names, key=lambda name: enabled[name].enabled_by is None))  # the first of equals
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Return the fields (see Hugging Face's method), without mixers that the layer types tell."""
        saved = super().to_dict()
        if self.mixer_types == self._derive_mixer_types():
            saved.pop("mixer_types", None)
        return saved

    @classmethod
    def _from_fields(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # Fewer num_hidden_layers are the first ones. Hugging Face would set what changes after the construction,
        # without the defaults that follow from it.
        changed = {name: kwargs.pop(name) for name in STACK_FIELDS & kwargs.keys()}
        if changed.get("num_hidden_layers") is not None:
            config_dict = first_layers(config_dict, changed["num_hidden_layers"])
        return super()._from_fields(with_changes(config_dict, changed), **kwargs)

    def _in_order_of_labels(self, thresholds: dict[str, float | int]) -> list[float | int]:
        names: dict[Any, str] = self.id2label or {}
        labels = [names[index] for index in sorted(names)]
        unknown = sorted(thresholds.keys() - labels)
        known = ", ".join(map(repr, labels))
        require(not unknown, f"label_thresholds names {', '.join(map(repr, unknown))}, but the labels are {known}.")
        return [thresholds.get(label, 0.5) for label in labels]

    def validate_architecture(self) -> None:
        """Refuse contradictory fields; called at construction, when a model is built, and before saving.

        Raises:
            ValueError: with the field, its value and the way out.
        """
        if isinstance(self.label_thresholds, dict):
            self.label_thresholds = self._in_order_of_labels(self.label_thresholds)
        check_stack(self)

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
    def shared_experts_width(self) -> int:
        """Width of all shared experts together; 0 without them."""
        width = self.shared_expert_intermediate_size or self.moe_intermediate_size or self.intermediate_size
        return self.num_shared_experts * width

    @property
    def qk_rope_head_dim(self) -> int | None:
        """Hugging Face's name of `head_dim` where keys are kept as latents, read when a model is split."""
        return self.head_dim

    def check_model_sizes(self) -> None:
        """Refuse what a configuration may be, but no model: called when a model is built.

        Raises:
            ValueError: without a width or a vocabulary.
        """
        for name in ("vocab_size", "hidden_size"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be at least 1.")


@strict
class FratrieEncoderConfig(FratrieConfig):
    """Configuration of the encoder; the defaults are the layout of BERT (Devlin et al. 2019).

    See `FratrieConfig` for the shared fields.

    Args:
        type_vocab_size: number of token types (segments A and B of BERT); 0 for none.
        patch_size: read images of square patches with this many pixels per side instead of tokens (Dosovitskiy et al.
            2021), behind one trained vector that stands for the whole image.
        image_size, num_channels: pixels per side, and numbers per pixel, of these images.
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
        require(self.num_channels > 0, f"num_channels={self.num_channels} must be at least 1.")
        require(
            self.patch_size > 0 and self.image_size > 0 and self.image_size % self.patch_size == 0,
            f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}.",
        )
        require(
            self.position_type not in ("learned", "axial") or self.max_position_embeddings > self.num_patches,
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


def _deriving_fields() -> set[str | None]:
    """The fields that others follow from when they are set."""
    return {"layer_types", "mixer_types", *(mixer.enabled_by for mixer in mixer_registry().values())}


# What an encoder-decoder's configuration hands on to its stacks.
STACK_FIELDS = frozenset(field.name for field in fields(FratrieConfig)) - {
    *(field.name for field in fields(PreTrainedConfig)),
    "foreign_fields",
}


def with_changes(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with changes; where these name layer types or mixers, the other list is derived from them."""
    lists = {"layer_types", "mixer_types"}
    given = {name for name in lists if changes.get(name) is not None}
    left_out = lists - given if len(given) == 1 else set()
    kept = {name: value for name, value in fields.items() if name not in left_out}
    return {**_without_unread({**kept, **changes}), **changes} if given else {**kept, **changes}


def _without_unread(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out the fields of mixers that no layer has, unless they are what would choose them."""
    registry = {name: mixer for name, mixer in mixer_registry().items() if mixer.enabled_by is None}
    names = fields.get("mixer_types") or [
        next((name for name, mixer in registry.items() if kind in mixer.layer_types), "")
        for kind in fields.get("layer_types") or ()
    ]
    read, unread = (
        {field for name, mixer in registry.items() if (name in names) == used for field in mixer.own_fields}
        for used in (True, False)
    )
    return {name: value for name, value in fields.items() if name not in unread - read}


def first_layers(saved: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the saved fields of a stack that has only its first layers."""
    cut = {name: saved[name][:number] for name in ("layer_types", "mixer_types", "mlp_layer_types") if saved.get(name)}
    gone = set(saved.get("mixer_types") or ()) - set(cut.get("mixer_types", ()))
    for mixer in (mixer_registry()[name] for name in gone & mixer_registry().keys()):
        cut |= dict.fromkeys(mixer.own_fields)
    rope = saved.get("rope_parameters")
    if rope and "rope_type" not in rope:  # one set per layer type, of which some may be gone
        cut["rope_parameters"] = {kind: rope[kind] for kind in rope if kind in cut.get("layer_types", rope)}
    return _without_unread({**saved, **cut, "num_hidden_layers": number})
