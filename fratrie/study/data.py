"""What a study learns from and scores on, and its folds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold

from fratrie.training.baselines import Sentences
from fratrie.training.tasks import Task

Fold = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class StudyData:
    """The two parts of a corpus and what is asked of each sentence."""

    train: Sentences
    test: Sentences
    task: Task


def folds_of(sentences: Sentences, number: int, seed: int) -> list[Fold]:
    """Rows to learn and rows to hold out, with all sentences of a respondent on one side.

    Args:
        sentences: without groups, each sentence is a respondent of its own.
        number: of folds, at most; fewer where there are fewer respondents.
        seed: of the draw.

    Raises:
        ValueError: fewer than two respondents.
    """
    groups = np.arange(len(sentences.texts)) if sentences.groups is None else np.asarray(sentences.groups)
    number = min(number, len(np.unique(groups)))
    if number < 2:
        raise ValueError("cross-validation needs the sentences of at least two respondents; give more training text")
    splitter = GroupKFold(number, shuffle=True, random_state=seed)
    return list(splitter.split(groups, groups=groups))
