"""The command from the table to the report, with a tiny encoder."""

import json
import signal
import sys

import numpy as np
import pytest
import torch
from transformers import pipeline

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.cli import study as command
from fratrie.cli.running import run
from fratrie.study import finetuning
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.classifiers import load_classifier
from fratrie.training.stopping import Stopped

WOMEN, MEN = ["mère", "sœur", "tante"], ["père", "frère", "oncle"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SHORT = ["--folds", "2", "--depths", "0", "--epochs", "2", "--rate_factors", "1", "--other_epochs", "1", "--test_size",
         "0.4", "--methods", "linear_svc", "--words_per_label", "1", "--curve_draws", "1", "--curve_sizes", "9",
         "--model", "encoder", "--disable_progress", "true"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, in_this_process):
    """A table of sentences with a second annotator, and an encoder."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, (woman, man) in enumerate([(woman, man) for woman in WOMEN for man in MEN] * 2):
        rows += [(f"ma {woman}", "w", "w"), (f"mon {man} et ma {woman}", "w m", "m"), (f"mon {man}", "m", "")]
        rows[-3:] = [(text, labels, second, number) for text, labels, second in rows[-3:]]
    lines = [f"{text},{labels},{second},r{number}" for text, labels, second, number in rows]
    (tmp_path / "a.csv").write_text("\n".join(["text,labels,second,respondent", *lines]), encoding="utf-8")
    tokenizer = train_byte_level_bpe([row[0] for row in rows], vocab_size=280, sibling="encoder", show_progress=False)
    tokenizer.save_pretrained("encoder")
    torch.manual_seed(0)
    config = FratrieEncoderConfig(**SIZES, vocab_size=300, pad_token_id=tokenizer.pad_token_id)
    FratrieEncoderModel(config).save_pretrained("encoder")
    return tmp_path


@pytest.fixture
def study(monkeypatch, capsys):
    """Runs the command; gives its exit code, and what it printed."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fratrie study", *words])
        code = 0
        try:
            run(command.main)
        except SystemExit as stop:
            code = stop.code
        return code, "".join(capsys.readouterr())

    return call


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def numbers(folder):
    """What a study found, without what differs between two runs of it."""
    results = read(folder / "results.json")
    del results["study"]
    for entry in (*results["search"]["tried"], results["search"]["chosen"]):
        del entry["seconds"]
    return results


def test_from_a_table_to_a_report(folder, study, monkeypatch):
    given = ["--train_file", "a.csv", "--output_dir", "out", "--second_label_column", "second", "--seeds", "2", *SHORT]
    code, printed = study(*given)
    assert code == 0, printed
    results = read(folder / "out" / "results.json")
    assert all(results[name] is not None for name in results if name != "published") and results["published"] is None
    assert {name: part["respondents"] for name, part in results["data"]["parts"].items()} == {"train": 11, "test": 7}
    assert results["agreement"]["sentences"] == 36 and results["agreement"]["left_out"] == 18
    assert results["agreement"]["exact"] == pytest.approx(0.5)
    assert results["finetuned"]["comparison"]["macro"]["baseline"] in ("linear_svc words", "linear_svc states")
    assert results["learning_curve"]["sizes"] == [9, 33]
    assert [len(scores) for scores in results["learning_curve"]["methods"]["finetuned"]] == [1, 2]
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert f"{results['finetuned']['test']['present_macro_f1']:.3f}" in page

    # The models decide as the study did, also for Hugging Face's pipeline.
    model, tokenizer, _ = load_classifier(folder / "out" / "models" / "seed0")
    assert model.config.label_thresholds == list(results["calibration"]["thresholds"].values())
    (confident, *_) = results["errors"]["confident"]
    given_scores = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(confident["text"])
    scores = {each["label"]: each["score"] for each in np.ravel(given_scores)}
    assert scores[confident["label"]] == pytest.approx(confident["probability"], abs=1e-3)

    # Again: nothing is trained.
    monkeypatch.setattr(finetuning, "train", lambda *_, **__: pytest.fail("trained again"))
    code, printed = study(*given, "--leave_out", "words")
    assert code == 0, printed
    again = read(folder / "out" / "results.json")
    assert again["words"] is None
    for name in results.keys() - {"words", "study"}:
        assert again[name] == results[name], name
    code, printed = study(*given, "--seed", "1")
    assert code == 2 and "holds the steps of another study (" in printed and "seed: 0 then, 1 now" in printed


def test_the_same_study_gives_the_same_numbers_and_parts_can_be_left_out(folder, study):
    given = ["--train_file", "a.csv", *SHORT, "--seeds", "1", "--leave_out", "words", "errors", "learning_curve"]
    found = []
    for output in ("one", "two"):
        code, printed = study(*given, "--output_dir", output, "--calibration", "isotonic")
        assert code == 0, printed
        found.append(numbers(folder / output))
    assert found[0] == found[1] and found[0]["learning_curve"] is found[0]["words"] is None
    code, printed = study(*given, "finetuning", "--output_dir", "one")
    assert code == 0, printed
    left = read(folder / "one" / "results.json")
    assert left["finetuned"] is left["search"] is left["calibration"] is None and left["classical"]
    assert not (folder / "one" / "figures" / "reliability.svg").exists()


def test_other_options_are_not_answered_by_what_was_found_before(folder, study):
    common = ["--train_file", "a.csv", *SHORT, "--seeds", "1", "--leave_out", "errors"]
    others = ["--methods", "linear_svc", "kernel_svc", "--epochs", "3", "--calibration", "none", "--seeds", "2"]
    weights, found = {}, {}
    for name, output, words in (
        *(("first", "one", []), ("others", "one", others), ("others anew", "two", others), ("first again", "one", [])),
    ):
        code, printed = study(*common, "--output_dir", output, *words)
        assert code == 0, printed
        found[name] = numbers(folder / output)
        weights[name] = (folder / output / "models" / "seed0" / "model.safetensors").read_bytes()
        assert len(list((folder / output / "models").iterdir())) == len(found[name]["finetuned"]["seeds"])
    assert found["others"] == found["others anew"] and found["first"] == found["first again"] != found["others"]
    assert weights["first"] == weights["first again"] != weights["others"] == weights["others anew"]


def test_a_study_that_is_stopped_says_how_to_go_on_and_keeps_what_it_found(folder, study, monkeypatch):
    def stop(*_, **__):
        raise Stopped(signal.SIGTERM)

    given = ["--train_file", "a.csv", "--output_dir", "o u t é", *SHORT, "--leave_out", "errors", "words"]
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "train", stop)
        code, printed = study(*given)
    assert code == 128 + signal.SIGTERM and "goes on with what o u t é/steps holds" in printed
    (kept,) = (folder / "o u t é" / "steps").glob("classical-*-words-*.json")
    written = kept.stat().st_mtime_ns
    assert study(*given)[0] == 0 and kept.stat().st_mtime_ns == written


def test_a_folder_of_others_is_left_alone(folder, study):
    (folder / "out" / "tables").mkdir(parents=True)
    (folder / "out" / "tables" / "mine.csv").write_text("mine")
    for words in ([], ["--overwrite_output_dir", "true"]):
        code, printed = study("--train_file", "a.csv", "--output_dir", "out", *SHORT, *words)
        assert code == 2 and "out holds tables, but no study that could go on" in printed
    assert [file.name for file in (folder / "out").rglob("*") if file.is_file()] == ["mine.csv"]


def test_a_refused_study_leaves_no_folder(folder, study):
    (folder / "bad.csv").write_text("text,labels\nun,a\n,b\n")
    code, printed = study("--train_file", "bad.csv", "--output_dir", "new/study", *SHORT)
    assert code == 2 and "row 3: the text is empty" in printed
    assert not (folder / "new").exists()


def test_what_a_part_cannot_do_is_told_before_the_work(folder, study):
    lines = [line for line in (folder / "a.csv").read_text("utf-8").splitlines() if ",w m," not in line]
    (folder / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    one_label = [
        "--train_file",
        "a.csv",
        "--output_dir",
        "out",
        *SHORT,
        "--problem_type",
        "single_label_classification",
    ]
    code, printed = study(*one_label, "--calibration", "isotonic")
    assert code == 2 and "for one label take the temperature" in printed
    (folder / "a.csv").write_text(
        "\n".join([lines[0], *(f"{line.rsplit(',', 2)[0]},,r{i}" for i, line in enumerate(lines[1:]))])
    )
    code, printed = study(*one_label, "--second_label_column", "second")
    assert code == 2 and "no sentence has labels of both annotators" in printed
    assert not (folder / "out" / "steps").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depths", "-1"], "depths=[-1] must lie between 0 and 1000"),
        (["--methods", "xgboost"], "methods: 'xgboost' is not one of logistic_regression, "),
        (["--model", "nowhere"], "nowhere"),
        (["--train_file", "no.csv"], "no.csv"),
        (["--calibration", "platt"], "invalid choice: 'platt'"),
    ],
)
def test_what_cannot_be_done_takes_one_line(folder, study, words, message):
    code, printed = study("--train_file", "a.csv", "--output_dir", "out", *SHORT, *words)
    assert code == 2 and message in printed and printed.count("error: ") == 1


def test_missing_packages_are_told_before_the_work(folder, study, monkeypatch):
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    monkeypatch.setattr("fratrie.study.packages.find_spec", lambda name: None if name == "cleanlab" else True)
    code, printed = study("--train_file", "a.csv", "--output_dir", "out", *SHORT)
    assert code == 2 and "pip install 'fratrie[study]'" in printed and not (folder / "out" / "steps").exists()
