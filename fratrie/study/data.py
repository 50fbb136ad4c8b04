"""What a study learns from and scores on, and its folds."""

from dataclasses import dataclass

from fratrie.training.baselines import Fold, Sentences, folds_of
from fratrie.training.tasks import Task

__all__ = ["Fold", "StudyData", "folds_of"]


@dataclass(frozen=True)
class StudyData:
    """The two parts of a corpus and what is asked of each sentence."""

    train: Sentences
    test: Sentences
    task: Task
