"""Hugging Face's tasks over texts, in bulk where the model is ours: the same calls, the same results."""

from collections.abc import Sequence
from typing import Any

from transformers import pipelines

from .bulk import BulkPipeline, Row

# Tokenizer's choices that give a text the same tokens in a list as alone.
_EACH_ALONE = {"truncation", "max_length", "add_special_tokens"}


class TextClassificationPipeline(BulkPipeline, pipelines.TextClassificationPipeline):
    """Hugging Face's `text-classification`."""

    def preprocess_in_bulk(self, inputs: Sequence[Any], **params: Any) -> list[Row] | None:
        """Tokens of texts, or of pairs of texts."""
        pairs = [{"text": one} if isinstance(one, str) else one for one in inputs]
        names = set(pairs[0]) if isinstance(pairs[0], dict) else set()
        # Alone, a text has no pair where that is empty; in a list it is a pair.
        same = all(isinstance(pair, dict) and pair.keys() == names and pair.get("text_pair") != "" for pair in pairs)
        if not (same and "text" in names <= {"text", "text_pair"} and params.keys() <= _EACH_ALONE):
            return None
        return self.tokenize({name: [pair[name] for pair in pairs] for name in names}, **params)


class FeatureExtractionPipeline(BulkPipeline, pipelines.FeatureExtractionPipeline):
    """Hugging Face's `feature-extraction`; in batches, too, without vectors of padding."""

    def preprocess_in_bulk(self, inputs: Sequence[Any], **params: Any) -> list[Row] | None:
        """Tokens of texts."""
        return self.tokenize({"text": inputs}, **params) if params.keys() <= _EACH_ALONE else None


class TokenClassificationPipeline(BulkPipeline, pipelines.TokenClassificationPipeline):
    """Hugging Face's `token-classification`."""

    def preprocess_in_bulk(self, inputs: Sequence[Any], **params: Any) -> list[Row] | None:
        """Tokens of whole texts, cut as Hugging Face cuts them."""
        if params != {"is_split_into_words": False}:
            return None
        rows = self.tokenize(
            {"text": inputs}, truncation=True, return_special_tokens_mask=True, return_offsets_mapping=True
        )
        return rows and [
            {**row, "sentence": sentence, "is_last": True} for row, sentence in zip(rows, inputs, strict=True)
        ]
