"""The task `text2text-generation` for encoder-decoders: Hugging Face removed its own in transformers 5."""

from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel

from .text_length import longest_text
from .text_pipeline import TextPipeline, text_of


class Text2TextGenerationPipeline(TextPipeline):
    """Generates a text from a text, with any encoder-decoder (Fratrie's, T5, BART, …).

    ```python
    >>> import fratrie
    >>> from transformers import pipeline
    >>> generate = pipeline("text2text-generation", model="path/to/seq2seq", max_new_tokens=20)
    >>> generate("ma mère est gentille", num_beams=4)
    [{'generated_text': '…'}]
    ```

    One text gives a list of one dict per returned sequence. A list of texts gives a list of such lists, or, where each
    text has one sequence, one flat list of dicts: the forms of Hugging Face's former pipeline.

    What neither the call nor the model's generation config sets: at most 256 new tokens (fewer where the decoder has
    fewer positions), greedy search, the tokenizer's padding and end token.

    Args:
        return_tensors: give `generated_token_ids`, a tensor `(T,)` without the padding at its end, instead of
            `generated_text`.
        skip_special_tokens: leave special tokens out of the text (the default).
        clean_up_tokenization_spaces: as for the tokenizer's `decode`.
        truncation: cut inputs that are longer than the model reads, with a warning (the default).
        prefix: put before each text; by default the config's `prefix`.
        *args, **kwargs: those of Hugging Face's `Pipeline`, and any argument of `generate` (`max_new_tokens`,
            `num_beams`, `do_sample`, `num_return_sequences`, …). All but Pipeline's may stand in a call too.

    Raises:
        ValueError: the model is no encoder-decoder that generates.
    """

    task_name = "text2text-generation"
    auto_model = AutoModelForSeq2SeqLM

    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        if not (model.config.is_encoder_decoder and model.can_generate()):
            raise ValueError(
                f"The task 'text2text-generation' needs an encoder-decoder that generates, not "
                f"{type(model).__name__}: a decoder serves 'text-generation'."
            )
        super().__init__(model, *args, **kwargs)
        defaults = self._generation_defaults
        defaults["max_new_tokens"] = min(
            defaults["max_new_tokens"], longest_text(model, "decoder") or defaults["max_new_tokens"]
        )
        if self.tokenizer.eos_token_id is not None:
            defaults["eos_token_id"] = self.tokenizer.eos_token_id

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate from one text or many; see `TextPipeline.__call__` for the inputs and the class for the rest."""
        results = super().__call__(inputs, *args, **kwargs)
        one_sequence = isinstance(results, list) and all(isinstance(r, list) and len(r) == 1 for r in results)
        return [sequences[0] for sequences in results] if one_sequence else results

    def _sanitize_parameters(  # type: ignore[override] # each task names its own
        self,
        return_tensors: bool | None = None,
        skip_special_tokens: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | None = None,
        prefix: str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        for name in ("assistant_model", "assistant_tokenizer"):
            if getattr(self, name) is not None:
                generate_kwargs[name] = getattr(self, name)
        preprocess = {"truncation": truncation, "prefix": prefix}
        postprocess = {
            "return_tensors": return_tensors,
            "skip_special_tokens": skip_special_tokens,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        return _given(preprocess), generate_kwargs, _given(postprocess)

    def preprocess(  # type: ignore[override]
        self, input_: Any, truncation: bool = True, prefix: str | None = None
    ) -> dict[str, Any]:
        """Tokens `(1, S)` of one input and their mask: what `generate` takes of a tokenizer's output."""
        prefix = self.prefix if prefix is None else prefix
        encoding = self.encode((prefix or "") + text_of(input_), truncation)
        return {name: encoding[name] for name in ("input_ids", "attention_mask") if name in encoding}

    def _forward(self, input_tensors: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        # Stop strings are found by the tokenizer.
        kwargs = {"tokenizer": self.tokenizer, **self._prepare_generate_kwargs(generate_kwargs)}
        output = self.model.generate(**input_tensors, **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        inputs = len(input_tensors["input_ids"])
        return {"sequences": sequences.reshape(inputs, -1, sequences.shape[-1])}

    def postprocess(  # type: ignore[override]
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The sequences `(1, returned, T)` of one input as texts or ids."""
        sequences = [self._strip_padding(sequence) for sequence in model_outputs["sequences"][0]]
        if return_tensors:
            return [{"generated_token_ids": sequence} for sequence in sequences]
        texts = [
            self.tokenizer.decode(
                sequence,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
            for sequence in sequences
        ]
        return [{"generated_text": text} for text in texts]

    def _strip_padding(self, sequence: torch.Tensor) -> torch.Tensor:
        # The longest output of a batch decides how much padding ends the others.
        padding = self.tokenizer.pad_token_id
        length = max((i + 1 for i, token in enumerate(sequence.tolist()) if token != padding), default=1)
        return sequence[:length]


def _given(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}
