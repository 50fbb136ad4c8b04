"""Tables with a column of yes and no for each label."""

import logging
from collections import defaultdict

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from label_names import names

from fratrie.data.indicators import read_indicators
from fratrie.data.loading import load_labelled, load_values

WAYS = [
    ("0", "1"), (0, 1), (0.0, 1.0), ("0,0", "1.00"), (False, True), ("False", "TRUE"), ("faux", "Vrai"), ("no", "yes"),
    ("NON", "oui "), ("", "x"), (None, "X"), ("", "1"), (float("nan"), 1.0), ("", "Oui"),
    ("N", "Y"), ("Unchecked", "Checked"), ("Not selected", "Selected"), ("Non cité", "Cité"),
]  # fmt: skip


@settings(max_examples=50)
@given(
    ways=st.lists(st.sampled_from(WAYS[:9]), min_size=1, max_size=4),
    truth=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9),
)
def test_every_way_to_say_it_is_read(ways, truth):
    columns = {f"label {i}": [way[row[i]] for row in truth] for i, way in enumerate(ways)}
    problems = defaultdict(list)
    expected = [[f"label {i}" for i in range(len(ways)) if row[i]] for row in truth]
    assert read_indicators(columns, problems) == expected and not problems


@pytest.mark.parametrize("way", WAYS)
def test_one_way_in_all_columns(way):
    problems = defaultdict(list)
    cells = {"a": [way[0], way[1], way[0]], "b": [way[1]] * 3, "c": [way[0]] * 3}
    assert read_indicators(cells, problems) == [["b"], ["a", "b"], ["b"]] and not problems


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (["0", "1", "2"], "'2' in 'a', expected 0 or 1"),
        (["oui", "non", "peut-être"], "'peut-être' in 'a', expected non or oui"),
        (["0", "1", "x"], "'x' in 'a', expected 0 or 1"),
        (["x", "x", "1"], "'1' in 'a', expected nothing or x"),
        (["0", "1", ""], "an empty cell in 'a', where others say no: write 0 or 1"),
        (["1", "1", None], "an empty cell in 'a', where others say no: write 0 or 1"),
        (["true", "false", "vrai"], "'vrai' in 'a', expected false or true"),
        ([0, 1, 0.5], "0.5 in 'a', expected 0 or 1"),
        ([0, 1, [1]], "[1] in 'a', expected 0 or 1"),
        (["0", "0", "joie"], "'joie' in 'a', expected 0 or 1"),
    ],
)
def test_what_is_not_sure_is_named_by_row_and_column(cells, problem):
    problems = defaultdict(list)
    read_indicators({"a": cells, "b": [0, 1, 0]}, problems)
    assert dict(problems) == {problem: [2]}


def test_a_column_for_each_label(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("text;très triste;joie;who;date\nun;0;1;a;5\ndeux;1;1;a;5\ntrois;0;0;b;5\n", encoding="utf-8")
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match=r"no column 'labels', .*\(--label_column 'très triste' joie\)"):
        load_labelled(path)
    assert not caplog.messages
    dataset = load_labelled(path, label_column=["très triste", "joie"], group_column="who")
    assert caplog.messages == [f"{path}: columns that are not read: 'date'"]
    assert dataset.features["labels"].feature.names == ["très triste", "joie"]
    assert names(dataset) == [["joie"], ["très triste", "joie"], []]
    assert dataset["respondent"][:] == ["a", "a", "b"]
    assert names(load_labelled(path, label_column="joie")) == names(load_labelled(path, label_column=["joie"]))
    known = load_labelled(path, ["joie", "très\u00a0triste"], label_column=["très triste", "joie"])
    assert known["labels"][:] == [[0], [0, 1], []]


def test_one_label_a_row_may_be_asked_for(tmp_path):
    path = tmp_path / "a.parquet"
    Dataset.from_dict({"text": ["un", "deux"], "a": [True, False], "b": [False, True]}).to_parquet(path)
    assert names(load_labelled(path, label_column=["a", "b"], multi_label=False)) == ["a", "b"]
    Dataset.from_dict({"text": ["un", "deux"], "a": [1, 0], "b": [1, 0]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"(?s)row 1: several labels, expected one.*row 2: no label, expected one"):
        load_labelled(path, label_column=["a", "b"], multi_label=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"label_column": ["a", "c"]},
            "no column 'c'; its columns are 'text', 'a', 'b', 'names': pick one by label_c",
        ),
        ({"label_column": ["a", "a"]}, "texts, labels and speakers need a column each"),
        ({"label_column": ["a", "b"], "group_column": "b"}, "texts, labels and speakers need a column each"),
        ({"label_column": ["a", "names"]}, "rows 2, 3: 'x y' in 'names', expected 0 or 1"),
        (
            {"label_column": ["a", "b"], "label_names": ["a", "c"]},
            "label_column names a, b, the known labels are a, c: name one column",
        ),
        ({"label_column": []}, "label_column=[]: name the column"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, options, message):
    path = tmp_path / "a.csv"
    path.write_text("text,a,b,names\nun,1,0,x y\ndeux,0,1,x y\n", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_labelled(path, **options)
    assert message in str(caught.value)
    with pytest.raises(ValueError, match="a regression learns the values of one column"):
        load_values(path, label_column=["a", "b"])
