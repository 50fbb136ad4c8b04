"""Swapped copies: one label's words for another's, and nothing else; nothing where the lexicon does not see it all."""

import json
import random
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

import fratrie
from fratrie.data.annotation import LABELS
from fratrie.data.corpus import load_family_relations
from fratrie.data.swaps import Lexicon, add_swapped

PERSONS = Path(fratrie.__file__).parent / "data" / "family_relations" / "persons.json"
WOMEN = {"m": ["ma mère", "maman"], "s": ["ma sœur"], "t": ["ma belle-mère"]}
BOTH = {"m": ["parents"], "p": ["parents", "père"], "f": ["frère"]}
OTHERS = {"m": ["mère"], "a": ["ma mère à tous"]}
LEXICON = Lexicon({"women": WOMEN, "both": BOTH, "others": OTHERS})
FEATURES = Features({"text": Value("string"), "labels": List(ClassLabel(names=list(LABELS))), "code": Value("string")})


@pytest.mark.parametrize(
    ("text", "labels", "swapped"),
    [
        ("Ma mere, MAMAN !", "jm", {("Ma sœur, Ma sœur !", "js"), ("Ma belle-mère, Ma belle-mère !", "jt")}),
        ("maman et ma sœur", "ms", {("ma belle-mère et ma sœur", "st"), ("maman et ma belle-mère", "mt")}),
        ("ma mère", "j", {None}),  # named, but not spoken of
        ("ma mère et sa mère", "m", {None}),  # two groups
        ("mes parents", "m", {None}),  # of two labels
        ("mon frère", "f", {("mon père", "p")}),  # and none of two labels
        ("ma mère à tous", "m", {None}),  # a longer phrase
        ("mes parents et ma sœur", "mps", {("mes parents et ma belle-mère", "mpt")}),
        ("mamans", "m", {None}),  # another word
    ],
)
def test_all_swaps_of_a_text(text, labels, swapped):
    found = [LEXICON.swap(text, labels, random.Random(seed)) for seed in range(40)]
    assert {pair and (pair[0], "".join(sorted(pair[1]))) for pair in found} == swapped


WORDS = st.sampled_from(["elle", "É", "et", *(phrase for phrases in WOMEN.values() for phrase in phrases)])


@given(st.lists(WORDS, min_size=1), st.sets(st.sampled_from("mst+"), min_size=1), st.integers(0, 99))
def test_one_label_gives_way_to_one_and_other_words_stay(words, labels, seed):
    swapped = LEXICON.swap(" | ".join(words), labels, random.Random(seed))
    given_label = {phrase: label for label, phrases in WOMEN.items() for phrase in phrases}
    if swapped is None:
        assert not labels & {given_label.get(word) for word in words} or {"m", "s", "t"} <= labels
        return
    (old,), (new,) = labels - swapped[1], swapped[1] - labels
    for before, after in zip(words, swapped[0].split(" | "), strict=True):
        assert after == before if given_label.get(before) != old else after.lower() in WOMEN[new]


def test_all_rows_stand_there_again_with_their_respondents():
    corpus = load_family_relations()["train"].select(range(60))
    lexicon = Lexicon.read(PERSONS)
    made = add_swapped(corpus, lexicon, seed=3)
    assert made["respondent"][:] == corpus["respondent"][:] * 2
    first, again = made.select(range(60)), made.select(range(60, 120))
    assert first.to_dict() == corpus.remove_columns(["code", "row"]).to_dict()
    changed, relabelled = (
        [a[name] != b[name] for a, b in zip(first, again, strict=True)] for name in ("text", "labels")
    )
    assert 20 < sum(changed) < 50 and changed == relabelled
    same, other = (add_swapped(corpus, lexicon, seed)["text"][:] for seed in (3, 4))
    assert same == made["text"][:] != other


def test_what_cannot_be_swapped_is_refused(tmp_path):
    rows = Dataset.from_list([{"text": "rien", "labels": ["j"], "code": "ji"}], features=FEATURES)
    with pytest.raises(ValueError, match="no text holds a phrase"):
        add_swapped(rows, LEXICON)
    with pytest.raises(ValueError, match="the lexicon has the label 'x'"):
        add_swapped(rows, Lexicon({"a": {"x": ["rien"]}}))
    with pytest.raises(ValueError, match="'mere' is empty or in two groups: a and b"):
        Lexicon({"a": {"m": ["mère"]}, "b": {"m": ["Mère"]}})
    for wrong in ([1], {}, {"a": ["b"]}, {"a": {"m": "mère"}}):
        path = tmp_path / "lexicon.json"
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="lexicon"):
            Lexicon.read(path)
