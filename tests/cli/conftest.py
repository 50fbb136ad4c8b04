"""What the tests of the classification scripts share: a way to run them, texts that can be learnt, a tiny BERT."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from processes import run_forked
from transformers import BertConfig, BertForMaskedLM

from fratrie.tokenization import train_byte_level_bpe

SCRIPTS = Path(__file__).parents[2] / "scripts"
WORDS = {"m": "ma mère", "p": "mon père", "+": "aime", "-": "déteste"}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def sentence(generator):
    """A text and its labels: whom it names, and what it says of them."""
    labels = [generator.choice(["m", "p"]), generator.choice(["+", "-"])]
    if generator.random() < 0.3:
        labels[0] = "mp"
    persons = " et ".join(WORDS[person] for person in labels[0])
    return f"on {WORDS[labels[1]]} {persons} le {generator.integers(1, 9)}", sorted({*labels[0], labels[1]})


def labelled_rows(number, seed):
    generator = np.random.default_rng(seed)
    texts = [sentence(generator) for _ in range(number)]
    return [{"text": text, "labels": labels, "respondent": i // 4} for i, (text, labels) in enumerate(texts)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def run_script(monkeypatch, capsys, caplog):
    """Runs a script in this process; gives its exit code (0 if it ends well), stdout, and stderr after the log."""

    def call(name, *arguments):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / name), *map(str, arguments)])
        caplog.clear()
        code = 0
        try:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        stdout, stderr = capsys.readouterr()
        return code, stdout, "\n".join([*caplog.messages, stderr])

    return call


@pytest.fixture
def run_processes():
    """Runs a script in so many processes on the CPU, as `accelerate launch` does."""

    def call(name, *arguments, processes):
        return run_forked(SCRIPTS / name, *arguments, processes=processes, environment={"ACCELERATE_USE_CPU": "true"})

    return call


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """A folder with train.jsonl, test.jsonl, a tokenizer in tokenizer/ and a BERT without head in bert/."""
    folder = tmp_path_factory.mktemp("samples")
    rows = labelled_rows(120, seed=0)
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "test.jsonl", labelled_rows(32, seed=1))
    tokenizer = train_byte_level_bpe([row["text"] for row in rows], vocab_size=300, show_progress=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    body = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer), max_position_embeddings=48, pad_token_id=1, initializer_range=0.15, **SIZES
        )
    )
    body.save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    return folder
