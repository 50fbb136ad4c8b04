import io
import json
import sys

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CamembertConfig,
    DistilBertConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from fratrie import (
    FratrieDecoderConfig,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieSeq2SeqConfig,
)
from fratrie.training.classifiers import ClassifierHead, as_ours, load_classifier, new_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.layers import freeze_below, learning_rates
from fratrie.training.metrics import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from fratrie.training.model_folders import (
    check_checkpoint,
    check_same_tokens,
    checkpoint_folder,
    load_config,
    load_tokenizer,
)
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import Task

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SEVERAL = Task(MULTI_LABEL, ["+", "-", "j"])
ONE = Task(SINGLE_LABEL, ["a", "b", "c"])
CONFIGS = {
    "bert": BertConfig(**SIZES, max_position_embeddings=16),
    "camembert": CamembertConfig(**SIZES, max_position_embeddings=18, pad_token_id=1),
    "distilbert": DistilBertConfig(vocab_size=30, dim=16, n_layers=3, n_heads=2, hidden_dim=24),
    "modernbert": ModernBertConfig(**SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2),
    "fratrie_encoder": FratrieEncoderConfig(**SIZES),
    "fratrie_decoder": FratrieDecoderConfig(**SIZES, pad_token_id=0),
}


def tokenizer(pad="<pad>"):
    names = ["<pad>", "<s>", "</s>", "<unk>", "ma", "mère", "mon", "père", "aime"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )


def saved_body(folder, model_class=BertForMaskedLM, name="bert"):
    model_class(CONFIGS[name]).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def batch():
    return {
        "input_ids": torch.tensor([[1, 4, 5, 2], [1, 6, 2, 0]]),
        "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_gets_a_head_for_the_task(name):
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    model, new = new_classifier(config, SEVERAL, ClassifierHead())
    assert model(**batch()).logits.shape == (2, 3)
    assert Task.from_config(model.config) == SEVERAL
    assert new == {name for name, _ in model.named_parameters()}


def test_a_body_keeps_its_pretrained_weights_and_only_the_head_is_new(tmp_path):
    saved_body(tmp_path)
    body = BertForMaskedLM.from_pretrained(tmp_path).bert.state_dict()
    model, new = new_classifier(BertConfig.from_pretrained(tmp_path), SEVERAL, ClassifierHead(), tmp_path)
    assert new == {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    for name, weight in body.items():
        assert torch.equal(model.bert.state_dict()[name], weight), name
    assert model.dtype == torch.float32


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_labelled_checkpoint_gives_its_rows_to_the_labels_of_their_names(name, tmp_path, caplog):
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    before = new_classifier(config, SEVERAL, ClassifierHead())[0].eval()
    before.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = dict(zip(SEVERAL.labels, before(ids).logits[0], strict=True))
    for labels in (["j", "+", "-"], ["j", "x", "+"], ["x", "y", "z"]):
        caplog.set_level("INFO")
        model, new = new_classifier(load_config(tmp_path), Task(MULTI_LABEL, labels), ClassifierHead(), tmp_path)
        found = dict(zip(labels, model.eval()(ids).logits[0], strict=True))
        for label in labels:
            assert (label in expected) == any(
                torch.isclose(found[label], logit, atol=1e-6) for logit in expected.values()
            )
            assert label not in expected or torch.isclose(found[label], expected[label], atol=1e-6)
        kept = [label for label in labels if label in expected]
        assert bool(new) == (len(kept) < 3) and f"gives already: {', '.join(kept) or 'none'};" in caplog.text


def test_a_classifier_of_other_labels_gets_a_new_output_layer(tmp_path):
    new_classifier(BertConfig(**SIZES), SEVERAL, ClassifierHead())[0].save_pretrained(tmp_path)
    model, new = new_classifier(
        BertConfig.from_pretrained(tmp_path), Task(MULTI_LABEL, list("abcd")), ClassifierHead(), tmp_path
    )
    assert new == {"classifier.weight", "classifier.bias"}
    assert model.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d"} and model.classifier.out_features == 4


def test_our_head_takes_pooling_hidden_sizes_and_weights(tmp_path):
    saved_body(tmp_path, FratrieEncoderForMaskedLM, "fratrie_encoder")
    head = ClassifierHead("first", [8, 6], [1.0, 2.0, 3.0])
    model, new = new_classifier(FratrieEncoderConfig.from_pretrained(tmp_path), SEVERAL, head, tmp_path)
    assert (model.config.classifier_pooling, model.config.classifier_hidden_sizes) == ("first", [8, 6])
    assert model.config.pos_weight == [1.0, 2.0, 3.0]
    assert not any(name.startswith("model.") for name in new)


@pytest.mark.parametrize(
    ("config", "head", "message"),
    [
        (
            BertConfig(**SIZES),
            ClassifierHead(pooling="mean"),
            "classifier_pooling=mean: a 'bert' model has no such choice",
        ),
        (BertConfig(**SIZES), ClassifierHead(hidden_sizes=[4]), "classifier_hidden_sizes=.4.: a 'bert'"),
        (
            CONFIGS["modernbert"],
            ClassifierHead(pooling="first"),
            "classifier_pooling=first does not fit a 'modernbert' model",
        ),
        (FratrieSeq2SeqConfig(), ClassifierHead(), "'fratrie_seq2seq' has no head that classifies"),
    ],
)
def test_choices_that_a_model_lacks_are_named(config, head, message):
    with pytest.raises(ValueError, match=message):
        new_classifier(type(config).from_dict(config.to_dict()), SEVERAL, head)


class Judge(FratrieEncoderForSequenceClassification):
    """A user's own classifier, whose forward only passes on what it is given."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_classifier_of_the_user_is_built_for_a_checkpoint_of_a_family(tmp_path):
    saved_body(tmp_path)
    AutoModelForSequenceClassification.register(FratrieEncoderConfig, Judge, exist_ok=True)
    try:
        model, _ = new_classifier(as_ours(load_config(tmp_path)), SEVERAL, ClassifierHead())
    finally:
        ours = FratrieEncoderForSequenceClassification
        AutoModelForSequenceClassification.register(FratrieEncoderConfig, ours, exist_ok=True)
    assert type(model) is Judge
    rows = encode(["ma mère"], model, load_tokenizer(tmp_path))
    assert rows == [{"input_ids": [1, 4, 5, 2], "attention_mask": [1] * 4}]
    assert freeze_below(model, 1, set())
    assert learning_rates(model, 1e-3, 0.5)


def test_a_body_that_does_not_fit_its_config_is_refused(tmp_path):
    saved_body(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"does not fit its config: \d+ weights of the body .*bert\.embeddings"):
        new_classifier(BertConfig.from_pretrained(tmp_path), SEVERAL, ClassifierHead(), tmp_path)


@pytest.mark.parametrize("task", [SEVERAL, ONE])
@pytest.mark.parametrize("name", ["bert", "fratrie_encoder"])
def test_class_weights_weigh_the_loss(name, task):
    weights = [0.5, 2.0, 5.0]
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    model = new_classifier(config, task, ClassifierHead(class_weights=weights))[0].eval()
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 1]]) if task is SEVERAL else torch.tensor([0, 2])
    output = model(**batch(), labels=labels)
    logits, weight = output.logits, torch.tensor(weights)
    if task is SEVERAL:
        expected = functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)
    else:
        expected = (functional.cross_entropy(logits, labels, reduction="none") * weight[labels]).mean()
    torch.testing.assert_close(output.loss, expected)
    plain = functional.cross_entropy(logits, labels) if task is ONE else None
    assert plain is None or not torch.isclose(output.loss, plain)
    total = model(**batch(), labels=labels, num_items_in_batch=torch.tensor(40.0)).loss
    torch.testing.assert_close(total, expected * labels.numel() / 40)
    assert model(**batch()).loss is None
    output.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_top_layers_and_head_learn_and_the_rest_stays(name, layers):
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    model = AutoModelForSequenceClassification.from_config(config)
    trainable = freeze_below(model, layers, set())
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert learning == set(trainable)
    model(**batch()).logits.sum().backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} <= learning
    prefix = f"{model.base_model_prefix}."
    numbered = {
        name: [int(part) for part in name.split(".") if part.isdigit()] for name, _ in model.named_parameters()
    }
    for weight, numbers in numbered.items():
        if not weight.startswith(prefix) or "pooler" in weight:
            assert weight in learning
        elif numbers:
            assert (weight in learning) == (numbers[0] >= 3 - layers), weight
        else:
            assert weight not in learning, weight
    assert len({numbers[0] for weight, numbers in numbered.items() if numbers and weight in learning}) == layers


def test_weights_without_pretrained_values_are_never_frozen():
    model = BertForSequenceClassification(CONFIGS["bert"])
    trainable = freeze_below(model, 0, {"bert.embeddings.LayerNorm.weight"})
    assert "bert.embeddings.LayerNorm.weight" in trainable and "bert.embeddings.LayerNorm.bias" not in trainable


def test_minus_one_freezes_nothing_and_other_numbers_are_refused():
    model = BertForSequenceClassification(CONFIGS["bert"])
    assert len(freeze_below(model, -1, set())) == len(list(model.parameters()))
    for layers in (-2, 4):
        with pytest.raises(ValueError, match=f"trainable_layers={layers}: the model has 3 layers; give -1 to 3"):
            freeze_below(model, layers, set())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rate_falls_from_the_head_to_the_embeddings(name):
    """In each family: layers 2, 1 and 0, then the embeddings; a norm behind the layers learns like the top one."""
    model, _ = new_classifier(type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict()), SEVERAL, ClassifierHead())
    rates = learning_rates(model, 8.0, 0.5, head_rate=100.0)
    assert list(rates) == [name for name, _ in model.named_parameters()]
    assert set(rates.values()) == {1.0, 2.0, 4.0, 8.0, 100.0}
    for weight, rate in rates.items():
        numbers = [int(part) for part in weight.split(".") if part.isdigit()]
        if not weight.startswith(f"{model.base_model_prefix}.") or "pooler" in weight:
            assert rate == 100, weight
        elif numbers:
            assert rate == 8 / 2 ** (2 - numbers[0]), weight
        else:
            assert rate == (1 if "embed" in weight else 8), weight


def test_rates_that_differ_in_the_head_alone_need_no_list_of_layers():
    model = BertForSequenceClassification(CONFIGS["bert"])
    model.config.num_hidden_layers = 9
    rates = learning_rates(model, 1.0, head_rate=3.0)
    assert {name for name, rate in rates.items() if rate == 3} == {
        "classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias",
    }  # fmt: skip
    assert set(learning_rates(model, 1.0).values()) == {1.0}
    with pytest.raises(ValueError, match=r"layer_decay: BertModel has 0 lists of 9 layers \(\), expected one; use 1"):
        learning_rates(model, 1.0, 0.9)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.1, float("nan")])
def test_rates_out_of_range(decay):
    model = BertForSequenceClassification(CONFIGS["bert"])
    with pytest.raises(ValueError, match=f"layer_decay={decay} must lie above 0 and not above 1"):
        learning_rates(model, 1e-4, decay)
    with pytest.raises(ValueError, match="head_learning_rate=-1 must not be negative"):
        learning_rates(model, 1e-4, head_rate=-1)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("config.json", "lacks config.json"),
        ("model.safetensors", "lacks model.safetensors"),
        ("tokenizer.json", "lacks tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_it_lacks(tmp_path, name, missing):
    saved_body(tmp_path)
    assert check_checkpoint(tmp_path) == tmp_path
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{missing}$"):
        check_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=missing):
        load_classifier(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    saved_body(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is pickled and not read: .*use_safetensors=False"):
        check_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        check_checkpoint(tmp_path / "model.safetensors")


def test_a_saved_classifier_loads_with_its_task(tmp_path):
    model, _ = new_classifier(BertConfig(**SIZES), SEVERAL, ClassifierHead())
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded, words, task = load_classifier(tmp_path)
    assert task == SEVERAL and not loaded.training and words.pad_token == "<pad>"
    torch.testing.assert_close(loaded(**batch()).logits, model.eval()(**batch()).logits)


def test_a_body_without_head_is_no_classifier(tmp_path):
    saved_body(tmp_path)
    with pytest.raises(ValueError, match=r"not a fine-tuned classifier: it lacks .*; fine-tune it first"):
        load_classifier(tmp_path)


def test_damaged_weights_and_tokenizer_are_named(tmp_path):
    saved_body(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_classifier(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, "has no field hiden_size"),
        ({"num_attention_heads": 5}, "num_attention_heads=5"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "abacus"}, "abacus"),
    ],
)
def test_a_config_with_wrong_fields_is_named(tmp_path, change, message):
    CONFIGS["fratrie_encoder"].save_pretrained(tmp_path)
    assert load_config(tmp_path).hidden_size == 16
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        load_config(tmp_path)


def test_a_hub_gives_what_belongs_to_the_model_alone(tmp_path, monkeypatch):
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "modules.json",
              "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]  # fmt: skip
    others = ["pytorch_model.bin", "onnx/config.json", "checkpoint-5/model.safetensors", "openvino/x.model"]
    fetched = []

    def download(name, **patterns):
        fetched.extend(filter_repo_objects([*wanted, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("fratrie.training.model_folders.snapshot_download", download)
    assert checkpoint_folder("somebody/sentences") == tmp_path and fetched == wanted


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def classifier_folder(tmp_path):
    model, _ = new_classifier(FratrieEncoderConfig(**SIZES), SEVERAL, ClassifierHead())
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"id2label": {"0": "a", "2": "b"}},
            r"config\.json: id2label has 2 labels, but none for 1, and one for 2",
        ),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, r"config\.json: id2label has the label 'a' several times"),
        ({"id2label": {"x": "a"}}, r"config\.json: "),
        ({"id2label": ["a"]}, r"config\.json: id2label=\['a'\] must give a label for each number"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": None}, r"cannot be loaded: .*size"),
        ({"num_hidden_layers": 10**9}, r"config\.json: num_hidden_layers=1000000000 is more than 10000"),
        ({"num_labels": 10**12}, r"config\.json: num_labels=1000000000000 is more than"),
        ({"hidden_size": 10**12}, "cannot be loaded: "),
        ({"vocab_size": 10**12}, "cannot be loaded: a model of .* GiB, where .* are free"),
        ({"hidden_size": 10**30}, r"config\.json: hidden_size=\d+ must be below 1e\+18"),
        ({"label_thresholds": [0.5, "x", 0.5]}, r"config\.json: .*label_thresholds"),
        ({"transformers_weights": "../x.safetensors"}, r"config\.json: transformers_weights='\.\./x\.safetensors'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "evil.C"}}, r"config\.json: it asks for code of its own"),
    ],
)
def test_a_config_that_cannot_be_is_named(classifier_folder, change, message):
    edit(classifier_folder / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        load_classifier(classifier_folder)


class Adapter(torch.nn.Module):
    """A class of its own around a model, as adapters are."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **inputs):
        return self.model(**inputs)


def test_logits_of_a_foreign_class_are_calibrated_and_its_points_checked(tmp_path):
    """Our own classes calibrate by themselves, once."""
    for config in (BertConfig(**SIZES), FratrieEncoderConfig(**SIZES)):
        model, _ = new_classifier(config, SEVERAL, ClassifierHead())
        model.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        logits = []
        for points in (None, [[[0, 1], [1, 3]]] * 3):
            edit(tmp_path / "config.json", label_calibration=points)
            loaded, words, _ = load_classifier(tmp_path)
            with open_inference() as accelerator:
                rows = encode(["a b"], loaded, words)
                logits += [predict_logits(each, accelerator, rows, words, 1) for each in (loaded, Adapter(loaded))]
        for calibrated in logits[2:]:
            np.testing.assert_allclose(calibrated, 1 + 2 * logits[0], rtol=1e-5)
    for points in ([[[0, 1], [1, 3]]], [[[0, 1], [0, 3]]] * 3, [1, 2, 3], "high"):
        edit(tmp_path / "config.json", label_calibration=points)
        with pytest.raises(ValueError, match=r"config\.json: .*calibration"):
            load_classifier(tmp_path)


def test_thresholds_of_a_foreign_config_are_put_in_order_and_checked(tmp_path):
    """Our own configs check theirs; a Hugging Face class keeps whatever stands in config.json."""
    model, _ = new_classifier(BertConfig(**SIZES), SEVERAL, ClassifierHead())
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for own, given, expected in [
        ({"-": 0.25}, None, [0.5, 0.25, 0.5]),
        ([0.1, 0.2, 0], '{"+": 1}', [1.0, 0.2, 0.0]),
        (None, None, None),
    ]:
        edit(tmp_path / "config.json", label_thresholds=own)
        assert load_classifier(tmp_path, given)[0].config.label_thresholds == expected
    for own in ([0.5], ["x", 0.5, 0.5], {"z": 0.5}, "high"):
        edit(tmp_path / "config.json", label_thresholds=own)
        with pytest.raises(ValueError, match=r"config\.json: .*threshold"):
            load_classifier(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", "[" * 200_000, "\udcff", '{"hidden_size": ' + "9" * 5000 + "}"]
)
def test_a_config_that_is_no_json_object_is_named(classifier_folder, content):
    (classifier_folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    for load in (load_classifier, load_config, load_tokenizer):
        with pytest.raises(
            ValueError, match=r"config\.json (is no JSON file|is nested too deep|must hold a JSON object)"
        ):
            load(classifier_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_max_length": "abc"}, r"tokenizer_config\.json: model_max_length='abc' must be a positive number"),
        ({"model_max_length": 0}, "model_max_length=0"),
        ({"model_input_names": []}, "the tokenizer in .* (cannot be used|gives no input_ids)"),
        ({"pad_token": 3}, "the tokenizer in .* cannot be read: .*pad_token"),
        ({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}, "code of its own"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_named(classifier_folder, monkeypatch, change, message):
    """Code of the folder is neither run nor asked for: a `y` that waits on the standard input stays there."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    (classifier_folder / "evil.py").write_text("raise SystemExit('it ran')")
    edit(classifier_folder / "tokenizer_config.json", **change)
    with pytest.raises(ValueError, match=message):
        load_classifier(classifier_folder)
    assert sys.stdin.read() == "y\n"


def test_errors_of_the_config_name_it_where_a_tokenizer_would_do_without(classifier_folder):
    edit(classifier_folder / "config.json", hidden_size="wide")
    with pytest.raises(ValueError, match=r"config\.json: .*hidden_size"):
        load_classifier(classifier_folder)


def test_a_package_that_a_tokenizer_needs_is_named(tmp_path, monkeypatch):
    """Where sentencepiece is not installed, a folder with its model alone cannot be read."""
    monkeypatch.setattr("fratrie.training.model_folders.missing_reader", lambda _: "sentencepiece")
    CamembertConfig(**SIZES).save_pretrained(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\n\x0e")
    with pytest.raises(ValueError, match=r"cannot be read: .*pip install sentencepiece"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    saved_body(tmp_path)
    own, extended = tokenizer(), tokenizer()
    extended.add_tokens(["tante"])
    for fitting in (own, extended):
        check_same_tokens(fitting, tmp_path)
    words = json.loads(own.backend_tokenizer.to_str())
    words["model"]["vocab"] |= {"mère": 7, "père": 5}
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(words)), pad_token="<pad>")
    with pytest.raises(ValueError, match=r"gives '.ère' the number .*, the tokenizer in .*: .* Leave --tokenizer out"):
        check_same_tokens(swapped, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    check_same_tokens(swapped, tmp_path)


def test_a_tokenizer_without_pad_token_is_refused_with_the_way_out(tmp_path):
    tokenizer(pad=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no pad token.*tokenizer\.pad_token = tokenizer\.eos_token"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "absent")


def test_the_task_of_a_config_without_problem_type():
    assert Task.from_config(BertConfig(num_labels=1)).problem_type == REGRESSION
    assert Task.from_config(BertConfig(num_labels=3)).problem_type == SINGLE_LABEL


@pytest.mark.parametrize(("layers", "lists"), [(2, 2), (3, 2)])
def test_a_model_with_two_stacks_is_refused(layers, lists):
    config = T5Config(
        vocab_size=30, d_model=16, d_ff=24, num_layers=layers, num_heads=2, d_kv=8, pad_token_id=0, eos_token_id=2
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match=rf"{lists} lists of {layers} layers \(encoder.block, decoder.block\)"):
        freeze_below(model, 1, set())
