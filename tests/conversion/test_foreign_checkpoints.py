"""Checkpoints of Hugging Face, loaded by `from_pretrained` of our classes; our own load and save as ever."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from families import CASES, SPREAD, inputs, our_model, their_model
from processes import run_forked
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, GenerationConfig, T5ForConditionalGeneration
from transformers.utils import logging as transformers_logging

import fratrie
from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderModel,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.conversion import from_hf, to_hf
from fratrie.conversion.models import RECIPES, STACK_RECIPES, find_recipe
from fratrie.conversion.recipe import Weight

FIRST = [case for case in CASES if case.fields is SPREAD[case.model_type][0]]
CASE = {case.name: case for case in CASES}
CLASSIFIER = FratrieEncoderForSequenceClassification


def save(case, folder, dtype=torch.float32, **fields):
    """A model of a family in a folder, as Hugging Face saves it."""
    theirs = their_model(case if not isinstance(case, str) else CASE[case], dtype=dtype, **fields)
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with tiny BERTs: base, mlm, classes."""
    folder = tmp_path_factory.mktemp("bert")
    for name, case in (
        ("base", "BertModel-0"),
        ("mlm", "BertForMaskedLM-0"),
        ("classes", "BertForSequenceClassification-0"),
    ):
        save(case, folder / name)
    return folder


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def outputs(case, theirs, model):
    model.set_attn_implementation("eager")
    if any("expert" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs(case, theirs)[1])[0]


def same_output(actual, expected):
    """Equal but for rounding: a file puts weights at other addresses, at which kernels may take another path."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", FIRST, ids=[case.name for case in FIRST])
def test_a_checkpoint_equals_the_model_in_memory(case, tmp_path):
    theirs = save(case, tmp_path)
    loaded, report = case.head.ours.from_pretrained(tmp_path, output_loading_info=True)
    expected = from_hf(theirs)
    assert type(loaded) is type(expected) is case.head.ours
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")) and len(report) == 4
    assert loaded.dtype == torch.float32 and not loaded.training
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    same_output(outputs(case, theirs, loaded), outputs(case, theirs, expected))
    free = ("_name_or_path", "architectures", "dtype")
    configs = [{k: v for k, v in m.config.to_dict().items() if k not in free} for m in (loaded, expected)]
    assert configs[0] == configs[1]


def test_every_family_and_every_class_of_ours_is_loaded():
    assert {case.model_type for case in FIRST} == set(RECIPES)
    recipes = [*RECIPES.values(), *STACK_RECIPES.values()]
    assert {case.theirs for case in FIRST} == {head.theirs for recipe in recipes for head in recipe.heads}


@pytest.mark.parametrize("name", ["BertForMaskedLM-0", "GPT2LMHeadModel-0", "T5ForConditionalGeneration-0"])
def test_the_dtype_is_kept_or_as_asked(name, tmp_path):
    case = CASE[name]
    save(case, tmp_path, dtype=torch.bfloat16)
    ours = case.head.ours
    assert ours.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert ours.from_pretrained(tmp_path).config.dtype == torch.bfloat16
    for choice in ({"dtype": torch.float32}, {"dtype": "float32"}, {"torch_dtype": torch.float32}):
        model = ours.from_pretrained(tmp_path, **choice)
        assert model.dtype == torch.float32
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["MixtralForCausalLM-0", "BartForConditionalGeneration-0"])
def test_a_checkpoint_in_shards(name, tmp_path):
    case = CASE[name]
    theirs = their_model(case, dtype=torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, expected = case.head.ours.from_pretrained(tmp_path), from_hf(theirs)
    same_output(outputs(case, theirs, loaded), outputs(case, theirs, expected))


def test_pickled_weights_are_read_when_asked_for_alone(bert, tmp_path):
    shutil.copy(bert / "mlm" / "config.json", tmp_path)
    torch.save(load_file(bert / "mlm" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has only pickled weights.*use_safetensors=False"):
        FratrieEncoderForMaskedLM.from_pretrained(tmp_path)
    model = FratrieEncoderForMaskedLM.from_pretrained(tmp_path, use_safetensors=False)
    expected = FratrieEncoderForMaskedLM.from_pretrained(bert / "mlm")
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "is quantised"),
        ({"vocab_size": 32}, r"the weights \S+ are \(31,.* and \(32,.* by the configuration: correct that, or"),
        ({"hidden_act": "nope"}, "its configuration names 'nope', which transformers does not know"),
    ],
)
def test_a_config_that_does_not_fit(bert, tmp_path, changes, message):
    shutil.copytree(bert / "mlm", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(read(tmp_path / "config.json") | changes))
    with pytest.raises(ValueError, match=message):
        FratrieEncoderForMaskedLM.from_pretrained(tmp_path)


def test_a_foreign_configuration_alone_is_refused(bert):
    for config_class in (FratrieEncoderConfig, fratrie.FratrieSeq2SeqConfig):
        with pytest.raises(ValueError, match=r"no configuration of the model type 'bert'.* from_pretrained of our"):
            config_class.from_pretrained(bert / "base")


def test_routers_in_float32(tmp_path):
    """Of a model in half precision, as Hugging Face keeps and computes them."""
    case = CASE["DeepseekV3ForCausalLM-0"]
    save(case, tmp_path)
    theirs = case.head.their_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for ours in (from_hf(theirs), FratrieDecoderForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        router = ours.model.layers[1].feed_forward.router
        assert router.weight.dtype == router.selection_bias.dtype == torch.float32
        expected, actual = outputs(case, theirs, theirs), outputs(case, theirs, ours)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("cast", [False, True])
def test_matrices_that_theirs_keeps_in_float32(tmp_path, cast):
    """Of T5 in float16, unless somebody has cast them."""
    case = CASE["T5ForConditionalGeneration-0"]
    save(case, tmp_path)
    theirs = case.head.their_class.from_pretrained(tmp_path, dtype=torch.float16)
    models = [FratrieSeq2SeqForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16), from_hf(theirs)]
    if cast:
        models = [from_hf(theirs.half())]
    for ours in models:
        down = ours.model.encoder.layers[0].feed_forward.down_proj.weight
        assert down.dtype == (torch.float16 if cast else torch.float32)
        assert torch.equal(outputs(case, theirs, ours), outputs(case, theirs, theirs))


def test_a_matrix_finer_than_the_others_is_rounded(caplog):
    case = CASE["LlamaForCausalLM-0"]
    theirs = their_model(case, dtype=torch.bfloat16)
    theirs.lm_head.float()
    transformers_logging.enable_propagation()
    try:
        ours = from_hf(theirs)
    finally:
        transformers_logging.disable_propagation()
    assert "1 matrices, such as lm_head.weight, are rounded" in caplog.text
    assert ours(torch.tensor([[3, 4]])).logits.isfinite().all()


@pytest.mark.parametrize(
    "name", ["BartForConditionalGeneration-0", "BartModel-0", "MarianMTModel-0", "MarianMTModel-2"]
)
def test_the_decoder_of_a_whole_checkpoint(name, tmp_path):
    whole = from_hf(save(name, tmp_path))
    decoder = FratrieDecoderForCausalLM.from_pretrained(tmp_path)
    expected = whole.get_decoder().state_dict()
    for key, weight in decoder.model.state_dict().items():
        assert torch.equal(weight, expected[key]), key


def test_the_name_of_a_converted_model(bert):
    """By which PEFT finds the base of an adapter."""
    model = FratrieEncoderModel.from_pretrained(bert / "base")
    assert model.name_or_path == model.config.name_or_path == str(bert / "base")
    assert to_hf(model).name_or_path == str(bert / "base")


def test_a_subfolder_and_a_variant(tmp_path):
    theirs = save("BertModel-0", tmp_path / "inner")
    loaded = FratrieEncoderModel.from_pretrained(tmp_path, subfolder="inner")
    assert torch.equal(loaded.embed_tokens.weight, theirs.embeddings.word_embeddings.weight)
    other = their_model(CASE["BertModel-0"], dtype=torch.float32, seed=1)
    other.save_pretrained(tmp_path / "inner", variant="other")
    loaded = FratrieEncoderModel.from_pretrained(tmp_path, subfolder="inner", variant="other")
    assert torch.equal(loaded.embed_tokens.weight, other.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(
    ("source", "ours", "new"),
    [
        ("BertForMaskedLM-0", CLASSIFIER, {"classifier.dense.0", "classifier.out_proj"}),
        ("BertModel-0", CLASSIFIER, {"classifier.out_proj"}),
        ("BertModel-0", FratrieEncoderForMaskedLM, {"head_dense", "head_norm", "lm_head"}),
        ("CamembertModel-0", CLASSIFIER, {"classifier.dense.0", "classifier.out_proj"}),
        ("LlamaModel-0", FratrieDecoderForCausalLM, {"lm_head"}),
    ],
)
def test_only_what_the_checkpoint_lacks_is_new(source, ours, new, tmp_path):
    theirs = save(source, tmp_path)
    model, report = ours.from_pretrained(tmp_path, output_loading_info=True)
    missing = {name.rpartition(".")[0] for name in report["missing_keys"]}
    assert missing == new and not report["mismatched_keys"]
    for name in report["missing_keys"]:
        weight = model.get_parameter(name)
        if "norm" in name and name.endswith("weight"):
            assert torch.equal(weight, torch.ones_like(weight))
        elif name.endswith("bias"):
            assert not weight.any()
        elif "lm_head" not in name or not model.config.tie_word_embeddings:
            assert 0.3 < float(weight.detach().std()) / model.config.initializer_range < 3
    body = from_hf(theirs).base_model.state_dict()
    for name, weight in model.model.state_dict().items():
        assert torch.equal(weight, body[name]), name


def test_the_body_of_a_checkpoint_with_a_head(bert, caplog):
    """Whatever is not read is told, under its own name."""
    transformers_logging.enable_propagation()
    try:
        model, report = FratrieEncoderModel.from_pretrained(bert / "mlm", output_loading_info=True)
    finally:
        transformers_logging.disable_propagation()
    whole = FratrieEncoderForMaskedLM.from_pretrained(bert / "mlm")
    assert torch.equal(model.layers[2].mixer.q_proj.weight, whole.model.layers[2].mixer.q_proj.weight)
    assert not report["missing_keys"] and "cls.predictions.bias" in report["unexpected_keys"]
    assert "FratrieEncoderModel has no use for" in caplog.text and "cls.predictions" in caplog.text
    # It has no pooler, and so neither has ours.
    assert model.config.pooler_activation is None and model.pooler is None


def test_the_pooler(bert, tmp_path):
    theirs, case = BertModel.from_pretrained(bert / "base"), CASE["BertModel-0"]
    ours = FratrieEncoderModel.from_pretrained(bert / "base")
    arguments = inputs(case, theirs)[1]
    with torch.no_grad():
        expected, actual = theirs(**arguments).pooler_output, ours(**arguments).pooler_output
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    back = to_hf(ours)
    assert torch.equal(back.pooler.dense.weight, theirs.pooler.dense.weight)
    without = BertModel.from_pretrained(bert / "mlm", add_pooling_layer=False)
    ours = from_hf(without)
    assert ours.pooler is None and to_hf(ours).pooler is None
    ours.save_pretrained(tmp_path)
    assert "pooler_output" not in FratrieEncoderModel.from_pretrained(tmp_path)(**arguments)


def test_another_number_of_labels(bert):
    kept = CLASSIFIER.from_pretrained(bert / "classes")
    assert kept.config.num_labels == 3
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        CLASSIFIER.from_pretrained(bert / "classes", num_labels=5)
    config = AutoConfig.from_pretrained(bert / "classes")
    recipe, head = find_recipe("bert", CLASSIFIER.__name__)
    config = recipe.read_config(config, head)
    config.id2label = dict(enumerate("abcde"))
    for choice in ({"num_labels": 5}, {"config": config}):
        model, report = CLASSIFIER.from_pretrained(
            bert / "classes", **choice, ignore_mismatched_sizes=True, output_loading_info=True
        )
        assert {name for name, *_ in report["mismatched_keys"]} == {
            "classifier.out_proj.weight",
            "classifier.out_proj.bias",
        }
        assert model.classifier.out_proj.weight.shape == (5, 16) and model.config.num_labels == 5
        assert torch.equal(model.classifier.dense[0].weight, kept.classifier.dense[0].weight)
    labels = {"id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
    assert CLASSIFIER.from_pretrained(bert / "classes", **labels).config.id2label == labels["id2label"]


def test_fields_of_our_configuration_change_on_the_way(bert, tmp_path):
    choices = {"hidden_dropout": 0.3, "attn_implementation": "eager", "output_hidden_states": True}
    model = FratrieEncoderModel.from_pretrained(bert / "base", **choices)
    assert model.config.hidden_dropout == model.layers[0].dropout.p == 0.3
    assert model.config._attn_implementation == "eager" and model.config.output_hidden_states
    assert model.config.foreign_fields["model_type"] == "bert"
    model = FratrieEncoderModel.from_pretrained(bert / "base", num_hidden_layers=2)
    assert len(model.layers) == 2
    with pytest.raises(TypeError, match="hiden_dropout"):
        FratrieEncoderModel.from_pretrained(bert / "base", hiden_dropout=0.3)
    save("T5ForConditionalGeneration-0", tmp_path)
    model = FratrieSeq2SeqForConditionalGeneration.from_pretrained(tmp_path, decoder={"hidden_dropout": 0.3})
    assert (model.config.encoder.hidden_dropout, model.config.decoder.hidden_dropout) == (0.1, 0.3)


def test_a_configuration_of_ours_or_of_theirs(bert):
    theirs = BertConfig.from_pretrained(bert / "base")
    theirs.hidden_dropout_prob = 0.4
    assert FratrieEncoderModel.from_pretrained(bert / "base", config=theirs).config.hidden_dropout == 0.4
    ours = FratrieEncoderModel.from_pretrained(bert / "base", config=str(bert / "base")).config
    assert isinstance(ours, FratrieEncoderConfig)
    ours.hidden_dropout = 0.2
    model = FratrieEncoderModel.from_pretrained(bert / "base", config=ours)
    assert model.layers[0].dropout.p == 0.2
    with_ours = AutoModel.from_pretrained(bert / "base", config=ours)
    assert isinstance(with_ours, FratrieEncoderModel)
    assert torch.equal(with_ours.pooler.dense.weight, model.pooler.dense.weight)


def test_refusals(bert):
    with pytest.raises(ValueError, match="FratrieDecoderForCausalLM has no counterpart for model type 'bert'"):
        FratrieDecoderForCausalLM.from_pretrained(bert / "base")
    with pytest.raises(ValueError, match="state_dict"):
        FratrieEncoderModel.from_pretrained(bert / "base", state_dict={})


@pytest.mark.parametrize("config", [None, "{}", "{"])
def test_other_folders_are_left_to_hugging_face(config, tmp_path):
    """Whose own classes complain in the same words."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    complaints = []
    for model_class in (FratrieEncoderModel, BertModel):
        with pytest.raises(OSError) as error:
            model_class.from_pretrained(tmp_path)
        complaints.append(str(error.value))
    assert complaints[0] == complaints[1]
    with pytest.raises(OSError, match="absent"):
        FratrieEncoderModel.from_pretrained(tmp_path / "absent")


@pytest.mark.slow
def test_a_foreign_checkpoint_leaves_no_trace_in_our_own(bert, tmp_path):
    model = FratrieEncoderForMaskedLM.from_pretrained(bert / "mlm")
    model.save_pretrained(tmp_path / "ours")
    saved, config = load_file(tmp_path / "ours" / "model.safetensors"), read(tmp_path / "ours" / "config.json")
    assert config["model_type"] == "fratrie_encoder" and config["architectures"] == ["FratrieEncoderForMaskedLM"]
    assert config["foreign_fields"] == {"model_type": "bert"}
    assert set(saved) <= set(model.state_dict())
    assert not {"hidden_dropout_prob", "layer_norm_eps", "cls_token_id"} & set(config)
    again, report = FratrieEncoderForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    again.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    script = (
        "import sys, torch, fratrie; from transformers import AutoModelForMaskedLM\n"
        "model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])\n"
        "assert type(model) is fratrie.FratrieEncoderForMaskedLM\n"
        "model.save_pretrained(sys.argv[2])\n"
    )
    done = run_forked("-c", script, tmp_path / "ours", tmp_path / "third")
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "third" / name).read_bytes()


def test_hugging_faces_classes_still_load_their_own(bert):
    """Also after ours read the same folder."""
    FratrieEncoderModel.from_pretrained(bert / "base")
    model = AutoModel.from_pretrained(bert / "base")
    assert type(model) is BertModel and type(AutoConfig.from_pretrained(bert / "base")) is BertConfig


@pytest.mark.parametrize("name", ["GPT2LMHeadModel-0", "BartForConditionalGeneration-0", "LlamaForCausalLM-0"])
def test_the_generation_configuration_goes_both_ways(name, tmp_path):
    case = CASE[name]
    theirs = their_model(case, dtype=torch.float32)
    theirs.generation_config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, eos_token_id=[1, 3])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = case.head.ours.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    for model in (ours, from_hf(theirs), case.head.ours.from_pretrained(tmp_path / "ours"), to_hf(ours)):
        kept = model.generation_config
        assert (kept.max_new_tokens, kept.repetition_penalty, kept.eos_token_id) == (7, 1.5, [1, 3])
    back = to_hf(case.head.ours.from_pretrained(tmp_path / "ours"))
    back.save_pretrained(tmp_path / "back")
    files = [read(tmp_path / folder / "generation_config.json") for folder in ("theirs", "back")]
    assert files[0] == files[1]


def test_a_t5_with_an_output_layer_of_its_own(tmp_path):
    """As published checkpoints of T5 1.1 are: their configurations say it, and Hugging Face's class forgets it."""
    case = CASE["T5ForConditionalGeneration-1"]
    tied = save(case, tmp_path)
    states = load_file(tmp_path / "model.safetensors")
    states["lm_head.weight"] = torch.randn_like(tied.lm_head.weight)
    save_file(states, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = read(tmp_path / "config.json") | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path)
    for ours in (FratrieSeq2SeqForConditionalGeneration.from_pretrained(tmp_path), from_hf(theirs)):
        assert not ours.config.tie_word_embeddings
        assert torch.equal(ours.lm_head.weight, states["lm_head.weight"])
        assert torch.equal(ours.model.encoder.embed_tokens.weight, states["shared.weight"])
        their_inputs, our_inputs = inputs(case, theirs)
        back = to_hf(ours)
        with torch.no_grad():
            expected = theirs(**their_inputs).logits
            torch.testing.assert_close(ours(**our_inputs).logits, expected, rtol=1e-4, atol=1e-4)
            same_output(back(**their_inputs).logits, expected)
        back.save_pretrained(tmp_path / "back")
        saved = load_file(tmp_path / "back" / "model.safetensors")
        assert saved.keys() == states.keys() and all(torch.equal(saved[name], states[name]) for name in states)


def test_the_copy_shares_no_memory(tmp_path):
    theirs = their_model(CASE["GPT2LMHeadModel-0"], dtype=torch.float32)
    ours = our_model(theirs)
    before = ours.model.layers[0].mixer.k_proj.weight.clone()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.zero_()
    assert before.any() and torch.equal(ours.model.layers[0].mixer.k_proj.weight, before)


def test_checkpoints_of_other_kinds_are_refused(tmp_path):
    """Of a family without recipe, and ours of another sibling."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ElectraModel(transformers.ElectraConfig(**sizes, intermediate_size=8)).save_pretrained(tmp_path / "a")
    fratrie.FratrieDecoderModel(fratrie.FratrieDecoderConfig(**sizes)).save_pretrained(tmp_path / "b")
    for folder, kind in (("a", "electra"), ("b", "fratrie_decoder")):
        with pytest.raises(ValueError, match=f"holds a '{kind}' model, which FratrieEncoderModel cannot load"):
            fratrie.FratrieEncoderModel.from_pretrained(tmp_path / folder)


def test_the_start_token_of_t5_comes_back(tmp_path):
    fields = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**fields, decoder_start_token_id=0)
    back = to_hf(from_hf(transformers.T5ForConditionalGeneration(config)))
    assert back.config.decoder_start_token_id == 0
    ids = torch.tensor([[4, 5, 6]])
    assert torch.isfinite(back(input_ids=ids, labels=ids).loss)


class WithTemperature(FratrieDecoderForCausalLM):
    """As a user derives one."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature = torch.nn.Parameter(torch.ones(1))


class ScaledConfig(FratrieDecoderConfig):
    model_type = "scaled_decoder"
    scale: float = 2.0


class Scaled(FratrieDecoderForCausalLM):
    config_class = ScaledConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = config.scale


def test_a_users_class_loads_foreign_checkpoints(tmp_path):
    theirs = save("GPT2LMHeadModel-0", tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no counterpart for the weights temperature"):
        to_hf(WithTemperature.from_pretrained(tmp_path))
    model, report = WithTemperature.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is WithTemperature and set(report["missing_keys"]) == {"temperature"}
    expected = from_hf(theirs).state_dict()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in expected.items())


def test_a_users_class_with_its_own_configuration_goes_there_and_back(tmp_path):
    theirs = save("GPT2LMHeadModel-0", tmp_path)
    model = Scaled.from_pretrained(tmp_path)
    assert type(model) is Scaled and type(model.config) is ScaledConfig and model.scale == 2.0
    assert Scaled.from_pretrained(tmp_path, scale=3.0).scale == 3.0
    back = to_hf(model)
    assert type(back) is type(theirs)
    assert all(torch.equal(back.state_dict()[name], weight) for name, weight in theirs.state_dict().items())
    with pytest.raises(ValueError, match="Scaled has no counterpart for model type 'bert'; FratrieEncoderModel"):
        to_hf(model, "bert")


def test_a_class_derived_from_hugging_faces_is_read_as_its_base():
    class Theirs(BertModel):
        pass

    case = CASE["BertModel-0"]
    assert type(from_hf(Theirs(case.recipe.their_config(**case.fields)))) is FratrieEncoderModel


def test_a_class_that_a_checkpoint_defines_anew_is_known_by_its_name():
    theirs = their_model(CASE["BertModel-0"], dtype=torch.float32)
    theirs.__class__ = type("BertModel", (transformers.BertPreTrainedModel,), {})
    assert type(from_hf(theirs)) is FratrieEncoderModel


@pytest.mark.parametrize("name", ["GPT2LMHeadModel-0", "Qwen2ForCausalLM-0", "BertModel-0"])
def test_a_configuration_is_read_once(name, tmp_path, monkeypatch):
    save(name, tmp_path)
    read_files = []
    read_json = transformers.PreTrainedConfig._dict_from_json_file
    monkeypatch.setattr(
        transformers.PreTrainedConfig,
        "_dict_from_json_file",
        lambda file: read_files.append(Path(file).name) or read_json(file),
    )
    CASE[name].head.ours.from_pretrained(tmp_path)
    assert read_files.count("config.json") == 1


def test_a_mistral_with_types_of_layers_is_of_another_family(tmp_path):
    save("MistralForCausalLM-0", tmp_path)
    config = read(tmp_path / "config.json") | {"layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="No recipe for model type 'ministral'"):
        FratrieDecoderForCausalLM.from_pretrained(tmp_path)


def test_a_weight_of_a_checkpoint_is_freed_once_ours_is_made_from_it(tmp_path, monkeypatch):
    """Of which all matrices of GPT-2 are copies: the memory holds one model, not two."""
    save("GPT2LMHeadModel-0", tmp_path)
    sources, alive, read_tensor = [], [], Weight.read

    def counted(rule, tensor, *config):
        alive.append(sum(source() is not None for source in sources))
        if rule.transposed and tensor.ndim == 2:
            sources.append(weakref.ref(tensor.untyped_storage()))
        return read_tensor(rule, tensor, *config)

    monkeypatch.setattr(Weight, "read", counted)
    FratrieDecoderForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert len(sources) == 12 and max(alive) <= 1


@pytest.mark.parametrize("name", ["GPT2LMHeadModel-0", "Qwen2ForCausalLM-0"])
def test_weights_that_the_recipe_has_copied_are_not_copied_again(name, monkeypatch):
    ours, copied, clone = our_model(their_model(CASE[name])), [], torch.Tensor.clone

    def copy(tensor):
        copied.extend([] if tensor.is_meta else [tensor.shape])
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", copy)
    to_hf(ours)
    assert not copied
