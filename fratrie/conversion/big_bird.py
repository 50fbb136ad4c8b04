"""BigBird (Zaheer et al. 2020): BERT whose attention goes by blocks, as Hugging Face has it out of training.

There the random blocks are all the first one. Theirs counts blocks in a padded row, ours in the text: of padded rows
that are long enough for blocks the outputs differ, and ours are those of the text alone. Theirs also stays with full
attention once it has met a short text.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from fratrie.modeling.encoder import (
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
)

from .bert import BERT, CLASSIFIER_DROPOUT, DENSE_CLASSIFIER, TOKEN_CLASSIFIER
from .recipe import Field, Head, Weight

# Theirs has a pooler under every head, which most do not read: `to_hf` says that it is drawn anew.
_POOLER = Weight("bert.pooler")


def _in_blocks(theirs: PreTrainedConfig) -> bool:
    if theirs.attention_type not in ("block_sparse", "original_full"):
        raise ValueError(f"big_bird: attention_type={theirs.attention_type!r} is unknown.")
    return theirs.attention_type == "block_sparse"


def _mixers(theirs: PreTrainedConfig) -> list[str]:
    return ["bigbird" if _in_blocks(theirs) else "softmax"] * theirs.num_hidden_layers


BIG_BIRD = replace(
    BERT,
    model_type="big_bird",
    fields=(
        *BERT.fields,
        Field("use_bias", "attention_bias"),
        Field("rescale_embeddings", "scale_embeddings"),
    ),
    read={
        **BERT.read,
        "mixer_types": _mixers,
        "bigbird_block_size": lambda config: config.block_size if _in_blocks(config) else None,
        "bigbird_random_blocks": lambda config: config.num_random_blocks if _in_blocks(config) else None,
        "bigbird_random_plan": lambda config: "first" if _in_blocks(config) else None,
    },
    write={
        **BERT.write,
        "attention_type": lambda ours: "block_sparse" if "bigbird" in ours.mixer_types else "original_full",
        "block_size": lambda ours: ours.bigbird_block_size,
        "num_random_blocks": lambda ours: ours.bigbird_random_blocks,
    },
    heads=(
        Head("BigBirdModel", FratrieEncoderModel, weights=(Weight("pooler", "pooler.dense"),),
             pooler=lambda config: "tanh"),
        replace(BERT.heads[1], theirs="BigBirdForMaskedLM", weights=(*BERT.heads[1].weights, _POOLER)),
        Head("BigBirdForSequenceClassification", FratrieEncoderForSequenceClassification, "bert.", (
            Weight("classifier.dense", "classifier.dense.0"),
            Weight("classifier.out_proj", "classifier.out_proj"),
            _POOLER,
        ), always={"classifier_pooling": "first"},
             read={**DENSE_CLASSIFIER, "classifier_activation": lambda config: config.hidden_act},
             fields=(CLASSIFIER_DROPOUT,)),
        Head("BigBirdForTokenClassification", FratrieEncoderForTokenClassification, "bert.",
             (*TOKEN_CLASSIFIER, _POOLER), fields=(CLASSIFIER_DROPOUT,)),
    ),
    inert=(*BERT.inert, "sep_token_id"),
)  # fmt: skip
