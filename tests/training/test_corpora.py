import copy
import itertools
import json
import logging
import socket

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fratrie.data.text_files import TextFormat
from fratrie.tokenization import train_byte_level_bpe, train_wordpiece
from fratrie.training.corpora import (
    PackedRows,
    PlainRows,
    SentenceRows,
    cut_documents,
    make_rows,
    named_texts,
    only_text,
    pack_documents,
    read_texts,
    stream_texts,
)
from fratrie.training.model_folders import checkpoint_folder

TEXTS = ["ma sœur est gentille", "mon père est parti", "nous jouons", "« l'été »", "un texte bien plus long " * 5]
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=30)


@pytest.fixture(scope="module", params=["encoder", "decoder", "seq2seq"])
def any_tokenizer(request):
    return train_byte_level_bpe(TEXTS * 3, vocab_size=320, sibling=request.param, show_progress=False)


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS * 3, vocab_size=300, sibling="decoder", show_progress=False)


@pytest.mark.parametrize("maker", [SentenceRows, PackedRows, PlainRows])
def test_texts_that_are_cut_anyway_raise_no_alarm(maker, any_tokenizer):
    """Hugging Face warns once a tokenizer of a text beyond its length, and notes that it did."""
    tokenizer = copy.copy(any_tokenizer)
    tokenizer.model_max_length, tokenizer.deprecation_warnings = 4, {}
    rows = maker(tokenizer, 8)({"text": TEXTS})
    assert max(map(len, rows["input_ids"])) <= 8 and not tokenizer.deprecation_warnings
    tokenizer(TEXTS[-1])
    assert tokenizer.deprecation_warnings, "the note that the test looks at"


@given(DOCUMENTS, st.integers(1, 32))
def test_packing_keeps_every_token_once(documents, size):
    rows = pack_documents(documents, size)
    assert all(0 < sum(map(len, row)) <= size for row in rows)
    pieces = [piece for row in rows for piece in row]
    assert sorted(pieces) == sorted(cut_documents(documents, size))
    whole = [document for document in documents if 0 < len(document) <= size]
    for document in whole:
        assert document in pieces


@given(DOCUMENTS, st.integers(8, 32))
def test_packing_is_tight(documents, size):
    """No two rows could share one, so all but one are more than half full."""
    filled = sorted(sum(map(len, row)) for row in pack_documents(documents, size))
    assert all(first + second > size for first, second in itertools.pairwise(filled))


@given(DOCUMENTS, st.integers(1, 32))
def test_cutting_keeps_order(documents, size):
    pieces = cut_documents(documents, size)
    assert all(0 < len(piece) <= size for piece in pieces)
    chain = itertools.chain.from_iterable
    assert list(chain(pieces)) == list(chain(documents))


def test_no_room():
    with pytest.raises(ValueError, match="larger block_size"):
        cut_documents([[1]], 0)


def test_packed_rows_close_documents_and_restart_positions(tokenizer):
    rows = PackedRows(tokenizer, 64)({"text": TEXTS[:3]})
    end = tokenizer.eos_token_id
    documents = []
    for ids, positions in zip(rows["input_ids"], rows["position_ids"], strict=True):
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:stop] == list(range(stop - start))
            documents.append(ids[start:stop])
    assert all(ids[0] == tokenizer.bos_token_id and ids[-1] == end and ids.count(end) == 1 for ids in documents)
    assert sorted(tokenizer.decode(ids[1:-1]) for ids in documents) == sorted(TEXTS[:3])


def test_end_is_not_doubled():
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, sibling="seq2seq", show_progress=False)
    (ids,) = PackedRows(tokenizer, 64)({"text": TEXTS[:1]})["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1


def test_long_texts_go_on_in_further_rows(any_tokenizer):
    for maker in (SentenceRows(any_tokenizer, 12), PlainRows(any_tokenizer, 12)):
        rows = maker({"text": TEXTS})["input_ids"]
        assert len(rows) > len(TEXTS) and max(map(len, rows)) <= 12
        assert "".join(any_tokenizer.decode(ids, skip_special_tokens=True) for ids in rows) == "".join(TEXTS)


def test_sentence_rows_have_special_tokens():
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, show_progress=False)
    rows = SentenceRows(tokenizer, 12)({"text": TEXTS})
    for ids, special in zip(rows["input_ids"], rows["special_tokens_mask"], strict=True):
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert special == [1, *[0] * (len(ids) - 2), 1]


def write(folder, name):
    path = folder / name
    if path.suffix == ".txt":
        path.write_text("\n".join(TEXTS) + "\n\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text, "other": 1}) for text in TEXTS), encoding="utf-8")
    else:
        frame = datasets.Dataset.from_dict({"text": TEXTS, "other": [1] * len(TEXTS)})
        frame.to_csv(path) if path.suffix == ".csv" else frame.to_parquet(path)
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_files_and_streams_hold_the_same_texts(tmp_path, name):
    path = write(tmp_path, name)
    assert list(read_texts([path])["text"]) == TEXTS
    assert [row["text"] for row in stream_texts([path])] == TEXTS


def test_annotated_files_give_sentences(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("jm+ Ma mère et moi.\n\njp- Mon père.\n", encoding="utf-8")
    assert list(read_texts([str(path)], annotated=True)["text"]) == ["Ma mère et moi.", "Mon père."]


def test_folder_of_a_dataset(tmp_path):
    write(tmp_path, "a.jsonl")
    assert list(named_texts(str(tmp_path), None, "train")["text"]) == TEXTS
    assert [row for row in named_texts(str(tmp_path), None, "train", streaming=True)] == [{"text": t} for t in TEXTS]
    with pytest.raises(ValueError, match="there is no such folder"):
        named_texts(str(tmp_path / "nowhere"), None, "train")


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_datasets_give_the_split_asked_for_and_stay_as_they_are(tmp_path, tokenizer, streaming):
    one = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=one, test=one.select([1])).save_to_disk(tmp_path / "parts")
    one.save_to_disk(tmp_path / "one")
    before = sorted(tmp_path.rglob("*"))
    texts = named_texts(str(tmp_path / "parts"), None, "test", streaming=streaming)
    assert [row["text"] for row in texts] == TEXTS[1:2]
    texts = named_texts(str(tmp_path / "one"), None, "train", streaming=streaming)
    assert len(list(make_rows(texts, PlainRows(tokenizer, 8), "train"))) >= len(TEXTS)
    assert sorted(tmp_path.rglob("*")) == before, "datasets keeps what it has made of a folder in it"
    for name, configuration, split, told in (
        ("parts", None, "dev", "split train or test"),
        ("parts", None, "train[:1]", "split train or test"),
        ("one", None, "test", "split train"),
        ("one", "fr", "train", "leave out 'fr'"),
    ):
        with pytest.raises(ValueError, match=told):
            named_texts(str(tmp_path / name), configuration, split, streaming=streaming)


def test_other_columns_and_blank_texts_go():
    data = datasets.Dataset.from_dict({"body": ["a", " ", "b"], "text": [1, 2, 3]})
    assert only_text(data, "body").to_list() == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ValueError, match="no column 'nothing'; its columns are 'body', 'text'"):
        only_text(data, "nothing")


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt"):
        read_texts([str(tmp_path / "empty.txt")])
    with pytest.raises(ValueError, match="no text found"):
        read_texts([])
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        stream_texts([str(tmp_path / "gone.txt")])
    (tmp_path / "a.doc").touch()
    with pytest.raises(ValueError, match=r"unknown extension '\.doc'"):
        stream_texts([write(tmp_path, "a.txt"), str(tmp_path / "a.doc")])


def test_rows_of_a_stream_equal_rows_in_memory(tmp_path, tokenizer):
    path = write(tmp_path, "a.txt")
    maker = PackedRows(tokenizer, 32)
    kept, streamed = make_rows(read_texts([path]), maker, "train"), make_rows(stream_texts([path]), maker, "train")
    assert kept.to_list() == list(streamed)


@pytest.fixture
def no_network(monkeypatch):
    """The machine as it is with a network, but every look-up and connection fails the test."""

    def refuse(*arguments, **options):
        raise AssertionError(f"a connection: {arguments}")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_local_data_open_no_connection(tmp_path, no_network, name):
    path = write(tmp_path, name)
    assert [row["text"] for row in stream_texts([path])] == TEXTS
    kept, streamed = (named_texts(str(tmp_path), None, "train", streaming=streaming) for streaming in (False, True))
    assert [row["text"] for row in kept] == [row["text"] for row in streamed] == TEXTS


def test_bars_of_loading_keep_the_pace(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "PBAR_REFRESH_TIME_INTERVAL", 0.05)
    write(tmp_path, "a.jsonl")
    named_texts(str(tmp_path), None, "train")
    assert datasets.config.PBAR_REFRESH_TIME_INTERVAL == 60


@pytest.mark.parametrize("name", ["", "{}/typo", "./typo", "../typo", "{}/a/b/c"])
def test_a_mistyped_folder_is_sought_nowhere_else(tmp_path, no_network, monkeypatch, name):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (name.format("runs"), name.format(tmp_path)):
        with pytest.raises(ValueError, match="there is no such folder"):
            named_texts(folder, None, "train")
        with pytest.raises(ValueError, match=r"is not a folder|an empty path"):
            checkpoint_folder(folder)


def rows_of(folder, rows, name="a.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_stream_leaves_empty_texts_out_and_tells(tmp_path, caplog):
    path = rows_of(tmp_path, [{"text": "a"}, {"text": " "}, {"text": None}, {"other": 1}, {"text": "b"}])
    with caplog.at_level(logging.WARNING):
        assert [row["text"] for row in stream_texts([path])] == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: row 2 holds no text and is left out, as further such ones are"
    ]
    caplog.clear()
    assert list(read_texts([path])["text"]) == ["a", "b"]
    assert "3 text(s) are empty and not read (rows 2, 3, 4)" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "told"), [("a.txt", "a\n\nb\n", "line 2"), ("a.csv", "text,n\na,1\n\n,2\n", "row 4")]
)
def test_a_stream_names_lines_and_rows_as_people_find_them(tmp_path, caplog, name, content, told):
    (tmp_path / name).write_text(content, encoding="utf-8")
    texts = [row["text"] for row in stream_texts([str(tmp_path / name)])]
    assert texts[0] == "a" and f"{name}: {told} holds no text and is left out" in caplog.text


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"text": "a"}, {"text": 5}], "row 2: the text is 5, expected a string"),
        ([{"text": "a"}, {"text": ["b"]}], r"row 2: the text is \['b'\], expected a string"),
        ([{"text": "a"}, {"text": "\ud800"}], "row 2: the text holds half of a character"),
        ([{"other": "a"}, {"text": "b"}], "no column 'text'; its columns are 'other'"),
        ([{"text": "a"}, ["b"]], "line 2: no object"),
    ],
)
def test_a_stream_names_the_row_that_holds_no_text(tmp_path, rows, problem):
    stream = stream_texts([rows_of(tmp_path, [{"text": "z"}], "z.jsonl"), rows_of(tmp_path, rows)])
    with pytest.raises(ValueError, match=rf"a\.jsonl.*{problem}"):
        list(stream)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_names_the_row_that_holds_no_text(tmp_path, streaming):
    rows_of(tmp_path, [{"text": 1}, {"text": 2}])
    with pytest.raises(ValueError, match="row 1: the text is 1, expected a string"):
        list(named_texts(str(tmp_path), None, "train", streaming=streaming))


def test_a_stream_guesses_no_types_and_reads_what_a_file_holds(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("sep=;\ntext;x\nnan;1\n12;2\nété, oui;3\n".encode("cp1252"))
    form = TextFormat("cp1252")
    assert [row["text"] for row in stream_texts([str(path)], form=form)] == ["nan", "12", "été, oui"]
    with pytest.raises(ValueError, match="is not UTF-8"):
        list(stream_texts([str(path)]))
    assert list(read_texts([str(path)], form=form)["text"]) == ["nan", "12", "été, oui"]


def test_a_stream_goes_on_where_it_was(tmp_path):
    stream = stream_texts([write(tmp_path, "a.txt"), write(tmp_path, "a.csv")])
    rows = iter(stream)
    first = [next(rows)["text"] for _ in range(7)]
    resumed = stream_texts([str(tmp_path / "a.txt"), str(tmp_path / "a.csv")])
    resumed.load_state_dict(stream.state_dict())
    assert first + [row["text"] for row in resumed] == TEXTS * 2


def test_unknown_tokens_are_counted(tmp_path, caplog):
    path = tmp_path / "a.txt"
    path.write_text("nous jouons\nnous 日 et 日本\nouf\n", encoding="utf-8")
    words = train_wordpiece(TEXTS, 300, show_progress=False)
    rows = make_rows(read_texts([path]), PackedRows(words, 8), "train")
    ids = [token for row in rows for token in row["input_ids"]]
    assert ids.count(words.unk_token_id) == 4, "«et», «日» and «本» hold letters that no text of the corpus has"
    assert f"4 of {len(ids)} tokens of the train texts are unknown; a byte-level tokenizer" in caplog.text
    caplog.clear()
    words.eos_token = words.unk_token  # as GPT-2's
    make_rows(read_texts([path]), PlainRows(words, 8), "train")
    assert not caplog.messages
