import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spreadsheets import Raw, write_ods, write_xlsx

from fratrie.data.loading import load_labelled, load_texts
from fratrie.data.sheets import cell_text, read_sheet
from fratrie.data.tables import read_table, stream_column
from fratrie.data.text_files import TextFormat

ROWS = [
    ["text", "labels", "respondent", None],
    ["Ma mère, elle dit : « oui »", 0, 7, None],
    [None, None, None, None],
    ["Mon père", "p", 8, None],
]


@pytest.mark.parametrize(("kind", "write"), [("xlsx", write_xlsx), ("ods", write_ods)])
def test_a_sheet_is_read_as_a_csv_of_it_would_be(tmp_path, kind, write):
    path = write(tmp_path / f"mine.{kind}", {"Feuille 1": ROWS, "vide": []})
    columns = {"text": [ROWS[1][0], ROWS[3][0]], "labels": ["0", "p"], "respondent": ["7", "8"]}
    assert read_table(path).columns == columns
    assert load_texts(path) == columns["text"]
    assert list(stream_column(path, "text")) == list(zip([2, 4], columns["text"], strict=True))
    assert load_labelled(path, label_names=["0", "p"])["labels"][:] == [0, 1]


def test_blank_lines_above_and_columns_without_a_name(tmp_path):
    path = write_xlsx(tmp_path / "a.xlsx", {"a": [[None], [None, "text"], [None, "un"], [None, "deux"]]})
    assert read_table(path).columns == {"text": ["un", "deux"]}
    path = write_xlsx(tmp_path / "b.xlsx", {"a": [[None], ["text", None, None], ["un", "x", "y"]]})
    with pytest.raises(ValueError, match=r"row 2: several columns with content have no name"):
        read_table(path)
    path = write_xlsx(tmp_path / "c.xlsx", {"a": [["text", "text"], ["un", "deux"]]})
    with pytest.raises(ValueError, match="a column name occurs twice"):
        read_table(path)


def test_the_sheet_is_named_where_several_have_content(tmp_path):
    path = write_xlsx(tmp_path / "two.xlsx", {"un": [["text"], ["a"]], "deux": [["text"], ["b"]]})
    with pytest.raises(ValueError, match=r"several sheets have content, un, deux: pick one by sheet \(--sheet\)"):
        read_table(path)
    assert load_texts(path, form=TextFormat(sheet="deux")) == ["b"]
    with pytest.raises(ValueError, match="no sheet 'trois'; there are 'un', 'deux'"):
        read_table(path, TextFormat(sheet="trois"))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (3.0, "3"),
        (-0.0, "0"),
        (1e15, "1000000000000000"),
        (0.1, "0.1"),
        (True, "TRUE"),
        ("", ""),
        ("=1+1", "=1+1"),
        (datetime.datetime(2024, 5, 6), "2024-05-06"),
        (datetime.datetime(2024, 5, 6, 7, 8), "2024-05-06T07:08:00"),
        (datetime.date(2024, 5, 6), "2024-05-06"),
        (datetime.time(7, 8), "07:08:00"),
    ],
)
def test_cells_as_text(cell, text):
    assert cell_text(cell) == text


@pytest.mark.parametrize("content", [b"", b"text,labels\n", b"PK\x03\x04" + bytes(60)])
@pytest.mark.parametrize("kind", ["xlsx", "xls", "ods"])
def test_what_is_no_spreadsheet(tmp_path, kind, content):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a readable spreadsheet"):
        read_table(path)


@pytest.mark.parametrize("faulty", ['t="e"><v>#N/A</v>', "><f>B7</f>", "><f>B7</f><v/>"])
def test_cells_without_a_value_of_an_xlsx_are_no_empty_ones(tmp_path, faulty):
    rows = [["text", "labels"], ["un", "a"], ["deux", Raw(faulty)]]
    path = write_xlsx(tmp_path / "a.xlsx", {"notes": [], "données": rows})
    with pytest.raises(ValueError, match=r"cells of the sheet 'données' .* never computed, B3: mend them"):
        read_table(path)
    rows[2][1] = Raw('t="str"><f>""</f><v></v>')  # computed, and empty
    assert read_table(write_xlsx(path, {"notes": [[Raw(faulty)]], "a": rows}), TextFormat(sheet="a")).columns == {
        "text": ["un", "deux"],
        "labels": ["a", ""],
    }


@pytest.mark.parametrize(
    "faulty",
    ['office:value-type="string" calcext:value-type="error"><text:p>#N/A</text:p>', 'table:formula="of:=[.B7]">'],
)
def test_cells_without_a_value_of_an_ods_are_no_empty_ones(tmp_path, faulty):
    path = write_ods(tmp_path / "a.ods", {"a": [["text", "labels"], ["un", "a"], ["deux", Raw(faulty)]]})
    with pytest.raises(ValueError, match=r"never computed, (#N/A|of:=\[.B7\]): mend them"):
        read_table(path)


def test_an_empty_book(tmp_path):
    path = write_xlsx(tmp_path / "a.xlsx", {"a": []})
    with pytest.raises(ValueError, match="holds no rows"):
        read_table(path)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXTS.filter(bool), TEXTS), min_size=1, max_size=5))
def test_every_text_comes_back(tmp_path_factory, rows):
    path = write_xlsx(tmp_path_factory.mktemp("sheets") / "a.xlsx", {"a": [["text", "x"], *rows]})
    assert [row for _, row in read_sheet(path)[1:]] == [list(row) for row in rows]
