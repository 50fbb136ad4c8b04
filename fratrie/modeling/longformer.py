"""Longformer attention: a sliding window, and global tokens that see all others and are seen by them.

Tokens see their neighbours and, by the same projections, the global tokens. The query of a global token sees all
tokens, through projections of its own (Beltagy et al. 2020, section 3). In a causal stack all this concerns earlier
tokens alone. The cost is that of the window and of the global tokens, times the length.

Shapes: B batch, T queries, S keys, D hidden, H query heads, K key-value heads, C head size, G global tokens.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache

from .attention import SoftmaxAttention
from .configuration import FratrieConfig
from .global_tokens import OTHER_CHOICE, DenseGlobals, GlobalsInBlocks
from .layout import Layout
from .masks import MaskForm
from .plans import Plan
from .window_cache import WindowAndGlobalsLayer, own_layer
from .windows import Attend, FurtherKeys, attend_in_blocks

_DEFAULT_WINDOW = 256
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LongformerAttention(SoftmaxAttention):
    """Softmax attention within `sliding_window`, and of global tokens to all.

    It runs under full attention, since Hugging Face's cache of a window would forget global tokens. Its own keeps them
    beside the window, so that they have to be in the first pass, where they can see all tokens before them. A static
    cache keeps the keys and values of all tokens, and where there are global tokens both kinds of them.
    """

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    own_fields = ()
    mask_form: ClassVar[MaskForm] = "globals"
    takes_position_bias = False
    takes_global_tokens = True
    fits_paged_cache = False

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Give the window the size of published models."""
        config.sliding_window = _DEFAULT_WINDOW if config.sliding_window is None else config.sliding_window

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse a window that lets nothing be seen (see `Mixer.check`)."""
        if (config.sliding_window or 0) <= 0:
            raise ValueError(
                f"mixer_types has longformer layers, but sliding_window={config.sliding_window}: set it to a positive "
                "size."
            )
        # See `SoftmaxAttention.check`.
        if config.is_causal_stack and config.sliding_window == 1:
            raise ValueError(
                "sliding_window=1 would let a token see itself and global ones alone, for which no cache is made: set "
                "it to at least 2."
            )

    @classmethod
    def cache_layer(cls, config: FratrieConfig) -> WindowAndGlobalsLayer:
        """One of the window and the global tokens."""
        assert config.sliding_window is not None
        return WindowAndGlobalsLayer(config.sliding_window)

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the linear maps: those of all attention, and of global queries and what these see."""
        super().build_projections(config)
        self.q_global_proj, self.k_global_proj, self.v_global_proj = (
            nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some of the heads."""
        return super().tensor_parallel_plan(config) | {f"{name}_global_proj": "colwise" for name in "qkv"}

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`); the layout says which tokens are global."""
        turns = layout.rotations.get(self.layer_type)
        states = [*self.project(hidden_states, turns)]
        mask_kind = (self.mask_form, self.layer_type)
        layer = None if cache is None else own_layer(cache, self.layer_idx)
        is_first = layer is None or layer.get_seq_length() == 0
        if layout.global_tokens is not None and is_first:
            states += self.project_globally(hidden_states, turns)
        if layer is not None:
            states[1:3] = layer.update(*states[1:3])
            if layout.global_tokens is not None and is_first:
                _keep_globals(layer, states, layout.masks[mask_kind].places_BG)
        elif cache is not None:
            states = self._after_past(states, cache)
        kernel = partial(self.attend_with_globals if len(states) > 3 else self.attend, **kwargs)
        mixed_BTHC, weights_BHTS = layout.run(kernel, states, mask_kind, token_dim=2)
        mixed_BTD = self.o_proj(mixed_BTHC.flatten(-2))
        if len(states) == 3 and torch.is_grad_enabled():
            mixed_BTD = mixed_BTD + self._nothing_of_global_weights(hidden_states)
        return mixed_BTD, weights_BHTS

    def project_globally(self, x_BTD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> States:
        """Queries of global tokens `(B, H, T, C)`, and keys and values `(B, K, T, C)` of what they see."""
        query_BHTC, key_BKTC = (
            self.turn(norm(self.split_heads(project(x_BTD))).transpose(1, 2), turns)
            for norm, project in ((self.query_norm, self.q_global_proj), (self.key_norm, self.k_global_proj))
        )
        return query_BHTC, key_BKTC, self.split_heads(self.v_global_proj(x_BTD)).transpose(1, 2)

    def _nothing_of_global_weights(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Zero: gives the weights of global tokens a gradient where there are none, as data parallelism needs."""
        no_token = x_BTD[:1, :0]
        return torch.stack([project(no_token).sum() for project in self._global_projections()]).sum()

    def _global_projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_global_proj, self.k_global_proj, self.v_global_proj

    def _after_past(self, states: list[torch.Tensor], cache: Cache) -> list[torch.Tensor]:
        """Keys and values of the past and the present; those of global queries are further heads in the cache.

        Raises:
            ValueError: when a past was made without global tokens, and goes on with some, or the other way round.
        """
        keys, values = (torch.cat(states[start::3], dim=1) for start in (1, 2))
        layers: list[Any] = getattr(cache, "layers", [])
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        past = getattr(layer, "keys", None)
        if past is not None and past.numel() and past.shape[1] != keys.shape[1]:
            raise ValueError(OTHER_CHOICE)
        keys, values = cache.update(keys, values, self.layer_idx)
        parts = len(states) // 3
        together = zip(states[::3], keys.chunk(parts, dim=1), values.chunk(parts, dim=1), strict=True)
        return [x for triple in together for x in triple]

    def attend_with_globals(self, *states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The kernel where there are global tokens.

        Args:
            *states: queries `(B, H, T, C)`, keys and values `(B, K, S, C)`, the same three by the projections of
                global queries, the mask (see `global_tokens`), and `None` for a position bias.
            **kwargs: for the attention implementation.

        Returns:
            Mixed values `(B, T, H, C)`, and the weights `(B, H, T, S)` or `None`.
        """
        local: States = (states[0], states[1], states[2])
        of_globals: States = (states[3], states[4], states[5])
        mask = states[6]
        if isinstance(mask, GlobalsInBlocks):
            return self._in_blocks(local, of_globals, mask, **kwargs), None
        assert isinstance(mask, DenseGlobals)
        mixed_BTHC, weights_BHTS = self.attend(*local, mask.local, None, **kwargs)
        global_BTHC, global_BHTS = self.attend(*of_globals, mask.whole, None, **kwargs)
        if weights_BHTS is not None and global_BHTS is not None:
            weights_BHTS = torch.where(mask.is_global_BT[:, None, :, None], global_BHTS, weights_BHTS)
        return torch.where(mask.is_global_BT[..., None, None], global_BTHC, mixed_BTHC), weights_BHTS

    def _in_blocks(self, local: States, of_globals: States, mask: GlobalsInBlocks, **kwargs: Any) -> torch.Tensor:
        attend: Attend = partial(self.attend, position_bias=None, **kwargs)
        length = local[0].shape[2]
        places_BG = mask.places_BG.clamp_max(length - 1)
        key_BKGC, value_BKGC = (_take(x, places_BG) for x in local[1:])
        further = FurtherKeys(key_BKGC, value_BKGC, mask.seen_BTG)
        mixed_BTHC = attend_in_blocks(attend, local, mask.window, further)
        query_BHTC, key_BKTC, value_BKTC = of_globals
        global_BGHC, _ = attend(_take(query_BHTC, places_BG), key_BKTC, value_BKTC, mask.sees_B1GT)
        # What has no place goes to one after the last token.
        roomy_BTHC = nn.functional.pad(mixed_BTHC, (0, 0, 0, 0, 0, 1))
        index_BGHC = mask.places_BG[..., None, None].expand(-1, -1, *global_BGHC.shape[2:])
        return roomy_BTHC.scatter(1, index_BGHC, global_BGHC)[:, :length]

    def flops(self, length: int) -> int:
        """As of a sliding layer: without global tokens, whose projections then compute nothing."""
        unused = sum(2 * length * project.weight.numel() for project in self._global_projections())
        return self.window_flops(length) - unused

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """As of a sliding layer: without global tokens, each of which is one token more."""
        return super().cache_bytes(config, "sliding_attention", length, dtype)

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """As of a sliding layer: without global tokens (see `Mixer.activation_numbers`)."""
        return super().activation_numbers(config, "sliding_attention", length, dtype)


def _keep_globals(layer: WindowAndGlobalsLayer, states: list[torch.Tensor], places_BG: torch.Tensor) -> None:
    at_BG = places_BG.clamp_max(states[0].shape[2] - 1)
    layer.keep_globals(_take(states[1], at_BG), _take(states[2], at_BG), places_BG)


def _take(x_BHTC: torch.Tensor, places_BG: torch.Tensor) -> torch.Tensor:
    """Take the tokens in these places, `(B, H, G, C)`."""
    _, heads, _, size = x_BHTC.shape
    return x_BHTC.gather(2, places_BG[:, None, :, None].expand(-1, heads, -1, size))
