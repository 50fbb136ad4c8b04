import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import f1_score, log_loss

from fratrie.modeling.calibration import check_points
from fratrie.study import calibration
from fratrie.training.metrics import MULTI_LABEL, SINGLE_LABEL


@pytest.fixture(scope="module")
def several():
    """Logits that are three times too sure for the first label and half as sure as they could be for the second."""
    generator = np.random.default_rng(0)
    true_logits = generator.normal(0, 2, (1500, 2))
    return (true_logits * [3, 0.5]).astype(np.float32), (generator.random((1500, 2)) < expit(true_logits)).astype(int)


def test_temperatures_are_those_of_the_smallest_loss(several):
    logits, truth = several
    points = calibration.learn_points(logits, truth, "temperature", MULTI_LABEL)
    check_points(points, 2)
    grid = np.exp(np.linspace(-3, 3, 1201))
    for label, got in enumerate(calibration.temperatures(points)):
        losses = [log_loss(truth[:, label], expit(logits[:, label] / t)) for t in grid]
        assert got == pytest.approx(grid[np.argmin(losses)], rel=0.01)
    after = calibration.calibrated(logits, points)
    np.testing.assert_allclose(after, logits / calibration.temperatures(points), rtol=1e-4, atol=1e-5)


def test_one_temperature_for_one_label_per_sentence():
    generator = np.random.default_rng(1)
    true_logits = generator.normal(0, 1.5, (1500, 3))
    truth = np.eye(3, dtype=int)[[generator.choice(3, p=p) for p in softmax(true_logits, axis=1)]]
    points = calibration.learn_points(2 * true_logits, truth, "temperature", SINGLE_LABEL)
    assert len({*calibration.temperatures(points)}) == 1
    grid = np.linspace(0.5, 5, 901)
    losses = [log_loss(truth, softmax(2 * true_logits / t, axis=1)) for t in grid]
    assert calibration.temperatures(points)[0] == pytest.approx(grid[np.argmin(losses)], rel=0.01)
    with pytest.raises(ValueError, match="take the temperature"):
        calibration.learn_points(true_logits, truth, "isotonic", SINGLE_LABEL)


def test_isotonic_lines_are_those_of_scikit_learn_at_the_logits_that_they_learnt(several):
    logits, truth = several
    points = calibration.learn_points(logits, truth, "isotonic", MULTI_LABEL)
    check_points(points, 2)
    got = expit(calibration.calibrated(logits, points))
    for label in range(2):
        fitted = IsotonicRegression(y_min=1 / 1502, y_max=1501 / 1502).fit(logits[:, label], truth[:, label])
        np.testing.assert_allclose(got[:, label], fitted.predict(logits[:, label]), atol=1e-4)
    far = expit(calibration.calibrated(np.array([[-900.0, -900], [900, 900]]), points))
    assert np.all(far[0] >= 1 / 1503) and np.all(far[1] <= 1502 / 1503)
    assert np.all(far == got[[logits.argmin(0), logits.argmax(0)], [0, 1]])


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
@pytest.mark.parametrize("given", [0, 1])
def test_a_label_that_all_or_no_sentences_carry_keeps_finite_logits(method, given):
    logits = np.linspace(-2, 2, 9, dtype=np.float32)[:, None]
    points = calibration.learn_points(logits, np.full((9, 1), given), method, MULTI_LABEL)
    check_points(points, 1)
    assert np.isfinite(calibration.calibrated(logits, points)).all()


def test_calibration_improves_the_errors_which_are_those_of_a_loop(several):
    logits, truth = several
    points = calibration.learn_points(logits, truth, "temperature", MULTI_LABEL)
    found = calibration.compare_calibration(
        logits, calibration.calibrated(logits, points), truth, ["a", "b"], MULTI_LABEL
    )
    expected = 0.0
    for low in np.arange(10) / 10:
        inside = [
            (p, t)
            for p, t in zip(expit(logits[:, 0].astype(float)), truth[:, 0], strict=True)
            if low <= p < low + 0.1 or (p == 1 and low == 0.9)
        ]
        if inside:
            confidence, frequency = np.mean(inside, axis=0)
            expected += len(inside) / len(logits) * abs(confidence - frequency)
    assert found["ece"]["before"]["a"] == pytest.approx(expected, abs=1e-3)
    assert found["ece"]["mean_after"] < found["ece"]["mean_before"] / 2
    assert sum(each["count"] for each in found["reliability"]["after"]) == truth.size


def test_thresholds_are_tuned_where_that_wins_on_other_folds_alone():
    truth = np.tile([[1, 0], [0, 1]], (20, 1))
    low = np.where(truth == 1, 0.3, 0.1)
    folds = [(np.arange(20, 40), np.arange(20)), (np.arange(20), np.arange(20, 40))]
    assert calibration.learn_thresholds(low, truth, folds) == pytest.approx([0.2, 0.2])
    noise = np.random.default_rng(0).random((40, 2)) / 4 + np.where(truth == 1, 0.55, 0.2)
    assert f1_score(truth, noise > 0.5, average="macro") == 1
    assert calibration.learn_thresholds(noise, truth, folds) == [0.5, 0.5]


def test_one_label_is_judged_by_its_own_f1():
    """And not by the mean of that and the F1 of its absence, as scikit-learn takes one column for."""
    generator = np.random.default_rng(0)
    truth, noise = generator.integers(0, 2, (400, 1)), generator.uniform(0.3, 0.7, (400, 1))
    folds = [(np.arange(200, 400), np.arange(200)), (np.arange(200), np.arange(200, 400))]
    (threshold,) = calibration.learn_thresholds(noise, truth, folds)  # of the best F1: that which nearly all exceed
    assert threshold < 0.4
