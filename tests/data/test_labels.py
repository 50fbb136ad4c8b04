"""Cells of labels as spreadsheets, pandas, json, numpy, doccano and Label Studio write them."""

import csv
import json
import logging

import pytest
from label_names import names

from fratrie.data.labels import plain_name
from fratrie.data.loading import load_labelled

COMPOSED, DECOMPOSED = "col\u00e8re", "cole\u0300re"


def make_csv(path, cells):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", "labels"], *([f"texte {i}", cell] for i, cell in enumerate(cells))])
    return path


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["['joie', 'fierté']", "['colère']", "[]"], [["fierté", "joie"], ["colère"], []]),
        (['["joie", "fiert\\u00e9"]', '["colère"]', ""], [["fierté", "joie"], ["colère"], []]),
        (['{"choices":["joie","très bon"]}', "un peu triste"], [["joie", "très bon"], ["un peu triste"]]),
        (["{'choices': ['joie', 'peur']}", '{"choices":"colère"}'], [["joie", "peur"], ["colère"]]),
        (["['joie' 'peur']", "['colère']"], [["joie", "peur"], ["colère"]]),
        (["[np.str_('joie'), np.str_('peur')]", "joie"], [["joie", "peur"], ["joie"]]),
        (["('joie', 'peur')", "('joie',)", "(autre)"], [["joie", "peur"], ["joie"], ["(autre)"]]),
        (["{'joie', 'peur'}", "{'joie'}"], [["joie", "peur"], ["joie"]]),
        (["joie#fierté", "colère", "fierté#joie"], [["fierté", "joie"], ["colère"], ["fierté", "joie"]]),
        (["très bon#joie", "un peu"], [["joie", "très bon"], ["un peu"]]),
        (["C#", "#mot"], ["C#", "#mot"]),
        (["['l\\'été', \"d'hiver\"]", "['l\\'été']"], [["d'hiver", "l'été"], ["l'été"]]),
    ],
)
def test_cells_that_are_read_for_sure(tmp_path, cells, expected):
    assert names(load_labelled(make_csv(tmp_path / "a.csv", cells))) == expected


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (["[joie, peur]", "colère"], "row 2: the cell '[joie, peur]' looks like a list, but not of names in quotes"),
        (["[['joie'], ['peur']]", "a"], "row 2: the cell \"[['joie'], ['peur']]\" looks like a list"),
        (['{"joie": 1, "peur": 0}', "a"], 'row 2: the cell \'{"joie": 1, "peur": 0}\' looks like a list'),
        (["[" * 5000 + "]", "a"], "row 2: the cell '[[["),
        (["a", "'joie', 'peur'"], "row 3: the label \"'joie'\" looks like a piece of a list"),
        (["array(['joie'], dtype=object)", "a"], "row 2: the label \"array(['joie']\" looks like a piece of a list"),
        (["['joie', 'peur']", "joie peur"], "row 3: the cell 'joie peur' is no list, as others of the column are"),
        (["['joie', '']", "a"], "row 2: label '', expected a name"),
        (["['\\x']", "a"], "row 2: the name \"'\\\\x'\" in a list cannot be read"),
        (["a#b,c", "c"], "row 2: the cell 'a#b,c' separates labels in two ways"),
        (["0,1,0", "1,0,0"], "row 2: label positions [0, 1, 0] repeat, or are zeros and ones"),
        (["0 1 0 1", "1 0 0 0"], "row 3: label positions [1, 0, 0, 0] repeat, or are zeros and ones"),
        (["[0, 1]", "[1, 0]"], "row 2: label positions [0, 1] repeat, or are zeros and ones"),
        (["[0 1 0]", "[1 0 0]"], "row 3: label positions [1, 0, 0] repeat, or are zeros and ones"),
        (["[0. 1.]", "[1. 0.]"], "row 2: the cell '[0. 1.]' looks like a list"),
    ],
)
def test_cells_that_are_refused_by_name(tmp_path, cells, problem):
    with pytest.raises(ValueError) as caught:
        load_labelled(make_csv(tmp_path / "a.csv", cells))
    assert problem in str(caught.value)


def test_a_known_name_may_look_like_a_list_or_hold_a_mark(tmp_path):
    given = ["[autre]", "a#b", "c"]
    assert names(load_labelled(make_csv(tmp_path / "a.csv", ["[autre]", "a#b", "c"]), given)) == given


def test_lists_of_positions_and_of_one_name(tmp_path):
    dataset = load_labelled(make_csv(tmp_path / "a.csv", ["[0, 2]", "[1]"]), ["a", "b", "c"])
    assert names(dataset) == [["a", "c"], ["b"]]
    assert names(load_labelled(make_csv(tmp_path / "b.csv", ["['a']", "['b']"]), multi_label=False)) == ["a", "b"]


def test_choices_that_json_holds(tmp_path):
    rows = [{"text": "a", "labels": {"choices": ["joie", "peur"]}}, {"text": "b", "labels": "un peu triste"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    assert names(load_labelled(path)) == [["joie", "peur"], ["un peu triste"]]


def test_names_that_look_alike_are_one_and_told(tmp_path, caplog):
    cells = [COMPOSED, DECOMPOSED, "joie", "joie\u200b", "\ufeffjoie\u00a0"]
    with caplog.at_level(logging.WARNING):
        dataset = load_labelled(make_csv(tmp_path / "a.csv", cells))
    assert names(dataset) == [COMPOSED, COMPOSED, "joie", "joie", "joie"]
    assert "labels of 3 row(s) hold invisible characters" in caplog.text and "row 5: 'joie\\u200b'" in caplog.text
    caplog.clear()
    load_labelled(make_csv(tmp_path / "b.csv", [" joie ", "peur"]))
    assert not caplog.records


def test_names_of_a_model_are_found_in_any_spelling(tmp_path):
    given = [DECOMPOSED, "joie"]
    dataset = load_labelled(make_csv(tmp_path / "a.csv", [f"{COMPOSED}\u200b", "joie"]), given)
    assert dataset.features["labels"].names == given and names(dataset) == given
    with pytest.raises(ValueError, match="unlike the others"):
        load_labelled(tmp_path / "a.csv", [COMPOSED, DECOMPOSED])


def test_the_sign_of_several_stays_whole():
    family = "👩\u200d👩\u200d👧"
    assert plain_name(f" {family}\u200d ") == family
    assert plain_name("très\u00a0\u202f bon\u00ad") == "très bon"
