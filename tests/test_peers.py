"""The comparison with other tools: its figures, its page, its files, and what it runs; no tool is installed here."""

import ast
import csv
import json
import sys

import numpy as np
import pytest
from sklearn.metrics import f1_score

from benchmarks.peers import __main__ as peers
from benchmarks.peers.rows import MEASURED, PROBABILITIES, ROWS, Files, code_lines
from benchmarks.peers.running import HERE, run_program
from benchmarks.peers.table import lines_of, page, read, score, short_table
from fratrie.cli.finetune import ClassifierOptions, FinetuningOptions
from fratrie.cli.options import read_options
from fratrie.cli.predict import PredictionOptions
from fratrie.data.annotation import LABELS
from fratrie.data.corpus import load_family_relations
from fratrie.data.loading import load_labelled
from fratrie.training.bootstrap import draw_groups, percentile_interval
from fratrie.training.labelled_data import LabelledDataOptions
from fratrie.training.tasks import targets_of


@pytest.fixture(scope="module")
def corpus():
    return load_family_relations()


@pytest.fixture(scope="module")
def decided(corpus):
    """Decisions of which a tenth is wrong. Shape: (N, L)"""
    truth = targets_of(corpus["test"]) > 0.5
    return truth ^ (np.random.default_rng(0).random(truth.shape) < 0.1)


def test_f1_is_that_of_scikit_learn_in_every_draw_of_respondents(corpus, decided):
    truth, groups = targets_of(corpus["test"]).astype(int), list(corpus["test"]["respondent"])
    found = score(decided, truth, groups)
    assert found.macro == pytest.approx(f1_score(truth, decided, average="macro"))
    assert found.micro == pytest.approx(f1_score(truth, decided, average="micro"))
    place, drawn = draw_groups(groups)
    for draw in (0, 7):
        rows = np.repeat(np.arange(len(truth)), drawn[draw][place])
        expected = [f1_score(truth[rows], decided[rows], average=average) for average in ("macro", "micro")]
        assert [found.macro_draws[draw], found.micro_draws[draw]] == pytest.approx(expected)


def write_row(home, decided, took):
    home.mkdir()
    with (home / PROBABILITIES).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", *reversed(LABELS)])  # each tool has its own order
        rows.writerows(["…", *row] for row in np.where(decided, 0.75, 0.25)[:, ::-1])
    (home / MEASURED).write_text(json.dumps(took))


def test_the_page_has_each_row_with_its_difference_to_ours(corpus, decided, tmp_path):
    truth = targets_of(corpus["test"]).astype(int)
    took = {"seconds": 90.0, "peak": 2_640_000_000, "installed": 1_250_000_000}
    write_row(tmp_path / "ours", truth, took)
    write_row(tmp_path / "setfit", decided, took)
    found = {name: read(tmp_path / name) for name in ("ours", "setfit")}
    ours, setfit = lines = lines_of(found, corpus["test"])
    assert ours[2:] == ["1.000 (1.000 to 1.000)", "–", "1.000 (1.000 to 1.000)", "1.5", "2.6", "2", "1.2"]
    theirs = score(decided, truth, list(corpus["test"]["respondent"]))
    low, high = percentile_interval(theirs.macro_draws - 1)
    assert setfit[3] == f"{theirs.macro - 1:+.3f} ({low:+.3f} to {high:+.3f})"
    assert "- here\n\n| tool |" in (whole := page(lines, ["- here"])) and f"\n| {' | '.join(setfit)} |\n" in whole
    header, _, *rows = short_table(lines).splitlines()
    assert header == "| tool | setting | macro-F1 (95 %) | minutes | memory, GB | lines |"
    assert [row.count("|") for row in rows] == [7, 7] and rows[0].endswith(
        "| 1.000 (1.000 to 1.000) | 1.5 | 2.6 | 2 |"
    )


def test_lines_of_a_program_are_those_of_code():
    assert code_lines('"""What it does,\n\nat length."""\n\nimport a\n\n# why\na.run(\n    1,  # first\n)\n') == 4
    assert code_lines("a = 1\n") == 1 and code_lines("") == 0


def test_every_tool_has_a_program_and_exact_versions():
    for row in list(ROWS.values())[1:]:
        ast.parse(row.program.read_text(encoding="utf-8"))
        (command,) = row.commands("python", Files(HERE), HERE)
        words = iter(command[7:])
        assert {name: json.loads(value) for name, value in zip(words, words, strict=True)} == {
            f"--{name}": value for name, value in row.options.items()
        }
        name, version = row.tool.split()[:2]
        assert f"{name}=={version}" in (HERE / "requirements" / f"{row.peer}.txt").read_text()


def test_our_commands_have_their_options(monkeypatch):
    tune, predict = (list(map(str, command[1:])) for command in ROWS["ours"].commands(HERE, Files(HERE), HERE))
    monkeypatch.setattr("sys.argv", tune)
    data, choices, training = read_options("", LabelledDataOptions, ClassifierOptions, FinetuningOptions)
    assert (data.train_file, choices.trainable_layers, training.learning_rate) == (str(HERE / "train.jsonl"), 6, 4e-4)
    monkeypatch.setattr("sys.argv", predict)
    assert read_options("", PredictionOptions)[0].model == training.output_dir


def test_the_files_hold_the_split(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "run_program", lambda command, log: None)
    files = peers.prepare(tmp_path, corpus["train"], corpus["test"])
    for name, path in (("train", files.train), ("test", files.test)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["text"] for row in rows] == corpus[name]["text"][:]
        assert [row["respondent"] for row in rows] == corpus[name]["respondent"][:]
        assert [[LABELS.index(label) for label in row["labels"]] for row in rows] == corpus[name]["labels"][:]
    assert len(load_labelled(files.test)) == 330


def test_a_run_counts_seconds_and_the_memory_of_its_children(tmp_path):
    child = "import time; held = b'x' * 200_000_000; time.sleep(1)"
    program = f"import subprocess, sys; print('here'); subprocess.run([sys.executable, '-c', {child!r}])"
    found = run_program([sys.executable, "-c", program], tmp_path / "log.txt")
    assert found.seconds > 1 and 200e6 < found.peak < 300e6
    assert (tmp_path / "log.txt").read_text() == "here\n"


def test_a_program_that_fails_says_where_it_wrote(tmp_path):
    with pytest.raises(ValueError, match=r"code 3.*log\.txt"):
        run_program([sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path / "log.txt")


def test_rows_that_were_measured_are_not_measured_again(decided, tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(peers, "run_program", lambda command, log: None)
    monkeypatch.setattr(peers, "environment", lambda peer, folder: peer)
    monkeypatch.setattr(peers, "measure", lambda row, *others: measured.append(row))
    monkeypatch.setattr(peers.machine, "describe", lambda: [])
    write_row(tmp_path / "ours", decided, {"seconds": 1, "peak": 1, "installed": 1})
    given = ["peers", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", given)
    peers.main()
    assert measured == [row for name, row in ROWS.items() if name != "ours"]
    monkeypatch.setattr("sys.argv", [*given, "--rows", "ours"])
    peers.main()
    assert measured[-1] == ROWS["ours"] and capsys.readouterr().out.count("| Fratrie") == 4
    monkeypatch.setattr("sys.argv", [*given, "--rows", "mine"])
    with pytest.raises(ValueError, match="mine: there are ours, setfit"):
        peers.main()
