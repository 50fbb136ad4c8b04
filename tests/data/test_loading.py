"""Files of every format: what is understood, and that what is wrong is named by its row."""

import codecs
import csv
import json
import logging
import os

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from label_names import names
from python_calamine import CalamineWorkbook
from spreadsheets import write_xlsx

from fratrie.data import LABELS, AnnotationError, Segment, read_annotations, write_annotations
from fratrie.data.corpus import load_family_relations, to_dataset
from fratrie.data.loading import load_labelled, load_texts, load_texts_and_others, load_values
from fratrie.data.output_sheets import write_sheet
from fratrie.data.tables import missing_column, stream_column
from fratrie.data.text_files import TextFormat

MOODS = ["sad", "happy", "very happy"]


def make(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def make_rows(path, rows):
    """The rows in the format of the path's extension."""
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def refused(path, *pieces, load=load_labelled, **options):
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert message.startswith(str(path))
    for piece in pieces:
        assert piece in message
    return message


def make_fifo(path):
    os.mkfifo(path)
    return path


def make_loop(path):
    path.symlink_to(path)
    return path


# --- labels in every format ---


@pytest.mark.parametrize("extension", ["csv", "tsv", "json", "jsonl", "parquet", "CSV"])
def test_one_label_a_text(tmp_path, extension):
    rows = [{"text": "nan", "labels": "sad"}, {"text": "Ça, «va»\net\u2028toi ?", "labels": "happy"}]
    dataset = load_labelled(make_rows(tmp_path / f"rows.{extension}", rows))
    assert dataset.features == Features(
        text=Value("string"), row=Value("int64"), labels=ClassLabel(names=["happy", "sad"])
    )
    assert dataset["text"][:] == [row["text"] for row in rows]
    assert names(dataset) == ["sad", "happy"]


@pytest.mark.parametrize("extension", ["json", "jsonl", "parquet"])
def test_lists_of_names(tmp_path, extension):
    rows = [
        {"text": "a", "labels": ["m", "j", "m"]},
        {"text": "b", "labels": []},
        {"text": "c", "labels": ["+"]},
    ]
    dataset = load_labelled(make_rows(tmp_path / f"rows.{extension}", rows), label_names=LABELS)
    assert dataset.features["labels"] == List(ClassLabel(names=list(LABELS)))
    assert names(dataset) == [["j", "m"], [], ["+"]]


@pytest.mark.parametrize("cell", ["m, j,+", "m|j|+", "m j +", " m | j, + ", "j,m +"])
def test_names_in_one_string(tmp_path, cell):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": cell}, {"text": "b", "labels": ""}])
    assert names(load_labelled(path, label_names=LABELS)) == [["+", "j", "m"], []]
    if cell != "j,m +":
        dataset = load_labelled(path)
        assert names(dataset) == [["+", "j", "m"], []]


def test_names_with_spaces(tmp_path, caplog):
    rows = [{"text": "a", "labels": "very happy"}, {"text": "b", "labels": "sad"}]
    path = make_rows(tmp_path / "rows.csv", rows)
    assert names(load_labelled(path, label_names=MOODS)) == ["very happy", "sad"]
    assert names(load_labelled(path, multi_label=False)) == ["very happy", "sad"]
    assert not caplog.records
    assert names(load_labelled(path)) == [["happy", "very"], ["sad"]]
    assert "read as several labels each; if a name holds spaces, name all labels (label_names)" in caplog.text
    rows[1]["labels"] = "sad|very happy"
    path = make_rows(tmp_path / "rows.csv", rows)
    assert names(load_labelled(path)) == [["very happy"], ["sad", "very happy"]]
    assert names(load_labelled(path, label_names=MOODS)) == [["very happy"], ["sad", "very happy"]]


def test_known_name_with_a_comma(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "well, yes"}, {"text": "b", "labels": "no"}])
    assert names(load_labelled(path, label_names=["no", "well, yes"])) == ["well, yes", "no"]


def test_numbers_are_names_without_label_names(tmp_path):
    rows = [{"text": "a", "labels": 10}, {"text": "b", "labels": 2}, {"text": "c", "labels": -1}]
    for path in (make_rows(tmp_path / "rows.jsonl", rows), make_rows(tmp_path / "rows.csv", rows)):
        dataset = load_labelled(path)
        assert dataset.features["labels"] == ClassLabel(names=["-1", "2", "10"])
        assert names(dataset) == ["10", "2", "-1"]


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_numbers_are_positions_among_names(tmp_path, extension):
    path = make_rows(tmp_path / f"rows.{extension}", [{"text": "a", "labels": 0}, {"text": "b", "labels": 2}])
    assert names(load_labelled(path, label_names=MOODS)) == ["sad", "very happy"]
    assert names(load_labelled(path, label_names=["2", "0"])) == ["0", "2"]


def test_zero_is_a_position_as_a_number_and_a_name_as_a_string(tmp_path):
    rows = [
        {"text": "a", "labels": [0, 3]},
        {"text": "b", "labels": ["0", "i"]},
        {"text": "c", "labels": "0, j"},
    ]
    path = make_rows(tmp_path / "rows.jsonl", rows)
    assert names(load_labelled(path, label_names=LABELS)) == [["+", "i"], ["0", "i"], ["0", "j"]]
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "0"}])
    assert names(load_labelled(path, label_names=LABELS)) == ["0"]


def test_number_among_words_is_no_position(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "sad|0"}, {"text": "b", "labels": "1"}])
    refused(path, "row 2: unknown label '0'", "row 3: unknown label '1'", label_names=MOODS)
    path = make_rows(tmp_path / "rows.jsonl", [{"text": "a", "labels": ["0"]}])
    refused(path, "row 1: unknown label '0'", label_names=MOODS)


def test_positions_separated_in_a_string(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "0 2"}, {"text": "b", "labels": "1,2"}])
    assert names(load_labelled(path, label_names=MOODS)) == [["sad", "very happy"], ["happy", "very happy"]]


def test_parquet_of_a_dataset_keeps_its_label_names(tmp_path):
    corpus = load_family_relations()["test"]
    corpus.to_parquet(tmp_path / "corpus.parquet")
    dataset = load_labelled(tmp_path / "corpus.parquet")
    assert dataset.features == corpus.remove_columns("code").features
    assert dataset.to_dict() == corpus.remove_columns("code").to_dict() | {"row": list(range(1, 331))}
    reordered = load_labelled(tmp_path / "corpus.parquet", label_names=LABELS[::-1])
    assert [set(row) for row in names(reordered)] == [set(row) for row in names(corpus)]
    single = Features(text=Value("string"), labels=ClassLabel(names=MOODS))
    Dataset.from_dict({"text": ["a", "b"], "labels": [2, 0]}, features=single).to_parquet(tmp_path / "s.parquet")
    assert load_labelled(tmp_path / "s.parquet").features == single | {"row": Value("int64")}
    assert names(load_labelled(tmp_path / "s.parquet")) == ["very happy", "sad"]


def test_unlabelled_row_of_a_dataset_is_refused(tmp_path):
    single = Features(text=Value("string"), labels=ClassLabel(names=MOODS))
    Dataset.from_dict({"text": ["a", "b"], "labels": [2, -1]}, features=single).to_parquet(tmp_path / "s.parquet")
    refused(tmp_path / "s.parquet", "row 2: no label, expected one", "known labels: sad, happy, very happy")


def test_multi_label_can_be_asked_for(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "j"}, {"text": "b", "labels": "m"}])
    assert names(load_labelled(path, label_names=LABELS)) == ["j", "m"]
    assert names(load_labelled(path, label_names=LABELS, multi_label=True)) == [["j"], ["m"]]


# --- annotation codes ---


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("ji J'ai dix ans.\n& Et demi.\n\njm+, jp- Ma mère oui.\n", True),
        ("si tu veux\nai peur\n", False),
        ("jm+ Ma mère.\nMon père.\n", False),
    ],
)
def test_texts_that_begin_with_codes_are_told(tmp_path, caplog, content, told):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    load_texts(tmp_path / "a.txt")
    assert ("every line begins with what looks like an annotation code" in caplog.text) == told


SEGMENTS = [Segment("Ma mère.", "jm+, jp-", 0), Segment("Il y a «nan».", "si", 0), Segment("Bof", "jt0", 1)]


def test_annotation_file(tmp_path):
    write_annotations(SEGMENTS, tmp_path / "a.txt")
    for names_given in (None, LABELS):
        dataset = load_labelled(tmp_path / "a.txt", label_names=names_given, text_column="x", label_column="y")
        assert dataset.features == to_dataset(SEGMENTS).features
        assert dataset.to_dict() == to_dataset(read_annotations(tmp_path / "a.txt")).to_dict()


def test_annotation_file_continuation(tmp_path):
    path = make(tmp_path / "a.txt", "ji a\n& b")
    assert load_labelled(path)["text"][:] == ["a b"]
    assert load_labelled(path, continuation="inherit")["text"][:] == ["a", "b"]


def test_annotation_file_with_wrong_lines(tmp_path):
    path = make(tmp_path / "a.txt", "ji a\njx+ b")
    with pytest.raises(AnnotationError, match=r"line 2: code 'jx.': unknown letter 'x'"):
        load_labelled(path)


def test_annotation_file_beyond_the_given_names(tmp_path):
    write_annotations(SEGMENTS, tmp_path / "a.txt")
    given = [label for label in LABELS if label not in "s0"]
    refused(
        tmp_path / "a.txt",
        "line 2: unknown label 's'",
        "line 4: unknown label '0'",
        "known labels: +, -, i, j",
        label_names=given,
    )


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_column_of_codes(tmp_path, extension):
    rows = [{"text": s.text, "code": s.code.replace(", ", ","), "respondent": s.respondent} for s in SEGMENTS]
    path = make_rows(tmp_path / f"rows.{extension}", rows)
    for options in ({}, {"label_column": "code"}):
        dataset = load_labelled(path, **options)
        assert dataset["code"][:] == [s.code for s in SEGMENTS]
        assert [tuple(row) for row in names(dataset)] == [s.labels for s in SEGMENTS]
        assert dataset.features["labels"] == to_dataset(SEGMENTS).features["labels"]


def test_wrong_codes_are_all_named(tmp_path):
    rows = [{"text": "a", "code": code} for code in ("ji", "jx+", "", "jm", "jx+")]
    message = refused(make_rows(tmp_path / "rows.csv", rows), "rows 3, 6: code 'jx+': unknown letter 'x'")
    refused(make_rows(tmp_path / "rows.jsonl", [{"text": "a", "code": 3}]), "row 1: code '3': unknown letter '3'")
    assert "row 4: code ''" in message and "row 5: code 'jm': missing valence" in message


# --- groups ---


def test_groups_are_kept(tmp_path):
    rows = [
        {"text": "a", "labels": "x", "group": 4, "who": "Léa"},
        {"text": "b", "labels": "y", "group": 4, "who": "Tom"},
    ]
    path = make_rows(tmp_path / "rows.jsonl", rows)
    expected = {"text": ["a", "b"], "row": [1, 2], "respondent": [4, 4], "labels": [0, 1]}
    assert load_labelled(path).to_dict() == expected
    assert load_labelled(path, group_column="who")["respondent"][:] == ["Léa", "Tom"]
    assert load_labelled(make_rows(tmp_path / "rows.csv", rows))["respondent"][:] == ["4", "4"]
    refused(path, "no column 'speaker'", "'text', 'labels', 'group', 'who'", group_column="speaker")


def test_rows_are_those_that_a_spreadsheet_shows(tmp_path):
    write_sheet(tmp_path / "a.xlsx", {"text": ["un", "", "trois"], "labels": ["a", "", "b"]})
    write_rows = {
        "a.csv": 'text,labels\nun,a\n,\n"deux\nlignes",b\n\ntrois,a\n',
        "b.csv": "sep=;\ntext;labels\nun;a\n",
        "c.jsonl": '{"text": "un", "labels": ["a"]}\n{"text": "deux", "labels": []}\n',
        "d.txt": "jm+ Un.\n& Encore un.\n\nji Deux.\n",
        "e.csv": "text,labels,annotator\nun,a,x\nun,b,y\ndeux,b,x\n",
    }
    for name, content in write_rows.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    found = {name: load_labelled(tmp_path / name)["row"][:] for name in ("a.xlsx", *list(write_rows)[:4])}
    assert found == {"a.xlsx": [2, 4], "a.csv": [2, 4, 6], "b.csv": [2], "c.jsonl": [1, 2], "d.txt": [1, 4]}
    assert load_labelled(tmp_path / "e.csv", annotator="x")["row"][:] == [2, 4]


LINES = st.text('a,;"\n', max_size=5).map("x{}".format)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2),
    st.lists(st.sampled_from([[], ["", ""]]) | LINES.map(lambda text: [text, "a"]), max_size=5),
    st.sampled_from(["csv", "sep", "xlsx", "jsonl"]),
)
def test_a_wrong_row_is_told_as_a_spreadsheet_shows_it(tmp_path_factory, above, before, kind):
    """Behind blank rows and cells of several lines, as the writers of csv and xlsx count."""
    path = tmp_path_factory.getbasetemp() / f"shown.{'csv' if kind == 'sep' else kind}"
    header = [] if kind == "jsonl" else [*[[]] * above, ["text", "labels"]]
    rows = [*header, *before, ["", "mad"]]
    if kind == "xlsx":
        write_xlsx(path, {"a": rows})
        with CalamineWorkbook.from_path(path) as book:
            assert book.get_sheet_by_index(0).to_python(skip_empty_area=False)[len(rows) - 1] == ["", "mad"]
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            if kind == "jsonl":
                objects = [dict(zip(("text", "labels"), row, strict=True)) if any(row) else None for row in rows]
                file.writelines(json.dumps(each) + "\n" if each else "\n" for each in objects)
            else:
                file.write("sep=;\r\n" if kind == "sep" else "")
                csv.writer(file, delimiter=";").writerows(rows)
    form = TextFormat(delimiter=";" if kind == "csv" else None)
    told = f"row {len(rows)}: "
    refused(path, f"{told}the text is empty", f"{told}unknown label 'mad'", label_names=["a"], form=form)
    assert load_texts_and_others(path, form=form)[1].rows[-1] == len(rows)
    assert [row for row, text in stream_column(path, "text", form) if not text] == [len(rows)]


def test_one_column_plays_one_part(tmp_path):
    rows = [{"text": "a", "labels": "x", "group": "g"}, {"text": "b", "labels": "y", "group": "h"}]
    path = make_rows(tmp_path / "rows.csv", rows)
    refused(path, "text_column='text', label_column='text'", label_column="text")
    refused(path, "text_column='labels', label_column='labels'", text_column="labels")
    refused(path, "group_column='labels'", group_column="labels")
    with pytest.raises(ValueError, match="a column each"):
        load_values(path, group_column="text")
    assert load_labelled(path, label_column="group").column_names == ["text", "row", "labels"]


def test_missing_group_is_named(tmp_path):
    rows = [{"text": "a", "labels": "x", "respondent": "1"}, {"text": "b", "labels": "y", "respondent": ""}]
    refused(make_rows(tmp_path / "rows.csv", rows), "row 3: no respondent")
    for nobody in (None, float("nan"), " "):
        rows[1]["respondent"] = nobody
        refused(make_rows(tmp_path / "rows.jsonl", rows), "row 2: no respondent")


# --- wrong rows ---


def test_unknown_labels_are_grouped_with_the_known_ones(tmp_path):
    cells = ["sad", "mad", "happy", "mad", "odd|sad", "7"]
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": cell} for cell in cells])
    message = refused(path, label_names=MOODS)
    assert "rows 3, 5: unknown label 'mad' (did you mean 'sad'?)\n" in message
    assert "row 6: unknown label 'odd'\n" in message
    assert "row 7: unknown label '7'\n" in message
    assert "known labels: sad, happy, very happy" in message


def test_many_wrong_rows_are_counted(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "mad"}] * 50)
    refused(path, "rows 2, 3, ", "20, 21, … and 30 more: unknown label 'mad'", label_names=MOODS)


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (None, "no label, expected one"),
        ("  ", "no label, expected one"),
        (1.5, "label 1.5, expected a name or a whole number"),
        (True, "label True, expected a name or a whole number"),
        ({"a": 1}, "label {'a': 1}, expected a name or a whole number"),
        (3, "unknown label 3"),
        (-1, "unknown label -1"),
    ],
)
def test_wrong_cell_of_one_label(tmp_path, cell, problem):
    rows = [{"text": "a", "labels": "sad"}, {"text": "b", "labels": cell}]
    message = refused(make_rows(tmp_path / "rows.jsonl", rows), f"row 2: {problem}\n", label_names=MOODS)
    assert message.count("row 2") == 1


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ([0, 1, 1], "label positions [0, 1, 1] repeat"),
        ([0.0, 1.0, 1.0], "label 0.0, expected a name"),
        (["sad", None], "label None, expected a name"),
        (["sad", " "], "label '', expected a name"),
        (["sad", "mad"], "unknown label 'mad'"),
    ],
)
def test_wrong_cell_of_several_labels(tmp_path, cell, problem):
    rows = [{"text": "a", "labels": ["sad", "happy"]}, {"text": "b", "labels": cell}]
    refused(make_rows(tmp_path / "rows.jsonl", rows), f"row 2: {problem}", label_names=MOODS)


def test_several_labels_where_one_was_asked_for(tmp_path):
    rows = [{"text": "a", "labels": ["sad"]}, {"text": "b", "labels": ["sad", "happy"]}]
    path = make_rows(tmp_path / "rows.jsonl", rows)
    refused(path, "row 2: several labels, expected one", "several labels per text: no", multi_label=False)


def test_no_label_at_all(tmp_path):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": ""}])
    refused(path, "no row has a label in the column 'labels'", multi_label=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the text is empty"),
        (" \n", "the text is empty"),
        (None, "the text is None, expected a string"),
        (3, "the text is 3, expected a string"),
        ("\ud800", "the text holds half of a character"),
    ],
)
def test_wrong_text(tmp_path, caplog, text, problem):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "a", "labels": "x"}, {"text": text, "labels": "x"}, {"labels": "x"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = ["rows 2, 3: " + problem] if text is None else [f"row 2: {problem}", "row 3: the text is None"]
    refused(path, *found)
    if text is None or not str(text).strip():
        assert load_texts(path) == ["a"] and "2 text(s) are empty and not read (rows 2, 3" in caplog.text
    else:
        refused(path, f"row 2: {problem}", load=load_texts)


def test_text_and_label_problems_come_together(tmp_path):
    path = make_rows(tmp_path / "rows.jsonl", [{"text": "", "labels": ""}, {"text": "a", "labels": "x"}])
    refused(path, "row 1: the text is empty", "row 1: no label")


@pytest.mark.parametrize("label_names", [[], ["a", "a"]])
def test_label_names_must_be_a_set(tmp_path, label_names):
    path = make_rows(tmp_path / "rows.csv", [{"text": "a", "labels": "a"}])
    with pytest.raises(ValueError, match=r"label_names=.*each of them once"):
        load_labelled(path, label_names=label_names)


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_missing_column_says_which_there_are(tmp_path, extension):
    path = make_rows(tmp_path / f"rows.{extension}", [{"sentence": "a", "topic": "x"}])
    refused(path, "no column 'text'; its columns are 'sentence', 'topic': pick one by text_column")
    refused(path, "no column 'labels'", "'sentence', 'topic': pick one by label_column", text_column="sentence")
    refused(path, "no column 'text'", load=load_texts)
    assert names(load_labelled(path, text_column="sentence", label_column="topic")) == ["x"]


# --- wrong files ---


@pytest.mark.parametrize("load", [load_labelled, load_texts])
def test_missing_file_folder_and_extension(tmp_path, load):
    with pytest.raises(FileNotFoundError, match=r"absent\.csv: there is no such file"):
        load(tmp_path / "absent.csv")
    with pytest.raises(IsADirectoryError, match="is a folder, expected a file"):
        load(tmp_path)
    refused(make(tmp_path / "a.docx", "x"), "unknown extension '.docx'", ".csv, .tsv, .xlsx", load=load)


@pytest.mark.parametrize("load", [load_labelled, load_texts])
@pytest.mark.parametrize("extension", ["csv", "tsv", "json", "jsonl"])
def test_wrong_encoding_is_located(tmp_path, load, extension):
    path = make(tmp_path / f"a.{extension}", codecs.BOM_UTF8 + "text\né".encode() + b"t\xe9")
    refused(path, "line 2: byte 0xe9 at offset 11 is not UTF-8: if «Ã©té» is what it should say", load=load)


@pytest.mark.parametrize("load", [load_labelled, lambda path: list(stream_column(path, "text"))])
def test_what_windows_stored_is_shown_as_it_would_be_read(tmp_path, load):
    path = make(tmp_path / "a.csv", 'labels;text\r\na;"Ma sœur\r\nm\'énerve"\r\n'.encode("cp1252"))
    refused(path, "if «a;\"Ma sœur» is what it should say, give encoding='cp1252' (--encoding cp1252)", load=load)
    refused(make(path, b"text;labels\na\xe9\x81;b\n"), "save the file as UTF-8, or name its encoding", load=load)
    refused(make(path, b"text;labels\n\xff\x00\x01"), "save the file as UTF-8, or name its encoding", load=load)


@pytest.mark.parametrize("load", [load_labelled, load_texts])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", ""),
        ("a.csv", "text,labels\n"),
        ("a.tsv", ""),
        ("a.jsonl", "\n"),
        ("a.json", "[]"),
        ("a.jsonl", "{}"),
    ],
)
def test_file_without_rows(tmp_path, load, name, content):
    refused(make(tmp_path / name, content), "the file holds no rows", load=load)


def test_parquet_without_rows(tmp_path):
    Dataset.from_dict({"text": [], "labels": []}).to_parquet(tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "the file holds no rows")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "text,labels\na,x\nb\nc,d,e\n", "row 3: 1 fields, expected 2 as in the header: ['b']"),
        ("a.csv", 'text,labels\n"a\nb",x\n\nc,d,e\n', "row 4: 3 fields, expected 2 as in the header: ['c', 'd', 'e']"),
        ("a.csv", 'text,labels\na,x\n"b,y\n', "row 3: unexpected end of data; are all quotes closed?"),
        ("a.csv", "text,text\na,x\n", "row 1: a column name occurs twice in ['text', 'text']"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n[1]', "line 2: Expecting value"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": \n[1]',
            "line 3: no object, expected one json object per line: '[1]'",
        ),
        ("a.json", '[{"text": "a"},\n {"text"}]', "line 2: not valid json"),
        ("a.json", '[{"text": "a"}, 3]', "row 2: 3 is no object"),
        ("a.parquet", "text", "not a readable parquet file"),
    ],
)
def test_broken_file(tmp_path, name, content, problem):
    path = make(tmp_path / name, content)
    refused(path, problem)
    refused(path, problem, load=load_texts)


def test_semicolons_windows_lines_and_byte_order_mark(tmp_path):
    content = codecs.BOM_UTF8 + "text;labels\r\n«Oui, et alors»;x\r\n\r\nnon;y\r\n".encode()
    dataset = load_labelled(make(tmp_path / "a.csv", content))
    assert dataset["text"][:] == ["«Oui, et alors»", "non"]
    assert names(dataset) == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "header", "first"),
    [
        ("Un bon, très bon travail ?;codes\nUn travail calme.;a\nPénible, oui.;b\n", "codes", "a"),
        ("Un bon ; très bon travail ?,codes\nUn travail calme.,a\nPénible ; oui.,b\n", "codes", "a"),
        ("Oui, non ?\tcodes\nCalme.\ta\n", "codes", "a"),
        ('"Oui ; non",codes\n"x",a\n', "codes", "a"),
        ("sep=;\ntext;codes\nUn travail, calme.;a\n", "codes", "a"),
        ("sep=;\rtext;codes\rUn travail, calme.;a\r", "codes", "a"),
        ('\ufeff"sep=|"\r\ntext|codes\r\nUn travail; calme.|a\r\n', "codes", "a"),
        ("text,codes,,\nun,a,,\n", "codes", "a"),
    ],
)
def test_a_comma_in_a_header_fools_nobody(tmp_path, content, header, first):
    path = make(tmp_path / "a.csv", content)
    assert load_texts(path, header)[0] == first
    assert next(stream_column(path, header)) == (2, first)


def test_two_marks_that_fit_are_refused_unless_one_is_named(tmp_path):
    path = make(tmp_path / "a.csv", "a;b,text\n1;2,un\n")
    refused(path, "',' and ';' both cut all rows alike: say which one by delimiter (--delimiter)", load=load_texts)
    assert load_texts(path, form=TextFormat(delimiter=",")) == ["un"]
    pipes = make(tmp_path / "b.csv", "text|n\nun, deux|1\n")
    assert load_texts(pipes, form=TextFormat(delimiter="|")) == ["un, deux"]
    tabs = make(tmp_path / "c.csv", "text\tn\nun\t1\n")
    assert load_texts(tabs, form=TextFormat(delimiter="\\t")) == ["un"]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "latin-1", "utf-8-sig"])
@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl"])
def test_other_encodings_are_read_by_their_name(tmp_path, name, encoding):
    content = {"a.csv": "text;x\nMa mère, été;1\n", "a.txt": "Ma mère, été\n", "a.jsonl": '{"text": "Ma mère, été"}'}
    path = make(tmp_path / name, content[name].encode(encoding))
    assert load_texts(path, form=TextFormat(encoding)) == ["Ma mère, été"]
    if encoding in ("cp1252", "latin-1"):
        refused(path, "is not UTF-8", "Ma mère, été", "--encoding cp1252", load=load_texts)
    else:
        assert load_texts(path) == ["Ma mère, été"], "its mark says how it is stored"
        assert name == "a.txt" or [text for _, text in stream_column(path, "text")] == ["Ma mère, été"]


def test_annotated_files_of_other_encodings(tmp_path):
    path = make(tmp_path / "a.txt", "jm+ Ma mère.\n".encode("utf-16"))
    assert load_labelled(path, form=TextFormat("utf-16"))["text"][:] == load_labelled(path)["text"][:] == ["Ma mère."]
    refused(make(path, b"jm+ Ma m\x81re.\n"), "the file is not cp1252", form=TextFormat("cp1252"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"encoding": "utf-9"}, "utf-9"),
        ({"encoding": "hex"}, "hex"),
        ({"delimiter": ""}, "''"),
        ({"delimiter": ";;"}, ";;"),
    ],
)
def test_impossible_formats(given, message):
    with pytest.raises(ValueError, match=message):
        TextFormat(**given)


@pytest.mark.parametrize("load", [load_labelled, load_texts, load_values])
@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet", "json"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, load, extension):
    for make_it, message in ((make_fifo, "is a pipe or a device"), (make_loop, "symbolic links")):
        path = make_it(tmp_path / f"{make_it.__name__}.{extension}")
        with pytest.raises(OSError, match=message):
            load(path)
    for name, message in (("a" * 300, "File name too long"), ("a\0b", "embedded null byte")):
        with pytest.raises(OSError, match=message):
            load(tmp_path / name)
    with pytest.raises(ValueError, match="an empty path names no file"):
        load("")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", f'{{"text": "a", "x": {DEEP}}}', "line 1: lists or objects are nested too deeply"),
        ("a.json", f'[{{"text": {DEEP}}}]', "nested too deeply"),
        (
            "a.jsonl",
            f'{{"text": "a", "labels": {"[" * 500 + "]" * 500}}}',
            "line 1: lists or objects are nested too deeply",
        ),
        ("a.jsonl", '{"text": "a", "x": ' + '{"a": ' * 300 + "1" + "}" * 301, "nested too deeply"),
        ("a.jsonl", '{"text": "a", "text": "b"}', "line 1: the key 'text' occurs twice"),
        ("a.jsonl", f'{{"text": "a", "x": {"9" * 5000}}}', "line 1: Exceeds the limit"),
        ("a.csv", "text\0,labels\na,x\n", "line 1: a NUL, which no text holds"),
        ("a.txt", "un\ndeux\0\n", "line 2: a NUL, which no text holds"),
        ("a.csv", "text,,\na,b,c\n", "several columns with content have no name"),
        ("a.csv", "text,n\n" + "a\n" * 3000, "… and 2,980 more"),
        ("a.jsonl", '{"text": "a"}\n' + "[1]\n" * 3000, "… and 2,980 more"),
    ],
)
def test_hostile_content_gets_a_message(tmp_path, name, content, problem):
    message = refused(make(tmp_path / name, content), problem, load=load_texts)
    assert len(message) < 9000


def test_thousands_of_wrong_annotations_are_summed_up(tmp_path):
    with pytest.raises(AnnotationError) as caught:
        load_labelled(make(tmp_path / "a.txt", "jx+ a\n" * 3000))
    assert len(caught.value.problems) == 3000 and "… and 2,980 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 22


def test_a_cell_may_hold_a_book(tmp_path):
    book = "mot " * 100_000
    assert load_texts(make(tmp_path / "a.csv", f"text,n\n{book},1\n")) == [book]


def test_parquet_that_is_not_as_expected(tmp_path):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    refused(tmp_path / "twice.parquet", "a column name occurs twice in ['text', 'text']", load=load_texts)
    schema = pyarrow.schema([("text", pyarrow.string())], metadata={"huggingface": '{"info": {"features": 3}}'})
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}, schema=schema), tmp_path / "features.parquet")
    refused(tmp_path / "features.parquet", "its description by `datasets` cannot be read", load=load_texts)
    data = (tmp_path / "twice.parquet").read_bytes()
    refused(make(tmp_path / "cut.parquet", data[: len(data) // 2]), "not a readable parquet file", load=load_texts)


def test_speakers_that_are_huge_numbers_are_names(tmp_path):
    rows = [{"text": "a", "labels": "x", "group": 10**30}, {"text": "b", "labels": "y", "group": 3}]
    assert load_labelled(make_rows(tmp_path / "a.jsonl", rows))["respondent"][:] == [str(10**30), "3"]


def test_speakers_with_half_a_character_are_kept_apart(tmp_path):
    lines = [
        json.dumps({"text": text, "labels": "x", "group": who}) for text, who in (("a", "\ud800"), ("b", "\ud801"))
    ]
    path = make(tmp_path / "rows.jsonl", "\n".join(lines))
    assert load_labelled(path)["respondent"][:] == ["\\ud800", "\\ud801"]


def test_options_are_named_by_their_name():
    assert str(missing_column("a.csv", "x", ["y"], "text_column")).endswith("pick one by text_column (--text_column)")
    with pytest.raises(AssertionError):
        missing_column("a.csv", "x", ["y"], "--text_column")


@pytest.mark.parametrize("cell", ["high", "nan", "inf", None, True, "2,5", 10**400, "-4e38"])
def test_a_value_is_a_finite_number(tmp_path, cell):
    rows = [{"text": "a", "labels": 1.5}, {"text": "b", "labels": cell}]
    path = make_rows(tmp_path / "a.jsonl", rows)
    refused(path, "row 2: ", "expected a number in 'labels' for regression", load=load_values)
    assert load_values(make_rows(tmp_path / "b.jsonl", rows[:1]))["labels"][:] == [1.5]


def test_rows_of_empty_cells_are_blank(tmp_path):
    """Excel writes them for rows that once held something; a spreadsheet's are left out, too."""
    path = make(tmp_path / "a.csv", "text;labels;;\r\nun;a;;\r\n;;;\r\ndeux;b;;\r\n;;;\r\n")
    assert load_labelled(path)["text"][:] == [text for _, text in stream_column(path, "text")] == ["un", "deux"]
    path = make(tmp_path / "b.csv", 'text\nun\n""\n')
    assert list(stream_column(path, "text")) == [(2, "un"), (3, "")], "the only cell of a row may be empty"


def test_values_with_decimal_commas(tmp_path):
    path = tmp_path / "a.csv"
    assert load_values(make(path, "text;labels\na;3,5\nb;2\nc;-1,25\n"))["labels"][:] == [3.5, 2, -1.25]
    for wrong in ("1,234", "3,5\nc;2.5"):
        make(path, f"text;labels\na;2\nb;{wrong}\n")
        refused(path, "row 3: ", "expected a number in 'labels' for regression", load=load_values)


def test_json_lines_under_the_name_json(tmp_path):
    path = make(tmp_path / "a.json", '{"text": "a", "labels": "x"}\n\n{"text": "b", "labels": "y"}\n')
    assert load_labelled(path)["text"][:] == ["a", "b"]


# --- texts for prediction ---


def test_lines_of_text(tmp_path, caplog):
    path = make(tmp_path / "a.txt", codecs.BOM_UTF8 + "Un\u2028deux\r\n\r\n  trois\n \n".encode())
    with caplog.at_level(logging.WARNING):
        assert load_texts(path) == ["Un\u2028deux", "  trois"]
    assert "skipped 2 blank line(s)" in caplog.text
    caplog.clear()
    assert load_texts(make(path, "a\nb\n")) == ["a", "b"]
    assert not caplog.records


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_text_file(tmp_path, content):
    refused(make(tmp_path / "a.txt", content), "the file is empty, expected one sentence per line", load=load_texts)


def test_text_file_of_another_encoding(tmp_path):
    refused(make(tmp_path / "a.txt", b"a\n\xe9"), "line 2: byte 0xe9 at offset 2 is not UTF-8", load=load_texts)


def test_one_line_emoji_and_ten_thousand_words(tmp_path):
    long = "mot " * 10_000
    assert load_texts(make(tmp_path / "a.txt", "😀")) == ["😀"]
    assert load_texts(make_rows(tmp_path / "a.csv", [{"text": long}, {"text": "😀"}])) == [long, "😀"]


@pytest.mark.parametrize("extension", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_texts_of_a_column(tmp_path, extension):
    rows = [{"sentence": "null", "n": "1"}, {"sentence": 'dit "oui"\tpuis\u0085 non\n', "n": "2"}]
    path = make_rows(tmp_path / f"a.{extension}", rows)
    assert load_texts(path, text_column="sentence") == [row["sentence"] for row in rows]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)


@settings(deadline=None)
@given(
    st.lists(st.tuples(texts, st.sets(st.sampled_from(LABELS))), min_size=1, max_size=6),
    st.sampled_from(["csv", "tsv", "json", "jsonl", "parquet"]),
)
def test_any_rows_come_back(tmp_path_factory, rows, extension):
    path = tmp_path_factory.getbasetemp() / f"any.{extension}"
    listed = extension not in ("csv", "tsv")
    cells = [sorted(labels) if listed else "|".join(labels) for _, labels in rows]
    make_rows(path, [{"text": text, "labels": cell} for (text, _), cell in zip(rows, cells, strict=True)])
    dataset = load_labelled(path, label_names=LABELS, multi_label=True)
    assert dataset["text"][:] == [text for text, _ in rows]
    assert [set(row) for row in names(dataset)] == [labels for _, labels in rows]


def test_labels_in_two_ways_are_refused(tmp_path):
    """One comma in the column ends the splitting at spaces."""
    cells = ["anger sister", "love brother", "anger, brother", "love", "sister"]
    path = make_rows(tmp_path / "a.csv", [{"text": "t", "labels": cell} for cell in cells])
    refused(path, "row 2: the label 'anger sister' is made of others: separate labels in one way")


@pytest.mark.parametrize("mark", [";", "; ", ",", "|", " | "])
def test_marks_between_labels(tmp_path, mark):
    path = make_rows(
        tmp_path / "a.jsonl", [{"text": "t", "labels": cell} for cell in (f"love{mark}sister", "very happy")]
    )
    dataset = load_labelled(path)
    assert dataset.features["labels"].feature.names == ["love", "sister", "very happy"]
    assert dataset["labels"] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("cells", "options", "told"),
    [
        (["a b", "a,c"], {}, ["separated by ',' (row 2: 'a,c')", "one label each, 'a b' (row 1): where several"]),
        (
            ["a b", "c, d", "c; d"],
            {},
            ["by ',' (row 2: 'c, d') and ';' (row 3: 'c; d')", "one label each, 'a b' (row 1)"],
        ),
        (["beau père", "beau père, mère"], {}, ["separated by ',' (row 2: 'beau père, mère')"]),
        (["a b", "a,b"], {"multi_label": False}, ["each cell is one label, also one with ',' (row 2: 'a,b')"]),
        (["a b", "a,b"], {"label_names": ["a", "b"]}, []),
        ([["a b"], ["a,b"]], {}, []),
    ],
)
def test_how_labels_are_separated_is_told(tmp_path, caplog, cells, options, told):
    rows = [{"text": f"t{i}", "labels": cell} for i, cell in enumerate(cells)]
    path = make_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.INFO):
        load_labelled(path, **options)
    assert len(caplog.records) == len(told)
    for record, part in zip(caplog.records, told, strict=True):
        assert part in record.getMessage()


def test_labels_that_differ_in_case_are_told(tmp_path, caplog):
    load_labelled(
        make_rows(tmp_path / "a.csv", [{"text": "t", "labels": cell} for cell in ("Anger love", "anger", "love")])
    )
    assert "labels that differ in case alone are different labels: 'Anger' and 'anger'" in caplog.text


def test_a_csv_with_tabs(tmp_path):
    assert load_texts(make(tmp_path / "a.csv", "id\ttext\n1\tma mère, oui\n")) == ["ma mère, oui"]
