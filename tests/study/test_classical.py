from dataclasses import replace

import numpy as np
import pytest
import torch
from corpus import sentences, study_data
from sklearn.base import clone
from sklearn.feature_selection import SelectKBest, chi2
from sklearn.metrics import f1_score
from sklearn.model_selection import ParameterGrid, cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC, LinearSVC

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.study import classical
from fratrie.study.classical import CLASSICAL_METHODS, open_fits, pooled_states, score_classical
from fratrie.study.learning_curve import classical_curve
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import (
    BASELINES,
    Fit,
    Learner,
    QuantileBins,
    decide,
    folds_of,
    rows_of,
    tfidf_features,
    tune,
)

QUICK = {
    "logistic_regression": {"alpha": [1e-4, 1e-2], "l1_ratio": [0.5]},
    "gradient_boosting": {"max_leaf_nodes": [2, 4], "max_iter": [5]},
    "random_forest": {"min_samples_leaf": [1, 5], "n_estimators": [5]},
    "linear_svc": {"C": [1e-3, 0.1]},
    "kernel_svc": {"C": [0.1, 1.0]},
}


COLUMNS, BINS = 20, 4


def quick(name):
    method = replace(CLASSICAL_METHODS[name], words=QUICK[name], states=QUICK[name])
    return replace(method, dense_columns=method.dense_columns and COLUMNS, bins=method.bins and BINS)


def vectors(texts):
    """Some numbers about each text."""
    return np.array([[text.count(letter) for letter in "mpsèeaiou"] for text in texts], dtype=np.float32)


def by_hand(name, of_texts):
    """The same method as one pipeline of scikit-learn, for each of its parameters."""
    features = tfidf_features() if of_texts else StandardScaler()
    for parameters in ParameterGrid(QUICK[name]):
        classifier = clone(CLASSICAL_METHODS[name].classifier)
        if name == "kernel_svc":
            classifier = SVC(class_weight="balanced")
        classifier.set_params(**parameters, random_state=7)
        if name == "gradient_boosting":
            dense = FunctionTransformer(lambda matrix: matrix.toarray(), accept_sparse=True)
            columns = [SelectKBest(chi2, k=COLUMNS), dense] if of_texts else []
            classifier = make_pipeline(*columns, QuantileBins(BINS), classifier)
        yield parameters, make_pipeline(features, OneVsRestClassifier(classifier))


@pytest.mark.parametrize(("of_texts", "single_label"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", CLASSICAL_METHODS)
def test_equals_a_pipeline_of_scikit_learn(name, of_texts, single_label):
    train, test = sentences(15, 0, single_label), sentences(6, 1, single_label)
    folds = folds_of(train, 2, seed=0)
    inputs, unseen = (np.array(s.texts, dtype=object) if of_texts else vectors(s.texts) for s in (train, test))
    target = train.labels.argmax(1) if single_label else train.labels
    tried = []
    for parameters, pipeline in by_hand(name, of_texts):
        held_out = cross_val_predict(pipeline, inputs, target, cv=folds)
        tried.append((f1_score(target, held_out, average="macro"), parameters, pipeline))
    score, parameters, pipeline = max(tried, key=lambda one: one[0])
    expected = pipeline.fit(inputs, target).predict(unseen)
    method, learner = quick(name), Learner(np.concatenate([inputs, unseen]), train.labels)
    found = tune(method, QUICK[name], train.labels, folds, learner.fit_all, single_label, seed=7)
    assert found.parameters == parameters
    assert found.cross_validated_macro_f1 == pytest.approx(score, abs=1e-12)
    ((predicted,),) = decide(
        method,
        [parameters],
        [rows_of(train, test)],
        *(3 if single_label else 5, learner.fit_all),
        single_label,
        seed=7,
    )
    assert np.array_equal(predicted, np.eye(3, dtype=int)[expected] if single_label else expected)


def decided(method, parameters, train, test, single_label=False):
    learner = Learner([*train.texts, *test.texts], train.labels)
    (((found),),) = decide(
        *(method, [parameters], [rows_of(train, test)], train.labels.shape[1], learner.fit_all, single_label)
    )
    return found


def test_the_bin_of_a_value_is_the_number_of_quantiles_below_it():
    drawn = np.random.default_rng(0)
    learnt, asked = drawn.normal(size=(50, 3)), drawn.normal(size=(20, 3))
    learnt[:, 1] = learnt[:, 1] > 1  # nearly all 0
    asked[:, 1] = asked[:, 1] > 1
    found = QuantileBins(5).fit(learnt).transform(asked)
    quantiles = [[np.quantile(column, part / 5) for part in range(1, 5)] for column in learnt.T]
    assert found.tolist() == [[sum(q < x for q in qs) for qs, x in zip(quantiles, row, strict=True)] for row in asked]
    assert len(set(found[:, 1])) == 2


@pytest.mark.parametrize("name", CLASSICAL_METHODS)
def test_labels_of_all_or_of_none_leave_the_others_as_they_are(name):
    train, test = sentences(15, 0), sentences(6, 1)
    all_and_none = np.tile([1, 0], (len(train.texts), 1))
    method, parameters = quick(name), next(iter(ParameterGrid(QUICK[name])))
    alone = decided(method, parameters, train, test)
    beside = decided(method, parameters, replace(train, labels=np.hstack([all_and_none, train.labels])), test)
    assert beside[:, 0].all() and not beside[:, 1].any()
    assert np.array_equal(beside[:, 2:], alone)


def test_one_label_that_a_fold_does_not_know_is_never_given():
    train = sentences(15, 0, single_label=True)
    known = train.labels[:, 2] == 0
    first, second = np.flatnonzero(known), np.flatnonzero(~known)
    everything, fit_all = np.arange(len(known)), Learner(train.texts, train.labels).fit_all
    method, learnt = BASELINES["linear_svc"], [(first, everything), (second, everything)]
    (without,), (only,) = decide(method, [{"C": 0.1}], learnt, 3, fit_all, single_label=True)
    assert without.sum(0)[2] == 0 and (without.sum(1) == 1).all() and only[:, 2].all()
    folds = [(first, second), (second, first)]
    assert tune(method, method.words, train.labels, folds, fit_all, True).cross_validated_macro_f1 == 0


@pytest.mark.parametrize("name", ["random_forest", "logistic_regression"])
def test_the_seed_decides(name):
    train = sentences(15, 0)
    learner, (learnt, asked) = Learner(train.texts, train.labels), folds_of(train, 2, seed=0)[0]
    parameters = next(iter(ParameterGrid(QUICK[name])))
    once, again, other = (
        learner.scores(Fit(quick(name), parameters, learnt, asked, label=3, seed=seed)) for seed in (3, 3, 4)
    )
    assert np.array_equal(once, again) and not np.array_equal(once, other)


@pytest.mark.slow
def test_the_number_of_processes_changes_no_score():
    """Whichever of them has made which features before."""
    data = study_data()
    fits = [
        Fit(quick(name), next(iter(ParameterGrid(QUICK[name]))), learnt, asked, label, seed=3)
        for label in (0, 3)
        for learnt, asked in folds_of(data.train, 2)
        for name in CLASSICAL_METHODS
    ]
    with open_fits("words", data, "", workers=2) as fit_all, open_fits("words", data, "", workers=1) as in_turn:
        scores = dict(fit_all(fits))
        assert all(np.array_equal(scores[place], expected) for place, expected in in_turn(fits))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_byte_level_bpe(sentences(15, 0).texts, 300, sibling="encoder", show_progress=False)
    config = FratrieEncoderConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    FratrieEncoderModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_pooled_states_are_the_means_of_each_text_alone(encoder):
    texts = ["ma mère", "mon père et ma sœur, le 3 du mois dernier", "oui"]
    states = pooled_states(encoder, texts)
    model = FratrieEncoderModel.from_pretrained(encoder).eval()
    tokenizer = train_byte_level_bpe(sentences(15, 0).texts, 300, sibling="encoder", show_progress=False)
    with torch.no_grad():
        alone = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    assert states.shape == (3, 16)
    assert np.allclose(states, torch.stack(alone).numpy(), atol=1e-5)
    with torch.no_grad():
        cut = model(**tokenizer(texts[1], return_tensors="pt", truncation=True, max_length=6)).last_hidden_state[0]
    assert np.allclose(pooled_states(encoder, texts, max_length=6)[1], cut.mean(0).numpy(), atol=1e-5)


def test_a_study_cuts_the_texts_of_its_states(encoder, monkeypatch):
    asked = []
    monkeypatch.setattr(classical, "pooled_states", lambda _, texts, limit: asked.append(limit) or vectors(texts))
    data = study_data()
    score_classical(data, encoder, folds_of(data.train, 2), ["linear_svc"], workers=1, max_length=5)
    classical_curve(data, "linear_svc", "states", {"C": 0.1}, [[np.arange(20)]], encoder, workers=1, max_length=6)
    assert asked == [5, 6]


@pytest.mark.parametrize("single_label", [False, True])
def test_scores_every_method_on_words_and_on_states(encoder, single_label):
    data = study_data(single_label)
    folds = folds_of(data.train, 3, seed=0)
    known, told = {}, []

    def step(name, find):
        if name not in known:
            known[name] = find()
        return known[name]

    found = score_classical(
        *(data, encoder, folds, ["linear_svc"]),
        workers=1,
        step=step,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [name.rpartition("-")[0] for name in known] == ["classical-linear_svc-words", "classical-linear_svc-states"]
    fits = len(data.task.labels) * (4 * 3 + 1 + 3 * 3 + 1)
    assert told[-1] == (2, 2) and told == sorted(set(told)) and len(told) == fits
    for features in ("words", "states"):
        result = found["linear_svc"][features]
        low, high = result["test"]["present_macro_f1_interval"]
        assert low <= result["test"]["present_macro_f1"] <= high
        assert list(result["test"]["f1_interval"]) == data.task.labels
        assert np.shape(result["predictions"]) == data.test.labels.shape
    pipeline = make_pipeline(tfidf_features(), OneVsRestClassifier(LinearSVC(class_weight="balanced", random_state=0)))
    pipeline.set_params(onevsrestclassifier__estimator__C=found["linear_svc"]["words"]["parameters"]["C"])
    expected = pipeline.fit(data.train.texts, data.train.labels).predict(data.test.texts)
    if not single_label:
        assert np.array_equal(found["linear_svc"]["words"]["predictions"], expected)
    assert score_classical(data, "nowhere", folds, ["linear_svc"], step=step) == found


def test_without_respondents_each_sentence_is_its_own(encoder):
    data = study_data()
    data = replace(data, train=replace(data.train, groups=None), test=replace(data.test, groups=None))
    found = score_classical(data, encoder, folds_of(data.train, 2, seed=0), ["linear_svc"], workers=1)
    assert found["linear_svc"]["words"]["test"]["present_macro_f1_interval"] is not None
