import errno
import gc
import json
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from label_names import names
from python_calamine import CalamineWorkbook

from fratrie.data.loading import load_labelled, load_texts_and_others
from fratrie.data.output_sheets import check_sheet
from fratrie.data.output_tables import LabelledTexts, Output, labelling_interface, output_format
from fratrie.data.tables import Table, read_table

NAMES = ["+", "beau-père", "très content", "a,b", "text"]
KINDS = ["csv", "xlsx", "jsonl", "parquet"]
# U+FFFE and U+FFFF stand in no xml, a NUL in no text file.
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufffe\uffff"), max_size=20)
HOSTILE = [
    "=1+1",
    '=cmd|"/C calc"!A0',
    "@a",
    "-3",
    "+x",
    "http://a.b",
    "<r>a</r>",
    "<r><t>&</t></r>",
    "_x0041_",
    " a\r\n",
]
TEXTS = (CELLS | st.sampled_from(HOSTILE)).filter(str.strip)


def table_of(rows, several=True, **more):
    """Rows of a text and the places of its labels; scores are no matter."""
    labels = [[NAMES[place] for place in sorted(places)] for _, places in rows]
    scores = np.linspace(0, 1, len(rows) * len(NAMES)).reshape(len(rows), -1)
    return LabelledTexts([text for text, _ in rows], NAMES, scores, labels, several, **more)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sets(st.integers(0, 4)), CELLS), min_size=1, max_size=4), st.booleans())
@example([(text, {0, 2}, text) for text in HOSTILE], False)
def test_any_texts_and_labels_come_back(tmp_path_factory, rows, excel):
    table = table_of([row[:2] for row in rows], others={"note": [row[2] for row in rows]})
    for kind in KINDS:
        path = tmp_path_factory.getbasetemp() / f"any.{kind}"
        Output(kind, excel and kind == "csv").write(path, table)
        assert Output(kind).is_earlier(path, NAMES)
        texts, others = load_texts_and_others(path)
        assert texts == table.texts and others.columns["note"] == table.others["note"], kind
        dataset = load_labelled(path, NAMES, multi_label=True)
        assert dataset["text"][:] == table.texts
        assert names(dataset) == table.labels, kind


def test_what_is_for_a_csv_is_refused_elsewhere():
    for excel in (True, False):
        with pytest.raises(ValueError, match=r"are for \.csv: xlsx needs neither"):
            Output("xlsx", excel, not excel)


@pytest.mark.parametrize("kind", KINDS)
def test_one_label_a_text_comes_back_as_such(tmp_path, kind):
    table = table_of([("un", {1}), ("deux", {2}), ("trois", {1})], several=False)
    Output(kind).write(tmp_path / f"a.{kind}", table)
    assert names(load_labelled(tmp_path / f"a.{kind}", NAMES)) == ["beau-père", "très content", "beau-père"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_labels_need_not_be_named_again(tmp_path, kind):
    table = LabelledTexts(["a", "b"], ["f", "m", "-"], np.zeros((2, 3)), [["-", "m"], []])
    Output(kind).write(tmp_path / f"a.{kind}", table)
    assert names(load_labelled(tmp_path / f"a.{kind}")) == [["-", "m"], []]


SAID = LabelledTexts(
    ["Ma mère m'aime.", None, "=1+1"], ["m", "+"], np.array([[0.25, 0.75], [np.nan, np.nan], [1 / 3, 1e-9]]),
    [["+"], [], []], notes={"uncertainty": [0.5, None, 0.25]}, others={"id": ["007", "8", "9"], "labels": [3, 2.5, 1]},
)  # fmt: skip


def written(tmp_path, kind, table=SAID):
    path = tmp_path / f"said.{kind}"
    Output(kind).write(path, table)
    return path


def test_a_spreadsheet_holds_numbers_and_no_formula(tmp_path):
    path = written(tmp_path, "xlsx")
    header, *rows = CalamineWorkbook.from_path(path).get_sheet_by_index(0).to_python()
    assert header == ["text", "labels", "m", "+", "uncertainty", "id", "input_labels"]
    assert rows == [
        ["Ma mère m'aime.", "+", 0.25, 0.75, 0.5, "007", 3.0],
        ["", "", "", "", "", "8", 2.5],
        ["=1+1", "", 0.333333, 1e-9, 0.25, "9", 1.0],
    ]
    with zipfile.ZipFile(path) as archive:
        sheet = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    kinds = [part.tag.rpartition("}")[2] for part in sheet.iter()]
    assert {"pane", "autoFilter"} <= {*kinds} and not {"f", "hyperlink"} & {*kinds}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library leaves its parts open then
def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("xlsxwriter.workbook.ZipFile", full)
    with pytest.raises(OSError, match=r"cannot write .*said\.xlsx: No space left on device"):
        written(tmp_path, "xlsx")
    assert not list(tmp_path.iterdir())
    gc.collect()


def test_parquet_has_types(tmp_path):
    schema = pyarrow.parquet.read_schema(written(tmp_path, "parquet"))
    assert {name: str(schema.field(name).type) for name in schema.names} == {
        "text": "string",
        "labels": "list<element: string>",
        "m": "double",
        "+": "double",
        "uncertainty": "double",
        "id": "string",
        "input_labels": "double",
    }
    one = LabelledTexts([""], ["a"], np.full((1, 1), np.nan), [[]], False, others={"x": [{"b": {}}], "y": [b"c"]})
    table = pyarrow.parquet.read_table(written(tmp_path, "parquet", one))
    assert table.to_pylist() == [{"text": "", "labels": None, "a": None, "x": '{"b": {}}', "y": b"c"}]


def test_json_lines_keep_the_scores_together_and_half_characters(tmp_path):
    first, second, _ = written(tmp_path, "jsonl").read_text("utf-8").splitlines()
    scores = {"m": 0.25, "+": 0.75}
    tail = {"uncertainty": 0.5, "id": "007", "input_labels": 3}
    assert json.loads(first) == {"text": "Ma mère m'aime.", "labels": ["+"], "scores": scores, **tail}
    assert json.loads(second)["scores"] == {"m": None, "+": None}
    odd = LabelledTexts(["a"], ["m"], np.ones((1, 1)), [["m"]], others={"x": ["\\\ud800"]})
    assert json.loads(written(tmp_path, "jsonl", odd).read_text("utf-8"))["x"] == "\\\ud800"


def test_doccano_gets_the_texts_with_their_labels(tmp_path):
    path = written(tmp_path, "doccano")
    first, second = map(json.loads, path.read_text("utf-8").splitlines())
    assert first["label"] == ["+"] and first["input_labels"] == 3 and second["label"] == []
    assert names(load_labelled(path.rename(tmp_path / "said.jsonl"))) == [["+"], []]
    assert [first["text"], second["text"]] == ["Ma mère m'aime.", "=1+1"]


def test_label_studio_gets_tasks_with_predictions(tmp_path):
    first, second = json.loads(written(tmp_path, "label_studio").read_text("utf-8"))
    assert first["data"] == {
        "text": "Ma mère m'aime.", "scores": {"m": 0.25, "+": 0.75}, "uncertainty": 0.5, "id": "007", "input_labels": 3
    }  # fmt: skip
    (prediction,) = first["predictions"]
    assert prediction["score"] == 0.75 and second["predictions"][0]["score"] == pytest.approx(2 / 3, abs=1e-6)
    (result,) = prediction["result"]
    view = ElementTree.fromstring(labelling_interface(["+", '"<a>&"'], several=True))
    text, choices = view
    assert (result["from_name"], result["to_name"]) == (choices.get("name"), text.get("name"))
    assert text.get("value") == "$text" and choices.get("choice") == "multiple"
    assert [choice.get("value") for choice in choices] == ["+", '"<a>&"']
    assert (result["type"], result["value"]) == ("choices", {"choices": ["+"]})
    assert second["predictions"][0]["result"] == []


@pytest.mark.parametrize("kind", [*KINDS, "doccano", "label_studio"])
def test_an_earlier_output_is_known_by_its_labels(tmp_path, kind):
    path, output = written(tmp_path, kind), Output(kind)
    assert output.is_earlier(path, ["m", "+"])
    assert not output.is_earlier(path, ["m", "p"]) and not output.is_earlier(path, ["m", "+", "-"])
    for other in (
        b"",
        b"[]",
        b"{}",
        b"[\n3\n]",
        b"text,labels\n",
        b"\xff\xfe\0",
        b'{"text": 1, "labels": 2, "scores": 3}',
    ):
        path.write_bytes(other)
        assert not output.is_earlier(path, ["m", "+"])


@pytest.mark.parametrize("kind", [*KINDS, "doccano"])
def test_absent_numbers_are_empty_and_json_is_json(tmp_path, kind):
    others = {"n": [float("nan"), float("inf")], "nested": [{"n": [float("nan")]}, None]}
    table = LabelledTexts(["a", "b"], ["m"], np.ones((2, 1)), [["m"], ["m"]], others=others)
    path = written(tmp_path, kind, table)
    if kind in ("jsonl", "doccano"):
        first, second = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
        assert first["n"] is None and first["nested"] == {"n": [None]} and second["n"] == "inf"
    elif kind != "parquet":
        columns = read_table(path).columns
        assert columns["n"] == ["", "inf"] and columns["nested"] == ['{"n": [null]}', ""]


@pytest.mark.parametrize("cell", ["=1", "+", "-a", "@a", "\t=1", "\n=1", "\uff1d1"])
def test_cells_that_a_spreadsheet_would_calculate_stand_behind_an_apostrophe(tmp_path, cell):
    table = LabelledTexts([cell], ["m"], np.ones((1, 1)), [["m"]], others={"n": [-3]})
    Output("csv", escape_formulas=True).write(tmp_path / "a.csv", table)
    assert read_table(tmp_path / "a.csv").columns == {"text": [f"'{cell}"], "labels": ["m"], "m": ["1.0"], "n": ["-3"]}


def test_escaped_labels_come_back_as_they_were(tmp_path):
    given = [["+", "j"], ["-"], ["j"], ["+"]]
    table = LabelledTexts(list("abcd"), ["+", "-", "j"], np.zeros((4, 3)), given)
    Output("csv", escape_formulas=True).write(tmp_path / "a.csv", table)
    assert names(load_labelled(tmp_path / "a.csv")) == given


def test_real_values_are_a_column(tmp_path):
    table = LabelledTexts(["a"], ["value"], np.array([[12345678.0]]), None, others={"value": ["x"]})
    assert read_table(written(tmp_path, "csv", table)).columns == {
        "text": ["a"], "value": ["12345700.0"], "input_value": ["x"]
    }  # fmt: skip
    assert json.loads(written(tmp_path, "jsonl", table).read_text()) == {
        "text": "a", "value": 12345700.0, "input_value": "x"
    }  # fmt: skip


def test_what_a_sheet_cannot_hold_is_refused(monkeypatch):
    path = Path("a.xlsx")
    with pytest.raises(ValueError, match=r"row 1: the cell in 'text' has 32,768 characters, .* 32,767 that Excel"):
        check_sheet(Table(path, {"text": ["😀" * 16_384]}))
    check_sheet(Table(path, {"text": ["a" * 32_767]}))
    with pytest.raises(ValueError, match="row 4: the cell in 'text' has 32,768 characters"):
        check_sheet(Table(path, {"text": ["a", "a" * 32_768]}, rows=[2, 4]))
    with pytest.raises(ValueError, match=r"the header: the cell in 'aaa.* has 32,768 characters"):
        check_sheet(Table(path, {"a" * 32_768: ["a"]}))
    monkeypatch.setattr("fratrie.data.output_sheets._ROWS", 3)
    check_sheet(Table(path, {"text": ["a", "b"]}))
    with pytest.raises(ValueError, match=r"3 rows of 1 columns are more .*\.csv, \.jsonl or \.parquet"):
        check_sheet(Table(path, {"text": ["a", "b", "c"]}))


@pytest.mark.parametrize(
    ("name", "asked", "kind"),
    [("a.csv", "auto", "csv"), ("a.XLSX", "auto", "xlsx"), ("a.jsonl", "doccano", "doccano")],
)
def test_the_name_or_the_user_says_the_format(tmp_path, name, asked, kind):
    assert output_format(tmp_path / name, asked) == kind


@pytest.mark.parametrize(
    ("name", "asked", "ends"),
    [
        ("a.json", "auto", ".csv or .xlsx or .jsonl or .parquet"),
        ("a.csv", "doccano", ".jsonl"),
        ("a", "label_studio", ".json"),
    ],
)
def test_another_name_is_refused(tmp_path, name, asked, ends):
    with pytest.raises(ValueError, match=f"cannot write .*{name}: give the output a name that ends with {ends}$"):
        output_format(tmp_path / name, asked)
