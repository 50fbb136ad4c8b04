"""The stack that encoder and decoder are: embeddings, blocks, final norm.

Shapes: B batch, T positions, N real tokens, S positions of an encoder, D hidden.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import capture_outputs

from .block import Block
from .configuration import FratrieConfig
from .layout import Layout
from .mixers import mixers_of
from .normalization import build_norm
from .outputs import FratrieModelOutput, refuse_foreign_arguments
from .parallel import cache_of_layers, held_layers
from .patches import PatchEmbedding
from .positions import build_position_bias, build_position_embeddings, build_rotary_embeddings
from .pretrained import FratriePreTrainedModel
from .reversible import ReversibleBlock, ReversibleLayers


class FratrieStack(FratriePreTrainedModel):
    """Embeddings, blocks and final norm. Encoder and decoder say which inputs they take."""

    config: FratrieConfig

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__(config)
        config.validate_architecture()  # fields may have been set since
        config.check_model_sizes()
        if "sparse" in (config.mlp_layer_types or []) and config.router_selection_bias:
            # Rounded to half precision, they would choose other experts.
            self._keep_in_fp32_modules_strict = ["router"]
        if "down_proj" in (config.float32_parts or ()):
            # In float16 alone, whose numbers end at 65504, and not of the experts.
            self._keep_in_fp32_modules = ["feed_forward.down_proj"]
        norm = partial(build_norm, size=config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        self.embed_tokens: nn.Embedding | PatchEmbedding
        if getattr(config, "patch_size", None):
            self.embed_tokens = PatchEmbedding(config)  # type: ignore[arg-type]
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        types = getattr(config, "type_vocab_size", 0)
        self.embed_token_types = nn.Embedding(types, config.hidden_size) if types else None
        self.embed_positions = build_position_embeddings(config)
        self.rotary_emb = build_rotary_embeddings(config)
        self.position_bias = build_position_bias(config)
        self.embedding_norm = norm(config.embedding_norm)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.mixers = tuple(mixers_of(config))
        shared = {mixer.__name__: mixer.shared_class(config) for mixer in self.mixers}
        self.shared = nn.ModuleDict({name: made(config) for name, made in shared.items() if made is not None})
        block = ReversibleBlock if config.reversible else Block
        self.layers = nn.ModuleList(block(config, index) for index in range(config.num_hidden_layers))
        self.norm = norm(config.final_norm)
        self.layer_types = tuple(config.layer_types or ())
        self.gradient_checkpointing = False
        self.post_init()

    def refuse_foreign_arguments(self, kwargs: Mapping[str, Any], global_attention_mask: torch.Tensor | None) -> None:
        """Refuse what the model does not take (see `outputs.refuse_foreign_arguments`), global tokens among it."""
        if not any(mixer.takes_global_tokens for mixer in self.mixers):
            kwargs = {**kwargs, "global_attention_mask": global_attention_mask}
        refuse_foreign_arguments(self, kwargs)

    def embed(self, tokens: torch.Tensor, token_type_ids: torch.Tensor | None, layout: Layout) -> torch.Tensor:
        """Token embeddings `(B, T, D)` (scaled) + token types + positions, in BERT's order, normed.

        Raises:
            ValueError: for token types that the model has not.
        """
        hidden_states = tokens
        if self.config.scale_embeddings:
            hidden_states = hidden_states * math.sqrt(self.config.hidden_size)
        if self.embed_token_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(hidden_states.shape[:2], dtype=torch.long, device=hidden_states.device)
            hidden_states = hidden_states + self.embed_token_types(token_type_ids)
        elif token_type_ids is not None and not torch.compiler.is_compiling() and bool(token_type_ids.any()):
            raise ValueError(
                "token_type_ids given, but the model has none: leave them out, or set type_vocab_size of an encoder."
            )
        if self.embed_positions is not None:
            positions = self.embed_positions(layout.positions, layout.position_bound)
            hidden_states = hidden_states + positions.to(hidden_states.dtype)
        return self.embedding_dropout(self.embedding_norm(hidden_states))

    def run(
        self,
        inputs: dict[str, torch.Tensor | None],
        layout: Layout,
        cache: Cache | None = None,
        first_layer: int = 0,
        **kwargs: Any,
    ) -> FratrieModelOutput:
        """Embed the tokens and pass them through the blocks.

        A later stage of a pipeline receives what the layers before it made instead of the embeddings.

        Args:
            inputs: `input_ids` or `inputs_embeds`, `token_type_ids` and `global_attention_mask`, in the caller's form.
            layout: how the documents lie.
            cache: the past, extended in place; with a layout of rows alone.
            first_layer: the layer that `inputs_embeds` enter; above 0 they are states, which are not embedded.
            **kwargs: for `pass_blocks`.

        Returns:
            Outputs in the caller's form.

        Raises:
            ValueError: for a layer that is not there, for states with what only embeddings or a past go with, and for
                a `global_attention_mask` of another shape.
        """
        self._check_first_layer(first_layer, inputs, cache)
        tokens, token_type_ids = inputs["inputs_embeds"], inputs["token_type_ids"]
        if tokens is None:
            # Looked up in the caller's form, which tools that hook the embedding expect of its output.
            tokens = self.embed_tokens(inputs["input_ids"])
        past = None if cache is None else cache_of_layers(cache, held_layers(self.layers))
        layout.set_global_tokens(inputs["global_attention_mask"], past, self.config.is_causal_stack)
        if self.embed_positions is not None or self.rotary_emb is not None:
            layout.place(tokens.device, past)
        hidden_states = layout.pack(tokens)
        if first_layer == 0 and 0 in held_layers(self.layers):
            packed_types = None if token_type_ids is None else layout.pack(token_type_ids)
            hidden_states = self.embed(hidden_states, packed_types, layout)
        self.complete(layout, hidden_states, past)
        outputs = self.pass_blocks(hidden_states, layout, first_layer=first_layer, cache=cache, **kwargs)
        if cache is None:
            layout.restore(outputs)
        return outputs

    def _check_first_layer(
        self, first_layer: int, inputs: dict[str, torch.Tensor | None], cache: Cache | None
    ) -> None:
        if first_layer and self.config.reversible:
            raise ValueError(
                f"first_layer={first_layer}: what enters a layer of a reversible stack are two streams, not "
                "inputs_embeds: set reversible=False, or give first_layer=0."
            )
        if not 0 <= first_layer <= len(self.layers):
            raise ValueError(f"first_layer={first_layer}: give 0 to {len(self.layers)}, the number of layers.")
        if first_layer and (
            inputs["inputs_embeds"] is None or inputs["token_type_ids"] is not None or cache is not None
        ):
            raise ValueError(
                f"first_layer={first_layer}: give the states that enter this layer as inputs_embeds, without "
                "token_type_ids, which the embeddings hold, and without a cache (use_cache=False)."
            )

    def complete(self, layout: Layout, hidden_states: torch.Tensor, past: Cache | None) -> None:
        """Give a layout what the mixers of this device's layers need: masks, position biases, turns, shared parts."""
        layout.shared = dict(self.shared.items())
        held = held_layers(self.layers)
        kinds = [(self.mixers[index].mask_form, self.layer_types[index]) for index in held]
        layout.add_masks(self.config, kinds, hidden_states, past)
        layout.add_biases(self.position_bias, [self.layer_types[index] for index in held], hidden_states, past)
        layout.add_rotations(self.rotary_emb, self.layer_types, hidden_states)

    @capture_outputs
    def pass_blocks(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        encoder_hidden_states: torch.Tensor | None = None,
        first_layer: int = 0,
        **kwargs: Any,
    ) -> FratrieModelOutput:
        """Pass embedded tokens through the blocks and the final norm.

        Args:
            hidden_states: `(B, T, D)`, or `(1, N, D)`, as the layout says.
            layout: how the documents lie.
            encoder_hidden_states: `(B, S, D_encoder)`, of a stack with cross-attention.
            first_layer: the first to pass.
            **kwargs: cache and options, for the blocks.

        Raises:
            ValueError: for states of an encoder, where the stack has no cross-attention.
        """
        if encoder_hidden_states is not None and not getattr(self.config, "add_cross_attention", False):
            raise ValueError(
                f"encoder_hidden_states given, but this {type(self).__name__} has no cross-attention: build a decoder "
                "with add_cross_attention=True."
            )
        # Early exit (Elhoushi et al. 2024) lowers the number of layers for a while.
        layers: list[Any] = list(self.layers)[: self.config.num_hidden_layers]
        if self.config.reversible:
            shared = dict(layout.biases)
            if encoder_hidden_states is not None:
                shared["encoder"] = encoder_hidden_states
            passed = ReversibleLayers(layers, self.layer_types, {**kwargs, "layout": layout}, hidden_states.dtype)
            return FratrieModelOutput(last_hidden_state=self.norm(passed.run(hidden_states, shared)))
        for index in held_layers(layers):
            if index < first_layer:
                continue
            bias = layout.biases.get(self.layer_types[index])
            hidden_states = layers[index](hidden_states, encoder_hidden_states, bias, layout=layout, **kwargs)
        return FratrieModelOutput(last_hidden_state=self.norm(hidden_states))


def input_shape(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> tuple[int, int]:
    """`(B, T)` of whichever of the two is given.

    Raises:
        ValueError: when none or both are, and when it is empty.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
    if batch == 0 or length == 0:
        raise ValueError(f"Inputs of (batch, length) = {(batch, length)} hold no token: leave out what is empty.")
    return batch, length
