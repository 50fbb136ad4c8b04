"""Linformer: keys and values of a text are mixed into a fixed number of rows, which every token attends.

The output is softmax(s · Q (E K)ᵀ) (F V), with learned maps E and F from n positions to k rows (Wang et al. 2020,
equation 7), at a cost that grows with the length and not its square.

Shapes: B batch, T tokens, S the same as keys, D hidden, H heads, K key-value heads, C head size, R rows that they are
mixed into (the paper's k), G maps of a kind: K or 1.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import maybe_autocast

from .attention import eager_attention_forward
from .configuration import FratrieConfig
from .layout import Layout
from .masks import real_tokens_first
from .mixer import AttentionMixer
from .plans import Plan


class PositionMap(nn.Module):
    """A learned map from positions to rows, one for all heads or one each."""

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        assert config.linformer_rank is not None and config.num_key_value_heads is not None
        maps = config.num_key_value_heads if config.linformer_sharing == "none" else 1
        self.weight = nn.Parameter(torch.empty(maps, config.linformer_rank, config.max_position_embeddings))

    def initialise(self, std: float) -> None:
        """Draw what keeps distances on the average (the paper's theorem 1)."""
        init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, length: int) -> torch.Tensor:
        """Return the map of the first positions, `(1, G, R, T)`.

        Raises:
            ValueError: for more than there are.
        """
        most = self.weight.shape[-1]
        if not torch.compiler.is_compiling() and length > most:
            raise ValueError(
                f"Rows of {length} tokens are longer than max_position_embeddings={most}, for which the mixer "
                "'linformer' was made: cut them, or build a model with more positions."
            )
        # A copy, since hooks find no gradient function of a view of weights.
        return self.weight[None, ..., :length].clone()


def mix_positions(map_1GRT: torch.Tensor, x_BKTC: torch.Tensor) -> torch.Tensor:
    """Apply the map of each head, or the one of all in a single product, `(B, K, R, C)`."""
    if map_1GRT.shape[1] > 1:
        return map_1GRT @ x_BKTC
    mixed_BRX = map_1GRT[:, 0] @ x_BKTC.transpose(1, 2).flatten(2)
    return mixed_BRX.unflatten(-1, (x_BKTC.shape[1], -1)).transpose(1, 2)


class Linformer(AttentionMixer):
    """Attention to a fixed number of mixtures of the tokens, which the positions in the text decide.

    It is bidirectional: every mixture holds tokens from all over the text. A text has no more tokens than the maps
    have positions, `max_position_embeddings`. Its kernel is torch's own, whatever the attention implementation, except
    for `"eager"`, which is written out.
    """

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    own_fields: ClassVar[tuple[str, ...]] = ("linformer_rank", "linformer_sharing")
    runs_causal = False
    mask_form = "lengths"

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        sharing = config.linformer_sharing
        self.key_map = None if sharing == "layerwise" else PositionMap(config)
        self.value_map = PositionMap(config) if sharing in ("none", "headwise") else None

    @classmethod
    def shared_class(cls, config: FratrieConfig) -> type[nn.Module] | None:
        """Where all layers share one map, that."""
        return PositionMap if config.linformer_sharing == "layerwise" else None

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """A quarter of the positions, which costs the paper next to nothing; maps that the heads of a layer share."""
        if config.linformer_rank is None:
            config.linformer_rank = max(1, config.max_position_embeddings // 4)
        if config.linformer_sharing is None:
            config.linformer_sharing = "headwise"

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse empty maps, and positions that a mixture of keys has not (see `Mixer.check`)."""
        if config.linformer_rank is not None and config.linformer_rank <= 0:
            raise ValueError(f"linformer_rank={config.linformer_rank} must be at least 1.")
        if config.position_type == "rotary":
            raise ValueError(
                "mixer_types has 'linformer', which mixes keys of many positions before they meet a query, so that "
                "position_type='rotary' would tell it no distances: use 'learned', 'sinusoidal' or 'none'."
            )

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some heads, and the maps of all."""
        plan, sharing = super().tensor_parallel_plan(config), config.linformer_sharing
        if sharing != "layerwise":
            plan["key_map"] = "own_heads" if sharing == "none" else "shared_by_heads"
        if sharing in ("none", "headwise"):
            plan["value_map"] = plan["key_map"]
        return plan

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`); there are no scores of tokens, and no weights."""
        key_map = layout.shared[type(self).__name__] if self.key_map is None else self.key_map
        maps = (key_map, self.value_map or key_map)
        return self.run_kernel(layout, self.project(hidden_states), None, maps=maps)

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        maps: tuple[nn.Module, nn.Module] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """The formula above (see `AttentionMixer.attend`), computed in float32 or better."""
        assert maps is not None
        given, dtype = query_BHTC.dtype, torch.promote_types(torch.float32, query_BHTC.dtype)
        query_BHTC, key_BKSC, value_BKSC = (x.to(dtype) for x in (query_BHTC, key_BKSC, value_BKSC))
        if attention_mask is not None:
            # Positions are those in the text, wherever its padding stands.
            order_BT = real_tokens_first(attention_mask)
            key_BKSC, value_BKSC = (
                (x * attention_mask[:, None, :, None].to(dtype)).gather(2, order_BT[:, None, :, None].expand_as(x))
                for x in (key_BKSC, value_BKSC)
            )
        with maybe_autocast(query_BHTC.device.type, enabled=False):
            key_BKRC, value_BKRC = (
                mix_positions(one(x.shape[2]).to(dtype), x)
                for one, x in zip(maps, (key_BKSC, value_BKSC), strict=True)
            )
            dropout = self.config.attention_dropout if self.training else 0.0
            kernel = eager_attention_forward if self.config._attn_implementation == "eager" else sdpa_attention_forward
            states = (query_BHTC, key_BKRC, value_BKRC)
            mixed_BTHC = kernel(self, *states, None, scaling=self.scaling, dropout=dropout)[0]
        return mixed_BTHC.to(given), None

    def flops(self, length: int) -> int:
        """Mixtures of keys and values, scores, and values mixed by them (see `Mixer.flops`)."""
        assert self.config.linformer_rank is not None
        return 4 * length * self.config.linformer_rank * (self.k_proj.out_features + self.q_proj.out_features)

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """In float32 queries, keys, values and weights (see `Mixer.activation_numbers`)."""
        assert config.linformer_rank is not None and config.num_key_value_heads is not None
        assert config.head_dim is not None
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        rows = config.linformer_rank * heads * (1 + 2 * config.head_dim / length)
        exact = heads * config.head_dim + 2 * groups * config.head_dim + rows
        return config.hidden_size + heads * config.head_dim + exact * max(1.0, 4 / dtype.itemsize)
