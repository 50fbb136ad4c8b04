"""The command from the table to the report, with a tiny encoder."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import pipeline

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.cli import study as command
from fratrie.cli.running import run
from fratrie.study import protocol
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.classifiers import load_classifier

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
    assert f"{results['finetuned']['test']['macro_f1']:.3f}" in page

    # The models decide as the study did, also for Hugging Face's pipeline.
    model, tokenizer, _ = load_classifier(folder / "out" / "models" / "seed0")
    assert model.config.label_thresholds == list(results["calibration"]["thresholds"].values())
    (confident, *_) = results["errors"]["confident"]
    given_scores = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(confident["text"])
    scores = {each["label"]: each["score"] for each in np.ravel(given_scores)}
    assert scores[confident["label"]] == pytest.approx(confident["probability"], abs=1e-3)

    # Again: nothing is trained, and with more words little.
    for name in ("search", "finetune", "finetuned_logits"):
        monkeypatch.setattr(protocol, name, lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(protocol, "finetuned_logits", lambda *_, known, **__: np.stack([known[0][0]]))
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
        found.append(read(folder / output / "results.json"))
        del found[-1]["study"]
        for entry in (*found[-1]["search"]["tried"], found[-1]["search"]["chosen"]):
            del entry["seconds"]
    assert found[0] == found[1] and found[0]["learning_curve"] is found[0]["words"] is None
    code, printed = study(*given, "finetuning", "--output_dir", "one")
    assert code == 0, printed
    left = read(folder / "one" / "results.json")
    assert left["finetuned"] is left["search"] is left["calibration"] is None and left["classical"]
    assert not (folder / "one" / "figures" / "reliability.svg").exists()


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
