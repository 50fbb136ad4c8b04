import json

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.study.data import StudyData, folds_of
from fratrie.study.finetuning import Recipe, Setting, decisions, finetune, finetuned_probabilities, search
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import Sentences
from fratrie.training.classifiers import load_classifier
from fratrie.training.tasks import Task

WORDS = ["mère", "père", "sœur", "frère", "tante", "oncle"]
TEXTS = [f"ma {first} et mon {second}" for first in WORDS for second in WORDS if first != second]
LABELS = ["femme", "homme"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
RECIPE = Recipe(depths=(0, 2), epochs=2, rate_factors=(2.0,), other_epochs=(), learning_rate=1e-2)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, sibling="encoder", show_progress=False)
    config = FratrieEncoderConfig(
        **SIZES, vocab_size=300, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, hidden_dropout=0.1
    )
    torch.manual_seed(0)
    FratrieEncoderModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data():
    female = [[int(word in text) for word in ("mère", "sœur", "tante")] for text in TEXTS]
    labels = np.array([[max(row), int(sum(row) < 2)] for row in female])
    train = Sentences(TEXTS[:20], labels[:20], [index // 2 for index in range(20)])
    return StudyData(train, Sentences(TEXTS[20:], labels[20:]), Task("multi_label_classification", LABELS))


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
    for entry in result["tried"]:
        pieces = [kept[entry["depth"], entry["learning_rate"], entry["epochs"], fold][0] for fold in range(2)]
        truth = np.concatenate([data.train.labels[held_out] for _, held_out in folds])
        expected = f1_score(truth, np.concatenate(pieces) > 0, average="macro", zero_division=0)
        assert entry["cross_validated_macro_f1"] == pytest.approx(expected)


def test_the_rates_are_tried_at_the_best_depth(found):
    result, kept, _ = found
    tried = [(entry["depth"], entry["learning_rate"], entry["epochs"]) for entry in result["tried"]]
    assert tried[:2] == [(0, 2e-2, 2), (2, 1e-2, 2)]
    better = max(result["tried"][:2], key=lambda entry: entry["cross_validated_macro_f1"])
    assert tried[2:] == [(better["depth"], 2 * better["learning_rate"], 2)]
    assert result["chosen"] == max(result["tried"], key=lambda entry: entry["cross_validated_macro_f1"])
    assert kept.keys() == {(*setting, fold) for setting in tried for fold in range(2)}


def test_progress_ends_with_all_work_done(found):
    _, _, told = found
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == pytest.approx(told[-1][1]) and all(done <= total * 1.001 for done, total in told)


def test_one_process_goes_on_where_two_were_interrupted(found, encoder, data, folds, tmp_path):
    """Neither the number of processes nor what they did before changes a bit; models of single labels are saved."""
    undisturbed, kept, _ = found
    known = {key: value for key, value in kept.items() if key[-1] == 0}
    again = {}
    result = search(data, encoder, folds, RECIPE, workers=1, known=known, keep=lambda key, *_: again.update({key: 1}))
    assert again.keys() == kept.keys() - known.keys()
    np.testing.assert_array_equal(result["out_of_fold_logits"], undisturbed["out_of_fold_logits"])
    scores = [[entry["cross_validated_macro_f1"] for entry in each["tried"]] for each in (result, undisturbed)]
    assert scores[0] == scores[1]
