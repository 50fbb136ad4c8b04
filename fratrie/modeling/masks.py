"""What a caller may say of which tokens are seen, and the forms in which mixers take it.

Shapes: B batch, T queries, S keys (past and present), D hidden, G global tokens.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_first_full_attention_index,
)

from .configuration import FratrieConfig
from .global_tokens import OTHER_CHOICE, DenseGlobals, dense_mask, find_places, mask_after_past, mask_in_blocks
from .window_cache import WindowAndGlobalsLayer, own_layer
from .windows import Window, reach, window_in_blocks

# "scores": a mask of the scores, as the attention implementation takes it; it follows the layer type.
#     Long rows of sliding layers have a `Window` in its place, where that is faster.
# "globals": the same for mixers of a window and global tokens (see `global_tokens`).
# "padding": real tokens `(B, T)`, or `None`: what lies after the last token of a document may pass for real, which a
#     causal mixer does not feel.
# "lengths": real tokens `(B, T)`, or `None` where all are real: for mixers that must not take padding for a token
#     anywhere, since they sort, compress or read from the end.
# "history": the same, with the tokens of the past: `(B, S)`.
MaskForm = Literal["scores", "globals", "padding", "lengths", "history"]

_SCORE_MASKS = {
    ("full_attention", True): create_causal_mask,
    ("full_attention", False): create_bidirectional_mask,
    ("sliding_attention", True): create_sliding_window_causal_mask,
    ("sliding_attention", False): create_bidirectional_sliding_window_mask,
}


class GivenMask(NamedTuple):
    """The attention mask of a caller, by its form.

    Attributes:
        padding: `(B, S)`, zero at padding.
        ready: a mask of the scores, `(B, 1, T, S)`, or what else an attention implementation takes.
        by_layer_type: a mask that is ready for each layer type.
        global_tokens: `(B, up to S)`, nonzero at tokens that see all others and are seen by them.
    """

    padding: torch.Tensor | None = None
    ready: Any = None
    by_layer_type: Mapping[str, Any] | None = None
    global_tokens: torch.Tensor | None = None

    @classmethod
    def read(cls, attention_mask: Any) -> "GivenMask":
        """Sort out what the caller gave.

        Raises:
            ValueError: for a tensor that is neither padding nor a mask of the scores.
        """
        if isinstance(attention_mask, dict):
            return cls(by_layer_type=attention_mask)
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4:
            return cls(ready=attention_mask)
        if attention_mask.ndim == 2:
            return cls(padding=attention_mask)
        raise ValueError(
            f"An attention_mask of shape {tuple(attention_mask.shape)} is neither padding (batch, length) nor a mask "
            "that is ready, (batch, 1, queries, keys)."
        )


def build_mask(
    config: FratrieConfig,
    kind: tuple[MaskForm, str],
    states: torch.Tensor,
    given: GivenMask,
    cache: Cache | None = None,
    position_ids: torch.Tensor | None = None,
) -> Any:
    """The mask of rows of tokens.

    Args:
        config: of the stack.
        kind: form of the mask, and layer type.
        states: `(B, T, …)`, of which shape, dtype and device are read.
        given: the caller's mask.
        cache: the past.
        position_ids: `(B or 1, T)`, where the caller gave them; positions that start anew separate documents.

    Raises:
        ValueError: for a layer type that `given` leaves out, a mask of scores for a mixer that has none, and padding
            that the attention implementation would not see.
    """
    form, layer_type = kind
    if given.padding is not None:
        _require_mask_function(config)
    if form in ("scores", "globals"):
        window = None
        if form == "globals" or layer_type == "sliding_attention":
            window = _find_window(config, states.shape[1], given, cache, position_ids)
        if form == "globals":
            return _global_mask(config, layer_type, states, given, cache, window, position_ids)
        return window or _score_mask(config, layer_type, states, given, cache, position_ids)
    if given.by_layer_type is not None:
        # Of a cache that counts on the device, Hugging Face tells layers that keep tokens by masks of the scores.
        of_scores = cache is not None and layer_type in ("full_attention", "sliding_attention")
        return _of_layer_type(given.by_layer_type, layer_type, (2, 4) if of_scores else (2,))
    _require_no_scores(config, form, given.ready)
    # Hugging Face's own function takes a single token for real, which lets padding into the state of linear attention.
    if given.padding is None or form == "history":
        return given.padding
    return given.padding[:, -states.shape[1] :]


def _require_no_scores(config: FratrieConfig, form: MaskForm, mask: Any) -> None:
    if mask is None:
        return
    layers = zip(config.mixer_types or [], config.mixers, strict=True)
    name = next(name for name, mixer in layers if mixer.mask_form == form)
    shown = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise ValueError(
        f"Mixers such as {name!r} take no mask of single scores: give the padding as attention_mask (batch, length), "
        f"not {shown}."
    )


def real_tokens_first(mask_BT: torch.Tensor) -> torch.Tensor:
    """The places `(B, T)` of each row in an order that puts real tokens before padding, and else changes none."""
    return (mask_BT == 0).long().argsort(dim=1, stable=True)


def _of_layer_type(masks: Mapping[str, Any], layer_type: str, dimensions: tuple[int, ...]) -> Any:
    if layer_type not in masks:
        raise ValueError(f"attention_mask has {sorted(masks)}, but no mask of {layer_type!r}: add it.")
    mask = masks[layer_type]
    if isinstance(mask, torch.Tensor) and mask.ndim not in dimensions:
        needed = "padding (batch, length)" if 2 in dimensions else "a mask that is ready, (batch, 1, queries, keys)"
        raise ValueError(
            f"attention_mask[{layer_type!r}] has the shape {tuple(mask.shape)}, but these layers take {needed}."
        )
    return mask


def _score_mask(
    config: FratrieConfig,
    layer_type: str,
    states: torch.Tensor,
    given: GivenMask,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
) -> Any:
    """A mask of the scores, as the attention implementation takes it."""
    implementation = config._attn_implementation
    if given.by_layer_type is not None:
        takes_scores = implementation in ("eager", "sdpa", "blockwise")  # flash attention takes padding
        ready = _of_layer_type(given.by_layer_type, layer_type, (4,) if takes_scores else (2, 4))
        is_of_scores = isinstance(ready, torch.Tensor) and ready.ndim == 4
        return ready_mask(ready, states.dtype, implementation) if is_of_scores else ready
    mask = given.padding if given.ready is None else given.ready
    if isinstance(given.ready, torch.Tensor):
        mask = ready_mask(given.ready, states.dtype, implementation)
    assert (layer_type, config.is_causal_stack) in _SCORE_MASKS, f"no mask of scores is known for {layer_type!r}"
    make_mask = _SCORE_MASKS[layer_type, config.is_causal_stack]
    return make_mask(config, states, mask, cache=cache, position_ids=position_ids)


def _find_window(
    config: FratrieConfig, length: int, given: GivenMask, cache: Cache | None, position_ids: torch.Tensor | None
) -> Window | None:
    """The window of rows that are long enough for blocks, and see neither a past nor a mask of the caller's own.

    Positions tell of packed documents in compiled graphs alone: else these have been sorted out before.
    """
    if given.ready is not None or given.by_layer_type is not None or not _is_empty(cache):
        return None
    if position_ids is not None and torch.compiler.is_compiling():
        return None
    window = window_in_blocks(config, length)
    if window is None or given.padding is None:
        return window
    return window._replace(seen_BT=given.padding[:, -length:].bool())


def _is_empty(cache: Cache | None) -> bool:
    """Whether a cache hands back the keys that it gets and nothing else: static ones have room after them."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, DynamicCache):
        return cache is None
    return all(layer.get_seq_length() == 0 for layer in cache.layers if isinstance(layer, DynamicLayer))


def _global_mask(
    config: FratrieConfig,
    layer_type: str,
    states: torch.Tensor,
    given: GivenMask,
    cache: Cache | None,
    window: Window | None,
    position_ids: torch.Tensor | None,
) -> Any:
    """The mask of a window and global tokens (see `global_tokens`).

    Raises:
        ValueError: for attention implementations that take no mask of the scores, and see `_mask_after_past`.
    """
    tokens, length = given.global_tokens, states.shape[1]
    layer = None if cache is None else own_layer(cache)
    if layer is not None and layer.get_seq_length():
        return _mask_after_past(config, states, given, layer)
    if window is not None and not (tokens is not None and torch.compiler.is_compiling()):
        return window if tokens is None else mask_in_blocks(window, tokens, config.is_causal_stack)
    whole = _score_mask(config, layer_type, states, given, cache, position_ids)
    if whole is not None and (not isinstance(whole, torch.Tensor) or whole.ndim != 4):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} takes no mask of single scores, as a window with "
            "global tokens needs: use 'sdpa' or 'eager'."
        )
    sizes: tuple[Any, Any] = ((length, 0), (length, 0))
    if cache is not None:
        index = find_first_full_attention_index(cache)
        sizes = ((length, cache.get_query_offset(index)), cache.get_mask_sizes(length, index))
    queries_T, keys_S = (torch.arange(size, device=states.device) + offset for size, offset in sizes)
    assert config.sliding_window is not None
    near = Window(*reach(config.sliding_window, config.is_causal_stack))
    make_ready = partial(ready_mask, dtype=states.dtype, implementation=config._attn_implementation)
    mask = dense_mask(near, whole, tokens, (queries_T, keys_S), make_ready)
    if layer is not None and isinstance(mask, DenseGlobals):
        real_BT = mask.is_global_BT if given.padding is None else mask.is_global_BT & given.padding.bool()
        mask = mask._replace(places_BG=find_places(real_BT))
    return mask


def _mask_after_past(
    config: FratrieConfig, states: torch.Tensor, given: GivenMask, layer: WindowAndGlobalsLayer
) -> torch.Tensor:
    """The mask of tokens after a past of which a window and the global tokens are kept.

    Raises:
        ValueError: for a mask of the scores, and for global tokens, which would see what is kept no longer.
    """
    way_out = "use a cache that keeps all tokens, DynamicCache() or a static one, or use_cache=False."
    if given.ready is not None or given.by_layer_type is not None:
        raise ValueError(
            "Mixers such as 'longformer' keep a window of the past and its global tokens, which a mask of single "
            f"scores does not fit: give the padding as attention_mask (batch, length), or {way_out}"
        )
    if (given.global_tokens is None) != (layer.global_places is None):
        raise ValueError(OTHER_CHOICE)
    length, past = states.shape[1], layer.get_seq_length()
    keys, offset = layer.get_mask_sizes(length)
    real_BS = None if given.padding is None else given.padding.bool()
    if given.global_tokens is not None and given.global_tokens.shape[1] > past:
        new_BT = given.global_tokens[:, past:].bool()
        if bool((new_BT if real_BS is None else new_BT & real_BS[:, past:]).any()):
            raise ValueError(
                "global_attention_mask has global tokens after a past, of whose tokens they are to see all: give all "
                f"global tokens in the first pass (without prefill_chunk_size), or {way_out}"
            )
    queries_T, keys_S = (torch.arange(size, device=states.device) for size in (length, keys))
    seen_BS = None if real_BS is None else real_BS[:, offset : offset + keys]
    near = Window(*reach(layer.sliding_window, is_causal=True))
    mask = mask_after_past(near, (queries_T + past, keys_S + offset), layer.global_places, seen_BS)
    return ready_mask(mask, states.dtype, config._attn_implementation)


def ready_mask(mask: torch.Tensor, dtype: torch.dtype, implementation: str | None) -> torch.Tensor:
    """A mask `(B, 1, T, S)` of the caller's own, true or 0 where a query sees a key, as the implementation takes it.

    Raises:
        ValueError: for numbers that may mean either.
    """
    if mask.dtype == torch.bool:
        seen = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, seen, torch.finfo(dtype).min) if implementation == "eager" else mask
    if not mask.is_floating_point():
        raise ValueError(
            f"A 4D attention_mask of {mask.dtype} may mean either: give booleans (true where a query sees a key) or "
            "floating-point numbers to add to the scores."
        )
    return mask


def build_cross_mask(
    config: FratrieConfig, shape: tuple[int, int], encoder_states: torch.Tensor, padding: torch.Tensor | None
) -> Any:
    """The mask by which queries of `shape` `(B, T)` attend the states `(B, S, D)` of an encoder.

    Args:
        config: of the decoder.
        shape: of the queries.
        encoder_states: what is attended.
        padding: `(B, S)`, zero at padding; or a mask of the scores that is ready.

    Raises:
        ValueError: for padding of another shape, or that the attention implementation would not see.
    """
    given = GivenMask.read(padding)
    if given.padding is not None:
        if given.padding.shape != encoder_states.shape[:2] and not torch.compiler.is_compiling():
            raise ValueError(
                f"An attention_mask of shape {tuple(given.padding.shape)} does not fit states of shape "
                f"{tuple(encoder_states.shape[:2])}."
            )
        _require_mask_function(config)
    queries = encoder_states.new_empty(*shape, 1)  # Hugging Face's function reads the shape of states
    return create_bidirectional_mask(config, queries, padding, encoder_hidden_states=encoder_states)


def _require_mask_function(config: FratrieConfig) -> None:
    """Refuse padding where the attention implementation is not registered with `AttentionMaskInterface`."""
    name = config._attn_implementation
    if name not in AttentionMaskInterface():
        raise ValueError(
            f"attn_implementation={name!r} has no mask function, so it would attend padding: register one, for "
            f"example AttentionMaskInterface.register({name!r}, sdpa_mask)."
        )
