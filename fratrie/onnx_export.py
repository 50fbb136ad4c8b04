"""Models as ONNX files, for runtimes without torch (needs the packages onnx and onnxscript).

Shapes: B batch, T positions, P positions of the past, H heads and C head size of the cache, V vocabulary.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from .modeling.decoder import FratrieDecoderForCausalLM
from .modeling.pretrained import FratriePreTrainedModel

# Sizes of the traced example. A size of 0 or 1 would become a constant of the graph.
_BATCH, _LENGTH, _PAST = 2, 3, 5


def export_onnx(model: FratriePreTrainedModel, file: str | os.PathLike[str]) -> None:
    """Write a model as an ONNX file with free batch size and lengths.

    A model of texts takes `input_ids` and `attention_mask` `(B, T)`, zero at padding on either side, and
    `token_type_ids` where it has token types; a model of images takes `pixel_values`. It gives `logits`, without a
    head `last_hidden_state`.

    A decoder that continues texts takes the `attention_mask` `(B, P + T)` of past and present, and of each layer
    `past_key_values.N.key` and `past_key_values.N.value` `(B, H, P, C)`, where P is 0 at the start of a text. It gives
    `logits` `(B, T, V)`, and of each layer `present.N.key` and `present.N.value` `(B, H, P + T, C)`: the past of the
    next call. Layers with a sliding window keep all tokens too.

    Args:
        model: an encoder or a decoder, with any head or none.
        file: where to write; weights of more than two gigabytes lie in a second file beside it.

    Raises:
        ValueError: for an encoder-decoder, for a cache that is no list of keys and values, as of linear attention, and
            for mixers whose operations ONNX has not.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"export_onnx cannot take {type(model).__name__}: give it the model's get_encoder().")
    continues = isinstance(model, FratrieDecoderForCausalLM)
    if continues and not all(mixer.keeps_tokens for mixer in config.mixers):
        raise ValueError(
            f"export_onnx knows caches of keys and values, but not all of mixer_types={config.mixer_types} keep them: "
            "export a decoder of softmax attention."
        )
    if not all(mixer.fits_onnx for mixer in config.mixers):
        raise ValueError(
            f"ONNX has no operations for some of mixer_types={config.mixer_types}: export a model without them, or "
            "use torch.export."
        )
    with _ready_for_export(model):
        inputs, dynamic_shapes = _example(model)
        outputs = ["logits" if hasattr(model, "model") else "last_hidden_state"]
        if continues:
            outputs += [name.replace("past_key_values", "present") for name in inputs if "past" in name]
        graph = _Continuation(model) if continues else _FirstOutput(model, list(inputs))
        program = torch.onnx.export(
            graph.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=(dynamic_shapes,),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(os.fspath(file))


class _FirstOutput(nn.Module):
    """A model with its inputs in a fixed order, and its first output alone."""

    def __init__(self, model: FratriePreTrainedModel, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        kwargs: dict[str, Any] = dict(zip(self.names, inputs, strict=True))
        return self.model(**kwargs, return_dict=False)[0]


class _Continuation(nn.Module):
    """A decoder with its cache as inputs and outputs."""

    def __init__(self, model: FratriePreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, attention_mask, *past = inputs
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(input_ids, attention_mask=attention_mask, cache=cache).logits
        layers: list[Any] = cache.layers
        return logits, *[part for layer in layers for part in (layer.keys, layer.values)]


def _example(model: FratriePreTrainedModel) -> tuple[dict[str, torch.Tensor], tuple[dict[int, str], ...]]:
    """Inputs by name, and the names of the sizes that stay free in each."""
    config = model.config
    if getattr(config, "patch_size", None):
        pixels = torch.zeros(_BATCH, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels}, ({0: "batch"},)
    ids = torch.ones(_BATCH, _LENGTH, dtype=torch.long)
    # Each a tensor of its own: one object given twice would become one input.
    inputs, sizes = {"input_ids": ids, "attention_mask": ids.clone()}, [{0: "batch", 1: "length"}] * 2
    if getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.zeros_like(ids)
        sizes.append(sizes[0])
    if isinstance(model, FratrieDecoderForCausalLM):
        inputs["attention_mask"] = torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.long)
        sizes[1] = {0: "batch", 1: "past_and_length"}
        # What a layer keeps of a token, heads or latents, is best seen in a cache; this one knows no sliding window.
        past = model(torch.ones(_BATCH, _PAST, dtype=torch.long), cache=DynamicCache()).cache
        for number, layer in enumerate(past.layers):
            inputs |= {f"past_key_values.{number}.key": layer.keys, f"past_key_values.{number}.value": layer.values}
            sizes += [{0: "batch", 2: "past"}] * 2
    return inputs, tuple(sizes)


@contextmanager
def _ready_for_export(model: FratriePreTrainedModel) -> Iterator[None]:
    """Without dropout and gradients, and with experts whose code does not depend on the router's choice."""
    training, experts = model.training, model.get_experts_implementation()
    if model.config.num_experts:
        model.set_experts_implementation("batched_mm")
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if model.config.num_experts:
            model.set_experts_implementation(experts)
