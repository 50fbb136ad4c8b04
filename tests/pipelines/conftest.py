import logging

import pytest
import torch

import fratrie
from fratrie.data import LABELS
from fratrie.tokenization import train_byte_level_bpe, with_sibling

TEXTS = [
    "Je m'entends bien avec ma mère.",
    "Mon père travaille beaucoup et je ne le vois pas souvent, mais quand il est là on joue ensemble.",
    "",
    "Mes sœurs «adorent» notre chat 🐈.",
    "J'ai deux frères.",
]


@pytest.fixture(scope="session")
def encoder_tokenizer():
    return train_byte_level_bpe(TEXTS * 3, vocab_size=320, model_max_length=64, show_progress=False)


@pytest.fixture(scope="session")
def seq2seq_tokenizer():
    return train_byte_level_bpe(
        TEXTS * 3,
        vocab_size=320,
        sibling="seq2seq",
        num_sentinels=2,
        model_max_length=64,
        show_progress=False,
    )


@pytest.fixture(scope="session")
def decoder_tokenizer(encoder_tokenizer):
    return with_sibling(encoder_tokenizer, "decoder")


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,  # random weights whose outputs differ between texts
}


def special_ids(tokenizer):
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def label_fields(labels):
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "multi_label_classification",
    }


@pytest.fixture
def build_classifier(encoder_tokenizer):
    """Makes random classifiers of the 11 labels, whose columns stand in another order than the study's."""

    def build(labels=LABELS[::-1], tokenizer=encoder_tokenizer, **fields):
        torch.manual_seed(0)
        fields = {**SIZES, **special_ids(tokenizer), **label_fields(labels), **fields}
        config = fratrie.FratrieEncoderConfig(max_position_embeddings=64, **fields)
        return fratrie.FratrieEncoderForSequenceClassification(config).eval()

    return build


@pytest.fixture
def family_model(build_classifier):
    return build_classifier()


@pytest.fixture
def seq2seq_model(seq2seq_tokenizer):
    torch.manual_seed(1)
    config = fratrie.FratrieSeq2SeqConfig(**SIZES, **special_ids(seq2seq_tokenizer), max_position_embeddings=64)
    return fratrie.FratrieSeq2SeqForConditionalGeneration(config).eval()


@pytest.fixture
def decoder_model(decoder_tokenizer):
    torch.manual_seed(2)
    config = fratrie.FratrieDecoderConfig(**SIZES, **special_ids(decoder_tokenizer), max_position_embeddings=64)
    return fratrie.FratrieDecoderForCausalLM(config).eval()


@pytest.fixture
def hugging_face_log(caplog):
    """What the loggers of transformers say, which do not propagate by themselves."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
