"""The shipped corpus (sizes, supports, card) and the split by respondent."""

import os
from importlib.resources import files

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from huggingface_hub import DatasetCard
from hypothesis import given, settings
from hypothesis import strategies as st

from fratrie.data import LABELS, Segment, read_annotations
from fratrie.data.corpus import load_family_relations, split_by_respondent, to_dataset

FOLDER = files("fratrie.data") / "family_relations"


@pytest.fixture(scope="module")
def corpus():
    return load_family_relations()


@pytest.fixture(scope="module")
def card():
    return DatasetCard.load(str(FOLDER / "README.md"))


def test_sizes_and_features(corpus):
    assert {name: len(split) for name, split in corpus.items()} == {"train": 1318, "test": 330}
    assert {name: len(set(split["respondent"])) for name, split in corpus.items()} == {
        "train": 240,
        "test": 58,
    }
    for split in corpus.values():
        assert split.features == Features(
            text=Value("string"),
            row=Value("int64"),
            respondent=Value("int64"),
            code=Value("string"),
            labels=List(ClassLabel(names=list(LABELS))),
        )


def test_a_respondent_number_is_one_person_in_both_splits(corpus):
    assert sorted(set(corpus["train"]["respondent"])) == list(range(240))
    assert sorted(set(corpus["test"]["respondent"])) == list(range(240, 298))


def test_the_extended_corpus_goes_on_with_other_people(corpus):
    extended = load_family_relations(extended=True)
    first, more = (extended["train"].select(rows) for rows in (range(1318), range(1318, len(extended["train"]))))
    assert first.to_dict() == corpus["train"].to_dict() and extended["test"].to_dict() == corpus["test"].to_dict()
    segments = read_annotations(FOLDER / "more.txt")
    assert more["text"][:] == [segment.text for segment in segments]
    assert sorted(set(more["respondent"])) == list(range(298, 298 + segments[-1].respondent + 1))
    lines = [line for part in ("train", "more") for line in (FOLDER / f"{part}.txt").read_text("utf-8").splitlines()]
    assert all(lines[row - 1].endswith(text) for row, text in zip(more["row"], more["text"], strict=True))
    known = {text.casefold() for split in corpus.values() for text in split["text"]}
    assert not known & {text.casefold() for text in more["text"]}


@pytest.mark.parametrize("split", ["train", "test", "more"])
def test_supports_are_those_of_the_card(corpus, card, split):
    (row,) = [line for line in card.text.splitlines() if line.startswith(f"| {split} |")]
    supports = [int(cell) for cell in row.strip("|").split("|")[1:]]
    rows = (
        load_family_relations(extended=True)["train"].select(range(1318, 5327)) if split == "more" else corpus[split]
    )
    counts = [sum(i in labels for labels in rows["labels"]) for i in range(len(LABELS))]
    assert counts == supports
    assert sum(counts) == {"train": 4038, "test": 1016, "more": 12041}[split]


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_the_segments_of_the_file(corpus, split):
    segments = read_annotations(FOLDER / f"{split}.txt")
    assert corpus[split]["text"][:] == [segment.text for segment in segments]
    assert corpus[split]["row"][:] == [segment.line for segment in segments]
    assert corpus[split]["code"][:] == [segment.code for segment in segments]
    names = [tuple(LABELS[i] for i in labels) for labels in corpus[split]["labels"]]
    assert names == [segment.labels for segment in segments]


def test_corpus_lives_in_memory(corpus):
    assert not corpus["train"].cache_files and not corpus["test"].cache_files


def test_card_header(card):
    assert card.data.license == "cc0-1.0" and card.data.language == ["fr"]
    assert card.data.task_categories == ["text-classification"]
    assert card.data.task_ids == ["multi-label-classification"]
    assert card.data.size_categories == ["1K<n<10K"]
    default, extended = (
        {entry["split"]: entry["path"] for entry in config["data_files"]} for config in card.data.configs
    )
    assert default == {"train": "train.txt", "test": "test.txt"}
    assert extended == {"train": ["train.txt", "more.txt"], "test": "test.txt"}
    assert all(os.path.isfile(str(FOLDER / path)) for path in ("train.txt", "more.txt", "test.txt"))


def test_to_dataset_of_one_segment():
    (row,) = to_dataset([Segment("Ma mère.", "jm+,jp-", 4, 9)])
    assert row == {"text": "Ma mère.", "row": 9, "respondent": 4, "code": "jm+, jp-", "labels": [0, 1, 4, 7, 8]}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=30).filter(lambda groups: len(set(groups)) > 1),
    st.floats(0.001, 0.999),
    st.integers(0, 5),
)
def test_split_keeps_every_row_once_and_no_respondent_twice(groups, size, seed):
    dataset = Dataset.from_dict({"row": list(range(len(groups))), "respondent": groups})
    parts = split_by_respondent(dataset, size, seed)
    assert sorted([*parts["train"]["row"], *parts["validation"]["row"]]) == list(range(len(groups)))
    train, validation = set(parts["train"]["respondent"]), set(parts["validation"]["respondent"])
    assert train and validation and not train & validation
    assert abs(len(validation) - size * len(set(groups))) <= 1
    assert all(list(part["row"]) == sorted(part["row"]) for part in parts.values())


def test_split_follows_the_seed_and_keeps_features(corpus):
    once, again, other = (split_by_respondent(corpus["train"], 0.1, seed) for seed in (1, 1, 2))
    assert once["validation"]["text"][:] == again["validation"]["text"][:]
    assert once["validation"]["text"][:] != other["validation"]["text"][:]
    assert len(set(once["validation"]["respondent"])) == 24
    assert once["train"].features == corpus["train"].features


def test_split_takes_named_respondents():
    dataset = Dataset.from_dict({"respondent": ["Léa", "Léa", "Tom"]})
    parts = split_by_respondent(dataset, 0.5)
    assert {tuple(part["respondent"]) for part in parts.values()} == {("Léa", "Léa"), ("Tom",)}


@pytest.mark.parametrize("size", [0, 1, -0.1, 1.5, float("nan")])
def test_split_refuses_a_share_out_of_range(size):
    with pytest.raises(ValueError, match=rf"validation_size={size} must lie strictly between 0 and 1"):
        split_by_respondent(Dataset.from_dict({"respondent": [0, 1]}), size)


def test_split_refuses_a_single_respondent():
    with pytest.raises(ValueError, match="two respondents or more, found 1: separate respondents by blank lines"):
        split_by_respondent(Dataset.from_dict({"respondent": [3, 3]}))


def test_split_names_the_columns_when_respondent_is_missing():
    with pytest.raises(ValueError, match="no column 'respondent' to split by; the columns are text, speaker"):
        split_by_respondent(Dataset.from_dict({"text": ["a"], "speaker": [0]}))
