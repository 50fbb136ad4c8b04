"""The Auto classes of transformers that our models answer to."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForDecision,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .modeling.decoder import (
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieDecoderModel,
)
from .modeling.encoder import (
    FratrieEncoderForImageClassification,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
)
from .modeling.pretrained import FratriePreTrainedModel
from .modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel

# Auto classes and what they load. `transformers serve` tries the decision door first, and knows behind it only the
# classes of transformers itself; to Hugging Face any model of the next token can decide.
AUTO_CLASSES: tuple[tuple[Any, type[FratriePreTrainedModel]], ...] = (
    (AutoModel, FratrieEncoderModel),
    (AutoModelForMaskedLM, FratrieEncoderForMaskedLM),
    (AutoModelForSequenceClassification, FratrieEncoderForSequenceClassification),
    (AutoModelForTokenClassification, FratrieEncoderForTokenClassification),
    (AutoModelForImageClassification, FratrieEncoderForImageClassification),
    (AutoModel, FratrieDecoderModel),
    (AutoModelForCausalLM, FratrieDecoderForCausalLM),
    (AutoModelForDecision, FratrieDecoderForCausalLM),
    (AutoModelForSequenceClassification, FratrieDecoderForSequenceClassification),
    (AutoModel, FratrieSeq2SeqModel),
    (AutoModelForSeq2SeqLM, FratrieSeq2SeqForConditionalGeneration),
)


def register_auto_classes() -> None:
    """Let the Auto classes of transformers know our configurations and models."""
    for auto_class, model_class in AUTO_CLASSES:
        config_class: Any = model_class.config_class
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        auto_class.register(config_class, model_class, exist_ok=True)
        # The names, too: by them Trainer tells whose labels it has to shift when it smooths them.
        auto_class._model_mapping._model_mapping[config_class.model_type] = model_class.__name__
