"""What a mixer is: what moves information between tokens, and what the rest of the package must know of it.

`Mixer` is the interface; `AttentionMixer` adds the projections of an attention around a kernel, `attend`.

Shapes: B batch, T queries, S keys, D hidden, H query heads, K key-value heads, C head size, N real tokens.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from .configuration import FratrieConfig
from .layout import Layout
from .linear_maps import apply_jointly
from .masks import MaskForm
from .normalization import build_norm
from .plans import Plan
from .positions import rotate


class Mixer(nn.Module):
    """What moves information between tokens.

    The configuration, the stacks, the parallel plans and the accounting ask the class for what they need to know; no
    other file names a mixer.

    Class attributes:
        layer_types: Hugging Face's layer types that it may run under, the usual one first. They decide the class of
            its cache, and the mask of the scores.
        own_fields: fields of the configuration that it alone reads, `None` where it is not used.
        enabled_by: the one of them that, set, makes it the default for its layer types. Of the mixers without one,
            the first of the registry is the default.
        runs_causal, runs_bidirectional: the stacks that it can be part of.
        takes_position_bias: whether it has scores that a position bias can be added to.
        takes_global_tokens: whether it reads which tokens the caller's `global_attention_mask` names.
        mask_form: the form in which it takes masks (see `MaskForm`).
        keeps_tokens: whether its cache holds something for every token, as keys and values are. Such a cache knows how
            many tokens it has seen, and can be exported.
        fits_paged_cache: whether continuous batching can serve it.
        adds_to_scores: whether it adds numbers of its own to the scores, which flash attention cannot.
        has_loss: whether it has a part in the training loss, which it passes through a `MixerLoss`.
        joint_maps: names of its linear maps that read the same input through `apply_jointly`, a tuple for each input.
        fits_onnx: whether ONNX has all of its operations.
    """

    layer_types: ClassVar[tuple[str, ...]]
    own_fields: ClassVar[tuple[str, ...]] = ()
    enabled_by: ClassVar[str | None] = None
    runs_causal: ClassVar[bool] = True
    runs_bidirectional: ClassVar[bool] = True
    takes_position_bias: ClassVar[bool] = False
    takes_global_tokens: ClassVar[bool] = False
    mask_form: ClassVar[MaskForm] = "padding"
    keeps_tokens: ClassVar[bool] = False
    fits_paged_cache: ClassVar[bool] = False
    adds_to_scores: ClassVar[bool] = False
    has_loss: ClassVar[bool] = False
    joint_maps: ClassVar[tuple[tuple[str, ...], ...]] = ()
    fits_onnx: ClassVar[bool] = True

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = (config.layer_types or [])[layer_idx]
        self.is_causal = config.is_causal_stack

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens of each document.

        Args:
            hidden_states: `(B, T, D)`, or the `(1, N, D)` of a layout that deals documents into groups.
            layout: how the documents lie, with their masks and rotary turns.
            position_bias: `(1, H, T, S)` to add to the scores, in mixers that take one.
            cache: what is kept of the past, extended in place.
            **kwargs: for the attention implementation.

        Returns:
            States in the shape of `hidden_states`, and attention weights `(B, H, T, S)` or `None`.
        """
        raise NotImplementedError

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Set fields that were left out to what follows from others, when a configuration is made."""

    @classmethod
    def shared_class(cls, config: FratrieConfig) -> type[nn.Module] | None:
        """What all its layers share: a class that the stack makes a module of, from the configuration.

        Each layer finds it under the name of its mixer's class in `layout.shared`. Each of several devices has it
        whole, and uses it for its own heads.
        """
        return None

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse a configuration that this mixer cannot serve in a layer of `layer_type`.

        Raises:
            ValueError: with the field, its value and the way out.
        """

    @classmethod
    def cache_layer(cls, config: FratrieConfig) -> DynamicLayer | None:
        """What keeps its past in a cache that grows, where none of Hugging Face's layers does."""
        return None

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """The styles of its modules and parameters, by their names within the mixer; empty for a whole copy each."""
        return {}

    def flops(self, length: int) -> int:
        """FLOPs of one row of this many tokens, those of its `nn.Linear` modules left out.

        Raises:
            ValueError: for a mixer that does not say.
        """
        raise ValueError(f"The operations of a {type(self).__name__} have no formula: give it a method `flops`.")

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """Bytes that its cache holds of one row after `length` tokens.

        Raises:
            ValueError: for a mixer that does not say.
        """
        raise ValueError(f"The cache of a {cls.__name__} has no formula: give it a class method `cache_bytes`.")

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Numbers of `dtype` per token that training keeps for the backward pass.

        Raises:
            ValueError: for a mixer that does not say.
        """
        raise ValueError(
            f"The activations of a {cls.__name__} have no formula: give it a class method `activation_numbers`."
        )


class MixerLoss(nn.Module):
    """What a mixer adds to the training loss passes through this, where the pass of a head finds it."""

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        """Hand on a weighed loss, a single number."""
        return loss


class AttentionMixer(Mixer):
    """Projections to queries, keys and values, head norms and rotary turns, around the kernel of a subclass."""

    joint_maps: ClassVar[tuple[tuple[str, ...], ...]] = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        self.rope_interleaved = config.rope_interleaved
        self.has_fine_rotations = "rotations" in (config.float32_parts or ())
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.attention_scale if config.attention_scale is not None else self.head_dim**-0.5
        self.build_projections(config)

    def source_size(self, config: FratrieConfig) -> int:
        """Width of the states that keys and values are made from."""
        return config.hidden_size

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the linear maps and head norms."""
        assert config.num_key_value_heads is not None
        query_size, group_size = (
            heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        source_size = self.source_size(config)
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(source_size, group_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(source_size, group_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.query_norm, self.key_norm = (
            build_norm(config.query_key_norm, self.head_dim, config.norm_eps, config.norm_bias) for _ in range(2)
        )

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some of the heads (Shoeybi et al. 2019)."""
        plan: Plan = {f"{name}_proj": "colwise" for name in "qkv"} | {"o_proj": "rowwise"}
        if config.query_key_norm is not None:
            plan |= {"query_norm": "shared_by_heads", "key_norm": "shared_by_heads"}
        return plan

    def split_heads(self, x_BTX: torch.Tensor) -> torch.Tensor:
        """`(B, T, H·C)` to `(B, T, H, C)`."""
        return x_BTX.unflatten(-1, (-1, self.head_dim))

    def project(
        self, x_BTD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `(B, H, T, C)`, keys and values `(B, K, T, C)` of the same states."""
        query_BTX, key_BTX, value_BTX = apply_jointly((self.q_proj, self.k_proj, self.v_proj), x_BTD)
        return self.form_query(query_BTX, turns), *self.form_key_value(key_BTX, value_BTX, turns)

    def project_query(
        self, x_BTD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the queries `(B, H, T, C)`, normed and turned."""
        return self.form_query(self.q_proj(x_BTD), turns)

    def project_key_value(
        self, x_BSD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, S, C)`, the keys normed and turned."""
        return self.form_key_value(self.k_proj(x_BSD), self.v_proj(x_BSD), turns)

    def form_query(self, query_BTX: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Bring projected queries `(B, T, H·C)` to `(B, H, T, C)`, normed and turned."""
        return self.turn(self.query_norm(self.split_heads(query_BTX)).transpose(1, 2), turns)

    def form_key_value(
        self, key_BSX: torch.Tensor, value_BSX: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring projected keys and values `(B, S, K·C)` to `(B, K, S, C)`, the keys normed and turned."""
        key_BKSC = self.turn(self.key_norm(self.split_heads(key_BSX)).transpose(1, 2), turns)
        return key_BKSC, self.split_heads(value_BSX).transpose(1, 2)

    def turn(self, x_BHTC: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Turn heads by the rotary cosines and sines, where the model has them."""
        if turns is None:
            return x_BHTC
        dtype = torch.promote_types(x_BHTC.dtype, torch.float32) if self.has_fine_rotations else x_BHTC.dtype
        return rotate(x_BHTC.to(dtype), turns, self.rope_interleaved).to(x_BHTC.dtype)

    def run_kernel(
        self,
        layout: Layout,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        position_bias: torch.Tensor | None,
        gate_BTX: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `attend` on the documents of a layout.

        Args:
            layout: of the documents.
            states: query, key and value `(B, heads, T, C)`.
            position_bias: `(1, H, T, S)` to add to the scores.
            gate_BTX: `(B, T, H·C)`, whose sigmoid the mixed values are multiplied by before their projection.
            **kwargs: for `attend`.

        Returns:
            The mixed values, their heads joined and projected, `(B, T, D)`; and the weights, if the kernel gives them.
        """
        kernel = partial(self.attend, **kwargs)
        mask_kind = (self.mask_form, self.layer_type)
        mixed_BTHC, weights_BHTS = layout.run(kernel, states, mask_kind, position_bias, token_dim=2)
        joined_BTX = mixed_BTHC.flatten(-2)
        return self.o_proj(joined_BTX if gate_BTX is None else joined_BTX * gate_BTX.sigmoid()), weights_BHTS

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The kernel: mix values.

        Args:
            query_BHTC: queries.
            key_BKSC, value_BKSC: keys and values.
            attention_mask: in the mixer's `mask_form`.
            position_bias: `(1, H, T, S)` or `None`.
            **kwargs: what the mixer handed to `run_kernel`.

        Returns:
            Mixed values `(B, T, H, C)`, and the weights `(B, H, T, S)` or `None`.
        """
        raise NotImplementedError
