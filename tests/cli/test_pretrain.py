import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fratrie  # noqa: F401 (registers its models)
from fratrie.cli import pretrain
from fratrie.cli.running import run
from fratrie.tokenization import train_byte_level_bpe

ROOT = Path(__file__).parents[2]
TEXTS = [f"ma {who} est {how}" for who in ("sœur", "mère", "tante") for how in ("gentille", "absente", "drôle", "là")]
SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe(TEXTS * 3, vocab_size=330, sibling="seq2seq", show_progress=False).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("\n".join(TEXTS * 3) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def script(monkeypatch, capsys, tokenizer):
    """Runs the script in this process; gives its exit code, output and errors."""

    def call(output, objective, *extra, files=None, tokenizer=tokenizer):
        AcceleratorState._reset_state(True)
        named = {"--objective": objective, "--output_dir": output, "--tokenizer": tokenizer, "--files": files}
        given = [part for name, value in named.items() if value is not None for part in (name, value)]
        always = ["--per_device_train_batch_size", 4, "--block_size", 32, "--disable_progress", "--report_to", "none"]
        monkeypatch.setattr(sys, "argv", ["fratrie pretrain", *map(str, [*given, *always, *extra])])
        code = 0
        try:
            run(pretrain.main)
        except SystemExit as ended:
            code = ended.code
        return Done(code, *capsys.readouterr())

    return call


def losses(folder):
    state = json.loads((max(folder.glob("checkpoint-*"), key=str) / "trainer_state.json").read_text())
    return [record["loss"] for record in state["run"]["history"] if "loss" in record]


@pytest.mark.parametrize(
    ("objective", "auto"),
    [("mlm", AutoModelForMaskedLM), ("clm", AutoModelForCausalLM), ("denoise", AutoModelForSeq2SeqLM)],
)
def test_learns_and_leaves_a_complete_folder(tmp_path, script, corpus, objective, auto):
    done = script(
        tmp_path / "run", objective, "--config_overrides", SIZES, "--num_train_epochs", 40, "--learning_rate", 5e-3,
        "--eval_strategy", "epoch", files=corpus,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert json.loads(done.stdout) == metrics
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["eval_loss"] < 0.7 * math.log(330), "far below the uniform guess"
    model, saved = auto.from_pretrained(tmp_path / "run"), AutoTokenizer.from_pretrained(tmp_path / "run")
    assert model.num_parameters() > 5000 and saved("ma sœur")["input_ids"]
    assert model.config.vocab_size == len(saved) == 330
    card = (tmp_path / "run" / "README.md").read_text()
    assert objective in card and "eval_perplexity" in card
    kept = json.loads((tmp_path / "run" / "run_config.json").read_text())
    assert kept["run"]["model"]["objective"] == objective and kept["options"]["learning_rate"] == 5e-3


def test_goes_on_from_checkpoints(tmp_path, script, corpus):
    """Resumed in its folder it is the unbroken run; as `--model` its weights begin a new one."""
    common = ["--config_overrides", f"{SIZES},hidden_dropout=0.1", "--max_steps", 8, "--save_steps", 2]
    common += ["--logging_steps", 1, "--save_total_limit", 9]
    first = script(tmp_path / "run", "mlm", *common, files=corpus)
    assert first.code == 0, first.stderr
    unbroken = losses(tmp_path / "run")
    for step in (6, 8):
        (tmp_path / "run" / f"checkpoint-{step}").rename(tmp_path / f"checkpoint-{step}")
    resumed = script(tmp_path / "run", "mlm", *common, "--resume_from_checkpoint", "last", files=corpus)
    assert resumed.code == 0, resumed.stderr
    assert losses(tmp_path / "run") == unbroken
    other = script(
        tmp_path / "run", "mlm", *common, "--resume_from_checkpoint", "last", "--mask_probability", 0.3,
        files=corpus,
    )  # fmt: skip
    assert other.code == 2 and "collator.mlm_probability: 0.15 then, 0.3 now" in other.stderr
    model = tmp_path / "run"
    further = script(
        tmp_path / "next",
        "mlm",
        "--max_steps",
        1,
        "--learning_rate",
        0,
        "--model",
        model,
        files=corpus,
        tokenizer=None,
    )
    assert further.code == 0, further.stderr
    before = AutoModelForMaskedLM.from_pretrained(model).state_dict()
    after = AutoModelForMaskedLM.from_pretrained(tmp_path / "next").state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())


def test_stream(tmp_path, script, corpus):
    common = ["--config_overrides", SIZES, "--streaming", "--max_steps", 12, "--logging_steps", 1, "--save_steps", 4]
    first = script(
        tmp_path / "run", "clm", *common, "--validation_files", corpus, "--eval_steps", 4, "--eval_strategy", "steps",
        files=corpus,
    )  # fmt: skip
    assert first.code == 0, first.stderr
    assert json.loads(first.stdout)["eval_targets"] > 50


@pytest.mark.parametrize("option", [{"encoding": "cp1252"}, {"delimiter": ";"}, {"dataset_split": "test"},
                                    {"dataset_config": "fr"}, {"text_column": "x"}])  # fmt: skip
def test_how_a_stream_is_read_is_compared_when_it_goes_on(script, corpus, option):
    data = [pretrain.CorpusOptions(files=[corpus], streaming=True, **given) for given in ({}, option)]
    as_before, otherwise = (pretrain._compared(each, {}) for each in data)
    assert "file 1" in as_before
    assert {name: value for name, value in otherwise.items() if as_before[name] != value} == option


def test_a_streamed_dataset_of_a_hub_is_compared_by_its_name(script):
    names = [pretrain.CorpusOptions(dataset=f"somebody/{name}", streaming=True) for name in ("french", "german")]
    assert [pretrain._compared(data, {})["dataset"] for data in names] == ["somebody/french", "somebody/german"]


def empty(folder):
    path = folder / "empty.txt"
    path.write_text("")
    return str(path)


def one_line(folder):
    path = folder / "one.txt"
    path.write_text("une seule ligne\n")
    return str(path)


def latin(folder):
    path = folder / "latin.txt"
    path.write_bytes("ma sœur\nété\n".encode("cp1252"))
    return str(path)


@pytest.mark.parametrize(
    ("make", "extra", "named"),
    [
        (empty, [], "empty.txt"),
        (one_line, [], "one text only"),
        (latin, [], "latin.txt"),
        (lambda folder: str(folder / "gone.txt"), [], "gone.txt"),
        (None, ["--config_overrides", "hiden_size=16"], "hidden_size"),
        (None, ["--model", "/nowhere"], "describe a new model"),
        (None, ["--max_steps", 1, "--resume_from_checkpoint", "last"], "holds no checkpoint"),
        (None, ["--streaming"], "max_steps"),
        (None, ["--warmup_steps", 1000], "warmup_steps=1000"),
        (None, ["--gradient_accumulation_steps", 0], "gradient_accumulation_steps=0"),
        (None, ["--output_dir", "/proc/nothing"], "/proc/nothing"),
    ],
)
def test_bad_input_gets_one_clear_line(tmp_path, script, corpus, make, extra, named):
    files = make(tmp_path) if make else corpus
    small = [] if "--config_overrides" in extra else ["--config_overrides", SIZES]
    done = script(tmp_path / "run", "mlm", *small, *extra, files=files)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert named in line


def test_help_explains_every_option(script, tmp_path):
    done = script(tmp_path, "mlm", "--help")
    assert done.code == 0
    for option in ("--objective", "--block_size", "--gradient_accumulation_steps", "--resume_from_checkpoint"):
        assert option in done.stdout
    assert "SUPPRESS" not in done.stdout
