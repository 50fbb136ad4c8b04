"""The report of a study: what stands in the page, the tables and the figures is what the results say."""

import configparser
import copy
import csv
import io
import json
import re
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from python_calamine import CalamineWorkbook
from study_results import made_up_results

from fratrie.data.sheets import read_sheet
from fratrie.study.names import step_name
from fratrie.study.report import PUBLISHED, write_report
from fratrie.study.report.figures import all_figures
from fratrie.study.report.methods import REFERENCES, methods
from fratrie.study.report.page import pieces
from fratrie.study.report.summary import summary
from fratrie.study.report.table import Column, Features, Interval, Table, csv_text, tex_escaped, tex_text
from fratrie.study.report.tables import all_tables
from fratrie.training.metrics import one_line

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "<b>",
    "&",
    "_",
    "%",
    "$x$",
    "\\alpha",
    "x" * 200,
    'id="a',
    "😀",
    "[",
    "*",
    "--",
    "macro",
    "a\x00\nb",
    "]]>",
]
TEXTS = ("<script>alert('x')</script> & \"y\"", "=1+1\n", "mère " * 90)
CASES = {
    "the shipped labels": made_up_results(),
    "hostile labels": made_up_results(HOSTILE, TEXTS),
    "40 labels": made_up_results([f"label {i}" for i in range(40)]),
    "one label": made_up_results(["joie"]),
}
STEPS = ("classical", "search", "finetuned", "calibration", "learning_curve", "errors", "agreement", "words")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of each case, written once."""
    folders = {}

    def write(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("report")
            write_report(json.loads(json.dumps(CASES[case])), folders[case])
        return folders[case]

    return write


@pytest.fixture(scope="module")
def drawn():
    """The figures of the shipped labels."""
    return all_figures(CASES["the shipped labels"])


def page_of(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def without(*keys):
    return copy.deepcopy(CASES["the shipped labels"]) | dict.fromkeys(keys)


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_well_formed_and_loads_nothing(written, case):
    page = page_of(written(case))
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert all(reference.startswith("#") for reference in page.references)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "label"}
    html = (written(case) / "report.html").read_text(encoding="utf-8")
    outside = re.sub(r'xmlns(:xlink)?="http://www\.w3\.org/[^"]*"', "", html)
    assert not re.search(r"(https?:)?//\w+\.\w|url\((?!#)|@import", outside)
    for label in CASES[case]["data"]["labels"]:
        assert one_line(label) in page.text


@pytest.mark.parametrize("case", ["the shipped labels", "40 labels", "hostile labels"])
def test_numbers_of_the_page_are_those_of_the_results(written, case):
    results, tables = CASES[case], page_of(written(case)).tables
    test, calibration = results["finetuned"]["test"], results["calibration"]
    _, *scores, macro, micro = tables["table-scores"]
    for label, row in zip(results["data"]["labels"], scores, strict=True):
        low, high = test["f1_interval"][label]
        figures = [f"{test[measure][label]:.3f}" for measure in ("precision", "recall", "f1")]
        assert row == [one_line(label), *figures, f"{low:.3f} to {high:.3f}", str(test["support"][label])]
    assert [macro[3], micro[3]] == [f"{test['present_macro_f1']:.3f}", f"{test['micro_f1']:.3f}"]
    comparison = results["finetuned"]["comparison"].values()
    for row, found in zip(tables["table-comparison"][1:], comparison, strict=True):
        less, more = found["difference_interval"]
        assert row[1:] == [
            f"{found['f1']:.3f}",
            "Linear SVC on words",
            f"{found['baseline_f1']:.3f}",
            f"{found['difference']:+.3f}",
            f"{less:+.3f} to {more:+.3f}",
        ]
    for label, row in zip(results["data"]["labels"], tables["table-calibration"][1:], strict=False):
        values = calibration["thresholds"][label], calibration["temperatures"][label]
        ece = calibration["ece"]["before"][label], calibration["ece"]["after"][label]
        assert row[1:] == [f"{value:.3f}" for value in (*values, *ece)]
    for found, row in zip(results["errors"]["confident"], tables["table-confident_errors"][1:], strict=True):
        assert row[:2] == [one_line(found["text"]), str(found["row"])] and row[5] == f"{found['probability']:.3f}"
        assert row[4] == ("missed" if found["truth"] else "wrongly given")


def test_the_table_of_methods_is_that_of_the_study_and_turns_for_many_labels(written):
    for case, turned in (("the shipped labels", False), ("40 labels", True)):
        results = CASES[case]
        rows = page_of(written(case)).tables["table-methods_f1"]
        rows = list(zip(*rows, strict=True)) if turned else rows
        head, support, finetuned, first, *_ = rows
        assert list(head[1:-2]) == results["data"]["labels"]
        assert list(support[1:-2]) == [str(n) for n in results["data"]["parts"]["test"]["support"].values()]
        assert finetuned[1] == f"{results['finetuned']['test']['f1'][head[1]]:.2f}"
        words, states = (results["classical"]["logistic_regression"][name]["test"] for name in ("words", "states"))
        assert list(first[1:-2]) == [f"{words['f1'][label]:.2f} ({states['f1'][label]:.2f})" for label in head[1:-2]]
        assert first[-2] == f"{words['present_macro_f1']:.2f} ({states['present_macro_f1']:.2f})"


def test_the_best_of_a_column_or_row_stands_out_as_shown():
    rows = [["a", Features(0.504, 0.5), 9], ["b", Features(0.498, None), 9.5], ["c", None, ""]]
    columns = [Column(title) for title in ("method", "x", "y")]
    best = [[run.best for run in row[1]] for row in Table("t", "t", columns, rows, "of a column").runs()]
    assert best == [[True, True], [True], [False]]
    turned = Table("t", "t", columns, [["a", Features(0.1, 0.4), Features(0.3, None)]], "of a row").runs()
    assert [[run.best for run in cell] for cell in turned[0]] == [[False], [False, True], [False]]


@pytest.mark.parametrize("case", CASES)
def test_csv_files_hold_the_values_in_full(written, case):
    for name, table in all_tables(CASES[case]).items():
        text = (written(case) / "tables" / f"{name}.csv").read_text(encoding="utf-8")
        head, *rows = csv.reader(io.StringIO(text, newline=""))
        assert {len(row) for row in rows} <= {len(head)}
        for row, cells in zip(rows, table.rows, strict=True):
            wanted = []
            for index, cell in enumerate(cells):
                parts = max(len(row[index]) if isinstance(row[index], tuple) else 1 for row in table.rows)
                wanted += [*(cell if isinstance(cell, tuple) else [cell]), None, None][:parts]
            assert row == ["" if value is None else str(value) for value in wanted]


@pytest.mark.parametrize("case", CASES)
def test_the_workbook_holds_what_the_csv_files_hold(written, case):
    for name, table in all_tables(CASES[case]).items():
        file = written(case) / "tables" / f"{name}.csv"
        sheet = read_sheet(written(case) / "tables.xlsx", name)
        assert [number for number, _ in sheet] == list(range(1, len(table.rows) + 2))
        rows = csv.reader(io.StringIO(file.read_text(encoding="utf-8"), newline=""))
        for (_, row), cells in zip(sheet, rows, strict=True):
            assert [shown_in_a_sheet(cell) for cell in cells] == [shown_in_a_sheet(cell) for cell in row]


def test_places_are_numbers_in_the_workbook_and_have_no_commas_on_the_page(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr("fratrie.study.report.page.all_figures", lambda results: drawn)
    results = without()
    results["errors"]["confident"][0]["row"] = results["errors"]["label_issues"][0]["row"] = 12345
    write_report(results, tmp_path)
    book, page = CalamineWorkbook.from_path(tmp_path / "tables.xlsx"), page_of(tmp_path)
    for name in ("confident_errors", "label_issues"):
        assert book.get_sheet_by_name(name).to_python()[1][1] == 12345
        assert page.tables[f"table-{name}"][1][1] == "12345"


def shown_in_a_sheet(cell):
    """As a number where it is one, of the digits that a sheet keeps."""
    try:
        return f"{float(cell):.9g}"
    except ValueError:
        return cell.replace("\x00", "")


@pytest.mark.parametrize(
    ("file", "heading", "said"),
    [
        ("a.CSV", "Row", "Rows are those of a.CSV as a spreadsheet shows them, the header being row 1."),
        ("a.jsonl", "Row", "Rows are those of a.jsonl, counted from 1."),
        ("a.txt", "Line", "Lines are those of a.txt."),
    ],
)
def test_rows_are_told_as_the_file_counts_them(tmp_path, monkeypatch, drawn, file, heading, said):
    monkeypatch.setattr("fratrie.study.report.page.all_figures", lambda results: drawn)
    results = without()
    for part in results["data"]["parts"].values():
        part["file"] = file
    write_report(results, tmp_path)
    page = page_of(tmp_path)
    for name, key in (("confident_errors", "confident"), ("label_issues", "label_issues")):
        head, *rows = page.tables[f"table-{name}"]
        assert head[1] == heading and [row[1] for row in rows] == [str(each["row"]) for each in results["errors"][key]]
    assert " ".join(page.text.split()).count(said) == 2
    assert page.tables["table-repeats"] == [
        ["Part", "With the same labels", "With other labels"],
        ["train", "3", "1"],
        ["test, where train holds them", "1", "0"],
    ]
    conflict = [
        "Ma mère est gentille.",
        f"train, {heading.lower()} 9",
        "+, -",
        f"train, {heading.lower()} 4",
        "no label",
    ]
    assert page.tables["table-conflicts"][1:] == [conflict]


@pytest.mark.parametrize(("number", "few"), [(9, True), (10, False)])
@pytest.mark.parametrize("known", [True, False])
def test_intervals_say_how_many_they_are_drawn_from_and_warn_of_few(tmp_path, monkeypatch, drawn, number, few, known):
    monkeypatch.setattr("fratrie.study.report.page.all_figures", lambda results: drawn)
    results = without()
    results["data"]["parts"]["test"] |= (
        {"respondents": number} if known else {"respondents": None, "sentences": number}
    )
    results["finetuned"]["comparison"]["macro"]["difference_interval"] = [0.01, 0.09]
    who = f"{number} {'respondents' if known else 'sentences'}"
    assert (f"drawn from {who}, too few to rely on it" in summary(results)[1]) == few
    assert ("excludes zero" in summary(results)[1]) != few
    found = methods(results)
    assert f"bootstrap over the {who} of the test part" in found.english
    assert ("too narrow to rely on" in found.english) == ("trop étroits" in found.french) == few
    write_report(results, tmp_path)
    html = " ".join(page_of(tmp_path).text.split())
    assert (
        f"drawn from the {who} of test" in html and f"Fine-tuned model on the test part; intervals over {who}" in html
    )
    assert (f"{who} are too few for intervals to rely on" in html) == few


def test_one_of_a_kind_is_named_in_the_singular(tmp_path):
    results = without("published")
    one = results["search"]["tried"][0] | {"depth": 0, "epochs": 1}
    results["search"] = {"tried": [one], "chosen": one}
    results["learning_curve"] |= {"draws": 1}
    results["classical"] = {"linear_svc": {"words": results["classical"]["linear_svc"]["words"]}}
    results["agreement"]["sentences"] = 1
    results["data"]["parts"]["test"] |= {"sentences": 1, "respondents": 1}
    results["errors"]["label_issues"] = results["errors"]["label_issues"][:3]
    write_report(results, tmp_path)
    html = " ".join(page_of(tmp_path).text.split())
    assert "drawn once for each size" in html and "one draw of each size" in html and "1 sentence has a second" in html
    assert "The labels that cleanlab flags (3), by models" in html
    assert "On 1 test sentence of 1 respondent the fine-tuned" in html
    found = methods(results)
    assert "The one setting tried has the head alone to train" in found.english and "1 epoch." in found.english
    assert "L'unique réglage essayé compte la tête seule à entraîner" in found.french
    assert "un bootstrap sur 1 répondant du test" in found.french
    nouns = (
        "times|draws|(test )?sentences|respondents|trainable layers|epochs|seeds|settings|(classical )?methods|labels"
    )
    assert not re.search(rf"\b1 ({nouns})\b", f"{found.english} {html}")
    without_model = results | {"finetuned": None}
    assert summary(without_model)[0].startswith("The classical method in cross-validation is linear SVC on words")


def test_steps_are_named_in_words():
    names = {
        "classical-linear_svc-states": "classical methods: Linear SVC on pooled states",
        "search-f62a69e7": "search for the setting of fine-tuning",
        "models-6-0.0004-12": "final models",
        "curve-100-200-1-logistic_regression-words": "learning curve: Elastic-net logistic regression on words",
        "curve-100-200-1-6-0.0004-12": "learning curve: Fine-tuning",
        "words-6-0.0004-12-temperature-3": "words that speak for a label",
    }
    assert {key: step_name(key) for key in names} == names
    results = without() | {"study": CASES["one label"]["study"] | {"seconds": dict.fromkeys(names, 1.0)}}
    assert [row[0] for row in all_tables(results)["seconds"].rows] == list(names.values())


def test_the_probability_beside_a_sentence_is_explained(written):
    text = " ".join(page_of(written("the shipped labels")).text.split())
    assert "The number behind a sentence is the probability that the model gives to the label." in text


@pytest.mark.parametrize("case", CASES)
def test_tex_files_are_balanced_tables(written, case):
    for file in (written(case) / "tables").glob("*.tex"):
        _, *lines = file.read_text(encoding="utf-8").splitlines()
        body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
        cells = {len(re.findall(r"(?<!\\)&", line)) for line in body if line.endswith(r" \\")}
        columns = re.fullmatch(r"\\begin\{tabular\}\{(.*)\}", lines[lines.index(r"\toprule") - 1])[1]
        assert cells == {len(columns.replace("p{5cm}", "p")) - 1}
        text = re.sub(r"\\[&%$#_{}]", "", "\n".join(lines))
        assert text.count("{") == text.count("}") and not re.search(r"[%#_^]", text.replace(f"tab:{file.stem}", ""))


def read_tex(source):
    """What LaTeX would show: macros of signs and escapes undone, groups and the breaks of ligatures left out."""
    names = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "less": "<", "greater": ">", "bar": "|"}
    shown, place = "", 0
    while place < len(source):
        if found := re.compile(r"\\text(\w+)\{\}").match(source, place):
            shown, place = shown + names[found[1]], found.end()
        elif source.startswith("$-$", place):
            shown, place = shown + "\N{MINUS SIGN}", place + 3
        elif source[place] == "\\":
            shown, place = shown + source[place + 1], place + 2
        else:
            assert source[place] not in "&%$#_~^"
            shown, place = shown + (source[place] if source[place] not in "{}" else ""), place + 1
    return shown


@given(st.text(st.characters(exclude_categories=("Cs",))) | st.text("\\{}[]*-'`,&%$#_~^<>|\" ab"))
def test_tex_shows_the_text_itself(text):
    source = tex_escaped(text)
    assert read_tex(source) == one_line(text)
    assert source[:1] not in ("[", "*")  # behind the end of a row, its options
    assert not re.search(r"--|''|``|,,", source)


def test_tex_writes_negative_numbers_with_a_minus_and_names_with_a_hyphen():
    columns = [Column("label"), Column("difference", "+.3f"), Column("interval", "+.3f")]
    table = Table("t", "t", columns, [["x-1", -0.5, Interval(-0.25, 0.125)], ["-1", 0.5, None]])
    assert "x-1 & $-$0.500 & $-$0.250 to +0.125" in tex_text(table) and "\n-1 & +0.500 & –" in tex_text(table)
    assert csv_text(table).splitlines()[1:] == ["x-1,-0.5,-0.25,0.125", "-1,0.5,,"]


def test_the_same_results_give_the_same_bytes(written, tmp_path):
    first = written("hostile labels")
    write_report(CASES["hostile labels"], tmp_path)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == len([path for path in first.rglob("*") if path.is_file()]) > 40
    for file in files:
        assert (tmp_path / file).read_bytes() == (first / file).read_bytes(), file


@pytest.mark.parametrize("case", CASES)
def test_figures_are_xml_with_the_labels_as_text(written, case):
    for name in ("f1_by_label", *["confusion"] * (case != "one label")):  # which is mistaken for no other
        svg = ElementTree.parse(written(case) / "figures" / f"{name}.svg")
        texts = ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        for label in CASES[case]["data"]["labels"]:
            assert any(text.rstrip("…") and one_line(label).startswith(text.rstrip("…")) for text in texts)


def test_marks_of_a_figure_lie_at_the_values(drawn):
    results, svg = CASES["the shipped labels"], drawn["f1_by_label"].svg
    x = [float(value) for value in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*fill: #0072b2', svg)]
    f1 = list(results["finetuned"]["test"]["f1"].values())
    x = x[: len(f1)]
    slope = (max(x) - min(x)) / (max(f1) - min(f1))
    assert x == pytest.approx([min(x) + slope * (value - min(f1)) for value in f1], abs=1e-3)


@pytest.mark.parametrize("key", [*STEPS, "all"])
def test_what_was_left_out_has_no_section(tmp_path, monkeypatch, drawn, key):
    results = without(*(STEPS if key == "all" else [key]), "published")
    if key != "all":  # drawing takes most of the time
        monkeypatch.setattr("fratrie.study.report.page.all_figures", lambda results: drawn)
    write_report(results, tmp_path)
    page = page_of(tmp_path)
    sections = {"classical": (), "search": (), "finetuned": ("finetuned",)}
    for each in STEPS:
        for section in sections.get(each, (each,)):
            assert (section in page.ids) == (results[each] is not None)
    assert ("methods" in page.ids) == (key != "all") and "how" in page.ids
    assert "None" not in page.text and "nan" not in page.text.split()


def test_what_is_undefined_is_a_dash_and_no_failure(tmp_path):
    results = without("published")
    results["data"]["label_names"] = {}
    results["data"]["examples"] = []
    results["finetuned"] |= {"comparison": None, "seeds": [0], "test_by_seed": [0.9]}
    results["finetuned"]["test"]["f1_interval"]["+"] = results["finetuned"]["test"]["present_macro_f1_interval"] = None
    results["calibration"] |= {"method": "none", "thresholds": None, "temperatures": {}}
    results["agreement"] |= {"mean_kappa": None, "alpha": None, "alpha_interval": None}
    results["agreement"]["kappa"]["+"] = results["agreement"]["kappa_interval"]["+"] = None
    results["errors"] |= {"confident": [], "label_issues": []}
    results["errors"]["confusion"]["missed_given"] = [[0] * 11] * 11
    results["search"] |= {"tried": results["search"]["tried"][:1], "chosen": results["search"]["tried"][0]}
    results["learning_curve"]["methods"] = {}
    results["words"]["+"] = []
    write_report(results, tmp_path)
    page = page_of(tmp_path)
    assert page.tables["table-agreement"][1] == ["+", "–", "–"] and page.tables["table-scores"][1][4] == "–"
    assert "learning_curve" not in page.ids and "None" not in page.text
    assert [name for name in page.ids if name.startswith("figure-")] == ["figure-f1_by_label", "figure-reliability"]


def test_the_summary_is_three_sentences_on_what_there_is():
    main = summary(CASES["the shipped labels"])
    test = CASES["the shipped labels"]["finetuned"]["test"]
    assert len(main) == 3 and f"{test['present_macro_f1']:.3f}" in main[0] and "holds zero" in main[1]
    results = without("finetuned")
    best = max(
        (found["cross_validated_macro_f1"], found["test"]["present_macro_f1"])
        for by_features in results["classical"].values()
        for found in by_features.values()
    )
    assert f"{best[0]:.3f}" in summary(results)[0] and f"{best[1]:.3f}" in summary(results)[1]
    assert summary(without("finetuned", "classical")) == [
        "The data are 1,318 training and 120 test sentences of 58 respondents."
    ]


def test_the_methods_paragraph_says_what_was_done_in_two_languages():
    found = methods(CASES["the shipped labels"])
    assert (
        "1,318 sentences of 240 respondents" in found.english and "none, one or several of 11 labels" in found.english
    )
    assert (
        "1\N{NARROW NO-BREAK SPACE}318 phrases de 240 répondants" in found.french and "kappa de Cohen" in found.french
    )
    assert "0,812" in found.french and "0.812" not in found.french
    assert [key for key in REFERENCES if key in found.english] == [
        key for key in REFERENCES if key.replace("&", "et") in found.french
    ]
    assert len(found.references) == len(REFERENCES) - 1  # isotonic regression was not used


def test_the_methods_paragraph_is_right_for_less():
    results = without("agreement", "classical", "finetuned", "search", "words", "learning_curve", "errors")
    results["data"] |= {"problem_type": "single_label_classification", "shipped": False, "source": "mine.csv"}
    for part in results["data"]["parts"].values():
        part["respondents"] = None
    results["calibration"] |= {"method": "isotonic", "thresholds": dict.fromkeys(results["data"]["labels"], 0.5)}
    found = methods(results)
    assert "(mine.csv)" in found.english and "exactly one of 11 labels" in found.english
    assert "isotonic" in found.english and "exceeds 0.5" in found.english and "dépasse 0,5" in found.french
    for word in ("respondent", "bootstrap", "fold cross", "Cortes", "Cohen", "encoder"):
        assert word not in found.english
    assert "répondant" not in found.french and "Cortes" not in " ".join(found.references)
    classical = methods(results | {"classical": CASES["the shipped labels"]["classical"]})
    assert "5-fold cross-validation." in classical.english and "à 5 plis." in classical.french
    assert (
        "bootstrap over the 120 sentences" in classical.english and "sur les 120 phrases du test" in classical.french
    )


@given(st.lists(st.tuples(st.text("aé <&'", min_size=1), st.floats(-5, 5))))
def test_words_keep_the_text_and_its_order(weighted):
    found = pieces({"pieces": [list(pair) for pair in weighted]})
    assert "".join(piece.text for piece in found) == "".join(text for text, _ in weighted)
    shades = [piece.shade for piece in found if piece.weight is not None]
    strongest = max((abs(weight) for _, weight in weighted), default=0)
    for shade, (_, weight) in zip(shades, weighted, strict=True):
        assert not shade or shade.startswith("for" if weight > 0 else "against")
        assert (shade[-2:] == "-4") == (strongest > 0 and round(4 * abs(weight) / strongest) == 4)


def test_the_published_numbers_have_the_means_of_the_study():
    means = {
        (method, features): round(fmean(f1.values()), 3)
        for method, by_features in PUBLISHED["rows"].items()
        for features, f1 in by_features.items()
    }
    assert means == {
        ("finetuned", "words"): 0.787,
        ("logistic_regression", "words"): 0.629,
        ("logistic_regression", "states"): 0.637,
        ("gradient_boosting", "words"): 0.512,
        ("gradient_boosting", "states"): 0.648,
        ("random_forest", "words"): 0.409,
        ("random_forest", "states"): 0.657,
        ("svc", "words"): 0.597,
        ("svc", "states"): 0.62,
    }
    assert sum(PUBLISHED["support"].values()) == 1026


def test_what_the_report_is_made_of_goes_into_the_wheel():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["fratrie.study.report"].split(", ")
    folder = ROOT / "fratrie/study/report"
    others = {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others and others == {path for pattern in patterns for path in folder.glob(pattern)}


def test_a_model_that_gives_everything_or_nothing_is_told():
    results = without()
    test = results["finetuned"]["test"]
    assert not [sentence for sentence in summary(results) if "hardly learnt" in sentence]
    number = test["samples"]
    test["support"] = dict.fromkeys(test["f1"], number // 5)
    test["recall"], test["precision"] = dict.fromkeys(test["f1"], 1.0), dict.fromkeys(test["f1"], 0.2)
    (told,) = [sentence for sentence in summary(results) if "hardly learnt" in sentence]
    true = len(test["f1"]) * (number // 5)
    assert f"about {5 * true:,} labels where people gave {true:,}, far too many" in told
    test["recall"] = test["precision"] = dict.fromkeys(test["f1"], 0.0)
    assert "about 0 labels" in next(sentence for sentence in summary(results) if "far too few" in sentence)
