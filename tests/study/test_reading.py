import numpy as np
import pytest

from fratrie.study.reading import StudyDataOptions, read_study, second_annotations
from fratrie.training.metrics import MULTI_LABEL
from fratrie.training.tasks import task_of

ROWS = [
    ("un", "a", "a", "x"),
    ("deux", "a b", "b", "x"),
    ("trois", "b", "", "y"),
    ("quatre", "", "[]", "y"),
    ("cinq", "a b", "", "z"),
]
SEED = 3  # draws y


def write(path, rows, header="text,labels,second,respondent"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return str(path)


def test_whole_respondents_are_kept_for_the_test_and_second_labels_stay_with_their_rows(tmp_path):
    options = StudyDataOptions(
        train_file=write(tmp_path / "a.csv", ROWS), test_size=0.3, second_label_column="second", label_names=["a", "b"]
    )
    parts = read_study(options, seed=SEED)
    speakers = {part: sorted(set(rows["respondent"])) for part, rows in parts.items()}
    assert speakers == {"train": ["x", "z"], "test": ["y"]}
    task = task_of(parts["train"].features)
    assert (task.problem_type, task.labels) == (MULTI_LABEL, ["a", "b"])
    found = second_annotations(parts, 2)
    texts = [*parts["train"]["text"], *parts["test"]["text"]]
    expected = {"un": [1, 0], "deux": [0, 1], "trois": None, "quatre": [0, 0], "cinq": None}
    assert [None if row is None else row.tolist() for row in found] == [expected[text] for text in texts]
    assert all(row is None or row.dtype == np.int64 for row in found)
    assert [*parts["train"]["row"], *parts["test"]["row"]] == [2, 3, 6, 4, 5]


def test_a_test_file_has_its_own_second_labels(tmp_path):
    train, test = write(tmp_path / "a.csv", ROWS), write(tmp_path / "b.csv", [("six", "b", "a b", "w")])
    parts = read_study(StudyDataOptions(train_file=train, test_file=test, second_label_column="second"), seed=0)
    assert len(parts["train"]) == 5 and parts["test"]["text"][:] == ["six"]
    assert second_annotations(parts, 2)[-1].tolist() == [1, 1]


@pytest.mark.parametrize("labels", [("a", "b", "a b"), ("a", "b", "a")])  # several labels per text, and one
def test_two_annotators_with_rows_of_their_own(tmp_path, labels):
    own = [("un", labels[0], "ann"), ("deux", labels[1], "ann"), ("trois", labels[2], "ann")]
    more = [(str(number), labels[number % 2], "ann") for number in range(6)]
    rows = [*own, *more, ("deux", labels[2], "bob"), ("un", "a", "bob")]
    file = write(tmp_path / "a.csv", rows, "text,labels,annotator")
    options = StudyDataOptions(train_file=file, annotator="ann", second_annotator="bob", test_size=0.4)
    parts = read_study(options, seed=0)
    texts = [*parts["train"]["text"], *parts["test"]["text"]]
    assert all(
        rows[number - 2][0] == text
        for part in parts.values()
        for text, number in zip(part["text"], part["row"], strict=True)
    )
    expected = {"un": [1, 0], "deux": [1, int(" " in labels[2])]}
    found = second_annotations(parts, 2)
    assert [None if row is None else row.tolist() for row in found] == [expected.get(text) for text in texts]


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (ROWS, {"second_label_column": "third"}, "no column 'third'"),
        ([*ROWS, ("six", "a", "z", "w")], {"second_label_column": "second"}, r"row 7: unknown label 'z'"),
        (ROWS, {"problem_type": "regression", "label_column": "respondent", "group_column": "labels"}, "use fratrie"),
        (ROWS, {"label_names": ["a", "b", "c"]}, "no training text carries the label 'c'"),
        (ROWS[:2], {}, "two respondents or more"),
        ([*ROWS, ("six", "macro", "", "z")], {}, "a label is called 'macro'"),
    ],
)
def test_what_cannot_be_studied_is_named(tmp_path, rows, changes, message):
    options = StudyDataOptions(train_file=write(tmp_path / "a.csv", rows), test_size=0.3, **changes)
    with pytest.raises(ValueError, match=message):
        read_study(options, seed=SEED)


def test_options_of_the_shipped_corpus():
    parts = read_study(StudyDataOptions(), seed=0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 1318, "test": 330}
    with pytest.raises(ValueError, match="the shipped corpus has no second annotator"):
        StudyDataOptions(second_label_column="x")
    with pytest.raises(ValueError, match="second_annotator='x' needs another --annotator"):
        StudyDataOptions(second_annotator="x", train_file="a.csv")
    with pytest.raises(ValueError, match="second_label_column='x' stands in the rows of the first labels"):
        StudyDataOptions(second_label_column="x", annotator="y", train_file="a.csv")
    with pytest.raises(ValueError, match="test_size=1 must lie between"):
        StudyDataOptions(test_size=1)
