import codecs
import csv
import datetime
import decimal
import errno
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from scipy.stats import entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from fratrie import FratrieEncoderConfig
from fratrie.data.loading import load_labelled, load_texts_and_others

TEXTS = ["ma mère aime, «mon père»", "👩‍👩‍👧🎉", "mot " * 10_000 + "fin", 'on dit "oui"', "é", "mon père " * 5]


def save_classifier(folder, samples, problem, labels, thresholds=None, own=False):
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(samples / "bert")
    names = dict(enumerate(labels))
    if own:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        config = FratrieEncoderConfig(vocab_size=len(tokenizer), max_position_embeddings=48, pad_token_id=1, **sizes)
    else:
        config = BertConfig.from_pretrained(samples / "bert")
    config.id2label, config.label2id = names, {name: i for i, name in names.items()}
    config.problem_type, config.label_thresholds, config.initializer_range = problem, thresholds, 0.5
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_texts(path):
    if path.suffix == ".txt":
        path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["sentence"], *([text] for text in TEXTS)])
    else:
        path.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def logits_of(model, tokenizer):
    with torch.no_grad():
        return [
            model(**tokenizer(text, truncation=True, max_length=48, return_tensors="pt")).logits[0] for text in TEXTS
        ]


@pytest.mark.parametrize("extension", ["txt", "csv", "jsonl"])
@pytest.mark.parametrize("own", [True, False])
def test_labels_and_probabilities_come_in_the_order_of_the_texts(run_script, samples, tmp_path, extension, own):
    thresholds = [0.1, 0.9, 0.5]
    folder = tmp_path / "model"
    model, tokenizer = save_classifier(folder, samples, "multi_label_classification", ["+", "m", "p"], thresholds, own)
    source, output = write_texts(tmp_path / f"texts.{extension}"), tmp_path / "out.csv"
    code, stdout, stderr = run_script(
        "predict.py", "--model", folder, "--input_file", source, "--output_file", output, "--text_column", "sentence",
        "--batch_size", 2,
    )  # fmt: skip
    assert code == 0, stderr
    assert "6 texts labelled" in stdout and "1 of 6 texts are longer than 48 tokens and were cut" in stderr
    header, *rows = read(output)
    assert header == ["text", "labels", "+", "m", "p"] and [row[0] for row in rows] == TEXTS
    for row, logits in zip(rows, logits_of(model, tokenizer), strict=True):
        expected = logits.sigmoid().tolist()
        assert [float(cell) for cell in row[2:]] == pytest.approx(expected, abs=1e-4)
        above = zip(["+", "m", "p"], expected, thresholds, strict=True)
        assert row[1] == ",".join(label for label, value, threshold in above if value > threshold)
    assert len({row[1] for row in rows}) > 1
    again = load_labelled(output, ["+", "m", "p"])
    assert [len(labels) for labels in again["labels"]] == [len([x for x in row[1].split(",") if x]) for row in rows]


def test_one_label_is_the_most_probable_by_softmax(run_script, samples, tmp_path):
    model, tokenizer = save_classifier(tmp_path / "m", samples, "single_label_classification", ["a", "b", "c"])
    source, output = write_texts(tmp_path / "texts.txt"), tmp_path / "out.csv"
    code, _, stderr = run_script(
        "predict.py", "--model", tmp_path / "m", "--input_file", source, "--output_file", output
    )
    assert code == 0, stderr
    for row, logits in zip(read(output)[1:], logits_of(model, tokenizer), strict=True):
        assert [float(cell) for cell in row[2:]] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-4)
        assert row[1] == "abc"[int(logits.argmax())]


@pytest.mark.parametrize("option", ["--uncertain=1", "--format=label_studio"])
def test_real_values_cannot_be_labelled_by_people(run_script, samples, tmp_path, option):
    save_classifier(tmp_path / "m", samples, "regression", ["value"])
    output = tmp_path / ("out.csv" if "uncertain" in option else "out.json")
    given = ("--model", tmp_path / "m", "--input_file", write_texts(tmp_path / "texts.txt"), option)
    code, _, stderr = run_script("predict.py", *given, "--output_file", output)
    assert code == 2 and "gives each text a number: --uncertain and --format are for labels" in stderr


def test_real_values_have_no_labels(run_script, samples, tmp_path):
    model, tokenizer = save_classifier(tmp_path / "m", samples, "regression", ["value"])
    source, output = write_texts(tmp_path / "texts.txt"), tmp_path / "out.csv"
    code, _, stderr = run_script(
        "predict.py", "--model", tmp_path / "m", "--input_file", source, "--output_file", output
    )
    assert code == 0, stderr
    header, *rows = read(output)
    assert header == ["text", "value"]
    expected = [float(logits[0]) for logits in logits_of(model, tokenizer)]
    assert [float(row[1]) for row in rows] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_other_columns_of_the_input_stay_beside_the_labels(run_script, samples, tmp_path):
    save_classifier(tmp_path / "m", samples, "multi_label_classification", ["+", "m", "p"])
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(
        'id,sentence,labels,input_text,text\n007,"ma mère, oui",m,c,a\n8,mon père,,,b\n', encoding="utf-8"
    )
    options = ("--model", tmp_path / "m", "--input_file", source, "--output_file", output)
    code, _, stderr = run_script("predict.py", *options, "--text_column", "sentence")
    assert code == 0, stderr
    header, *rows = read(output)
    assert header == ["text", "labels", "+", "m", "p", "id", "input_labels", "input_text", "input_input_text"]
    assert [row[0] for row in rows] == ["ma mère, oui", "mon père"]
    assert [row[5:] for row in rows] == [["007", "m", "c", "a"], ["8", "", "", "b"]]
    source, again = tmp_path / "in.jsonl", tmp_path / "again.csv"
    source.write_text('{"text": "été", "tags": ["é", 1], "n": null}\n', encoding="utf-8")
    code, _, stderr = run_script("predict.py", *options[:2], "--input_file", source, "--output_file", again)
    assert code == 0 and read(again)[1][5:] == ['["é", 1]', ""], stderr


def test_annotated_lines_are_labelled_without_their_codes(run_script, samples, tmp_path):
    save_classifier(tmp_path / "m", samples, "multi_label_classification", ["+", "m", "p"])
    source, output = tmp_path / "in.txt", tmp_path / "out.csv"
    source.write_text("jm+, jp- Ma mère oui, mon père non.\njp0 Mon père.\n", encoding="utf-8")
    options = ("--model", tmp_path / "m", "--input_file", source, "--output_file", output)
    code, _, stderr = run_script("predict.py", *options, "--annotated", "--text_column", "code")  # of no use here
    assert code == 0, stderr
    header, *rows = read(output)
    assert header[5:] == ["code", "respondent"]
    assert [[row[0], row[5]] for row in rows] == [["Ma mère oui, mon père non.", "jm+, jp-"], ["Mon père.", "jp0"]]
    assert "looks like an annotation code" not in stderr
    code, _, stderr = run_script("predict.py", *options)
    assert code == 0 and "every line begins with what looks like an annotation code" in stderr


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "texts.txt: the file is empty"),
        ("ma mère\n".encode("latin-1"), {}, "is not UTF-8"),
        ("texte\n", {"--input_file": "nowhere.txt"}, "nowhere.txt: there is no such file"),
        ("texte\n", {"--output_file": "texts.txt/out.csv"}, "texts.txt"),
        ("texte\n", {"--output_file": "out.xls"}, "cannot write out.xls: give the output a name that ends with .csv"),
        ("texte\n", {"--output_file": "texts.txt"}, "cannot write texts.txt"),
        ("texte\n", {"--format": "doccano"}, "cannot write out.csv: give the output a name that ends with .jsonl"),
        ("texte\n", {"--uncertain": "0"}, "uncertain=0 must lie between 1"),
        (
            "a" * 32_768,
            {"--output_file": "out.xlsx", "--model": "absent"},
            "line 1: the cell in 'text' has 32,768 characters",
        ),
        ("texte\n", {"--model": ""}, "--model is empty"),
        ("texte\n", {"--input_file": ""}, "--input_file is empty"),
        ("texte\n", {"--encoding": "utf-9"}, "encoding='utf-9' is no encoding of texts"),
        ("texte\n", {"--model": "."}, "is not a complete checkpoint: it lacks config.json"),
        ("texte\n", {"--model": "absent"}, "absent is not a folder"),
        ("texte\n", {"--max_length": "0"}, "max_length=0"),
    ],
)
def test_what_a_user_gets_wrong_ends_with_a_message(
    run_script, samples, tmp_path, monkeypatch, content, options, message
):
    monkeypatch.chdir(tmp_path)
    save_classifier(tmp_path / "m", samples, "multi_label_classification", ["+", "m", "p"])
    (tmp_path / "texts.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = {"--model": "m", "--input_file": "texts.txt", "--output_file": "out.csv"} | options
    code, stdout, stderr = run_script("predict.py", *(part for pair in arguments.items() for part in pair))
    assert code == 2 and message in stderr and "error: " in stderr
    assert "Traceback" not in stderr and not stdout and not (tmp_path / "out.csv").exists()


@pytest.fixture
def labelled(run_script, samples, tmp_path):
    """Runs the script on rows of a file in the folder; gives exit code, stderr and the path of the output."""
    save_classifier(tmp_path / "m", samples, "multi_label_classification", ["+", "m", "p"])

    def call(content, *options, name="in.jsonl", to="out.csv"):
        path, output = tmp_path / name, tmp_path / to
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            pyarrow.parquet.write_table(content, path)
        given = ("--model", tmp_path / "m", "--input_file", path, "--output_file", output)
        code, _, stderr = run_script("predict.py", *given, *options)
        return code, stderr, output

    return call


@pytest.mark.parametrize("to", ["out.xlsx", "out.jsonl", "out.parquet"])
def test_every_format_says_what_the_csv_says_and_is_replaced(labelled, to):
    content = '{"text": "ma mère", "n": "a"}\n{"text": "", "n": "b"}\n{"text": "=p", "n": "c"}'
    by_csv = load_labelled(labelled(content)[2], ["+", "m", "p"], text_column="n", multi_label=True)
    for _ in range(2):
        code, stderr, output = labelled(content, to=to)
        assert code == 0, stderr
    assert [text or "" for text in load_texts_and_others(output)[0]] == ["ma mère", "", "=p"]
    dataset = load_labelled(output, ["+", "m", "p"], text_column="n", multi_label=True)
    assert dataset["labels"][:] == by_csv["labels"][:] and dataset["text"][:] == ["a", "b", "c"]


def test_the_least_sure_texts_come_first(labelled):
    texts = ["ma mère", "Ma mère !", "", "mon père", "on dit oui", "été", "j'aime"]
    content = "\n".join(json.dumps({"text": text, "n": n}) for n, text in enumerate(texts))
    everything = {row[0]: [float(cell) for cell in row[2:5]] for row in read(labelled(content)[2])[1:] if row[0]}
    code, stderr, output = labelled(content, "--uncertain", 3)
    assert code == 0 and "nearly the same" not in stderr, stderr
    header, *rows = read(output)
    assert header == ["text", "labels", "+", "m", "p", "uncertain_label", "uncertainty", "n"] and len(rows) == 3
    doubt = {text: sum(entropy([p, 1 - p]) for p in scores) for text, scores in everything.items()}
    expected = sorted(doubt, key=doubt.get, reverse=True)
    expected.remove(min("ma mère", "Ma mère !", key=doubt.get))
    assert [row[0] for row in rows] == expected[:3] and [row[-1] for row in rows] == [
        str(texts.index(row[0])) for row in rows
    ]
    for row in rows:
        assert float(row[6]) == pytest.approx(doubt[row[0]], rel=1e-3)
        assert row[5] == min(zip(["+", "m", "p"], everything[row[0]], strict=True), key=lambda x: abs(x[1] - 0.5))[0]


def test_fewer_texts_than_asked_for_are_told(labelled):
    code, stderr, output = labelled('{"text": "ma mère"}\n{"text": "Ma mère !"}\n{"text": "p"}', "--uncertain", 9)
    assert code == 0 and len(read(output)) == 3
    assert "2 of 3 texts are written: the others are nearly the same as one of these" in stderr


def test_people_get_the_least_sure_texts_to_correct(run_script, samples, tmp_path):
    save_classifier(tmp_path / "m", samples, "multi_label_classification", ["+", "m", "p"])
    given = ("--model", tmp_path / "m", "--input_file", write_texts(tmp_path / "texts.txt"), "--uncertain", 2)
    output = tmp_path / "out.json"
    code, stdout, stderr = run_script("predict.py", *given, "--output_file", output, "--format", "label_studio")
    assert code == 0, stderr
    assert "6 texts labelled, the 2 that the model is least sure of in" in stdout and '<Choice value="m"/>' in stdout
    tasks = json.loads(output.read_text("utf-8"))
    assert len(tasks) == 2 and all(task["data"]["uncertain_label"] in "+mp" for task in tasks)


def test_rows_without_a_text_stay_without_labels_and_are_named(labelled):
    code, stderr, output = labelled(
        '{"text": "ma mère", "n": 1}\n{"text": "", "n": 2}\n{"n": 3}\n{"text": "p", "n": 4}'
    )
    assert code == 0 and "2 text(s) are empty and not read (rows 2, 3)" in stderr, stderr
    _, *rows = read(output)
    assert [row[-1] for row in rows] == ["1", "2", "3", "4"] and rows[1][:-1] == rows[2][:-1] == [""] * 5
    assert all(row[2] and row[3] and row[4] for row in (rows[0], rows[3]))
    alone = labelled('{"text": "ma mère"}\n{"text": "p"}')[2]
    assert [row[:5] for row in read(alone)[1:]] == [rows[0][:5], rows[3][:5]]
    code, stderr, _ = labelled('{"text": ""}\n{"text": null}')
    assert code == 2 and "all 2 texts are empty" in stderr
    code, stderr, _ = labelled('{"text": "a"}\n{"text": 5}')
    assert code == 2 and "row 2: the text is 5" in stderr


def test_a_bar_over_the_batches(labelled, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "predicting" in labelled('{"text": "ma mère"}')[1]
    assert "predicting" not in labelled('{"text": "ma mère"}', "--disable_progress")[1]


def test_columns_of_every_type_are_readable(labelled):
    columns = {
        "text": ["ma mère"],
        "date": [datetime.date(2020, 1, 2)],
        "at": pyarrow.array([datetime.datetime(2020, 1, 2, 3, 4)], pyarrow.timestamp("ns")),
        "time": [datetime.time(3, 4)],
        "lasts": [datetime.timedelta(hours=1)],
        "price": [decimal.Decimal("1.50")],
        "utf8": [b"\xc3\xa9t\xc3\xa9"],
        "bytes": [b"\xff\x00"],
        "nested": [{"day": datetime.date(2021, 1, 1), "parts": [b"x"], "price": decimal.Decimal("2.0")}],
        "flag": [True],
        "none": pyarrow.array([None], pyarrow.string()),
        "kind": pyarrow.array(["u"]).dictionary_encode(),
    }
    code, stderr, output = labelled(pyarrow.table(columns), name="in.parquet")
    assert code == 0, stderr
    header, row = read(output)
    assert dict(zip(header[5:], row[5:], strict=True)) == {
        "date": "2020-01-02",
        "at": "2020-01-02T03:04:00",
        "time": "03:04:00",
        "lasts": "1:00:00",
        "price": "1.50",
        "utf8": "été",
        "bytes": "0xff00",
        "nested": '{"day": "2021-01-01", "parts": ["x"], "price": "2.0"}',
        "flag": "true",
        "none": "",
        "kind": "u",
    }


def test_half_characters_of_other_columns_are_written_readably(labelled):
    code, stderr, output = labelled('{"text": "a", "x\\ud801": "\\ud800", "y": ["\\ud802"]}')
    assert code == 0, stderr
    header, row = read(output)
    assert header[5:] == ["x\\ud801", "y"] and row[5:] == ["\\ud800", '["\\ud802"]']


def test_formulas_are_text_and_numbers_stay_where_asked_for(labelled):
    rows = [{"text": "=1+1", "x": "@SUM(A1)", "y": "-3,5"}, {"text": "\ta", "x": "+cmd|x", "y": "a=b"}]
    content = "\n".join(map(json.dumps, rows))
    plain = read(labelled(content)[2])
    assert [row[0] for row in plain[1:]] == ["=1+1", "\ta"] and plain[0][2] == "+"
    escaped = read(labelled(content, "--escape_formulas")[2])
    assert [(row[0], *row[5:]) for row in escaped] == [
        ("text", "x", "y"), ("'=1+1", "'@SUM(A1)", "-3,5"), ("'\ta", "'+cmd|x", "a=b")
    ]  # fmt: skip
    assert escaped[0][2] == "'+" and [row[2:5] for row in escaped[1:]] == [row[2:5] for row in plain[1:]]


def test_what_a_french_excel_opens(labelled):
    plain = read(labelled('{"text": "Ma mère, oui; non"}')[2])
    output = labelled('{"text": "Ma mère, oui; non"}', "--excel")[2]
    data = output.read_bytes()
    assert data.startswith(codecs.BOM_UTF8) and b"\r\n" in data
    header, row = csv.reader(data.decode("utf-8-sig").splitlines(), delimiter=";")
    assert header == plain[0] and row[:2] == plain[1][:2]
    assert row[2:] == [value.replace(".", ",") for value in plain[1][2:]]
    assert load_labelled(output, ["+", "m", "p"], multi_label=True)["text"][:] == ["Ma mère, oui; non"]


def test_an_output_is_replaced_if_it_is_an_earlier_one_or_if_asked_for(labelled):
    code, stderr, output = labelled('{"text": "a"}', "--excel", "--escape_formulas")
    assert code == 0, stderr
    assert labelled('{"text": "b"}')[0] == 0 and read(output)[1][0] == "b"
    for content in ("text,labels\na,m\n", "text,labels,m,p\na,m,1,0\n", "precious", "", b"\xff\xfe\0"):
        output.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = output.read_bytes()
        code, stderr, _ = labelled('{"text": "a"}')
        assert code == 2 and "is no earlier output for this model: choose another file, or --overwrite" in stderr
        assert output.read_bytes() == before
    assert labelled('{"text": "c"}', "--overwrite")[0] == 0 and read(output)[1][0] == "c"


def test_an_earlier_output_survives_a_failure(labelled, monkeypatch):
    code, stderr, output = labelled('{"text": "a"}')
    assert code == 0, stderr
    before = output.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fratrie.files.flush", full)
    code, stderr, _ = labelled('{"text": "b"}')
    assert code == 2 and "error: " in stderr and "No space left on device" in stderr
    assert output.read_bytes() == before and not list(output.parent.glob(".incomplete*"))


def test_the_precision_can_be_chosen(run_script, samples, tmp_path):
    folder, outputs = tmp_path / "model", {}
    model, tokenizer = save_classifier(folder, samples, "multi_label_classification", ["+", "m", "p"], own=True)
    source = write_texts(tmp_path / "texts.txt")
    expected = torch.stack([row.sigmoid() for row in logits_of(model, tokenizer)])
    for precision, rounding in (("float32", 1e-5), ("int8", 2e-2)):
        output = tmp_path / f"{precision}.csv"
        code, *_ = run_script(
            "predict.py", "--model", folder, "--input_file", source, "--output_file", output, "--precision", precision,
        )  # fmt: skip
        assert code == 0
        outputs[precision] = torch.tensor([[float(cell) for cell in row[2:5]] for row in read(output)[1:]])
        torch.testing.assert_close(outputs[precision], expected.float(), atol=rounding, rtol=0)
    assert not torch.equal(outputs["float32"], outputs["int8"])
