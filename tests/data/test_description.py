"""What is shown of labelled texts before anything is learnt."""

from fratrie.data.corpus import load_family_relations
from fratrie.data.description import describe
from fratrie.data.loading import load_labelled, load_values


def described(path, content, load=load_labelled, **options):
    path.write_text(content, encoding="utf-8")
    return describe(load(path, **options)).split("\n  ")


def test_several_labels(tmp_path):
    content = "text;labels;group\nun;a b;1\ndeux;;1\n\x1b[31m un ;a b;2\n un;b;2\ntrois;c;3\nun;a b;3\n"
    assert described(tmp_path / "a.csv", content) == [
        "6 texts of 3 respondents, several labels each",
        "row 2: 'un' → a, b",
        "row 3: 'deux' → no label",
        "row 4: '\\x1b[31m un ' → a, b",
        "labels: a 3, b 4, c 1; 1 text without a label",
        "1 repetition of an earlier text with the same labels, such as row 7 repeats row 2: 'un'",
        "1 repetition of an earlier text with other labels, such as row 5 repeats row 2: ' un'",
    ]


def test_one_label(tmp_path):
    long = "mot " * 100
    first, row, summary = described(tmp_path / "a.csv", f"text,labels\n{long},x\x1b\n", label_names=["x\x1b", "y"])
    assert first == "1 text, one label each" and len(row) < 110
    assert row.endswith("…' → 'x\\x1b'") and summary == "labels: 'x\\x1b' 1, y 0"


def test_values(tmp_path):
    lines = described(tmp_path / "a.csv", "text,labels\nun,1.5\ndeux,-3\n", load_values)
    assert lines[0] == "2 texts, a value for each" and lines[2:] == [
        "row 3: 'deux' → -3",
        "values from -3 to 1.5, -0.75 in the mean",
    ]


def test_the_shipped_corpus():
    lines = describe(load_family_relations()["train"], "line", texts=1).split("\n  ")
    assert lines[0] == "1,318 texts of 240 respondents, several labels each"
    assert lines[2].startswith("labels: + 317, - 286, 0 204") and lines[2].endswith("a 276, t 86")
