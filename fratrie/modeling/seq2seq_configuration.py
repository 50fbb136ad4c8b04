"""Configuration of the encoder-decoder: that of its two stacks, and what joins them."""

from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .base_configuration import FratrieBaseConfig, reject_unknown_fields, require_tokens_in_vocabulary
from .configuration import (
    STACK_FIELDS,
    FratrieDecoderConfig,
    FratrieEncoderConfig,
    first_layers,
    norm_slots,
    with_changes,
)
from .plans import Plan
from .validation import require_finite_numbers

# What an encoder-decoder answers of its stacks, and hands on to them.
_STACK_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_TOKENS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@strict
class FratrieSeq2SeqConfig(FratrieBaseConfig):
    """Configuration of the encoder-decoder; the defaults are the layout of Vaswani et al. (2017).

    A shared field given at the top (`FratrieSeq2SeqConfig(hidden_size=64)`) goes to both stacks; `encoder` and
    `decoder` (dicts or configs) say what differs. The attributes `hidden_size`, `num_hidden_layers` and
    `num_attention_heads` are the decoder's; set later, shared fields and those of tokens go to both stacks.

    Args:
        encoder, decoder: configuration of each stack.
        share_embeddings: let encoder and decoder share the input embedding.
        tie_word_embeddings: let the output layer share the decoder's input embedding.
        lm_head_bias: bias of the output layer.
        scale_decoder_outputs: multiply what the output layer reads by `hidden_size ** -0.5` (Raffel et al. 2020).
        chunked_loss: as in `FratrieConfig`.
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
    chunked_loss: bool = False
    use_cache: bool = True
    initializer_range: float | int = 0.02
    vocab_size: int = 8192
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    foreign_fields: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        shared = {name: kwargs.pop(name) for name in list(kwargs) if name in STACK_FIELDS}
        reject_unknown_fields(self, kwargs, STACK_FIELDS)
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
                stack = self.sub_configs_defaults[name].config_class(**with_changes({**base, **own}, stack or {}))
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
    def _from_fields(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        own = {field.name for field in fields(cls)}
        changed = {name: kwargs.pop(name) for name in (STACK_FIELDS - own) & kwargs.keys()}
        for name in ("encoder", "decoder") if changed else ():
            stack = config_dict.get(name) or {}
            if changed.get("num_hidden_layers") is not None:
                stack = first_layers(stack, changed["num_hidden_layers"])
            config_dict = {**config_dict, name: with_changes(stack, changed)}
        return super()._from_fields(config_dict, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _STACK_SIZES:
            return getattr(self.stacks[1], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        built = "_post_init_done" in vars(self)
        own = name in {field.name for field in fields(self)} or name not in STACK_FIELDS
        if built and (name in _TOKENS or not own):
            for stack in self.stacks:
                setattr(stack, name, value)
        if not built or own:
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
        require_finite_numbers(self)
        require_tokens_in_vocabulary(self, decoder.vocab_size)
        if encoder.patch_size:
            raise ValueError(f"encoder.patch_size={encoder.patch_size}: the encoder of a seq2seq model reads texts.")
        if not decoder.add_cross_attention:
            raise ValueError(
                "decoder.add_cross_attention=False, but the decoder of a seq2seq model attends the encoder: set it to "
                "True, or give the decoder as a dict."
            )

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
