"""Files of Stata and SPSS, which pyreadstat writes here."""

import builtins
import datetime

import pandas
import pyreadstat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_names import names

from fratrie.data.loading import load_labelled, load_texts
from fratrie.data.tables import read_table, stream_column
from fratrie.data.text_files import TextFormat

WRITERS = {
    "dta": pyreadstat.write_dta,
    "sav": pyreadstat.write_sav,
    "zsav": lambda *args, **options: pyreadstat.write_sav(*args, compress=True, **options),
}
YES_NO = {0: "non", 1: "oui"}


@pytest.mark.parametrize("kind", WRITERS)
def test_value_labels_are_the_text_of_cells(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    columns = {
        "text": ["Ma sœur — « oui »", "Mon père", "日本"],
        "joie": [1, 0, 0],
        "colère": [0, 1, 1],
        "qui": [7, 8, 8],
        "jour": [datetime.date(2024, 5, 1), None, datetime.date(1950, 1, 2)],
        "quand": [datetime.datetime(2024, 5, 1, 12, 30), None, datetime.datetime(2024, 5, 1)],
        "note": [1.5, None, 3.0],
    }
    labels = {"joie": YES_NO, "colère": YES_NO, "qui": {8: "Ève"}}
    WRITERS[kind](pandas.DataFrame(columns), path, variable_value_labels=labels)
    assert read_table(path).columns == {
        "text": columns["text"],
        "joie": ["oui", "non", "non"],
        "colère": ["non", "oui", "oui"],
        "qui": ["7", "Ève", "Ève"],
        "jour": ["2024-05-01", "", "1950-01-02"],
        "quand": ["2024-05-01T12:30:00", "", "2024-05-01"],
        "note": ["1.5", "", "3"],
    }
    dataset = load_labelled(path, label_column=["joie", "colère"], group_column="qui")
    assert names(dataset) == [["joie"], ["colère"], ["colère"]] and dataset["respondent"][:] == ["7", "Ève", "Ève"]
    assert load_texts(path) == columns["text"]
    assert list(stream_column(path, "text")) == list(enumerate(columns["text"], start=1))


def test_missing_values_that_users_define_are_empty(tmp_path):
    data = pandas.DataFrame({"text": ["a", "b", "c"], "labels": [1, 2, 9]})
    labels = {"labels": {1: "joie", 2: "peur", 9: "sans réponse"}}
    pyreadstat.write_sav(data, tmp_path / "a.sav", variable_value_labels=labels, missing_ranges={"labels": [9]})
    assert read_table(tmp_path / "a.sav").columns["labels"] == ["joie", "peur", ""]
    data["labels"] = [1, 2, "a"]
    pyreadstat.write_dta(data, tmp_path / "a.dta", missing_user_values={"labels": ["a"]})
    assert read_table(tmp_path / "a.dta").columns["labels"] == ["1", "2", ""]
    with pytest.raises(ValueError, match=r"row 3: no label, expected one"):
        load_labelled(tmp_path / "a.sav", multi_label=False)


def test_portable_files(tmp_path):
    path = tmp_path / "a.por"
    pyreadstat.write_por(pandas.DataFrame({"text": ["un", "deux"], "joie": [0, 1], "peur": [1, 0]}), path)
    dataset = load_labelled(path, text_column="TEXT", label_column=["JOIE", "PEUR"])
    assert names(dataset) == [["PEUR"], ["JOIE"]]


def test_old_files_that_do_not_name_their_encoding(tmp_path):
    path = tmp_path / "a.dta"
    pyreadstat.write_dta(pandas.DataFrame({"text": ["caf# noir", "deux"]}), path, version=10)
    path.write_bytes(path.read_bytes().replace(b"caf#", "café".encode("cp1252")))
    assert load_texts(path) == load_texts(path, form=TextFormat("latin-1")) == ["café noir", "deux"]
    path.write_bytes(path.read_bytes().replace("café".encode("cp1252"), "café".encode("cp850")))
    assert load_texts(path, form=TextFormat("cp850")) == ["café noir", "deux"]


@pytest.mark.parametrize("kind", ["dta", "sav", "zsav", "por"])
def test_what_is_no_such_file_is_refused(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"text;labels\nun;a\n" * 40)
    with pytest.raises(ValueError, match=rf"a\.{kind}: not a readable file of Stata or SPSS"):
        read_table(path)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name == "pyreadstat":
            raise ModuleNotFoundError("No module named 'pyreadstat'", name=name)
        return real(name, *args, **options)

    (tmp_path / "a.sav").write_bytes(b"x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'fratrie\[statistics\]'"):
        read_table(tmp_path / "a.sav")


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12).map(str.strip)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(TEXT, st.integers(-99, 99)), min_size=1, max_size=6), kind=st.sampled_from(list(WRITERS))
)
def test_any_rows_come_back(tmp_path_factory, rows, kind):
    path = tmp_path_factory.mktemp("any") / f"a.{kind}"
    WRITERS[kind](pandas.DataFrame(rows, columns=["text", "n"]), path)
    assert read_table(path).columns == {"text": [text for text, _ in rows], "n": [str(number) for _, number in rows]}
