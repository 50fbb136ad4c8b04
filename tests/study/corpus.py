"""A small corpus whose labels a few words tell."""

import numpy as np

from fratrie.study.data import StudyData
from fratrie.training.baselines import Sentences
from fratrie.training.metrics import MULTI_LABEL, SINGLE_LABEL
from fratrie.training.tasks import Task

PERSONS = ["ma mère", "mon père", "ma sœur"]
FEELINGS = ["j’aime", "je déteste", "je vois"]


def sentences(respondents, seed, single_label=False):
    """Sentences that name a person and, some of them wrongly labelled, a feeling; four per respondent."""
    rng = np.random.default_rng(seed)
    persons, feelings = rng.integers(3, size=(2, 4 * respondents))
    days = rng.integers(1, 29, size=len(persons))
    texts = [
        f"{FEELINGS[feeling]} {PERSONS[person]} le {day} du mois"
        for feeling, person, day in zip(feelings, persons, days, strict=True)
    ]
    noted = np.where(rng.random(len(feelings)) < 0.2, rng.integers(3, size=len(feelings)), feelings)
    labels = np.eye(3, dtype=np.int64)[persons]
    if not single_label:
        labels = np.hstack([labels, (noted == 0)[:, None], (noted == 1)[:, None]]).astype(np.int64)
    return Sentences(texts, labels, np.repeat(np.arange(respondents), 4).tolist())


def study_data(single_label=False):
    labels = ["m", "p", "s"] if single_label else ["m", "p", "s", "+", "-"]
    task = Task(SINGLE_LABEL if single_label else MULTI_LABEL, labels)
    return StudyData(sentences(15, 0, single_label), sentences(6, 1, single_label), task)
