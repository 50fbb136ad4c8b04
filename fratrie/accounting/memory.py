"""Memory of the cache in generation, exact, and of the activations in training, an estimate.

Shapes: T tokens per row, S keys, H query heads, K key-value heads, C head size, D hidden, F feed-forward, E experts,
V vocabulary.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

from ..modeling.attention import CrossAttention
from .parameters import build_on_meta, require_positive

# Numbers that an activation keeps for each of its own: its input, but nothing where its output tells the gradient, and
# more where it is a formula of several operations.
_KEPT_BY_ACTIVATION = {"relu": 0, "gelu_new": 4}


def cache_bytes(
    config: PreTrainedConfig,
    batch_size: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    source_length: int | None = None,
) -> int:
    """Bytes of keys, values and states that a decoder keeps after `length` tokens per row; 0 for an encoder.

    Latent attention keeps its latents and turned keys; sliding layers keep one token less than their window, linear
    ones a state `(H, C, C + 1)` in float32 or better; cross-attention keeps the keys and values of the source.

    Args:
        config: of the model (see `build_on_meta`).
        batch_size: rows.
        length: tokens T per row; of the decoder in a seq2seq model.
        dtype: type of the numbers.
        source_length: tokens per row of the encoder in a seq2seq model; `length` by default.

    Raises:
        ValueError: for a mixer that does not say, and for less than one row or token.
    """
    source = length if source_length is None else source_length
    require_positive(batch_size=batch_size, length=length, source_length=source)
    if config.model_type == "fratrie_encoder":
        return 0
    stack: Any = config.decoder if config.model_type == "fratrie_seq2seq" else config
    kept = sum(
        mixer.cache_bytes(stack, layer_type, length, dtype)
        for mixer, layer_type in zip(stack.mixers, stack.layer_types, strict=True)
    )
    cross = source * CrossAttention.numbers_kept(stack) * dtype.itemsize if stack.add_cross_attention else 0
    return batch_size * (kept + len(stack.layer_types) * cross)


def activation_bytes(
    config: PreTrainedConfig,
    batch_size: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    source_length: int | None = None,
) -> int:
    """Estimate the bytes that a training step keeps for its backward pass, in the manner of Korthikanti et al. (2022).

    Arguments as for `cache_bytes`; the rows are full. Nothing is recomputed; weights, gradients and the optimizer are
    not counted. A token keeps, in numbers of `dtype`:

    - D for each norm and for each input of projections;
    - 2·H·C + 2·K·C for queries, keys, values and the mixed values of an attention, twice its latents where it has
      them, H·S where a position bias is added to the scores, and S for the mask of a window shorter than the row;
    - in a feed-forward F for the input of the activation and F for its output, 2·F more where gated; in a mixture of
      experts the same and 2·D for each chosen expert.

    Reversible layers keep three times D numbers in float32 or better, all of them together.

    To that come a byte for each number that passes a dropout, and V float32 probabilities of the output layer.

    Kernels are taken to be fused. On a CPU torch keeps more, in numbers of `dtype`:

    - for each number that RMSNorm gives one more: 1.10 times the estimate in a small Llama, 1.28 times in a small
      Qwen3 whose heads are together eight times as wide as the model;
    - three matrices of scores (3·H·S) for an attention with dropout, and masks of dropout as numbers: with 512 tokens
      in two layers 1.42 times the estimate for the preset gpt2, 1.66 for bert-base and 2.10 for bart-base;
    - one such matrix without dropout, where values are not as wide as keys: 2.03 times in a small DeepSeek-V3 with 512
      tokens.

    With these, small float32 models of every structure kept 0.99 to 1.05 times the estimate there, and T5, whose
    buckets of distances are not counted, up to 1.09 times (96 and 512 tokens).

    Raises:
        ValueError: for a mixer that does not say, and for less than one row or token.
    """
    source = length if source_length is None else source_length
    require_positive(batch_size=batch_size, length=length, source_length=source)
    stacks: list[tuple[Any, int]] = [(config, length)]
    if config.model_type == "fratrie_seq2seq":
        stacks = [(config.encoder, source), (config.decoder, length)]
    total = 0.0
    for stack, tokens in stacks:
        branches = 3 if getattr(stack, "add_cross_attention", False) else 2
        slots = [f"{branch}_{side}_norm" for branch in ("mixer", "feed_forward") for side in ("input", "output")]
        slots += slots[:2] * (branches - 2)  # those of cross-attention follow the mixer's
        norms = sum(getattr(stack, slot) is not None for slot in slots)
        dropouts = branches * bool(stack.hidden_dropout)
        layers = zip(stack.mixers, stack.layer_types, stack.mlp_layer_types, strict=True)
        layers_total = 0.0
        for mixer, layer_type, mlp_type in layers:
            numbers = mixer.activation_numbers(stack, layer_type, tokens, dtype) + norms * stack.hidden_size
            if branches == 3:
                numbers += CrossAttention.projection_numbers(stack, source / tokens)
            feed_forward, masks = _feed_forward_numbers(stack, mlp_type)
            layers_total += tokens * ((numbers + feed_forward) * dtype.itemsize + masks + dropouts * stack.hidden_size)
        if stack.reversible:  # what enters, and two streams, whatever the number of layers
            layers_total = tokens * 3 * stack.hidden_size * torch.promote_types(torch.float32, dtype).itemsize
        total += layers_total
        ends = sum(norm is not None for norm in (stack.embedding_norm, stack.final_norm))
        if getattr(stack, "patch_size", None):
            total += stack.num_channels * stack.image_size**2 * dtype.itemsize
        total += tokens * stack.hidden_size * (ends * dtype.itemsize + bool(stack.embedding_dropout))
    return batch_size * round(total + length * _head_bytes(config, dtype))


def _feed_forward_numbers(stack: PreTrainedConfig, mlp_type: str) -> tuple[float, int]:
    """Numbers that a token leaves in the feed-forward, and bytes of its dropout's mask."""
    size = stack.hidden_size
    inner = 1 + _KEPT_BY_ACTIVATION.get(stack.hidden_act, 1) + 2 * stack.gated_feed_forward
    if mlp_type == "dense":
        if stack.activation_dropout:  # what the down projection reads is then no longer what the activation gave
            inner = max(inner, 2)
        return size + inner * stack.intermediate_size, stack.intermediate_size * bool(stack.activation_dropout)
    width, chosen = stack.moe_intermediate_size or stack.intermediate_size, stack.num_experts_per_tok
    gated = size if stack.shared_experts_gate else 0
    return size + chosen * (2 * size + inner * width) + inner * stack.shared_experts_width + gated, 0


def _head_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that a scored token leaves in the language-model head, none in other heads."""
    if not hasattr(build_on_meta(config), "lm_head"):
        return 0
    size = (config.decoder if config.model_type == "fratrie_seq2seq" else config).hidden_size
    inputs = 1
    if config.model_type == "fratrie_encoder":
        inputs += 2 + _KEPT_BY_ACTIVATION.get(config.head_activation or config.hidden_act, 1)
    return inputs * size * dtype.itemsize + 4 * config.vocab_size
