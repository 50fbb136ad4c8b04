"""The cache of a window and global tokens: as large after a long text as after a short one.

Shapes: B batch, K key-value heads, S tokens kept, C head size, G global tokens of the row that has the most.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from .configuration import FratrieConfig

if TYPE_CHECKING:
    from .mixer import Mixer

# The place of a global token that a row has not: after all others.
_NOWHERE = torch.iinfo(torch.int64).max


class WindowAndGlobalsLayer(DynamicSlidingWindowLayer):
    """Keeps the last `sliding_window - 1` tokens, as Hugging Face's does, and the global ones among those before.

    Attributes:
        global_keys, global_values: `(B, K, G, C)`, or `None` where no choice of global tokens was given.
        global_places: where they are in their rows, `(B, G)`.
    """

    global_keys: torch.Tensor | None = None
    global_values: torch.Tensor | None = None
    global_places: torch.Tensor | None = None

    def keep_globals(self, key_BKGC: torch.Tensor, value_BKGC: torch.Tensor, places_BG: torch.Tensor) -> None:
        """Keep the global tokens of a first pass, in which a place behind the last token means that there is none."""
        self.global_keys, self.global_values = key_BKGC, value_BKGC
        self.global_places = places_BG.masked_fill(places_BG >= self.get_seq_length(), _NOWHERE)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return keys and values of the global ones of the past, then of the window."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.global_keys is None or self.global_values is None:
            return keys, values
        return torch.cat((self.global_keys, keys), dim=2), torch.cat((self.global_values, values), dim=2)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens (see Hugging Face's method), global ones among them."""
        super().crop(tokens_to_remove)
        if not self.get_seq_length():
            self.global_keys = self.global_values = self.global_places = None
        elif self.global_places is not None:
            gone = self.global_places >= self.get_seq_length()
            self.global_places = self.global_places.masked_fill(gone, _NOWHERE)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.global_keys = self.global_values = self.global_places = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows of these beams."""
        super().reorder_cache(beam_idx)
        self._change_globals(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self._change_globals(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._change_globals(lambda x: x[indices])

    def _change_globals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.global_keys is not None and self.global_values is not None and self.global_places is not None:
            self.global_keys, self.global_values = change(self.global_keys), change(self.global_values)
            self.global_places = change(self.global_places)


def choose_layers(
    cache: Cache | None, config: FratrieConfig, mixers: Sequence[type["Mixer"]], is_assistant: bool | None
) -> Cache | None:
    """Lay out a cache for `generate`, before assisted generation asks its layers to keep what it may take back.

    The drafts of an assistant are taken back as far as into the prompt, whose last token, read anew, may be global and
    see all before it: its cache keeps all tokens.
    """
    if cache is not None and is_assistant and any(mixer.cache_layer(config) for mixer in mixers):
        if cache.get_seq_length():
            return cache
        is_pair = isinstance(cache, EncoderDecoderCache)
        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if is_pair else DynamicCache()
    give_own_layers(cache, config, mixers)
    return cache


def give_own_layers(cache: Cache | None, config: FratrieConfig, mixers: Sequence[type["Mixer"]]) -> None:
    """Lay out a cache that is still empty for mixers with a layer of their own in it.

    Others keep all tokens: static ones, those that were not made from a configuration, and those that lie on the host,
    of which Hugging Face needs one layer at least that is not sliding.
    """
    layers = [] if getattr(cache, "offloading", False) else _layers_of_tokens(cache)
    for index, mixer in enumerate(mixers[: len(layers)]):
        if type(layers[index]) is DynamicLayer and not layers[index].is_initialized:
            layers[index] = mixer.cache_layer(config) or layers[index]


def own_layer(cache: Cache, index: int | None = None) -> WindowAndGlobalsLayer | None:
    """The layer of this index, or the first one, if it is of this kind."""
    layers = _layers_of_tokens(cache)
    chosen = layers if index is None else layers[index : index + 1]
    return next((layer for layer in chosen if isinstance(layer, WindowAndGlobalsLayer)), None)


def _layers_of_tokens(cache: Cache | None) -> list[Any]:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return getattr(own, "layers", [])
