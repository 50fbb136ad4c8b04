import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.study import finetuning
from fratrie.study.data import StudyData
from fratrie.study.finetuning import Recipe, Setting, finetune, finetuned_logits, search
from fratrie.study.options import ProtocolOptions
from fratrie.study.protocol import Study
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import Sentences, folds_of
from fratrie.training.classifiers import load_classifier
from fratrie.training.loop import NonFiniteLossError
from fratrie.training.model_folders import load_tokenizer
from fratrie.training.schedules import LEAST_STEPS
from fratrie.training.tasks import Task

WORDS = ["mère", "père", "sœur", "frère", "tante", "oncle"]
TEXTS = [f"ma {first} et mon {second}" for first in WORDS for second in WORDS if first != second]
LABELS = ["femme", "homme"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
RECIPE = Recipe(depths=(0, 2, 3), epochs=2, rate_factors=(2.0, 2.0), other_epochs=(), learning_rate=1e-2)
WOMEN = np.array([sum(word in text for word in ("mère", "sœur", "tante")) for text in TEXTS])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=290, sibling="encoder", show_progress=False)
    config = FratrieEncoderConfig(
        **SIZES, vocab_size=300, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, hidden_dropout=0.1
    )
    torch.manual_seed(0)
    FratrieEncoderModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def study_data(labels, problem_type="multi_label_classification", names=LABELS):
    groups = [index // 2 for index in range(20)]
    return StudyData(
        Sentences(TEXTS[:20], labels[:20], groups), Sentences(TEXTS[20:], labels[20:]), Task(problem_type, names)
    )


@pytest.fixture(scope="module")
def data():
    return study_data(np.stack([WOMEN > 0, WOMEN < 2], axis=1).astype(int))


@pytest.fixture(scope="module")
def folds(data):
    return folds_of(data.train, 2, seed=0)


@pytest.fixture(scope="module")
def found(encoder, data, folds):
    """A search in two processes, what it kept and what it told."""
    kept, told = {}, []
    result = search(
        data,
        encoder,
        folds,
        RECIPE,
        workers=2,
        keep=lambda key, logits, seconds: kept.update({key: (logits, seconds)}),
        progress=lambda done, total: told.append((done, total)),
    )
    return result, kept, told


def test_every_row_is_labelled_by_the_model_that_has_not_seen_it(found, data, folds):
    result, kept, _ = found
    chosen = result["chosen"]
    for fold, (_, held_out) in enumerate(folds):
        logits, seconds = kept[chosen["depth"], chosen["learning_rate"], chosen["epochs"], fold]
        np.testing.assert_array_equal(result["out_of_fold_logits"][held_out], logits)
        assert seconds > 0
    truth = np.concatenate([data.train.labels[held_out] for _, held_out in folds])
    for entry in result["tried"]:
        pieces = [kept[entry["depth"], entry["learning_rate"], entry["epochs"], fold][0] for fold in range(2)]
        expected = f1_score(truth, np.concatenate(pieces) > 0, average="macro", zero_division=0)
        assert entry["cross_validated_macro_f1"] == pytest.approx(expected)


def test_a_model_learns_the_rows_of_its_fold_alone(encoder, data, folds, in_this_process, monkeypatch):
    learnt = []
    monkeypatch.setattr(finetuning, "train", lambda model, options, accelerator, rows, *_, **__: learnt.append(rows))
    search(data, encoder, folds, Recipe(depths=(5,), rate_factors=(), other_epochs=()))
    texts = load_tokenizer(encoder)(TEXTS)["input_ids"]
    expected = [[texts[index] for index in rows] for rows, _ in folds]
    assert [[row["input_ids"] for row in rows] for rows in learnt] == expected


def test_a_small_part_is_learnt_in_as_many_steps_as_all_of_train(encoder, data, in_this_process, monkeypatch):
    taken = []

    def note(model, options, accelerator, rows, *_, **__):
        taken.append(math.ceil(len(rows) / options.per_device_train_batch_size) * options.num_train_epochs)

    monkeypatch.setattr(finetuning, "train", note)
    parts = [np.arange(4), np.arange(9), np.arange(20)]  # 1, 2 and 3 steps an epoch
    for epochs, least in ((6, 18), (300, LEAST_STEPS)):
        taken.clear()
        finetuned_logits(data, encoder, Setting(0, 0.1, epochs), parts, RECIPE)
        assert sorted(taken) == [max(epochs * number, least) for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("given", "epochs", "others"),
    [({}, LEAST_STEPS // 2, [3 * LEAST_STEPS // 4]), ({"epochs": 3, "other_epochs": [5]}, 3, [5])],
)
def test_few_sentences_are_searched_in_more_epochs(data, given, epochs, others):
    options = ProtocolOptions(folds=2, **given)  # two folds of 10 sentences: 2 steps an epoch
    recipe = Study(data, options, Path(), Path(), None, None).recipe
    assert (recipe.epochs, recipe.other_epochs) == (epochs, others)


def test_rates_are_tried_at_the_best_depth(found):
    result, kept, _ = found
    tried = [(entry["depth"], entry["learning_rate"], entry["epochs"]) for entry in result["tried"]]
    assert tried[:2] == [(0, 0.1, 2), (2, 1e-2, 2)]  # the encoder has no third layer
    better = max(result["tried"][:2], key=lambda entry: entry["cross_validated_macro_f1"])
    assert tried[2:] == [(better["depth"], 2 * better["learning_rate"], 2)]
    assert result["chosen"] == max(result["tried"], key=lambda entry: entry["cross_validated_macro_f1"])
    assert kept.keys() == {(*setting, fold) for setting in tried for fold in range(2)}


def test_progress_ends_with_all_work_done(found):
    _, _, told = found
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == pytest.approx(told[-1][1]) and all(done <= total * 1.001 for done, total in told)


def test_an_interrupted_search_goes_on_and_gives_the_same_numbers(found, encoder, data, folds, in_this_process):
    """To the bit, and whether two processes have done the work or one."""
    undisturbed, kept, _ = found
    known = {key: value for key, value in kept.items() if key[-1] == 0}
    again = {}
    result = search(data, encoder, folds, RECIPE, known=known.get, keep=lambda key, *value: again.update({key: value}))
    assert again.keys() == kept.keys() - known.keys()
    for key, (logits, _) in again.items():
        np.testing.assert_array_equal(logits, kept[key][0])
    np.testing.assert_array_equal(result["out_of_fold_logits"], undisturbed["out_of_fold_logits"])
    scores = [[entry["cross_validated_macro_f1"] for entry in each["tried"]] for each in (result, undisturbed)]
    assert scores[0] == scores[1]


def test_models_of_one_label_per_text_are_saved_whole(encoder, in_this_process, tmp_path):
    names = ["deux hommes", "les deux", "deux femmes"]
    data = study_data(np.eye(3, dtype=int)[WOMEN], "single_label_classification", names)
    folders = {seed: tmp_path / str(seed) for seed in (1, 2)}
    setting, recipe = Setting(1, 1e-2, 25), Recipe(mixed_precision="no")
    logits = finetune(data, encoder, setting, folders, recipe)
    assert logits.shape == (2, 10, 3) and not np.array_equal(*logits)
    for seed, expected in zip(folders, logits, strict=True):
        model, tokenizer, task = load_classifier(folders[seed])
        assert task == data.task
        inputs = tokenizer(TEXTS[20:], padding=True, return_tensors="pt")
        with torch.no_grad():
            np.testing.assert_allclose(model(**inputs).logits.numpy(), expected, atol=1e-5)
    of_parts = finetuned_logits(data, encoder, setting, [np.arange(20), np.arange(5)], recipe, seed=1)
    np.testing.assert_allclose(of_parts[0], logits[0], atol=1e-4)
    assert of_parts.shape == (2, 10, 3) and np.abs(of_parts[1] - logits[0]).max() > 0.01


def test_what_cannot_be_studied_is_told(encoder, data, folds, in_this_process, tmp_path):
    with pytest.raises(ValueError, match="real values"):
        search(study_data(WOMEN[:, None], "regression", ["value"]), encoder, folds)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((encoder / name).read_bytes())
    weights = load_file(encoder / "model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteLossError, match="step 1: the loss is nan"):
        search(data, tmp_path, folds, RECIPE)
