import csv
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from fratrie.training.metrics import multilabel_scores

LABELS = ["+", "-", "m", "p"]


@pytest.fixture(scope="module")
def classifier(samples, tmp_path_factory):
    """An untrained classifier whose thresholds lie among its probabilities, so that decisions vary."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(samples / "bert")
    torch.manual_seed(0)
    names = dict(enumerate(LABELS))
    config = BertConfig.from_pretrained(samples / "bert", id2label=names, label2id={n: i for i, n in names.items()})
    config.problem_type, config.initializer_range = "multi_label_classification", 0.8
    model = AutoModelForSequenceClassification.from_config(config).eval()
    probabilities = predicted(model, tokenizer, texts(samples / "test.jsonl"))
    model.config.label_thresholds = [between_values(column) for column in probabilities.T]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def between_values(column):
    values = np.unique(column.round(5))
    return float(values[len(values) // 2 - 1 : len(values) // 2 + 1].mean())


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def predicted(model, tokenizer, sentences):
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0].sigmoid().numpy() for text in sentences]
    return np.stack(rows)


def test_scores_are_those_of_one_text_at_a_time(run_script, classifier, samples, tmp_path):
    output = tmp_path / "new" / "scores.json"
    given = ["--model", classifier, "--file", samples / "test.jsonl", "--batch_size", 5]
    code, stdout, stderr = run_script("evaluate.py", *given, "--output_file", output)
    assert code == 0, stderr
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    probabilities = predicted(model, AutoTokenizer.from_pretrained(classifier), texts(samples / "test.jsonl"))
    decisions = probabilities > np.array(model.config.label_thresholds)
    lines = (samples / "test.jsonl").read_text(encoding="utf-8").splitlines()
    truth = np.array([[label in json.loads(line)["labels"] for label in LABELS] for line in lines])
    scores = json.loads(output.read_text())
    assert scores == multilabel_scores(decisions, truth, LABELS) | {
        "f1_interval": scores["f1_interval"],
        "present_macro_f1_interval": scores["present_macro_f1_interval"],
        "interval_groups": len({json.loads(line)["respondent"] for line in lines}),
    }
    assert scores["macro_f1"] == pytest.approx(f1_score(truth, decisions, average="macro"))
    assert 0.1 < scores["micro_recall"] < 0.9
    assert stdout.splitlines()[0].split() == ["Label", *LABELS, "macro", "micro"]
    assert f"{scores['macro_f1']:.3f}" in stdout


def test_a_column_for_each_label_and_speakers_by_name(run_script, classifier, samples, tmp_path):
    rows = [json.loads(line) for line in (samples / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    whole, columns = tmp_path / "whole.json", tmp_path / "columns.json"
    path = tmp_path / "columns.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        said = [
            [row["text"], f"élève {row['respondent']}", *(int(x in row["labels"]) for x in "pm-+")] for row in rows
        ]
        csv.writer(file, delimiter=";").writerows([["text", "who", *"pm-+"], *said])
    given = ["--model", classifier, "--output_file"]
    assert run_script("evaluate.py", *given, whole, "--file", samples / "test.jsonl")[0] == 0
    reading = ["--file", path, "--label_column", *"pm-+", "--group_column", "who"]
    code, stdout, stderr = run_script("evaluate.py", *given, columns, *reading)
    assert code == 0, stderr
    assert json.loads(columns.read_text()) == json.loads(whole.read_text())
    low, high = json.loads(whole.read_text())["f1_interval"]["m"]
    lines = {line.split("  ")[0]: after for line, after in pairwise(stdout.splitlines())}
    assert f"{low:.3f}" in lines["F1 from (95 %)"] and f"{high:.3f}" in lines["F1 to (95 %)"]
    code, _, stderr = run_script("evaluate.py", *given, columns, "--file", path, "--label_column", *"pm-")
    assert code == 2 and "label_column names p, m, -, the known labels are +, -, m, p: name one column" in stderr


def test_thresholds_are_given_by_name(run_script, classifier, samples, tmp_path):
    output, given = tmp_path / "scores.json", ["--model", classifier, "--label_thresholds", '{"m": 0, "p": 1}']
    code, _, stderr = run_script(
        "evaluate.py", "--file", samples / "test.jsonl", "--output_file", output, *given
    )  # fmt: skip
    assert code == 0, stderr
    recall = json.loads(output.read_text())["recall"]
    assert recall["m"] == 1.0 and recall["p"] == 0.0 and 0 < recall["+"] < 1, "the config's for the others"
    labelled = tmp_path / "labelled.csv"
    code, _, stderr = run_script(
        "predict.py", "--input_file", samples / "test.jsonl", "--output_file", labelled, *given
    )  # fmt: skip
    assert code == 0, stderr
    with labelled.open(encoding="utf-8", newline="") as file:
        decided = [row["labels"].split(",") for row in csv.DictReader(file)]
    assert all("m" in labels and "p" not in labels for labels in decided)


def test_a_label_that_the_texts_lack_is_told_once(run_script, classifier, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,labels\non aime ma mère,+ m\non déteste ma mère,- m\n", encoding="utf-8")
    code, stdout, stderr = run_script("evaluate.py", "--model", classifier, "--file", path)
    assert code == 0, stderr
    assert (stdout + stderr).count("no example of p") == 1 and " present " in stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{s}/bert"], "not a fine-tuned classifier"),
        (["--model", "{s}"], "lacks config.json, model.safetensors, tokenizer.json"),
        (["--model", "{c}"], "the data have the labels + - 0 i j f s p m a t, the model + - m p"),
        (["--model", "{c}", "--label_column", "emotion"], "label_column=['emotion'] says how a file is read"),
        (["--model", "{c}", "--label_thresholds", "m=0.5"], "label_thresholds='m=0.5' cannot be read"),
        (["--model", "{c}", "--file", "{s}/none.csv"], "there is no such file"),
        (["--model", "{c}", "--file", "{s}/test.jsonl", "--output_file", "{s}/test.jsonl/x"], "test.jsonl"),
        (["--model", "{c}", "--file", "{s}/test.jsonl", "--label_column", "label"], "no column 'label'"),
        (["--model", "{c}", "--file", "{s}/test.jsonl", "--max_length", "99"], "the model takes 1 to 48 tokens"),
    ],
)
def test_what_a_user_gets_wrong_ends_with_a_message(run_script, classifier, samples, arguments, message):
    code, stdout, stderr = run_script("evaluate.py", *(a.format(s=samples, c=classifier) for a in arguments))
    assert code == 2 and message in stderr and "error: " in stderr
    assert "Traceback" not in stderr and not stdout


def test_a_label_the_model_does_not_know_is_named(run_script, classifier, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,labels\nma mère,m\nmon chat,t\n", encoding="utf-8")
    code, _, stderr = run_script("evaluate.py", "--model", classifier, "--file", path)
    assert code == 2 and "unknown label 't'" in stderr and "+, -, m, p" in stderr
    assert "--" not in stderr, "the labels are the model's: no option changes them"


def test_the_shipped_corpus_is_scored_by_default(run_script, samples, tmp_path):
    names = dict(enumerate(["t", "a", "m", "p", "s", "f", "j", "i", "0", "-", "+"]))
    config = BertConfig.from_pretrained(samples / "bert", id2label=names, label2id={n: i for i, n in names.items()})
    config.problem_type = "multi_label_classification"
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.constant_(model.classifier.bias, 9.0)
    model.save_pretrained(tmp_path / "all")
    AutoTokenizer.from_pretrained(samples / "bert").save_pretrained(tmp_path / "all")
    output = tmp_path / "scores.json"
    code, _, stderr = run_script("evaluate.py", "--model", tmp_path / "all", "--output_file", output)
    assert code == 0, stderr
    scores = json.loads(output.read_text())
    assert scores["support"]["j"] == 247 and scores["support"]["t"] == 22
    assert scores["macro_f1"] == pytest.approx(0.408, abs=5e-4), "everything positive, by the corpus card"
    assert "330 texts are longer than 48 tokens" in stderr


@pytest.mark.parametrize("option", ["--model", "--file", "--output_file", "--label_column"])
def test_an_empty_value_is_never_the_shipped_corpus(run_script, classifier, samples, option):
    given = {"--model": classifier, "--file": samples / "test.jsonl"} | {option: ""}
    code, stdout, stderr = run_script("evaluate.py", *(part for pair in given.items() for part in pair))
    assert code == 2 and f"error: {option} is empty" in stderr and not stdout


def test_scores_replace_scores_alone(run_script, classifier, samples, tmp_path):
    output = tmp_path / "scores.json"
    given = ["--model", classifier, "--file", samples / "test.jsonl", "--output_file", output]
    assert run_script("evaluate.py", *given)[0] == run_script("evaluate.py", *given)[0] == 0
    for content in ("{}", "[1]", "precious", '{"samples": 3}', "[" * 100_000):
        output.write_text(content)
        code, _, stderr = run_script("evaluate.py", *given)
        assert code == 2 and "is no earlier output" in stderr and output.read_text() == content
    assert run_script("evaluate.py", *given, "--overwrite")[0] == 0 and "samples" in json.loads(output.read_text())
    config = (classifier / "config.json").read_text()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        code, _, stderr = run_script("evaluate.py", *given[:4], "--output_file", classifier / name, "--overwrite")
        assert code == 2 and "belongs to a model" in stderr
    assert (classifier / "config.json").read_text() == config


def test_labels_are_those_of_the_model_in_any_spelling(run_script, classifier, tmp_path):
    path, output = tmp_path / "data.csv", tmp_path / "scores.json"
    path.write_bytes("Dit-il, alors;labels\nma mère;m\u200b | +\nmon père;['p', '-']\n".encode("cp1252", "ignore"))
    options = ("--encoding", "cp1252", "--text_column", "Dit-il, alors", "--output_file", output)
    code, _, stderr = run_script("evaluate.py", "--model", classifier, "--file", path, *options)
    assert code == 2 and "row 2: the cell 'm | +' is no list, as others of the column are" in stderr
    path.write_bytes("Dit-il, alors;labels\nma mère;['m\u200b', '+']\nmon père;['p', '-', 'p']\n".encode())
    code, _, stderr = run_script("evaluate.py", "--model", classifier, "--file", path, *options[2:])
    assert code == 0 and "invisible characters" in stderr, stderr
    assert json.loads(output.read_text())["support"] == {"+": 1, "-": 1, "m": 1, "p": 1}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_count_each_text_once(run_processes, run_script, classifier, samples, tmp_path):
    """33 texts in batches of 5 leave one process without a last batch; a text counted twice would show."""
    lines = (samples / "test.jsonl").read_text(encoding="utf-8").splitlines()
    data = tmp_path / "odd.jsonl"
    data.write_text("\n".join([*lines, lines[0]]) + "\n", encoding="utf-8")
    given = ["--model", classifier, "--file", data, "--batch_size", 5, "--output_file"]
    assert run_script("evaluate.py", *given, tmp_path / "one.json")[0] == 0
    run = run_processes("evaluate.py", *given, tmp_path / "two.json", processes=2)
    assert run.returncode == 0, run.stderr
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one == two and two["samples"] == 33
    assert run.stdout.count("Support") == 1
    given = ["--model", classifier, "--input_file", data, "--batch_size", 5, "--output_file"]
    assert run_script("predict.py", *given, tmp_path / "one.csv")[0] == 0
    run = run_processes("predict.py", *given, tmp_path / "two.csv", processes=2)
    assert run.returncode == 0, run.stderr
    first, second = ((tmp_path / name).read_text(encoding="utf-8").splitlines() for name in ("one.csv", "two.csv"))
    assert [line.split(",0.")[0] for line in first] == [line.split(",0.")[0] for line in second] and len(first) == 34
