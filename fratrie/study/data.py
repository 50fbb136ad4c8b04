"""What a study learns from and scores on."""

from dataclasses import dataclass

from fratrie.training.baselines import Sentences
from fratrie.training.tasks import Task


@dataclass(frozen=True)
class StudyData:
    """The two parts of a corpus and what is asked of each sentence."""

    train: Sentences
    test: Sentences
    task: Task
