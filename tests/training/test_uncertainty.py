import numpy as np
import pytest
from scipy.stats import entropy

from fratrie.training.uncertainty import doubts, most_unlike


def test_doubt_about_several_labels_is_the_entropy_of_their_set():
    probabilities = np.array([[0.5, 0.9, 0.2], [0.0, 1.0, 0.6]])
    amounts, labels = doubts(probabilities, "multi_label_classification")
    sets = [np.ravel(np.outer(np.ravel(np.outer([p, 1 - p], [q, 1 - q])), [r, 1 - r])) for p, q, r in probabilities]
    assert amounts == pytest.approx([entropy(each) for each in sets]) and labels.tolist() == [0, 2]


def test_doubt_about_one_label_is_the_margin_to_the_second():
    amounts, labels = doubts(
        np.array([[0.5, 0.1, 0.4], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]), "single_label_classification"
    )
    assert amounts == pytest.approx([0.9, 0.0, 1.0]) and labels.tolist() == [2, 0, 1]
    assert doubts(np.ones((1, 1)), "single_label_classification")[0] == [1]


def test_what_resembles_an_earlier_choice_is_left_out():
    texts = [
        "Ma mère est gentille.",
        "ma  mère est gentille !",
        "Ma mère est méchante.",
        "Mon père.",
        "x",
        "X",
        "Mon père",
    ]
    assert most_unlike(texts, range(7), 7) == [0, 2, 3, 4]
    assert most_unlike(texts, [6, 5, 4, 1, 0], 3) == [6, 5, 1]
