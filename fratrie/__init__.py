"""Fratrie: one configurable Transformer block, three siblings, trained and served the Hugging Face way.

Importing the package registers its models with the Auto classes of transformers, and its pipelines; its models then
also load the checkpoints of the families in `fratrie.conversion`.
"""

from .auto_classes import register_auto_classes
from .conversion.models import register_loaders
from .export import export_code
from .modeling.configuration import FratrieDecoderConfig, FratrieEncoderConfig, norm_slots
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
from .modeling.seq2seq_configuration import FratrieSeq2SeqConfig
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
    "export_code",
    "norm_slots",
    "preset",
]

register_auto_classes()
register_pipelines()
register_loaders()
