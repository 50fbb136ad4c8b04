"""The last text that fits runs through each model, and one token more does not."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CamembertConfig,
    CamembertForMaskedLM,
    EncoderDecoderModel,
    IBertConfig,
    IBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fratrie
from fratrie.pipelines.text_length import longest_text
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.encoding import max_tokens
from fratrie.training.pretraining import check_fit

POSITIONS = 20
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"vocab_size": 300, "max_position_embeddings": POSITIONS}


def roberta(padding, model_class=RobertaForMaskedLM, config_class=RobertaConfig):
    return model_class(config_class(**SIZES, pad_token_id=padding))


MODELS = {
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES)), POSITIONS),
    "roberta": (lambda: roberta(1), POSITIONS - 2),
    "roberta that pads with 0": (lambda: roberta(0), POSITIONS - 1),
    "roberta that pads with 5": (lambda: roberta(5), POSITIONS - 6),
    "camembert": (lambda: roberta(1, CamembertForMaskedLM, CamembertConfig), POSITIONS - 2),
    "ours": (
        lambda: fratrie.FratrieEncoderForMaskedLM(fratrie.FratrieEncoderConfig(**SIZES, position_offset=2)),
        POSITIONS,
    ),
}


def run(model, length):
    return model(input_ids=torch.full((1, length), 7)).logits


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_level_bpe(["ma mère"], vocab_size=270, show_progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_position_is_used_and_there_is_none_beyond(name, tokenizer):
    build, longest = MODELS[name]
    model = build().eval()
    assert longest_text(model) == longest_text(model, "decoder") == longest
    assert max_tokens(model, tokenizer) == longest
    check_fit(model, tokenizer, longest)
    with pytest.raises(ValueError, match=f"block_size={longest + 1} is more than the {longest} positions"):
        check_fit(model, tokenizer, longest + 1)
    assert run(model, longest).shape == (1, longest, 300)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        run(model, longest + 1)


def test_each_side_of_an_encoder_decoder_has_its_own():
    encoder, decoder = BertConfig(**SIZES), RobertaConfig(**SIZES, pad_token_id=1)
    decoder.is_decoder = decoder.add_cross_attention = True
    both = EncoderDecoderModel(encoder=BertForMaskedLM(encoder).bert, decoder=RobertaForCausalLM(decoder))
    assert (longest_text(both, "encoder"), longest_text(both, "decoder")) == (POSITIONS, POSITIONS - 2)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 300}
    bart = BartForConditionalGeneration(BartConfig(**sizes, max_position_embeddings=POSITIONS))
    assert longest_text(bart) == longest_text(bart, "decoder") == POSITIONS


def test_a_table_that_is_no_embedding_of_torch():
    model = roberta(1, IBertForMaskedLM, IBertConfig).eval()
    assert longest_text(model) == POSITIONS - 2
    assert run(model, POSITIONS - 2).isfinite().all()
    with pytest.raises(IndexError):
        run(model, POSITIONS - 1)


def test_relative_positions_take_any_length(tokenizer):
    sizes = {"vocab_size": 300, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    assert longest_text(model) is None
    check_fit(model, tokenizer, 10**5)
