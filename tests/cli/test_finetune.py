import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fratrie import FratrieEncoderModel
from fratrie.cli.finetune import FinetuningOptions
from fratrie.training.schedules import LEAST_STEPS

FAST = ["--disable_progress", "--report_to", "none", "--learning_rate", "5e-3", "--seed", "1"]
TINY = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"


@pytest.fixture
def finetune(run_script, tmp_path):
    """Runs the script into tmp_path/out; gives exit code, both streams and the folder."""

    def call(*arguments):
        out = tmp_path / "out"
        code, stdout, stderr = run_script("finetune.py", "--output_dir", out, *FAST, *arguments)
        return code, stdout, stderr, out

    return call


def files(samples):
    return ["--train_file", samples / "train.jsonl", "--test_file", samples / "test.jsonl"]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("given", "steps_per_epoch", "epochs", "patience"),
    [
        ({}, 165, 10, 4),
        ({}, LEAST_STEPS // 25, 25, 10),
        ({"early_stopping_patience": 3}, LEAST_STEPS // 25, 25, 3),
        ({"num_train_epochs": 2}, 1, 2, 4),
        ({"max_steps": 7}, 1, 10, 4),
        ({"eval_strategy": "no"}, LEAST_STEPS // 25, 25, 0),
    ],
)
def test_few_texts_are_seen_in_more_epochs_unless_a_number_is_given(given, steps_per_epoch, epochs, patience):
    options = FinetuningOptions("out", **given)
    options.choose_length(steps_per_epoch)
    assert (options.num_train_epochs, options.early_stopping_patience) == (epochs, patience)


@pytest.mark.parametrize("kind", ["bert", "fratrie"])
def test_it_learns_and_leaves_a_complete_folder(finetune, samples, kind):
    start = ["--model", samples / "bert"]
    if kind == "fratrie":
        start = ["--model_type", "encoder", "--config_overrides", TINY, "--tokenizer", samples / "tokenizer"]
    code, stdout, stderr, out = finetune(
        *files(samples), *start, "--num_train_epochs", 15, "--tune_thresholds", "--early_stopping_patience", 0
    )
    assert code == 0, stderr
    metrics = read(out / "metrics.json")
    assert metrics["test"]["macro_f1"] > 0.9
    assert set(metrics["test"]["f1"]) == {"+", "-", "m", "p"} and metrics["test"]["samples"] == 32
    assert "test" in stdout and "Support" in stdout and f"{metrics['test']['f1']['m']:.3f}" in stdout
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    # Pipelines cut texts to what the model takes.
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert f"{type(model).__name__}: " in stderr and "texts of train" in stderr
    assert "120 texts of 30 respondents, several labels each\n  row 1: 'on " in stderr
    assert model.config.problem_type == "multi_label_classification"
    assert model.config.id2label == {0: "+", 1: "-", 2: "m", 3: "p"}
    assert list(metrics["label_thresholds"].values()) == model.config.label_thresholds
    logits = model(**tokenizer("on aime ma mère le 3", return_tensors="pt")).logits[0]
    decided = torch.sigmoid(logits) > torch.tensor(model.config.label_thresholds)
    assert decided.tolist() == [True, False, True, False]
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    for text in ("| `+` |", "F1, 95 %", "finetune.py", "32 test texts", "Thresholds were tuned on"):
        assert text in card.text
    assert read(out / "run_config.json")["run"]["model"]["tune_thresholds"] is True


def test_the_kept_model_is_the_best_by_the_metric(finetune, samples):
    """The loss falls while it learns, so where a greater one counts as better an early model is the best."""
    code, _, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", "--num_train_epochs", 8, "--early_stopping_patience", 0,
        "--metric_for_best_model", "eval_loss", "--greater_is_better", "True",
    )  # fmt: skip
    assert code == 0, stderr
    training = read(out / "metrics.json")["training"]
    losses = [float(line.split()[2].strip(",")) for line in stderr.splitlines() if line.startswith("validation:")]
    assert len(losses) == 8 and training["best_metric"] == pytest.approx(max(losses), abs=1e-4)
    assert training["best_step"] * 8 == training["global_step"] * (1 + losses.index(max(losses)))
    assert max(losses) > losses[-1]
    kept, best = (
        load_file(folder / "model.safetensors") for folder in (out, out / f"checkpoint-{training['best_step']}")
    )
    assert all(torch.equal(kept[name], best[name]) for name in kept)


def test_it_stops_when_validation_no_longer_improves(finetune, samples):
    code, _, _, out = finetune(
        *files(samples), "--model", samples / "bert", "--learning_rate", "0", "--num_train_epochs", 30,
        "--early_stopping_patience", 2,
    )  # fmt: skip
    training = read(out / "metrics.json")["training"]
    assert code == 0 and training["stopped_early"] and training["epoch"] == 3


def test_the_default_is_the_shipped_corpus(finetune, samples):
    code, _, stderr, out = finetune("--model", samples / "bert", "--max_steps", 2)
    assert code == 0, stderr
    metrics = read(out / "metrics.json")
    assert metrics["test"]["samples"] == 330 and metrics["test"]["support"]["j"] == 247
    low, high = metrics["test"]["present_macro_f1_interval"]
    assert low <= metrics["test"]["macro_f1"] <= high
    assert list(metrics["test"]["f1"]) == ["+", "-", "0", "i", "j", "f", "s", "p", "m", "a", "t"]
    card = ModelCard.load(out / "README.md")
    assert card.data.language == "fr" and "machine-written" in card.text
    for text in (
        "by a bootstrap of 2000 draws",
        "above a probability of 0.5",
        'pipeline("text-classification", model="path/to/this/folder", top_k=None)',
    ):
        assert text in card.text
    assert "texts are longer than 48 tokens and were cut" in stderr
    assert "twelve further writers" not in card.text


def test_the_card_of_an_extended_model_says_so(finetune, samples):
    given = ("--dataset", "family_relations_extended", "--max_steps", 1, "--validation_size", 0)
    code, _, stderr, out = finetune("--model", samples / "bert", *given)
    assert code == 0 and "the shipped corpus, extended by more.txt, train: 5,327 texts" in stderr, stderr
    text = ModelCard.load(out / "README.md").text
    assert "Train is extended by the sentences of twelve further writers" in text and "5327 train texts" in text


def body_of(folder):
    """The weights of a BERT checkpoint under the names of our classifier."""
    return {
        f"model.{name}": weight for name, weight in FratrieEncoderModel.from_pretrained(folder).state_dict().items()
    }


def test_frozen_layers_keep_their_weights(finetune, samples):
    code, _, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", "--trainable_layers", 1, "--max_steps", 3
    )
    assert code == 0, stderr
    before, after = body_of(samples / "bert"), load_file(out / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "layers.1." not in name}
    assert any("layers.0." in name for name in same) and any("embed_tokens" in name for name in same)
    assert "frozen layers: 1; their states of " in stderr


def test_the_kernel_of_attention_is_chosen_for_training_alone(finetune, samples, monkeypatch):
    used = []
    run_attention = FratrieEncoderModel.forward

    def forward(self, *arguments, **named):
        used.append(self.config._attn_implementation)
        return run_attention(self, *arguments, **named)

    monkeypatch.setattr(FratrieEncoderModel, "forward", forward)
    code, _, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", "--max_steps", 1, "--attn_implementation", "eager",
        "--mixed_precision", "bf16",
    )  # fmt: skip
    assert code == 0, stderr
    assert set(used) == {"eager"}
    assert AutoModelForSequenceClassification.from_pretrained(out).config._attn_implementation == "sdpa"


def test_layers_learn_at_falling_rates(finetune, samples):
    """AdamW's first step has the size of the rate, whatever the gradient."""
    code, _, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", "--layer_decay", 0.1, "--head_learning_rate", 0.02,
        "--max_steps", 1, "--warmup_steps", 0, "--weight_decay", 0, "--lr_scheduler_type", "constant",
        "--validation_size", 0,
    )  # fmt: skip
    assert code == 0, stderr
    before, after = body_of(samples / "bert"), load_file(out / "model.safetensors")
    steps = {name: (after[name] - before[name]).abs().max() for name in before}
    for part, rate in (("embedding_norm.weight", 5e-5), ("layers.0.", 5e-4), ("layers.1.", 5e-3)):
        chosen = [float(step) for name, step in steps.items() if part in name]
        assert chosen and max(chosen) == pytest.approx(rate, rel=0.05), part
    assert float(after["classifier.out_proj.bias"].abs().max()) > 0.01


@pytest.mark.parametrize("problem", ["single", "regression"])
def test_other_problem_types(finetune, samples, tmp_path, problem):
    rows = [json.loads(line) for line in (samples / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        positive = "+" in row["labels"]
        row["labels"] = {"single": "good" if positive else "bad", "regression": float(positive)}[problem]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--problem_type", "regression"] if problem == "regression" else ["--class_weights", "balanced"]
    code, stdout, stderr, out = finetune(
        "--train_file", data, "--test_file", data, "--model", samples / "bert", "--num_train_epochs", 12, *given
    )
    assert code == 0, stderr
    scores = read(out / "metrics.json")["test"]
    if problem == "single":
        assert scores["accuracy"] > 0.95 and "Accuracy" in stdout
        assert AutoModelForSequenceClassification.from_pretrained(out).config.id2label == {0: "bad", 1: "good"}
    else:
        assert scores["mse"] < 0.1 and "mse" in stdout


def test_balanced_weights_change_the_loss_and_are_saved_in_our_config(finetune, samples):
    start = ["--model_type", "encoder", "--config_overrides", TINY, "--tokenizer", samples / "tokenizer"]
    arguments = [*files(samples), *start, "--max_steps", 1, "--class_weights", "balanced"]
    code, _, stderr, out = finetune(*arguments, "--classifier_hidden_sizes", 8, "--pooling", "first")
    assert code == 0, stderr
    config = read(out / "config.json")
    rows = [json.loads(line)["labels"] for line in (samples / "train.jsonl").read_text().splitlines()]
    assert len(config["pos_weight"]) == 4 and config["classifier_hidden_sizes"] == [8]
    share = sum("+" in labels for labels in rows) / len(rows)
    assert config["pos_weight"][0] == pytest.approx((1 - share) / share, rel=0.25)
    assert config["classifier_pooling"] == "first"


def test_texts_are_learnt_with_swapped_words_and_not_held_out(finetune, samples, tmp_path):
    lexicon = tmp_path / "words.json"
    lexicon.write_text(json.dumps({"persons": {"m": ["ma mère"], "p": ["mon père"]}}))
    arguments = [*files(samples), "--model", samples / "bert", "--max_steps", 1, "--swap_words", lexicon]
    code, _, stderr, out = finetune(*arguments, "--validation_size", 0.5)
    assert code == 0, stderr
    card = (out / "README.md").read_text()
    assert "learnt twice: 60 texts" in stderr and "120 train texts" in card and "60 validation texts" in card


def test_parts_have_their_support_and_thresholds_their_names(finetune, samples, tmp_path):
    """Each part's support is its own; the card tells no folder of this machine."""
    given = ["--label_thresholds", '{"m": 0, "p": 1}', "--trainable_layers", 0, "--max_steps", 1]
    code, stdout, stderr, out = finetune(*files(samples), "--model", samples / "bert", *given)
    assert code == 0, stderr
    metrics = read(out / "metrics.json")
    lines = [line.split() for line in stdout.splitlines()]
    assert lines[1] == ["Support"]
    for line, part in zip(lines[2:4], ("validation", "test"), strict=True):
        assert line == [part, *map(str, metrics[part]["support"].values())]
    assert metrics["label_thresholds"] == {"+": 0.5, "-": 0.5, "m": 0.0, "p": 1.0}
    assert metrics["test"]["recall"]["m"] == 1.0 and metrics["test"]["recall"]["p"] == 0.0
    card = (out / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in card and str(samples) not in card
    assert "the checkpoint `bert`" in card and "`p` 1." in card and '"output_dir": "out"' in card


def test_without_validation_the_last_model_is_kept(finetune, samples):
    code, stdout, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", "--max_steps", 2, "--validation_size", 0
    )
    assert code == 0, stderr
    metrics = read(out / "metrics.json")
    assert "validation" not in metrics and metrics["training"]["best_step"] is None and "test" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{s}/bert", "--model_type", "bert"], "give either --model"),
        ([], "give either --model"),
        (["--model_type", "encoder"], "a new model needs --tokenizer"),
        (["--model", "{s}/bert", "--config_overrides", "a=1"], "--config_overrides describe a new model"),
        (["--model", "{s}/nowhere"], "nowhere is not a folder"),
        (["--model", "{s}/tokenizer"], "lacks config.json, model.safetensors"),
        (["--model", "{s}/bert", "--train_file", "{s}/absent.csv"], "absent.csv: there is no such file"),
        (["--model", "{s}/bert", "--trainable_layers", "9"], "the model has 2 layers; give -1 to 2"),
        (["--model", "{s}/bert", "--layer_decay", "1.5"], "layer_decay=1.5 must lie above 0"),
        (["--model", "{s}/bert", "--max_length", "100"], "max_length=100: the model takes 1 to 48 tokens"),
        (["--model", "{s}/bert", "--tune_thresholds", "--validation_size", "0"], "needs a validation part"),
        (["--model", "{s}/bert", "--label_thresholds", '{{"q": 0.5}}'], "threshold for the unknown label 'q'"),
        (["--model", "{s}/bert", "--swap_words", "{s}/train.jsonl"], "train.jsonl is no lexicon"),
        (["--model", "{s}/bert", "--label_thresholds", "1", "--tune_thresholds"], "leave one of them out"),
        (["--model", "{s}/bert", "--test_file", "{s}/test.jsonl"], "a test file without a train file"),
        (["--model", "{s}/bert", "--learning_rat", "1"], "learning_rat"),
        (["--model", "{s}/bert", "--num_train_epochs", "0"], "num_train_epochs=0.0 must be above 0"),
        (
            ["--model_type", "encoder", "--tokenizer", "{s}/tokenizer", "--trainable_layers", "1"],
            "a new model has none",
        ),
        (
            ["--model_type", "encoder", "--tokenizer", "{s}/tokenizer", "--config_overrides", "hiden_size=3"],
            "no field hiden_size",
        ),
    ],
)
def test_what_a_user_gets_wrong_ends_with_a_message(finetune, samples, arguments, message):
    code, _, stderr, _ = finetune(*(argument.format(s=samples) for argument in arguments))
    assert code == 2
    assert message in stderr.splitlines()[-1] and stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in stderr


def test_data_that_cannot_be_learnt_end_with_a_message(finetune, samples, tmp_path):
    lines = (samples / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rare = tmp_path / "rare.jsonl"
    rare.write_text("\n".join([*lines[:8], json.dumps({"text": "x", "labels": ["m"], "respondent": 9})]) + "\n")
    cases = {
        "empty.jsonl": ("", "holds no rows"),
        "one.jsonl": (lines[0], "two respondents or more, found 1"),
        "latin.csv": ("text,labels\nmère,a\n".encode("latin-1"), "is not UTF-8"),
        "noise.txt": ("jm* Ma mère.\n", "jm*"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        code, _, stderr, _ = finetune("--train_file", path, "--model", samples / "bert")
        assert code == 2 and message in stderr and "Traceback" not in stderr, name
    names = ["--label_names", "+", "-", "m", "p", "z"]
    code, _, stderr, _ = finetune(*files(samples), "--model", samples / "bert", *names)
    assert code == 2 and "no training text carries the label 'z'" in stderr
    code, _, stderr, out = finetune(
        *files(samples), "--model", samples / "bert", *names, "--allow_missing_labels", "--max_steps", 1
    )
    assert code == 0 and "the label z: it will never be predicted" in stderr
    assert read(out / "metrics.json")["test"]["support"]["z"] == 0


def test_nan_stops_with_the_step(finetune, samples, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(samples / "bert", num_labels=4)
    torch.nn.init.constant_(model.bert.embeddings.LayerNorm.weight, torch.nan)
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(samples / "bert").save_pretrained(tmp_path / "nan")
    code, _, stderr, _ = finetune(*files(samples), "--model", tmp_path / "nan")
    assert code == 2 and "step 1: the loss is nan" in stderr


def test_a_tokenizer_without_pad_token_or_of_another_model(finetune, samples, tmp_path):
    other = AutoTokenizer.from_pretrained(samples / "tokenizer")
    other.add_tokens(["mère"])
    other.save_pretrained(tmp_path / "other")
    code, _, stderr, _ = finetune(*files(samples), "--model", samples / "bert", "--tokenizer", tmp_path / "other")
    assert code == 2 and "they do not belong together" in stderr
    other.pad_token = None
    other.save_pretrained(tmp_path / "bare")
    code, _, stderr, _ = finetune(*files(samples), "--model", samples / "bert", "--tokenizer", tmp_path / "bare")
    assert code == 2 and "has no pad token" in stderr


def test_an_output_folder_that_cannot_be_written(run_script, samples, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, stderr = run_script("finetune.py", "--model", samples / "bert", "--output_dir", tmp_path / "file" / "x")
    assert code == 2 and "error: " in stderr and "file" in stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["bert", "fratrie"])
def test_two_processes_give_what_one_gives(run_processes, samples, tmp_path, kind):
    start = ["--model", samples / "bert", "--class_weights", "balanced", "--trainable_layers", 1]
    if kind == "fratrie":
        start = ["--model_type", "encoder", "--config_overrides", TINY, "--tokenizer", samples / "tokenizer"]
    results = {}
    for processes, accumulation in ((1, 2), (2, 1)):  # the same micro-batches, so the same dropout
        out = tmp_path / f"of_{processes}"
        batches = ["--per_device_train_batch_size", 3, "--gradient_accumulation_steps", accumulation]
        lengths = ["--num_train_epochs", 2, "--per_device_eval_batch_size", 5]
        given = ["--output_dir", out, *FAST, *files(samples), *start, *batches, *lengths]
        run = run_processes("finetune.py", *given, processes=processes)
        assert run.returncode == 0, run.stderr
        results[processes] = read(out / "metrics.json"), load_file(out / "model.safetensors"), run.stderr
    (one, weights_one, log_one), (two, weights_two, log_two) = results[1], results[2]
    assert read(tmp_path / "of_2" / "run_config.json")["processes"] == 2
    assert two["test"]["samples"] == 32 and two["test"]["support"] == one["test"]["support"]
    for name, weight in weights_one.items():
        torch.testing.assert_close(weights_two[name], weight, atol=2e-4, rtol=1e-3)
    for part in ("validation", "test"):
        assert two[part]["f1"] == pytest.approx(one[part]["f1"], abs=0.02)
    losses = [[line for line in log.splitlines() if line.startswith("validation:")] for log in (log_one, log_two)]
    assert len(losses[0]) == 2
    for first, second in zip(*losses, strict=True):
        assert float(first.split()[2].strip(",")) == pytest.approx(float(second.split()[2].strip(",")), abs=2e-4)


@pytest.mark.slow
def test_the_script_runs_as_a_program(samples, tmp_path):
    """In its own process the folder of the script comes first on the path: `evaluate` and `accelerate` lie there."""
    script = os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "finetune.py")
    command = [sys.executable, script, "--output_dir", str(tmp_path / "out"), *FAST, *map(str, files(samples))]
    run = subprocess.run(
        [*command, "--model", str(samples / "bert"), "--max_steps", "1"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
    shutil.rmtree(tmp_path / "out")
