import json
import os
import re
import string
import sys
from pathlib import Path

import datasets
import pytest
from processes import run_forked
from transformers import AutoTokenizer

from fratrie import files
from fratrie.cli import train_tokenizer
from fratrie.cli.running import run
from fratrie.tokenization import SIBLINGS, sentinel_token_ids, train_byte_level_bpe, train_unigram, train_wordpiece

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
SENTENCES = ["Ma mère est là, j'aime l'été.", "Mon père a 25 ans, ma sœur en a 18."]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs the script in this process; gives the saved tokenizer, or exit code and both streams."""

    def call(*arguments, output=tmp_path / "tokenizer"):
        command = ["fratrie train-tokenizer", "--overwrite", "--output_dir", str(output), *map(str, arguments)]
        if "character" not in arguments and "--vocab_size" not in arguments:
            command += ["--vocab_size", "300"]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        try:
            run(train_tokenizer.main)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return AutoTokenizer.from_pretrained(output), capsys.readouterr().out

    return call


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def make_file(folder, kind):
    path = folder / f"texts.{kind}"
    rows = datasets.Dataset.from_dict({"sentence": SENTENCES, "other": ["zzzzzz zzzzzz"] * 2})
    if kind == "txt":
        return write(path, "\r\n".join(SENTENCES))
    {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[kind](path)
    return path


@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_tokenizer_of_its_texts(train, tmp_path, kind):
    path = make_file(tmp_path, kind)
    tokenizer, out = train("--files", path, "--text_column", "sentence", "--min_frequency", "1", "--vocab_size", "290")
    expected = train_byte_level_bpe(SENTENCES, 290, min_frequency=1, show_progress=False)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert f"saved to {tmp_path / 'tokenizer'}" in out
    assert "vocabulary: 290 tokens, 4 of them special" in out
    assert "first 2 text(s): " in out


def test_summary_counts_tokens_of_the_training_text(train, tmp_path):
    path = write(tmp_path / "a.txt", "été 18\n" * 2)
    tokenizer, out = train("--files", path)
    tokens, text_bytes = len(tokenizer.tokenize("été 18\n")), 9
    assert f"first 2 text(s): {tokens / 2:.2f} tokens per word, {text_bytes / tokens:.2f} bytes per token" in out


def test_annotated_files_train_on_the_sentences_alone(train, tmp_path):
    path = write(tmp_path / "a.txt", "jm+, jp+ " + "j'aime maman\n& et papa\n" + "jm+, jp+ oui\n" * 20)
    plain, _ = train("--files", path)
    annotated, _ = train("--files", path, "--annotated")
    assert [token for token in plain.get_vocab() if "jm" in token]
    assert not [token for token in annotated.get_vocab() if "jm" in token]


def test_several_files_are_one_corpus(train, tmp_path):
    paths = [write(tmp_path / f"{word}.txt", f"{word} " * 3) for word in ("papa", "maman")]
    tokenizer, _ = train("--files", *paths)
    assert {"Ġpapa", "Ġmaman"} <= set(tokenizer.get_vocab())


def test_options_reach_the_tokenizer(train, tmp_path):
    path = make_file(tmp_path, "txt")
    options = ("--sibling", "seq2seq", "--num_sentinels", 5, "--split_digits", "--model_max_length", 99)
    tokenizer, _ = train("--files", path, *options)
    assert tokenizer("25").tokens() == ["2", "5", "</s>"]
    assert (len(sentinel_token_ids(tokenizer)), tokenizer.model_max_length) == (5, 99)


ALGORITHMS = {
    "wordpiece": (train_wordpiece, {"lowercase": True, "strip_accents": True, "min_frequency": 1}),
    "unigram": (train_unigram, {"byte_fallback": True, "limit_alphabet": 20}),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sibling", SIBLINGS)
def test_options_reach_every_algorithm(train, tmp_path, algorithm, sibling):
    path = make_file(tmp_path, "csv")
    learn, options = ALGORITHMS[algorithm]
    words = [
        word for name, value in options.items() for word in ([f"--{name}"] if value is True else [f"--{name}", value])
    ]
    shared = ["--text_column", "sentence", "--sibling", sibling, "--vocab_size", 360]
    tokenizer, out = train("--files", path, "--algorithm", algorithm, *shared, *words)
    expected = learn(SENTENCES, 360, sibling=sibling, show_progress=False, **options)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert f"{algorithm} tokenizer for the {sibling}, saved to" in out
    assert tokenizer.special_tokens_map == expected.special_tokens_map


def test_summary_counts_and_shows_what_is_unknown(train, tmp_path):
    path = write(tmp_path / "a.txt", "papa papa pap\n" * 3 + "été 日\n")
    _, out = train("--files", path, "--algorithm", "wordpiece", "--limit_alphabet", 2)
    assert "2 unknown ('été', '日')" in out
    _, out = train("--files", path)
    assert ", 0 unknown\n" in out


def test_summary_leaves_blank_texts_out(train, tmp_path, monkeypatch):
    monkeypatch.setattr(train_tokenizer, "SAMPLE", 1)
    options = ("--algorithm", "wordpiece", "--vocab_size", 40)
    _, out = train("--files", write(tmp_path / "a.txt", " \n" + "papa\n" * 3), *options)
    assert "first 1 text(s): 1.00 tokens per word, 5.00 bytes per token" in out


def test_a_character_tokenizer_of_a_text_file_knows_its_line_ends(train, tmp_path):
    alphabet = "\n !$&',-.3:;?" + string.ascii_letters
    tokenizer, out = train("--files", write(tmp_path / "a.txt", alphabet), "--algorithm", "character")
    assert tokenizer("hii there\n", add_special_tokens=False).input_ids == [
        46,
        47,
        47,
        1,
        58,
        46,
        43,
        56,
        43,
        0,
    ]
    assert "vocabulary: 70 tokens, 5 of them special" in out


@pytest.mark.parametrize("form", ["folder", "streamed folder", "saved", "saved splits"])
def test_a_dataset_gives_the_tokenizer_of_its_files(train, tmp_path, form):
    expected, _ = train("--files", make_file(tmp_path, "jsonl"), "--text_column", "sentence")
    source = tmp_path / "data"
    rows = datasets.Dataset.from_dict({"sentence": SENTENCES})
    if "folder" in form:
        source.mkdir()
        make_file(source, "jsonl")
    else:
        (datasets.DatasetDict(train=rows) if form == "saved splits" else rows).save_to_disk(source)
    streaming = ["--streaming"] if "streamed" in form else []
    tokenizer, _ = train("--dataset", source, "--text_column", "sentence", *streaming)
    assert tokenizer.get_vocab() == expected.get_vocab()


WRONG = {
    "empty.txt": ("", [], "empty.txt: the file is empty"),
    "blank.txt": (" \n\n", [], "blank.txt: the file is empty"),
    "latin.txt": ("père".encode("latin-1"), [], "byte 0xe8 at offset 1 is not UTF-8"),
    "latin.csv": ("text\npère\n".encode("latin-1"), [], "line 2: byte 0xe8"),
    "column.csv": ("a,b\nx,y\n", [], "no column 'text'; its columns are 'a', 'b': pick one by text_column (--text_c"),
    "number.jsonl": ('{"text": "a"}\n{"text": 3}\n', [], "row 2: the text is 3, expected a string"),
    "rows.csv": ("text\n", [], "holds no rows"),
    "blank.csv": ('text\n" "\n', [], "all 1 texts are empty"),
    "codes.txt": ("maman\n", ["--annotated"], "codes.txt, line 1"),
    "small.txt": ("maman\n", ["--vocab_size", "259"], "vocab_size=259 is too small: it takes at least 260"),
    "kind.txt": ("maman\n", ["--algorithm", "character", "--vocab_size", "50"], "--vocab_size has no meaning"),
    "bytes.txt": ("maman\n", ["--byte_fallback"], "--byte_fallback has no meaning for --algorithm byte_level_bpe"),
    "accents.txt": (
        "maman\n",
        ["--algorithm", "unigram", "--strip_accents"],
        "--strip_accents has no meaning for --algorithm unigram: leave it out",
    ),
    "texts.doc": ("maman\n", [], "unknown extension '.doc'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_one_message(train, tmp_path, name):
    content, options, message = WRONG[name]
    code, out, err = train("--files", write(tmp_path / name, content), *options)
    assert (code, out.strip()) == (2, "")
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not list(tmp_path.glob("tokenizer/*"))


def test_missing_sources_are_one_message(train, tmp_path):
    for arguments, message in [
        ((), "give either --files or --dataset"),
        (("--files", "a.txt", "--dataset", "b"), "give either --files or --dataset"),
        (("--files", tmp_path / "none.txt"), "none.txt: there is no such file"),
        (("--files", tmp_path), "is a folder"),
        (("--files", ""), "--files is empty"),
        (("--dataset", ""), "--dataset is empty"),
        (("--files", tmp_path / "a.txt", "--streaming"), "--streaming reads a --dataset"),
        (("--dataset", tmp_path, "--annotated"), "--annotated is for local files"),
        (("--dataset", tmp_path / "none"), "none"),
        (("--dataset", "nobody/nothing"), "nobody/nothing"),
    ]:
        code, _, err = train(*arguments)
        assert code == 2 and err.startswith("error: ") and message in err


def test_what_is_wrong_with_a_dataset_is_one_message(train, tmp_path):
    rows = datasets.Dataset.from_dict({"sentence": SENTENCES})
    rows.save_to_disk(tmp_path / "column")
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "a.jsonl", '{"text": "a"\nb}')
    (tmp_path / "split").mkdir()
    write(tmp_path / "split" / "a.jsonl", '{"text": "a"}\n')
    for arguments, message in [
        (("column",), "no column 'text'; its columns are 'sentence': pick one by text_column (--text_column)"),
        (("broken",), "JSON"),
        (("split", "--dataset_split", "dev"), "dev"),
    ]:
        code, _, err = train("--dataset", tmp_path / arguments[0], *arguments[1:])
        assert code == 2 and f"error: {tmp_path / arguments[0]}: " in err and message in err


def test_an_output_path_that_cannot_be_written_is_known_before_training(train, tmp_path):
    path = write(tmp_path / "a.txt", "maman\n")
    for output in (path, path / "below"):
        code, out, err = train("--files", path, output=output)
        assert code == 2 and out == ""
        assert err.startswith(f"error: cannot write to {output}: ") and "choose another --output_dir" in err


def test_a_tokenizer_is_replaced_only_if_asked_for(train, tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", "maman\n" * 3), tmp_path / "model"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        write(out / name, "{}")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    monkeypatch.setattr(sys, "argv", ["fratrie train-tokenizer", "--files", str(path), "--output_dir", str(out)])
    with pytest.raises(SystemExit) as stop:
        run(train_tokenizer.main)
    assert stop.value.code == 2 and {file.name: file.read_bytes() for file in out.iterdir()} == before
    train("--files", path, "--vocab_size", "270", output=out)
    assert json.loads((out / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert (out / "model.safetensors").read_bytes() == b"{}" and (out / "config.json").read_bytes() == b"{}"
    assert not [file for file in tmp_path.rglob(".incomplete*")]


def test_a_folder_in_which_a_run_is_writing_is_refused(train, tmp_path):
    path = write(tmp_path / "a.txt", "maman\n" * 3)
    with files.held(tmp_path):
        code, _, err = train("--files", path, output=tmp_path)
    assert code == 2 and err.startswith(f"error: another process is writing in {tmp_path}: ")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--vocab_size", value) for value in ("1000000000", "99999999999999999999", "-1", "0")),
        *(("--min_frequency", value) for value in ("0", "99999999999999999999")),
        *(("--num_sentinels", value) for value in ("-1", "1000000000")),
        *(("--model_max_length", value) for value in ("0", "-5", "99999999999999999999")),
        *(("--encoding", value) for value in ("utf-9", "-1")),
    ],
)
def test_absurd_values_get_a_message(train, tmp_path, option, value):
    code, _, err = train("--files", write(tmp_path / "a.txt", "maman\n"), option, value)
    assert code == 2 and err.startswith("error: ") and re.search(f"{option[2:]}='?{value}", err)


def test_a_read_only_folder_is_known_before_training(train, tmp_path, monkeypatch):
    path, locked = write(tmp_path / "a.txt", "maman\n"), tmp_path / "locked"
    # Not by chmod: root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: (str(path), mode) != (str(locked), os.W_OK))
    code, out, err = train("--files", path, output=locked)
    assert (code, out) == (2, "")
    assert err == f"error: cannot write to {locked}: Permission denied; choose another --output_dir\n"


@pytest.mark.slow
def test_as_a_command(tmp_path):
    def run(*arguments):
        return run_forked(SCRIPT, *arguments)

    text = run("--help").stdout
    assert "Texts: .txt (one per line), .csv" in " ".join(text.split())
    assert "decoder '<s> A'" in " ".join(text.split())
    path = write(tmp_path / "a.txt", "papa maman\n" * 3)
    done = run("--files", path, "--vocab_size", 264, "--output_dir", tmp_path / "out")
    assert (done.returncode, "vocabulary: 264" in done.stdout) == (0, True)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["padding_side"] == "right"
    failed = run("--files", tmp_path / "none.txt", "--output_dir", tmp_path / "out")
    assert (failed.returncode, failed.stdout) == (2, "")
    # Other packages may speak first while they are read.
    assert failed.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in failed.stderr
