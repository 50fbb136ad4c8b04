"""Each preset has the size of the published model, as Hugging Face's own class with the published values builds it."""

import pytest
import torch
import transformers

import fratrie
from fratrie import (
    FratrieDecoderConfig,
    FratrieEncoderConfig,
    FratrieEncoderForSequenceClassification,
    FratrieSeq2SeqConfig,
)
from fratrie.accounting.parameters import build_on_meta
from fratrie.conversion import from_hf, to_hf
from fratrie.conversion.models import find_recipe
from fratrie.presets import PRESETS, preset


def gpt2(width, layers, heads):
    return transformers.GPT2LMHeadModel, {"n_embd": width, "n_layer": layers, "n_head": heads}


def llama(name="Llama", positions=4096, theta=1e4, tokens=(1, 2), eps=1e-5, **sizes):
    values = {"max_position_embeddings": positions, "rms_norm_eps": eps, "tie_word_embeddings": False}
    values |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    values |= {"bos_token_id": tokens[0], "eos_token_id": tokens[1]}
    return getattr(transformers, f"{name}ForCausalLM"), {**values, **sizes}


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
OF_8B = {"num_key_value_heads": 8, "intermediate_size": 14_336}
LLAMA_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_70B |= {"intermediate_size": 28_672}
QWEN2_7B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_7B |= {"vocab_size": 152_064, "intermediate_size": 18_944, "tokens": (151_643, 151_643)}
OF_QWEN = {"theta": 1e6, "eps": 1e-6}
OF_QWEN3 = {**OF_QWEN, "positions": 40_960, "tokens": (151_643, 151_645), "head_dim": 128}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
BART = {"attention_dropout": 0.1, "activation_dropout": 0.1}
BART_BASE = {**BART, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072}
BART_BASE |= {"decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
MARIAN = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
MARIAN |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 59_514, "pad_token_id": 59_513}
MARIAN |= {"max_position_embeddings": 512, "activation_function": "swish", "scale_embedding": True}
MARIAN |= {"decoder_start_token_id": 59_513}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
T5_V11 = {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
GPT3 = {"n_embd": 12_288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "tie_word_embeddings": False}
GPT3 |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}

LFM2 = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LFM2 |= {"intermediate_size": 12_288, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "eos_token_id": 7}
BAMBA = {"vocab_size": 128_256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}
BAMBA |= {"bos_token_id": 128_000, "eos_token_id": 128_001}

# The published values, where they are not the defaults of Hugging Face's configuration.
DEEPSEEK_V3 = {
    "max_position_embeddings": 163_840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}
THEIRS = {
    "bert-base": (transformers.BertForMaskedLM, {}),
    "bert-large": (transformers.BertForMaskedLM, LARGE),
    "roberta-base": (transformers.RobertaForMaskedLM, {**ROBERTA, "vocab_size": 50_265}),
    "camembert-base": (
        transformers.CamembertForMaskedLM,
        {**ROBERTA, "vocab_size": 32_005, "bos_token_id": 5, "eos_token_id": 6},
    ),
    "xlm-roberta-base": (transformers.XLMRobertaForMaskedLM, {**ROBERTA, "vocab_size": 250_002}),
    "modernbert-base": (transformers.ModernBertForMaskedLM, {}),
    "longformer-base-4096": (
        transformers.LongformerForMaskedLM,
        {**ROBERTA, "vocab_size": 50_265, "max_position_embeddings": 4098, "attention_window": [512] * 12}
        | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "bigbird-roberta-base": (transformers.BigBirdForMaskedLM, {}),
    "multilingual-e5-small": (
        transformers.BertModel,
        {"vocab_size": 250_037, "hidden_size": 384, "intermediate_size": 1536},
    ),
    "vit-base-patch16-224": (transformers.ViTForImageClassification, {"num_labels": 1000}),
    "gpt2": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 24, 16),
    "gpt2-large": gpt2(1280, 36, 20),
    "gpt2-xl": gpt2(1600, 48, 25),
    "gpt3-175b": (transformers.GPT2LMHeadModel, GPT3),
    "gpt-neo-1.3b": (transformers.GPTNeoForCausalLM, {}),
    "lfm2-1.2b": (transformers.Lfm2ForCausalLM, LFM2),
    "bamba-9b": (transformers.BambaForCausalLM, BAMBA),
    "llama-2-7b": llama(),
    "llama-2-70b": llama(**LLAMA_70B),
    "llama-3-8b": llama(positions=8192, theta=5e5, tokens=(128_000, 128_001), vocab_size=128_256, **OF_8B),
    "mistral-7b": llama("Mistral", positions=32_768),
    "qwen2-7b": llama("Qwen2", positions=131_072, **OF_QWEN, **QWEN2_7B),
    "qwen3-8b": llama("Qwen3", **OF_QWEN3, num_hidden_layers=36, num_key_value_heads=8, intermediate_size=12_288),
    "qwen3-30b-a3b": llama("Qwen3Moe", **OF_QWEN3, num_hidden_layers=48, norm_topk_prob=True),
    "mixtral-8x7b": llama("Mixtral", positions=32_768, theta=1e6, router_aux_loss_coef=0.02),
    "deepseek-v3": (transformers.DeepseekV3ForCausalLM, DEEPSEEK_V3),
    "bart-base": (transformers.BartForConditionalGeneration, BART_BASE),
    "bart-large": (transformers.BartForConditionalGeneration, BART),
    "marian": (transformers.MarianMTModel, MARIAN),
    "t5-small": (transformers.T5ForConditionalGeneration, {}),
    "t5-base": (transformers.T5ForConditionalGeneration, T5_BASE),
    "t5-v1.1-small": (transformers.T5ForConditionalGeneration, {**T5_V11, "tie_word_embeddings": False}),
}
# BigBird: a pooler there that its head never reads. Marian: positions that are computed here, and output biases that
# are a buffer there. T5 v1.1: an output layer that Hugging Face unties only when it loads the weights.
BESIDES = {"bigbird-roberta-base": -768 * 769, "marian": -2 * 512 * 512 + 59_514, "t5-v1.1-small": 32_128 * 512}
# Without a class of their own: the paper's table 3, in millions.
PAPERS = {"transformer-base": 65, "transformer-big": 213}


def count_theirs(model_class, values, **options):
    with torch.device("meta"):
        model = model_class(model_class.config_class(**values), **options)
    return model.num_parameters()


@pytest.mark.parametrize("name", THEIRS)
def test_size_equals_hugging_face(name):
    model_class, values = THEIRS[name]
    options = {"add_pooling_layer": False} if model_class is transformers.BertModel else {}
    ours = build_on_meta(preset(name)).num_parameters()
    assert ours == count_theirs(model_class, values, **options) + BESIDES.get(name, 0)


@pytest.mark.parametrize("name", PAPERS)
def test_size_is_near_the_papers(name):
    assert build_on_meta(preset(name)).num_parameters() / 1e6 == pytest.approx(PAPERS[name], rel=0.04)


def test_every_preset_is_compared():
    assert {*THEIRS, *PAPERS} == set(PRESETS)


@pytest.mark.parametrize(
    ("name", "model_class"),
    [
        ("bert-base", transformers.BertForSequenceClassification),
        ("roberta-base", transformers.RobertaForSequenceClassification),
        ("camembert-base", transformers.CamembertForSequenceClassification),
        ("modernbert-base", transformers.ModernBertForSequenceClassification),
    ],
)
def test_classifiers_equal_hugging_face(name, model_class):
    with torch.device("meta"):
        ours = FratrieEncoderForSequenceClassification(preset(name, num_labels=3))
    assert ours.num_parameters() == count_theirs(model_class, {**THEIRS[name][1], "num_labels": 3})


# What says nothing about the computation of the model, or that of its classifier, which is compared apart.
UNCOMPARED = {"architectures", "dtype", "foreign_fields", "id2label", "label2id", "initializer_range"}
OF_CLASSIFIER = {"classifier_dropout", "classifier_hidden_sizes", "classifier_pooling"}
OF_CLASSIFIER |= {"classifier_activation", "classifier_bias", "classifier_norm"}


def computation(config, left_out=OF_CLASSIFIER):
    values = config.to_dict()
    stacks = [values.pop(stack) for stack in ("encoder", "decoder") if values.get(stack)]
    left_out = UNCOMPARED | left_out
    return [{key: value for key, value in part.items() if key not in left_out} for part in (values, *stacks)]


@pytest.mark.parametrize("name", THEIRS)
def test_every_field_is_that_of_the_converted_model(name):
    model_class, values = THEIRS[name]
    theirs = model_class.config_class(**values)
    recipe, head = find_recipe(theirs.model_type, model_class.__name__)
    converted = recipe.read_config(theirs, head)
    if name.startswith("bart"):  # a bias that was never trained
        converted.lm_head_bias = False
    if name == "t5-v1.1-small":  # untied when its weights are loaded
        converted.tie_word_embeddings = False
    assert computation(preset(name)) == computation(converted)


def tiny(name):
    """The preset with small matrices; its vocabulary, special tokens, positions and head sizes are the published."""
    config = preset(name)
    stack = getattr(config, "decoder", None) or config
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
    if stack.num_key_value_heads < stack.num_attention_heads:
        small["num_key_value_heads"] = 2
    if stack.num_experts:
        small["num_experts"] = 16
    for field, size in (("classifier_hidden_sizes", [16]), ("moe_intermediate_size", 8)):
        if getattr(config, field, None):
            small[field] = size
    return preset(name, **small)


def there_and_back(model, their_class):
    theirs = to_hf(model, their_class.config_class.model_type)
    assert type(theirs) is their_class
    again = from_hf(theirs)
    assert type(again) is type(model)
    states, before = again.state_dict(), model.state_dict()
    assert all(torch.equal(states[key], weight) for key, weight in before.items())
    assert not any(states[key].any() for key in states.keys() - before.keys())
    return again.config


@pytest.mark.parametrize("name", THEIRS)
def test_models_become_those_of_hugging_face_and_come_back(name):
    config = tiny(name)
    again = there_and_back(type(build_on_meta(config))(config), THEIRS[name][0])
    if name.startswith("bart"):  # theirs keeps a buffer of zeros for it
        assert again.lm_head_bias
        again.lm_head_bias = False
    assert computation(again) == computation(config)


ENCODERS = ["bert-base", "roberta-base", "camembert-base", "xlm-roberta-base", "modernbert-base"]
OF_LM_HEAD = {"head_activation", "head_bias", "lm_head_bias"}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_other_heads_become_those_of_hugging_face_and_come_back(name, head):
    config = tiny(name)
    their_class = getattr(transformers, THEIRS[name][0].__name__.replace("ForMaskedLM", head))
    again = there_and_back(getattr(fratrie, f"FratrieEncoder{head}")(config), their_class)
    left_out = OF_LM_HEAD | (OF_CLASSIFIER if head == "Model" else set())
    assert computation(again, left_out) == computation(config, left_out)


def test_siblings():
    kinds = (
        ("bert-base", FratrieEncoderConfig),
        ("gpt2", FratrieDecoderConfig),
        ("t5-small", FratrieSeq2SeqConfig),
    )
    for name, kind in kinds:
        assert type(preset(name)) is kind


def test_overrides_reach_the_config_and_not_the_table():
    changed = preset("modernbert-base", vocab_size=60_000)
    changed.layer_types[0] = "sliding_attention"
    changed.rope_parameters["full_attention"]["rope_theta"] = 1.0
    again = preset("modernbert-base")
    assert changed.vocab_size == 60_000
    assert again.vocab_size == 50_368
    assert again.layer_types[0] == "full_attention"
    assert again.rope_parameters["full_attention"]["rope_theta"] == 160_000.0
    assert preset("t5-small", num_hidden_layers=2).decoder.num_hidden_layers == 2


@pytest.mark.parametrize("name", PRESETS)
def test_configs_survive_saving(name, tmp_path):
    config = preset(name)
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_unknown_names_and_fields_are_refused():
    with pytest.raises(ValueError, match="no preset 'BERT_base': did you mean bert-base"):
        preset("BERT_base")
    with pytest.raises(ValueError, match="use one of transformer-base, transformer-big, bert-base"):
        preset("zzz")
    with pytest.raises(ValueError, match="vocab_sise"):
        preset("gpt2", vocab_sise=3)


@pytest.mark.parametrize("name", PRESETS)
def test_fewer_layers_are_the_first_ones(name):
    config = preset(name, num_hidden_layers=4)
    stack = getattr(config, "decoder", None) or config
    whole = getattr(preset(name), "decoder", None) or preset(name)
    assert stack.layer_types == whole.layer_types[:4] and stack.mlp_layer_types == whole.mlp_layer_types[:4]


def test_rotary_parameters_are_those_of_the_layers_that_are_left():
    for changes, kind in (({}, "full_attention"), ({"layer_types": ["sliding_attention"]}, "sliding_attention")):
        config = preset("modernbert-base", num_hidden_layers=1, **changes)
        assert config.layer_types == [*config.rope_parameters] == [kind]
    with pytest.raises(
        ValueError, match="layer_types or mixer_types has 2 entries for num_hidden_layers=1: give one per layer"
    ):
        preset("modernbert-base", num_hidden_layers=1, layer_types=["full_attention"] * 2)
