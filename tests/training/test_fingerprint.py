import decimal
import random

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from fratrie.tokenization import train_character_tokenizer
from fratrie.training import fingerprint
from fratrie.training.fingerprint import differences, fingerprint_files, fingerprint_rows, fingerprint_tokenizer

ROWS = [
    {"ids": [number, 1], "text": f"é{number}", "share": number / 7, "pair": [[number], []], "none": None}
    for number in range(1000)
]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**row, "ids": torch.tensor(row["ids"]), "pair": tuple(row["pair"]), "share": np.float64(row["share"])}


def narrow(rows):
    features = datasets.Features(
        ids=datasets.List(datasets.Value("int16")),
        text=datasets.Value("large_string"),
        share=datasets.Value("float64"),
        pair=datasets.List(datasets.List(datasets.Value("int32"))),
        none=datasets.Value("string"),
    )
    return datasets.Dataset.from_list(rows, features=features)


HOLDERS = {
    "Python, keys in another order": lambda rows: [dict(reversed(row.items())) for row in rows],
    "Arrow": datasets.Dataset.from_list,
    "Arrow of narrow types": narrow,
    "Arrow in chunks": lambda rows: datasets.concatenate_datasets(
        [datasets.Dataset.from_list(rows[:300]), datasets.Dataset.from_list(rows[300:])]
    ),
    "Arrow, selected": lambda rows: datasets.Dataset.from_list(rows[::-1]).select(range(len(rows))[::-1]),
    "Arrow, formatted": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "tensors": Rows,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_equal_rows_whoever_holds_them(holder, monkeypatch):
    monkeypatch.setattr(fingerprint, "ROWS_AT_ONCE", 400)
    assert fingerprint_rows(HOLDERS[holder](ROWS)) == fingerprint_rows(ROWS)


def changed(place, **values):
    return [*ROWS[:place], {**ROWS[place], **values}, *ROWS[place + 1 :]]


@pytest.mark.parametrize(
    "other",
    [
        ROWS[:-1],
        ROWS[::-1],
        changed(77, ids=[77, 2]),
        changed(501, ids=[501, 1, 1]),
        changed(501, text="e501"),
        changed(501, text=None),
        changed(501, share=501 / 7 + 1e-12),
        changed(501, pair=[[], [501]]),
        changed(501, pair=[[501]]),
        changed(501, none=""),
        [{("id" if key == "ids" else key): value for key, value in row.items()} for row in ROWS],
        # the same letters and numbers, otherwise cut
        [*ROWS[:10], {**ROWS[10], "text": "é10é"}, {**ROWS[11], "text": "11"}, *ROWS[12:]],
    ],
)
@pytest.mark.parametrize("hold", [list, datasets.Dataset.from_list], ids=["Python", "Arrow"])
def test_every_row_counts(other, hold):
    assert fingerprint_rows(hold(other)) != fingerprint_rows(ROWS)


def test_rows_that_arrow_cannot_hold():
    mixed = [{"value": 1}, {"value": "one"}, {"value": [1]}]
    assert fingerprint_rows(mixed) == fingerprint_rows([dict(row) for row in mixed])
    assert fingerprint_rows(mixed) != fingerprint_rows([*mixed[:2], {"value": [2]}])
    assert fingerprint_rows([3, 4]) != fingerprint_rows([3, 5])
    images = [{"pixels": torch.full((3, 2, 2), float(number))} for number in range(4)]
    assert fingerprint_rows(images) == fingerprint_rows([{"pixels": image["pixels"].tolist()} for image in images])
    assert fingerprint_rows(images) != fingerprint_rows(images[::-1])
    assert fingerprint_rows([]) != fingerprint_rows([{}])


def test_columns_of_rare_types():
    table = {
        "date": pa.array([1, 2], pa.timestamp("s")),
        "sum": pa.array([decimal.Decimal("1.5"), None]),
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "raw": pa.array([b"\x00", b"\xff"]),
        "yes": pa.array([True, None]),
        "nested": pa.array([{"a": [1], "b": None}, None]),
    }
    first = datasets.Dataset(pa.table(table))
    assert fingerprint_rows(first) == fingerprint_rows(datasets.Dataset(pa.table(table)))
    for name, column in table.items():
        other = datasets.Dataset(pa.table(table | {name: column.take(pa.array([1, 0]))}))
        assert fingerprint_rows(first) != fingerprint_rows(other), name


def test_rows_that_draw_numbers():
    class Augmented(Rows):
        def __getitem__(self, index):
            return {"value": random.random() + float(torch.rand(()))}

    assert fingerprint_rows(Augmented(ROWS[:9])) == fingerprint_rows(Augmented(ROWS[:9]))


def test_files_by_all_of_their_bytes(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one")
    second.write_text("two")
    given = [str(first), str(second)]
    before = fingerprint_files(given)
    assert list(before) == ["file 1", "file 2"] and before["file 1"].startswith("a.txt, 3 bytes, ")
    assert fingerprint_files([str(tmp_path)]) == before
    second.write_text("twO")
    (difference,) = differences(before, fingerprint_files(given))
    assert difference.startswith("file 2: 'b.txt, 3 bytes, ")
    assert fingerprint_files(given[::-1]) != before


def test_large_files_by_samples_which_is_said(tmp_path, monkeypatch, caplog):
    for name, value in (("WHOLE_BYTES", 5000), ("PIECES", 5), ("PIECE_BYTES", 100)):
        monkeypatch.setattr(fingerprint, name, value)
    path = tmp_path / "large.txt"
    content = bytearray(random.Random(0).randbytes(10_000))
    path.write_bytes(content)
    before = fingerprint_files([str(path)])
    assert "its size, head, tail and 3 samples are compared" in caplog.text
    for place in (0, 5000, 9999):
        path.write_bytes(bytes(value ^ (number == place) for number, value in enumerate(content)))
        assert fingerprint_files([str(path)]) != before
    path.write_bytes(content + b"x")
    assert fingerprint_files([str(path)]) != before


def test_tokenizers_by_their_vocabulary_however_they_were_used(tmp_path):
    first, second = (train_character_tokenizer([text]) for text in ("abc", "abd"))
    before = fingerprint_tokenizer(first)
    first(["abc", "a"], padding=True, truncation=True, max_length=2)
    first.save_pretrained(tmp_path)
    assert fingerprint_tokenizer(first) == before == fingerprint_tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert fingerprint_tokenizer(second) != before and fingerprint_tokenizer(None) is None


def test_differences_name_both_values():
    assert differences({"a": 1, "b": [2]}, {"a": 1, "b": [3], "c": None}) == ["b: [2] then, [3] now"]
