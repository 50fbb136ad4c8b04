"""Fratrie: one configurable Transformer block, three siblings, trained and served the Hugging Face way.

Importing the package registers its models with the Auto classes of transformers, and its pipelines; its models then
also load the checkpoints of the families in `fratrie.conversion`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .conversion.models import register_loaders
from .modeling.configuration import (
    FratrieDecoderConfig,
    FratrieEncoderConfig,
    FratrieSeq2SeqConfig,
    norm_slots,
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
from .modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel
from .modeling.stack import FratriePreTrainedModel
from .pipelines.registration import register_pipelines
from .presets import PRESETS, preset

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "FratrieDecoderConfig",
    "FratrieDecoderForCausalLM",
    "FratrieDecoderForSequenceClassification",
    "FratrieDecoderModel",
    "FratrieEncoderConfig",
    "FratrieEncoderForImageClassification",
    "FratrieEncoderForMaskedLM",
    "FratrieEncoderForSequenceClassification",
    "FratrieEncoderForTokenClassification",
    "FratrieEncoderModel",
    "FratriePreTrainedModel",
    "FratrieSeq2SeqConfig",
    "FratrieSeq2SeqForConditionalGeneration",
    "FratrieSeq2SeqModel",
    "norm_slots",
    "preset",
]

for _config in (FratrieEncoderConfig, FratrieDecoderConfig, FratrieSeq2SeqConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)

for _auto, _model in (
    (AutoModel, FratrieEncoderModel),
    (AutoModelForMaskedLM, FratrieEncoderForMaskedLM),
    (AutoModelForSequenceClassification, FratrieEncoderForSequenceClassification),
    (AutoModelForTokenClassification, FratrieEncoderForTokenClassification),
    (AutoModelForImageClassification, FratrieEncoderForImageClassification),
    (AutoModel, FratrieDecoderModel),
    (AutoModelForCausalLM, FratrieDecoderForCausalLM),
    (AutoModelForSequenceClassification, FratrieDecoderForSequenceClassification),
    (AutoModel, FratrieSeq2SeqModel),
    (AutoModelForSeq2SeqLM, FratrieSeq2SeqForConditionalGeneration),
):
    _auto.register(_model.config_class, _model, exist_ok=True)

register_pipelines()
register_loaders()
