"""Exports of Label Studio and doccano, as these tools write them."""

import csv
import json
import logging

import pytest
from label_names import names

from fratrie.data.loading import load_labelled, load_texts_and_others, load_values


def choices(*chosen, question="humeur"):
    return {"from_name": question, "to_name": "text", "type": "choices", "value": {"choices": list(chosen)}}


def annotation(number, *results, who=1, **more):
    given = {"id": number, "completed_by": who, "result": list(results), "was_cancelled": False, "lead_time": 4.2}
    return given | {"ground_truth": False, "created_at": "2024-05-01T12:00:00Z", **more}


def task(number, text, *annotations, **data):
    return {"id": number, "data": {"text": text, **data}, "annotations": list(annotations), "predictions": []}


def write_json(path, content):
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def write_csv(path, rows):
    """As pandas writes what json-min holds: an absent key is an empty cell, a list of choices json."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: json.dumps(x) if isinstance(x, dict) else x for name, x in row.items()})
    return path


TASKS = [
    task(11, "un", annotation(1, choices("joie", "peur")), respondent="a"),
    task(12, "deux", annotation(2, choices("un peu triste")), respondent="a"),
    task(13, "trois", annotation(3), respondent="b"),
    task(14, "quatre", annotation(4, choices("joie"), was_cancelled=True), respondent="b"),
    task(15, "cinq", respondent="b") | {"predictions": [{"result": [choices("joie")]}]},
    task(16, "six", annotation(5, choices("joie"), who={"id": 2, "email": "ève@x.fr"}), respondent="c"),
]
FLAT = [
    {"text": "un", "respondent": "a", "id": 11, "humeur": {"choices": ["joie", "peur"]}},
    {"text": "deux", "respondent": "a", "id": 12, "humeur": "un peu triste"},
    {"text": "trois", "respondent": "b", "id": 13},
    {"text": "six", "respondent": "c", "id": 16, "humeur": "joie"},
]
FLAT = [
    row | {"annotator": 1, "annotation_id": i, "created_at": "2024", "lead_time": 4.2} for i, row in enumerate(FLAT)
]


def test_the_three_exports_of_label_studio_say_the_same(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    paths = [
        write_json(tmp_path / "a.json", TASKS),
        write_json(tmp_path / "min.json", FLAT),
        write_csv(tmp_path / "a.csv", FLAT),
    ]
    for path in paths:
        dataset = load_labelled(path)
        assert dataset["text"][:] == ["un", "deux", "trois", "six"]
        assert names(dataset) == [["joie", "peur"], ["un peu triste"], [], ["joie"]]
        assert dataset["respondent"][:] == ["a", "a", "b", "c"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "2 of 6 tasks are not annotated, or were skipped, and are left out"
    ]


def test_texts_of_tasks_are_read_alone(tmp_path):
    path = write_json(tmp_path / "a.json", [*TASKS, {"data": {"text": "sept"}}])
    texts, others = load_texts_and_others(path)
    assert texts == ["un", "deux", "trois", "quatre", "cinq", "six", "sept"]
    assert others.columns == {"id": [11, 12, 13, 14, 15, 16, None], "respondent": [*"aabbbc", None]}
    with pytest.raises(ValueError, match="no column 'phrase'; its columns are 'id', 'text', 'respondent'"):
        load_texts_and_others(path, "phrase")


def test_annotations_of_two_are_never_merged(tmp_path, caplog):
    second = [annotation(9, choices("peur"), who=7), annotation(10, choices("joie"), who=7, was_cancelled=True)]
    tasks = [TASKS[0] | {"annotations": [*TASKS[0]["annotations"], *second]}, *TASKS[1:]]
    rows = [*FLAT, FLAT[0] | {"humeur": "peur", "annotator": 7, "annotation_id": 9}]
    flat = [write_json(tmp_path / "min.json", rows), write_csv(tmp_path / "a.csv", rows)]
    for path in (write_json(tmp_path / "a.json", tasks), *flat):
        with pytest.raises(
            ValueError, match=r"1 tasks have annotations of several annotators \(1: .*7: 1.*--annotator"
        ):
            load_labelled(path)
        dataset = load_labelled(path, annotator="7")
        assert dataset["text"][:] == ["un"] and names(dataset) in (["peur"], [["peur"]])
        assert "annotations of others than 7 are left out" in caplog.text
        first = load_labelled(path, annotator="1")
        assert names(first)[:2] == [["joie", "peur"], ["un peu triste"]]
        with pytest.raises(ValueError, match="no annotator 'x'; there are 1: "):
            load_labelled(path, annotator="x")
    tasks[0]["annotations"][1]["completed_by"] = 1
    with pytest.raises(ValueError, match="several annotations of one task by the same annotator, row 1: keep one"):
        load_labelled(write_json(tmp_path / "a.json", tasks))


def test_rows_of_left_out_tasks_are_counted(tmp_path):
    tasks = [TASKS[4], TASKS[0], task(17, "  ", annotation(6, choices("joie")))]
    with pytest.raises(ValueError, match=r"row 3: the text is empty"):
        load_labelled(write_json(tmp_path / "a.json", tasks))


def test_several_questions_need_a_choice(tmp_path):
    tasks = [task(1, "un", annotation(1, choices("joie"), choices("oui", question="ironie"), {"type": "textarea"}))]
    path = write_json(tmp_path / "a.json", tasks)
    with pytest.raises(ValueError, match=r"'humeur', 'ironie' may hold the labels: choose by label_column"):
        load_labelled(path)
    assert names(load_labelled(path, label_column="ironie")) == ["oui"]


def test_one_choice_for_each_is_one_label_in_every_export(tmp_path):
    """A name with spaces, too, which in other tables would be several labels."""
    chosen = ["très positif", "négatif", "très positif"]
    tasks = [task(i, f"texte {i}", annotation(i, choices(name))) for i, name in enumerate(chosen)]
    rows = [
        {"text": f"texte {i}", "id": i, "humeur": name, "annotator": 1, "annotation_id": i}
        for i, name in enumerate(chosen)
    ]
    for path in (
        write_json(tmp_path / "a.json", tasks),
        write_json(tmp_path / "min.json", rows),
        write_csv(tmp_path / "a.csv", rows),
    ):
        assert names(load_labelled(path)) == chosen
        assert names(load_labelled(path, multi_label=True)) == [[name] for name in chosen]


def test_labels_that_came_along_with_the_texts_are_not_those_of_the_annotator(tmp_path):
    tasks = [task(1, "un", annotation(1, choices("joie")), labels="peur", label="peur", code="jm+")]
    path = write_json(tmp_path / "a.json", tasks)
    assert names(load_labelled(path)) == ["joie"] and names(load_labelled(path, label_column="labels")) == ["peur"]
    rows = [FLAT[3] | {"labels": "peur"}]
    with pytest.raises(ValueError, match="'humeur', 'labels' may hold the labels"):
        load_labelled(write_csv(tmp_path / "a.csv", rows))


def test_other_names_of_the_text_and_old_exports(tmp_path):
    old = [{"id": 3, "data": {"reviewText": "un"}, "completions": [{"id": 1, "result": [choices("joie", "peur")]}]}]
    dataset = load_labelled(write_json(tmp_path / "a.json", old))
    assert dataset["text"][:] == ["un"] and names(dataset) == [["joie", "peur"]]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([task(1, "un"), task(2, "deux", annotation(1, was_cancelled=True))], "no annotation of them holds choices"),
        ([task(1, "un", annotation(1, {"value": {"labels": ["PER"]}, "type": "labels"}))], "no annotation of them"),
        ([task(1, "un", annotation(1, {"value": [3]}, "x", choices()))], "no row has a label"),
        ([task(1, "un", annotation(1, choices(3.5)))], "row 1: label 3.5, expected a name"),
        ([task(1, "un") | {"annotations": [3]}], "no column"),
        ([task(1, "un") | {"data": 3}], "no column"),
    ],
)
def test_tasks_without_labels(tmp_path, tasks, message):
    with pytest.raises(ValueError) as caught:
        load_labelled(write_json(tmp_path / "a.json", tasks))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["text", "data"])
def test_doccano(tmp_path, text):
    rows = [
        {"id": 1, text: "un", "label": ["joie", "peur"], "Comments": []},
        {"id": 2, text: "deux", "label": [], "Comments": ["?"]},
    ]
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    joined = write_csv(tmp_path / "all.csv", [row | {"label": "#".join(row["label"])} for row in rows])
    for file in (path, joined):
        dataset = load_labelled(file)
        assert dataset["text"][:] == ["un", "deux"] and names(dataset) == [["joie", "peur"], []]
    path.write_text('{"text": "un", "label": ["joie"], "code": "jm+"}', encoding="utf-8")
    assert names(load_labelled(path)) == [["joie"]], "what came along with the text is not what doccano asked for"
    path.write_text('{"id": 1, "text": "un", "label": [[0, 2, "PER"]]}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"row 1: label \[0, 2, 'PER'\], expected a name"):
        load_labelled(path)


def test_a_table_that_names_who_labelled(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text,labels,annotator\n1,un,1,x\n1,deux,2,x\n2,un,3,y\n", encoding="utf-8")
    assert len(load_labelled(path)) == 3, "ids that are no tasks' may be those of respondents"
    assert load_labelled(path, annotator="y")["text"][:] == ["un"]
    assert load_values(path, annotator="x")["labels"][:] == [1, 2]
    path.write_text("text,labels\nun,a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no annotator 'x', nor a column of them"):
        load_labelled(path, annotator="x")
