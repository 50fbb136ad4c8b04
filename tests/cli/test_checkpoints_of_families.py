"""The scripts of classification with checkpoints of Hugging Face families, from folders and from a hub's cache."""

import csv
import json
import shutil

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CamembertConfig,
    CamembertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from fratrie import (
    FratrieDecoderForSequenceClassification,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderModel,
)
from fratrie.conversion import to_hf

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
LENGTH = {"max_position_embeddings": 48, "pad_token_id": 1}
SPECIALS = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
FAMILIES = {
    "camembert": (CamembertForMaskedLM, CamembertConfig, LENGTH),
    "bert": (BertForMaskedLM, BertConfig, LENGTH),
    "roberta": (RobertaModel, RobertaConfig, LENGTH),
    "xlm-roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig, LENGTH),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, {**LENGTH, **SPECIALS, "local_attention": 6}),
}
FAST = ["--disable_progress", "--report_to", "none", "--max_steps", 2, "--max_length", 40, "--seed", 1]


@pytest.fixture
def checkpoint(samples, tmp_path):
    """Writes a tiny model of a family with the samples' tokenizer."""

    def call(model_class, config_class, fields, name="theirs"):
        tokenizer = AutoTokenizer.from_pretrained(samples / "tokenizer")
        torch.manual_seed(0)
        sizes = SIZES if config_class is not GPT2Config else {}
        model = model_class(config_class(**{**sizes, **fields, "vocab_size": len(tokenizer)}))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return call


@pytest.fixture
def finetune(run_script, samples, tmp_path):
    def call(model, *options):
        out = tmp_path / "out"
        files = ["--train_file", samples / "train.jsonl", "--test_file", samples / "test.jsonl"]
        code, stdout, stderr = run_script(
            "finetune.py", "--model", model, "--output_dir", out, *files, *FAST, *options
        )
        return code, stdout, stderr, out

    return call


def predict(run_script, samples, model, output):
    code, _, stderr = run_script(
        "predict.py", "--model", model, "--input_file", samples / "test.jsonl", "--output_file", output
    )
    assert code == 0, stderr
    with output.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 32 and all(0 < float(row["+"]) < 1 for row in rows)
    return rows


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_is_trained_as_ours(checkpoint, finetune, run_script, samples, tmp_path, family):
    folder = checkpoint(*FAMILIES[family])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, _, stderr, out = finetune(folder)
    assert code == 0, stderr
    assert "Hugging Face's own class" not in stderr
    config = read(out / "config.json")
    assert config["model_type"] == "fratrie_encoder" and config["foreign_fields"]["model_type"] == family
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model) is FratrieEncoderForSequenceClassification
    start = FratrieEncoderModel.from_pretrained(folder).state_dict()
    # Two steps away from the pretrained weights; random ones would be far.
    distances = [float((weight - start[name]).abs().max()) for name, weight in model.model.state_dict().items()]
    assert 0 < max(distances) < 0.002 and "new weights: classifier." in stderr
    rows = predict(run_script, samples, out, tmp_path / "labelled.csv")
    tokenizer = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        logits = model(**tokenizer(rows[0]["text"], return_tensors="pt")).logits[0]
    assert float(rows[0]["+"]) == pytest.approx(float(logits.sigmoid()[model.config.label2id["+"]]), abs=1e-5)
    theirs = to_hf(model)
    assert type(theirs).__name__.endswith("ForSequenceClassification") and theirs.config.model_type == family
    with torch.no_grad():
        back = theirs(**tokenizer(rows[0]["text"], return_tensors="pt")).logits[0]
    torch.testing.assert_close(back, logits, rtol=1e-4, atol=1e-5)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_decoder_is_trained_as_ours(checkpoint, finetune, run_script, samples, tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 48, "pad_token_id": 1, **SPECIALS}
    folder = checkpoint(GPT2LMHeadModel, GPT2Config, sizes)
    code, _, stderr, out = finetune(folder)
    assert code == 0, stderr
    assert type(AutoModelForSequenceClassification.from_pretrained(out)) is FratrieDecoderForSequenceClassification
    predict(run_script, samples, out, tmp_path / "labelled.csv")


def test_a_classifier_of_other_labels_gets_a_new_output_alone(checkpoint, finetune):
    folder = checkpoint(BertForSequenceClassification, BertConfig, {**LENGTH, "num_labels": 3})
    code, _, stderr, out = finetune(folder)
    assert code == 0, stderr
    assert "new weights: classifier.out_proj.bias, classifier.out_proj.weight" in stderr
    assert len(AutoModelForSequenceClassification.from_pretrained(out).config.id2label) == 4


def test_what_ours_cannot_be_is_trained_as_it_is(checkpoint, finetune, run_script, samples, tmp_path):
    model_class, config_class, fields = FAMILIES["modernbert"]
    folder = checkpoint(model_class, config_class, {**fields, "attention_dropout": 0.1})
    code, _, stderr, out = finetune(folder)
    assert code == 0, stderr
    assert "attention_dropout=0.1" in stderr and "Hugging Face's own class" in stderr
    assert read(out / "config.json")["model_type"] == "modernbert"
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model).__name__ == "ModernBertForSequenceClassification"
    predict(run_script, samples, out, tmp_path / "labelled.csv")


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """A cache of the hub, which cannot be reached, with a tiny BERT as somebody/tiny-bert."""
    snapshot = tmp_path / "hub" / "models--somebody--tiny-bert" / "snapshots" / ("a" * 40)
    shutil.copytree(checkpoint(*FAMILIES["bert"]), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id(hub, finetune, run_script, tmp_path):
    code, _, stderr, out = finetune("somebody/tiny-bert")
    assert code == 0, stderr
    assert read(out / "config.json")["model_type"] == "fratrie_encoder"
    assert "`somebody/tiny-bert`" in (out / "README.md").read_text(encoding="utf-8")
    code, stdout, stderr = run_script("convert.py", "--from", "somebody/tiny-bert", "--out", tmp_path / "ours")
    assert code == 0, stderr
    assert "BertForMaskedLM -> FratrieEncoderForMaskedLM" in stdout
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["somebody/else", "nobody", "runs/typing-error", "a/b/c", "./absent", "some body"])
def test_an_unknown_name(hub, finetune, run_script, tmp_path, name):
    for outcome in (finetune(name), run_script("convert.py", "--from", name, "--out", tmp_path / "ours")):
        code, stderr = outcome[0], outcome[2]
        assert code == 2
        (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: ") and name.removeprefix("./") in line and "is not a folder" in line


def test_an_incomplete_snapshot(hub, finetune):
    (hub / "model.safetensors").unlink()
    code, _, stderr, _ = finetune("somebody/tiny-bert")
    assert code == 2 and "it lacks model.safetensors" in stderr
