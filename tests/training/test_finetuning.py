import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, BertConfig, CamembertConfig

from fratrie import FratrieEncoderConfig
from fratrie.data import LABELS
from fratrie.files import write_json
from fratrie.tokenization import train_byte_level_bpe, train_wordpiece
from fratrie.training.bootstrap import bootstrap_f1
from fratrie.training.encoding import encode, max_tokens
from fratrie.training.labelled_data import LabelledDataOptions, load_parts, read_labelled
from fratrie.training.metrics import MULTI_LABEL, REGRESSION, SINGLE_LABEL, multilabel_scores
from fratrie.training.output_files import prepare_output
from fratrie.training.scoring import predict_logits, score_rows
from fratrie.training.tasks import (
    Task,
    aligned_targets,
    balanced_weights,
    check_every_label_occurs,
    targets_of,
    task_of,
)

TEXTS = ["ma mère", "mon père m'aime", "ma sœur et mon frère", "nous"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def several(rows, names=("+", "-", "j")):
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=list(names)))})
    return Dataset.from_dict({"text": [f"texte {i}" for i in range(len(rows))], "labels": rows}, features=features)


def one(rows, names=("a", "b", "c")):
    features = Features({"text": Value("string"), "labels": ClassLabel(names=list(names))})
    return Dataset.from_dict({"text": [f"texte {i}" for i in range(len(rows))], "labels": rows}, features=features)


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS, vocab_size=300, show_progress=False)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = FratrieEncoderConfig(
        vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=1, **SIZES,
        problem_type=MULTI_LABEL, id2label={0: "+", 1: "-", 2: "j"}, label2id={"+": 0, "-": 1, "j": 2},
        initializer_range=0.5,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config).eval()


def test_the_features_of_the_data_say_the_task():
    assert task_of(several([[0]]).features) == Task(MULTI_LABEL, ["+", "-", "j"])
    assert task_of(one([0]).features) == Task(SINGLE_LABEL, ["a", "b", "c"])
    real = Dataset.from_dict({"text": ["x"], "labels": [0.5]})
    assert task_of(real.features).problem_type == REGRESSION
    with pytest.raises(ValueError, match="'labels' has the feature None"):
        task_of(real.remove_columns("labels").features)
    with pytest.raises(ValueError, match=r"Value\('string'\)"):
        task_of(Dataset.from_dict({"labels": ["x"]}).features)


def test_targets_are_indicators_classes_or_values():
    targets = targets_of(several([[2, 0], [], [1]]))
    assert targets.dtype == np.float32 and targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    classes = targets_of(one([2, 0]))
    assert classes.dtype == np.int64 and classes.tolist() == [2, 0]
    assert targets_of(Dataset.from_dict({"labels": [0.5, 2.0]})).tolist() == [0.5, 2.0]


def test_targets_follow_the_order_of_the_model():
    data = several([[0], [2]], ("+", "-", "j"))
    assert aligned_targets(data, Task(MULTI_LABEL, ["j", "+", "-"])).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert aligned_targets(one([0, 1, 2]), Task(SINGLE_LABEL, ["c", "a", "b"])).tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=r"the data have the labels \+ - j, the model \+ - k"):
        aligned_targets(data, Task(MULTI_LABEL, ["+", "-", "k"]))
    with pytest.raises(ValueError, match="data are for multi_label_classification, the model for regression"):
        aligned_targets(data, Task(REGRESSION, ["value"]))


def test_without_files_the_parts_are_the_shipped_corpus():
    parts = load_parts(LabelledDataOptions(), seed=3)
    assert {name: len(part) for name, part in parts.items()}.keys() == {"train", "validation", "test"}
    assert len(parts["train"]) + len(parts["validation"]) == 1318 and len(parts["test"]) == 330
    assert not set(parts["train"]["respondent"]) & set(parts["validation"]["respondent"])
    assert task_of(parts["train"].features).labels == list(LABELS)


def test_the_shipped_corpus_is_extended_on_request_alone(tmp_path):
    extended = LabelledDataOptions(dataset="family_relations_extended", validation_size=0)
    parts = load_parts(extended)
    assert {name: len(part) for name, part in parts.items()} == {"train": 5327, "test": 330}
    with pytest.raises(
        ValueError, match=r"^dataset='family_relations_extended' is the shipped corpus, .*: omit one of both$"
    ):
        load_parts(LabelledDataOptions(dataset="family_relations_extended", train_file=str(tmp_path / "a.csv")))


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_files_of_every_format_give_the_same_parts(tmp_path, extension):
    rows = {"text": ["un", "deux", "trois", "quatre"], "labels": ["+,j", "-", "j", "+"], "respondent": [0, 0, 1, 2]}
    path = tmp_path / f"train.{extension}"
    {"csv": Dataset.to_csv, "jsonl": Dataset.to_json, "parquet": Dataset.to_parquet}[extension](
        Dataset.from_dict(rows), path
    )
    parts = load_parts(LabelledDataOptions(train_file=str(path), test_file=str(path), validation_size=0.4))
    assert task_of(parts["train"].features) == Task(MULTI_LABEL, ["+", "-", "j"])
    together = {*parts["train"]["text"], *parts["validation"]["text"]}
    assert together == set(rows["text"]) and list(parts["test"]["text"]) == rows["text"]
    sides = [{str(speaker) for speaker in parts[part]["respondent"]} for part in ("train", "validation")]
    assert not sides[0] & sides[1]


def test_the_annotation_format_is_a_train_file(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("jm+ J'aime ma mère.\n\njp- Je crie.\n", encoding="utf-8")
    parts = load_parts(LabelledDataOptions(train_file=str(path), validation_file=str(path)))
    assert list(parts["train"]["text"]) == ["J'aime ma mère.", "Je crie."]
    assert len(parts["validation"]) == 2


def test_texts_of_nobody_are_split_by_row(tmp_path):
    rows = [{"text": f"texte {i}", "labels": "ab"[i % 2]} for i in range(10)]
    path = write_rows(tmp_path / "t.jsonl", rows)
    parts = load_parts(LabelledDataOptions(train_file=path, validation_size=0.3))
    assert (len(parts["train"]), len(parts["validation"])) == (7, 3)
    assert "validation" not in load_parts(LabelledDataOptions(train_file=path, validation_size=0))
    again = load_parts(LabelledDataOptions(train_file=path, validation_size=0.3), seed=1)
    assert list(again["train"]["text"]) != list(parts["train"]["text"])
    with pytest.raises(ValueError, match=r"validation_size=1\.5 of 10 rows"):
        load_parts(LabelledDataOptions(train_file=path, validation_size=1.5))
    single = write_rows(tmp_path / "one.jsonl", [{"text": "texte", "labels": ["a", "b"]}])
    with pytest.raises(ValueError, match="one row cannot be split"):
        load_parts(LabelledDataOptions(train_file=single))


def test_a_label_unknown_to_train_is_named_in_test(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [{"text": "x", "labels": ["a"]}, {"text": "y", "labels": ["b"]}])
    test = write_rows(tmp_path / "test.jsonl", [{"text": "x", "labels": ["z"]}])
    with pytest.raises(ValueError, match=r"(?s)test\.jsonl.*unknown label 'z'"):
        load_parts(LabelledDataOptions(train_file=train, test_file=test, validation_size=0.5))
    with pytest.raises(ValueError, match="a test file without a train file"):
        load_parts(LabelledDataOptions(test_file=test))


@pytest.mark.parametrize("given", [{"problem_type": REGRESSION}, {"label_column": "score"}, {"label_names": ["a"]}])
def test_options_without_effect_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}=.*shipped corpus"):
        load_parts(LabelledDataOptions(**given))
    train = write_rows(tmp_path / "train.jsonl", [{"text": "x", "labels": 1}, {"text": "y", "labels": 2}])
    with pytest.raises(ValueError, match=r"label_names=\['a'\]: real values have no labels"):
        load_parts(LabelledDataOptions(train_file=train, problem_type=REGRESSION, label_names=["a"]))


def test_the_options_say_how_each_part_is_read_and_what_was_read_is_logged(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_bytes("phrase;né;mort;annotator;who\nun;1;0;é;a\ndeux;0;1;é;b\nun;0;0;b;a\n".encode("cp1252"))
    columns = {"text_column": "phrase", "label_column": ["né", "mort"], "group_column": "who"}
    with caplog.at_level(logging.INFO):
        parts = load_parts(
            LabelledDataOptions(
                train_file=path, test_file=path, validation_size=0, encoding="cp1252", annotator="é", **columns
            )
        )
    assert parts["train"][:] == parts["test"][:]
    expected = {"text": ["un", "deux"], "row": [2, 3], "respondent": ["a", "b"], "labels": [[0], [1]]}
    assert parts["train"][:] == expected
    assert f"{path}: 2 texts of 2 respondents, several labels each\n  row 2: 'un' → né" in caplog.messages[2]
    assert caplog.messages[-1] == "2 texts of train, 2 texts of test"


def test_real_values_are_read_for_regression(tmp_path):
    columns = {"problem_type": REGRESSION, "label_column": "score", "group_column": "who"}
    rows = [{"text": "x", "score": 0.5, "who": "a"}, {"text": "y", "score": "2", "who": "b"}]
    data = read_labelled(write_rows(tmp_path / "r.jsonl", rows), **columns)
    assert task_of(data.features).problem_type == REGRESSION
    assert list(data["labels"]) == [0.5, 2.0] and list(data["respondent"]) == ["a", "b"]
    wrong = write_rows(tmp_path / "w.jsonl", [*rows, {"text": "z", "score": "high", "who": "c"}])
    with pytest.raises(ValueError, match="row 3: 'high', expected a number in 'score'"):
        read_labelled(wrong, **columns)


def test_a_label_that_train_lacks_is_an_error_or_a_warning(caplog):
    check_every_label_occurs(several([[0, 1], [2]]))
    for data, missing in ((several([[0], [0]]), "'-', 'j'"), (one([0, 2]), "'b'")):
        with pytest.raises(ValueError, match=f"carries the label {missing}: it cannot be learnt"):
            check_every_label_occurs(data)
        with caplog.at_level(logging.WARNING):
            check_every_label_occurs(data, allow_missing=True)
        assert "will never be predicted" in caplog.text
    check_every_label_occurs(Dataset.from_dict({"labels": [0.5]}))


def test_a_label_that_every_text_carries_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        check_every_label_occurs(several([[0, 1], [0, 2]]))
    assert "every training text carries the label '+'" in caplog.text and "'-'" not in caplog.text


def test_balanced_weights():
    assert balanced_weights(several([[0], [0], [0, 1], []])) == [pytest.approx(1 / 3), 3.0, 1.0]
    assert balanced_weights(several([[0], [0, 1]])) == [1.0, 1.0, 1.0]
    assert balanced_weights(one([0, 0, 0, 1])) == [pytest.approx(4 / 9), pytest.approx(4 / 3), 1.0]
    with pytest.raises(ValueError, match="real values"):
        balanced_weights(Dataset.from_dict({"labels": [0.5]}))


def test_unknown_tokens_are_counted(model, caplog):
    words = train_wordpiece(["ma mère"], 100, show_progress=False)
    encode(["ma 日", "mère"], model, words)
    unknown, total = 1, sum(map(len, words(["ma 日", "mère"]).input_ids))
    assert f"{unknown} of {total} tokens of the texts are unknown" in caplog.text


def test_long_texts_are_cut_and_counted(model, tokenizer, caplog):
    texts = ["ma mère", "mot " * 10_000, "mot " * 40]
    with caplog.at_level(logging.WARNING):
        rows = encode(texts, model, tokenizer)
    assert [len(row["input_ids"]) for row in rows][1:] == [32, 32]
    assert "2 of 3 texts are longer than 32 tokens and were cut" in caplog.text
    assert rows[1]["input_ids"][-1] == tokenizer.eos_token_id
    assert rows[0]["input_ids"] == tokenizer("ma mère").input_ids
    caplog.clear()
    assert max(len(row["input_ids"]) for row in encode(texts[:1], model, tokenizer, 5)) == 5 and not caplog.text
    assert len(encode(texts, model, tokenizer, 5)[1]["input_ids"]) == 5
    with pytest.raises(ValueError, match="max_length=33: the model takes 1 to 32 tokens"):
        encode(texts, model, tokenizer, 33)
    with pytest.raises(ValueError, match="max_length=0"):
        encode(texts, model, tokenizer, 0)


def test_the_positions_that_roberta_reserves_are_not_used(tokenizer):
    config = CamembertConfig(vocab_size=400, max_position_embeddings=34, pad_token_id=1, **SIZES)
    camembert = AutoModelForSequenceClassification.from_config(config)
    assert max_tokens(camembert, tokenizer) == 32
    rows = encode(["mot " * 100], camembert, tokenizer)
    assert len(rows[0]["input_ids"]) == 32
    camembert(input_ids=torch.tensor([rows[0]["input_ids"]]))  # one position more would be out of range
    bert = AutoModelForSequenceClassification.from_config(
        BertConfig(vocab_size=400, max_position_embeddings=34, **SIZES)
    )
    assert max_tokens(bert, tokenizer) == 34


def test_rows_hold_only_what_the_model_takes_and_its_targets(model, tokenizer):
    rows = encode(["ma mère", ""], model, tokenizer, targets=np.array([[1, 0, 1], [0, 0, 0]], dtype=np.float32))
    assert all(set(row) == {"input_ids", "attention_mask", "labels"} for row in rows)
    assert rows[0]["labels"] == [1.0, 0.0, 1.0] and isinstance(rows[0]["labels"][0], float)
    assert len(rows[1]["input_ids"]) == 2


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    small = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=100, **SIZES))
    with pytest.raises(ValueError, match=r"gives the token \d+, but the model has embeddings for 100"):
        encode(TEXTS, small, tokenizer)


def test_a_text_without_any_token_is_named(model):
    bare = train_byte_level_bpe(TEXTS, vocab_size=300, show_progress=False)
    bare.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match="the text '' has no token at all"):
        encode(["ma mère", ""], model, bare)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=60), min_size=1, max_size=9), st.integers(1, 5))
def test_logits_do_not_depend_on_batches_and_keep_the_order(model, tokenizer, texts, batch_size):
    rows = encode([*texts, "", "👩‍👩‍👧🎉"], model, tokenizer)
    together = predict_logits(model, Accelerator(cpu=True), rows, tokenizer, batch_size)
    alone = [model(**{k: torch.tensor([v]) for k, v in row.items()}).logits[0].detach().numpy() for row in rows]
    np.testing.assert_allclose(together, np.stack(alone), atol=2e-5)


@pytest.mark.parametrize("thresholds", [None, [0.0, 0.5, 1.0], [0.2, 0.9, 0.4]])
def test_scores_use_the_thresholds_of_the_config(model, tokenizer, monkeypatch, thresholds):
    monkeypatch.setattr(model.config, "label_thresholds", thresholds)
    targets = np.eye(4, 3, dtype=np.float32)
    rows = encode(TEXTS, model, tokenizer, targets=targets)
    with torch.no_grad():
        values = [torch.sigmoid(model(input_ids=torch.tensor([row["input_ids"]])).logits[0]).numpy() for row in rows]
    decisions = np.stack(values) > np.array([0.5] * 3 if thresholds is None else thresholds)
    assert score_rows(model, Accelerator(cpu=True), rows, tokenizer, 3) == multilabel_scores(
        decisions, targets, ["+", "-", "j"]
    )
    groups = ["a", "a", "b", "c"]
    with_intervals = score_rows(model, Accelerator(cpu=True), rows, tokenizer, 3, groups)
    drawn = bootstrap_f1(decisions, targets, groups)
    expected = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    assert list(with_intervals["f1_interval"]) == ["+", "-", "j"]
    intervals = [*with_intervals["f1_interval"].values(), with_intervals["present_macro_f1_interval"]]
    np.testing.assert_allclose(np.array(intervals).T, expected)


def test_weights_that_give_nan_are_reported(tokenizer):
    broken = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=400, **SIZES))
    torch.nn.init.constant_(broken.classifier.bias, torch.nan)
    with pytest.raises(ValueError, match="NaN or infinity for text 1 of"):
        predict_logits(broken, Accelerator(cpu=True), encode(TEXTS, broken, tokenizer), tokenizer, 2)


def test_an_output_that_cannot_be_written_fails_before_the_work(tmp_path):
    path = prepare_output(tmp_path / "new" / "scores.json")
    assert path.parent.is_dir() and not path.exists()
    kept = tmp_path / "kept.json"
    kept.write_text("1")
    assert prepare_output(kept, overwrite=True).read_text() == "1"
    (tmp_path / "link.json").symlink_to("newer/scores.json")
    write_json(prepare_output(tmp_path / "link.json"), 1)
    assert json.loads((tmp_path / "newer" / "scores.json").read_text()) == 1
    for wrong in (tmp_path, kept / "below.json"):
        with pytest.raises(OSError, match=f"cannot write {wrong} .*choose another --output_file"):
            prepare_output(wrong)


def test_an_output_that_another_program_has_locked_fails_before_the_work(tmp_path, monkeypatch):
    """As Excel does on Windows with what it shows."""
    shown = tmp_path / "labelled.csv"
    shown.write_text("1")

    def locked(path, mode):
        raise PermissionError(errno.EACCES, f"Permission denied, {mode}", str(path))

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(
        PermissionError, match=r"cannot write .*labelled.csv \(Permission denied, r\+b\): choose another"
    ):
        prepare_output(shown, overwrite=True)


def test_one_class_is_refused_before_anything_is_built(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x", "labels": "a"}, {"text": "y", "labels": "a"}])
    with pytest.raises(ValueError, match=r"the label 'a', so there is nothing to tell apart: add texts.*multi_label"):
        load_parts(LabelledDataOptions(train_file=path))
    options = LabelledDataOptions(train_file=path, problem_type=MULTI_LABEL, validation_size=0)
    assert task_of(load_parts(options)["train"].features).labels == ["a"]


def test_an_empty_path_is_never_the_shipped_corpus():
    for part in ("train_file", "validation_file", "test_file"):
        with pytest.raises(ValueError, match=r"an empty path names no file|without a train file"):
            load_parts(LabelledDataOptions(**{part: ""}))


def test_texts_of_train_in_other_parts_are_told(tmp_path, caplog):
    train = write_rows(tmp_path / "a.jsonl", [{"text": f"texte {i}", "labels": "ab"[i % 2]} for i in range(4)])
    test = write_rows(tmp_path / "b.jsonl", [{"text": "texte  1", "labels": "b"}, {"text": "neuf", "labels": "a"}])
    with caplog.at_level(logging.WARNING):
        load_parts(LabelledDataOptions(train_file=train, test_file=test, validation_size=0))
    assert "1 of 2 texts of test stand in train too, such as 'texte  1'" in caplog.text


def test_how_files_are_stored_reaches_all_parts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text|labels\nété|oui\nun, deux|non\n".encode("cp1252"))
    options = LabelledDataOptions(
        train_file=str(path), test_file=str(path), validation_size=0, encoding="cp1252", delimiter="|"
    )
    assert [part["text"][:] for part in load_parts(options).values()] == [["été", "un, deux"]] * 2


def test_what_is_read_and_what_belongs_to_a_model_is_no_output(tmp_path):
    model, texts = tmp_path / "model", tmp_path / "texts.csv"
    model.mkdir()
    (model / "config.json").write_text("{}")
    texts.write_text("text\nun\n")
    os.link(texts, tmp_path / "hard.csv")
    (tmp_path / "soft.csv").symlink_to(texts)
    (tmp_path / "config.csv").symlink_to(model / "config.json")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    os.mkfifo(tmp_path / "fifo.csv")
    for name, message in [
        ("texts.csv", "would be lost"),
        ("hard.csv", "would be lost"),
        ("soft.csv", "would be lost"),
        ("config.csv", "would be lost"),
        ("model/config.json", "the name of a file that belongs to a model"),
        ("new/model.safetensors", "the name of a file that belongs to a model"),
        ("tokenizer.json", "the name of a file that belongs to a model"),
        ("loop.csv", "symbolic links"),
        ("fifo.csv", "no regular file"),
        ("a" * 300, "name too long"),
    ]:
        with pytest.raises((ValueError, OSError), match=message):
            prepare_output(tmp_path / name, texts, model, overwrite=True)
    with pytest.raises(ValueError, match="an empty path"):
        prepare_output("")
    other = tmp_path / "other.csv"
    other.write_text("mine")
    with pytest.raises(ValueError, match=r"is no earlier output.*--overwrite"):
        prepare_output(other, texts, model)
    assert prepare_output(other, texts, model, is_ours=lambda path: True) == other and other.read_text() == "mine"
