"""Copies of labelled texts in which words for one label have taken the place of words for another.

«Ma mère crie.» {-, j, m} gives «Ma voisine crie.» {-, j, t}: who is named and what is said of them are learnt apart,
and a rare label gets the contexts of a frequent one (counterfactual augmentation: Lu et al., Kaushik et al. 2020).
"""

import json
import logging
import random
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from datasets import Dataset, concatenate_datasets

from fratrie.data.annotation import excerpt
from fratrie.data.text_files import existing_file

logger = logging.getLogger(__name__)

Group = Mapping[str, Sequence[str]]


class _Mention(NamedTuple):
    start: int
    end: int
    group: str
    label: str


class Lexicon:
    """Phrases by group and label; any phrase of a group may stand where another of its phrases stands.

    A label is swapped where it is given and the lexicon sees all that names it: where its phrases in the text are of
    one group, and none of them stands for two labels. So a group of one label holds what names it and cannot be
    replaced. Case and accents do not count, and the longest phrase is taken.

    Args:
        groups: by any name; each maps labels to phrases.

    Raises:
        ValueError: a phrase is empty or stands in two groups, or there is none.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = groups
        self.places: dict[str, tuple[str, set[str]]] = {}
        for name, group in groups.items():
            for label, phrases in group.items():
                for phrase in map(_folded, phrases):
                    place, labels = self.places.setdefault(phrase, (name, set()))
                    if place != name or not phrase.strip():
                        raise ValueError(f"the phrase {excerpt(phrase)} is empty or in two groups: {place} and {name}")
                    labels.add(label)
        if not self.places:
            raise ValueError("the lexicon has no phrase")
        longest_first = sorted(map(re.escape, self.places), key=len, reverse=True)
        self.pattern = re.compile(rf"\b(?:{'|'.join(longest_first)})\b")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> "Lexicon":
        """Read a JSON file `{group: {label: [phrase, …]}}`.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            groups = json.loads(existing_file(path).read_text(encoding="utf-8"))
            for phrases in (phrases for group in groups.values() for phrases in group.values()):
                if not isinstance(phrases, list) or not all(isinstance(phrase, str) for phrase in phrases):
                    raise ValueError(f"{excerpt(phrases)} is no list of phrases")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no lexicon {{group: {{label: [phrase, …]}}}}: {error}") from error
        return cls(groups)

    def swap(self, text: str, labels: Collection[str], draw: random.Random) -> tuple[str, set[str]] | None:
        """The text with another label's phrase in the place of one label's, and its labels then.

        Returns:
            `None` where no label can be swapped.
        """
        mentions = self._mentions(text)
        swappable = [label for label in sorted(labels) if self._choices(label, mentions, labels)]
        if not swappable:
            return None
        old = draw.choice(swappable)
        new, phrase = draw.choice(self._choices(old, mentions, labels))
        for mention in reversed([mention for mention in mentions if mention.label == old]):
            capital = text[mention.start].isupper()
            text = text[: mention.start] + (phrase[0].upper() * capital + phrase[capital:]) + text[mention.end :]
        return text, {*labels} - {old} | {new}

    def _mentions(self, text: str) -> list[_Mention]:
        return [
            _Mention(*match.span(), group, label)
            for match in self.pattern.finditer(_folded(text))
            for group, labels in [self.places[match[0]]]
            for label in sorted(labels)
        ]

    def _choices(self, old: str, mentions: list[_Mention], labels: Collection[str]) -> list[tuple[str, str]]:
        """Labels and phrases that may take the place of all mentions of a label."""
        own = [mention for mention in mentions if mention.label == old]
        starts = [mention.start for mention in mentions]
        if len({mention.group for mention in own}) != 1 or any(starts.count(mention.start) > 1 for mention in own):
            return []
        group = self.groups[own[0].group]
        others = [(label, phrase) for label in group if label not in labels for phrase in group[label]]
        return [(label, phrase) for label, phrase in others if self.places[_folded(phrase)][1] == {label}]


def add_swapped(train: Dataset, lexicon: Lexicon, seed: int = 0) -> Dataset:
    """Rows, and behind them all of them again, swapped where a label can be swapped.

    Rows that cannot be swapped are repeated as they are, since they would weigh less than the others if they were not.

    Args:
        train: has `text`, `labels` (`List(ClassLabel)`) and perhaps `respondent`; other columns are left out.
        lexicon: of phrases for some of the labels.
        seed: of the draw.

    Raises:
        ValueError: the lexicon names a label that the rows do not know, or no row can be swapped.
    """
    rows = train.select_columns([name for name in ("text", "labels", "respondent") if name in train.column_names])
    names, draw = rows.features["labels"].feature.names, random.Random(seed)
    if unknown := sorted({label for group in lexicon.groups.values() for label in group} - set(names)):
        raise ValueError(f"the lexicon has the label {unknown[0]!r}, the texts have {' '.join(names)}")
    swaps = [lexicon.swap(row["text"], [names[i] for i in row["labels"]], draw) for row in rows]
    found = [swap for swap in swaps if swap]
    if not found:
        raise ValueError("no text holds a phrase of the lexicon that stands for one of its labels")
    logger.info("learnt twice: %d texts, %d with swapped words: %s", len(rows), len(found), excerpt(found[0][0], 60))
    again = [
        row | {"text": swap[0], "labels": sorted(map(names.index, swap[1]))} if swap else row
        for row, swap in zip(rows, swaps, strict=True)
    ]
    return concatenate_datasets([rows, Dataset.from_list(again, features=rows.features)])


def _folded(text: str) -> str:
    """Small letters without accents, one for each sign of the text."""
    return "".join(unicodedata.normalize("NFD", sign)[0].lower()[0] for sign in text)
