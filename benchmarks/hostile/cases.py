"""The material of the runs, sound and odd, and the cases made of it."""

import dataclasses
import datetime
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet
from transformers import BertConfig, BertForMaskedLM, pipeline

import fratrie
from fratrie.data import LABELS
from fratrie.tokenization import train_byte_level_bpe

SCRIPTS = Path(__file__).parents[2] / "scripts"
PERSONS = ("ma mère", "mon père")
TEXTS = [f"on {verb} {who} le {day}" for verb in ("aime", "déteste") for who in PERSONS for day in "12345"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
OVERRIDES = ",".join(f"{name}={value}" for name, value in SIZES.items())


@dataclass(frozen=True)
class Case:
    """A name, and what makes the files of a run in a folder and gives its script and options (or a call)."""

    name: str
    build: Callable[[Path], list[str] | Callable[[], None]]


# ---------------------------------------------------------------------------------------------------- sound material


def make_sound(folder: Path) -> None:
    """Models, tokenizers, tables and a resumable run that are as they should be."""
    torch.manual_seed(0)
    tokenizers = {
        sibling: train_byte_level_bpe(TEXTS, 290, sibling=sibling, num_sentinels=4, show_progress=False)
        for sibling in ("encoder", "decoder", "seq2seq")
    }
    for sibling, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(folder / sibling)
    tokens = {"vocab_size": len(tokenizers["encoder"]), "pad_token_id": 1, "eos_token_id": 2}
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    config = fratrie.FratrieEncoderConfig(**SIZES, **tokens, **names, problem_type="multi_label_classification")
    turned = fratrie.FratrieSeq2SeqConfig(**SIZES, **tokens)
    models = {
        "classifier": fratrie.FratrieEncoderForSequenceClassification(config),
        "body": fratrie.FratrieEncoderForMaskedLM(fratrie.FratrieEncoderConfig(**SIZES, **tokens)),
        "bert": BertForMaskedLM(BertConfig(**SIZES, **tokens, max_position_embeddings=64)),
        "turner": fratrie.FratrieSeq2SeqForConditionalGeneration(turned),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizers["seq2seq" if name == "turner" else "encoder"].save_pretrained(folder / name)
    rows = [
        {"text": text, "labels": ["m" if "mère" in text else "p", "+" if "aime" in text else "-"]} for text in TEXTS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")


RUN = ("--max_steps", "2", "--report_to", "none", "--disable_progress", "true")


def sound_options(script: str, sound: Path) -> list[str]:
    """Options with which a script works."""
    small = ["--config_overrides", OVERRIDES]
    return [str(part) for part in {
        "predict": ["--model", sound / "classifier", "--input_file", sound / "texts.txt", "--output_file", "out.csv"],
        "evaluate": ["--model", sound / "classifier", "--file", sound / "rows.jsonl"],
        "finetune": ["--model_type", "encoder", "--tokenizer", sound / "encoder", "--train_file", sound / "rows.jsonl",
                     "--output_dir", "model", *small, *RUN],
        "pretrain": ["--objective", "mlm", "--tokenizer", sound / "encoder", "--files", sound / "texts.txt",
                     "--block_size", "16", "--output_dir", "model", "--save_steps", "1", *small, *RUN],
        "train_tokenizer": ["--files", sound / "texts.txt", "--vocab_size", "300", "--output_dir", "tokenizer"],
        "convert": ["--from", sound / "bert", "--out", "converted"],
    }[script]]  # fmt: skip


def changed(script: str, sound: Path, **options: str) -> list[str]:
    """A command with some options changed or added."""
    words = sound_options(script, sound)
    for name, value in options.items():
        flag = f"--{name}"
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return [script, *words]


# -------------------------------------------------------------------------------------------------------- the inputs

DEEP = 200_000
TABLES: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"  \n\n \t\n",
    "bom": b"\xef\xbb\xbf",
    "nul": b"text,labels\na\0b,m\n",
    "latin1": "text,labels\nma mère,m\n".encode("latin-1"),
    "utf16": "text,labels\nma mère,m\n".encode("utf-16"),
    "open_quote": b'text,labels\n"ma,m\nmon,p\n',
    "ragged": b"text,labels\na,m,p,x\nb\n" * 5000,
    "header_only": b"text,labels\n",
    "twice": b"text,text,labels\na,b,m\n",
    "no_names": b",,\na,b,m\n",
    "long_field": b"text,labels\n" + b"a" * 200_000 + b",m\n",
    "one_class": b"text,labels\na,m\nb,m\n",
    "numbers": b"text,labels\n1,2\n3,4\n",
    "nan": b"text,labels\nnan,nan\ninf,inf\n",
    "lists": b"text,labels\na,\"['m', 'p']\"\nb,[]\n",
    "half_lists": b"text,labels\na,\"['m', 'p'\"\nb,{m}\n",
    "zeros_and_ones": b'text,labels\na,"0,1,0,1"\nb,"1,0,0,0"\n',
    "choices": b'text,labels\na,"{""choices"": [""m""]}"\nb,p\n',
    "formula": b"text,labels\n=1+1,m\n@x,p\n",
    "sep_line": b"sep=;\ntext;labels\na;m\nb;p\n",
    "comma_in_header": b"Selon vous, qu'est-ce ?;labels\na;m\nb;p\n",
    "codes": b"jm+ Ma phrase\n\njp- Ma phrase\n& suite\n",
    "wrong_codes": b"& suite\nzz+ Phrase\njm Phrase\n" * 3000,
    "array": b'[{"text": "a", "labels": ["m"]}, {"text": "b", "labels": ["p"]}]',
    "array_of_numbers": b"[1, 2, 3]",
    "deep_array": b"[" * DEEP,
    "deep_object": b'{"text": ' * DEEP,
    "deep_cell": b'{"text": "a", "labels": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "huge_number": b'{"text": "a", "labels": ' + b"9" * 5000 + b"}\n",
    "big_number": b'{"text": "a", "labels": 100000000000000000000}\n',
    "nan_json": b'{"text": NaN, "labels": NaN}\n{"text": "a", "labels": Infinity}\n',
    "null": b'{"text": null, "labels": null}\n{"text": "a", "labels": ["m"]}\n',
    "surrogate": b'{"text": "\\ud800", "labels": ["m"]}\n{"text": "b", "labels": ["p"]}\n',
    "surrogate_beside": b'{"text": "a", "labels": ["m"], "x": "\\ud800"}\n{"text": "b", "labels": ["p"]}\n',
    "objects": b'{"text": {"a": 1}, "labels": {"m": 1}}\n',
    "nested": b'{"text": "a", "labels": [["m"], ["p"]]}\n',
    "column_missing_later": b'{"text": "a", "labels": ["m"]}\n{"labels": ["p"]}\n{"txt": "b"}\n',
    "mixed": b'{"text": "a", "labels": "m"}\n{"text": "b", "labels": ["p", 1, null, 2.5]}\n',
    "booleans": b'{"text": "a", "labels": true}\n{"text": "b", "labels": false}\n',
    "same_text": b'{"text": "a", "labels": ["m"]}\n{"text": "a", "labels": ["p"]}\n{"text": "a", "labels": ["m"]}\n',
    "invisible": 'text,labels\na,m\u200b\nb,m\nc,"\ufeffp"\nd, p\n'.encode(),
    "control": b"text,labels\n\x1b[31ma\x07,m\x1b\nb,p\n",
    "binary": bytes(range(256)) * 20,
    "cut_parquet": b"PAR1" + b"\0" * 40 + b"PAR1",
}
EXTENSIONS = ("txt", "csv", "tsv", "json", "jsonl", "parquet", "xlsx")
PLACES = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
}
TABLE_USES = {
    "predict": "input_file", "evaluate": "file", "finetune": "train_file", "train_tokenizer": "files",
    "pretrain": "files", "convert": "vocabulary",
}  # fmt: skip
VALUES = (
    "", " ", "-1", "0", "0.5", "nan", "inf", "-inf", "1e400", "1000000000000000000", "abc", "é\u200b", "{}", "[1",
    "null", "runs/typo", "a/b/c", "--", "there.txt", "there.json",
)  # fmt: skip
FILES: dict[str, Callable[[Path], Any]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: _flip(path),
    "object": lambda path: path.write_text("{}"),
    "list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "deep": lambda path: path.write_text("[" * DEEP),
    "pickle": lambda path: path.write_bytes(b"\x80\x04\x95cposix\nsystem\n(S'touch pwned'\ntR."),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}
FIELD_VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 0.5, True, "abc", "", 10**12, 10**30, [], {}, [1], {"a": 1}, {"0": "a", "2": "b"}, float("nan"),
    float("inf"), "é", ["m", "m", "m", "m"],
)  # fmt: skip
INPUTS: dict[str, Any] = {
    "empty": "", "space": " \n", "none": None, "number": 3, "list": [], "empty_in_list": ["a", ""], "set": {"a"},
    "row": {"text": "a"}, "row_without": {"txt": "a"}, "bytes": b"a", "surrogate": "\ud800", "nul": "a\0b",
    "long": "mot " * 30_000, "one_word": "x" * 50_000, "special": "<s></s><pad><mask>", "nan": float("nan"),
    "mixed": ["a", None], "tuple": ("a", "b"), "emoji": "👩‍👩‍👧🎉", "right_to_left": "\u202eabc", "nested": [["a"]],
}  # fmt: skip


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), max(1, len(data) // 7)):
        data[place] ^= 0x20
    path.write_bytes(bytes(data))


def table_cases(sound: Path) -> Iterator[Case]:
    """Contents under every extension, and what is no file, where a script reads texts."""
    for script, option in TABLE_USES.items():
        for extension in EXTENSIONS:
            for name, content in TABLES.items():
                yield _table_case(script, option, f"{name}.{extension}", lambda p, c=content: p.write_bytes(c), sound)
            for name, place in PLACES.items():
                yield _table_case(script, option, f"{name}.{extension}", place, sound)
    for script in ("predict", "pretrain", "finetune"):
        yield _table_case(script, TABLE_USES[script], "odd_types.parquet", _write_odd_parquet, sound)


def _table_case(script: str, option: str, name: str, make: Callable[[Path], Any], sound: Path) -> Case:
    def build(folder: Path) -> list[str]:
        make(folder / name)
        options = {option: name}
        if script == "pretrain" and len(name) % 2:
            options["streaming"] = "true"
        return changed(script, sound, **options)

    return Case(f"{script}/table/{name}", build)


def _write_odd_parquet(path: Path) -> None:
    now = datetime.datetime(2020, 2, 29, 12)
    columns = {"text": ["a", "b"], "labels": [["m"], ["p"]], "when": [now, None], "day": [now.date()] * 2,
               "price": [Decimal("1.50"), None], "raw": [b"\xff\0", b""], "took": [datetime.timedelta(1), None],
               "deep": [{"a": [{"b": now}]}, None]}  # fmt: skip
    parquet.write_table(pyarrow.table(columns), path)


def option_cases(sound: Path) -> Iterator[Case]:
    """Every option of every script with every odd value."""
    for script in TABLE_USES:
        module = importlib.import_module(f"fratrie.cli.{script}")
        classes = [c for c in vars(module).values() if isinstance(c, type) and dataclasses.is_dataclass(c)]
        kinds = [c for c in classes if c.__name__.endswith(("Options", "Arguments"))]
        assert kinds, script
        for name in sorted({field.name for kind in kinds for field in dataclasses.fields(kind)}):
            for value in VALUES:
                if name == "max_steps" and value[:1] == "1":
                    continue  # a run that long is what was asked for
                yield _option_case(script, name, value, sound)


def _option_case(script: str, name: str, value: str, sound: Path) -> Case:
    def build(folder: Path) -> list[str]:
        (folder / "there.txt").write_text("precious\n")
        (folder / "there.json").write_text('{"precious": 1}\n')
        return changed(script, sound, **{name: value})

    return Case(f"{script}/option/{name}={value}", build)


INDICES: dict[str, Any] = {
    "bin": {"weight_map": {"w": "evil.bin"}}, "outside": {"weight_map": {"w": "../../x.safetensors"}}, "empty": {},
    "absolute": {"weight_map": {"w": "/etc/passwd"}}, "numbers": {"weight_map": {"w": 3}}, "list": [],
}  # fmt: skip
MODEL_USES = {
    "predict": ("classifier", "model"), "evaluate": ("classifier", "model"), "finetune": ("body", "model"),
    "pretrain": ("body", "model"), "convert": ("bert", "from"),
}  # fmt: skip


def folder_cases(sound: Path) -> Iterator[Case]:
    """Folders of models with a file damaged, or with an odd value in one of their JSON files."""
    for script, (source, option) in MODEL_USES.items():
        for file in sorted((sound / source).iterdir()):
            for name, damage in FILES.items():
                yield _folder_case(script, source, option, f"{file.name}:{name}", damage, file.name, sound)
            if file.name.endswith("config.json"):
                for field in json.loads(file.read_text()):
                    for value in FIELD_VALUES:
                        how = lambda p, f=field, v=value: _set(p, f, v)  # noqa: E731
                        name = f"{file.name}:{field}={value!r}"
                        yield _folder_case(script, source, option, name, how, file.name, sound)
        for name, index in INDICES.items():
            how = lambda p, i=index: (p.unlink(), _write_json(p.with_name("model.safetensors.index.json"), i))  # noqa: E731
            yield _folder_case(script, source, option, f"index:{name}", how, "model.safetensors", sound)


def _folder_case(
    script: str, source: str, option: str, name: str, damage: Callable[[Path], Any], file: str, sound: Path
) -> Case:
    def build(folder: Path) -> list[str]:
        shutil.copytree(sound / source, folder / "damaged")
        damage(folder / "damaged" / file)
        words = changed(script, sound, **{option: "damaged"})
        for flag in ("--model_type", "--tokenizer", "--config_overrides"):
            if script in ("finetune", "pretrain") and flag in words:
                del words[words.index(flag) : words.index(flag) + 2]
        return words

    return Case(f"{script}/folder/{name}", build)


def _set(path: Path, field: str, value: Any) -> None:
    _write_json(path, json.loads(path.read_text()) | {field: value})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def checkpoint_cases(sound: Path) -> Iterator[Case]:
    """Checkpoints to resume from with a file damaged, or with an odd value in their state."""
    for file in sorted((sound / "run" / "checkpoint-1").iterdir()):
        for name, damage in FILES.items():
            yield _checkpoint_case(f"{file.name}:{name}", damage, file.name, sound)
        if file.suffix == ".json" and "config" not in file.name:
            for field in json.loads(file.read_text()):
                for value in FIELD_VALUES:
                    how = lambda p, f=field, v=value: _set(p, f, v)  # noqa: E731
                    yield _checkpoint_case(f"{file.name}:{field}={value!r}", how, file.name, sound)


def _checkpoint_case(name: str, damage: Callable[[Path], Any], file: str, sound: Path) -> Case:
    def build(folder: Path) -> list[str]:
        shutil.copytree(sound / "run", folder / "model")
        damage(folder / "model" / "checkpoint-1" / file)
        return changed("pretrain", sound, resume_from_checkpoint="model/checkpoint-1")

    return Case(f"pretrain/checkpoint/{name}", build)


def pipeline_cases(sound: Path) -> Iterator[Case]:
    """Our own pipelines with odd inputs: a result, or a ValueError."""
    for task, model in {"family-relations": "classifier", "text2text-generation": "turner"}.items():
        for name, item in INPUTS.items():
            for batch in (1, 4):
                yield Case(
                    f"{task}/input/{name}*{batch}",
                    lambda _, t=task, m=model, i=item, b=batch: _call(t, sound / m, i, b),
                )


def _call(task: str, model: Path, item: Any, batch: int) -> Callable[[], None]:
    def call() -> None:
        use = pipeline(task, model=str(model))
        try:
            result = use(item, batch_size=batch)
            print(str(result if isinstance(result, list | dict) else list(result))[:200])
        except ValueError as error:
            sys.exit(f"error: {error}")

    return call


def all_cases(sound: Path) -> Iterator[Case]:
    """Every case there is."""
    for make in (table_cases, option_cases, folder_cases, checkpoint_cases, pipeline_cases):
        yield from make(sound)
